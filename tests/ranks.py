"""Run a function on several ranks: processes forked from a server that has imported torch and transformers once.

`run_ranks` forks processes for this call alone, so that a function may patch modules, change the environment, kill its
rank, and measure its memory. `resident_ranks` has it done by processes that take one call after another: it saves the
fork and everything that a process does for the first time, and is for functions that only train.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = ["torch", "torch.distributed.checkpoint", "transformers", "tests.preload"]
MOST_CALLS = 200
"""After so many a resident rank is replaced, and so it is once it holds `MOST_BYTES`."""
MOST_BYTES = 1200 << 20
_SETTLE_SECONDS = 5.0
"""Threads of a run, such as a reader's, have so long to end after it."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, seconds: float = 240) -> list[Any]:
    """`[function(*args) on each rank]`, with a gloo process group. The function must be importable.

    A rank that raises fails the test with its traceback; ranks that are still running then are killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        ranks = [_Rank.start(_once) for _ in range(world)]
        try:
            for number, rank in enumerate(ranks):
                rank.pipe.send(_Call(function, args, number, world, os.path.join(directory, "store"), _cloud()))
            # Nobody ends before all have: gloo connects late, and a rank whose peer has gone says so.
            return _collect(ranks, seconds)
        finally:
            for rank in ranks:
                rank.end()


def resident_ranks(function: Callable[..., Any], world: int, *args: Any, seconds: float = 240) -> list[Any]:
    """`run_ranks` for a function that leaves its process as it was: it patches nothing, and kills nobody.

    What it finds is what it would find in a process of its own: a new process group, no cached placements, torch's
    settings and random state, and the environment as they were in the beginning.
    """
    if _cloud() != _CLOUD or not _POOL.lock.acquire(blocking=False):  # clients of stores live on; a thread has the pool
        return run_ranks(function, world, *args, seconds=seconds)
    try:
        return _POOL.run(function, world, args, seconds)
    finally:
        _POOL.lock.release()


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world: int
    store: str
    cloud: dict[str, str]
    directory: str = field(default_factory=os.getcwd)


def _cloud() -> dict[str, str]:
    """What ranks need to know of our environment: the server has that of its own start."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


_CLOUD = _cloud()


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(cls, target: Callable[[Connection], None]) -> _Rank:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()

    def death(self) -> str:
        """How the process ended, which has closed its pipe."""
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            return "its pipe is closed, and it lives"
        named = code < 0 and -code in set(signal.Signals)
        return signal.Signals(-code).name if named else f"exit code {code}"


