"""On a GPU: kernels that are told where documents begin are right, and a steady step does not wait for the device."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from raytune_fsdp.assemble import assemble
from raytune_fsdp.launch.local import prepare_on_rank0
from raytune_fsdp.launch.worker import join
from raytune_fsdp.model.attention import Needs, choose
from raytune_fsdp.model.kernels import KERNELS, Call, reference
from raytune_fsdp.step import train_step
from raytune_fsdp.types import Borders
from tests.gpu.test_gpu import ARCHITECTURE
from tests.runs import make_config, write_tokenizer, write_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [300, 1, 777, 64, 2000, 906]


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("keys", [16, 4])
@pytest.mark.parametrize("width", [64, 128])
def test_values_and_gradients(width: int, keys: int, window: int | None) -> None:
    device = torch.device("cuda")
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    asked = Call(borders=Borders(starts=starts, longest=max(LENGTHS)), scale=width**-0.5, window=window)
    name = choose("auto", Needs(width=width), kept=None, device=device, dtype=torch.bfloat16).name
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), n, width) for n in (16, keys, keys)]
    ours = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    book = [each.detach().float().requires_grad_() for each in ours]
    weights = torch.randn(shapes[0], device=device)
    found, right = KERNELS[name](*ours, asked), reference(*book, asked)
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
