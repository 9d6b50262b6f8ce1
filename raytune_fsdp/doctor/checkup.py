"""All checks, begun together; each is waited for only as long as it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.doctor import beside, machines, node, services, storage
from raytune_fsdp.doctor.cluster import check_cluster
from raytune_fsdp.doctor.finding import Finding, failed, many, ok, problem, refused, warning
from raytune_fsdp.doctor.kernels import check_kernels
from raytune_fsdp.errors import ConfigError, RaytuneError
from raytune_fsdp.launch.shared_storage import Token, put_token
from raytune_fsdp.plan import sizes_of
from raytune_fsdp.run.checks import check_first
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.threads import in_thread
from raytune_fsdp.urls import is_url

_TOKEN_SECONDS, _SECONDS, _LONG_SECONDS, _NETWORK_SECONDS = 3.0, 8.0, 13.0, 180.0
"""Under 20 s with the imports: the token of the storage comes first, everything else runs at the same time. The long
ones: a cluster, drivers of GPUs, and a lock, whose owner may beat for 10 s."""
_ALONE_SECONDS = 2.0
"""How long storage is written to before anything else begins: imports would read from it meanwhile."""
_HUNG_MOUNT = "a mount that hangs has to be mounted again (umount -l, mount); then run doctor again"
_HUNG_RAY = (
    "look whether the head lives (ray status there) and whether a firewall is between; RAY_ADDRESS=local makes a run "
    "start a Ray of its own"
)


@dataclass(slots=True)
class _Check:
    name: str
    hung: str
    """What to do if it does not end."""
    outcome: Future[list[Finding]]
    seconds: float = _SECONDS


@dataclass(slots=True)
class Checkup:
    """The checks of a machine, of the cluster that a run would join, and of the run itself if there is a config."""

    config: FinetuneConfig | None
    network: bool = False
    nominal: float | None = None
    _began: float = field(default_factory=time.monotonic)
    _sizing: Future[int | None] = field(default_factory=Future)
    """The bytes of a checkpoint, once they are known."""
    _imports: list[Future[None]] = field(default_factory=list)
    """Of what several checks need: of two threads that import transformers at once, one finds it half there."""
    _begun: list[_Check] = field(default_factory=list)

    def findings(self) -> list[Finding]:
        config = self.config
        if config is None:
            return list(self._all(None))
        place = RunDir.of(config)
        putting = in_thread(partial(put_token, place.path, "this command"), "storage")
        if not wait([putting], timeout=_TOKEN_SECONDS).done:
            said = f"run.storage={config.run.storage} does not answer within {_TOKEN_SECONDS:g} s"
            putting.add_done_callback(partial(_clean_late, place))
            return [problem("storage", said, _HUNG_MOUNT), *self._all(None)]
        if (error := putting.exception()) is not None:
            return [storage.refusal(error), *self._all(None)]
        token = putting.result()
        try:
            return list(self._all(token))
        finally:
            storage.clean(token, place)

    def hangs(self) -> bool:
        """Whether something still waits for what does not answer."""
        return any(not check.outcome.done() for check in self._begun)

    def _all(self, token: Token | None) -> Iterator[Finding]:
        # Begun first, and shown last.
        stored = list(self._of_storage(self.config, token)) if self.config is not None and token is not None else []
        if self.config is not None:
            self._imports.append(in_thread(_import, "imports"))
        checks = [*self._of_machine(), *self._of_cluster(token)]
        if self.config is not None:
            checks += self._of_services(self.config)
        checks += stored
        self._begun = checks
        for check in checks:
            left = max(0.0, self._began + _TOKEN_SECONDS + check.seconds - time.monotonic())
            if not wait([check.outcome], timeout=left).done:
                yield problem(check.name, "this check did not end in time", check.hung)
            elif (error := check.outcome.exception()) is not None:
                yield failed(check.name, error)
            else:
                yield from check.outcome.result()

    def _of_machine(self) -> Iterator[_Check]:
        config = self.config
        device = config.cluster.device if config else None
        facts = in_thread(node.look, "facts")

        def judged() -> list[Finding]:
            found = facts.result()
            limits = machines.check_limits(found, "this machine")
            here = config if self._is_local() else None
            return [
                *machines.check_versions(found, machines.own_requirements()),
                *machines.check_gpus(found, "this machine", device=here.cluster.device if here else None),
                *(machines.check_bf16(found, "this machine", here.parallel.precision) if here else []),
                *(limits or [ok("limits", _limits(found))]),
            ]

        def kernels() -> list[Finding]:
            wait(self._imports)
            asked, gpus = config.model.attention if config else "auto", bool(facts.result()["gpus"])
            on_gpus = device == "cuda" or (device != "cpu" and gpus)
            elsewhere = device != "cpu" and not (gpus or self._is_local())
            return check_kernels(asked, device="cuda" if on_gpus else "cpu", elsewhere=elsewhere)

        yield _begin(
            "machine", judged, "run nvidia-smi: if it hangs, the driver does; reboot the machine", _LONG_SECONDS
        )
        yield _begin(
            "attention",
            kernels,
            "python -c 'import torch' has to end within seconds: look at the disk it is on",
            _LONG_SECONDS,
        )

    def _is_local(self) -> bool:
        return self.config is not None and (self.config.cluster.launch == "local" or find_spec("ray") is None)

    def _of_cluster(self, token: Token | None) -> Iterator[_Check]:
        if self._is_local():
            yield _begin("resources", self._without_ray, _HUNG_RAY, _LONG_SECONDS)
            return
        if find_spec("ray") is None:
            yield _begin(
                "Ray",
                lambda: [
                    warning(
                        "Ray",
                        "it is not installed: runs start processes on this machine only",
                        "pip install 'ray[data,train]==2.60.0'",
                    )
                ],
                _HUNG_RAY,
            )
            return
        # What the storage has not taken of its time is the cluster's.
        left = self._began + _TOKEN_SECONDS + _LONG_SECONDS - time.monotonic()
        seconds = _NETWORK_SECONDS if self.network else round(left, 1)
        arguments: tuple[Any, ...] = (check_cluster, self.config, token, self.network, self.nominal)
        yield _begin(
            "Ray", partial(beside.run, *arguments, check="Ray", seconds=seconds, hung=_HUNG_RAY), _HUNG_RAY, seconds + 1
        )

    def _without_ray(self) -> list[Finding]:
        assert self.config is not None
        wait(self._imports)
        from raytune_fsdp.launch.local import world_size

        try:
            world = sizes_of(self.config, world_size(self.config))[0]
        except ConfigError as error:
            return [refused("resources", error)]
        found = [
            ok("Ray", "cluster.launch=local does without it"),
            ok("resources", f"{many(world, 'process')} on this machine"),
        ]
        if self.network:
            found.append(
                warning(
                    "network",
                    "not measured: without Ray nobody here starts processes on several machines",
                    "measure on a Ray cluster of the same machines, or with nccl-tests",
                )
            )
        return found

    def _of_services(self, config: FinetuneConfig) -> Iterator[_Check]:
        def check() -> list[Finding]:
            wait(self._imports)
            self._sizing.set_result(_checkpoint_bytes(config))
            return services.check_model(config)

        yield _begin("model", check, _HUNG_MOUNT, _LONG_SECONDS)
        yield _begin(
            "MLflow",
            partial(services.check_mlflow, config),
            "start the server again, or set tracking.mlflow.uri to another one (tracking.mlflow.enabled=false does "
            "without)",
        )
        if is_url(place := RunDir.of(config).checkpoints):
            yield _begin(
                "store",
                partial(storage.check_object_store, place),
                "check the address of the store (AWS_ENDPOINT_URL, ?endpoint_override=), and the proxy on the way",
            )

    def _of_storage(self, config: FinetuneConfig, token: Token) -> Iterator[_Check]:
        measuring = in_thread(partial(storage.measure, config, token), "storage")
        wait([measuring], timeout=_ALONE_SECONDS)

        def judged() -> list[Finding]:
            written = measuring.result()
            wait([self._sizing], timeout=_LONG_SECONDS - 1)
            return storage.judge_writing(config, written, self._sizing.result() if self._sizing.done() else None)

        yield _begin("storage", judged, _HUNG_MOUNT, _LONG_SECONDS)
        yield _begin("config", partial(_first, config), _HUNG_MOUNT)
        yield _begin("run", partial(storage.check_lock, config), _HUNG_MOUNT, _LONG_SECONDS)


def _import() -> None:
    import raytune_fsdp.launch.local  # noqa: F401


def _clean_late(place: RunDir, late: Future[Token]) -> None:
    """A mount that hung came back before this command has ended."""
    if late.exception() is None:
        storage.clean(late.result(), place)


def _begin(name: str, work: Callable[[], list[Finding]], hung: str, seconds: float = _SECONDS) -> _Check:
    return _Check(name, hung, in_thread(work, name), seconds)


def _first(config: FinetuneConfig) -> list[Finding]:
    """What every start refuses at once, by the function that does it there."""
    workers = config.cluster.fewest
    try:
        place = check_first(config, workers if workers is not None else None)
    except RaytuneError as error:
        return [refused("config", error)]
    return [ok("config", f"nothing in it is refused; the run is {place.path}")]


def _checkpoint_bytes(config: FinetuneConfig) -> int | None:
    try:
        return services.checkpoint_bytes(config)
    except Exception:  # of many types; what is wrong with the model is said by the check of the model
        return None


def _limits(facts: machines.Facts) -> str:
    shm = f"/dev/shm {facts['shm'] / 2**30:.1f} GiB, " if facts["shm"] is not None else ""
    return f"this machine: {shm}up to {facts['open_files'][1]:,} open files"
