"""Sweeps on the page of runs: what it says of them, that no text of a log is code, and how they look in a browser."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.record.report.drawn import log_ticks
from raytune_fsdp.record.report.runs_page import _MISSING, ShownField, _axis
from raytune_fsdp.tune.coordinates import shown_sweep, sweeps_in
from raytune_fsdp.tune.log import Decision, Draw, Entry, SweepBegun, Trial, TrialEnded, Value, line_of
from tests.browser import CHROMIUM, Browser
from tests.recorded import Recorded
from tests.records import HOSTILE
from tests.unit.test_report_looks import LOOK
from tests.unit.test_report_page import data_of, read

SPACE = {
    "optim.lr": {"loguniform": [1e-4, 1e-2]},
    "method.type": {"choice": ["lora", "full"]},
    "train.global_batch": {"grid": [8, 16, 32]},
}


def begun(space: Mapping[str, Any] = SPACE, metric: str | None = "eval/heldout/loss", highest: bool = False) -> Entry:
    return SweepBegun({"space": space, "metric": metric}, {}, highest)


def put_sweep(storage: Path, entries: Sequence[Entry], name: str = "rates") -> Path:
    """The directory of a sweep with this log."""
    (storage / name).mkdir(parents=True)
    (storage / name / "sweep.yaml").write_text("")
    (storage / name / "log.jsonl").write_bytes(b"".join(map(line_of, entries)))
    return storage / name


def some(trials: int, space: Mapping[str, Any] = SPACE, **more: Any) -> list[Entry]:
    """A log of this many trials: every eighth has no value yet, every tenth has failed."""
    draw = random.Random(trials)
    log: list[Entry] = [begun(space, **more)]
    for number in range(trials):
        values = {
            field: round(10 ** draw.uniform(-4, -2), 6) if "loguniform" in way else draw.choice(*way.values())
            for field, way in space.items()
        }
        log.append(Trial(number, values, number))
    for number in range(trials):
        if number % 8 != 7:
            log.append(Value(number, 50, round(draw.uniform(1.5, 3), 4)))
        if number % 10 == 9:
            log.append(TrialEnded(number, 50, "it is broken"))
    return log


def made(storage: Path) -> str:
    assert main(["runs", str(storage), "--html"]) == 0
    return (storage / "runs.html").read_text()


def test_what_a_log_says_is_shown(tmp_path: Path) -> None:
    changes = [{"optim.lr": 10.0**-n, "method.type": ("full", "lora")[n % 2]} for n in range(5)]
    log = [
        begun(), *(Trial(number, each, number) for number, each in enumerate(changes)), Value(0, 10, 3.0),
        Value(1, 10, 2.0), Value(2, 10, math.nan), Value(3, 10, 4.0), Decision(10, (0, 1), (2, 3)), Value(1, 20, 1.5),
        TrialEnded(0, 12, "broken"),
    ]  # fmt: skip
    sweep = shown_sweep(put_sweep(tmp_path, log))
    assert sweep is not None
    assert (sweep.name, sweep.metric, sweep.highest, sweep.best) == (
        "rates", "eval/heldout/loss", False, "rates-001, 1.5",
    )  # fmt: skip
    assert [(each.run, each.value, each.step, each.state, each.best) for each in sweep.trials] == [
        ("rates-001", 1.5, 20, "open", True), ("rates-003", 4.0, 10, "stopped", False),
        ("rates-002", None, 10, "stopped", False), ("rates-004", None, 0, "open", False),
        ("rates-000", 3.0, 10, "failed", False),
    ]  # fmt: skip
    # Nobody changes train.global_batch here, though the space has it.
    assert [(each.name, each.logged, list(each.listed)) for each in sweep.fields] == [
        ("optim.lr", True, []), ("method.type", False, ["lora", "full"]),
    ]  # fmt: skip


def test_seeds_and_forks_have_the_names_of_their_runs(tmp_path: Path) -> None:
    seeds: list[Entry] = [Trial(2 * variant + seed, {}, variant, seed) for variant in range(2) for seed in range(2)]
    values = [Value(number, 10, value) for number, value in enumerate([0.5, 9.0, 2.0, 3.0])]
    sweep = shown_sweep(put_sweep(tmp_path, [begun(metric=None), *seeds, *values]))
    assert sweep is not None and (sweep.metric, sweep.best) == ("mean loss", "rates-001, 2.5, the mean over 2 seeds")
    assert [(each.run, each.best) for each in sweep.trials] == [
        ("rates-001-s0", True), ("rates-001-s1", True), ("rates-000-s0", False), ("rates-000-s1", False),
    ]  # fmt: skip
    fork = [begun(), Trial(0, {"optim.lr": 1}, 0), Trial(1, {"optim.lr": 2}, 1), Draw(0, 10, 1, {"optim.lr": 3})]
    sweep = shown_sweep(put_sweep(tmp_path, fork, "forks"))
    assert sweep is not None
    assert [(each.run, each.changes) for each in sweep.trials] == [
        ("forks-000-g1", {"optim.lr": 3}), ("forks-001", {"optim.lr": 2}),
    ]  # fmt: skip


def test_axes() -> None:
    plain, missing = ShownField(name="x"), _MISSING
    assert _axis([1, 3, 2.0, missing], plain)[1] == [0, 1, 0.5, None]
    assert _axis([1e-4, 1e-2, 1e-3], ShownField(name="x", logged=True)) == (
        [(0.0, "0.0001"), (0.1505, "0.0002"), (0.3495, "0.0005"), (0.5, "0.001"), (0.6505, "0.002"), (0.8495, "0.005"),
         (1.0, "0.01")], [0, 1, 0.5],
    )  # fmt: skip
    # Of itself from two decades on, where a logarithm is possible.
    assert _axis([1, 100, 10], plain)[1] == [0, 1, 0.0909] and _axis([1, 10_000, 100], plain)[1] == [0, 1, 0.5]
    assert _axis([0, 1000, 500], ShownField(name="x", logged=True))[1] == [0, 1, 0.5]
    assert _axis([7, 7], plain) == ([(0.5, "7")], [0.5, 0.5]) and _axis([missing], plain) == ([], [None])
    assert _axis([-1.7e308, 1.7e308, 0], plain)[1] == [0, 1, 0.5]
    listed = ShownField(name="x", listed=["big", "small", {"type": "odd"}, "never"])
    assert _axis(["small", missing, "big", {"type": "odd"}], listed) == (
        [(0, "big"), (0.5, "small"), (1, '{"type": "odd"}')], [0.5, None, 0, 1],
    )  # fmt: skip
    # What is no number makes categories of all.
    assert [text for _, text in _axis([1, None, True, math.nan], plain)[0]] == ["1", "null", "true", "NaN"]


def test_a_logarithmic_scale_has_three_ticks_at_least() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        low = 10 ** draw.uniform(-280, 280)
        high = low * 10 ** draw.uniform(0.01, 10)
        found = log_ticks(low, high)
        assert 3 <= len(found) <= 8 and low * (1 - 1e-6) <= found[0] and found[-1] <= high * (1 + 1e-6)
    assert log_ticks(5e-324, 1.7e308)[-1] <= 1.7e308 and len(log_ticks(1e-6, 1e6)) <= 8


def test_a_line_has_its_words_its_colour_and_its_row(tmp_path: Path) -> None:
    put_sweep(tmp_path, some(8))
    for number in (2, 5):
        Recorded(tmp_path, f"rates-{number:03d}").attempt()
    text = made(tmp_path)
    (sweep,) = data_of(text)["sweeps"]
    assert [axis["name"] for axis in sweep["axes"]] == [*SPACE, "eval/heldout/loss"]
    lines = sweep["lines"]
    values = [line["at"][3] for line in lines if line["at"][3] is not None]
    assert len(lines) == 8 and len(values) == 7 and sorted(values) == values and values[0] == 0 and values[-1] == 1
    assert [line["grade"] for line in lines] == [0, 0, 1, 2, 3, 4, 5, None]
    assert [line["best"] for line in lines] == [True] + [False] * 7
    assert all(0 <= place <= 1 for line in lines for place in line["at"] if place is not None)
    best = lines[0]["words"]
    assert best.startswith("rates-00") and best.endswith(" after step 50, open; the best") and "optim.lr=0.00" in best
    assert lines[7]["words"].endswith("; no eval/heldout/loss yet, open")
    rows = {line["words"][:9]: line["row"] for line in lines}
    assert {rows.pop("rates-002"), rows.pop("rates-005")} == {0, 1} and set(rows.values()) == {None}
    assert 'id="run-0"' in text and 'href="#run-1">rates-00' in text
    assert "8 trials; the best: rates-00" in read(text).words


def test_texts_of_a_log_are_no_part_of_the_page(tmp_path: Path) -> None:
    space = {HOSTILE: {"grid": [HOSTILE, "x"]}, "a\x1b[2J\u202e": {"loguniform": HOSTILE}, "b": HOSTILE}
    changes = {HOSTILE: HOSTILE, "a\x1b[2J\u202e": "\ud800</script>", "b": {HOSTILE: [HOSTILE]}}
    name = "<img src=x onerror=alert(1)>"
    log = [begun(space, metric=HOSTILE, highest=True), Trial(0, changes, 1 << 62, 1 << 62), Value(0, 1 << 62, 1e308)]
    put_sweep(tmp_path, log, name)
    Recorded(tmp_path, f"{name}-{1 << 62}-s{1 << 62}").attempt()
    text = made(tmp_path)
    assert HOSTILE not in text and "<img" not in text and "\x1b" not in text and "\u202e" not in text
    found = read(text)
    assert found.words.count(HOSTILE) >= 2, "it is shown as it is"
    assert [tag for tag, _ in found.elements].count("script") == 2
    (sweep,) = data_of(text)["sweeps"]
    assert sweep["axes"][0]["name"] == HOSTILE and sweep["lines"][0]["row"] == 0
    assert "·" in sweep["lines"][0]["words"]


def test_what_cannot_be_read_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    broken = {
        "garbage": b"\xff\xfe\n", "another": line_of(begun()).replace(b'"format": 1', b'"format": 99'),
        "many": b"".join(map(line_of, [begun(), *(Trial(number, {}, number) for number in range(1001))])),
    }  # fmt: skip
    for name, content in broken.items():
        (put_sweep(tmp_path, [], name) / "log.jsonl").write_bytes(content)
    (put_sweep(tmp_path, [], "pipe") / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "pipe" / "log.jsonl")
    (put_sweep(tmp_path, [], "link") / "log.jsonl").unlink()
    (tmp_path / "link" / "log.jsonl").symlink_to("/etc/passwd")
    (put_sweep(tmp_path, [], "none") / "log.jsonl").unlink()
    put_sweep(tmp_path, [], "empty")
    put_sweep(tmp_path, [begun()], "begun")
    put_sweep(tmp_path, some(3), "good")
    words = read(made(tmp_path)).words
    for name, why in (
        ("garbage", "line 1 is not an entry of a sweep's log"), ("another", "reads only format 1"),
        ("many", "has 1,001 trials, and a sweep has 1,000 at most"), ("pipe", "is a pipe, not a regular file"),
        ("link", "is a symbolic link, not a regular file"),
    ):  # fmt: skip
        assert f"Sweep {name}" in words and why in words, name
    assert words.count("cannot be shown") == 5
    assert "root:" not in words and "Sweep none" not in words and "Sweep empty" not in words
    assert "Sweep begun" not in words and "3 trials; the best: good-00" in words


def test_a_page_has_so_many_sweeps_and_fields(tmp_path: Path) -> None:
    for number in range(23):
        path = put_sweep(tmp_path, some(1), f"s{number}")
        os.utime(path / "log.jsonl", (number, number))
    shown, older = sweeps_in(tmp_path)
    assert [each.name for each in shown] == [f"s{number}" for number in range(22, 2, -1)] and older == 3
    put_sweep(tmp_path, some(2, {f"field.{n}": {"grid": [1, 2]} for n in range(15)}), "wide")
    text = made(tmp_path)
    assert len(data_of(text)["sweeps"]) == 20 and len(data_of(text)["sweeps"][0]["axes"]) == 13
    words = " ".join(read(text).words.split())
    assert "3 more fields are changed, and not shown" in words and "4 older sweeps are not shown" in words


# In a browser.

browsers = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
WIDE = {f"a.section.with.a.long.name.{n}": {"grid": ["a value that is long", "another one"]} for n in range(12)}


@pytest.mark.slow
@browsers
@pytest.mark.parametrize("trials", [1, 8, 200])
def test_a_browser_shows_a_sweep_of_any_size(tmp_path: Path, trials: int) -> None:
    put_sweep(tmp_path, some(trials))
    put_sweep(tmp_path, some(min(trials, 8), {**WIDE, HOSTILE: {"grid": [HOSTILE]}}, metric=HOSTILE), "wide")
    for number in range(trials):
        Recorded(tmp_path, f"rates-{number:03d}")
    made(tmp_path)
    page = (tmp_path / "runs.html").as_uri()
    with Browser(tmp_path / "profile") as browser:
        for width in (390, 1024, 1400):
            for scheme in ("light", "dark"):
                browser.open(page, width=width, scheme=scheme)
                browser.value("document.querySelectorAll('details').forEach((each) => (each.open = true))")
                browser.wait("document.querySelectorAll('figure svg').length === 2")
                texts, wrong = browser.value(LOOK)
                assert texts > 30 and wrong == [], (width, scheme, wrong)
                many = "sweeps.map((each) => each.plot.querySelectorAll('path.curve:not(.near, .kept)').length)"
                assert sorted(browser.value(many)) == sorted([trials, min(trials, 8)])
                assert browser.value("document.querySelectorAll('path.best').length") == 2
        assert browser.requests == [page] * 6 and browser.complaints == []


@pytest.mark.slow
@browsers
def test_a_trial_is_pointed_at_and_its_row_is_marked(tmp_path: Path) -> None:
    put_sweep(tmp_path, some(8))
    for number in range(8):
        Recorded(tmp_path, f"rates-{number:03d}")
    made(tmp_path)
    says = "sweeps[0].says.textContent"
    marked = "[...document.querySelectorAll('tr.chosen[aria-current=true]')].map((each) => each.cells[0].textContent)"
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "runs.html").as_uri())
        browser.wait("sweeps[0].points")
        words = browser.value("data.sweeps[0].lines.map((each) => each.words)")
        assert browser.value(says).startswith("Point at a line, or use the arrow keys")
        # By the keyboard: from the best on, and no further than the last.
        browser.value("sweeps[0].plot.focus()")
        for times, line in ((1, 0), (1, 1), (20, 7)):
            browser.press("ArrowRight", times)
            assert browser.value(says) == words[line]
        browser.press("ArrowLeft", 20)
        browser.press("Enter")
        assert browser.value(marked) == [words[0][:9]]
        assert browser.value(says) == f"{words[0]} (its row)"
        row = "document.querySelector(sweeps[0].says.querySelector('a').getAttribute('href'))"
        assert browser.value(f"{row} === document.querySelector('tr.chosen')")
        browser.press("Escape")
        assert browser.value(marked) == []
        # By the pointer: the lowest value is that of the best, and no other line ends below it.
        x, y = browser.value(
            "(() => { const box = sweeps[0].plot.getBoundingClientRect(), [x, y] = sweeps[0].points[0].at(-1);"
            " return [box.left + x, box.top + y + 5]; })()"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert browser.value(says) == words[0]
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert browser.value(marked) == [words[0][:9]] and browser.value(says) == f"{words[0]} (its row)"
        # Rows are sorted, and the mark stays with its run.
        browser.value("document.querySelector('table.runs thead button').click()")
        assert browser.value(marked) == [words[0][:9]] and browser.complaints == []
