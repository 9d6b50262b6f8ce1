"""The page about a run: small, quick, whole, harmless, and true."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytune_fsdp.cli import main
from raytune_fsdp.plan.counts import Census, DatasetCount, SkippedRow
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.lines import to_bytes
from raytune_fsdp.record.report.facts import best, evaluations, settings
from raytune_fsdp.record.report.history import census_of, read_history
from raytune_fsdp.record.report.history import data_of as data_of_census
from raytune_fsdp.record.report.page import make_report, page
from raytune_fsdp.record.report.spikes import spikes
from raytune_fsdp.record.report.summary import summary
from raytune_fsdp.record.report.thin import buckets, thinned
from tests.records import HOSTILE, make_config, write_run

FAKE_BROWSER = Path(__file__).with_name("fake_browser.js")
NODE = shutil.which("node")
VOID = {"meta", "img", "br", "link", "input"}


class Reader(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "an element is not closed"

    def handle_data(self, data: str) -> None:
        place = self.open[-1] if self.open else ""
        self.text[place] = self.text.get(place, "") + data

    @property
    def words(self) -> str:
        return " ".join(text for place, text in self.text.items() if place not in ("script", "style"))


def read(text: str) -> Reader:
    found = Reader(text)
    assert found.open == []
    return found


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    return found


def chart(text: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in data_of(text)["charts"] if each["id"] == name)
    return dict(found)


def browse(path: Path, width: int) -> dict[str, Any]:
    if NODE is None:
        pytest.skip("node, which runs the page's script here, is not installed")
    done = subprocess.run([NODE, FAKE_BROWSER, path, str(width)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 steps with a spike, losses that are not finite, and everything else that can be on record."""
    odd = {700: 9.25, 701: 7.0, 2000: math.nan, 2400: math.inf}
    noise = np.random.default_rng(0).normal(0, 0.05, 3001)
    falling = lambda step: odd.get(step, 2 + 4 / (1 + step / 300) + float(noise[step]))  # noqa: E731
    return write_run(tmp_path_factory.mktemp("runs") / "long", 3000, loss=falling)


@pytest.fixture(scope="module")
def made(run: Path) -> str:
    return page([run])


@pytest.mark.slow
def test_100_000_steps_take_five_seconds_and_two_megabytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", 100_000, loss=lambda step: 77.125 if step == 54_321 else 2 + step % 7 / 10)
    before = time.process_time()
    assert make_report(run) == run / "report" / "index.html"
    took = time.process_time() - before
    text = (run / "report" / "index.html").read_text()
    assert took <= 5 and len(text.encode()) <= 2_000_000
    (train,) = (each for each in chart(text, "loss")["series"] if each["name"] == "train")
    assert len(train["mid"]) == 1000 and max(train["high"]) == 77.125 and min(train["low"]) == 2
    assert f"raytune-fsdp step {run} 54321" in read(text).words


def test_thinning_keeps_every_extreme() -> None:
    values = np.random.default_rng(1).normal(size=123_457)
    values[[3, 99_999]] = 1e6, -1e6
    values[[50, 51]] = math.nan, math.inf
    into = buckets(len(values))
    found = thinned(values, into)
    for first, end, low, mid, high in zip(into[:-1], into[1:], found["low"], found["mid"], found["high"], strict=True):
        share = values[first:end][np.isfinite(values[first:end])]
        assert (low, high) == (pytest.approx(share.min(), rel=1e-4), pytest.approx(share.max(), rel=1e-4))
        assert mid == pytest.approx(share.mean(), rel=1e-4, abs=1e-9)
    assert thinned(np.array([1.0, math.nan, math.inf, 3e38]), buckets(4)) == {"mid": [1, None, None, 3e38]}
    assert thinned(np.array([]), buckets(0)) == {"mid": []}
    assert thinned(np.full(5000, 1.7e308), buckets(5000))["mid"][0] == pytest.approx(1.7e308)


