"""How the pages look: no text is cut, nothing scrolls sideways, every axis is named, every text can be read.

What follows from the numbers of a plot is looked at without a browser; the rest in Chromium.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.record.report.drawn import ticks
from raytune_fsdp.record.report.page import page
from tests.browser import CHROMIUM, Browser
from tests.records import HOSTILE, make_config, write_run
from tests.unit.test_cli_runs import of_every_kind
from tests.unit.test_report_page import browse

TOP = 24
"""As in page.js."""
LETTER = 5.6
"""Pixels of a digit of 11 px, in any font that pages have here; Chromium says the same below."""

LOOK = Path(__file__).with_name("look_at_page.js").read_text()


def test_a_scale_has_three_ticks_at_least() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        span = 10 ** draw.uniform(-8, 9)
        low = span * draw.uniform(-1000, 1000)
        found, near = ticks(low, low + span), 1e-6 * span
        assert 3 <= len(found) <= 8 and low - near <= found[0] and found[-1] <= low + span + near
        steps = [b - a for a, b in zip(found, found[1:], strict=False)]
        assert max(steps) == pytest.approx(min(steps), rel=1e-4)
    assert ticks(1, 8) == [2, 4, 6, 8] and ticks(0, 1) == [0, 0.5, 1]
    assert ticks(3, 3) == [3] and ticks(-math.inf, 1) == [-math.inf]


@pytest.mark.parametrize(
    ("width", "steps"),
    [
        (366, 3), (1232, 8),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1232, 3), (366, 8), (366, 2000), (1232, 2000))),
    ],
)  # fmt: skip
def test_every_axis_is_named_and_no_text_of_a_plot_is_cut(tmp_path: Path, steps: int, width: int) -> None:
    run = write_run(tmp_path / "run", steps, loss=lambda step: 2 + 4 / step)
    (tmp_path / "page.html").write_text(page([run]))
    found = browse(tmp_path / "page.html", width)
    assert len(found["texts"]) > 10
    for name, texts in found["texts"].items():
        below = TOP + (300 if name == "loss" else 130) + 15
        named = [each for each in texts if each.get("class") == "axis"]
        assert [each["text"] for each in named if each["y"] == below] == ["step"], name
        assert [each["text"] for each in named if each["y"] == 11] != [""], name
        plain = [each for each in texts if "class" not in each and each["y"] <= below]
        up = [each for each in plain if each["y"] < below]
        across = [each for each in plain if each["y"] == below]
        assert len(up) >= 3 and len(across) >= 3, (name, up, across)
        edges = sorted(map(_edges, across))
        assert all(end < start for (_, end), (start, _) in zip(edges, edges[1:], strict=False)), "ticks overlap"
        for each in texts:
            start, end = _edges(each)
            assert start >= 0 and end <= width, (name, each)


def _edges(text: dict[str, Any]) -> tuple[float, float]:
    """Where a text of a plot begins and ends."""
    long = LETTER * len(text["text"])
    before = {"end": long, "middle": long / 2}.get(text.get("text-anchor", "start"), 0)
    return text["x"] - before, text["x"] - before + long


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report, a comparison and a list of runs, with long and hostile texts wherever there may be any."""
    storage = tmp_path_factory.mktemp("storage")
    runs = [write_run(storage / name, 300, config=make_config(run={"name": name})) for name in ("one", "x" * 90)]
    of_every_kind(storage)
    found = {"report": storage / "report.html", "comparison": storage / "both.html", "runs": storage / "runs.html"}
    found["report"].write_text(page(runs[:1]))
    found["comparison"].write_text(page(runs))
    assert main(["runs", str(storage), "--html"]) == 0
    return found


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
@pytest.mark.parametrize("name", ["report", "comparison", "runs"])
def test_a_browser_shows_all_of_it(pages: dict[str, Path], tmp_path: Path, name: str) -> None:
    with Browser(tmp_path / "profile") as browser:
        for width in (390, 1024, 1400):
            for scheme in ("light", "dark"):
                browser.open(pages[name].as_uri(), width=width, scheme=scheme)
                assert browser.value("document.documentElement.className") == "js"
                texts, wrong = browser.value(LOOK)
                assert texts > 50 and wrong == [], (width, scheme, wrong)
                if name != "runs":
                    assert browser.value("document.querySelectorAll('figure svg').length") > 5
        assert browser.requests == [pages[name].as_uri()] * 6 and browser.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
def test_a_curve_is_taken_as_a_file(pages: dict[str, Path], tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(pages["report"].as_uri())
        browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "files"))
        for kind in ("CSV", "PNG"):
            browser.value(
                f"[...document.querySelectorAll('.take')].find((each) => each.textContent === '{kind}').click()"
            )
            browser.wait("true")
        for _ in range(200):
            there = {file.suffix: file for file in (tmp_path / "files").glob("one-loss.*")}
            if {".csv", ".png"} <= {*there}:
                break
            browser.wait("new Promise((done) => setTimeout(() => done(true), 50))")
        head, *lines = there[".csv"].read_text().splitlines()
        assert head == "series,first_step,step,seconds,value,least,greatest"
        assert len([line for line in lines if line.startswith('"train",')]) == 300
        png = there[".png"].read_bytes()
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) > 2000, "twice as many pixels as the page has"
        assert len(png) > 20_000, "the curve is on it"
        assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
def test_runs_are_found_and_sorted(pages: dict[str, Path], tmp_path: Path) -> None:
    shown = "[...document.querySelectorAll('tbody tr')].filter((each) => !each.hidden)"
    names = f"{shown}.map((each) => each.cells[0].textContent)"
    with Browser(tmp_path / "profile") as browser:
        browser.open(pages["runs"].as_uri())
        everything = browser.value(names)
        assert len(everything) == 8
        browser.value("document.querySelector('button[data-state=failed]').click()")
        assert sorted(browser.value(names)) == ["failed", "killed-under-ray"]
        assert browser.value("document.getElementById('found').textContent") == "2 of 8 runs"
        browser.value("document.querySelector('button[data-state=failed]').click()")
        browser.value("document.getElementById('find').focus()")
        browser.call("Input.insertText", text="ended")
        assert browser.value(names) == ["ended-early"]
        browser.value("(find.value = '', choose(), document.querySelectorAll('thead button')[2].click())")
        found = browser.value(names)
        assert {*found[:2]} == {"preparing", "killed-under-ray"} and {*found[-2:]} == {"one", "x" * 90}, "by step"


def test_a_run_whose_name_is_no_text_is_in_the_list_of_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"a\xff"), 30)
    (run / "report").mkdir()
    (run / "report" / "index.html").write_text("")
    assert main(["runs", str(tmp_path), "--html"]) == 0
    assert 'href="a%FF/report/index.html"' in (tmp_path / "runs.html").read_text()


def test_texts_of_strangers_are_no_part_of_the_list_of_runs(tmp_path: Path) -> None:
    config = make_config(model={"path": HOSTILE}, run={"name": "a"})
    write_run(tmp_path / "javascript:alert(1)", 30, config=config)
    (tmp_path / "javascript:alert(1)" / "report").mkdir()
    (tmp_path / "javascript:alert(1)" / "report" / "index.html").write_text("")
    assert main(["runs", str(tmp_path), "--html", "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert HOSTILE not in text and "&lt;script&gt;alert(1)" in text
    assert 'href="javascript%3Aalert%281%29/report/index.html"' in text and '<path class="curve s0" d="M' in text
