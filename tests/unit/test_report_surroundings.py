"""What a report says besides its curves: how a run stands, where it ran, how long each part took, what was audited."""

from __future__ import annotations

import errno
import json
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import jsonl, names
from raytune_fsdp.record.console import event_in_words, gibibytes, took
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.lines import to_bytes
from raytune_fsdp.record.report import surroundings
from raytune_fsdp.record.report.facts import predictions, status
from raytune_fsdp.record.report.history import read_history
from raytune_fsdp.record.report.page import page
from raytune_fsdp.record.report.surroundings import machines, time_of
from raytune_fsdp.run.described import started_by
from raytune_fsdp.tools.audit.comparison import Audit
from raytune_fsdp.tools.audit.page import put_on_record
from raytune_fsdp.tools.audit.segment import Segment
from tests.recorded import Recorded
from tests.records import BEGAN, HOSTILE, write_run
from tests.unit.test_report_page import chart, data_of, read


def put_events(run: Path, *events: tuple[float, int, str, dict[str, Any]]) -> None:
    lines = [
        {"time": (BEGAN + timedelta(seconds=at)).isoformat(), "attempt": attempt, "event": name, "fields": fields}
        for at, attempt, name, fields in events
    ]
    (run / "events.jsonl").write_bytes(b"".join(map(to_bytes, lines)))


@pytest.mark.parametrize(
    ("end", "seen", "said"),
    [
        ("finished", "", ("finished", "done: all 100 steps")),
        ("interrupted", "", ("interrupted", "interrupted at step 5 of 100")),
        ("failed", "", ("failed", "failed at step 5 of 100")),
        ("interrupted", "running", ("running", "running, at step 5 of 100")),
        (None, "stale", ("stale", "interrupted at step 5 of 100: its command was killed, or its machine is lost")),
        (None, "", ("interrupted", "interrupted at step 5 of 100")),
    ],
)
def test_a_run_says_first_how_it_stands(tmp_path: Path, end: Any, seen: str, said: tuple[str, str]) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(100 if end == "finished" else 5)
    run.save()
    if end is not None:
        run.end(end)
    assert status(read_history(run.path), seen) == said
    text = page([run.path], {run.path: seen})
    assert f'<p class="status {said[0]}">{said[1]}</p>' in text
    assert text.index(said[1]) < text.index('<dl class="figures">') < text.index('data-chart="loss"')


def test_a_comparison_says_which_run_is_interrupted(tmp_path: Path) -> None:
    runs = [Recorded(tmp_path, name) for name in ("whole", "part")]
    for run, steps, end in zip(runs, (100, 5), ("finished", "interrupted"), strict=True):
        run.attempt()
        run.train(steps)
        run.end(end)
    words = read(page([run.path for run in runs])).words
    assert "done: all 100 steps" in words and "interrupted at step 5 of 100" in words


def test_the_time_of_a_run_is_divided_without_rest(tmp_path: Path) -> None:
    """Half a second a step: 1 to 10 are of the first attempt, 11 to 30 of the second, and the third trains none."""
    run = write_run(tmp_path / "run", 30)
    started = names.ATTEMPT_STARTED
    put_events(
        run,
        (-5, 1, started, {"world_size": 4, "resumed_from": 0}),
        (5.5, 1, names.ATTEMPT_FAILED, {"cause": "x"}),
        (5.5, 2, started, {"world_size": 4, "resumed_from": 10}),
        (16, 2, names.ATTEMPT_ENDED, {"status": "interrupted"}),
        (18, 3, started, {"world_size": 4, "resumed_from": 30}),
        (19, 3, names.ATTEMPT_ENDED, {"status": "interrupted"}),
        (99, 3, names.AUDITED, {"step": 30, "first": 1}),
    )
    said = time_of(read_history(run))
    assert said["words"] == (
        "68.1% of 22s trained steps that stayed; 1 failure cost 0.5 s; nobody ran it for another 2 s between commands"
    )
    assert said["parts"] == [
        ("imports, model, data", "6 s", "27.3%"),
        ("computing steps", "15s", "66.8%"),
        ("waiting for data", "0.28 s", "1.3%"),
        ("between steps: evaluations, saves, digests", "0.51 s", "2.3%"),
        ("until a failure was noticed", "0.5 s", "2.3%"),
        ("all", "22s", ""),
    ]
    assert said["head"] == ["attempt", "load", "steps that stayed", "between steps", "noticed after", "paused before"]
    assert said["attempts"] == [
        ["1", "5 s", "5 s", "", "0.5 s", ""], ["2", "", "10s", "0.51 s", "", ""], ["3", "1 s", "", "", "", "2 s"],
    ]  # fmt: skip
    text = page([run])
    assert 'href="#time"' in text and f"<p>{said['words']}.</p>" in text and 'data-of="noticed after"' in text
    (run / "events.jsonl").unlink()
    assert time_of(read_history(run)) == {}, "an older record does not say when attempts began"
    assert 'href="#time"' not in page([run])


