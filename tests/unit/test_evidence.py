"""The command that gathers evidence on a GPU: it loses nothing, ends in time, and every piece of it runs."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
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
from benchmarks.gpu.plan_pieces import CARDS, COMMANDS, simulate
from benchmarks.gpu.plans import Plans
from benchmarks.gpu.process import (
    CUT_OFF,
    DONE,
    FAILED,
    NOT_HERE,
    NOTHING_SPECIAL,
    UNDER_WAY,
    Keep,
    Needs,
    NotHereError,
    Piece,
)
from raytune_fsdp.predict.devices import DEVICES

ROOT = Path(__file__).parents[2]
README = (ROOT / "benchmarks" / "README.md").read_text()
SETTINGS = {"device": "cpu", "size": "tiny"}


def well(device: str, directory: Path, keep: Keep, *, number: float = 1.0, mark: str | None = None) -> dict[str, Any]:
    if mark:
        with open(mark, "a") as file:
            file.write(f"{number}\n")
    return {"tokens_per_second": number, "device": device}


def wrong(device: str, directory: Path, keep: Keep, *, mark: str) -> dict[str, Any]:
    well(device, directory, keep, mark=mark)
    raise ValueError("a reason\nin two lines")


def lacking(device: str, directory: Path, keep: Keep) -> dict[str, Any]:
    raise NotHereError("something is not installed")


def killed(device: str, directory: Path, keep: Keep) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def endless(device: str, directory: Path, keep: Keep, *, pids: str, kept: float | None = None) -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    if kept is not None:
        keep({"tokens_per_second": kept - 1})
        keep({"tokens_per_second": kept})
    time.sleep(600)
    return {}


def piece(
    name: str,
    run: Any = well,
    *,
    seconds: float = 20,
    least: float = 0,
    needs: Needs = NOTHING_SPECIAL,
    **arguments: Any,
) -> Piece:
    return Piece(name=name, kind="train", seconds=seconds, least=least, needs=needs, run=partial(run, **arguments))


def call(
    directory: Path, pieces: list[Piece], *, seconds: float = 1000, plans: Plans | None = None, **machine: Any
) -> Evidence:
    """One call of the command, without what it asks of the machine."""
    evidence = Evidence(directory / "file.json", directory / "out", pieces, SETTINGS, plans)
    evidence.begin_call({"device": "cpu", **machine})
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
    assert re.search(r"long: left for the next call, (9\d|100) s are too few for it", capsys.readouterr().out)
    assert list(saved(tmp_path)) == ["short"]
    assert "| long | not measured |" in the_page(tmp_path)
    assert "| short | 1 |" in the_page(tmp_path)


@pytest.mark.slow
def test_a_piece_gets_what_is_left_if_that_may_do(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hangs = piece("hangs", endless, seconds=200, least=2, pids=str(pids))
    began = time.monotonic()
    call(tmp_path, [hangs, piece("late", seconds=20, least=10)], seconds=4)
    assert time.monotonic() - began < 20
    assert saved(tmp_path)["hangs"]["error"] in ("stopped after 4 s, its limit", "stopped after 3 s, its limit")
    assert "late" not in saved(tmp_path)


def test_what_a_piece_has_measured_until_its_limit_is_kept(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pieces = [piece("slow", endless, seconds=2, pids=str(pids), kept=7.0)]
    call(tmp_path, pieces)
    assert (saved(tmp_path)["slow"]["status"], saved(tmp_path)["slow"]["result"]["tokens_per_second"]) == (CUT_OFF, 7.0)
    assert "| slow (cut off) | 7 |" in the_page(tmp_path)
    assert "- slow, try 1: stopped after 2 s, its limit" in the_page(tmp_path)
    # A second try that ends sooner, or dies, leaves what the first has found.
    call(tmp_path, [piece("slow", killed)])
    found = saved(tmp_path)["slow"]
    assert (found["status"], found["tries"], found["result"]["tokens_per_second"]) == (FAILED, 2, 7.0)


def test_a_call_that_is_killed_keeps_the_parts_of_a_piece(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pieces = [piece("slow", endless, seconds=100, pids=str(pids), kept=7.0)]
    killed_call = mp.get_context("fork").Process(target=call, args=(tmp_path, pieces))
    killed_call.start()
    wait_until(lambda: "result" in (tmp_path / "file.json").read_text() if (tmp_path / "file.json").exists() else False)
    wait_until(lambda: saved(tmp_path)["slow"]["result"]["tokens_per_second"] == 7.0)
    killed_call.kill()
    killed_call.join()
    assert saved(tmp_path)["slow"]["status"] == UNDER_WAY


LACKS: dict[str, tuple[Needs, dict[str, Any]]] = {
    "needs 120 GiB, and the device has 79": (Needs(gib=119.6), {"memory_gib": 79.2}),
    "needs torch 2.12, and this is 2.11.0+cu130": (Needs(torch="2.12"), {"torch": "2.11.0+cu130"}),
    "needs a device of capability 8.9": (Needs(capability=(8, 9)), {"capability": [8, 0]}),
    "torchao is not installed": (Needs(packages=("torchao",)), {}),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_machine_lacks_is_said_before_anything_begins(tmp_path: Path, lack: str) -> None:
    needs, machine = LACKS[lack]
    mark = tmp_path / "mark"
    evidence = call(tmp_path, [piece("one", needs=needs, mark=str(mark))], **machine)
    assert (saved(tmp_path)["one"]["status"], saved(tmp_path)["one"]["error"]) == (NOT_HERE, lack)
    assert evidence.missing() == [] and not mark.exists()
    enough = {"memory_gib": 140.0, "torch": "2.12.1", "capability": [9, 0], "torchao": "0.18.0"}
    assert needs.lacking(enough) is None


def test_a_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    planned = {"tokens_per_second": 10110.0, "step_seconds": 0.8, "tensors_gib": 64.0}
    plans = Plans({"a": {"cards": {"H100": planned, "H200": {**planned, "tensors_gib": 60.0}}}})
    call(tmp_path, [piece("a", number=12473.0)], plans=plans, device="NVIDIA H100 80GB HBM3")
    assert "| a | 12,473 | 10,110 | – | 0.8 | – | 64 |" in the_page(tmp_path)
    assert plans.gib("a") == 60.0 and plans.of("a", "NVIDIA A100") is None


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
    call(tmp_path, [piece("dies", killed), piece("hangs", endless, seconds=1, pids=str(pids)), piece("well")])
    found = saved(tmp_path)
    assert found["dies"]["error"] == "its process died: SIGKILL"
    assert found["hangs"]["error"] == "stopped after 1 s, its limit"
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
        "train 8192 x 1 of 8b, compiled, recompute full": done("train", profile={"rows": [], "idle_percent": 1.5}),
        "fp8 8192 x 1 of 8b, bf16": done("fp8", tokens_per_second=5000.0),
        "fp8 8192 x 1 of 8b, tensorwise": done("fp8", tokens_per_second=6500.0),
        "deterministic 1b, eager": done("deterministic", again_equal=True, equal=True),
        "deterministic 1b, compiled": done("deterministic", again_equal=False),
    }
    call = {"began": "now", "device": "a GPU", "torch": "2.11.0"}
    text = page({"settings": {"device": "cuda", "size": "full"}, "calls": [call], "pieces": found}, [])
    rows = [line.split(" | ")[1:] for line in text.splitlines() if "at least" in line or "at most" in line]
    assert rows == [
        ["at least 2", "1.9", "missed |"],
        ["at least 40", "47.5", "reached |"],
        ["at least 45", "not measured", "|"],
        ["at least 12473", "not measured", "|"],
        ["at most 0", "2", "missed |"],
        ["at most 3", "1.5", "reached |"],
        ["at most 1.5", "not measured", "|"],
        ["at least 1.2", "1.3", "reached |"],
        ["at least 1", "0", "missed |"],
        ["at least 1", "1", "reached |"],
    ]


def test_what_targets_are_about_is_measured() -> None:
    from benchmarks.gpu.pieces import pieces_of

    names = [piece.name for piece in pieces_of("full")]
    assert len(set(names)) == len(names)
    for target in TARGETS:
        assert any(name.startswith(target.pieces) for name in names), target
    assert {piece.kind for piece in pieces_of("full")} == set(TABLES)


def test_how_long_a_gpu_is_idle() -> None:
    from benchmarks.gpu.kernels import of_trace

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
    assert [row["times_in_a_step"] for row in found["rows"]] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert found["kernels_of_a_step"] == 1


def test_what_two_commands_train_has_a_plan_and_plans_are_of_what_is_trained() -> None:
    from benchmarks.gpu.pieces import pieces_of

    plans = Plans.read()
    for card in CARDS:
        pieces = pieces_of("full", DEVICES[card].memory / 2**30, plans)
        names = [each.name for each in pieces]
        for each in pieces[: names.index("tests/gpu")]:
            assert each.asked is None or plans.of(each.name, card) is not None, "python -m benchmarks.gpu.plan_pieces"
        for each in pieces:
            assert each.name not in plans.pieces or plans.pieces[each.name]["asked"] == each.asked, each.name


def test_weights_are_drawn_where_they_are_needed() -> None:
    """A name in the package that is no longer there would cost the only time on a GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu.made_up import drawn_on
    from raytune_fsdp.model.weights.source import RandomWeights

    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    with drawn_on(torch.device("meta")):
        assert RandomWeights(network, 7).read("lm_head.weight", 0, 4).is_meta


