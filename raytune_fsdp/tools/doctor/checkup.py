"""Make all checks, at the same time. They share one deadline: what has not ended by then counts as not checked.

This process imports nothing heavy and asks only the storage and the machine itself. What imports torch, Ray or MLflow,
or waits for a server, runs in another process (own_process.py), so that nothing can hold this one up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.shared_storage import Token, put_token
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.checks import check_first
from raytune_fsdp.tools.doctor import machines, node, own_process, services, storage
from raytune_fsdp.tools.doctor.cluster import ALONE, check_cluster
from raytune_fsdp.tools.doctor.deadline import TICK, Asked, Deadline
from raytune_fsdp.tools.doctor.finding import SLOW, Finding, failed, not_checked, ok, problem, refused, warning
from raytune_fsdp.tools.doctor.own_process import Question, Send
from raytune_fsdp.tools.doctor.storage import CheckpointSizes
from raytune_fsdp.tools.doctor.with_torch import check_with_torch

logger = logging.getLogger(__name__)

_TOKEN_SECONDS, _ALONE_SECONDS = 3.0, 2.0
"""How long storage is written to before anything else begins, as imports would read from it meanwhile: first for its
token, then for its speed."""
_LOOK_SECONDS, _JUDGE_SECONDS, _CLEAN_SECONDS = 2.0, 0.5, 0.7
"""Seconds left before the deadline after this machine has looked at itself, and after another process has ended; and
seconds after the deadline to remove what was written."""
_NETWORK_SECONDS = 180.0
_HUNG_STORAGE = (
    "run `timeout 5 ls` on it: if it does not end, the mount hangs and has to be mounted again (umount -l, mount); if "
    "it does, storage is very busy: run doctor again"
)
_AGAIN = "look at the load (uptime) and run doctor again when the machine is less busy"
_WITH_TORCH = "`time python -c 'import torch, transformers'` shows what imports take here; then run doctor again"
_HUNG_SERVER = (
    "start the server again, or set tracking.mlflow.uri to another one (tracking.mlflow.enabled=false does without)"
)
_HUNG_STORE = "check the address of the store (AWS_ENDPOINT_URL, ?endpoint_override=), and the proxy on the way"


@dataclass(slots=True)
class _Check:
    name: str
    outcome: Future[list[Finding]]
    deadline: Deadline
    alone: str
    """How to make this check without the others."""
    asked: Asked = field(default_factory=Asked)
    hung: str = ""
    """What to do if what the check asks does not answer."""

    def is_over(self) -> bool:
        return self.outcome.done() or self.asked.hangs() or not self.deadline.left()

    def found(self) -> list[Finding]:
        if self.outcome.done():
            error = self.outcome.exception()
            return self.outcome.result() if error is None else [failed(self.name, error)]
        if self.asked.hangs():
            return [problem(self.name, f"{self.asked.what} has not answered for {self.asked.seconds:.0f} s", self.hung)]
        return [not_checked(self.name, self.deadline.seconds, SLOW, self.alone)]


@dataclass(slots=True)
class Checkup:
    """The checks of a machine, of the cluster that a run would join, and of the run itself if there is a config."""

    config: FinetuneConfig | None
    network: bool = False
    nominal: float | None = None
    began: float = field(default_factory=time.monotonic)
    """When the command began."""
    _deadline: Deadline = field(init=False)
    _sizing: Future[CheckpointSizes | None] = field(default_factory=Future)
    """None if it took too long."""
    _begun: list[_Check] = field(default_factory=list)
    _cleaning: Future[None] | None = None

    def __post_init__(self) -> None:
        self._deadline = Deadline.of(self.began)

    def findings(self) -> list[Finding]:
        config = self.config
        if config is None:
            return self._all(None)
        place = RunDir.of(config)
        asked = Asked()
        asked.begin(f"run.storage={config.run.storage}")
        putting = in_thread(partial(put_token, place.path, "this command"), "storage")
        self._until(lambda: putting.done() or asked.seconds >= _TOKEN_SECONDS, asked)
        if not putting.done():
            late = partial(_late_token, putting, place, asked)
            return self._all(None, self._begin("storage", late, _AGAIN, asked, _HUNG_STORAGE))
        if (error := putting.exception()) is not None:
            return [storage.refusal(error), *self._all(None)]
        token = putting.result()
        try:
            return self._all(token)
        finally:
            # In a thread: storage that was written to before may hang now.
            self._cleaning = in_thread(partial(storage.clean, token, place), "storage")
            wait([self._cleaning], timeout=self._deadline.left() + _CLEAN_SECONDS)

    def hangs(self) -> bool:
        """Return whether some check still waits for something that does not answer or is slow."""
        cleaning = self._cleaning is not None and not self._cleaning.done()
        return cleaning or any(not check.outcome.done() for check in self._begun)

    def _all(self, token: Token | None, *others: _Check) -> list[Finding]:
        # Storage begins first, and is shown last.
        stored = list(self._of_storage(self.config, token)) if self.config is not None and token is not None else []
        stored = [*others, *stored]
        checks = [*self._of_machine(), self._with_torch(token), *self._of_cluster(token)]
        asked = self._of_services(self.config) if self.config is not None else ()
        self._begun += [*checks, *asked, *stored]
        self._until(lambda: all(check.is_over() for check in self._begun), *(check.asked for check in self._begun))
        return [finding for check in self._begun for finding in check.found()]

    def _until(self, is_over: Callable[[], bool], *asked: Asked) -> None:
        """Wait, and add up for how long each question was not answered while this process ran."""
        while not is_over():
            began = time.monotonic()
            time.sleep(TICK)
            for each in asked:
                each.tick(time.monotonic() - began)

    def _begin(
        self, name: str, work: Callable[[], list[Finding]], alone: str, asked: Asked | None = None, hung: str = ""
    ) -> _Check:
        return _Check(name, in_thread(work, name), self._deadline, alone, asked or Asked(), hung)

    def _of_machine(self) -> Iterator[_Check]:
        look = partial(node.look, seconds=max(1.0, self._deadline.left() - _LOOK_SECONDS))
        here = self.config if self._is_local() else None

        def judged() -> list[Finding]:
            found = look()
            limits = machines.check_limits(found, "this machine")
            shm = f"/dev/shm {found['shm'] / 2**30:.1f} GiB, " if found["shm"] is not None else ""
            enough = f"this machine: {shm}up to {found['open_files'][1]:,} open files"
            return [
                *machines.check_versions(found, machines.own_requirements()),
                *machines.check_gpus(found, "this machine", device=here.cluster.device if here else None),
                *(machines.check_bf16(found, "this machine", here.parallel.precision) if here else []),
                *(limits or [ok("limits", enough)]),
            ]

        yield self._begin("machine", judged, f"run nvidia-smi: if it hangs, the driver does (reboot); {_AGAIN}")

    def _is_local(self) -> bool:
        return self.config is not None and (self.config.cluster.launch == "local" or find_spec("ray") is None)

    def _of_cluster(self, token: Token | None) -> Iterator[_Check]:
        if self._is_local():
            return  # without Ray, its checks need torch
        if find_spec("ray") is None:
            said = "it is not installed: runs start processes on this machine only"
            fix = "pip install 'ray[data,train]==2.60.0'"
            yield self._begin("Ray", lambda: [warning("Ray", said, fix)], ALONE)
            return
        arguments = (self.config, token, self.network, self.nominal)
        yield self._in_process(check_cluster, *arguments, checks={"Ray": ALONE}, network=self.network)

    def _with_torch(self, token: Token | None) -> _Check:
        is_local = self._is_local()
        names = ["attention", *(["model"] if self.config else []), *(["resources"] if is_local else [])]

        def work() -> list[Finding]:
            try:
                return own_process.run_apart(
                    check_with_torch, self.config, is_local, self.network, token is not None,
                    checks=dict.fromkeys(names, _WITH_TORCH), deadline=self._deadline.sooner(2 * _JUDGE_SECONDS),
                    take=lambda sizes: self._sizing.set_result(sizes if isinstance(sizes, CheckpointSizes) else None),
                )  # fmt: skip
            finally:
                if not self._sizing.done():
                    self._sizing.set_result(None)

        return self._begin("attention", work, _WITH_TORCH)

    def _in_process(
        self, work: Callable[..., None], *arguments: Any, checks: Mapping[str, str], network: bool = False
    ) -> _Check:
        deadline = Deadline(self.began, time.monotonic() + _NETWORK_SECONDS) if network else self._deadline
        within = deadline.sooner(_JUDGE_SECONDS)
        name, alone = next(iter(checks.items()))
        asking = partial(own_process.run_apart, work, *arguments, within, checks=checks, deadline=within)
        return _Check(name, in_thread(asking, name), deadline, alone)

    def _of_services(self, config: FinetuneConfig) -> Iterator[_Check]:
        if services.is_server_asked(config):
            alone = "ask it without MLflow (curl -m 5 ADDRESS/health), or run doctor again"
            yield self._in_process(
                _ask, services.check_mlflow, config, "MLflow", _HUNG_SERVER, checks={"MLflow": alone}
            )
        else:
            yield self._begin("MLflow", partial(services.check_mlflow, config), _AGAIN)
        if is_url(place := RunDir.of(config).checkpoints):
            yield self._in_process(
                _ask, storage.check_object_store, place, "store", _HUNG_STORE, checks={"store": _AGAIN}
            )

    def _of_storage(self, config: FinetuneConfig, token: Token) -> Iterator[_Check]:
        asked = Asked()
        measuring = in_thread(partial(storage.measure, config, token, asked), "storage")
        alone = Deadline(self.began, time.monotonic() + _ALONE_SECONDS)
        self._until(lambda: measuring.done() or not alone.left(), asked)

        def judged() -> list[Finding]:
            written, sizes = measuring.result(), self._sizing.result()
            found = storage.judge_writing(config, written, sizes or CheckpointSizes(None, None))
            if sizes is not None:
                return found
            late = not_checked("room", self._deadline.seconds, f"how large a checkpoint is; {SLOW}", _WITH_TORCH)
            return [*(each for each in found if each.check != "room"), late]

        yield self._begin("storage", judged, _AGAIN, asked, _HUNG_STORAGE)
        yield self._begin("config", partial(_first, config), "raytune-fsdp plan checks it alone, without its storage")
        yield self._begin(
            "run", partial(storage.check_lock, config), "none is needed: a start listens for another command itself"
        )


def _ask(
    send: Send, check: Callable[..., list[Finding]], what: FinetuneConfig | str, name: str, hung: str, _: Deadline
) -> None:
    """Make a check of a server. `hung`: what to do if that does not answer."""
    send(check(what, lambda asked: send(Question(name, asked, hung))))


def _late_token(putting: Future[Token], place: RunDir, asked: Asked) -> list[Finding]:
    """Report that a mount which hung, or was very busy, came back before this command ended."""
    wait([putting])
    asked.answered()
    if (error := putting.exception()) is not None:
        return [storage.refusal(error)]
    storage.clean(putting.result(), place)
    said = (
        f"the first small file took more than {_TOKEN_SECONDS:g} s, so its speed, its room and the run were not checked"
    )
    return [warning("storage", said, _AGAIN)]


def _first(config: FinetuneConfig) -> list[Finding]:
    """Check what every start refuses at once, by the same function."""
    try:
        place = check_first(config, config.cluster.fewest)
    except RaytuneError as error:
        return [refused("config", error)]
    return [ok("config", f"nothing in it is refused; the run is {place.path}")]


# The cheap checks, made while every run starts: they only warn of what is wrong with this machine.


def look_around() -> None:
    """Begin to look in a thread, and warn of what is found. The run's start does not wait for it."""
    in_thread(_look, "look-around")


def _look() -> None:
    """Check versions, `/dev/shm` and open files, which needs no cluster, torch or driver."""
    facts = node.look(try_torch=False)
    versions = machines.check_versions(facts, machines.own_requirements())
    for finding in [*versions, *machines.check_limits(facts, "this machine")]:
        if finding.status != "ok":
            logger.warning("%s; to mend it: %s", finding.found, finding.fix)
