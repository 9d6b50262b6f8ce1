"""Take one optimizer step: tensors in, tensors out. No clock, no files, no logging.

Nothing here waits for the device. The device also decides whether an update is skipped, and does so alike on every
rank, because the loss and the gradient norm that decide are already summed over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import MicroBatch, StepBatches
from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.config import OptimConfig, ParallelConfig
from raytune_fsdp.model.objective.groups import OfMicroBatch
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.losses import Losses
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective
from raytune_fsdp.model.pieces.sums import copy_first_gradients
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.step.in_order import add_in_order
from raytune_fsdp.step.optim.pieces import at, local_gradients
from raytune_fsdp.step.optim.update import Optimizer
from raytune_fsdp.step.parallel import evaluating, set_gradient_sync
from raytune_fsdp.step.sums import Sums, SumsByRank

FIRST_SCALE = 2.0**15
"""The loss scale of the first step, in fp16."""

SCALE_GROWTH_STEPS = 2000
"""In fp16, the loss scale doubles after this many good steps in a row, and halves after a bad step."""


@dataclass(slots=True)
class LossScale:
    """The factor that scales small gradients up in fp16. Other precisions keep it at 1."""

    value: torch.Tensor
    good_steps: torch.Tensor
    enabled: bool

    @classmethod
    def start(
        cls, *, enabled: bool, device: torch.device, value: float = FIRST_SCALE, good_steps: int = 0
    ) -> LossScale:
        return cls(
            value=torch.tensor(value if enabled else 1.0, dtype=torch.float64, device=device),
            good_steps=torch.tensor(good_steps, dtype=torch.int64, device=device),
            enabled=enabled,
        )

    def update(self, finite: torch.Tensor) -> None:
        if not self.enabled:
            return
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= SCALE_GROWTH_STEPS
        self.value = torch.where(finite, torch.where(grow, self.value * 2, self.value), self.value / 2)
        self.good_steps = torch.where(grow, 0, good)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The result of a step, summed over all ranks and left on the device."""

    counts: torch.Tensor
    """`StepCounts`, packed into int64."""
    values: torch.Tensor
    """In float64: loss, gradient norm, 1 if the update was skipped; then each dataset's sum of losses, and how many of
    its targets were the model's first choice (with an objective of groups, each of the `KINDS` of groups.py; with a
    teacher, also what `figures.taught_values` names); then the tokens of each watched expert."""


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    scale: LossScale,
    batches: StepBatches,
    *,
    plan: Plan,
    parallel: ParallelConfig,
    optim: OptimConfig,
    lr_factor: float,
    seed: int,
    objective: Objective = CROSS_ENTROPY,
    sums: Sums | None = None,
) -> StepTensors:
    """Run forward, backward and update over a global batch. All ranks call this with equally many micro-batches.

    `sums`: how losses and gradients are summed; None: on each rank first.
    """
    sums = sums or SumsByRank(plan.layout)
    counts = batches.counts.clone()
    dist.all_reduce(counts)
    # A step without a single target has loss 0, not 0/0.
    targets = counts[0].clamp(min=1)
    objective = objective.of_step(counts, partial(sum_over_step, model, batches, plan.division))
    sums.start(batches.step, scale.value)
    for k, micro_batch in enumerate(batches.micro_batches):
        beat()
        sums.next_round(k)
        set_gradient_sync(model, last=k == len(batches.micro_batches) - 1, config=parallel)
        _seed_dropout(seed, batches.step, micro_batch)
        losses = micro_batch_loss(model, micro_batch, objective)
        loss = losses.total
        values = torch.cat([loss.detach().double()[None], _by_dataset(losses, micro_batch, plan.datasets).flatten()])
        sums.add(micro_batch, values, torch.cat([values[:0], *(each.double() for each in losses.load)]))
        # Divided by the targets of the global batch before backward; gradients are then only summed, over micro-batches
        # and ranks. An average over ranks would weight a token by how many others its rank happens to have. Losses of
        # groups are made for this divisor, too (groups.py).
        (loss * (scale.value / targets).to(loss.dtype)).backward()  # type: ignore[no-untyped-call]
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads = local_gradients(trained)
    if plan.layout.tensor > 1:
        copy_first_gradients(model, trained, grads)
    totals = sums.over_ranks(trained, grads)
    # The same bits on every rank.
    loss_value, norm = totals.loss / targets, totals.squares.sqrt() / scale.value
    finite = torch.isfinite(loss_value) & torch.isfinite(norm)
    _clip(grads, norm, optim.max_grad_norm, scale)
    optimizer.step(lr_factor, (~finite).float())
    scale.update(finite)
    values = torch.cat([torch.stack([loss_value, norm, (~finite).double()]), totals.details])
    return StepTensors(counts=counts, values=values)


@torch.no_grad()
def eval_step(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Return loss sum, right choices and target tokens of one micro-batch on this rank, in float64. Collective.

    The loss is plain cross-entropy, whatever the run adds to it, so that runs can be compared.
    """
    losses = micro_batch_loss(model, batch)
    targets = torch.full((), float(batch.target_tokens * batch.counts), dtype=torch.float64, device=losses.total.device)
    return torch.stack([losses.total.double(), losses.right.sum().double(), targets])


def sum_over_step(
    model: PreTrainedModel, batches: StepBatches, division: Division, measure: OfMicroBatch
) -> torch.Tensor:
    """Return the sum of a number of each micro-batch, in their order, over all ranks: one pass without gradients, with
    dropout off. Collective."""
    rows = batches.counts.new_zeros(len(division.micro_batch_sizes(batches.step)), 1, dtype=torch.float64)
    with evaluating(model):
        for batch in batches.micro_batches:
            beat()
            found = measure(model, batch)
            if not batch.is_filler:
                rows[batch.index] = found
    return add_in_order(rows)[0]


def _seed_dropout(seed: int, step: int, batch: MicroBatch) -> None:
    """Seed dropout by the micro-batch and its place in the run, not by the rank that happens to compute it."""
    key = derive_key("block", seed, step, batch.index) & (2**63 - 1)
    # Not torch.manual_seed: it formats the call stack for every kind of device that is not in use, 0.8 ms per call.
    torch.default_generator.manual_seed(key)
    if batch.input_ids.is_cuda:
        torch.cuda.manual_seed(key)


def _by_dataset(losses: Losses, batch: MicroBatch, datasets: int) -> torch.Tensor:
    """Sum the losses and the right choices of each dataset."""
    figures, of = losses.groups or (torch.stack([losses.each.double(), losses.right.double()]), batch.targets.datasets)
    # A product, because index_add on a GPU adds in any order.
    return figures @ (of[:, None] == torch.arange(datasets, device=losses.each.device)).double()


def _clip(grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float | None, scale: LossScale) -> None:
    """Scale the gradient down to `max_norm` and undo the loss scale, in one pass that leaves the norm on the device."""
    if max_norm is None and not scale.enabled:
        return
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's
    torch._foreach_mul_(grads, at(grads[0].device, (factor / scale.value).to(grads[0].dtype)))