@pytest.mark.parametrize("card", CARDS)
def test_two_commands_get_to_what_tells_most(card: str) -> None:
    from benchmarks.gpu.pieces import pieces_of

    plans, device = Plans.read(), DEVICES[card]
    turns = [*simulate(pieces_of("full", device.memory / 2**30, plans), device, plans)]
    done = {turn.name for turn in turns if turn.status == DONE}
    whole = {"H200": "8192 x 1 of 8b", "H100": "4096 x 2 of 3b"}[card]
    assert done >= {
        "ceilings", "attention 8192", "train 4096 x 2 of 1b, compiled, recompute none",
        f"train {whole}, compiled, recompute full", "lora 4096 x 2 of 8b, compiled", f"fp8 {whole}, bf16",
        f"fp8 {whole}, tensorwise", "deterministic 1b, eager", "checkpoint of 1b", "loss",
    }  # fmt: skip
    begun = [(turn.command, turn.name) for turn in turns if turn.status in (DONE, CUT_OFF)]
    assert begun[-1] == (2, "tests/gpu"), "until the last second"
    assert all(turn.begins + turn.seconds <= COMMANDS[turn.command - 1] for turn in turns)
    not_here = {turn.name for turn in turns if turn.status == NOT_HERE}
    assert "qlora 4096 x 2 of 8b, compiled" in not_here
    assert ("train 8192 x 1 of 8b, compiled, recompute full" in not_here) == (card == "H100")


