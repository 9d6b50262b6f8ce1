"""Run a function on several ranks: processes forked from a server that has imported torch and transformers once."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["torch", "torch.distributed.checkpoint", "transformers", "tests.preload"]


def run_ranks(function: Callable[..., Any], world: int, *args: Any, seconds: float = 240) -> list[Any]:
    """`[function(*args) on each rank]`, with a gloo process group. The function must be importable.

    A rank that raises fails the test with its traceback; ranks that are still running then are killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    cloud = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, function, rank, world, store, args, cloud), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    rank_of = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if rank_of[id(pipe)] not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[rank_of[id(pipe)] for pipe in waiting]} have not ended after {seconds} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = rank_of[id(pipe)]
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not ok:
                raise AssertionError(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection, function: Callable[..., Any], rank: int, world: int, store: str, args: Any, cloud: Any
) -> None:
    os.environ.update(cloud)  # the server has the environment of its own start
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # a rank that failed must not wait for the others in a destructor
