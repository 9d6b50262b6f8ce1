"""Pieces of evidence that train: through the real path, in a bare PyTorch loop, and with TRL."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.process import NotHereError
from benchmarks.gpu.train_step import (
    SIZES,
    WARMUP_STEPS,
    architecture_of,
    make_config,
    measure,
    run_steps,
)
from benchmarks.record import installed
from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import choose_device, join, work
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.step.profiling import shares_of
from tests.runs import prepare_on_rank0

_MOST_AT_ONCE = 2**30
"""Bytes of a plain copy to the host: pinned memory of all of them would take a while to get."""

_FEW_LAYERS = 4
"""Of the model whose trajectories are compared: the same kernels as in all of its layers, and smaller checkpoints."""

_PROFILED_STEPS = 3
_SHOWN = 10


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(
    device: str,
    directory: Path,
    *,
    size: str,
    micro: int,
    steps: int,
    compiled: bool,
    recompute: str,
    bytes_each: float = 16,
    method: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps through the real path. `bytes_each`: what a weight takes with its gradient and optimizer state."""
    at = _join(device)
    _check_room(at, size, bytes_each)
    sections: dict[str, Mapping[str, Any]] = {}
    if method is not None:
        sections |= {"method": method, "model": _stored(directory, size, at)}
    if optimizer is not None:
        sections["optim"] = {"optimizer": optimizer}
    config = make_config(
        directory, size, micro=micro, steps=steps, compiled=compiled, recompute=recompute, **sections
    )  # fmt: skip
    found = measure(config, at)
    return {**found, **_in_units(found)}


def _stored(directory: Path, size: str, device: torch.device) -> dict[str, Any]:
    """A model of random weights in files, as adapters need a base."""
    with torch.no_grad():
        _llama(size, device).bfloat16().save_pretrained(directory / "base", max_shard_size="4GB")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"path": str(directory / "base"), "init": "pretrained", "architecture": None, "tokenizer": str(TOKENIZER)}


def _in_units(found: dict[str, Any]) -> dict[str, float | None]:
    """For a table."""
    percent = {name: found[name] and 100 * found[name] for name in ("mfu", "mfu_6n")}
    return {
        **{f"{name}_percent": value for name, value in percent.items()},
        "memory_gib": found["memory_bytes"] / 2**30,
    }


def bare(device: str, directory: Path, *, size: str, micro: int, steps: int) -> dict[str, Any]:
    """The same network in a loop of a few lines: autocast over fp32 weights, compiled blocks, no documents."""
    at = _join(device)
    model = _llama(size, at)
    model.train()
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(3, SIZES[size]["vocab_size"], (micro, SIZES[size]["seq_len"]), device=at)

    def step() -> None:
        with torch.autocast(at.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARMUP_STEPS):
        step()
    synchronize(at)
    since = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(at)
    return _rate(at, (time.perf_counter() - since) / steps, ids.numel())


def _rate(device: torch.device, step_seconds: float, tokens: int) -> dict[str, Any]:
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {"tokens_per_second": tokens / step_seconds, "step_seconds": step_seconds, "memory_gib": memory}


def profiled(device: str, directory: Path, *, size: str, micro: int) -> dict[str, Any]:
    """A few steady steps, one after another as in a run: what the GPU did, and how long it did nothing.

    Each step is logged, as a run does that is not told otherwise: if that waited for the device, it would be idle.
    """
    at = _join(device)
    steps = _PROFILED_STEPS + 1
    config = make_config(
        directory, size, micro=micro, steps=steps, compiled=False,
        train={"global_batch": micro, "micro_batch": micro, "max_steps": WARMUP_STEPS + steps + 1, "log_every": 1},
    )  # fmt: skip
    # Only one of the two: to note what the host does slows it down, and the GPU would seem idle.
    record = profile(activities=[ProfilerActivity.CUDA if at.type == "cuda" else ProfilerActivity.CPU])

    def enough(step: int) -> bool:
        if step == WARMUP_STEPS + 1:
            synchronize(at)
            record.start()
        if step <= WARMUP_STEPS + _PROFILED_STEPS:
            return False
        synchronize(at)
        record.stop()
        return True

    run_steps(config, at, enough)
    if at.type != "cuda":
        operations = {event.key: event.self_cpu_time_total for event in record.key_averages()}
        return {"rows": _largest(operations), "steps": _PROFILED_STEPS}
    record.export_chrome_trace(str(directory / "trace.json"))
    return of_trace(json.loads((directory / "trace.json").read_text())["traceEvents"])


