"""How the network keeps documents apart that are packed into one sequence, and the proof that it does."""

from __future__ import annotations

import inspect
import sys

import torch
from transformers import PretrainedConfig, PreTrainedModel


def logits_of(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """The network's forward pass over packed documents."""
    # No attention mask: transformers takes the borders of packed documents from where the positions restart.
    logits: torch.Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Whether documents packed together can be kept apart: transformers sees where they begin by their positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(config: PretrainedConfig) -> int:
    """How many tokens the model can look at; a large number where its config does not say."""
    text = config.get_text_config()
    # MPT, whose bias for distances ends there, has another name for it.
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    return positions if isinstance(positions, int) else sys.maxsize


def leak_between_documents(model: PreTrainedModel) -> float:
    """How much the logits of a document change, relatively, when the one packed before it changes. Collective.

    Not every architecture that takes position_ids takes the borders of documents from them (state spaces and
    convolutions run on, some masks ignore them), so it is tried. Needs evaluation mode, without gradients.
    """
    device = next(model.parameters()).device
    length, vocabulary = 8, model.config.get_text_config().vocab_size
    positions = torch.arange(length, device=device).repeat(2)[None]
    second = torch.arange(length, device=device) % vocabulary
    seen = []
    for first in (second, (second + 1 + length) % vocabulary):
        logits = logits_of(model, torch.cat([first, second])[None], positions)
        seen.append(logits[0, length:].double())
    return float((seen[0] - seen[1]).abs().max() / seen[0].abs().max().clamp(min=1e-30))
