"""Measure a machine for plans of runs on it: `raytune-fsdp plan --calibrate FILE`.

Kernels are measured one by one at sizes that layers have, by as many ranks at a time as the machine would have: they
share its memory, and on a CPU its cores. Then two small models train (in 16 and in 32 bits). What their steps reach of
the sum of their kernels says what no kernel does: what modules and autograd take between them. Where there are several
ranks, a third model trains that weighs next to nothing. What its step takes besides its kernels is what FSDP takes for
each collective, with all that comes with a unit (hooks, DTensors, the clipping of its gradients).
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.machine import processor
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.shared_batches import own_parts
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.model.attention.calls import PREFIX, Call
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.model.split.sequence import split_tokens
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import Calibration, Surface, device_of
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.speed import Seconds
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import assume_kernels, full_batches, one_step
from raytune_fsdp.run.build import Site, build, optimizer_of, sums_of
from raytune_fsdp.step.parallel import memory_of

_SECONDS = 0.1
"""The least time for which each kernel is measured."""
_STEPS, _LIGHT_STEPS = 5, 20
_ROUNDS = 3
_LIGHT = "light"
"""The name of the step that weighs nothing."""

_DTYPES = {"2": torch.bfloat16, "4": torch.float32}
_PRECISION = {"2": "bf16", "4": "fp32"}
_TOKENS = 1024

_SIDES = {"cpu": (8, 64, 256, 1024), "cuda": (8, 64, 512, 2048, 8192)}
_HEADS = {"cpu": (32, 64, 128), "cuda": (64, 128)}
_LENGTHS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
_COLD = {"cpu": 2**23, "cuda": 2**27}
"""Numbers in 32 bits that are more than caches hold."""
_NUMBERS = {"cpu": (2**10, 2**14, 2**18, 2**22), "cuda": (2**10, 2**16, 2**22, 2**26)}
_MESSAGE = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Bytes: as large as the units of models that such devices train."""
_WIDTH = {"cpu": 256, "cuda": 2048}
"""The width of the models that train."""


def calibrate(ranks: int, threads: int) -> Calibration:
    """Measure `ranks` ranks of this machine, each with a GPU of its own, if it has GPUs. This takes about a minute."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        # Daemons: they end with this process, also where that is interrupted.
        context = torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _measure, (ranks, kind, threads, directory), nprocs=ranks, join=False, daemon=True
        )
        try:
            while not context.join():
                pass
        except torch.multiprocessing.ProcessException as error:  # type: ignore[attr-defined]
            last = str(error).strip().splitlines()[-1]
            raise TrainingError(
                f"measuring this machine failed: {last}; end what else uses it, and try again"
            ) from error
        found = json.loads((Path(directory) / "found.json").read_text())
    steps = found.pop("steps")
    products, attention = (
        {key: Surface(tuple(map(tuple, points))) for key, points in found.pop(name).items()}
        for name in ("products", "attention")
    )
    device = torch.device(kind)
    made = Calibration(
        device=torch.cuda.get_device_name(0) if kind == "cuda" else processor() or "CPU",
        kind=kind,
        memory=memory_of(torch.device("cuda", 0) if kind == "cuda" else device),
        ranks=ranks,
        threads=threads,
        products=products,
        attention=attention,
        elementwise=Surface(tuple(map(tuple, found.pop("elementwise")))),
        **found,
        per_collective=0.0,
        reached={"2": 1.0, "4": 1.0},
        torch=torch.__version__,
        date=date.today().isoformat(),
    )
    for _ in range(_ROUNDS):  # each of the two numbers is in the other's step, a little
        made = replace(made, reached={key: _reached(made, key, steps[key]) for key in _PRECISION})
        if ranks > 1:
            # From a light step, the seconds of a collective.
            seconds = steps[_LIGHT]
            config = reference(made.kind, "bf16", made.ranks, width=64)
            without, one = (_predicted(replace(made, per_collective=each), config) for each in (0.0, 1.0))
            many = one.moving - without.moving
            made = replace(made, per_collective=max(seconds - without.step, 0.1 * seconds) / many)
    return made


def _predicted(made: Calibration, config: FinetuneConfig) -> Seconds:
    cluster = Cluster(device=device_of(made), per_node=made.ranks)
    return predict(ModelSpec.of(config), config, resolve(config, made.ranks), cluster).seconds


def _reached(made: Calibration, key: str, seconds: float) -> float:
    """Return how much of the sum of its operations a step reaches that took `seconds`."""
    found = _predicted(made, reference(made.kind, _PRECISION[key], made.ranks, width=_WIDTH[made.kind]))
    alone = found.operations + found.updating
    # Not below what would be found if half of the step had been collectives that take longer than alone.
    return alone / max(seconds - found.exposed, 0.5 * seconds)


def reference(kind: str, precision: str, ranks: int, width: int) -> FinetuneConfig:
    """Return the config of a model that trains. With the device's `_WIDTH`, its step takes about a second."""
    architecture = {
        "model_type": "llama", "vocab_size": 32 * width, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": 4, "num_attention_heads": width // 64, "num_key_value_heads": width // 64,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    return FinetuneConfig.model_validate({
        "run": {"name": "calibration"},
        "model": {"init": "random", "tokenizer": "none", "architecture": architecture},
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": 512 if width > 64 else 64},
        "train": {"max_steps": 2, "global_batch": 2 * ranks, "micro_batch": 2},
        "parallel": {"precision": precision, "compile": False},
        "cluster": {"device": kind},
    })  # fmt: skip


