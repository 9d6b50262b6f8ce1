"""The storage of a run: writable, fast enough, with room, not another command's. What is written here is removed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.doctor.finding import Finding, many, ok, problem, warning
from raytune_fsdp.errors import ConfigError, in_one_line
from raytune_fsdp.launch.run_lock import BEAT_SECONDS, Signs, holder_of
from raytune_fsdp.launch.shared_storage import Token, check_seen
from raytune_fsdp.plan import resolve, sizes_of
from raytune_fsdp.rundir import RunDir
from raytune_fsdp.urls import is_url, without_secrets

PREFIX = ".doctor-"
_FIRST_BYTES, _MOST_BYTES, _WRITING_SECONDS = 4 << 20, 128 << 20, 1.0
_PIECE = 4 << 20
_SLOW, _TOO_SLOW = 100e6, 10e6
"""Bytes a second: a disk, or a link of 1 Gbit/s, does 100 MB. At 10 MB a checkpoint of 1B takes 20 minutes."""
_LISTENING_SECONDS = 5 * BEAT_SECONDS + 0.5
_OLD_SECONDS = 3600.0
"""After this, a file of another doctor's is one that was ended in the middle."""
_NODE_PATIENCE = 4.0
"""Seconds that a network file system may take to show a new file; a start allows 10."""


def write_speed(directory: Path, prefix: str) -> float:
    """Bytes a second that arrive in this directory: written and synced, so that no cache counts. `prefix`: of the files
    that are written."""
    seconds = _write(directory, prefix, _FIRST_BYTES)
    if seconds > _WRITING_SECONDS:
        return _FIRST_BYTES / seconds
    # Enough to see past the start of it, and never more than a second's worth of what was seen so far.
    size = min(_MOST_BYTES, max(_FIRST_BYTES, int(_FIRST_BYTES / seconds * _WRITING_SECONDS)))
    return size / _write(directory, prefix, size)


def _write(directory: Path, prefix: str, size: int) -> float:
    piece = os.urandom(_PIECE)  # zeros would be compressed, or never stored
    file = directory / f"{prefix}{uuid.uuid4().hex}"
    began = time.monotonic()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for _ in range(0, size, _PIECE):
                os.write(handle, piece)
            os.fsync(handle)
        finally:
            os.close(handle)
        return max(1e-6, time.monotonic() - began)
    finally:
        with suppress(OSError):
            file.unlink()


def as_text(token: Token) -> tuple[str, ...]:
    """For nodes, which may not have its class."""
    return str(token.path), token.text, token.who, token.node


def from_node(path: str, text: str, who: str, node: str) -> tuple[str | None, float]:
    """On a node: why it does not see the token of the run's storage, and how fast it writes there."""
    token = Token(Path(path), text, who, node, ())
    try:
        check_seen(token, by="a task", patience_seconds=_NODE_PATIENCE)
        return None, write_speed(token.path.parent, _own_prefix(token))
    except ConfigError as error:
        return str(error), 0.0
    except OSError as error:
        return f"run.storage={token.path.parent.parent}: it cannot be written there ({in_one_line(error)})", 0.0


def refusal(error: BaseException) -> Finding:
    """Why nothing can be written where the run will."""
    fix = "set run.storage to a path that this user can write, and that all nodes mount"
    return problem("storage", in_one_line(error).partition(". All nodes must")[0], fix)


def clean(token: Token, place: RunDir) -> None:
    """Remove what the checks have written, also on nodes, and what a doctor left long ago that was ended in the middle:
    another one may be running now."""
    own = _own_prefix(token)
    for directory in (token.path.parent, *([] if is_url(place.checkpoints) else [_there(Path(place.checkpoints))])):
        for left in directory.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if left.name.startswith(own) or time.time() - left.stat().st_mtime > _OLD_SECONDS:
                    left.unlink()
    token.remove(refused=True)


def _own_prefix(token: Token) -> str:
    """Of the names of files that this command writes, here and on nodes."""
    return f"{PREFIX}{token.text}-"


def _there(wanted: Path) -> Path:
    """The innermost directory of a path that is there."""
    return next(path for path in (wanted, *wanted.parents) if path.exists())


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at one of the run's places."""

    field: str
    there: Path
    """The innermost directory of it that is there."""
    speed: float = 0.0
    free: int = 0
    refused: str | None = None


