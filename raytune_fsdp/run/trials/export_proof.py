"""Prove that an adapter changes the class that its base's config names as it changes the network of the run.

That PEFT finds every tensor there is known at full size (model/adapters/names.py), and their bytes have been read back.
What is left is what the class computes with them. The base itself would take all of its memory, and minutes a token on
the CPU of a head node; so a small network of the same config is asked, with random adapters under the same names and
the config as it was written. Rows of new tokens are not in it: the small one has fewer tokens.
"""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from raytune_fsdp.base.errors import ModelError, in_one_line
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.model.adapters.attach import ADAPTER, adapter_tensors
from raytune_fsdp.model.adapters.names import keys_there
from raytune_fsdp.model.directory.bounds import bounded_building
from raytune_fsdp.model.directory.named_class import NamedClass, config_for
from raytune_fsdp.model.score_head import head_of, put_score_head
from raytune_fsdp.run.trials.probe import fill_small, first_layers, shrunk
from raytune_fsdp.run.trials.score_proof import scores_of_head

logger = logging.getLogger(__name__)

_SMALL = 200_000_000
"""The most weights of a small network: 800 MB. Many experts that are not wide are not shrunk any further."""
_BOUND = 1e-6
"""Relative to the largest logit. Both compute the same operations in fp32; what is wrong is off by the whole change."""
_TOKENS = 16


def check_acts(directory: Path, *, network: PreTrainedModel, named: NamedClass) -> None:
    """Refuse an adapter that does something else in the named class than in the run's, or nothing.

    `directory`: the adapter as it was written. `network`: the run's, with adapters.
    """
    verbosity = transformers_logging.get_verbosity()
    try:
        transformers_logging.set_verbosity_error()  # hides which kernels the small network goes without
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before, wanted, found = _logits(directory, network, named)
    except Exception as error:  # sizes that cannot be divided: this says nothing about the export
        logger.debug("no small network could be computed: %s", in_one_line(error))
        return
    finally:
        transformers_logging.set_verbosity(verbosity)
    acts, off = float((wanted - before).abs().max()), float((found - wanted).abs().max())
    if not acts or not off <= _BOUND * max(1.0, float(wanted.abs().max())):
        kind, own = type(named.network).__name__, type(network).__name__
        raise ModelError(
            f"the adapter changes the logits of a small {kind}, the class that the base's config names, otherwise than "
            f"those of a {own}, in which it was trained ({off:.1e} off, of a change of {acts:.1e}), so nothing was "
            "exported: merge it (export.merge=true, or raytune-fsdp export --merge)"
        )


def _logits(
    directory: Path, network: PreTrainedModel, named: NamedClass
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of a small network: without adapters, with them, and as PEFT loads them into the named class."""
    from peft import PeftConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict

    plain, there = _small(named)
    written = PeftConfig.from_pretrained(str(directory))
    written.trainable_token_indices = None  # type: ignore[attr-defined]
    config = copy.deepcopy(network.peft_config[ADAPTER])  # type: ignore[union-attr, index]
    for field in ("r", "lora_alpha"):  # twice as large where a beginning was taken out of the base
        if hasattr(config, field):
            setattr(config, field, getattr(written, field))
    before = _forward(plain)
    own = copy.deepcopy(plain)
    inject_adapter_in_model(config, own, ADAPTER)
    if (head := head_of(own)) is not None:
        head.requires_grad_(True)
    for tensor in adapter_tensors(own).values():
        tensor.normal_(0.0, 0.1)
    tensors = adapter_tensors(own)
    held = {key: tensors[name] for name, key in keys_there(own, named).items()}
    if there is not plain:
        _put(plain, there, named)
    loaded = PeftModel(there, written)
    set_peft_model_state_dict(loaded, held)
    return before, _forward(own), _forward(loaded)


def _small(named: NamedClass) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a small network of the run's class on the CPU, and one of the named class around it, or the same one."""
    kind, hf_config = type(named.network), shrunk(AutoConfig.from_pretrained(named.files, trust_remote_code=False))
    with torch.device("meta"), bounded_building():
        there = first_layers(kind._from_config(config_for(kind, copy.deepcopy(hf_config), named.outputs)))
        there.config.get_text_config().pad_token_id = None  # no token of a text is left out
        plain = there
        if not named.is_own or named.outputs is not None:
            plain = first_layers(AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False))
        if named.outputs is not None:
            put_score_head(plain, HeadConfig(type="score", outputs=named.outputs))
        for part in named.outside:
            for each in {id(there): there, id(plain): plain if named.is_own else there}.values():
                each.set_submodule(part, nn.Identity())
    count = sum(parameter.numel() for parameter in plain.parameters())
    if count > _SMALL:
        raise MemoryError(f"{count:,} weights are too many to try")
    fill_small(plain)
    return plain.float().eval(), there


def _put(plain: PreTrainedModel, there: PreTrainedModel, named: NamedClass) -> None:
    """Put the modules of `plain` in their places in `there`."""
    for own, place in sorted(named.places.items()):
        # Of a network that is all of the other one but for its head, the parts.
        whole = own == place == ""
        parts = {part: part for part, _ in plain.named_children() if hasattr(there, part)} if whole else {own: place}
        for part, where in parts.items():
            there.set_submodule(where, plain.get_submodule(part))


def _forward(model: nn.Module) -> torch.Tensor:
    """Return the logits of a text, or its scores."""
    ids = torch.arange(_TOKENS)[None]
    if isinstance(model, PreTrainedModel) and head_of(model) is not None:
        return scores_of_head(model.eval(), ids)
    found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found.clone()
