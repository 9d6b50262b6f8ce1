"""Brings the weights of a hub model to the machines whose ranks read them, once for each cache of the hub.

With `model.fill: rank0` and `auto` only rank 0's machine fetches, with `sharded` every machine. Ranks that have one
cache together, because they are on one machine or because HF_HOME is on shared storage, find that out with small files
that they leave there; the lowest of them fetches. All other ranks wait, for as long as bytes come.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.config import ClusterConfig, FinetuneConfig
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.hub_download import Download
from raytune_fsdp.model.directory.hub_weights import HubWeights, cache
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.starting_weights import AdapterFiles, StartingWeights

Say = Callable[[str], None]

_MOST_PAUSE, _SAY_SECONDS, _MOST_SILENT_SECONDS = 1.0, 30.0, 600.0
_TOKEN = ".shared-"
_TOKEN_SECONDS = 2.0
"""For how long a file is looked for that another rank has left: network file systems show it late."""
_SEEN_SECONDS = 60.0
"""For how long what another rank has fetched is looked for: that it was missing a network file system may remember."""
_OLD_SECONDS = 3600.0
"""After which a file is also removed that ranks of another run have left: it may be in use until then."""


def silent_seconds(cluster: ClusterConfig) -> float:
    """How long all ranks wait while no byte comes. Their error has to come long before they are taken for a hang."""
    return min(_MOST_SILENT_SECONDS, 30 * cluster.start_hang_minutes)


def brought(
    config: FinetuneConfig, origin: StartingWeights | None, adapter: AdapterFiles | None, say: Say = print
) -> tuple[StartingWeights | None, AdapterFiles | None]:
    """Where this rank has the weights, after those of the hub were fetched to where they are read. Collective."""
    if origin is not None:
        if isinstance(origin.stored, WeightFiles):
            origin = replace(origin, stored=_brought(origin.stored, config, say))
        elif origin.base_files is not None:
            origin = replace(origin, base_files=_brought(origin.base_files, config, say))
    if adapter is not None:
        adapter = replace(adapter, files=_brought(adapter.files, config, say))
    return origin, adapter


def wanted(origin: StartingWeights | None, adapter: AdapterFiles | None) -> list[HubWeights]:
    """What of the hub these weights are in."""
    stored = [] if origin is None else [origin.stored, origin.base_files]
    files = [*stored, None if adapter is None else adapter.files]
    return [each.hub for each in files if isinstance(each, WeightFiles) and each.hub is not None]


def _brought(files: WeightFiles, config: FinetuneConfig, say: Say) -> WeightFiles:
    hub, rank, fill = files.hub, dist.get_rank(), config.model.fill
    if hub is None:
        return files
    # What ranks that were killed have left, before all ranks meet, and leave theirs.
    own = _token_of(config)
    with suppress(OSError):
        for left in own.parent.glob(f"{_TOKEN}*"):
            if left.name.startswith(own.name) or time.time() - left.stat().st_mtime > _OLD_SECONDS:
                left.unlink(missing_ok=True)
    lacking = on_all_ranks(lambda: bool(hub.lacking()))
    readers = [each for each, lacks in enumerate(lacking) if lacks and (fill == "sharded" or each == 0)]
    if readers:
        # With rank0 nobody else looks at the files.
        owners = list(range(len(lacking))) if fill == "rank0" else _owners(config)
        fetching = sorted({owners[each] for each in readers})
        _follow(hub, rank in fetching, len(fetching), silent_seconds(config.cluster), say)
        if owners[rank] in fetching:
            # This rank, too, has to see what another one has fetched into the cache that they share.
            deadline = time.monotonic() + _SEEN_SECONDS
            while hub.lacking() and time.monotonic() < deadline:
                with suppress(OSError):
                    os.listdir(hub.directory)  # network file systems ask again for what is listed
                time.sleep(0.1)
    return files.here()


def _follow(hub: HubWeights, mine: bool, places: int, most_silent: float, say: Say) -> None:
    """Fetch on the ranks whose part it is, until all are done. Collective, again and again: no wait is a long one."""
    download = Download(hub) if mine else None
    size = f"{hub.total / 1e9:.2f} GB"
    if dist.get_rank() == 0:
        machines = f"to {places} caches" if places > 1 else ""
        say(f"fetching the weights of {hub.repository} from the hub ({size}) {machines}".rstrip())
    before: list[tuple[int, int | None]] = []
    pause = 0.02
    last = said = time.monotonic()
    while True:
        found = on_all_ranks(partial(_state, download, silent=time.monotonic() - last > most_silent))
        came, now = sum(each for _, each, _ in found), time.monotonic()
        progress = [(each, checked) for _, each, checked in found]
        if progress != before:
            before, last = progress, now
            beat()
        if all(checked is None for *_, checked in found):
            return
        if any(each for each, *_ in found):
            raise TransientError(
                f"{hub.what}: no byte has come from the hub for {most_silent:.0f} s; what has come is kept, "
                "and another start goes on from there"
            )
        if dist.get_rank() == 0 and now - said > _SAY_SECONDS:
            said = now
            say(f"fetched {came / 1e9:.2f} of {places * hub.total / 1e9:.2f} GB of {hub.repository}")
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


def _state(download: Download | None, *, silent: bool) -> tuple[bool, int, int | None]:
    """Whether this rank has waited for too long, the bytes that it has fetched, and how many of them it has compared
    with what the hub has; None: it has all."""
    if download is None:
        return silent, 0, None
    return silent, download.came, None if download.done() else download.checked


def _owners(config: FinetuneConfig) -> list[int]:
    """Of each rank the lowest one that has the same cache of the hub. Collective."""
    rank, common = dist.get_rank(), _token_of(config)
    token, place = common.with_name(f"{common.name}{uuid.uuid4().hex}"), common.parent

    def leave() -> str:
        with suppress(OSError):  # one that may only be read; whoever fetches says so
            place.mkdir(parents=True, exist_ok=True)
            token.touch()
        return token.name

    try:
        names = on_all_ranks(leave)
        lowest = on_all_ranks(lambda: _lowest(place, names[:rank]))
    finally:
        with suppress(OSError):
            token.unlink()
    owners: list[int] = []
    for each, seen in enumerate(lowest):
        owners.append(each if seen is None else owners[seen])
    return owners


def _lowest(place: Path, names: Sequence[str]) -> int | None:
    """The first of these files that is seen in a place."""
    deadline = time.monotonic() + _TOKEN_SECONDS
    while names:
        for number, name in enumerate(names):
            if (place / name).exists():
                return number
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return None


def _token_of(config: FinetuneConfig) -> Path:
    """What the names of the files begin with that ranks of this run leave."""
    run = hashlib.sha256(str(RunDir.of(config).path).encode()).hexdigest()[:16]
    return cache() / ".locks" / f"{_TOKEN}{run}-"  # where the hub's library looks for no models
