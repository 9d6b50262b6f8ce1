"""Check a run's storage: writable, fast enough, with room, and not in use by another command. Leaves no files."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.base.machine import free_space, nearest_existing
from raytune_fsdp.base.urls import is_url, without_secrets
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.run_lock import BEAT_SECONDS, Signs, holder_of
from raytune_fsdp.launch.shared_storage import Token
from raytune_fsdp.plan.plan import resolve, sizes_of
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.tools.doctor.deadline import Asked
from raytune_fsdp.tools.doctor.finding import Finding, many, ok, problem, warning
from raytune_fsdp.tools.doctor.writing import PREFIX, own_prefix, write_speed

_SLOW, _TOO_SLOW = 100e6, 10e6
"""Bytes a second: a disk, or a link of 1 Gbit/s, does 100 MB. At 10 MB a checkpoint of a 1B model takes 20 minutes."""
_LISTENING_SECONDS = 5 * BEAT_SECONDS + 0.5
_WRITTEN = re.compile(rf"{re.escape(PREFIX)}[0-9a-f]{{32}}(-[0-9a-f]{{32}})?")
_OLD_SECONDS = 3600.0
"""A file of another doctor that is older than this was left by one that was killed."""


def refusal(error: BaseException) -> Finding:
    """Return the problem that nothing can be written where the run will write."""
    fix = "set run.storage to a path that this user can write, and that all nodes mount"
    return problem("storage", in_one_line(error).partition(". All nodes must")[0], fix)


def clean(token: Token, place: RunDir) -> None:
    """Remove what the checks have written, also on nodes, and what a killed doctor left long ago.

    Newer files of others stay: another doctor may be running now.
    """
    own = own_prefix(token)
    elsewhere = [] if is_url(place.checkpoints) else [nearest_existing(Path(place.checkpoints))]
    for directory in (token.path.parent, *elsewhere):
        for left in directory.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if _WRITTEN.fullmatch(left.name) is None:
                    continue
                if left.name.startswith(own) or time.time() - left.stat().st_mtime > _OLD_SECONDS:
                    left.unlink()
    token.remove(refused=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at one of the run's places."""

    field: str
    there: Path
    """The innermost directory of the place that exists."""
    speed: float = 0.0
    free: int = 0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """The size and number of checkpoints, which follow from the model and the plan, and take long imports."""

    checkpoint: int | None
    """The bytes of one checkpoint, if they are known."""
    more: int | None
    """How many are written before one is removed; None: not known, but at least one."""


def measure(config: FinetuneConfig, token: Token, asked: Asked) -> list[Measured]:
    """Write where this run will. `asked`: the place that has not answered until its first write has arrived."""
    elsewhere, place = config.checkpoint.storage, RunDir.of(config)
    places = {"run.storage": token.path.parent}
    if elsewhere is not None and not is_url(place.checkpoints):
        places["checkpoint.storage"] = Path(place.checkpoints)
    found = []
    for field, wanted in places.items():
        asked.begin(f"{field}={wanted}")
        there = nearest_existing(wanted)
        try:
            speed = write_speed(there, own_prefix(token), asked.answered)
            found.append(Measured(field, there, speed, free_space(there)))
        except OSError as error:
            found.append(Measured(field, there, refused=in_one_line(error)))
    asked.answered()
    return found


def judge_writing(config: FinetuneConfig, written: Sequence[Measured], sizes: CheckpointSizes) -> list[Finding]:
    found = []
    for each in written:
        where = f"{each.field}: {each.there}"
        if each.refused is not None:
            fix = f"set {each.field} to a path that can be written, or make room"
            found.append(problem("storage", f"{where} cannot be written ({each.refused})", fix))
            continue
        mine = 0 if each.field == "run.storage" and config.checkpoint.storage is not None else sizes.checkpoint
        found.append(judge_speed(where, each.speed, mine, config.checkpoint.timeout_minutes))
        found.append(judge_room(each.free, replace(sizes, checkpoint=mine)))
    return found


def judge_speed(where: str, speed: float, checkpoint: int | None, timeout_minutes: float) -> Finding:
    """Judge whether storage is fast enough; it writes `speed` bytes a second from one machine."""
    said = f"{where} writes {speed / 1e6:,.0f} MB/s (with fsync)"
    seconds = checkpoint / speed if checkpoint else 0.0
    if checkpoint:
        short = f"{seconds:,.0f} s" if seconds >= 1 else "under a second"
        takes = f"{seconds / 60:,.0f} min" if seconds >= 120 else short
        said += f"; a checkpoint of {_size(checkpoint)} takes {takes} from one machine"
    elsewhere = (
        "use faster storage (a parallel file system, local NVMe for one machine, or checkpoint.storage=s3://...)"
    )
    if speed < _TOO_SLOW or seconds > 60 * timeout_minutes:
        longer = f"; or raise checkpoint.timeout_minutes={timeout_minutes:g}" if seconds > 60 * timeout_minutes else ""
        return problem("storage", said, elsewhere + longer)
    if speed < _SLOW:
        return warning("storage", said, f"{elsewhere}, or a larger checkpoint.every")
    return ok("storage", said)


