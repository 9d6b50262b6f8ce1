"""Pieces of evidence that train: through the real path, in a bare PyTorch loop, and with TRL."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.kernels import synchronize
from benchmarks.gpu.made_up import drawn_on, write_base
from benchmarks.gpu.process import Keep
from benchmarks.gpu.train_step import (
    SIZES,
    WARMUP_STEPS,
    architecture_of,
    make_config,
    measure,
    run_steps,
)
from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import choose_device, join, work
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from raytune_fsdp.record.names import DIGESTED
from tests.runs import prepare_on_rank0

_MOST_AT_ONCE = 2**30
"""Bytes of a plain copy to the host: pinned memory of all of them would take a while to get."""

_FEW_LAYERS = 4
"""Of the model whose trajectories are compared: the same kernels as in all of its layers, and smaller checkpoints."""

_COMPARED_STEPS = 8


def config_of(
    directory: Path,
    *,
    size: str,
    micro: int,
    steps: int,
    compiled: bool,
    recompute: str = "none",
    seq_len: int | None = None,
    method: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
) -> FinetuneConfig:
    """The run of a piece. `method`: adapters; `precision`: fields of `parallel` that say it."""
    sections: dict[str, Mapping[str, Any]] = {"method": method} if method else {}
    if optimizer is not None:
        sections["optim"] = {"optimizer": optimizer}
    config = make_config(
        directory, size, micro=micro, steps=steps, compiled=compiled, recompute=recompute, seq_len=seq_len, **sections
    )  # fmt: skip
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=dict(precision or {}))})


def speed(
    device: str, directory: Path, keep: Keep, *, asked: Mapping[str, Any], profiled: bool = False
) -> dict[str, Any]:
    """Steps through the real path. `asked`: see `config_of`."""
    at = _join(device)
    config = config_of(directory, **asked)
    if asked.get("method"):
        base = write_base(directory / "base", architecture_of(asked["size"]))
        config = config.model_copy(update={"model": config.model.model_copy(update=base)})
    with drawn_on(at):
        found = measure(config, at, lambda part: keep(_in_units(part)), profiled=profiled)
    return _in_units(found)


def _in_units(found: Mapping[str, Any]) -> dict[str, Any]:
    """With what a table has."""
    percent = {name: found.get(name) and 100 * found[name] for name in ("mfu", "mfu_6n")}
    first, last = found["losses"]
    return {
        **found,
        **{f"{name}_percent": value for name, value in percent.items()},
        "memory_gib": found["memory_bytes"] / 2**30,
        "first_loss": first,
        "last_loss": last,
    }


def bare(device: str, directory: Path, keep: Keep, *, size: str, micro: int, steps: int) -> dict[str, Any]:
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


def stall(device: str, directory: Path, keep: Keep, *, size: str, micro: int, every: int) -> dict[str, Any]:
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
        keep({"first_call_seconds": next(iter(calls.values()))})

    def enough(step: int) -> bool:
        synchronize(at)
        starts.append(time.perf_counter())
        return len(calls) == 2 and step > max(calls) + 2

    with drawn_on(at), mock.patch.object(Saver, "begin", timed):
        parts = run_steps(config, at, enough)
    size_of_all = parts.saves.saver.nbytes_staged()
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


def deterministic(
    device: str, directory: Path, keep: Keep, *, size: str, micro: int, steps: int, compiled: bool
) -> dict[str, Any]:
    """Whether two runs with `run.exact` are equal to the bit, what that costs (`deterministic` is part of it), and
    whether a run that was stopped and continued, and so met other documents first, equals one that was not."""
    at = _join(device)
    layers = min(_FEW_LAYERS, SIZES[size]["num_hidden_layers"])

    def config(name: str) -> FinetuneConfig:
        run = {"name": name, "exact": True, "digest_every": _COMPARED_STEPS}
        return make_config(
            directory, size, micro=micro, steps=0, compiled=compiled, run=run,
            model={"architecture": {**architecture_of(size), "num_hidden_layers": layers}},
            train={"max_steps": _COMPARED_STEPS + 1},
        )  # fmt: skip

    def trained(name: str, first: int = 1, last: int = _COMPARED_STEPS) -> tuple[list[dict[str, Any]], dict[int, str]]:
        _start_afresh(at)
        if last < _COMPARED_STEPS:
            _train_and_stop(config(name), at, last)
        else:  # without the checkpoint of a run that ends
            run_steps(config(name), at, lambda number: first - 1 + number > last)
        place = RunDir.of(config(name))
        events = [each["fields"] for each in read_events(place.events) if each["event"] == DIGESTED]
        return read_trajectory(place.metrics), {each["step"]: each["everything"] for each in events}

    with drawn_on(at):
        whole, digests = trained("whole")
        again, digests_again = trained("again")
        differing = [a["step"] for a, b in zip(whole, again, strict=False) if a != b]
        found: dict[str, Any] = {
            "again_equal": (whole, digests) == (again, digests_again),
            "first_difference": differing[0] if differing else None,
            "digest": digests[_COMPARED_STEPS],
        }
        keep(found)
        speeds = {}
        for asked in (False, True):
            _start_afresh(at)
            run = {"name": f"price-{asked}", "exact": asked}
            price = make_config(directory, size, micro=micro, steps=steps, compiled=compiled, run=run)
            speeds[asked] = measure(price, at)["tokens_per_second"]
        found |= {
            "tokens_per_second": speeds[False],
            "deterministic_tokens_per_second": speeds[True],
            "price_percent": 100 * (speeds[False] / speeds[True] - 1),
        }
        keep(found)
        stopped, _ = trained("parted", last=_COMPARED_STEPS // 2)
        parted, digests_parted = trained("parted", first=len(stopped) + 1)
    steps_of = f"{len(stopped)} and then {len(parted) - len(stopped)}, of {len(whole)}"
    return {**found, "equal": (whole, digests) == (parted, digests_parted), "steps": steps_of}


def _train_and_stop(config: FinetuneConfig, device: torch.device, last: int) -> None:
    prepared, standing = prepare_on_rank0(config)
    numbers = itertools.count(1)

    def stop() -> StopReason | None:
        return StopReason.SIGNAL if next(numbers) == last else None

    with suppress(Interrupted):
        work(config, prepared, standing, device, stop)


def _start_afresh(device: torch.device) -> None:
    """Without the graphs and the memory of the run before."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def trl(device: str, directory: Path, keep: Keep, *, size: str, micro: int, steps: int) -> dict[str, Any]:
    """TRL's SFTTrainer with its defaults, but without checkpointing of activations, on rows of full length."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    at = choose_device(device, 1)
    vocabulary, seq_len = SIZES[size]["vocab_size"], SIZES[size]["seq_len"]
    marks: list[float] = []

    class Marks(TrainerCallback):
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
