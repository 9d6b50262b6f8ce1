"""Checks that need torch and transformers. They run in another process, as these imports take seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import sizes_of
from raytune_fsdp.tools.doctor import node, services
from raytune_fsdp.tools.doctor.finding import Finding, failed, many, ok, refused, warning
from raytune_fsdp.tools.doctor.machines import check_kernels
from raytune_fsdp.tools.doctor.own_process import Question, Send
from raytune_fsdp.tools.doctor.storage import CheckpointSizes, more_of

_MOUNT = "run `timeout 5 ls` on it: if it does not end, the mount hangs and has to be mounted again (umount -l, mount)"

_HUB = (
    "run `curl -m 5 -I https://huggingface.co` and `timeout 5 ls` on HF_HOME: what does not end there hangs; with "
    "HF_HUB_OFFLINE=1 the cache alone is asked"
)


def check_with_torch(
    send: Send, config: FinetuneConfig | None, is_local: bool, network: bool, wants_sizes: bool
) -> None:
    """Send which attention will be tried, whether the model is there, the ranks of this machine, and CheckpointSizes.

    Checks that need the fewest imports come first.
    """
    _said(send, "attention", lambda: _kernels(config, is_local))
    if config is None:
        return
    _said(send, "model", lambda: _model(send, config))
    if is_local:
        _said(send, "resources", lambda: _processes(config, network))
    if wants_sizes:
        size: int | None = None
        with suppress(Exception):  # of many types; the check of the model reports what is wrong with it
            size = services.checkpoint_bytes(config)
        send(CheckpointSizes(size, more_of(config)))


def _said(send: Send, check: str, work: Callable[[], list[Finding]]) -> None:
    try:
        found = work()
    except Exception as error:
        found = [failed(check, error)]
    send(found)


def _kernels(config: FinetuneConfig | None, is_local: bool) -> list[Finding]:
    device = config.cluster.device if config else None
    asked, gpus = config.model.attention if config else "auto", bool(node.look(try_torch=False)["gpus"])
    on_gpus = device == "cuda" or (device != "cpu" and gpus)
    elsewhere = device != "cpu" and not (gpus or is_local)
    return check_kernels(asked, device="cuda" if on_gpus else "cpu", elsewhere=elsewhere)


def _model(send: Send, config: FinetuneConfig) -> list[Finding]:
    from raytune_fsdp.model.directory.files import is_local  # imported before the question's clock runs

    path = config.model.path
    if path is not None:
        where, hung = ("", _MOUNT) if is_local(path) else (" (of the hub, or its cache in HF_HOME)", _HUB)
        send(Question("model", f"model.path={path}{where}", hung))
    found = services.check_model(config)
    send(Question("model"))
    return found


def _processes(config: FinetuneConfig, network: bool) -> list[Finding]:
    from raytune_fsdp.launch.local import world_size

    try:
        world = sizes_of(config, world_size(config))[0]
    except ConfigError as error:
        return [refused("resources", error)]
    not_measured = warning(
        "network",
        "not measured: without Ray nobody here starts processes on several machines",
        "measure on a Ray cluster of the same machines, or with nccl-tests",
    )
    return [
        ok("Ray", "cluster.launch=local does without it"),
        ok("resources", f"{many(world, 'process')} on this machine"),
        *([not_measured] if network else []),
    ]
