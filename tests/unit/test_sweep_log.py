"""The log of a sweep: what was added stays, what a crash left unfinished goes, and a stranger's is refused."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ResumeError, TransientError
from raytune_fsdp.tune.log import (
    Decision,
    Draw,
    Entry,
    SweepBegun,
    SweepLog,
    Trial,
    TrialEnded,
    Value,
    changes_now,
    generation,
    line_of,
    read_log,
)

ENTRIES: list[Entry] = [
    SweepBegun({"space": {"optim.lr": {"grid": [1e-4, 3e-4]}}, "metric": None}, {"optim.lr": 1e-4}, highest=False),
    Trial(0, {"optim.lr": 1e-4, "method": {"type": "full"}}, 0),
    Trial(1, {"optim.lr": 3e-4}, 1, seed=2),
    Value(0, 10, 0.1 + 0.2),
    Value(1, 10, math.nan),
    Decision(10, (0,), (1,)),
    Draw(1, 10, 0, {"optim.lr": 8e-05}),
    TrialEnded(0, 20),
    TrialEnded(1, 12, "it is brökén"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_what_was_added_is_read_again_to_the_bit(path: Path) -> None:
    assert SweepLog(path).entries == [] and not path.exists()
    log = SweepLog(path)
    log.append(ENTRIES[:3])
    log.append([])
    log.append(ENTRIES[3:])
    assert log.entries == SweepLog(path).entries == read_log(path) == ENTRIES
    assert path.read_bytes() == b"".join(map(line_of, ENTRIES))
    assert path.stat().st_mode & 0o007 == 0


def test_its_lines_are_for_people_and_for_cmp() -> None:
    assert line_of(ENTRIES[0]).startswith(b'{"kind": "sweep", "format": 1, "decides": {"space":')
    assert line_of(ENTRIES[3]) == b'{"kind": "value", "trial": 0, "step": 10, "value": 0.30000000000000004}\n'
    assert line_of(ENTRIES[5]) == b'{"kind": "decision", "step": 10, "on": [0], "stop": [1]}\n'


@pytest.mark.parametrize("rest", [b"", b'{"kind": "val', b"\0" * 50, b'{"kind": "value"\0\0\0\n\0\0'])
@pytest.mark.parametrize("whole", [0, 1, 5])
def test_half_a_line_is_cut(path: Path, whole: int, rest: bytes) -> None:
    before = b"".join(map(line_of, ENTRIES[:whole]))
    path.write_bytes(before + rest)
    assert read_log(path) == ENTRIES[:whole] and path.read_bytes() == before + rest  # who looks on changes nothing
    log = SweepLog(path)
    assert path.read_bytes() == before
    log.append(ENTRIES[whole:])
    assert read_log(path) == ENTRIES


def test_a_zero_byte_among_lines_cuts_none_of_them(path: Path) -> None:
    """Lines that follow it were written, and what they say was decided."""
    content = bytearray(b"".join(map(line_of, ENTRIES)))
    content[len(line_of(ENTRIES[0])) + 9] = 0
    path.write_bytes(content)
    with pytest.raises(ResumeError, match=r"log.jsonl: line 2 is not an entry .*: put back the log as the sweep wrote"):
        SweepLog(path)
    assert path.read_bytes() == content


@given(length=st.integers(0, len(b"".join(map(line_of, ENTRIES)))))
def test_a_log_that_is_cut_anywhere_has_its_whole_lines(length: int) -> None:
    content = b"".join(map(line_of, ENTRIES))[:length]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "log.jsonl"
        path.write_bytes(content)
        assert SweepLog(path).entries == ENTRIES[: content.count(b"\n")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{}", "is not an entry of a sweep's log"),
        (b"[1]", "is not an entry"),
        (b'{"kind": "step"}', "is not an entry"),
        (b'{"kind": ["value"]}', "is not an entry"),
        (b"", "is not an entry"),
        (b"[" * 100_000, "is not an entry"),
        (line_of(ENTRIES[0]).strip(), "has the kind sweep, but the entry of the sweep itself comes first"),
        (b'{"kind": "value", "trial": 0, "step": 10}', "has the fields .*; value has step, trial, value"),
        (b'{"kind": "value", "trial": 0, "step": 10, "value": 1, "time": 3}', "has the fields"),
        (b'{"kind": "value", "trial": 0, "step": -1, "value": 1}', "has step=-1, which no value has"),
        (b'{"kind": "value", "trial": 0, "step": true, "value": 1}', "has step=True"),
        (b'{"kind": "value", "trial": 0, "step": 1, "value": "1"}', "has value='1'"),
        (b'{"kind": "value", "trial": 7, "step": 1, "value": 1}', "is about trial 7, which is on no line before it"),
        (b'{"kind": "decision", "step": 1, "on": [0, 2], "stop": []}', "is about trial 2"),
        (b'{"kind": "decision", "step": 1, "on": 0, "stop": []}', "has on=0"),
        (b'{"kind": "draw", "trial": 0, "step": 1, "source": 3, "changes": {}}', "is about trial 3"),
        (b'{"kind": "draw", "trial": 0, "step": 1, "source": 1, "changes": []}', r"has changes=\[\]"),
        (b'{"kind": "ended", "trial": 0, "step": 1, "error": 3}', "has error=3"),
        (
            b'{"kind": "trial", "number": 4, "changes": {}, "variant": 0, "seed": null}',
            "is trial 4, but the next one",
        ),
    ],
)
def test_what_no_sweep_has_written_is_refused(path: Path, line: bytes, said: str) -> None:
    path.write_bytes(b"".join(map(line_of, ENTRIES[:3])) + line + b"\n")
    with pytest.raises(ResumeError, match=f"log.jsonl: line 4 .*{said}.*: put back the log .* another name"):
        SweepLog(path)
    assert path.read_bytes().endswith(line + b"\n")


def test_a_log_begins_with_its_sweep_in_a_format_that_is_known(path: Path) -> None:
    path.write_bytes(line_of(ENTRIES[1]))
    with pytest.raises(ResumeError, match="line 1 has the kind trial"):
        SweepLog(path)
    path.write_bytes(line_of(ENTRIES[0]).replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ResumeError, match="line 1 has format 2, but this version reads only format 1"):
        read_log(path)


def test_what_is_no_file_is_refused(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ResumeError, match="is a pipe, not a regular file"):
        SweepLog(path)
    path.unlink()
    (path.parent / "elsewhere").write_bytes(b"")
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(ResumeError, match="is a symbolic link"):
        SweepLog(path)


def test_after_a_full_disk_the_log_goes_on(path: Path) -> None:
    log = SweepLog(path)
    log.append(ENTRIES[:3])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(TransientError, match="log.jsonl cannot be written: File too large: make room or make it"):
            log.append(ENTRIES[3:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.entries == read_log(path) == ENTRIES[:3]
    log.append(ENTRIES[3:])
    assert read_log(path) == ENTRIES


def test_which_run_of_a_trial_has_trained_a_step() -> None:
    trial = ENTRIES[2]
    assert isinstance(trial, Trial)
    assert [generation(1, ENTRIES, step) for step in (1, 10, 11, None)] == [0, 0, 1, 1]
    assert generation(0, ENTRIES) == 0
    assert changes_now(trial, ENTRIES, 10) == trial.changes
    assert changes_now(trial, ENTRIES) == {"optim.lr": 8e-05}
