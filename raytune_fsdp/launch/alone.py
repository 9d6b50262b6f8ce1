"""A model measured by one process, without a run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.attention.choose import generating
from raytune_fsdp.plan.plan import ALONE
from raytune_fsdp.run.evaluation.exam import Exam
from raytune_fsdp.run.evaluation.losses import check_network
from raytune_fsdp.run.trials.needs import use_attention_for_packed


def examine(
    config: FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    exam: Exam,
    device: torch.device,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The values of an evaluation, and what was asked and answered. Refuses a network that computes something else
    than it should."""
    needs = use_attention_for_packed(config, model, device)
    with alone(device):
        check_network(model, config.data.packing, device, model.dtype)
        attention = generating(model, needs)
        values = exam.values(
            model, tokenizer,
            micro_batch=config.train.micro_batch, layout=ALONE, device=device, attention=attention,
        )  # fmt: skip
        return values, exam.answers(model, tokenizer, device=device, attention=attention)