class _Pool:
    """Ranks of this process that take one call after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._ranks: list[_Rank] = []
        self._calls = 0
        self._stores: tempfile.TemporaryDirectory[str] | None = None
        """Kept until all ranks have ended: a `FileStore` writes to its file when it is destroyed, even after the call,
        and without the directory that takes it 300 s. The first call makes it, as ranks import this module, too."""
        self._used: Sequence[_Rank] = ()
        """Of those that did the last call: each says then whether it is as it was."""

    def run(self, function: Callable[..., Any], world: int, args: Any, seconds: float) -> list[Any]:
        self._settle(seconds)
        while len(self._ranks) < world:
            self._ranks.append(_Rank.start(_serve))
        chosen = self._ranks[:world]
        self._stores = self._stores or tempfile.TemporaryDirectory()
        store = os.path.join(self._stores.name, f"store-{self._calls}")
        try:
            for number, rank in enumerate(chosen):
                rank.pipe.send(_Call(function, args, number, world, store, {}))
            found: list[Any] | _AllRaisedError
            try:
                found = _collect(chosen, seconds)
            except _AllRaisedError as error:
                found = error
            for rank in chosen:
                rank.pipe.send(None)  # all have ended: leave the group
        except BaseException:
            self.end()  # one that failed, or hangs, leaves the others in the middle of something
            raise
        self._used = chosen
        if isinstance(found, _AllRaisedError):
            raise found
        return found

    def _settle(self, seconds: float) -> None:
        """Wait until all have cleaned up after the last call; start new ones if one could not, or has grown."""
        self._calls += 1
        used, self._used = self._used, ()
        try:
            clean = all(_collect(used, seconds)) if used else True
        except (AssertionError, TimeoutError):
            clean = False
        alive = all(rank.process.is_alive() for rank in self._ranks)
        if not clean or not alive or self._calls >= MOST_CALLS:
            self.end()

    def end(self) -> None:
        ranks, self._ranks, self._used, self._calls = self._ranks, [], (), 0
        for rank in ranks:
            rank.end()
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None


_POOL = _Pool()
atexit.register(_POOL.end)


def _collect(ranks: Sequence[_Rank], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    number_of = {id(rank.pipe): number for number, rank in enumerate(ranks)}
    deadline = time.monotonic() + seconds
    while len(results) < len(ranks):
        waiting = [rank.pipe for number, rank in enumerate(ranks) if number not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [number_of[id(pipe)] for pipe in waiting]
            raise TimeoutError(f"ranks {late} have not ended after {seconds} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = number_of[id(pipe)]
            answer = _heard(ranks, number)
            if not answer[0]:
                all_raised = _all_raise(ranks, [each for each in range(len(ranks)) if each not in (number, *results)])
                error = _AllRaisedError if all_raised and not results else AssertionError
                raise error(f"rank {number} of {len(ranks)} failed:\n{answer[1]}")
            results[number] = answer[1]
    return [results[number] for number in range(len(ranks))]


class _AllRaisedError(AssertionError):
    """All ranks have raised by themselves, as at a config that is refused: none is in the middle of something."""


def _all_raise(ranks: Sequence[_Rank], numbers: Sequence[int]) -> bool:
    """Whether these raise within a second, too.

    Raises if one has died: the failure of another one, which may be heard first, follows from that.
    """
    waiting = {ranks[number].pipe: number for number in numbers}
    deadline = time.monotonic() + 1
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            if _heard(ranks, waiting.pop(pipe))[0]:
                return False
    return not waiting


def _heard(ranks: Sequence[_Rank], number: int) -> tuple[bool, Any]:
    """What a rank has sent. Raise if it has died."""
    try:
        answer: tuple[bool, Any] = ranks[number].pipe.recv()
    except (EOFError, ConnectionResetError):
        raise AssertionError(f"rank {number} died without a word: {ranks[number].death()}") from None
    return answer


def _once(pipe: Connection) -> None:
    call = pipe.recv()
    os.environ.update(call.cloud)
    _do(pipe, call)
    with suppress(EOFError, OSError):
        pipe.recv()  # until the others have ended
    os._exit(0)  # a rank that failed must not wait for the others in a destructor


def _serve(pipe: Connection) -> None:
    import gc

    import torch

    from tests.remembered import remember_needs

    remember_needs()
    gc.freeze()  # what was imported is not looked through after every call
    torch.set_num_threads(1)
    begun = _State()
    while True:
        try:
            call = pipe.recv()
            with begun.kept():
                _do(pipe, call)
                pipe.recv()
            pipe.send((True, begun.left_clean()))
        except (EOFError, OSError):
            os._exit(0)


def _do(pipe: Connection, call: _Call) -> None:
    """Call the function in a process group, and send what it returns, or its traceback."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a crash in native code says where, among what the test's processes have printed
    torch.set_num_threads(1)
    os.chdir(call.directory)
    store = dist.FileStore(call.store, call.world)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world)
    try:
        answer = (True, call.function(*call.args))
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        pipe.send(answer)
    except OSError:
        os._exit(0)  # nobody waits for it any more
    except BaseException:
        pipe.send((False, traceback.format_exc()))  # it cannot be sent


class _State:
    """The state of a process that a function finds, and has to find again in the next call."""

    def __init__(self) -> None:
        import numpy
        import torch

        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._random = (numpy.random.get_state(), torch.get_rng_state())
        self._threads = threading.active_count()

    @contextmanager
    def kept(self) -> Iterator[None]:
        import torch

        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        self._draw_again()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        try:
            yield
        finally:
            self._leave()

    def _draw_again(self) -> None:
        import numpy
        import torch

        of_numpy, of_torch = self._random
        random.seed()  # as a fork does
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

    def _leave(self) -> None:
        import gc

        import torch.distributed as dist
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        os.chdir(self._directory)
        if dist.is_initialized():
            dist.destroy_process_group()
        # Results of operations on DTensors, by the shape of their mesh: they name groups that are gone.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        gc.collect()

    def left_clean(self) -> bool:
        """Whether no thread of the last function is left, and not too much memory."""
        import psutil

        deadline = time.monotonic() + _SETTLE_SECONDS
        while threading.active_count() > self._threads and time.monotonic() < deadline:
            time.sleep(0.02)
        return threading.active_count() <= self._threads and psutil.Process().memory_info().rss < MOST_BYTES
