"""What an evaluation measures, whoever makes it: the ranks of a run, a task during training, or a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.eval import ConversationConfig
from raytune_fsdp.data.questions import Questions
from raytune_fsdp.data.reference import Given
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.figures import values_of
from raytune_fsdp.model.objective.scores import LossOfGroups, loss_of
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record.names import evaluation_on
from raytune_fsdp.run.evaluation.answers import answers
from raytune_fsdp.run.evaluation.losses import losses
from raytune_fsdp.run.evaluation.score_figures import names_of
from raytune_fsdp.run.evaluation.tasks import measure_tasks, metrics_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation measures; nothing by default."""

    datasets: Mapping[str, Windows] = field(default_factory=dict)
    tasks: Sequence[Questions] = ()
    prompts: Sequence[str | ConversationConfig] = ()
    max_new_tokens: int = 1
    """The most tokens that an answer to a prompt may have."""
    exact: bool = False
    """Whether losses have the same bits at any number of ranks."""
    given: Given | None = None
    """What the reference gives to documents, if there is one."""
    groups: LossOfGroups | None = None
    """The loss of datasets of pairs, of judged answers or of documents with scores."""

    @classmethod
    def of(
        cls,
        config: FinetuneConfig,
        datasets: Mapping[str, Windows],
        tasks: Sequence[Questions],
        groups: LossOfGroups | None = None,
    ) -> Evaluation:
        """Return the evaluation of a run whose datasets and questions have been opened.

        `groups`: the loss of the run's groups; None: that of one process.
        """
        chosen, objective = config.eval, config.train.objective
        if groups is None and objective.rows is not None:
            groups = loss_of(objective)
        return cls(
            datasets=datasets, tasks=tasks, prompts=chosen.prompts, max_new_tokens=chosen.max_new_tokens,
            exact=config.run.exact, groups=groups,
        )  # fmt: skip

    def values(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        micro_batch: int,
        layout: Layout,
        device: torch.device,
        attention: str,
    ) -> dict[str, float]:
        """Return the measured values by the names of metrics. Answers are written with transformers' `attention`.
        Collective."""
        found = losses(
            model, self.datasets, micro_batch=micro_batch, layout=layout, device=device, exact=self.exact,
            groups=self.groups, told=None if self.given is None else self.given.told,
        )  # fmt: skip
        return found | measure_tasks(
            model, tokenizer, self.tasks, micro_batch=micro_batch, layout=layout, device=device, attention=attention
        )

    def answers(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, device: torch.device, attention: str
    ) -> list[dict[str, Any]]:
        """Return what each prompt asked and what the model answered. Collective."""
        if not self.prompts:
            return []
        longest = self.max_new_tokens
        return answers(model, tokenizer, self.prompts, max_new_tokens=longest, device=device, attention=attention)


def metrics_of_run(config: FinetuneConfig, evals: Mapping[str, Windows], tasks: Sequence[Questions]) -> list[str]:
    """Return the metrics of a run's evaluations."""
    found = [name for task in tasks for name in metrics_of(task)]
    objective = config.train.objective
    for name, windows in evals.items():
        kinds = ("loss", "accuracy") if windows.kind is None else (*values_of(objective), *names_of(objective))
        found += [evaluation_on(name, kind) for kind in kinds]
    return found
