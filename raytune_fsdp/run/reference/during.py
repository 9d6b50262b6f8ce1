"""A reference that is asked in every step (`reference.when: during`), and of which nothing is kept.

It is the model itself without its adapters, where what the run starts from is the bare base; otherwise a second
network, spread over the ranks as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.batch import MicroBatch
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import AdapterMethod
from raytune_fsdp.model.adapters.attach import without_adapters_in
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.run.fetching import Say
from raytune_fsdp.run.reference.find import BASE
from raytune_fsdp.run.reference.network import build_reference
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.step.parallel import release_gathered


def asked_in_steps(
    groups: GroupObjective,
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    device: torch.device,
    say: Say,
) -> GroupObjective:
    """Return a loss of groups that asks the reference in every step, if it is to. Collective."""
    if prepared.reference is None or config.reference.when != "during":
        return groups
    if is_within(config):
        return replace(groups, reference=During(objective=groups, other=None))
    other, objective = build_reference(prepared.reference, prepared, standing, device, say)
    other.requires_grad_(False)
    return replace(groups, reference=During(objective=objective, other=other))


def is_within(config: FinetuneConfig) -> bool:
    """Return whether the run's own network is its reference once its adapters are left out."""
    method = config.method
    return (
        isinstance(method, AdapterMethod)
        and config.reference.model in (None, BASE)
        and method.adapter is None
        and getattr(method, "init", "zero") == "zero"  # otherwise the base is another one, and adapters make up for it
        and not getattr(method, "train_added_tokens", False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class During:
    """Asks the reference for the log-probabilities of a micro-batch's answers, as `groups.Reference`."""

    objective: GroupObjective
    other: PreTrainedModel | None
    """The reference; None: the network itself, without its adapters."""

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        asked = model if self.other is None else self.other
        with _asked(asked), without_adapters_in(model, off=self.other is None):
            answers = self.objective.measured(asked, batch)[0].answers
        if self.other is not None:
            release_gathered(self.other)
        return answers


@contextmanager
def _asked(model: PreTrainedModel) -> Iterator[None]:
    """Ask a network as it is evaluated, and leave it as it was: it may be in the middle of an evaluation."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
