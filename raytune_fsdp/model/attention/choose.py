"""Choose a network's attention, and what a forward pass hands to it. `proof.py` shows that documents stay apart."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.errors import ConfigError, first_line
from raytune_fsdp.data.targets import borders_of
from raytune_fsdp.model.attention.calls import PREFIX
from raytune_fsdp.model.attention.flash import FLASH
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.attention.mixers import BORDERS, is_split

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
"""The types that flash kernels compute in."""

_WIDEST = 256
"""The widest head of flash kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What a layer needs from a kernel."""

    many: int
    keys: int
    """Heads of keys and values."""
    width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layers: int | None = None
    """How many layers of this kind a forward pass has; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeeds:
    """What a network needs from a kernel that knows where documents begin, from its loss, and from its sharding."""

    refused: str | None = None
    """Why no such kernel is right for it; None if one may be."""
    unshared: str | None = None
    """Why ranks cannot share its samples whatever its attention is, and what to set; None if they may be able to."""
    mixers: tuple[str, ...] = ()
    """Classes of its state mixers, which have to be split by documents; empty if it has none, or nothing is packed."""
    softcap: bool = False
    sinks: bool = False
    heads: tuple[Heads, ...] = ()
    """Each kind once, in the sizes of the run; empty if they are not known."""
    eager: str | None = None
    """Why transformers' sdpa is wrong for it, and eager has to be used; None if sdpa is right."""
    width: int = 0
    """Width of its widest head."""
    plain_loss: str | None = None
    """Why its losses need its logits; None if its hidden states and output embedding give the same."""
    ends: bool = False
    """Whether its embedding, and its last norm with its head, can be units of sharding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """A kernel that a run computes with, and why."""

    name: str
    """The kernel's name; an attention has the one that transformers knows. Empty: what transformers chooses."""
    why: str


Fails = Callable[[str], str | None]
"""Returns why a kernel does not do what the network needs on some rank; None if it does on all."""


def choose(
    asked: str, needs: KernelNeeds, *, kept: str | None, device: torch.device, dtype: torch.dtype, fails: Fails
) -> KernelChoice:
    """Choose the attention of a run. `kept`: the one that its checkpoint was trained with; None: no checkpoint yet.

    On GPUs all ranks alike call `fails` for one kernel after the other, until one does not fail.
    """
    if asked == "sdpa" and needs.eager and kept != "sdpa":
        raise ConfigError(f"model.attention=sdpa: {needs.eager}; set model.attention=auto")
    if asked in ("eager", "sdpa", "flex_attention"):
        return KernelChoice(name=asked, why="as model.attention says")
    if asked == "auto" and kept is not None and kept not in KERNELS and not _needs_gpu(kept, device):
        return KernelChoice(name=kept, why="as the run began")
    candidates = _candidates(asked, kept, needs, device, dtype)
    name, failed = _first(candidates, fails if device.type != "cpu" else lambda _: None)
    why_not = "; ".join(failed) or _why_not(needs, device, dtype)
    if name is not None:
        why = "the fastest here that takes document borders"
        why = "as model.attention says" if "flash" in asked else "as the run began" if name == kept else why
        return KernelChoice(name=name, why=f"{why} ({'; '.join(failed)})" if failed else why)
    if asked == "documents":
        raise ConfigError(f"model.attention=documents: {why_not}; set model.attention=auto")
    if asked != "auto":
        return KernelChoice(name=asked, why=f"as model.attention says, without borders: {why_not}")
    return (
        KernelChoice(name="eager", why=f"{why_not}, and {needs.eager}")
        if needs.eager
        else KernelChoice(name="", why=why_not)
    )


def _needs_gpu(kept: str, device: torch.device) -> bool:
    """Return whether a run that began on GPUs cannot keep its attention on this device."""
    return device.type == "cpu" and kept.startswith(("flash_attention_", "flex_attention"))


