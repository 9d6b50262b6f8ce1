"""Prove that transformers' class for scores scores texts as the head of a run does, before a rank is started.

Some architectures change what comes out of their decoder on its way to the head, and their class does not; another may
score a text elsewhere than at its last token. A small network of the same config, with random weights, is computed by
both: texts of two lengths, alone and together with padding behind the shorter one.
"""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from raytune_fsdp.base.errors import ModelError, in_one_line
from raytune_fsdp.config import FinetuneConfig, FullMethod
from raytune_fsdp.model.adapters.attach import is_adapted
from raytune_fsdp.model.directory.bounds import bounded_building
from raytune_fsdp.model.directory.named_class import NamedClass, scoring_class_of
from raytune_fsdp.model.directory.scoring import SCORE
from raytune_fsdp.model.network import build_network
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.run.trials.probe import small_network

logger = logging.getLogger(__name__)

_BOUND = 1e-4
"""Relative to the largest score, in fp32. Texts beside each other may be summed in another order than alone; what is
wrong is off by the whole score."""
_PAD, _LENGTHS = 0, (16, 11)


def check_scores(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    """Refuse a network whose class in transformers scores otherwise than its head, if it has one that scores."""
    if head_of(network) is None:
        return
    config = config.model_copy(update={"method": FullMethod()})  # adapters are no part of the class
    whole = build_network(network.config, config) if is_adapted(network) else network
    named = scoring_class_of(whole, Path())
    kind = type(named.network).__name__
    try:
        model = small_network(config, whole.config, whole).eval()
        wanted = _with_scores(model)
    except Exception as error:  # sizes that cannot be divided: this says nothing about the class
        logger.debug("no small network could be computed: %s", in_one_line(error))
        return
    try:
        found = _together(_around(model, named))
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
    with head.register_forward_hook(lambda *call: seen.append(call[2][:, -1])):
        model(input_ids=ids, use_cache=False)
    return seen[0].clone()


def _with_scores(model: PreTrainedModel) -> torch.Tensor:
    head = head_of(model)
    assert head is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head.weight.data.normal_()
    return torch.cat([scores_of_head(model, ids[None]) for ids in _texts()])


def _around(model: PreTrainedModel, named: NamedClass) -> PreTrainedModel:
    """Return the class for scores around the modules of a small network."""
    with torch.device("meta"), bounded_building():
        there = type(named.network)._from_config(copy.deepcopy(model.config))
    for name, module in model.named_children():
        if hasattr(there, name):
            there.set_submodule(name, module)
    there.set_submodule(SCORE, model.get_output_embeddings())
    there.config.get_text_config().pad_token_id = _PAD
    return there.eval()


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