def judge_room(free: int, sizes: CheckpointSizes) -> Finding:
    """Judge whether there is room for the checkpoints that are kept, and for one more before an older one goes.

    A size of 0 bytes means that checkpoints go elsewhere.
    """
    checkpoint, more = sizes.checkpoint, sizes.more
    if checkpoint is None:
        return ok("room", f"{_size(free)} free; the size of a checkpoint is not known here")
    if not checkpoint:
        return ok("room", f"{_size(free)} free; checkpoints go elsewhere")
    left, takes = _size(free), _size(checkpoint)
    if left == takes:
        left, takes = f"{free:,} bytes", f"{checkpoint:,} bytes"
    unknown = "how many there are at a time is known once the data is counted (train.epochs)"
    come = f"{many(more or 0, 'more checkpoint')} {'comes' if more == 1 else 'come'} before one goes"
    said = f"{left} free; a checkpoint takes {takes}, and {unknown if more is None else come}"
    fix = "make room, lower checkpoint.keep_last or checkpoint.keep_best, or set checkpoint.storage to where room is"
    if free < checkpoint:
        return problem("room", said, fix)
    return warning("room", said, fix) if free < checkpoint * (more or 1) else ok("room", said)


def more_of(config: FinetuneConfig) -> int | None:
    """Return how many checkpoints are written before one is removed; None: not known, but at least one."""
    from raytune_fsdp.predict.preflight import more_at_once  # takes seconds

    try:
        plan = resolve(config, sizes_of(config)[0])
    except ConfigError:  # the length is in epochs; the check of the config reports anything else
        return None
    return max(1, more_at_once(config, plan, RunDir.of(config).checkpoints))


def check_lock(config: FinetuneConfig) -> list[Finding]:
    """Check whether another command works on the run, or left its lock. Listens as long as a new command would."""
    place = RunDir.of(config)
    signs, deadline = Signs(place), time.monotonic() + _LISTENING_SECONDS
    while (state := signs.look()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    holder = holder_of(place) or "an unknown process"
    if state == "running":
        return [
            problem(
                "run", f"another command works on {place.path}: {holder}",
                "wait for its end, stop it, or choose another run.name",
            )
        ]  # fmt: skip
    if state == "free":
        return [ok("run", f"no other command works on {place.path}")]
    return [
        warning(
            "run", f"{place.lock} is left by {holder}, which gives no sign of life",
            "none is needed: the next command waits 10 s for a sign and takes the run; if that machine is lost and "
            f"the lock is an older version's, remove {place.lock}",
        )
    ]  # fmt: skip


def check_object_store(url: str, asking: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Write, read and remove a small object where checkpoints are to go. `asking` is called once imports are done."""
    from raytune_fsdp.base.file_systems import file_system

    asking(f"checkpoint.storage={without_secrets(url)}")
    shown, content = without_secrets(url), uuid.uuid4().hex.encode()
    began = time.monotonic()
    try:
        system, top = file_system(url)
        path = f"{top.rstrip('/')}/{PREFIX}{uuid.uuid4().hex}"
        with system.open_output_stream(path) as sink:
            sink.write(content)
        try:
            with system.open_input_file(path) as source:
                same = source.read() == content
        finally:
            system.delete_file(path)
    except Exception as error:  # of many types: the bucket, a key, the address or a library may be missing
        return [
            problem(
                "store", f"checkpoint.storage={shown} refuses ({in_one_line(error)})",
                "check that the bucket exists and this user may write, read and delete there (AWS_ACCESS_KEY_ID, "
                "AWS_PROFILE, the machine's role; GOOGLE_APPLICATION_CREDENTIALS), and its region and address "
                "(AWS_REGION, ?endpoint_override=)",
            )
        ]  # fmt: skip
    if not same:
        return [
            problem(
                "store",
                f"checkpoint.storage={shown} gave back other bytes than were written",
                "use another store: this one, or what is between it and here, changes files",
            )
        ]
    return [ok("store", f"checkpoint.storage={shown}: written, read and removed in {time.monotonic() - began:.1f} s")]


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