def rehearse(directory: Path, seconds: float, number: int) -> tuple[float, dict[str, Any]]:
    """Paste the text of benchmarks/README.md, with less time, a tiny size and no GPU; return what came back."""
    (text,) = set(re.findall(r"^    (bash benchmarks/gpu/there\.sh .*)$", README, re.MULTILINE))
    out = directory / f"out{number}"
    path, own = f"{Path(sys.executable).parent}:{os.environ['PATH']}", dict.fromkeys(("HOME", "TMPDIR"), str(directory))
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"{text.replace('SECONDS', f'{seconds:.0f}')} --device cpu --size tiny"], cwd=ROOT,
        env={**own, "PATH": path, "OMP_NUM_THREADS": "1", "OUT": str(out), "CARRIED": str(directory / "carried")},
        capture_output=True, text=True, timeout=seconds + 60,
    )  # fmt: skip
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".json", ".md", ".txt", ".txt"]
    return took, json.loads((out / "evidence.json").read_text())["pieces"]


@pytest.mark.slow
def test_both_commands_on_a_cpu_in_a_fifth_of_their_time(tmp_path: Path) -> None:
    from benchmarks.gpu.pieces import SCALES, pieces_of

    limits = [SCALES["tiny"].pace * seconds for seconds in COMMANDS]
    took = []
    for number, seconds in enumerate(limits, 1):
        each, found = rehearse(tmp_path, seconds, number)
        took.append(each)
    assert all(each <= seconds + 5 for each, seconds in zip(took, limits, strict=True)) and sum(took) < 180
    names = [piece.name for piece in pieces_of("tiny")]
    first = names[: names.index("checkpoint of tiny") + 1]
    assert {found[name]["status"] for name in first} <= {DONE, CUT_OFF}, found
    assert {name: each["error"] for name, each in found.items() if each["status"] == FAILED} == {}
    assert [*found] == [name for name in names if name in found], "in their order"
    profiles = [found[name]["result"]["profile"]["rows"] for name in first if "profile" in found[name]["result"]]
    assert len(profiles) == 3 and all(profiles)
    assert found["deterministic tiny, eager"]["result"]["again_equal"]


def test_the_text_to_paste_is_short_and_its_limits_are_the_real_ones() -> None:
    (text,) = set(re.findall(r"^    (bash benchmarks/gpu/there\.sh .*)$", README, re.MULTILINE))
    assert len(text) <= 2000
    assert f"`SECONDS` is {COMMANDS[0]:.0f} the first time and {COMMANDS[1]:.0f} the second" in README


_ABSENT = ("ray", "mlflow", "datasets", "hypothesis", "xdist", "pytest_timeout", "importlinter", "trl", "matplotlib")


@pytest.mark.slow
def test_gpu_tests_collect_on_a_bare_machine(tmp_path: Path) -> None:
    """Of what pytest and its plugins are, and of what only extras bring, nothing else is there."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "found = PathFinder.find_spec\n"
        "def find_spec(cls, name, *rest):\n"
        f"    return None if name.partition('.')[0] in {_ABSENT!r} else found(name, *rest)\n"
        "PathFinder.find_spec = classmethod(find_spec)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^tests/gpu/test_\w+\.py::", done.stdout, re.MULTILINE)) >= 20
