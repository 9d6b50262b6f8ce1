"""The pieces of evidence, the most important first, and those of them that need no training run.

Times are medians of rounds in which the ways take turns, one warm-up round left out; where ways compute the same, their
results must agree. training.py has the pieces that train.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu import training
from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.kernels import synchronize
from benchmarks.gpu.plans import Plans
from benchmarks.gpu.process import NOTHING_SPECIAL, Keep, Needs, NotHereError, Piece
from benchmarks.gpu.train_step import SIZES, document_lengths, numbers_in
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
    medium: str
    large: str
    """Models, by their names in train_step.py."""
    rows: tuple[int, ...]
    heads: dict[str, Any]
    """Of attention, and the rounds of its measurement."""
    loss: dict[str, Any]
    ceilings: dict[str, Any]
    steps: int
    few: int
    """Measured steps of a run, and of one of a large model."""
    lora: dict[str, Any]
    save_every: int
    ways: tuple[str, ...]
    """In which determinism is looked at."""
    pace: float = 1
    """The share of the limits that pieces have."""


SCALES = {
    # The attention of an 8B, and its loss for a row. Adapters as NeMo Automodel's one-GPU figure has them.
    "full": Scale(
        small="1b", medium="3b", large="8b", rows=(2048, 8192, 32768),
        heads={"heads": 32, "key_heads": 8, "width": 128, "typical": 600, "rounds": 7},
        loss={"tokens": 8192, "width": 4096, "vocabulary": 128256, "rounds": 3},
        ceilings={"side": 8192, "sides": (8192, 4096, 14336), "megabytes": 2000},
        steps=20, few=10, lora={"micro": 2, "seq_len": 4096}, save_every=12, ways=(EAGER, COMPILED),
    ),
    # All of it in a minute or two on a CPU, to see that it works.
    "tiny": Scale(
        small="tiny", medium="tiny-3b", large="tiny-8b", rows=(256, 512, 1024),
        heads={"heads": 4, "key_heads": 2, "width": 16, "typical": 40, "rounds": 1},
        loss={"tokens": 256, "width": 64, "vocabulary": 4096, "rounds": 1},
        ceilings={"side": 128, "sides": (128, 64, 172), "megabytes": 1},
        steps=5, few=5, lora={"micro": 2, "seq_len": 128}, save_every=8, ways=(EAGER,), pace=0.2,
    ),
}  # fmt: skip

LORA = {"type": "lora", "rank": 16, "alpha": 32}
_ADAPTERS = Needs(packages=("peft",))
EIGHT_BITS = {"type": "adamw", "moments": "8bit"}
FP8 = {"tensorwise": {"precision": "fp8"}, "rowwise": {"precision": "fp8", "fp8_scaling": "rowwise"}}


def pieces_of(size: str, gib: float | None = None, plans: Plans | None = None) -> list[Piece]:
    """All pieces, the most telling first: those up to tests/gpu for two calls of ten minutes and of three.

    `gib`: memory of the device; where weights, gradients and moments of the large model do not fit, the medium one
    stands for it. None: as much as it needs.
    """
    scale, plans = SCALES[size], plans or Plans()
    fits = gib is None or 16 * numbers_in(scale.large) / 2**30 <= gib
    whole, other = (scale.large, scale.medium) if fits else (scale.medium, scale.large)
    train, lora = partial(_train, plans, scale), partial(_lora, plans, scale)
    small: dict[str, Any] = {"size": scale.small, "micro": 2, "steps": scale.steps}
    few = scale.few
    first = [
        Piece(name="ceilings", kind="ceilings", seconds=25, usual=20, least=10,
              run=partial(ceilings, **scale.ceilings)),
        _attention(scale, scale.rows[1]),
        train(scale.small, COMPILED, "none", profiled=True),
        train(whole, COMPILED, "full", profiled=True),
        lora(COMPILED, "none", profiled=True),
        *(_narrow(plans, scale, whole, way) for way in ("bf16", "tensorwise")),
        _deterministic(scale, scale.ways[0]),
        Piece(name="loss", kind="loss", seconds=40, usual=20, least=10, run=partial(losses, **scale.loss)),
        Piece(name=f"checkpoint of {scale.small}", kind="checkpoint", seconds=90, usual=60, least=60,
              run=partial(training.stall, size=scale.small, micro=2, every=scale.save_every)),
        Piece(name="tests/gpu", kind="tests", seconds=240, usual=240, least=60, run=tests_on_the_device,
              needs=Needs(packages=("pytest",))),
    ]  # fmt: skip
    more = [
        train(whole, COMPILED, "selective"),
        train(other, COMPILED, "full"),
        Piece(name=f"bare loop of {scale.small}", kind="train", seconds=100, usual=60, least=40,
              run=partial(training.bare, **small)),
        *(_attention(scale, row) for row in (scale.rows[0], scale.rows[2])),
        train(scale.small, EAGER, "none"),
        *(train(scale.small, COMPILED, recompute) for recompute in ("selective", "full")),
        lora(EAGER, "none"),
        _narrow(plans, scale, whole, "rowwise"),
        train(whole, COMPILED, "selective", how="bf16 moments", optimizer={"type": "adamw", "moments": "bf16"}),
        lora(COMPILED, "none", method={**LORA, "type": "qlora"}, needs=Needs(torch="2.12")),
        train(whole, EAGER, "full"),
        *(_deterministic(scale, blocks) for blocks in scale.ways[1:]),
        Piece(name=f"TRL of {scale.small}", kind="train", seconds=150, usual=100, least=60,
              needs=Needs(packages=("trl", "datasets")), run=partial(training.trl, **{**small, "steps": few})),
    ]  # fmt: skip
    return [replace(each, seconds=scale.pace * each.seconds, least=scale.pace * each.least) for each in (*first, *more)]


def _attention(scale: Scale, row: int) -> Piece:
    run = partial(attention, tokens=row, **scale.heads)
    return Piece(name=f"attention {row}", kind="attention", seconds=40, usual=20, least=10, run=run)


def _train(
    plans: Plans, scale: Scale, size: str, blocks: str, recompute: str, *, how: str = "train", profiled: bool = False,
    **asked: Any,
) -> Piece:  # fmt: skip
    large = size != scale.small
    micro = 1 if size == scale.large else 2
    asked = {
        "size": size, "micro": micro, "steps": scale.few if large else scale.steps, "compiled": blocks == COMPILED,
        "recompute": recompute, **asked,
    }  # fmt: skip
    name = f"{how} {SIZES[size]['seq_len']} x {micro} of {size}, {blocks}, recompute {recompute}"
    each = 16 if not asked.get("optimizer") else 12 if how == "bf16 moments" else 10
    return _speed(plans, name, asked, each, seconds=150 if large else 100, profiled=profiled)


def _lora(
    plans: Plans, scale: Scale, blocks: str, recompute: str, *, method: Mapping[str, Any] = LORA,
    needs: Needs = _ADAPTERS, profiled: bool = False,
) -> Piece:  # fmt: skip
    asked = {
        "size": scale.large, **scale.lora, "steps": scale.few, "compiled": blocks == COMPILED, "recompute": recompute,
        "method": dict(method),
    }  # fmt: skip
    name = f"{method['type']} {scale.lora['seq_len']} x {scale.lora['micro']} of {scale.large}, {blocks}"
    return _speed(
        plans, name, asked, 2 if method["type"] == "lora" else 0.6, seconds=130, profiled=profiled, needs=needs
    )


def _narrow(plans: Plans, scale: Scale, size: str, way: str) -> Piece:
    """Layers that multiply in 8 bits, or the same run in bf16. One rank gathers nothing: what 8 bits spare on the way
    is not in it."""
    micro = 1 if size == scale.large else 2
    asked = {
        "size": size, "micro": micro, "steps": scale.few, "compiled": True, "recompute": "selective",
        "optimizer": EIGHT_BITS, "precision": FP8.get(way, {}),
    }  # fmt: skip
    needs = Needs(capability=(8, 9), packages=("torchao",)) if way in FP8 else NOTHING_SPECIAL
    name = f"fp8 {SIZES[size]['seq_len']} x {micro} of {size}, {way}"
    return replace(_speed(plans, name, asked, 10, seconds=120, needs=needs), kind="fp8")


def _speed(
    plans: Plans, name: str, asked: dict[str, Any], bytes_each: float, *, seconds: float, profiled: bool = False,
    needs: Needs = NOTHING_SPECIAL,
) -> Piece:  # fmt: skip
    """`bytes_each`: what a weight takes with its gradient and optimizer state."""
    states = bytes_each * numbers_in(asked["size"]) / 2**30
    return Piece(
        name=name, kind="train", seconds=seconds, least=seconds / 2, asked=asked,
        needs=replace(needs, gib=max(states, plans.gib(name))),
        run=partial(training.speed, asked=asked, profiled=profiled),
    )  # fmt: skip


def _deterministic(scale: Scale, blocks: str) -> Piece:
    run = partial(
        training.deterministic, size=scale.small, micro=2, steps=scale.few, compiled=blocks == COMPILED
    )  # fmt: skip
    name = f"deterministic {scale.small}, {blocks}"
    return Piece(name=name, kind="deterministic", seconds=100, usual=90, least=45, run=run)


def describe(device: str, directory: Path, keep: Keep) -> dict[str, Any]:
    """The machine, and the versions on it."""
    also = {name: found for name in ("torchao", "peft", "liger-kernel", "pytest") if (found := installed(name))}
    known = {**origin(), "cuda": torch.version.cuda, **also}
    if device == "cpu":
        return {"device": "cpu", **known}
    if not torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        raise NotHereError("torch finds no GPU here")
    of = torch.cuda.get_device_properties(0)
    capability = [of.major, of.minor]
    return {"device": of.name, "memory_gib": round(of.total_memory / 2**30, 1), "capability": capability, **known}


DESCRIBE = Piece(name="machine", kind="machine", seconds=120, run=describe)


def tests_on_the_device(device: str, directory: Path, keep: Keep) -> dict[str, Any]:
    """tests/gpu, whose tests skip themselves where there is no GPU. What is known is kept after each test."""
    # Without the project's own options, which refuse settings of plugins that a bare machine does not have.
    options = ["-v", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", f"--basetemp={directory / 'temporary'}"]
    command = [sys.executable, "-m", "pytest", *_TESTS, *options]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2]
    ) as pytest:
        assert pytest.stdout is not None
        for line in pytest.stdout:
            lines.append(line)
            if _OUTCOME.search(line):
                keep(of_tests(lines))
    if pytest.returncode > 1:
        raise RuntimeError(f"pytest ended with {pytest.returncode}: {''.join(lines)[-1000:]}")
    return of_tests(lines)


_TESTS = [f"tests/gpu/test_{name}.py" for name in ("kernels", "memory", "same_bits", "updates", "gpu")]
"""The last ones train a dozen runs, and time may not suffice for them."""
_OUTCOME = re.compile(r"^(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def of_tests(lines: Sequence[str]) -> dict[str, Any]:
    """What pytest's lines say."""
    ended = [(found[1], found[2]) for line in lines if (found := _OUTCOME.match(line))]
    bad = [name for name, outcome in ended if outcome in ("FAILED", "ERROR")]
    return {
        "passed": sum(outcome == "PASSED" for _, outcome in ended),
        "failed": len(bad),
        "skipped": sum(outcome == "SKIPPED" for _, outcome in ended),
        "failures": [name.partition("::")[2] for name in bad],
        "output": "".join(lines)[-8000:],
    }


def attention(
    device: str,
    directory: Path,
    keep: Keep,
    *,
    tokens: int,
    heads: int,
    key_heads: int,
    width: int,
    typical: int,
    rounds: int,
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


def losses(
    device: str, directory: Path, keep: Keep, *, tokens: int, width: int, vocabulary: int, rounds: int
) -> dict[str, Any]:
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
        mean.backward()
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
        keep({"rows": [*rows.values()]})
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
            synchronize(device)
            since = time.perf_counter()
            for _ in range(calls):
                ways[way]()
            synchronize(device)
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
