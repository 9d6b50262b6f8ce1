"""Measure a model without changing it: the loss on each evaluation dataset, and answers to a few questions.

All ranks must call these together: a sharded model needs every rank for a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.collectives import on_all_ranks
from raytune_fsdp.data.batches import eval_batches
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import ConfigError, DataError, ModelError
from raytune_fsdp.model.attention import SIXTEEN_BITS, positions_of, without_borders
from raytune_fsdp.model.network import class_name
from raytune_fsdp.model.proof import error_of_kernel, error_of_loss, leak_between_documents
from raytune_fsdp.parallel import release_gathered
from raytune_fsdp.pulse import beat
from raytune_fsdp.step import eval_step
from raytune_fsdp.tracking.names import evaluation_accuracy, evaluation_loss

# Separates rounding, far below, from another document's tokens, far above. The same products with other tokens beside
# them give the same bits, but experts in 16 bits get batches of other sizes.
_LEAK, _LEAK_OF_EXPERTS = 1e-5, 2e-2

_ERROR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""A kernel's largest error, relative to its largest value. One that leaks, or ignores a window, is off by 1."""


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch to evaluation mode, and back afterwards. Random state needs no restoring: every block sets its own."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        release_gathered(model)


def losses(
    model: PreTrainedModel, datasets: Mapping[str, Windows], *, micro_batch: int, data_ranks: int, device: torch.device
) -> dict[str, float]:
    """Loss per target token and accuracy of each dataset, by the names of metrics, over all ranks. Collective."""
    results: dict[str, float] = {}
    with evaluating(model):
        for name, windows in datasets.items():
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            blocks = eval_batches(windows, micro_batch=micro_batch, data_ranks=data_ranks, data_rank=dist.get_rank())
            for block in to_device(blocks, device):
                sums += eval_step(model, block)
            dist.all_reduce(sums)
            total, right, targets = sums.tolist()
            results |= {evaluation_loss(name): total / targets, evaluation_accuracy(name): right / targets}
    return results


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    device: torch.device,
    attention: str,
) -> list[str]:
    """The model's answer to each prompt, by greedy decoding with transformers' `attention`. Collective."""
    with evaluating(model), without_borders(model, attention), _beating(model):
        return [answer(model, tokenizer, prompt, max_new_tokens=max_new_tokens, device=device) for prompt in prompts]


@contextmanager
def _beating(model: PreTrainedModel) -> Iterator[None]:
    """Every token is a sign of life: many long answers take longer than any step."""
    hook = model.register_forward_pre_hook(lambda *_: beat())
    try:
        yield
    finally:
        hook.remove()


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    device: torch.device,
    temperature: float = 0.0,
) -> str:
    """The answer to one prompt. With a chat template the prompt is a user's message; without one it is continued."""
    ids = encode_prompt(tokenizer, prompt, positions=positions_of(model.config)).to(device)
    room = positions_of(model.config) - ids.shape[1]
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(max_new_tokens, room),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
        use_cache=True,
        **sampling,
    )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, positions: int) -> torch.Tensor:
    """Token ids of a prompt, as a batch of one. DataError if it is empty or leaves no position for an answer."""
    if tokenizer.chat_template:
        try:
            template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
            text, _ = template.render([{"role": "user", "content": prompt}], None, prompt=True)
        except Refused as error:
            raise DataError(f"the chat template refuses the prompt {prompt[:40]!r}: {error}") from error
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"].long()
    if not 0 < ids.shape[1] < positions:
        raise DataError(
            f"the prompt {prompt[:40]!r} has {ids.shape[1]} tokens; it needs at least 1, and fewer than the "
            f"{positions} positions the model knows"
        )
    return ids


def check_network(model: PreTrainedModel, packing: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse an attention or a loss that computes something else, and packing where one document sees another.
    Collective. `dtype` is what the network computes in, which may not be the type of its weights."""
    with evaluating(model):
        mine = (
            error_of_kernel(model, device),
            leak_between_documents(model, device) if packing != "none" else 0.0,
            error_of_loss(model, device),
        )
    # All ranks judge the same values, the worst of all, so if one refuses all do. A NaN is the worst: max() of a tensor
    # returns it, and no bound holds for it.
    error, change, loss = torch.tensor(on_all_ranks(lambda: mine), dtype=torch.float64).amax(0).tolist()
    if not error <= _ERROR[dtype]:
        found = "are not finite" if math.isnan(error) else f"are off by up to {error:.1e} from attention by the book"
        raise ModelError(
            f"model.attention: {model.config._attn_implementation} is wrong here: its results {found} in "
            f"{str(dtype)[6:]}; set model.attention=eager"
        )
    if math.isnan(change) or math.isnan(loss):
        raise ModelError(
            f"parallel.precision: the logits of {class_name(model)} are not finite in {str(dtype)[6:]}; choose another "
            "precision, or correct the weights"
        )
    experts = dtype in SIXTEEN_BITS and model._can_set_experts_implementation()
    if change > (_LEAK_OF_EXPERTS if experts else _LEAK):
        raise _leaks(model, packing, change)
    if loss > _ERROR[dtype]:
        raise ModelError(
            f"model.loss: losses are off by up to {loss:.1e} from those of the network's own logits; "
            "set model.loss=plain"
        )


def refuse_leak(model: PreTrainedModel, packing: str, change: float) -> None:
    """Raise if the logits of a document change by more than rounding when the one before it does."""
    if change > _LEAK:
        raise _leaks(model, packing, change)


def _leaks(model: PreTrainedModel, packing: str, change: float) -> ConfigError:
    return ConfigError(
        f"data.packing={packing}: in {class_name(model)} with {model.config._attn_implementation} attention, "
        f"packed documents see each other (logits change by {change:.1e}); set data.packing=none"
    )
