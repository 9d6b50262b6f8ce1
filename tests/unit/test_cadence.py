"""What is done so many times an epoch is done after the same steps on any number of ranks."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.plan.cadence import PartsOfEpochs, cadence_in_words, due, is_multiple, times_due
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.run.checks import check_best, check_export
from tests.runs import make_config

EPOCHS = st.lists(st.integers(0, 60), min_size=2, max_size=5).filter(any)


@given(EPOCHS, st.integers(1, 9), st.integers(1, 20))
def test_a_step_is_due_when_it_consumes_the_last_sample_of_a_part(epochs: list[int], parts: int, batch: int) -> None:
    ends = [sum(epochs[: number + 1]) for number in range(len(epochs))]
    last = [
        math.ceil(end - length + Fraction(length * part, parts))
        for end, length in zip(ends, epochs, strict=True)
        for part in range(1, parts + 1)
    ]
    every = PartsOfEpochs.of(parts, tuple(epochs), batch)
    steps = math.ceil(sum(epochs) / batch)
    expected = {max(1, math.ceil(sample / batch)) for sample in last if sample}
    found = {step for step in range(1, steps + 1) if due(step, every)}
    assert found == expected or found == expected - {1}, "parts without a sample are no reason"
    assert times_due(steps, every) == parts * len(epochs)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20))
def test_epochs_that_are_counted_once_are_all_as_long(length: int, parts: int, batch: int) -> None:
    once, each = (PartsOfEpochs.of(parts, (length,) * times, batch) for times in (1, 4))
    assert [times_due(step, once) for step in range(4 * length // batch + 1)] == [
        times_due(step, each) for step in range(4 * length // batch + 1)
    ]


@given(EPOCHS, st.integers(1, 12), st.integers(1, 12), st.integers(1, 20))
def test_a_multiple_is_never_due_alone(epochs: list[int], parts: int, others: int, batch: int) -> None:
    every, other = (PartsOfEpochs.of(number, tuple(epochs), batch) for number in (parts, others))
    if is_multiple(every, of=other):
        assert all(due(step, other) for step in range(1, sum(epochs) + 1) if due(step, every))
    assert is_multiple(parts, of=others) == (parts % others == 0)
    assert is_multiple(every, of=1) and not is_multiple(every, of=2) and not is_multiple(2, of=every)


def _config(tmp_path: Path, **sections: Any) -> FinetuneConfig:
    train = {"global_batch": 8, "micro_batch": 2, "max_steps": None, "epochs": 2.5}
    return make_config(tmp_path, **{"train": train, **sections})


def test_the_plan_is_the_same_at_every_world(tmp_path: Path) -> None:
    census = Census(seq_len=48, epochs=(100, 90, 110))
    config = _config(
        tmp_path, checkpoint={"every": {"per_epoch": 1}}, eval={"every": {"per_epoch": 2}},
        export={"at_end": False, "every": {"per_epoch": 1}},
    )  # fmt: skip
    for world in (1, 2, 4):
        plan = resolve(config, world, census)
        assert [step for step in range(1, plan.steps + 1) if plan.due(step, plan.save_every)] == [13, 24, 31]
        assert [step for step in range(1, plan.steps + 1) if plan.due(step, plan.eval_every)] == [7, 13, 19, 24, 31]
        assert plan.export_every == plan.save_every and plan.saves == 3
        assert plan.to_dict()["save_every"] == {"per_epoch": 1} and plan.to_dict()["eval_every"] == {"per_epoch": 2}
        check_export(config, plan)
    assert (cadence_in_words(plan.save_every), cadence_in_words(plan.eval_every)) == (
        "once per epoch",
        "2 times per epoch",
    )


@pytest.mark.parametrize(
    ("section", "field"), [("checkpoint", "checkpoint.every"), ("eval", "eval.every"), ("export", "export.every")]
)
def test_without_a_count_nobody_knows_an_epoch(tmp_path: Path, section: str, field: str) -> None:
    config = make_config(tmp_path, **{section: {"every": {"per_epoch": 2}}})
    with pytest.raises(ConfigError, match=rf"^{field}=\{{per_epoch: 2\}}: with train.max_steps=50 .* or train.epochs"):
        resolve(config, 1)


def test_what_auto_plans_and_the_clock_does_not(tmp_path: Path) -> None:
    """Checkpoints that something else of the config asks for; without it, the one of the end."""
    held_out = {"train": {"global_batch": 8, "max_steps": 50}}
    for every in ("auto", {"minutes": 3}):
        plain = make_config(tmp_path, **held_out, checkpoint={"every": every}, eval={"every": 10})
        assert (resolve(plain, 1).save_every, resolve(plain, 1).saves) == (50, 1)
        best = make_config(tmp_path, **held_out, checkpoint={"every": every, "keep_best": 1}, eval={"every": 10})
        task = make_config(tmp_path, **held_out, checkpoint={"every": every}, eval={"every": 10, "where": "task"})
        assert resolve(best, 1).save_every == resolve(task, 1).save_every == 10
    none = make_config(tmp_path, **held_out, checkpoint={"every": None, "keep_best": 1}, eval={"every": 20})
    assert resolve(none, 1).save_every == 50, "as ever"
    with pytest.raises(ConfigError, match="checkpoint.keep_best=1, but|nothing is evaluated"):
        check_best(none, resolve(none, 1))
    wanted = make_config(tmp_path, **held_out, export={"at_end": False, "every": 20})
    with pytest.raises(ConfigError, match="only every 50 steps: .* with checkpoint.every=20$"):
        check_export(wanted, resolve(wanted, 1))


NEEDED = ["--run.name=x", "--model.path=m", "--data.train.0.path=a", "--train.global_batch=4", "--train.epochs=1"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], "auto"),
        (["--checkpoint.every=null"], None),
        (["--checkpoint.every", "7"], 7),
        (["--checkpoint.every", "{minutes: 20}"], {"minutes": 20.0, "per_epoch": None}),
        (["--checkpoint.every.per_epoch=3"], {"minutes": None, "per_epoch": 3}),
        (["--checkpoint.every", "{minutes: 20, per_epoch: 3}"], "minutes=20.0 and per_epoch=3: set one of the two"),
        (["--checkpoint.every", "{}"], "minutes=None and per_epoch=None: set one of the two"),
        (["--checkpoint.every", "{hours: 1}"], "checkpoint.every.hours=1: unknown field"),
        (["--checkpoint.every", "{minutes: 0}"], "checkpoint.every.minutes=0: must be number > 0"),
        (["--checkpoint.every", "0"], "checkpoint.every=0: must be integer >= 1, map of minutes and per_epoch, auto"),
        (["--checkpoint.every", "often"], "checkpoint.every='often'|checkpoint.every=often"),
        (["--eval.every", "{minutes: 5, per_epoch: 1}"], "eval.every.minutes=5: unknown field"),
        (["--eval.every", "auto"], "eval.every=auto: must be integer >= 1"),
        (["--export.every", "{per_epoch: 0}"], "export.every.per_epoch=0: must be integer >= 1"),
    ],
)
def test_how_it_is_written(flags: list[str], found: Any) -> None:
    if not isinstance(found, str) or found == "auto":
        every = load_config(None, [*NEEDED, *flags]).checkpoint.every
        assert (every if every is None or isinstance(every, str | int) else every.model_dump()) == found
        return
    with pytest.raises(ConfigError, match=found) as refused:
        load_config(None, [*NEEDED, *flags])
    lines = str(refused.value).splitlines()
    assert len([line for line in lines if ".every" in line]) == 1, "one line for one mistake"
