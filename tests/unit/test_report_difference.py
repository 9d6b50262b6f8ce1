"""Where two runs part, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import UserError
from raytune_fsdp.checkpoint.catalogue import directory_name
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.storage import MANIFEST_FILE, STATE_FILE
from raytune_fsdp.cli.main import main
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import append_event
from raytune_fsdp.record.report.difference import difference
from raytune_fsdp.record.report.page import page
from tests.records import make_config, write_run


def falling(step: int) -> float:
    return 2 + 1 / step


def checkpoint(run: Path, identity: dict[str, Any], files: dict[str, list[str]] | None = None) -> None:
    place = run / "checkpoints" / directory_name(10, 1)
    place.mkdir(parents=True)
    state = RunState(step=10, attempt=1, samples=80, identity=identity, files=files or {})
    (place / STATE_FILE).write_text(state.to_json())
    (place / MANIFEST_FILE).write_text("{}")


@pytest.mark.slow
def test_the_first_step_of_a_planted_divergence_is_found_in_100_000(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 100_000, loss=falling)
    b = write_run(
        tmp_path / "b", 100_000, config=make_config(optim={"lr": 2e-4, "warmup_steps": 10}, run={"name": "other"}),
        loss=lambda step: falling(step) + 0.01 * (step > 65_537), lr=lambda step: 2e-4 if step >= 65_537 else 1e-4,
    )  # fmt: skip
    found = difference(a, b)
    assert (found.step, found.equal, found.keys) == (65_537, 65_536, {"lr": (1e-4, 2e-4)})
    assert not found.rounding and found.exact_step == 65_537
    assert found.causes[0].key == "optim.lr" and found.causes[0].words == "optim.lr: 0.0001 and 0.0002"
    text = page([a, b])
    assert "65,536 steps are equal, bit by bit. The trajectories part at step 65,537: lr 0.0001 and 0.0002." in text
    assert "optim.lr: 0.0001 and 0.0002" in text and len(text) < 2_000_000


def test_runs_that_are_equal_have_no_difference(tmp_path: Path) -> None:
    loss = lambda step: math.nan if step == 3 else falling(step)  # noqa: E731
    a, b = write_run(tmp_path / "a", 10, loss=loss), write_run(tmp_path / "b", 14, loss=loss)
    found = difference(a, b)
    assert (found.step, found.equal, found.keys, found.causes) == (None, 10, {}, ())
    assert found.words == "The trajectories of all 10 steps that both have are equal, bit by bit."
    assert "all 10 steps that both have" in page([a, b])


def test_a_line_that_is_written_otherwise_and_one_that_is_damaged_are_no_difference(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 10, loss=falling), write_run(tmp_path / "b", 10, loss=falling)
    lines = (b / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"epoch": 0.001', b'"epoch": 1e-3')
    lines[2] = b'{"kind": "step", "trajectory": {damaged\n'
    (b / "metrics.jsonl").write_bytes(b"".join(lines))
    found = difference(a, b)
    assert found.step is None and found.equal == 9
    assert found.unknown == ("1 step(s) in between are on one record only, and were not compared.",)


def with_digest(run: Path, step: int, digit: str) -> Path:
    """The record of an exact run in which one step has a digest."""
    before, begin, after = (run / "metrics.jsonl").read_text().partition(f'{{"step": {step}, ')
    digests = f', "digest": "{digit * 64}", "digest_of_everything": "{digit * 64}"}}'
    (run / "metrics.jsonl").write_text(before + begin + after.replace("}", digests, 1))
    return run


def test_a_digest_counts_where_both_have_one(tmp_path: Path) -> None:
    a, b, c = (with_digest(write_run(tmp_path / digit, 10, loss=falling), 7, digit) for digit in "abc")
    with_digest(b, 3, "b")
    found = difference(a, b)
    assert found.equal == 6 and found.step == 7 and found.rounding and found.exact_step is None
    assert found.keys == dict.fromkeys(("digest", "digest_of_everything"), ("a" * 64, "b" * 64))
    with_digest(c, 2, "c")
    (c / "metrics.jsonl").write_text((c / "metrics.jsonl").read_text().replace("c" * 64, "a" * 64))
    for one, other in ((a, c), (c, a), (c, write_run(tmp_path / "none", 10, loss=falling))):
        assert difference(one, other).words == "The trajectories of all 10 steps that both have are equal, bit by bit."


def test_runs_without_a_common_step_are_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", 4, loss=falling), write_run(tmp_path / "b", 8, loss=falling)
    lines = (b / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (b / "metrics.jsonl").write_bytes(b"".join(line for line in lines if b'"step": 8' in line))
    assert main(["diff", str(a), str(b)]) == 2
    assert "No step is on record of both, so nothing was compared." in capsys.readouterr().err
    assert "No step is on record of both" in page([a, b])


def test_rounding_is_told_from_other_samples_that_come_later(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 40, loss=falling, world=4)
    b = write_run(
        tmp_path / "b", 40, loss=lambda step: falling(step) * (1 + 1e-9), world=2,
        samples=lambda step: step + (step >= 31),
    )  # fmt: skip
    checkpoint(
        a, {"data.train.0.files": ["x", "y"], "optim.lr": 1e-4}, {"data.train.0.files": ["one.jsonl", "two.jsonl"]}
    )
    checkpoint(
        b, {"data.train.0.files": ["x", "z"], "optim.lr": 1e-4}, {"data.train.0.files": ["one.jsonl", "two.jsonl"]}
    )
    found = difference(a, b)
    assert found.step == 1 and found.rounding and found.exact_step == 31 and [*found.exact_keys] == ["samples"]
    assert [cause.words for cause in found.causes] == [
        "data.train.0.files: changed two.jsonl", "the number of ranks: 4 and 2"
    ]  # fmt: skip
    assert "by no more than rounding" in found.words and "At step 31 they part by more: samples" in found.words
    c = write_run(tmp_path / "c", 40, loss=lambda step: falling(step) * (1 + 1e-9), world=2)
    only = difference(a, c)
    assert only.rounding and only.exact_step is None and only.causes[0].kind == "ranks"
    assert any("it has no checkpoint" in line for line in only.unknown)
    (c / "checkpoints_at").write_text("s3://nowhere/c/checkpoints")
    assert any("are at s3://nowhere/c" in line for line in difference(a, c).unknown), "and nobody asks there"
    exact = make_config(run={"exact": True})
    one = write_run(tmp_path / "one", 4, loss=falling, world=1, config=exact)
    two = write_run(tmp_path / "two", 4, loss=lambda step: falling(step) * (1 + 1e-9), world=2, config=exact)
    found = difference(one, two)
    assert found.step == 1 and not found.causes, "with run.exact the number of ranks is none"


def test_causes_come_with_the_likeliest_first(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 10, loss=falling)
    other = make_config(run={"seed": 5}, method={"type": "lora"}, train={"global_batch": 8, "max_steps": 50})
    b = write_run(tmp_path / "b", 10, loss=lambda step: falling(step) + (step > 6), config=other)
    (b / "model" / "recipe.json").write_text('{"version": "0.3.0"}')
    found = difference(a, b)
    assert found.step == 7 and [*found.keys] == ["loss"]
    keys = [cause.key for cause in found.causes]
    assert keys[0].startswith("method.") and keys.index("run.seed") > keys.index("method.type")
    assert keys[-1] == "the version of raytune_fsdp" and "plan.schedule_steps" in keys
    c = write_run(tmp_path / "c", 10, loss=falling, config=other, lr=lambda step: 1e-4 if step < 4 else 9e-5)
    assert difference(a, c).step == 4 and difference(a, c).causes[0].key == "plan.schedule_steps"
    assert "train.max_steps" not in keys, "the length alone changes nothing; the schedule that follows from it does"


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        difference(write_run(tmp_path / "a", 1), tmp_path)


def test_the_command_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", 10, loss=falling), write_run(tmp_path / "b", 10, loss=falling)
    c = write_run(tmp_path / "c", 10, loss=lambda step: falling(step) + (step > 6))
    for run, threads in ((a, 4), (c, 2)):
        fields = {"world_size": 1, "threads": threads, "versions": {"torch": "2.13.0"}}
        append_event(run / "events.jsonl", names.ATTEMPT_STARTED, attempt=2, fields=fields)
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == "The trajectories of all 10 steps that both have are equal, bit by bit.\n"
    assert main(["diff", str(a), str(c)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("6 steps are equal, bit by bit. The trajectories part at step 7: loss ")
    assert "what differs, the likeliest cause first:\n  the threads of a rank: 4 and 2\n" in said
    assert main(["diff", str(a), str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