def test_a_page_needs_nothing_from_outside_and_no_text_on_it_is_code(made: str) -> None:
    found = read(made)
    assert HOSTILE in found.words, "it is shown as it is"
    assert HOSTILE in json.dumps(data_of(made), ensure_ascii=False).replace('\\"', '"')
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 2 and not {"img", "link", "iframe", "object", "base", "form"} & {*tags}
    for tag, attributes in found.elements:
        assert (attributes.get("href") or "#").startswith("#"), "links lead to sections of the page"
        assert not {"src", "srcset", "action", "style", "xlink:href"} & {*attributes}, tag
        assert not [name for name in attributes if name.startswith("on")], tag
    script, style = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", made, re.DOTALL)
    (policy,) = (each["content"] for _, each in found.elements if each.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';")
    for text in (script[1], style[0]) if script[1] else (script[0], style[1]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
        assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|url\(|@import|fetch\(|innerHTML|eval\(", text)


def test_the_page_says_what_the_run_is_and_where_it_stands(made: str, run: Path) -> None:
    words = read(made).words
    for said in (
        "interrupted at step 3,000 of 100,000", "2.", " at first", "2 attempts", "samples seen", "24k",
        "failed: rank 1 on", "24M", "75% of them trained on", "12,000,000", "66.7%",
        "24,000 packed samples of 1,024 tokens", "are trained, 97.7% full",
        "Counted before training, over an epoch: 900 packed samples", "optim.lr", "0.0001", "eval/code/loss",
        f"raytune-fsdp step {run} 700", f"raytune-fsdp step {run} 2000", f"raytune-fsdp step {run} 2400", "9.2500",
        "something new", "rows dropped",
    ):  # fmt: skip
        assert said in words, said
    assert words.count("raytune-fsdp step") == 3, "701 belongs to the spike at 700"
    lanes = {lane["name"]: lane["marks"] for lane in data_of(made)["lanes"]}
    assert [*lanes] == [
        "attempts", "resizes", "failures", "slow ranks", "skipped", "spikes", "evaluations", "saves", "changes",
    ]  # fmt: skip
    (attempts,) = (lane for lane in data_of(made)["lanes"] if lane["name"] == "attempts")
    assert attempts["spans"] == [[0, 1000, 0, 500, "4 ranks"], [1000, 3000, 500, 1500, "4 ranks"]]
    assert [mark[0] for mark in lanes["attempts"]] == [0, 1000] and [mark[0] for mark in lanes["resizes"]] == [1000]
    assert lanes["failures"][0][0] == 1000 and HOSTILE in lanes["failures"][0][2]
    assert [mark[0] for mark in lanes["skipped"]] == [2000, 2400] and [m[0] for m in lanes["spikes"]] == [
        700,
        2000,
        2400,
    ]
    assert len(lanes["saves"]) <= 201 and lanes["saves"][-1][1] == 1500, "seconds since the first step began"


def test_the_script_draws_what_the_data_say(made: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(made)
    for width in (400, 1280):
        found = browse(tmp_path / "page.html", width)
        assert found["wrong"] == [], "numbers that are none"
        assert {"loss", "datasets", "lr", "grad_norm", "speed", "mfu", "memory", "host", "parts", "ranks", "gpu"} <= {
            *found["figures"]
        }
        drawn, pointed, logged, by_time = found["seen"][:4]
        assert HOSTILE in drawn and "code" in drawn and "1,000" in drawn
        assert re.search(r"step 1,\d{3}–1,\d{3} · \d+m \d\ds", pointed) and "1e-4" in pointed
        assert drawn != logged and re.search(r"\d+m", by_time)
        said = [words for kind, words in found["marks"] if "spikes" in kind]
        assert len(said) == 3 and "loss spike at step 700: loss 9.25" in said[0] and "raytune-fsdp step" in said[0]
        # The greatest loss reaches the top of the plot, and nothing is drawn outside of it.
        (shape,) = (d for kind, d in found["paths"] if kind == "area f0")
        heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", shape)]
        assert 24 <= min(heights) < 40 and max(heights) <= 324


def test_the_loss_is_there_without_the_script(made: str) -> None:
    figure = made.partition('data-chart="loss"')[2].partition("</figure>")[0]
    assert figure.count("<path") >= 3 and ">step<" in figure
    assert all(f">{step}<" in figure for step in ("1,000", "2,000", "3,000")), "three ticks"
    bars = made.partition("Documents by length")[2].partition("</svg>")[0]
    assert bars.count("<rect") == 24 and "32 to 38 tokens: 1,200 documents" in bars


@pytest.mark.parametrize("steps", [0, 1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 99)), 101])
def test_short_runs_have_a_page(steps: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "short", steps)
    (run / "events.jsonl").unlink()
    (run / "data.json").unlink()
    text = page([run])
    read(text)
    words = "interrupted before the first step" if steps == 0 else f"interrupted at step {steps:,} of 100,000"
    assert words in text and "are not counted in this run's directory" in text
    (tmp_path / "page.html").write_text(text)
    assert browse(tmp_path / "page.html", 400)["wrong"] == []


def test_an_old_record_and_a_damaged_one_have_a_page(tmp_path: Path) -> None:
    run = tmp_path / "old"
    run.mkdir()
    (run / "plan.json").write_text("[]")
    (run / "config.yaml").write_text(
        "run: {name: old}\noptim: {gone: 3}\ncluster: {env: {HF_TOKEN: hf_abcdefghijklmnopqrst}}\n"
    )
    (run / "data.json").write_text('{"seq_len": "' + HOSTILE + '"}')
    lines = [
        {"kind": "step", "trajectory": {"step": step, "epoch": 0, "samples": "", "tokens": 9, "target_tokens": 9,
         "loss": 3 - step / 10, "grad_norm": "NaN", "lr": 0.1}, "datasets": "x", "rank_seconds": [1], "mfu": HOSTILE}
        for step in (1, 2, 2, 3)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines[:2])) + "\nno JSON\n" + "\n".join(map(json.dumps, lines[2:]))
    (run / "metrics.jsonl").write_text(text + '\n{"kind": "step", "traj')
    append_event(run / "events.jsonl", "saved", attempt=1, fields={"step": 2})
    found = page([run])
    words = read(found).words
    assert "2 lines of metrics.jsonl are damaged or out of order" in words and "data.json is left out" in words
    assert "plan.json is left out" in words and "interrupted at step 3" in words and "gone" in words
    assert "hf_abcdef" not in found, "older versions wrote secrets"
    assert [each["id"] for each in data_of(found)["charts"]] == ["loss", "lr"]
    assert 'id="by-time"' not in found, "no line has a time"


@pytest.mark.slow
def test_whatever_a_stranger_has_written_the_page_is_made_and_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 90)
    odd = [1e308, -1e308, 10**400, "Infinity", "NaN", None, [1], {"a": [1]}, HOSTILE, True, "x" * 100_000, 1 << 60]
    events = [
        {"time": time, "attempt": 1, "event": name, "fields": dict.fromkeys(
            ("step", "seconds", "bytes", "rows", "reasons", "problem", "world_size", "resumed_from", "cause", "answer",
             "prompt", "last_step", "rank", "versions", "device", "threads", "uncommitted", "commit", "command",
             "first", "phases", "difference", "ranks", "status", "x" * 1000), value)}
        for name in ("saved", "answered", "rows_skipped", "attempt_started", "attempt_failed", "attempt_ended",
                     "slow_rank", "audited", "first_step", "started_by", "x" * 5000)
        for value in odd for time in ("9999-12-31T23:59:59-12:00", value)
    ]  # fmt: skip
    for file in ("events.jsonl", "attempts.jsonl"):
        (run / file).write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in events))
    line = json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1])
    with open(run / "metrics.jsonl", "ab") as file:
        for step, value in enumerate([*odd, 2**53, 2**62], start=100):
            step = value if isinstance(value, int) and value > step and value < 2**63 else step
            beside = dict.fromkeys([key for key in line if key not in ("kind", "values", "trajectory")], value)
            numbers = dict.fromkeys(("epoch", "tokens", "target_tokens", "loss", "grad_norm", "lr"), 1e308)
            step_line = {"kind": "step", "trajectory": {"step": step, "samples": "", **numbers}, **beside}
            file.write(
                json.dumps(step_line | {"datasets": [[value] * 4, [HOSTILE, value, value, value]]}).encode() + b"\n"
            )
            file.write(json.dumps({"kind": "eval", "step": 2**62, "values": {f"eval/{step}" + "x" * 9999: 1}}).encode())
            file.write(b"\n")
    for file in ("plan.json", "model/recipe.json"):
        (run / file).write_text(json.dumps(dict.fromkeys(("steps", "global_batch", "version"), HOSTILE)))
    (run / "config.yaml").write_text("data: {seq_len: 1e309}\nrun: [x]\ncheckpoint: {best: [1]}\n" + "x: y\n" * 2)
    text = page([run])
    read(text)
    assert len(text) < 2_000_000
    (tmp_path / "page.html").write_text(text)
    browse(tmp_path / "page.html", 400)