def _candidates(
    asked: str, kept: str | None, needs: KernelNeeds, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Return the kernels to try, in order. All ranks return the same, so it does not depend on what is installed."""
    possible = [] if needs.refused else _possible(needs, device, dtype)
    if asked.startswith("flash_attention_"):
        return [name for name in possible if name == f"{PREFIX}fa{asked[-1]}"]
    return sorted(possible, key=lambda name: name != kept) if asked == "auto" else possible


def _first(candidates: list[str], fails: Fails) -> tuple[str | None, list[str]]:
    """Return the first kernel that does not fail, and why those before it do."""
    failed: list[str] = []
    for name in candidates:
        reason = fails(name)
        if reason is None:
            return name, failed
        failed.append(f"{name}: {reason}")
    return None, failed


def set_attention(model: PreTrainedModel, choice: KernelChoice) -> KernelChoice:
    """Give the network this attention; return the choice with the attention's name."""
    built = model.config._attn_implementation
    if choice.name not in ("", built):
        try:
            model.set_attn_implementation(choice.name)
        except (ImportError, ValueError) as error:  # not installed, or not for this network
            raise ConfigError(
                f"model.attention={choice.name}: {first_line(error)}; set model.attention=auto (where the run began "
                "with it: sdpa, or eager if that is refused)"
            ) from error
        if model.config._attn_implementation == built:  # as for Falcon and GPT-J, where transformers only warns
            install = ", with flash-attn on all nodes" * choice.name.startswith("flash_attention_")
            raise ConfigError(
                f"model.attention: a {model.config.model_type} keeps the attention that it is built with, here "
                f"{built}, and this run has {choice.name}: set model.attention={choice.name}{install}; a new run may "
                "have auto"
            )
    return KernelChoice(name=model.config._attn_implementation, why=choice.why)


def _possible(needs: KernelNeeds, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the kernels that fit, the fastest first."""
    if device.type == "cpu":
        return [] if needs.softcap else [f"{PREFIX}cpu"]
    if device.type != "cuda" or dtype not in SIXTEEN_BITS or needs.width > _WIDEST or needs.width % 8:
        return []
    return [*([] if needs.sinks else FLASH), *([] if needs.softcap else [f"{PREFIX}varlen"])]


def _why_not(needs: KernelNeeds, device: torch.device, dtype: torch.dtype) -> str:
    if needs.refused:
        return needs.refused
    if needs.softcap and needs.sinks:
        return "it has a soft cap on its scores and attention sinks, which no kernel computes together"
    if needs.softcap and device.type == "cpu":
        return "it has a soft cap on its scores, which only flash-attn computes"
    if device.type == "cuda" and dtype not in SIXTEEN_BITS:
        return f"kernels that take document borders compute in 16 bits, not in {str(dtype)[6:]}"
    return f"no kernel that takes document borders has heads of width {needs.width}, or runs on {device.type}"


def inputs_of(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, borders: Borders | None = None
) -> dict[str, Any]:
    """Return the arguments to call the network with, for tensors with a sample in each row."""
    mixed = {BORDERS: borders} if borders is not None and is_split(model) else {}
    # No attention mask: transformers finds the borders of packed documents where the positions restart.
    if not model.config._attn_implementation.startswith(PREFIX):
        return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, **mixed}
    borders = borders or borders_of(position_ids.numpy())
    return {
        **mixed,
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
    """Run the network over packed documents; return logits for every token, in the rows of `input_ids`."""
    logits: torch.Tensor = model(**inputs_of(model, input_ids, position_ids, borders)).logits
    return logits.view(*input_ids.shape, -1)


def generating(model: PreTrainedModel, needs: KernelNeeds) -> str:
    """Return the attention of transformers that is right for a network when it gets no borders."""
    return "sdpa" if model._supports_sdpa and not needs.eager else "eager"


@contextmanager
def without_borders(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Use an attention of transformers in place of our kernels, to generate text with a cache and without borders."""
    chosen = model.config._attn_implementation
    if not chosen.startswith(PREFIX):
        yield
        return
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Return whether packed documents can be kept apart: transformers finds their borders by their positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(config: PretrainedConfig) -> int:
    """Return how many tokens the model can look at; a large number if its config does not say."""
    text = config.get_text_config()
    # MPT, whose bias for distances ends there, calls it max_seq_len.
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    return positions if isinstance(positions, int) else sys.maxsize
