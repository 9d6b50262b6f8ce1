"""Prove that transformers' class for scores scores texts as the head of a run does, before a rank is started.

Some architectures change what comes out of their decoder on its way to the head, and their class does not; another may
score a text elsewhere than at its last token. A small network of the same config, with random weights, is computed by
both: texts of two lengths, alone and together with padding behind the shorter one.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from raytune_fsdp.base.errors import ModelError, in_one_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import FullMethod
from raytune_fsdp.model.directory.named_class import scoring_class_of
from raytune_fsdp.model.network import build_network
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.run.trials.probe import small_network

logger = logging.getLogger(__name__)

_BOUND = 1e-4
"""Relative to the largest score, in fp32. Texts beside each other may be summed in another order than alone; what is
wrong is off by the whole score."""
_PAD, _LENGTHS = 0, (16, 11)


def check_scores(config: FinetuneConfig, network: PreTrainedModel) -> None:
    """Refuse a network whose class in transformers scores otherwise than its head, if it has one that scores."""
    if head_of(network) is None:
        return
    config = config.model_copy(update={"method": FullMethod()})  # adapters are no part of the class
    try:
        model = small_network(config, network.config, network).eval()
        wanted = _with_scores(model)
    except Exception as error:  # sizes that cannot be divided: this says nothing about the class
        logger.debug("no small network could be computed: %s", in_one_line(error))
        plain = build_network(network.config, config)
        scoring_class_of(plain, Path())  # names of layers can be compared in any case
        return
    there = _class_of(model)
    kind = type(there).__name__
    try:
        found = _together(there)
    except Exception as error:  # the code of any model
        raise _another(kind, f"it fails on two texts beside each other: {in_one_line(error)}") from error
    off, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not off <= _BOUND * largest:
        raise _another(kind, f"off by {off:.1e}, of scores up to {largest:.1e}")


@torch.no_grad()
def scores_of_head(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return what the head of a run makes of the last token of texts of one length: (texts, outputs)."""
    head, seen = head_of(model), list[torch.Tensor]()
    assert head is not None
    # From the head itself: what the network then makes of it, as of logits, is nothing that a run sees.
    hook = head.register_forward_hook(lambda *call: seen.append(call[2][:, -1]))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return seen[0].clone()


def _with_scores(model: PreTrainedModel) -> torch.Tensor:
    head = head_of(model)
    assert head is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head.weight.data.normal_()
    return torch.cat([scores_of_head(model, ids[None]) for ids in _texts()])


def _class_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the class for scores of a small network, with its modules."""
    named = scoring_class_of(model, Path())
    head = next(name for name, place in named.places.items() if place and name != place)
    for name, module in model.named_children():
        if name != head.partition(".")[0]:
            named.network.set_submodule(name, module)
    named.network.set_submodule(named.places[head], model.get_submodule(head))
    named.network.config.get_text_config().pad_token_id = _PAD
    return named.network.eval()


@torch.no_grad()
def _together(there: PreTrainedModel) -> torch.Tensor:
    ids = nn.utils.rnn.pad_sequence(_texts(), batch_first=True, padding_value=_PAD)
    verbosity = transformers_logging.get_verbosity()
    try:
        transformers_logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: torch.Tensor = there(input_ids=ids, attention_mask=(ids != _PAD).long(), use_cache=False).logits
    finally:
        transformers_logging.set_verbosity(verbosity)
    return found


def _texts() -> list[torch.Tensor]:
    return [torch.arange(length) % 13 + 1 + _PAD for length in _LENGTHS]


def _another(kind: str, why: str) -> ModelError:
    return ModelError(
        f"model.head: transformers' {kind} does not score texts as this head does ({why}), so whoever loads the export "
        "would get other scores: begin with another model, such as a Llama, Qwen3, Gemma 3 or Mixtral"
    )
