"""The run directory's record: every step once, every bit, through crashes."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import random
import struct
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import RaytuneError, TrainingError
from raytune_fsdp.base.measured import Digest, StepMetrics
from raytune_fsdp.record import jsonl
from raytune_fsdp.record.jsonl import JsonlTracker, append_event, read_events, read_metrics, read_trajectory
from raytune_fsdp.record.tracker import RunStart


def step(number: int, loss: float = 2.5, grad_norm: float = 1.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=number, epoch=number / 7, samples=f"{number:016x}", tokens=4096, target_tokens=1000, loss=loss,
        grad_norm=grad_norm, lr=1e-4, skipped=skipped, step_seconds=0.5, data_seconds=0.01, tokens_per_second=8192.0,
        mfu=None, memory_bytes=2**30,
    )  # fmt: skip


def begin(directory: Path, *, resumed_from: int = 0, attempt: int = 1) -> JsonlTracker:
    tracker = JsonlTracker(directory)
    tracker.start(RunStart(name="run", attempt=attempt, resumed_from=resumed_from))
    return tracker


def steps_of(directory: Path) -> list[int]:
    return [line["step"] for line in read_trajectory(directory / "metrics.jsonl")]


def test_a_line_has_the_trajectory_and_the_rest_beside_it(tmp_path: Path) -> None:
    tracker = begin(tmp_path / "new")
    tracker.steps([step(1)], world_size=2, attempt=1)
    tracker.finish("finished")
    line = json.loads((tmp_path / "new/metrics.jsonl").read_text())
    assert abs(datetime.fromisoformat(line.pop("time")).timestamp() - time.time()) < 5
    assert line == {
        "kind": "step",
        "trajectory": {
            "step": 1, "epoch": 1 / 7, "samples": f"{1:016x}", "tokens": 4096, "target_tokens": 1000, "loss": 2.5,
            "grad_norm": 1.0, "lr": 1e-4,
        },
        "world_size": 2, "attempt": 1, "step_seconds": 0.5, "data_seconds": 0.01, "tokens_per_second": 8192.0,
        "mfu": None, "memory_bytes": 2**30, "windows_built": 0, "skipped": False, "accuracy": None, "datasets": [],
            "rank_seconds": [], "rank_data_seconds": [], "rank_compute_seconds": [],
        "rank_memory_bytes": [], "reserved_bytes": None, "host_memory_bytes": None, "gpu_utilization": None,
        "expert_load": [], "experts_idle": None, "nodes": [], "predicted": [],
    }  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
def test_a_digest_is_in_the_trajectory_if_any_number_of_ranks_has_it(tmp_path: Path, exact: bool) -> None:
    digest = Digest(weights="a1" * 32, everything="b2" * 32)
    tracker = begin(tmp_path)
    tracker.steps([step(1), replace(step(2), digest=digest, exact=exact)], world_size=2, attempt=1)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    found = {"digest": "a1" * 32, "digest_of_everything": "b2" * 32}
    there, other = (second["trajectory"], second) if exact else (second, second["trajectory"])
    assert found.items() <= there.items() and not found.keys() & {*other, *first, *first["trajectory"]}


def test_steps_that_are_written_together_have_the_times_at_which_they_ended(tmp_path: Path) -> None:
    tracker = begin(tmp_path)
    tracker.steps([step(i) for i in (1, 2, 3)], world_size=1, attempt=1)
    tracker.evaluation(3, {"eval/x/loss": 1.0})
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert [round(b - a, 2) for a, b in zip(times, times[1:3], strict=False)] == [0.5, 0.5] and times[3] >= times[2]
    assert "time" not in read_trajectory(tmp_path / "metrics.jsonl")[0], "it differs from run to run"


def test_floats_keep_their_bits(tmp_path: Path) -> None:
    draw = random.Random(0)
    values = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(2000)] + [5e-324, -0.0, 1e308, 0.1 + 0.2]
    tracker = begin(tmp_path)
    tracker.steps([step(i, loss=value) for i, value in enumerate(values, start=1)], world_size=1, attempt=1)
    tracker.finish("finished")
    found = [line["loss"] for line in read_trajectory(tmp_path / "metrics.jsonl")]
    for value, back in zip(values, found, strict=True):
        assert math.isnan(value) and math.isnan(back) or struct.pack("<d", value) == struct.pack("<d", back)


def test_non_finite_floats_are_valid_json_and_compare_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracker = begin(tmp_path / name)
        tracker.steps([step(1, math.nan, math.inf, skipped=True), step(2, -math.inf)], world_size=1, attempt=1)
        tracker.evaluation(2, {"eval/x/loss": math.nan})
    text = (tmp_path / "a/metrics.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second, evaluation = read_metrics(tmp_path / "a/metrics.jsonl")
    assert math.isnan(first["trajectory"]["loss"]) and first["trajectory"]["grad_norm"] == math.inf
    assert second["trajectory"]["loss"] == -math.inf and math.isnan(evaluation["values"]["eval/x/loss"])
    assert read_trajectory(tmp_path / "a/metrics.jsonl") == read_trajectory(tmp_path / "b/metrics.jsonl")


def test_a_resume_cuts_what_is_past_its_checkpoint(tmp_path: Path) -> None:
    first = begin(tmp_path)
    first.evaluation(0, {"eval/x/loss": 9.0})
    first.steps([step(i) for i in range(1, 4)], world_size=2, attempt=1)
    first.evaluation(3, {"eval/x/loss": 3.0})
    first.steps([step(i) for i in range(4, 7)], world_size=2, attempt=1)
    first.evaluation(6, {"eval/x/loss": 2.0})

    second = begin(tmp_path, resumed_from=3, attempt=2)
    second.evaluation(3, {"eval/x/loss": 3.5, "eval/y/loss": 1.0})
    second.steps([step(i, loss=1.5) for i in range(4, 8)], world_size=3, attempt=2)
    second.finish("finished")

    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["attempt"] for line in lines if line["kind"] == "step"] == [1, 1, 1, 2, 2, 2, 2]
    evaluations = [(line["step"], line["values"]) for line in lines if line["kind"] == "eval"]
    assert evaluations == [(0, {"eval/x/loss": 9.0}), (3, {"eval/x/loss": 3.0}), (3, {"eval/y/loss": 1.0})]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_start_from_the_beginning_leaves_nothing(tmp_path: Path) -> None:
    first = begin(tmp_path)
    first.evaluation(0, {"eval/x/loss": 9.0})
    first.steps([step(1)], world_size=1, attempt=1)
    begin(tmp_path, attempt=2).steps([step(1)], world_size=1, attempt=2)
    assert [line["attempt"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2]


def test_a_crash_anywhere_in_a_line_costs_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    begin(tmp_path).steps([step(i) for i in (1, 2, 3)], world_size=1, attempt=1)
    whole = path.read_bytes()
    second_line_end = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for size in [*range(second_line_end, len(whole), 9), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:size])
        assert steps_of(tmp_path)[:2] == [1, 2]
        tracker = begin(tmp_path, resumed_from=2, attempt=2)
        tracker.steps([step(3), step(4)], world_size=1, attempt=2)
        tracker.finish("finished")
        assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_process_that_should_be_dead_cannot_write_into_the_record(tmp_path: Path) -> None:
    zombie = begin(tmp_path)
    zombie.steps([step(1), step(2)], world_size=2, attempt=1)
    heir = begin(tmp_path, resumed_from=2, attempt=2)
    zombie.steps([step(3)], world_size=2, attempt=1)
    heir.steps([step(3)], world_size=2, attempt=2)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_an_attempt_that_should_be_dead_commits_nothing_after_its_heir_has_begun(tmp_path: Path) -> None:
    """Both are of one command, so that the lease says nothing."""
    zombie = begin(tmp_path)
    zombie.steps([step(1), step(2)], world_size=2, attempt=1)
    zombie.sync()
    heir = begin(tmp_path, resumed_from=2, attempt=2)
    zombie.sync()  # nothing says yet that this is not a person's doing
    heir.event("attempt_started")
    with pytest.raises(TrainingError, match="is not the file that attempt 1 writes .* the same command continues"):
        zombie.sync()  # what a commit calls first
    for write in (lambda: zombie.event("save_failed"), lambda: zombie.steps([step(3)], world_size=2, attempt=1)):
        with pytest.raises(TrainingError, match="is not the file that attempt 1 writes"):
            write()
    zombie.finish("failed")
    heir.sync()
    assert [event["attempt"] for event in read_events(tmp_path / "events.jsonl")] == [2]


def test_a_record_that_was_moved_away_costs_no_checkpoint(tmp_path: Path) -> None:
    tracker = begin(tmp_path)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "kept.jsonl")
    tracker.steps([step(1)], world_size=1, attempt=1)
    tracker.sync()


def test_a_garbled_line_is_not_read_silently(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step"}\n')
    with pytest.raises(RaytuneError, match=r"metrics\.jsonl has a line"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_record_that_cannot_be_written_stops_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="metrics.jsonl cannot be written: (Not a directory|File exists)"):
        begin(tmp_path / "file")
    tracker = begin(tmp_path)
    full = Path("/dev/full")
    if full.exists():
        tracker._file = full.open("ab", buffering=0)
        with pytest.raises(TrainingError, match="metrics.jsonl cannot be written: No space left"):
            tracker.steps([step(1)], world_size=1, attempt=1)


def test_events_of_several_processes_and_attempts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tracker = begin(tmp_path, attempt=2)
    tracker.event("saved", step=5, name="x", path=tmp_path, HF_TOKEN="my-own", seconds=math.inf)
    with path.open("ab") as file:
        file.write(b'{"time": "2026-01-')  # a crash
    append_event(path, "resized", attempt=3, fields={"before": 4, "after": 3})
    tracker.event("finished")
    saved, resized, finished = read_events(path)
    assert saved["fields"] == {
        "step": 5, "name": "x", "path": str(tmp_path), "HF_TOKEN": "<redacted>", "seconds": math.inf,
    }  # fmt: skip
    assert (saved["attempt"], saved["event"]) == (2, "saved") and saved["time"].endswith("+00:00")
    assert (resized["attempt"], resized["fields"]["after"]) == (3, 3)
    assert finished["event"] == "finished"


def test_processes_append_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, lines of two nodes would take the same place: the driver writes events, and rank 0 does."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(jsonl, "_TURN_SECONDS", 30.0)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        mine = threading.Thread(target=append_event, args=(path, "saved"), kwargs={"attempt": 1, "fields": {}})
        mine.start()
        mine.join(0.1)
        assert mine.is_alive() and not path.read_bytes(), "not yet"
        other.write(b'{"event": "attempt_started", "attempt": 2, "fields": {}}\n')
    mine.join(20)
    assert [each["event"] for each in read_events(path)] == ["attempt_started", "saved"]
    monkeypatch.setattr(jsonl, "_TURN_SECONDS", 0.05)
    with path.open("ab") as other:  # of a process that was stopped
        fcntl.flock(other, fcntl.LOCK_EX)
        append_event(path, "saved", attempt=2, fields={})

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    append_event(path, "saved", attempt=3, fields={})
    assert [each["attempt"] for each in read_events(path)] == [2, 1, 2, 3]


def test_scalars_of_array_libraries_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    tracker = begin(tmp_path)
    tracker.evaluation(1, {"a": numpy.float32(0.5), "b": numpy.float32("nan"), "c": numpy.float64(0.1)})
    values = read_metrics(tmp_path / "metrics.jsonl")[0]["values"]
    assert values["a"] == 0.5 and math.isnan(values["b"]) and values["c"] == 0.1
