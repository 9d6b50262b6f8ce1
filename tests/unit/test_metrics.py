"""What a step leaves on the device becomes metrics, at the latest when the step must be known."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
import torch

from raytune_fsdp.base.batch import Cursor, StepBatches
from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.config.sections.objectives import DistillObjective, ObjectiveChoice
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.plan import Layout, Plan
from raytune_fsdp.plan.step_counts import StepCounts
from raytune_fsdp.record.console import _preferred
from raytune_fsdp.record.lines import step_lines
from raytune_fsdp.record.names import ACCURACY, TOKEN_ACCURACY, higher_is_better, labelled, step_values
from raytune_fsdp.run.measure import meter as meters
from raytune_fsdp.run.measure import nodes as measure_nodes
from raytune_fsdp.run.measure.against_prediction import Forecast
from raytune_fsdp.run.measure.meter import Meter
from raytune_fsdp.run.measure.nodes import NodeFigures
from raytune_fsdp.step.flops import Architecture, Products
from raytune_fsdp.step.train_step import StepTensors

DIVISION = Division(total_samples=None, global_batch=2, micro_batch=2, data_ranks=1)
PLAN = Plan(
    division=DIVISION, steps=10, samples_per_epoch=None, schedule_steps=10, warmup_steps=0, log_every=1, eval_every=10,
    save_every=10, layout=Layout(world=1, data_ranks=1, replicas=1, shard_size=1), datasets=2,
)  # fmt: skip
ONE_WEIGHT = Architecture(
    every_token=Products(weights=1), targets=Products(weights=1), layers=1, query_width=1,
)  # fmt: skip


def meter(objective: ObjectiveChoice | None = None) -> Meter:
    return Meter(
        PLAN, ONE_WEIGHT, torch.device("cpu"), windows=lambda _: 4,
        cursor=Cursor(), datasets=("books", "code"), max_skipped=3, checkpoints="",
        objective=objective, forecast=Forecast(None, lambda: 0, gpu=False, last=PLAN.steps),
    )  # fmt: skip


def add(
    meter: Meter, step: int, targets: tuple[int, int], sums: tuple[float, float], right: tuple[int, int], *more: float
) -> None:
    counts = torch.tensor(StepCounts.pack(step, [], 0, DIVISION, 2))
    counts[0], counts[-2:] = sum(targets), torch.tensor(targets)
    loss = sum(sums) / max(1, sum(targets))
    values = torch.tensor([loss, 1.0, 0.0, *sums, *right, *more], dtype=torch.float64)
    batches = StepBatches(step=step, micro_batches=(), counts=counts)
    meter.add(batches, StepTensors(counts=counts, values=values), lr=0.1, data_seconds=0.0)


def test_datasets_have_their_own_loss_and_accuracy() -> None:
    measured = meter()
    add(measured, 1, (30, 10), (60.0, 5.0), (15, 10))
    add(measured, 2, (40, 0), (20.0, 0.0), (4, 0))
    add(measured, 3, (0, 0), (0.0, 0.0), (0, 0))
    first, second, third = measured.fetch()
    assert first.datasets == (("books", 2.0, 0.5, 30), ("code", 0.5, 1.0, 10))
    assert first.accuracy == 25 / 40
    assert sum(loss * many for _, loss, _, many in first.datasets) == pytest.approx(first.loss * 40, rel=1e-12)
    assert second.datasets == (("books", 0.5, 0.1, 40),), "one that has no target in the step is left out"
    assert third.datasets == () and third.accuracy is None


def test_what_is_learned_from_a_teacher_is_recorded_by_dataset() -> None:
    measured = meter(DistillObjective(type="distill", forward=0.0, reverse=2.0))
    add(measured, 1, (30, 10), (60.0, 5.0), (15, 10), 6.0, 4.0, 90.0, 10.0)
    add(measured, 2, (40, 0), (20.0, 0.0), (4, 0), 8.0, 0.0, 40.0, 0.0)
    add(measured, 3, (0, 0), (0.0, 0.0), (0, 0), 0.0, 0.0, 0.0, 0.0)
    first, second, third = measured.fetch()
    assert first.datasets == (("books", 2.0, 0.5, 30), ("code", 0.5, 1.0, 10)) and first.accuracy == 25 / 40
    names = ("kl/reverse", "books/kl/reverse", "code/kl/reverse", "nll", "books/nll", "code/nll")
    assert first.preferences == tuple(zip(names, (0.25, 0.2, 0.4, 2.5, 3.0, 1.0), strict=True))
    assert dict(second.preferences) == {"kl/reverse": 0.2, "books/kl/reverse": 0.2, "nll": 1.0, "books/nll": 1.0}
    assert third.preferences == ()
    (line, *_) = step_lines([first], 1, 1)
    values = step_values(line)
    assert values["train/kl/reverse"] == 0.25 and values["train/code/nll"] == 1.0
    assert labelled("train/code/kl/reverse") == ("train_kl_reverse", "code")
    assert list(_preferred(first)) == ["reverse kl 0.2500", "nll 2.5000"]
    accuracies = {ACCURACY, TOKEN_ACCURACY, "train/books/accuracy", "train/code/accuracy"}
    assert not any(map(higher_is_better, values.keys() - accuracies))


def test_on_a_gpu_the_latest_step_is_fetched_later() -> None:
    measured = meter()
    measured._late = 1  # what a CUDA device sets
    add(measured, 1, (30, 10), (60.0, 5.0), (15, 10))
    assert measured.fetch(last=False) == []
    add(measured, 2, (30, 10), (60.0, 5.0), (15, 10))
    assert [row.step for row in measured.fetch(last=False)] == [1]
    add(measured, 3, (30, 10), (60.0, 5.0), (15, 10))
    assert [row.step for row in measured.fetch()] == [2, 3], "before a checkpoint or an evaluation everything is"
    assert measured.fetch() == measured.fetch(last=False) == []


def test_skipped_updates_are_counted_when_they_are_fetched() -> None:
    """The state after a step, of which a digest is made, is known before the run stops for them."""
    measured = meter()
    for step, skipped in enumerate([1.0, 0.0, 1.0, 1.0, 1.0, 0.0], start=1):
        add(measured, step, (30, 10), (60.0, 5.0), (15, 10))
        measured._pending[-1].tensors.values[2] = skipped
        if step == 4:
            assert len(measured.fetch()) == 4 and measured.skipped_in_row == 2
            measured.check()
    assert len(measured.fetch()) == 2 and measured.skipped_in_row == 0
    with pytest.raises(TrainingError, match="step 5: .* has not been finite for 3 steps in a row"):
        measured.check()


class Copy:
    """A copy to the host that is there once somebody has waited for it."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = tensors
        self.here = StepTensors(
            counts=torch.full_like(tensors.counts, -1), values=torch.full_like(tensors.values, torch.nan)
        )
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True
        self.here.counts.copy_(self.tensors.counts)
        self.here.values.copy_(self.tensors.values)