def test_steps_that_a_float_can_hardly_tell_apart_are_drawn(tmp_path: Path) -> None:
    """Beyond them, where one more is the same number, evaluations are left out as steps are."""
    run = write_run(tmp_path / "run", 2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["trajectory"]["step"] += 2**53 - 2
        else:
            line["step"] = 2**62 + 1024 * line["step"]
    (run / "metrics.jsonl").write_bytes(b"".join(map(to_bytes, lines)))
    text = page([run])
    assert "2 lines of metrics.jsonl are damaged or out of order, and are left out" in read(text).words
    (tmp_path / "page.html").write_text(text)
    assert browse(tmp_path / "page.html", 400)["wrong"] == []


def test_a_step_of_endless_time_and_a_sample_of_endless_length_have_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 9)
    for file, sane, endless in (
        ("metrics.jsonl", '"step_seconds": 0.5', '"step_seconds": 1e308'),
        ("config.yaml", "seq_len: 1024", f"seq_len: {'9' * 400}"),
    ):
        text = (run / file).read_text()
        assert sane in text
        (run / file).write_text(text.replace(sane, endless, 1))
    text = page([run])
    assert data_of(text)["axes"][0]["time"] is None and "packed samples of 9" not in read(text).words


def test_settings_are_those_that_are_not_at_their_defaults(tmp_path: Path) -> None:
    config = make_config(
        cluster={"env": {"HF_TOKEN": "hf_abcdefghijklmnopqrst"}}, optim={"lr": 3e-4}, method={"type": "lora"}
    )
    found = {
        path: (value, default)
        for path, value, default in settings(read_history(write_run(tmp_path / "run", 1, config=config)))
    }
    assert found["optim.lr"] == ("0.0003", "5e-05") and found["method.type"] == ("lora", "full")
    assert found["data.train.1.name"] == ("code", "null") and found["train.global_batch"] == ("8", "(required)")
    assert "optim.beta1" not in found and "method.lora.rank" not in found and "hf_abc" not in str(found)


