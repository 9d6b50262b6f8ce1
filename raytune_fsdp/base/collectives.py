"""Do work on one rank or on all with one outcome for all: if it fails, it fails on every rank, and none waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from raytune_fsdp.base.errors import RaytuneError, TransientError

T = TypeVar("T")


def on_rank0(work: Callable[[], T], *, what: str) -> T:
    """Call `work` on rank 0; return its result, or raise its error, on every rank. Collective.

    `what` follows "rank 0 could not" in the error if the system refuses.
    """
    box: list[tuple[T | None, RaytuneError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            box[0] = (work(), None)
        except RaytuneError as error:
            box[0] = (None, error)
        except OSError as error:
            # Not the error itself: other libraries have subclasses that cannot be unpickled on the other ranks.
            box[0] = (None, TransientError(f"rank 0 could not {what}: {error}"))
        # Anything else is a bug: it ends this rank, and the launcher ends the others.
    dist.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank; return all results, or raise the lowest rank's error on every rank. Collective."""
    mine: tuple[T | None, Exception | None]
    try:
        mine = (work(), None)
    except RaytuneError as error:
        mine = (None, error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for _, failure in everyone:
        if failure is not None:
            raise failure
    return [result for result, _ in everyone]


def why_on_any_rank(why: Callable[[], str | None]) -> str | None:
    """Call `why` on every rank; return the lowest rank's reason on every rank, or None if none has one. Collective."""
    reasons = on_all_ranks(why)
    rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
    if rank is None or None not in reasons:
        return None if rank is None else reasons[rank]
    return f"on rank {rank}: {reasons[rank]}"  # and not on all


def make_device_mesh(kind: str, axes: Mapping[str, int]) -> DeviceMesh:
    """Make a mesh of all ranks along these axes. Collective.

    The groups of an axis wait as long as the group of all ranks does (`cluster.collective_minutes`); torch would give
    groups that it makes half an hour.
    """
    mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    everyone = dist.group.WORLD
    assert everyone is not None, "ranks have joined"
    host = everyone._get_backend(torch.device("cpu"))
    if isinstance(host, dist.ProcessGroupGloo):  # not a stand-in, which nobody waits for
        for group in mesh.get_all_groups():
            _set_pg_timeout(host.options._timeout, group)
    return mesh