def measure(config: FinetuneConfig, token: Token) -> list[Measured]:
    """Write where this run will."""
    elsewhere, place = config.checkpoint.storage, RunDir.of(config)
    places = {"run.storage": token.path.parent}
    if elsewhere is not None and not is_url(place.checkpoints):
        places["checkpoint.storage"] = Path(place.checkpoints)
    found = []
    for field, wanted in places.items():
        there = _there(wanted)
        try:
            found.append(Measured(field, there, write_speed(there, _own_prefix(token)), shutil.disk_usage(there).free))
        except OSError as error:
            found.append(Measured(field, there, refused=in_one_line(error)))
    return found


def judge_writing(config: FinetuneConfig, written: Sequence[Measured], checkpoint: int | None) -> list[Finding]:
    """`checkpoint`: the bytes of one, if they are known."""
    found = []
    for each in written:
        where = f"{each.field}: {each.there}"
        if each.refused is not None:
            fix = f"set {each.field} to a path that can be written, or make room"
            found.append(problem("storage", f"{where} cannot be written ({each.refused})", fix))
            continue
        mine = 0 if each.field == "run.storage" and config.checkpoint.storage is not None else checkpoint
        found.append(judge_speed(where, each.speed, mine, config.checkpoint.timeout_minutes))
        found.append(judge_room(config, each.free, mine))
    return found


def judge_speed(where: str, speed: float, checkpoint: int | None, timeout_minutes: float) -> Finding:
    """Is storage fast enough that writes so many bytes a second from one machine?"""
    said = f"{where} writes {speed / 1e6:,.0f} MB/s (with fsync)"
    seconds = checkpoint / speed if checkpoint else 0.0
    if checkpoint:
        said += f"; a checkpoint of {_size(checkpoint)} takes {_duration(seconds)} from one machine"
    elsewhere = (
        "use faster storage (a parallel file system, local NVMe for one machine, or checkpoint.storage=s3://...)"
    )
    if speed < _TOO_SLOW or seconds > 60 * timeout_minutes:
        longer = f"; or raise checkpoint.timeout_minutes={timeout_minutes:g}" if seconds > 60 * timeout_minutes else ""
        return problem("storage", said, elsewhere + longer)
    if speed < _SLOW:
        return warning("storage", said, f"{elsewhere}, or a larger checkpoint.every")
    return ok("storage", said)


def judge_room(config: FinetuneConfig, free: int, checkpoint: int | None) -> Finding:
    """Is there room for the checkpoints that will be kept, and the one that is written before an older one goes?

    `checkpoint`: the bytes of one; None: not known; 0: they go elsewhere.
    """
    if checkpoint is None:
        return ok("room", f"{_size(free)} free; the size of a checkpoint is not known here")
    if not checkpoint:
        return ok("room", f"{_size(free)} free; checkpoints go elsewhere")
    more, left, takes = _more(config), _size(free), _size(checkpoint)
    if left == takes:
        left, takes = f"{free:,} bytes", f"{checkpoint:,} bytes"
    if more is None:
        said = "how many there are at a time is known once the data is counted (train.epochs)"
    else:
        said = f"{many(more, 'more checkpoint')} {'comes' if more == 1 else 'come'} before one goes"
    said = f"{left} free; a checkpoint takes {takes}, and {said}"
    fix = "make room, lower checkpoint.keep_last or checkpoint.keep_best, or set checkpoint.storage to where room is"
    if free < checkpoint:
        return problem("room", said, fix)
    return warning("room", said, fix) if free < checkpoint * (more or 1) else ok("room", said)


def _more(config: FinetuneConfig) -> int | None:
    """How many checkpoints come before one is removed; None: more than none."""
    from raytune_fsdp.launch.preflight import more_at_once  # takes seconds, unless the model was looked at

    try:
        plan = resolve(config, sizes_of(config)[0])
    except ConfigError:  # of a length in epochs; anything else is said by the check of the config
        return None
    return max(1, more_at_once(config, plan, RunDir.of(config).checkpoints))


def check_lock(config: FinetuneConfig) -> list[Finding]:
    """Does another command work on the run, or did one leave its lock? Listens as long as a newcomer would."""
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


def check_object_store(url: str) -> list[Finding]:
    """Write, read and remove a small object where checkpoints are to go."""
    from raytune_fsdp.file_systems import file_system

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
    except Exception as error:  # of many types: a bucket, a key, an address, a library that is missing
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


def _duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:,.0f} s" if seconds >= 1 else "under a second"
