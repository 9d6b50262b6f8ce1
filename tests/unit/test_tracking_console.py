"""What a person sees."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.record.console import ConsoleTracker, curve, duration, event_in_words, short
from raytune_fsdp.record.names import perplexity, with_perplexity
from raytune_fsdp.record.screen_messages import Looks, read_message
from raytune_fsdp.record.tracker import RunStart
from tests.recorded import step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def begin(stream: io.StringIO, resumed_from: int = 0) -> ConsoleTracker:
    tracker = ConsoleTracker(stream)
    tracker.start(RunStart(name="demo", attempt=2, resumed_from=resumed_from, total_steps=100))
    return tracker


def test_a_run_in_lines() -> None:
    stream = io.StringIO()
    tracker = begin(stream, resumed_from=8)
    tracker.steps([step(9), step(10, mfu=None, loss=math.nan, skipped=True)], world_size=4, attempt=2)
    tracker.event("skipped_update", step=10, grad_norm=math.nan)
    tracker.evaluation(10, {"eval/chat/loss": 1.23456, "eval/code/loss": 2.0})
    tracker.event("saved", step=10, seconds=1.234, bytes=2**31, path="x")
    tracker.event("resized", before=4, after=3)
    tracker.event("node_lost", node="n1", step=11)
    tracker.steps([step(11)], world_size=4, attempt=2)
    tracker.finish("interrupted")
    tracker.finish("failed")
    lines = stream.getvalue().splitlines()
    assert lines[:8] == [
        "demo: attempt 2, continues after step 8",
        "step   9/100  loss   2.5000  grad    1.250  lr 1.00e-04   12.3k tok/s  mfu 41.2%  mem   1.50 GiB  eta 3m 02s",
        "step  10/100  loss      nan  grad    1.250  lr 1.00e-04   12.3k tok/s  mem   1.50 GiB  eta 3m 00s  skipped",
        "     step 10: update skipped (grad norm nan)",
        "eval  10/100  chat/loss 1.2346 (perplexity 3.437)  code/loss 2.0000 (perplexity 7.389)",
        "     saved step 10 in 1.2 s, 2.00 GiB",
        "     resized from 4 to 3 workers",
        "     node lost at step 11: node n1",
    ]
    assert lines[8].startswith("step  11/100  loss   2.5000") and lines[9] == "loss, steps 9 to 11"
    assert lines[-1] == "interrupted; the same command continues"
    assert "\033" not in stream.getvalue()


def test_two_steps_make_no_curve() -> None:
    stream = io.StringIO()
    tracker = begin(stream)
    tracker.steps([step(1), step(2)], world_size=1, attempt=2)
    tracker.finish("finished")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["demo:", "step", "step", "finished"]


@pytest.mark.parametrize(
    ("total", "every", "lines"), [(1, None, 1), (200, None, 200), (230, None, 116), (10_000, None, 201), (50, 7, 9)]
)
def test_a_run_of_any_length_prints_some_lines(total: int, every: int | None, lines: int) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream, every=every)
    tracker.start(RunStart(name="demo", attempt=1, total_steps=total))
    for number in range(1, total + 1):
        tracker.steps([step(number)], world_size=1, attempt=1)
    found = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert len(found) == lines
    assert found[0].split("/")[0].split()[1] == "1" and found[-1].startswith(f"step {total}/{total}")


def test_a_skipped_update_has_its_line_at_any_cadence() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream, every=50)
    tracker.start(RunStart(name="demo", attempt=1, total_steps=100))
    tracker.steps([step(1), step(2), step(3, skipped=True)], world_size=1, attempt=1)
    assert [line.split()[1] for line in stream.getvalue().splitlines()[1:]] == ["1/100", "3/100"]


class Shown(io.StringIO):
    looks = Looks(live=True, colours=False)

    def told(self) -> list[object]:
        return [read_message(line) or line for line in self.getvalue().rstrip().split("\n")]


def test_a_region_is_told_of_steps_and_lines_stay_for_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([5.0, 5.0, 5.01, 5.02, 6.0, 7.0, 8.0])
    monkeypatch.setattr("raytune_fsdp.record.console.time.monotonic", lambda: next(now))
    stream = Shown()
    tracker = begin(stream)
    for number in (1, 2, 3):
        tracker.steps([step(number)], world_size=4, attempt=2)
    tracker.event("saved", step=3)
    tracker.evaluation(3, {"eval/chat/loss": 1.23456})
    tracker.finish("failed")
    title, first, third, saved, evaluated, end = stream.told()
    assert isinstance(first, dict) and isinstance(third, dict) and isinstance(title, str) and isinstance(saved, str)
    assert title.startswith("demo: attempt 2") and saved == "     saved step 3"
    assert str(evaluated).startswith("eval   3/100  chat/loss 1.2346")
    assert [each["done"] for each in (first, third)] == [1, 3], "step 2 and 3 came within a tenth of a second"
    assert third["title"] == "demo  step 3/100" and 0 < third["left"] < 200 and third["total"] == 100
    assert third["fields"] == [
        "loss 2.5000", "lr 1.00e-04", "12.3k tok/s", "mfu 41.2%", "mem 1.50 GiB", "data wait 0%", "grad 1.250",
        "2 s/step", "epoch 0.10", "workers 4",
    ]  # fmt: skip
    assert end == "\x1e{}"


def test_no_answer_of_a_model_steers_the_terminal() -> None:
    stream = io.StringIO()
    begin(stream).event("answered", step=1, prompt="?", answer="\x1b[2Ja\rb\n\x1e{}")
    assert stream.getvalue().splitlines()[-2:] == ["     answered: ·[2Ja·b", "·{}"]


def test_the_size_of_the_network_is_said_at_the_start() -> None:
    stream = io.StringIO()
    count = ParameterCount(total=3_212_800, trainable=3_212_800)
    ConsoleTracker(stream).start(RunStart(name="demo", attempt=1, parameters=count))
    assert stream.getvalue().splitlines()[1] == "     3,212,800 parameters, all of them trained"
    stream = io.StringIO()
    plan = {"global_batch": 64, "micro_batch": 2}
    tracker = ConsoleTracker(stream)
    tracker.start(
        RunStart(name="x", attempt=1, total_steps=1500, params={"model.path": "org/m"}, plan=plan, parameters=count)
    )
    tracker.event("kernels", attention="sdpa")
    tracker.event("predicted", kept_bytes=2**25, peak_bytes=2**31, where="norm, head and loss", step_seconds=0.25)
    assert stream.getvalue().splitlines()[1:] == [
        "     org/m, 3,212,800 parameters, all of them trained",
        "     1,500 steps of 64 samples, 2 at a time on each worker",
        "     memory of each worker: 2.00 GiB at the most (predicted), 32.00 MiB all the time; a step takes about "
        "0.25 s, the 1,500 steps about 6m 15s",
    ]
    partly = ParameterCount(total=3_212_800, trainable=32_128)
    assert partly.words == "3,212,800 parameters, 32,128 of them trained (1.00%)"


def test_perplexity_follows_from_the_loss_whatever_that_is() -> None:
    assert perplexity(0.0) == 1.0 and perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e9) == math.inf and math.isnan(perplexity(math.nan))
    named = with_perplexity({"eval/a/loss": 1.0, "eval/a/accuracy": 0.5})
    assert named == {"eval/a/loss": 1.0, "eval/a/perplexity": math.e, "eval/a/accuracy": 0.5}
    assert [*named] == ["eval/a/loss", "eval/a/perplexity", "eval/a/accuracy"]


def test_a_broken_record_is_said_in_a_line() -> None:
    fields = {"problems": ["1 line was there twice", "step 3 is missing"], "kept": "/runs/x/metrics.jsonl.a2.damaged"}
    said = event_in_words("record_repaired", fields)
    assert said == "metrics.jsonl was broken: 1 line was there twice; step 3 is missing (as it was: " + (
        "/runs/x/metrics.jsonl.a2.damaged)"
    )
    assert event_in_words("not_sent_to_mlflow", {"because": "it is not installed"}) == (
        "not sent to MLflow: it is not installed"
    )


def test_the_remaining_time_leaves_out_the_first_wait_for_data() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(RunStart(name="demo", attempt=1, total_steps=11))
    tracker.steps([step(1, seconds=62.0, waited=60.0)], world_size=1, attempt=1)
    assert stream.getvalue().endswith("eta 20s\n")
    grouped = ConsoleTracker(stream)
    grouped.start(RunStart(name="demo", attempt=1, total_steps=12))
    # Logged every two steps: each has half of the time that both took.
    grouped.steps([step(1, seconds=32.0, waited=60.0), step(2, seconds=32.0)], world_size=1, attempt=1)
    assert stream.getvalue().endswith("eta 20s\n")


def test_an_attempt_that_failed_says_nothing_as_another_may_follow() -> None:
    stream = io.StringIO()
    tracker = begin(stream)
    tracker.steps([step(1), step(2)], world_size=1, attempt=1)
    before = stream.getvalue()
    tracker.finish("failed")
    assert stream.getvalue() == before


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    colourful, plain = Terminal(), Terminal()
    begin(colourful)
    monkeypatch.setenv("NO_COLOR", "1")
    begin(plain)
    assert "\033[1m" in colourful.getvalue() and "\033" not in plain.getvalue()


def test_a_terminal_without_unicode_gets_the_curve_all_the_same() -> None:
    raw = io.BytesIO()
    tracker = ConsoleTracker(io.TextIOWrapper(raw, encoding="ascii"))
    tracker.steps([step(1), step(2)], world_size=1, attempt=1)
    tracker.finish("finished")
    assert raw.getvalue().splitlines()[-1] == b"finished"


def test_events_show_no_secrets() -> None:
    stream = io.StringIO()
    begin(stream).event("failure", cause="password=hunter2")
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.7, "1m 00s"), (200, "3m 20s"), (3900, "1h 05m"), (180000, "2d 2h"), (math.inf, "?")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (987.4, "987"), (999.7, "1k"), (12345, "12.3k"), (999_700, "1M"), (4.56e6, "4.56M"), (math.nan, "nan")],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_words_for_incomplete_events() -> None:
    assert event_in_words("saved", {"step": 3}) == "saved step 3"
    assert event_in_words("dropped_rows", {}) == "dropped rows"


def test_curve_falls() -> None:
    drawn = curve([1 / (1 + i / 50) for i in range(1000)], width=40, height=6).splitlines()
    assert len(drawn) == 6 and drawn[0].lstrip().startswith("0.9") and drawn[-1].startswith("0.0")
    bodies = [line.split("┤")[1] for line in drawn]
    assert all(len(body) == 40 for body in bodies)
    empty = chr(0x2800)
    assert bodies[0][0] != empty and bodies[-1][-1] != empty
    assert bodies[0][-1] == empty and bodies[-1][0] == empty


def test_curves_that_are_hardly_one() -> None:
    assert curve([], 10, 3) == "(no finite loss)" == curve([math.nan], 10, 3)
    assert curve([2.0], 10, 1).startswith("2 ┤")
    assert len(curve([1.0, math.nan, math.inf, 3.0], 10, 4).splitlines()) == 4
    assert len(curve([5.0] * 500, 10, 4).splitlines()) == 4


def test_plot_draws_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from raytune_fsdp.base.errors import UserError
    from raytune_fsdp.record.jsonl import JsonlTracker
    from raytune_fsdp.record.report.curves import plot, smoothed

    tracker = JsonlTracker(tmp_path)
    tracker.start(RunStart(name="demo", attempt=1))
    with pytest.raises(UserError, match="no steps yet"):
        plot(tmp_path, tmp_path / "x.png")
    losses = [3 / (1 + i / 30) + 0.1 * math.sin(i) for i in range(200)]
    tracker.steps([step(i, loss=loss) for i, loss in enumerate(losses, start=1)], world_size=1, attempt=1)
    tracker.steps([step(201, loss=math.nan)], world_size=1, attempt=1)
    for at in (50, 100, 200):
        tracker.evaluation(at, {"eval/chat/loss": 4 / (1 + at / 40), "eval/code/loss": 3.0})
    plot(tmp_path, tmp_path / "report/loss.png")
    assert (tmp_path / "report/loss.png").read_bytes().startswith(b"\x89PNG")
    assert smoothed([1.0, 3.0, math.nan, 5.0], reach=1) == [2.0, 2.0, 4.0, 5.0]
    assert math.isnan(smoothed([math.nan], reach=1)[0])