# --- On every rank ----------------------------------------------------------------------------------------------------


def _measure(rank: int, ranks: int, kind: str, threads: int, directory: str) -> None:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{directory}/meeting", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    try:
        timer = Timer(device)
        found = {**kernels(timer), **_links(timer), "steps": _real_steps(device, ranks)}
        if rank == 0:
            (Path(directory) / "found.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Timer:
    """Measures the seconds of one call: the mean of all ranks, which do the same at the same time."""

    def __init__(self, device: torch.device, seconds: float = _SECONDS) -> None:
        self.device, self._enough = device, seconds

    def __call__(self, call: Callable[[], object]) -> float:
        self._timed(call, 1)
        times = 1
        while True:
            spent = self._timed(call, times)
            if spent >= self._enough:
                return spent / times
            times = max(2 * times, int(times * self._enough / max(spent, 1e-9)))

    def _timed(self, call: Callable[[], object], times: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent)
        return float(spent) / dist.get_world_size()


def kernels(timer: Timer) -> dict[str, Any]:
    host = _per_operation(timer)
    return {
        "per_operation": host,
        "products": {key: _products(timer, dtype, host) for key, dtype in _DTYPES.items()},
        "attention": {
            f"{key} {way}": points for key, dtype in _DTYPES.items() for way, points in _attention(timer, dtype).items()
        },
        "elementwise": _elementwise(timer, host),
    }


def _per_operation(timer: Timer) -> float:
    x = torch.ones(16, device=timer.device, requires_grad=True)
    w = torch.ones(16, device=timer.device)
    times = 64

    def call() -> None:
        y = x
        for _ in range(times):
            y = y * w
        torch.autograd.backward(y, w)

    return timer(call) / (2 * times)


def _products(timer: Timer, dtype: torch.dtype, host: float) -> list[tuple[float, float, float]]:
    """Measure the three products of a linear layer: forward, and the gradients of its input and of its weight."""
    points: list[tuple[float, float, float]] = []
    sides = _SIDES[timer.device.type]
    for large in sides[1:]:
        for small in (each for each in sides if each <= large):
            tokens = max(_TOKENS, large)
            x, g = (torch.randn(tokens, width, device=timer.device, dtype=dtype) for width in (large, small))
            w = torch.randn(small, large, device=timer.device, dtype=dtype)

            def call(x: torch.Tensor = x, g: torch.Tensor = g, w: torch.Tensor = w) -> None:
                torch.mm(x, w.t())
                torch.mm(g, w)
                torch.mm(g.t(), x)

            seconds = timer(call)
            seconds = max(seconds - 3 * host, seconds / 2) if timer.device.type == "cpu" else seconds
            points.append((small, large, 6.0 * tokens * small * large / seconds))
    return points


def _attention(timer: Timer, dtype: torch.dtype) -> Mapping[str, list[tuple[float, float, float]]]:
    points: dict[str, list[tuple[float, float, float]]] = {"forward": [], "backward": []}
    kind, heads = timer.device.type, 4
    for width in _HEADS[kind]:
        for length in _LENGTHS[kind]:
            tokens = max(_TOKENS, length)
            q, k, v = (
                torch.randn(tokens, heads, width, device=timer.device, dtype=dtype, requires_grad=True) for _ in "qkv"
            )
            starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=timer.device)
            attend = _kernel(kind, dtype, Call(borders=Borders(starts=starts, longest=length), scale=width**-0.5))
            out = attend(q, k, v)
            grad = torch.randn_like(out)
            forward = timer(lambda: attend(q, k, v))  # noqa: B023
            backward = timer(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))  # noqa: B023
            # As predict/trace/work.py counts: two products forward, five backward, of the pairs that see each other.
            pairs = tokens * (length + 1) / 2
            points["forward"].append((width, length, 2 * 2 * pairs * heads * width / forward))
            points["backward"].append((width, length, 2 * 5 * pairs * heads * width / backward))
    return points