def test_a_spike_is_above_its_noise_and_named_once() -> None:
    noise = np.random.default_rng(0).normal(2, 0.1, 20_000)
    steps = np.arange(1, 20_001, dtype=float)
    assert spikes(steps, noise) == ([], 0)
    noise[[5000, 5003, 9000]] += [2.0, 3.0, 1.5]
    noise[15_000:] += 4  # it stays there: one spike
    found, many = spikes(steps, noise)
    assert [each.step for each in found[:2]] == [5004, 9001] and many == 3 and 15_000 < found[2].step < 15_064
    assert found[0].before == pytest.approx(2, abs=0.1)
    assert spikes(steps[:10], np.full(10, math.nan)) == ([], 0)
    found, many = spikes(steps[:200], np.full(200, math.nan))
    assert many == 1 and math.isnan(found[0].loss)


def test_a_report_that_cannot_be_made_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path / "run", 5)
    (run / "report").write_text("in the way")
    assert make_report(run) is None and "there is no report of" in caplog.text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 20, config=make_config(run={"name": "one"}))
    other = write_run(tmp_path / "other", 20, config=make_config(run={"name": "two"}))
    assert main.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report/index.html\n"
    assert main.main(["report", str(run), str(other), "--out", str(tmp_path / "new" / "both.html")]) == 0
    assert "one and two" in read((tmp_path / "new" / "both.html").read_text()).words
    compared = browse(tmp_path / "new" / "both.html", 400)
    assert compared["wrong"] == [] and "eval/code/loss" in compared["seen"][0]
    for each in data_of((tmp_path / "new" / "both.html").read_text())["charts"]:
        assert [series["name"] for series in each["series"]] == ["one", "two"], "a colour is a run, and nothing else"
    assert main.main(["report", str(tmp_path / "none")]) == 2
    assert main.main(["report", str(tmp_path)]) == 2
    assert main.main(["report", str(run), "--out", "/dev/null/x.html"]) == 2
    nowhere, no_run, no_place = capsys.readouterr().err.splitlines()
    assert nowhere == f"error: {tmp_path}/none: no such directory; give a run directory, <run.storage>/<run.name>"
    assert no_run.startswith(f"error: {tmp_path} is not a run directory (it has no plan.json); give <run.storage>/")
    assert "/dev/null/x.html cannot be written" in no_place and "--out" in no_place


