"""On a GPU: kernels that are told where documents begin are right, and a steady step does not wait for the device."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from raytune_fsdp.assemble import assemble
from raytune_fsdp.launch.local import prepare_on_rank0
from raytune_fsdp.launch.worker import join
from raytune_fsdp.model.attention import Heads, Needs, choose
from raytune_fsdp.model.calls import PREFIX, Call, reference
from raytune_fsdp.model.flash import FLASH
from raytune_fsdp.model.kernels import KERNELS
from raytune_fsdp.model.trial import why_kernel_fails
from raytune_fsdp.step import train_step
from raytune_fsdp.types import Borders
from tests.gpu.test_gpu import ARCHITECTURE
from tests.runs import make_config, write_tokenizer, write_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [300, 1, 777, 64, 2000, 906]


def fails(name: str, width: int = 128, keys: int = 4, window: int | None = None, sinks: bool = False) -> str | None:
    needs = Needs(width=width, heads=(Heads(many=16, keys=keys, width=width, window=window, sinks=sinks),))
    return why_kernel_fails(name, needs, torch.device("cuda"), torch.bfloat16)


def test_one_of_them_is_chosen() -> None:
    found = choose("auto", Needs(width=128), kept=None, device=torch.device("cuda"), dtype=torch.bfloat16, fails=fails)
    assert found.name in KERNELS, found.why


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", [*FLASH, f"{PREFIX}varlen"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("keys", [16, 4])
@pytest.mark.parametrize("width", [64, 128])
def test_values_and_gradients(width: int, keys: int, window: int | None, name: str, sinks: bool) -> None:
    """Of every kernel that is here and can do it, also of those that `choose` would not take first."""
    if name != f"{PREFIX}varlen" and (reason := fails(name, width, keys, window, sinks)):
        pytest.skip(reason)
    device = torch.device("cuda")
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), n, width) for n in (16, keys, keys)]
    ours = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    ours += [torch.randn(16, device=device, dtype=torch.bfloat16).requires_grad_()] if sinks else []
    book = [each.detach().float().requires_grad_() for each in ours]
    borders = Borders(starts=starts, longest=max(LENGTHS))
    calls = [
        Call(borders=borders, scale=width**-0.5, window=window, sinks=each[3] if sinks else None)
        for each in (ours, book)
    ]
    weights = torch.randn(shapes[0], device=device)
    found, right = KERNELS[name](*ours[:3], calls[0]), reference(*book[:3], calls[1])
    (found * weights.bfloat16()).sum().backward()
    (right * weights).sum().backward()
    for a, b in zip([found, *(x.grad for x in ours)], [right, *(x.grad for x in book)], strict=True):
        assert a is not None and b is not None
        assert (a.float() - b).abs().max() <= 4e-2 * b.abs().max()


def test_a_steady_step_does_not_wait(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.jsonl", rows=400, vocabulary=32, longest=200)
    write_tokenizer(tmp_path / "tokenizer", ARCHITECTURE["vocab_size"])
    config = make_config(
        tmp_path, ARCHITECTURE, data={"seq_len": 512}, parallel={"precision": "bf16"},
        train={"global_batch": 8, "micro_batch": 4, "max_steps": 6}, cluster={"device": "cuda", "workers": 1},
    )  # fmt: skip
    device = torch.device("cuda", 0)
    join(device, alone=True)
    try:
        parts = assemble(config, *prepare_on_rank0(config), device)
        for number, batches in enumerate(islice(parts.batches, 5)):
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            train_step(
                parts.model, parts.optimizer, parts.scale, batches, plan=parts.plan, parallel=config.parallel,
                optim=config.optim, lr_factor=1.0, seed=0,
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.distributed.destroy_process_group()