def _kernel(kind: str, dtype: torch.dtype, call: Call) -> Callable[..., torch.Tensor]:
    if kind == "cuda" and dtype == torch.float32:  # no kernel there takes the borders of documents
        length = call.borders.longest

        def by_document(*qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.reshape(-1, length, *each.shape[1:]).transpose(1, 2) for each in qkv)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return by_document
    name = f"{PREFIX}{'varlen' if kind == 'cuda' else 'cpu'}"
    return lambda q, k, v: KERNELS[name](q, k, v, call)


def _elementwise(timer: Timer, host: float) -> list[tuple[float, float, float]]:
    """Measure what layers do besides products."""
    points = []
    for numbers in _NUMBERS[timer.device.type]:
        # What a layer reads has been in no cache for long.
        many = min(512, max(2, _COLD[timer.device.type] // numbers))
        pool = itertools.cycle([torch.randn(numbers, device=timer.device) for _ in range(many)])

        def call(pool: Iterator[torch.Tensor] = pool) -> None:
            torch.mul(next(pool), next(pool))
            torch.add(next(pool), next(pool))
            F.silu(next(pool))
            torch.cat([next(pool), next(pool)])
            next(pool).to(torch.bfloat16)

        nbytes, operations = numbers * (12 + 12 + 8 + 16 + 6), 5
        seconds = timer(call)
        seconds = max(seconds - operations * host, seconds / 2) if timer.device.type == "cpu" else seconds
        points.append((nbytes / operations, nbytes / operations, nbytes / seconds))
    return points


def _links(timer: Timer) -> dict[str, float]:
    ranks = dist.get_world_size()
    if ranks == 1:
        return {"gathering": 0.0, "reducing": 0.0}
    numbers = _MESSAGE[timer.device.type] // 4 // ranks * ranks
    whole, copy = (torch.zeros(numbers, device=timer.device) for _ in range(2))
    part = torch.zeros(numbers // ranks, device=timer.device)

    # What is gathered is copied to its place, and what is summed comes from one, as FSDP does it.
    def gather() -> None:
        dist.all_gather_into_tensor(whole, part)
        copy.copy_(whole)

    def reduce() -> None:
        whole.copy_(copy)
        dist.reduce_scatter_tensor(part, whole)

    moved = 4 * numbers * (ranks - 1) / ranks
    return {
        "gathering": moved / timer(gather),
        "reducing": moved / timer(reduce),
    }


def _real_steps(device: torch.device, ranks: int) -> dict[str, float]:
    width = _WIDTH[device.type]
    of = {key: reference(device.type, precision, ranks, width) for key, precision in _PRECISION.items()}
    if ranks > 1:
        of[_LIGHT] = reference(device.type, "bf16", ranks, width=64)
    found = {}
    for key, config in of.items():
        trainer = Trainer(config, device)
        trainer.step()
        found[key] = median(trainer.step() for _ in range(_STEPS if key != _LIGHT else _LIGHT_STEPS))
    return found


# Steps of a model without a run: random weights, full batches, and nothing that is kept.


class Trainer:
    """A network of random weights on every rank of a process group, spread as a run would spread it."""

    def __init__(self, config: FinetuneConfig, device: torch.device) -> None:
        """Build the network of `config`, which begins at random and has a length in steps."""
        spec, self._device = ModelSpec.of(config), device
        self._config, self._plan = config, resolve(config, dist.get_world_size())
        built = build(
            config, spec.hf_config, spec.needs, Site.of_rank(self._plan, device),
            partial(assume_kernels, config, spec.needs, device.type),
        )  # fmt: skip
        self._model, self._parallel = built.model, built.parallel
        fill(self._model, None, "empty", device)
        with torch.no_grad():
            for parameter in self._model.parameters():
                local_piece(parameter).normal_(std=0.02)
        self._model.train()
        if built.groups.sequence is not None:
            split_tokens(self._model, built.groups.sequence)
        self._optimizer, self._sums = optimizer_of(built, config), sums_of(built, config, self._plan)
        self._optimizer.init_state()
        batches = full_batches(config, spec.hf_config, self._plan.division.full_rounds)
        parts = own_parts([batches], self._plan.layout, dist.get_rank())
        self._batches = next(to_device(parts, device))

    def step(self) -> float:
        """Train one step; return the seconds that it took on the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        one_step(
            self._config, self._plan, self._parallel, self._model, self._optimizer, self._batches, self._device,
            self._sums,
        )  # fmt: skip
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent)
