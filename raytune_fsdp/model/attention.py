"""Which attention a network gets, and what a forward pass hands to it. `proof.py` shows that documents stay apart."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.data.batches import borders_of
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.model.kernels import FLASH, KERNELS, PREFIX, is_installed
from raytune_fsdp.types import Borders

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
"""The types that flash kernels compute in."""

_WIDEST = 256
"""Of a head in flash kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a network asks of a kernel that is told where documents begin, of its loss, and of its sharding."""

    refused: str | None = None
    """Why no such kernel is right for it; None if one may be."""
    softcap: bool = False
    eager: str | None = None
    """Why sdpa of transformers is wrong for it, and eager has to do; None if it is right."""
    width: int = 0
    """Of its widest head."""
    plain_loss: str | None = None
    """Why its losses need its logits; None if its hidden states and output embedding give the same."""
    ends: bool = False
    """Whether its embedding, and its last norm and head, can be gathered and freed on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a run computes with, and why it is this."""

    name: str
    """Of an attention as transformers knows it; empty: what transformers chooses."""
    why: str


def choose(asked: str, needs: Needs, *, kept: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
    """The attention of a run. `kept` is the one that its checkpoint was trained with; None: it has none yet."""
    if asked == "sdpa" and needs.eager and kept != "sdpa":
        raise ConfigError(f"model.attention=sdpa: {needs.eager}; set model.attention=auto")
    if asked in ("eager", "sdpa", "flex_attention"):
        return Choice(name=asked, why="as model.attention says")
    possible = [] if needs.refused else _possible(needs, device, dtype)
    if asked == "documents" and not possible:
        raise ConfigError(f"model.attention=documents: {_why_not(needs, device, dtype)}; set model.attention=auto")
    if asked.startswith("flash_attention_"):
        name = f"{PREFIX}fa{asked[-1]}"
        if name in possible:
            return Choice(name=name, why="as model.attention says")
        return Choice(name=asked, why=f"as model.attention says, without borders: {_why_not(needs, device, dtype)}")
    if asked == "auto" and kept is not None and (kept in possible or kept not in KERNELS):
        return Choice(name=kept, why="as the run began")
    if possible:
        return Choice(name=possible[0], why="the fastest here that is told where documents begin")
    why = _why_not(needs, device, dtype)
    return Choice(name="eager", why=f"{why}, and {needs.eager}") if needs.eager else Choice(name="", why=why)


def use(model: PreTrainedModel, choice: Choice) -> Choice:
    """Give the network this attention; returns the choice with its name."""
    if choice.name not in ("", model.config._attn_implementation):
        model.set_attn_implementation(choice.name)
    return Choice(name=model.config._attn_implementation, why=choice.why)


def _possible(needs: Needs, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The kernels that fit, the fastest first."""
    if device.type == "cpu":
        return [] if needs.softcap else [f"{PREFIX}cpu"]
    if device.type != "cuda" or dtype not in SIXTEEN_BITS or needs.width > _WIDEST or needs.width % 8:
        return []
    flash = [f"{PREFIX}fa{version}" for version, package in FLASH.items() if is_installed(package)]
    return flash if needs.softcap else [*flash, f"{PREFIX}varlen"]


def _why_not(needs: Needs, device: torch.device, dtype: torch.dtype) -> str:
    if needs.refused:
        return needs.refused
    if needs.softcap:
        return "it has a soft cap on its scores, which only flash-attn computes"
    if device.type == "cuda" and dtype not in SIXTEEN_BITS:
        return f"kernels that are told where documents begin compute in 16 bits, not in {str(dtype)[6:]}"
    return f"no kernel that is told where documents begin has heads of width {needs.width}, or runs on {device.type}"


def inputs_of(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, borders: Borders | None = None
) -> dict[str, Any]:
    """What to call the network with, for samples in rows."""
    # No attention mask: transformers takes the borders of packed documents from where the positions restart.
    if not model.config._attn_implementation.startswith(PREFIX):
        return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    borders = borders or borders_of(position_ids.numpy())
    return {
        "input_ids": input_ids.reshape(1, -1),
        "position_ids": position_ids.reshape(1, -1),
        "use_cache": False,
        "cu_seq_lens_q": borders.starts,
        "cu_seq_lens_k": borders.starts,
        "max_length_q": borders.longest,
        "max_length_k": borders.longest,
    }


def logits_of(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, borders: Borders | None = None
) -> torch.Tensor:
    """The network's forward pass over packed documents: logits for every token, in rows as they came."""
    logits: torch.Tensor = model(**inputs_of(model, input_ids, position_ids, borders)).logits
    return logits.view(*input_ids.shape, -1)


@contextmanager
def without_borders(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own attention: to generate text, which has a cache and no borders."""
    chosen = model.config._attn_implementation
    if chosen not in KERNELS:
        yield
        return
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Whether documents packed together can be kept apart: transformers sees where they begin by their positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(config: PretrainedConfig) -> int:
    """How many tokens the model can look at; a large number where its config does not say."""
    text = config.get_text_config()
    # MPT, whose bias for distances ends there, has another name for it.
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    return positions if isinstance(positions, int) else sys.maxsize