def test_pictures_beside_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(write_run(tmp_path / name, 20)) for name in ("a", "b")]
    assert main.main(["report", runs[0], "--png"]) == main.main(["report", *runs, "--png"]) == 0
    for name in ("loss.png", "comparison.png"):
        assert (tmp_path / "a" / "report" / name).read_bytes().startswith(b"\x89PNG")


def test_the_counts_of_a_run_come_back_and_a_forged_file_does_not(tmp_path: Path) -> None:
    count = DatasetCount(rows=3, documents=2, tokens=90, target_tokens=60, dropped={"empty": 1}, lengths={21: 2})
    skipped = (SkippedRow(where="a.jsonl:1", reason="empty", message="private"),)
    census = Census(seq_len=64, epochs=(2,), windows=1, names=("a",), datasets=(count,), skipped=skipped, built=1)
    file = tmp_path / "data.json"
    file.write_text(data_of_census(census))
    assert census_of(file) == replace(census, skipped=(), built=0) and "private" not in file.read_text()
    good = json.loads(file.read_text())
    for wrong in (
        [], {}, {**good, "seq_len": "64"}, {**good, "names": []}, {**good, "names": [3]}, {**good, "more": 1},
        {**good, "datasets": [{**good["datasets"][0], "lengths": {"999": 1}}]},
        {**good, "datasets": [{**good["datasets"][0], "dropped": {"x": -1}}]},
        {**good, "datasets": [{**good["datasets"][0], "tokens": 1e308}]},
    ):  # fmt: skip
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="is not a count of rows"):
            census_of(file)


@pytest.mark.parametrize(
    ("chosen", "step"), [({}, 20), ({"best_is": "lowest"}, 10), ({"best": "eval/x/loss"}, 10), ({"best": None}, 10)]
)
def test_the_best_evaluation_is_the_one_that_the_run_has_kept(
    tmp_path: Path, chosen: dict[str, Any], step: int
) -> None:
    """By the same rule: of accuracies the highest, unless the config says otherwise."""
    config = make_config(checkpoint={"best": "eval/x/accuracy", **chosen})
    run = write_run(tmp_path / "run", 3, config=config)
    with (run / "metrics.jsonl").open("wb") as record:
        for at, value in ((10, 0.25), (20, 0.75), (30, 0.5)):
            line = {
                "kind": "eval",
                "step": at,
                "values": {"eval/x/accuracy": value, "eval/x/loss": value},
                "attempt": 1,
            }
            record.write(to_bytes(line))
    found = best(read_history(run))
    assert found is not None and found[0] == step


def test_page_and_terminal_agree_which_value_of_a_metric_is_the_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    values = {"eval/x/loss": 2.0, "eval/x/accuracy": 0.5, "tasks/y/exact_match": 0.25, "eval/x/toxicity": 0.5}
    with (run / "metrics.jsonl").open("wb") as record:
        for step, factor in ((10, 1.0), (20, 0.5), (30, 2.0), (40, 1.0)):
            found = {name: value * factor for name, value in values.items()}
            record.write(to_bytes({"kind": "eval", "step": step, "values": found, "attempt": 1}))
    said = summary(run, checkpoint="", export=None, curve=None)
    for metric, _, top, _ in evaluations(read_history(run)):
        step = {"eval/x/accuracy": 30, "tasks/y/exact_match": 30}.get(metric, 20)
        assert top.endswith(f"(step {step})"), metric
        assert re.search(rf"^{metric} .*, best .* at step {step}$", said, re.M), metric


def test_a_run_that_its_evaluations_have_ended_is_not_called_unfinished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    fields = {"step": 12, "metric": "eval/code/loss", "best_step": 8, "best": 2.0}
    append_event(run / "events.jsonl", names.STOPPED_EARLY, attempt=3, fields=fields)
    text = page([run])
    assert "done at step 12 of 100,000: its evaluations ended it" in text
    assert "eval/code/loss has not improved since step 8" in text