def test_only_steps_that_are_fetched_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Copy] = []

    def to_host(tensors: StepTensors) -> tuple[StepTensors, Copy]:
        copies.append(Copy(tensors))
        return copies[-1].here, copies[-1]

    monkeypatch.setattr(meters, "to_host", to_host)
    measured = meter()
    measured._late = 1
    for step in (1, 2, 3):
        add(measured, step, (30, 10), (60.0 * step, 5.0), (15, 10))
        rows = measured.fetch(last=False)
        assert [row.loss for row in rows] == ([(60.0 * (step - 1) + 5.0) / 40] if step > 1 else [])
        assert [copy.waited for copy in copies] == [True] * (step - 1) + [False]
    assert [row.step for row in measured.fetch()] == [3] and copies[-1].waited


def test_on_a_cpu_nothing_is_copied() -> None:
    tensors = StepTensors(counts=torch.zeros(3, dtype=torch.int64), values=torch.zeros(3))
    found, arrival = meters.to_host(tensors)
    assert found is tensors and arrival is None


def test_nodes_are_in_one_step_of_ten_seconds() -> None:
    measured = meter()
    for step in (1, 2):
        add(measured, step, (30, 10), (60.0, 5.0), (15, 10))
    first, second = measured.fetch()
    assert first.nodes == ()
    ((name, rss, free, busy, taken),) = second.nodes
    assert name == socket.gethostname() and rss is not None and free is not None and rss > 1e6 and free > 1e6
    assert (busy, taken) == (None, None), "no GPU says nothing"
    add(measured, 3, (30, 10), (60.0, 5.0), (15, 10))
    assert [row.nodes for row in measured.fetch()] == [()]


def test_ranks_of_a_node_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3")]
    monkeypatch.setattr(measure_nodes, "on_all_ranks", lambda what: nodes)
    figures = NodeFigures(torch.device("cpu"), 4)
    assert figures.nodes == ["a", "b", "a", "a-2"], "two machines may have one name"
    everyone = np.array([[9, 50, 100, 8, 3], [9, 20, 10, 6, 4], [9, 70, 200, 7, 5], [9, math.nan, 1, 2, math.nan]])
    assert figures.of_nodes(everyone) == (
        ("a", 300.0, 7.0, 60.0, 5.0), ("b", 10.0, 6.0, 20.0, 4.0), ("a-2", 1.0, 2.0, None, None),
    )  # fmt: skip
    assert figures.of_nodes(everyone) == ()