@pytest.mark.parametrize("absent", ["time", "attempt"])
def test_steps_of_which_the_record_says_less_are_not_called_lost(tmp_path: Path, absent: str) -> None:
    run = write_run(tmp_path / "run", 9)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    for line in steps:
        line.pop(absent)
    (run / "metrics.jsonl").write_bytes(b"".join(map(to_bytes, steps)))
    put_events(run, (0, 1, names.ATTEMPT_STARTED, {}), (9, 1, names.ATTEMPT_ENDED, {}))
    assert time_of(read_history(run)) == {}


def test_of_very_many_attempts_few_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", 3)
    for file, event in (("events", names.ATTEMPT_STARTED), ("attempts", names.STARTED_BY)):
        lines = [
            {"attempt": n, "event": event, "fields": {"device": f"gpu {n}", "user": f"user {n}"}} for n in range(2000)
        ]
        (run / f"{file}.jsonl").write_bytes(b"".join(map(to_bytes, lines)))
    looked: list[object] = []

    def shown(value: object, most: int = 0) -> str:
        looked.append(value)
        return str(value)

    monkeypatch.setattr(surroundings, "shown_value", shown)
    assert dict(machines(read_history(run))) == {
        "device": "gpu 0; from attempt 1999 on gpu 1999", "by user": "user 0; from attempt 1999 on user 1999",
    }  # fmt: skip
    assert len(looked) == 2 * 600


def test_the_page_says_with_what_and_where_a_run_was_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 30)
    computed = {"device": "cuda: H100", "threads": 8, "versions": {"torch": "2.11", "raytune-fsdp": None}}
    put_events(
        run,
        (0, 1, names.ATTEMPT_STARTED, computed),
        (6, 2, names.ATTEMPT_STARTED, computed | {"packages": {"peft": "0.18"}}),
    )
    by = {
        "command": "raytune-fsdp train --x hf_abcdefghijklmnopqrst",
        "host": HOSTILE,
        "user": "ada",
        "commit": "c0ffee",
    }
    append_event(run / "attempts.jsonl", names.STARTED_BY, attempt=1, fields={**by, "uncommitted": False})
    append_event(run / "attempts.jsonl", names.STARTED_BY, attempt=2, fields={**by, "uncommitted": True, "user": 3})
    assert dict(machines(read_history(run))) == {
        "versions": "torch 2.11",
        "device": "cuda: H100, 8 threads a rank",
        "packages with kernels": "peft 0.18",
        "command": "raytune-fsdp train --x <redacted>",
        "on host": HOSTILE,
        "by user": "ada",
        "git commit": "c0ffee, nothing changed; from attempt 2 on c0ffee, with changes that are not committed",
    }
    (run / "export").mkdir()
    text = page([run])
    words = read(text).words
    assert f"{run}/export" in words and "git commit" in words and "it has no checkpoint" in words
    assert "hf_abcdef" not in text and HOSTILE not in text
    assert "seq_len: 1024" in read(text).text["pre"], "the whole config"
    assert 'href="#where"' in text and 'id="where"' in text


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_is_kept_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(sys, "argv", ["/opt/bin/raytune-fsdp", "train", "--cluster.env.HF_TOKEN", "a secret"])
    found = started_by()
    assert found["command"] == "raytune-fsdp train --cluster.env.HF_TOKEN '<redacted>'"
    assert (found["host"], found["user"], found["directory"]) == (socket.gethostname(), "ada", str(tmp_path))
    assert found["commit"] is None and found["uncommitted"] is None, "no repository"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    assert started_by()["uncommitted"] is False and len(started_by()["commit"]) == 40
    (tmp_path / "file").write_text("2")
    monkeypatch.setattr(sys, "argv", ["train.py", "x"])
    found = started_by()
    assert found["uncommitted"] is True and found["command"].startswith(Path(sys.executable).name.partition(".")[0])


def test_figures_of_nodes_are_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    steps = [json.loads(line) for line in lines]
    for at, line in enumerate(step for step in steps if step["kind"] == "step"):
        nodes = [[HOSTILE, 2**30, 3 * 2**30, 50.0, 2**31], ["b", 2**31, 2**30, 70.0, 2**31], ["bad"], 3]
        line["nodes"] = nodes if at in (0, 6) else None
    (run / "metrics.jsonl").write_bytes(b"".join(map(to_bytes, steps)))
    text = page([run])
    assert [(each["name"], [point[2] for point in each["points"]]) for each in chart(text, "node_gpu")["series"]] == [
        ("least", [50, 50]), ("median", [50, 50]), ("most", [70, 70]),
    ]  # fmt: skip
    (memory,) = chart(text, "node_gpu_memory")["series"]
    assert [(point[0], point[2]) for point in memory["points"]] == [(1, 2), (7, 2)], "one line where all are alike"
    assert len(chart(text, "memory")["series"]) == len(chart(text, "host")["series"]) == 1, "on scales of their own"