def of_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a GPU did in the profiled steps."""
    kernels = [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    spent: dict[str, float] = defaultdict(float)
    for name, start, end in kernels:
        spent[name] += end - start
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    return {
        "rows": _largest(spent),
        "steps": _PROFILED_STEPS,
        "idle_percent": shares_of(kernels)["idle"],
        "gpu_ms_of_a_step": span / 1e3 / _PROFILED_STEPS,
    }


def _largest(microseconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(microseconds.values())
    longest = sorted(microseconds.items(), key=lambda each: each[1], reverse=True)[:_SHOWN]
    return [
        {"name": name[:100], "ms_of_a_step": value / 1e3 / _PROFILED_STEPS, "percent": 100 * value / total}
        for name, value in longest
    ]


def stall(device: str, directory: Path, *, size: str, micro: int, every: int) -> dict[str, Any]:
    """How long two saves keep training waiting: in the call itself, and in that step and the next together.

    A GPU copies while the next step computes, whose update waits for the copies. The first save gets the memory, too.
    """
    at = _join(device)
    config = make_config(
        directory, size, micro=micro, steps=0, compiled=False,
        checkpoint={"asynchronous": True, "every": every}, train={"max_steps": 10_000},
    )  # fmt: skip
    calls: dict[int, float] = {}
    starts: list[float] = []
    begin = Saver.begin

    def timed(saver: Saver, state: Any, **named: Any) -> None:
        since = time.perf_counter()
        begin(saver, state, **named)
        calls[state.step] = time.perf_counter() - since

    def enough(step: int) -> bool:
        synchronize(at)
        starts.append(time.perf_counter())
        return len(calls) == 2 and step > max(calls) + 2

    with mock.patch.object(Saver, "begin", timed):
        parts = run_steps(config, at, enough)
    assert parts.saves.saver.staging is not None
    size_of_all = parts.saves.saver.staging.nbytes
    del parts
    seconds = {step: end - start for step, (start, end) in enumerate(itertools.pairwise(starts), 1)}
    near = {step + more for step in calls for more in (0, 1)}
    usual = median(value for step, value in seconds.items() if step > every // 2 and step not in near)
    first, second = ({"call": calls[step], "both": seconds[step] + seconds[step + 1] - 2 * usual} for step in calls)
    copy = _copy_seconds(at, size_of_all)
    return {
        "gib": size_of_all / 2**30,
        "step_seconds": usual,
        "copy_seconds": copy,
        "first_call_seconds": first["call"],
        "first_stall_seconds": first["both"],
        "call_seconds": second["call"],
        "stall_seconds": second["both"],
        "stall_over_copy": second["both"] / copy,
    }


def _copy_seconds(device: torch.device, size: int) -> float:
    """A plain copy of so many bytes from the device to pinned memory."""
    part = min(size, _MOST_AT_ONCE)
    source = torch.zeros(part, dtype=torch.uint8, device=device)
    target = torch.zeros(part, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = []
    for _ in range(4):
        synchronize(device)
        since = time.perf_counter()
        for start in range(0, size, part):
            target[: size - start].copy_(source[: size - start], non_blocking=True)
        synchronize(device)
        found.append(time.perf_counter() - since)
    return median(found[1:])


def deterministic(device: str, directory: Path, *, size: str, micro: int, steps: int, compiled: bool) -> dict[str, Any]:
    """Whether a run that was stopped and continued equals one that was not, to the bit; and what that costs."""
    at = _join(device)
    layers = min(_FEW_LAYERS, SIZES[size]["num_hidden_layers"])

    def trajectory(name: str, stop_after: int | None = None) -> list[dict[str, Any]]:
        _start_afresh(at)
        config = make_config(
            directory, size, micro=micro, steps=0, compiled=compiled, run={"name": name, "deterministic": True},
            model={"architecture": {**architecture_of(size), "num_hidden_layers": layers}}, train={"max_steps": 8},
        )  # fmt: skip
        _train(config, at, stop_after)
        return read_trajectory(RunDir.of(config).metrics)

    whole = trajectory("whole")
    shutil.rmtree(directory / "whole")
    stopped = trajectory("parted", stop_after=4)
    parted = trajectory("parted")
    shutil.rmtree(directory / "parted")
    speeds = {}
    for asked in (False, True):
        _start_afresh(at)
        config = make_config(
            directory, size, micro=micro, steps=steps, compiled=compiled,
            run={"name": f"price-{asked}", "deterministic": asked},
        )  # fmt: skip
        speeds[asked] = measure(config, at)["tokens_per_second"]
    differing = [a["step"] for a, b in zip(whole, parted, strict=False) if a != b]
    return {
        "equal": whole == parted,
        "steps": f"{len(stopped)} and then {len(parted) - len(stopped)}, of {len(whole)}",
        "first_difference": differing[0] if differing else None,
        "tokens_per_second": speeds[False],
        "deterministic_tokens_per_second": speeds[True],
        "price_percent": 100 * (speeds[False] / speeds[True] - 1),
    }


NARROW: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "tensorwise": {"precision": "fp8"},
    "rowwise": {"precision": "fp8", "fp8_scaling": "rowwise"},
}


def narrow(device: str, directory: Path, *, size: str, micro: int, steps: int) -> dict[str, Any]:
    """Layers that multiply in 8 bits beside bf16, with moments in 8 bits and compiled blocks. One rank gathers nothing:
    what 8 bits spare on the way is not in it."""
    if not installed("torchao"):
        raise NotHereError("torchao is not installed")
    at = _join(device)
    _check_room(at, size, 10)
    rows = []
    for way, parallel in NARROW.items():
        _start_afresh(at)
        config = make_config(
            directory, size, micro=micro, steps=steps, compiled=True, recompute="selective", run={"name": way},
            optim={"optimizer": {"type": "adamw", "moments": "8bit"}},
        )  # fmt: skip
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
        found = measure(config, at)
        first, last = found["losses"]
        rows.append({"way": way, **found, **_in_units(found), "first_loss": first, "last_loss": last})
    for row in rows:
        row["times"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return {"rows": rows, "tensorwise_times": rows[1]["times"]}


def _train(config: FinetuneConfig, device: torch.device, stop_after: int | None) -> None:
    prepared, standing = prepare_on_rank0(config)
    numbers = itertools.count(standing.state.step + 1)

    def stop() -> StopReason | None:
        return StopReason.SIGNAL if next(numbers) == stop_after else None

    with suppress(Interrupted):
        work(config, prepared, standing, device, stop)


def _start_afresh(device: torch.device) -> None:
    """Without the graphs and the memory of the run before."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def trl(device: str, directory: Path, *, size: str, micro: int, steps: int) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults, but without checkpointing of activations, on rows of full length."""
    if not installed("trl"):
        raise NotHereError("trl is not installed")
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    at = choose_device(device, 1)
    vocabulary, seq_len = SIZES[size]["vocab_size"], SIZES[size]["seq_len"]
    marks: list[float] = []

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARMUP_STEPS, WARMUP_STEPS + steps):
                synchronize(at)
                marks.append(time.perf_counter())

    rows = torch.randint(3, vocabulary, (micro * (WARMUP_STEPS + steps), seq_len)).tolist()
    config = SFTConfig(
        output_dir=str(directory), max_length=seq_len, per_device_train_batch_size=micro,
        max_steps=WARMUP_STEPS + steps, bf16=True, gradient_checkpointing=False, save_strategy="no", report_to="none",
        use_cpu=at.type == "cpu", disable_tqdm=True,
    )  # fmt: skip
    SFTTrainer(
        model=_llama(size, at), args=config, train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER), callbacks=[Marks()],
    ).train()  # fmt: skip
    return _rate(at, (marks[1] - marks[0]) / steps, micro * seq_len)


def _join(device: str) -> torch.device:
    at = choose_device(device, 1)
    if at.type == "cpu":  # a minute of C++ compiler for a model that is trained for a second
        torch.compile = partial(torch.compile, backend="eager")
    join(at, alone=True)
    return at


def _llama(size: str, device: torch.device | str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**architecture_of(size), attn_implementation="sdpa"))


def _check_room(device: torch.device, size: str, bytes_each: float) -> None:
    if device.type != "cuda":
        return
    states = bytes_each * sum(weight.numel() for weight in _llama(size, "meta").parameters())
    room = torch.cuda.get_device_properties(device).total_memory
    if states > room:
        raise NotHereError(
            f"weights with gradients and moments take {states / 2**30:.0f} GiB, and the device has {room / 2**30:.0f}"
        )
