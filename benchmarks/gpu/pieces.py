"""The pieces of evidence, the most important first, and those of them that need no training run.

Times are medians of rounds in which the ways take turns, one warm-up round left out; where ways compute the same, their
results must agree. training.py has the pieces that train.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu import training
from benchmarks.gpu.process import NotHereError, Piece
from benchmarks.gpu.train_step import SIZES, document_lengths
from benchmarks.record import installed, origin
from raytune_fsdp.base.batch import Borders
from raytune_fsdp.launch.worker import choose_device, use_gpu
from raytune_fsdp.model.attention.calls import Call
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds, choose
from raytune_fsdp.model.attention.kernel_trial import why_kernel_fails
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.compile_layers import COMPILED, EAGER
from raytune_fsdp.model.objective.chunked_head import Shape, linear_cross_entropy

Ways = Mapping[str, Callable[[], Any]]

_ALIKE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}
"""How far results may be apart, as a part of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is."""

    small: str
    large: str
    """Models, by their names in train_step.py."""
    rows: tuple[int, ...]
    heads: dict[str, Any]
    """Of attention, and the rounds of its measurement."""
    loss: dict[str, Any]
    steps: int
    """Measured ones of a run."""
    save_every: int
    ways: tuple[str, ...]
    """In which determinism is looked at."""


SCALES = {
    # The attention of an 8B, and its loss for a row.
    "full": Scale(
        small="1b", large="8b", rows=(2048, 8192, 32768),
        heads={"heads": 32, "key_heads": 8, "width": 128, "typical": 600, "rounds": 7},
        loss={"tokens": 8192, "width": 4096, "vocabulary": 128256, "rounds": 3},
        steps=20, save_every=12, ways=(EAGER, COMPILED),
    ),
    # All of it in a minute or so on a CPU, to see that it works.
    "tiny": Scale(
        small="tiny", large="tiny", rows=(256, 512, 1024),
        heads={"heads": 4, "key_heads": 2, "width": 16, "typical": 40, "rounds": 3},
        loss={"tokens": 256, "width": 64, "vocabulary": 4096, "rounds": 3},
        steps=5, save_every=8, ways=(EAGER,),
    ),
}  # fmt: skip


def pieces_of(size: str) -> list[Piece]:
    """The most important first."""
    scale = SCALES[size]
    one: dict[str, Any] = {"size": scale.small, "micro": 2}
    few = min(10, scale.steps)
    found = [
        Piece(name="tests/gpu", kind="tests", seconds=240, run=tests_on_the_device),
        *(
            Piece(name=f"attention {row}", kind="attention", seconds=60,
                  run=partial(attention, tokens=row, **scale.heads))
            for row in scale.rows
        ),
        Piece(name="loss", kind="loss", seconds=60, run=partial(losses, **scale.loss)),
        _train(EAGER, "none", 90, **one, steps=scale.steps),
        _train(COMPILED, "none", 150, **one, steps=scale.steps),
        _train(COMPILED, "selective", 150, **one, steps=scale.steps),
        _train(COMPILED, "full", 150, **one, steps=scale.steps),
        Piece(name=f"bare loop of {scale.small}", kind="train", seconds=150,
              run=partial(training.bare, **one, steps=scale.steps)),
        _train(COMPILED, "selective", 240, size=scale.large, micro=1, steps=few),
        _train(COMPILED, "full", 240, size=scale.large, micro=1, steps=few),
        _train(EAGER, "full", 240, size=scale.large, micro=1, steps=few),
        *_methods(scale, few),
        Piece(name=f"fp8 {SIZES[scale.large]['seq_len']} x 1 of {scale.large}", kind="fp8", seconds=600,
              run=partial(training.narrow, size=scale.large, micro=1, steps=few)),
        Piece(name=f"profile of {scale.small}, {EAGER}", kind="profile", seconds=90,
              run=partial(training.profiled, **one)),
        Piece(name=f"checkpoint of {scale.small}", kind="checkpoint", seconds=180,
              run=partial(training.stall, **one, every=scale.save_every)),
        *(
            Piece(name=f"deterministic {scale.small}, {blocks}", kind="deterministic", seconds=240,
                  run=partial(training.deterministic, **one, steps=scale.steps, compiled=blocks == COMPILED))
            for blocks in scale.ways
        ),
        Piece(name=f"TRL of {scale.small}", kind="train", seconds=150,
              run=partial(training.trl, **one, steps=scale.steps)),
    ]  # fmt: skip
    return found


LORA = {"type": "lora", "rank": 16, "alpha": 32}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"bytes_each": 2, "method": LORA},
    "qlora": {"bytes_each": 0.7, "method": {**LORA, "type": "qlora"}},
    "8-bit moments": {"bytes_each": 10, "optimizer": {"type": "adamw", "moments": "8bit"}},
    "bf16 moments": {"bytes_each": 12, "optimizer": {"type": "adamw", "moments": "bf16"}},
}
"""What trains an 8B on a card that is too small for all of its fp32 moments."""


def _methods(scale: Scale, steps: int) -> list[Piece]:
    run = partial(
        training.speed, size=scale.large, micro=1, steps=steps, compiled=True, recompute="selective"
    )  # fmt: skip
    name = f"{SIZES[scale.large]['seq_len']} x 1 of {scale.large}"
    return [
        Piece(name=f"{each} {name}", kind="train", seconds=300, run=partial(run, **how))
        for each, how in METHODS.items()
    ]


def _train(blocks: str, recompute: str, seconds: float, *, size: str, micro: int, steps: int) -> Piece:
    run = partial(
        training.speed, size=size, micro=micro, steps=steps, compiled=blocks == COMPILED, recompute=recompute
    )  # fmt: skip
    name = f"train {SIZES[size]['seq_len']} x {micro} of {size}, {blocks}, recompute {recompute}"
    return Piece(name=name, kind="train", seconds=seconds, run=run)


def describe(device: str, directory: Path) -> dict[str, Any]:
    """The machine, and the versions on it."""
    known = {**origin(), "cuda": torch.version.cuda, "liger-kernel": installed("liger-kernel")}
    if device == "cpu":
        return {"device": "cpu", **known}
    if not torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        raise NotHereError("torch finds no GPU here")
    of = torch.cuda.get_device_properties(0)
    return {"device": of.name, "memory_gib": round(of.total_memory / 2**30, 1), **known}


DESCRIBE = Piece(name="machine", kind="machine", seconds=120, run=describe)


def tests_on_the_device(device: str, directory: Path) -> dict[str, Any]:
    """tests/gpu, whose tests skip themselves where there is no GPU."""
    if not installed("pytest"):
        raise NotHereError("pytest is not installed")
    results = directory / "results.xml"
    # Without the project's own options, which refuse settings of plugins that a bare machine does not have.
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--basetemp={directory / 'temporary'}"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options, f"--junitxml={results}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode > 1 or not results.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    cases = list(ElementTree.parse(results).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": [case.get("name") for case in bad],
        "output": done.stdout[-8000:] if bad else "",
    }


def attention(
    device: str, directory: Path, *, tokens: int, heads: int, key_heads: int, width: int, typical: int, rounds: int
) -> dict[str, Any]:
    """One layer over a row of documents: our kernel, and torch's attention with a mask and repeated keys."""
    at = _use(device)
    dtype = torch.bfloat16 if at.type == "cuda" else torch.float32
    needs = KernelNeeds(width=width, heads=(Heads(many=heads, keys=key_heads, width=width),))
    fails = partial(why_kernel_fails, needs=needs, device=at, dtype=dtype)
    chosen = choose("auto", needs, kept=None, device=at, dtype=dtype, fails=fails)
    if chosen.name not in KERNELS:
        raise RuntimeError(f"no kernel that takes document borders: {chosen.why}")
    lengths = list(document_lengths(np.random.default_rng(0), tokens, typical=typical, longest=tokens))
    starts = torch.tensor([0, *np.cumsum(lengths).clip(max=tokens)], dtype=torch.int32, device=at)
    call = Call(borders=Borders(starts=starts, longest=int(starts.diff().max())), scale=width**-0.5)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(tokens, many, width, device=at, dtype=dtype, requires_grad=True)
        for many in (heads, key_heads, key_heads)
    )
    gradient = torch.randn_like(q)
    places = torch.arange(tokens, device=at)
    document = torch.bucketize(places, starts[1:], right=True)
    mask = ((document[:, None] == document) & (places[:, None] >= places))[None, None]

    def ours() -> torch.Tensor:
        return KERNELS[chosen.name](q, k, v, call)

    def masked() -> torch.Tensor:
        repeated = [each.repeat_interleave(heads // key_heads, dim=1) for each in (k, v)]
        rows = [each.transpose(0, 1)[None] for each in (q, *repeated)]
        return F.scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=mask)[0].transpose(0, 1)

    def both(way: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = way()
        return out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)

    for found, right in zip(both(ours), both(masked), strict=True):
        _check_alike(found, right, _ALIKE[dtype])
    # Several, queued one after another: of short ones the host would be measured.
    calls = min(10, 2**15 // tokens) if at.type == "cuda" else 1
    with torch.no_grad():
        forward = in_turns({"ours": ours, "mask": masked}, at, rounds, calls=calls)
    full = in_turns({"ours": partial(both, ours), "mask": partial(both, masked)}, at, rounds, calls=calls)
    return {
        "tokens": tokens,
        "documents": len(starts) - 1,
        "kernel": chosen.name,
        **{f"{way}_forward_ms": 1e3 * seconds for way, seconds in forward.items()},
        "forward_times": forward["mask"] / forward["ours"],
        **{f"{way}_both_ms": 1e3 * seconds for way, seconds in full.items()},
        "both_times": full["mask"] / full["ours"],
    }


def losses(device: str, directory: Path, *, tokens: int, width: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """From hidden states to gradients: without logits, with them in fp32, and as liger-kernel does it."""
    at = _use(device)
    dtype = torch.bfloat16 if at.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=at, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=at, dtype=dtype).div_(width**0.5).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=at)

    def step(loss: Callable[[], torch.Tensor]) -> float:
        hidden.grad = weight.grad = None
        mean = loss() / tokens
        mean.backward()  # type: ignore[no-untyped-call]
        return mean.item()

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: F.cross_entropy((hidden @ weight.t()).float(), ids, reduction="sum"),
        "ours": lambda: linear_cross_entropy(hidden, weight, None, ids, Shape()).total,
    }
    lacking = []
    if installed("liger-kernel"):
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        ways["liger-kernel"] = partial(LigerFusedLinearCrossEntropyLoss(reduction="sum"), weight, hidden, ids)
    else:
        lacking.append({"way": "liger-kernel", "note": "not installed"})
    rows: dict[str, dict[str, Any]] = {}
    right: tuple[torch.Tensor, ...] = ()
    for way, loss in ways.items():
        extra, value = _extra_memory(at, partial(step, loss), (hidden, weight))
        assert hidden.grad is not None and weight.grad is not None
        found = torch.tensor(value), hidden.grad, weight.grad
        right = right or found
        for one, other in zip(found, right, strict=True):
            _check_alike(one, other, _ALIKE[dtype])
        rows[way] = {"way": way, "extra_gib": extra, "loss": value}
    del right, found
    for way, seconds in in_turns({way: partial(step, loss) for way, loss in ways.items()}, at, rounds, calls=1).items():
        rows[way]["ms"] = 1e3 * seconds
    return {"rows": [*rows.values(), *lacking]}


