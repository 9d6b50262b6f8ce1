"""On a GPU: kernels that take document borders are right, and steady steps do not wait for the device."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

import pytest
import torch

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.launch.worker import join
from raytune_fsdp.model.attention.calls import PREFIX, Call, reference
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds, choose
from raytune_fsdp.model.attention.flash import FLASH
from raytune_fsdp.model.attention.kernel_trial import _values_and_gradients, why_kernel_fails
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import train
from raytune_fsdp.run.measure.meter import to_host
from raytune_fsdp.step.precision import numerics
from raytune_fsdp.step.train_step import StepTensors, train_step
from tests.gpu.test_gpu import ARCHITECTURE
from tests.runs import make_config, prepare_on_rank0, write_tokenizer, write_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [300, 1, 777, 64, 2000, 906]


def fails(name: str, width: int = 128, keys: int = 4, window: int | None = None, sinks: bool = False) -> str | None:
    needs = KernelNeeds(width=width, heads=(Heads(many=16, keys=keys, width=width, window=window, sinks=sinks),))
    return why_kernel_fails(name, needs, torch.device("cuda"), torch.bfloat16)


def test_one_of_them_is_chosen() -> None:
    found = choose(
        "auto", KernelNeeds(width=128), kept=None, device=torch.device("cuda"), dtype=torch.bfloat16, fails=fails
    )
    assert found.name in KERNELS, found.why


@pytest.mark.parametrize("name", [*FLASH, f"{PREFIX}varlen"])
@pytest.mark.parametrize("window", [None, 512])
def test_bits_are_the_same_again_where_they_matter(name: str, window: int | None) -> None:
    """Over longer documents than those of the trial, which passes over a kernel that cannot do it."""
    device, heads = torch.device("cuda"), Heads(many=16, keys=4, width=128, window=window)
    with numerics(ParallelConfig(), device, deterministic=True):
        if reason := why_kernel_fails(name, KernelNeeds(width=128, heads=(heads,)), device, torch.bfloat16):
            pytest.skip(reason)
        first, *others = (
            _values_and_gradients(KERNELS[name], heads, LENGTHS, device, torch.bfloat16) for _ in range(5)
        )
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


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


def config_of(directory: Path, **train: int) -> FinetuneConfig:
    write_tokens(directory / "tokens.jsonl", rows=400, vocabulary=32, longest=200)
    write_tokenizer(directory / "tokenizer", ARCHITECTURE["vocab_size"])
    return make_config(
        directory, ARCHITECTURE, data={"seq_len": 512}, parallel={"precision": "bf16"},
        train={"global_batch": 8, "micro_batch": 4, **train}, cluster={"device": "cuda", "workers": 1},
    )  # fmt: skip


def test_a_steady_step_does_not_wait(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=6)
    device = torch.device("cuda", 0)
    join(device, alone=True)
    try:
        parts = assemble(config, *prepare_on_rank0(config), device)
        for number, batches in enumerate(islice(parts.batches, 5)):
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            train_step(
                parts.model, parts.optimizer, parts.scale, batches, plan=parts.plan, parallel=parts.parallel,
                optim=config.optim, lr_factor=1.0, seed=0,
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.distributed.destroy_process_group()


def test_a_steady_run_that_logs_each_step_does_not_wait(tmp_path: Path) -> None:
    """All of the loop: batches, steps, learning rate, metrics, record. Never run on a GPU."""
    config = config_of(tmp_path, max_steps=9, log_every=1)
    device, asked = torch.device("cuda", 0), count(1)

    def stop() -> None:
        # Asked before every step. The first steps allocate, the last one saves.
        torch.cuda.set_sync_debug_mode("error" if 4 < next(asked) < 9 else "default")

    join(device, alone=True)
    try:
        parts = assemble(config, *prepare_on_rank0(config), device)
        try:
            assert train(parts, stop).step == 9
        finally:
            torch.cuda.set_sync_debug_mode("default")
            parts.saves.leave()
            parts.tracker.finish("finished")
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_queued_behind_a_step_does_not_keep_its_metrics() -> None:
    """Never run on a GPU."""
    device = torch.device("cuda", 0)
    steps = [
        StepTensors(counts=torch.full((9,), n, device=device), values=torch.ones(3, device=device)) for n in (1, 2)
    ]
    for each in steps:  # gets the pinned memory, which waits
        to_host(each)
    torch.cuda.synchronize()
    found, arrival = to_host(steps[0])
    assert arrival is not None
    torch.cuda._sleep(2 * 10**9)  # about a second, as a step that the device still computes
    to_host(steps[1])
    arrival.synchronize()
    assert found.counts.tolist() == [1] * 9
    assert not torch.cuda.current_stream().query(), "the step behind it is still being computed"
    torch.cuda.synchronize()