def test_small_sizes_and_errors_are_said_as_they_are(tmp_path: Path) -> None:
    assert [gibibytes(n) for n in (0, 5000, 10_485_760, 2**30, 3 * 2**40)] == [
        "0 B", "4.88 KiB", "10.00 MiB", "1.00 GiB", "3072.00 GiB",
    ]  # fmt: skip
    assert [took(n) for n in (0, 1e-5, 0.00099, 0.0042, 0.25, 9.9, 9.96, 380)] == [
        "0 s", "10 µs", "0.99 ms", "4.2 ms", "0.25 s", "9.9 s", "10s", "6m 20s",
    ]  # fmt: skip
    said = event_in_words(names.PREDICTED, {"kept_bytes": 1, "peak_bytes": 1, "step_seconds": 1e-5})
    assert said.endswith("a step takes about 10 µs")
    run = write_run(tmp_path / "run", 3)
    put_events(
        run,
        (
            0,
            1,
            names.PREDICTED,
            {"kept_bytes": 10**4, "peak_bytes": 2**30, "step_seconds": 0.5, "checkpoint_bytes": 1},
        ),
        (1, 1, names.PREDICTION_CHECKED, {"kept_bytes": 11_170, "peak_bytes": 2**30 + 5, "step_seconds": 0.4}),
    )
    assert predictions(read_history(run)) == [
        ("memory that a rank keeps from step to step", "9.77 KiB", "10.91 KiB", "10% too little"),
        ("memory of tensors at the most", "1.00 GiB", "1.00 GiB", "as predicted"),
        ("a checkpoint", "1 B", "not measured", ""),
        ("time of a step", "0.5 s", "0.4 s", "25% too much"),
    ]


@pytest.mark.parametrize("difference", [None, "step 9: samples is " + HOSTILE])
def test_an_audit_that_is_put_on_record_is_in_the_report(tmp_path: Path, difference: str | None) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(12)
    run.end("finished")
    found = Audit(segment=Segment(first=4, last=8, before=None, after=None), here={"world_size": 2})
    found.difference = difference
    put_on_record(found, RunDir(run.path, ""))
    text = page([run.path])
    words = read(text).words
    said = "the same to the bit" if difference is None else f"not the same: {difference}"
    assert "5 to 8" in words and said in words
    (lane,) = (each for each in data_of(text)["lanes"] if each["name"] == "audits")
    assert lane["marks"][0][0] == 8 and "steps 5 to 8 were trained again" in lane["marks"][0][2]
    assert status(read_history(run.path))[0] == "finished", "it is no part of an attempt"


def test_an_audit_keeps_its_outcome_where_the_record_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run", 3)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl, "_write_all", full)
    found = Audit(segment=Segment(first=1, last=3, before=None, after=None), here={})
    put_on_record(found, RunDir(run, ""))
    assert "is not on record" in caplog.text and "(No space left on device)" in caplog.text
    assert "training" not in caplog.text


def test_an_audit_that_cannot_be_put_on_record_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 3)
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    assert main(["audit", str(run), "--record", "--trust-places"]) == 2
    assert "events.jsonl is a directory, not a regular file; make it writable, or audit without --record" in (
        capsys.readouterr().err
    )


def test_evaluations_are_marks_below_the_loss(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    for _ in range(3):
        run.train(2)
        run.evaluate(a=2.0, b=1.0)
    (lane,) = (each for each in data_of(page([run.path]))["lanes"] if each["name"] == "evaluations")
    assert [mark[0] for mark in lane["marks"]] == [2, 4, 6] and "eval/a/loss 2" in lane["marks"][0][2]


def test_pages_of_runs_of_older_versions(tmp_path: Path) -> None:
    """They have no attempts.jsonl, and fewer fields in everything."""
    for name in ("aae7294/runs/steps", "c6723328/runs/weights"):
        run = shutil.copytree(Path(__file__).parents[1] / "fixtures" / name, tmp_path / name.partition("/")[0])
        text = page([run])
        found = read(text)
        assert "by user" not in found.words and "newest checkpoint" in found.words
        assert re.search(r'<p class="status \w+">(done|interrupted)', text) and "training time" in found.words


def test_the_command_looks_whether_a_run_is_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(tmp_path)
    run.attempt()
    run.train(5)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    from raytune_fsdp.launch import run_lock

    content = {"pid": int(gone.stdout), "namespace": run_lock._namespace(), "boot": run_lock._boot(), "token": "t"}
    run.place.lock.write_text(json.dumps(content))
    assert main(["report", str(run.path)]) == 0
    assert '<p class="status stale">' in (run.path / "report" / "index.html").read_text()
    assert capsys.readouterr().err == ""


def test_words_of_an_audit() -> None:
    said = event_in_words(names.AUDITED, {"first": 1, "step": 8, "difference": None})
    assert said == "audited: steps 1 to 8 were trained again, and are the same"