def _extra_memory(
    device: torch.device, step: Callable[[], float], gradients_of: tuple[torch.Tensor, ...]
) -> tuple[float | None, float]:
    """GiB at the peak of a step beside its gradients, on a GPU; and what it returns."""
    for tensor in gradients_of:
        tensor.grad = None
    if device.type != "cuda":
        return None, step()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    value = step()
    gradients = sum(tensor.grad.nbytes for tensor in gradients_of if tensor.grad is not None)
    return (torch.cuda.max_memory_allocated(device) - before - gradients) / 2**30, value


def in_turns(ways: Ways, device: torch.device, rounds: int, *, calls: int) -> dict[str, float]:
    """Median seconds of a call of each."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in [*ways][:: 1 - 2 * (number % 2)]:
            training.synchronize(device)
            since = time.perf_counter()
            for _ in range(calls):
                ways[way]()
            training.synchronize(device)
            if number:
                found[way].append((time.perf_counter() - since) / calls)
    return {way: median(seconds) for way, seconds in found.items()}


def _check_alike(found: torch.Tensor, right: torch.Tensor, share: float) -> None:
    apart, largest = (found - right).abs().max().item(), right.abs().max().item()
    if not apart <= share * largest:
        raise AssertionError(f"results are {apart:.3g} apart, and the largest is {largest:.3g}")


def _use(device: str) -> torch.device:
    at = choose_device(device, 1)
    if at.type == "cuda":
        use_gpu(at)
    return at
