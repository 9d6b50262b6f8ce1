"""The command that gathers evidence on a GPU: it loses nothing, ends in time, and every piece of it runs."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.evidence import Evidence, gather
from benchmarks.gpu.page import TABLES, TARGETS, page
from benchmarks.gpu.process import DONE, FAILED, NOT_HERE, UNDER_WAY, NotHereError, Piece

ROOT = Path(__file__).parents[2]
SETTINGS = {"device": "cpu", "size": "tiny"}


def well(device: str, directory: Path, *, number: float = 1.0, mark: str | None = None) -> dict[str, Any]:
    if mark:
        with open(mark, "a") as file:
            file.write(f"{number}\n")
    return {"tokens_per_second": number, "device": device}


def wrong(device: str, directory: Path, *, mark: str) -> dict[str, Any]:
    well(device, directory, mark=mark)
    raise ValueError("a reason\nin two lines")


def lacking(device: str, directory: Path) -> dict[str, Any]:
    raise NotHereError("something is not installed")


def killed(device: str, directory: Path) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def endless(device: str, directory: Path, *, pids: str) -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    time.sleep(600)
    return {}


def piece(name: str, run: Any = well, *, seconds: float = 20, **arguments: Any) -> Piece:
    return Piece(name=name, kind="train", seconds=seconds, run=partial(run, **arguments))


def call(directory: Path, pieces: list[Piece], *, seconds: float = 1000) -> Evidence:
    """One call of the command, without what it asks of the machine."""
    evidence = Evidence(directory / "file.json", directory / "out", pieces, SETTINGS)
    evidence.begin_call({"device": "cpu"})
    gather(evidence, mp.get_context("fork"), device="cpu", deadline=time.monotonic() + seconds)
    return evidence


def saved(directory: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((directory / "file.json").read_text())["pieces"]
    return found


def the_page(directory: Path) -> str:
    (path,) = (directory / "out").glob("evidence-*.md")
    return path.read_text()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def test_a_call_adds_what_is_missing(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    first = [piece("a", number=1.0, mark=mark), piece("c", number=3.0, mark=mark)]
    call(tmp_path, first)
    call(tmp_path, [first[0], piece("b", number=2.0, mark=mark), first[1]])
    assert Path(mark).read_text().split() == ["1.0", "3.0", "2.0"]
    found = saved(tmp_path)
    assert {name: record["status"] for name, record in found.items()} == dict.fromkeys("acb", DONE)
    assert [found[name]["call"] for name in "abc"] == [0, 1, 0]
    assert found["b"]["result"] == {"tokens_per_second": 2.0, "device": "cpu"}
    (copy,) = (tmp_path / "out").glob("evidence-*.json")
    assert copy.read_text() == (tmp_path / "file.json").read_text()


def test_what_does_not_fit_is_left_for_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = call(tmp_path, [piece("long", seconds=200), piece("short", seconds=20)], seconds=100)
    assert [left.name for left in evidence.missing()] == ["long"]
    assert "long: left for the next call, it may take 200 s" in capsys.readouterr().out
    assert list(saved(tmp_path)) == ["short"]
    assert "| long | not measured |" in the_page(tmp_path)
    assert "| short | 1 |" in the_page(tmp_path)


def test_a_failure_is_recorded_and_tried_once_more(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    pieces = [piece("bad", wrong, mark=mark), piece("new", mark=mark, number=7.0)]
    call(tmp_path, pieces[:1])
    assert saved(tmp_path)["bad"]["error"] == "ValueError: a reason in two lines"
    assert "in wrong" in saved(tmp_path)["bad"]["traceback"]
    assert "- bad, try 1: ValueError: a reason in two lines" in the_page(tmp_path)
    call(tmp_path, pieces)
    call(tmp_path, pieces)
    assert Path(mark).read_text().split() == ["1.0", "7.0", "1.0"], "new pieces come first, then one more try"
    assert (saved(tmp_path)["bad"]["status"], saved(tmp_path)["bad"]["tries"]) == (FAILED, 2)


def test_what_the_machine_lacks_is_no_failure(tmp_path: Path) -> None:
    evidence = call(tmp_path, [piece("one", lacking)])
    assert (saved(tmp_path)["one"]["status"], evidence.missing()) == (NOT_HERE, [])
    assert "| one | something is not installed |" in the_page(tmp_path)


def test_a_piece_that_dies_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    call(tmp_path, [piece("dies", killed), piece("hangs", endless, seconds=2, pids=str(pids)), piece("well")])
    found = saved(tmp_path)
    assert found["dies"]["error"] == "its process died: SIGKILL"
    assert found["hangs"]["error"] == "stopped after 2 s, its limit"
    assert found["well"]["status"] == DONE
    wait_until(lambda: all(map(is_gone, json.loads(pids.read_text()))))


def test_a_call_that_is_killed_loses_only_what_it_was_doing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pieces = [piece("done"), piece("hangs", endless, seconds=100, pids=str(pids))]
    killed_call = mp.get_context("fork").Process(target=call, args=(tmp_path, pieces))
    killed_call.start()
    wait_until(lambda: pids.exists() and pids.read_text())
    assert (saved(tmp_path)["done"]["status"], saved(tmp_path)["hangs"]["status"]) == (DONE, UNDER_WAY)
    killed_call.kill()
    killed_call.join()
    wait_until(lambda: all(map(is_gone, json.loads(pids.read_text()))))
    call(tmp_path, [pieces[0], piece("hangs")])
    assert saved(tmp_path)["done"]["tries"] == 1
    assert (saved(tmp_path)["hangs"]["status"], saved(tmp_path)["hangs"]["tries"]) == (DONE, 2)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    call(tmp_path, [])
    with pytest.raises(ValueError, match="name another file"):
        Evidence(tmp_path / "file.json", tmp_path, [], {"device": "cuda", "size": "full"})


def test_the_page_holds_what_was_found_against_the_targets() -> None:
    def done(kind: str, **result: Any) -> dict[str, Any]:
        return {"kind": kind, "status": DONE, "tries": 1, "call": 0, "seconds": 1.0, "result": result}

    found = {
        "attention 2048": done("attention", both_times=9.0),
        "attention 8192": done("attention", both_times=1.9),
        "train 4096 x 2 of 1b, eager": done("train", mfu_percent=38.0, graphs_after_step_3=0),
        "train 4096 x 2 of 1b, compiled": done("train", mfu_percent=47.5, graphs_after_step_3=2),
        "deterministic 1b, eager": done("deterministic", equal=True),
        "deterministic 1b, compiled": done("deterministic", equal=False),
    }
    call = {"began": "now", "device": "a GPU", "torch": "2.11.0"}
    text = page({"settings": {"device": "cuda", "size": "full"}, "calls": [call], "pieces": found}, [])
    rows = [line.split(" | ")[1:] for line in text.splitlines() if "at least" in line or "at most" in line]
    assert rows == [
        ["at least 2", "1.9", "missed |"],
        ["at least 40", "47.5", "reached |"],
        ["at least 45", "not measured", "|"],
        ["at most 0", "2", "missed |"],
        ["at most 3", "not measured", "|"],
        ["at most 1.5", "not measured", "|"],
        ["at least 1.2", "not measured", "|"],
        ["at least 1", "0", "missed |"],
    ]


@pytest.mark.thorough  # imports torch
def test_what_targets_are_about_is_measured() -> None:
    from benchmarks.gpu.pieces import pieces_of

    names = [piece.name for piece in pieces_of("full")]
    assert len(set(names)) == len(names)
    for target in TARGETS:
        assert any(name.startswith(target.pieces) for name in names), target
    assert {piece.kind for piece in pieces_of("full")} == set(TABLES)


@pytest.mark.thorough  # imports torch
def test_how_long_a_gpu_is_idle() -> None:
    from benchmarks.gpu.training import of_trace

    kernel = {"cat": "kernel", "name": "product"}
    found = of_trace(
        [
            {**kernel, "ts": 1000.0, "dur": 2000.0},
            {**kernel, "ts": 2000.0, "dur": 3000.0},
            {"cat": "gpu_memcpy", "name": "copy", "ts": 8000.0, "dur": 3000.0},
            {"cat": "cuda_runtime", "name": "launch", "ts": 0.0, "dur": 9000.0},
        ]
    )
    assert found["idle_percent"] == pytest.approx(30)
    assert found["gpu_ms_of_a_step"] == pytest.approx(10 / 3)
    assert [(row["name"], row["percent"]) for row in found["rows"]] == [("product", 62.5), ("copy", 37.5)]


@pytest.mark.slow
def test_every_piece_runs(tmp_path: Path) -> None:
    from benchmarks.gpu.pieces import pieces_of

    file = tmp_path / "file.json"
    command = [sys.executable, "-m", "benchmarks.gpu.evidence", "--device", "cpu", "--size", "tiny", "--minutes", "30"]
    # It takes 2 minutes. A piece that may take longer than what is left of the 30 would wait for a second call.
    options = ["--out", str(tmp_path / "out"), "--continue", str(file)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = saved(tmp_path)
    assert {name: record["error"] for name, record in found.items() if record["status"] == FAILED} == {}
    assert list(found) == [piece.name for piece in pieces_of("tiny")]
    assert {record["status"] for record in found.values()} <= {DONE, NOT_HERE}
    assert "0 pieces are left" in done.stdout
    text = the_page(tmp_path)
    for name in found:
        assert f"| {name} |" in text
    assert "Nothing of what was run." in text
