"""A crash between the last commit and the last evaluation: the same command makes the evaluation, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_trajectory
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from tests.runs import GPT2, make_config, write_tokens

PROMPTS = ["w5 w6", "w7"]


SMALL = {**GPT2, "n_layer": 1}


@pytest.fixture(autouse=True, scope="module")
def no_curves() -> Iterator[None]:
    """As without matplotlib: the curve of a run takes as long as its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytune_fsdp.record.report.page.can_draw", lambda: False)
        yield


def config_of(home: Path, name: str, *, held_out: bool = True, prompts: bool = True, **sections: Any) -> FinetuneConfig:
    write_tokens(home / "held-out.jsonl", rows=6, seed=5)
    config = make_config(
        home, SMALL, run={"name": name}, train={"global_batch": 4, "micro_batch": 2, "max_steps": 3},
        parallel={"precision": "fp32"}, eval={"prompts": PROMPTS if prompts else [], "max_new_tokens": 3}, **sections,
    )  # fmt: skip
    rows = [{"path": str(home / "held-out.jsonl"), "format": {"type": "tokens"}}]
    data = {**config.data.model_dump(), "eval": rows if held_out else []}
    return FinetuneConfig.model_validate({**config.model_dump(), "data": data})


def events(config: FinetuneConfig, name: str) -> list[dict[str, Any]]:
    return [each["fields"] for each in read_events(RunDir.of(config).events) if each["event"] == name]


def crashed(config: FinetuneConfig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and crash in this part of the last evaluation."""

    def crash(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, where, crash)
        with pytest.raises(RuntimeError, match="a bug"):
            finetune(config)


def answered(config: FinetuneConfig) -> list[tuple[int, str, str]]:
    return [(each["step"], each["prompt"], each["answer"]) for each in events(config, names.ANSWERED)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """A run without a crash."""
    config = config_of(tmp_path_factory.mktemp("whole"), "whole")
    finetune(config)
    return config


@pytest.mark.parametrize("where", ["values", pytest.param("answers", marks=pytest.mark.slow)])
def test_it_is_made_up_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: FinetuneConfig, where: str
) -> None:
    config = config_of(tmp_path, "run")
    crashed(config, where, monkeypatch)
    place, plain = RunDir.of(config), RunDir.of(whole)
    assert [each["step"] for each in events(config, names.SAVED)] == [3] and answered(config) == []
    assert finetune(config).trained == 0
    assert read_evaluations(place.metrics, 3) == read_evaluations(plain.metrics, 3)
    assert answered(config) == answered(whole) and len(answered(whole)) == len(PROMPTS)
    assert read_trajectory(place.metrics) == read_trajectory(plain.metrics)
    assert [each["step"] for each in events(config, names.SAVED)] == [3], "nothing is trained or saved again"
    evaluations = [line for line in place.metrics.read_text().splitlines() if '"kind": "eval"' in line]
    assert len(evaluations) == len(read_evaluations(plain.metrics, 3))
    finetune(config)
    assert len(events(config, names.ATTEMPT_STARTED)) == 2, "once is enough"
    finetune(whole)
    assert len(events(whole, names.ATTEMPT_STARTED)) == 1


def test_an_end_by_evaluations_owes_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that is committed is that of the step whose evaluation has ended the run."""
    stop = {"every": 1, "early_stop": {"patience": 1, "min_delta": 1e6}, "prompts": PROMPTS, "max_new_tokens": 3}
    config = config_of(tmp_path, "run", checkpoint={"every": 1, "asynchronous": False})
    config = FinetuneConfig.model_validate({**config.model_dump(), "eval": stop})
    real, made = Evaluation.answers, []

    def second_crashes(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            raise RuntimeError("a bug")
        return real(*arguments, **options)

    monkeypatch.setattr(Evaluation, "answers", second_crashes)
    with pytest.raises(RuntimeError, match="a bug"):
        finetune(config)
    result = finetune(config)
    assert (result.steps, result.ended_early, result.trained) == (2, True, 0)
    assert [step for step, *_ in answered(config)] == [1, 1, 2, 2]


@pytest.mark.parametrize("asked_later", [False, True])
def test_only_what_the_record_says_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked_later: bool
) -> None:
    """A run of an older version does not say, and one that was to measure nothing owes nothing: a line names what
    makes the evaluation, if one is asked for by now."""
    config = config_of(tmp_path, "run", held_out=not asked_later, prompts=not asked_later)
    place = RunDir.of(config)
    if asked_later:
        with monkeypatch.context() as patched:  # it has not said that it finished, either
            patched.setattr(names, "ATTEMPT_ENDED", "another_event")
            finetune(config)
        config = config_of(tmp_path, "run")
    else:
        crashed(config, "values", monkeypatch)
        lines = [json.loads(line) for line in place.events.read_text().splitlines()]
        for line in lines:
            assert line["fields"].pop("evaluates", None) is not None or line["event"] != names.ATTEMPT_STARTED
        place.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert finetune(config).trained == 0
    assert read_evaluations(place.metrics, 3) == {} and len(events(config, names.ATTEMPT_STARTED)) == 1
    (said,) = [each.getMessage() for each in caplog.records if "raytune-fsdp eval" in each.getMessage()]
    assert f"its evaluation after step 3 is not on record: `raytune-fsdp eval {place.path}` makes it" in said


def test_nothing_is_owed_that_is_no_longer_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "run")
    crashed(config, "values", monkeypatch)
    other = config_of(tmp_path, "run", held_out=False, prompts=False)
    assert finetune(other).trained == 0 and len(events(config, names.ATTEMPT_STARTED)) == 1


def test_a_resume_in_the_middle_makes_up_for_answers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"checkpoint": {"every": 1, "asynchronous": False}}
    config = config_of(tmp_path, "run", held_out=False, **more)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    crashed(config, "answers", monkeypatch)
    finetune(config)
    assert [step for step, *_ in answered(config)] == [1, 1, 2, 2, 3, 3]
