"""What a device reaches at best: products, copies, and the clocks at which it does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernels import synchronize
from benchmarks.gpu.process import Keep
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch.worker import choose_device
from raytune_fsdp.predict.devices import Device, find_device

_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
_SECONDS = 0.5
"""Of each measurement, after a warm-up."""
_LOOK_SECONDS = 10.0
"""How long nvidia-smi may take."""


def ceilings(
    device: str, directory: Path, keep: Keep, *, side: int, sides: tuple[int, int, int], megabytes: int
) -> Any:
    """Products of `side` cubed and of `sides` (tokens, inputs, outputs of a layer), and copies of so many bytes."""
    at = choose_device(device, 1)
    sheet = _sheet(at)
    found: dict[str, Any] = {"rows": []}
    for what, unit, work, run in _ways(at, side, sides, megabytes * 10**6):
        rate = work / _seconds(run, at) / 1e9
        row: dict[str, Any] = {"what": what, "rate": rate / 1e3 if unit == "TFLOP/s" else rate, "unit": unit}
        best = None
        if sheet is not None and "host" not in what:
            best = sheet.bandwidth / 1e9 if unit == "GB/s" else sheet.peak / 1e12 * (2 if "fp8" in what else 1)
        found["rows"].append({**row, "sheet": best, "percent": best and 100 * row["rate"] / best})
        keep(found)
    return {**found, "clocks": _clocks(at, side)}


def _sheet(device: torch.device) -> Device | None:
    if device.type != "cuda":
        return None
    with suppress(ConfigError):
        return find_device(torch.cuda.get_device_name(device))
    return None


def _ways(
    device: torch.device, side: int, sides: tuple[int, int, int], nbytes: int
) -> Iterator[tuple[str, str, float, Callable[[], Any]]]:
    """Yield what is done, the unit of its rate, the work of one call, and the call."""
    for many, inputs, outputs in ((side, side, side), sides):
        left = torch.randn(many, inputs, device=device).bfloat16()
        right = torch.randn(outputs, inputs, device=device).bfloat16()
        work, named = 2.0 * many * inputs * outputs, f"{many} x {inputs} x {outputs}"
        yield f"bf16 product {named}", "TFLOP/s", work, partial(torch.nn.functional.linear, left, right)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
            narrow, other = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=device)
            product = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
            yield f"fp8 product {named}", "TFLOP/s", work, partial(product, narrow, other, one, one)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield "copy on the device, read and written", "GB/s", 2.0 * nbytes, lambda: target.copy_(source)
    if device.type == "cuda":
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        yield "to the host's pinned memory", "GB/s", float(nbytes), lambda: host.copy_(source, non_blocking=True)
        yield "from the host's pinned memory", "GB/s", float(nbytes), lambda: target.copy_(host, non_blocking=True)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, queued behind others."""
    for _ in range(3):
        run()
    synchronize(device)
    since, calls = time.perf_counter(), 0
    while True:
        for _ in range(4):
            run()
        calls += 4
        synchronize(device)
        if (passed := time.perf_counter() - since) > _SECONDS:
            return passed / calls


def _clocks(device: torch.device, side: int) -> str | None:
    """Return what the driver says while products run; None: there is no driver."""
    if device.type != "cuda":
        return None
    left = torch.randn(side, side, device=device).bfloat16()
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader", "-i", "0"]
    with suppress(OSError):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:
            until = time.monotonic() + _LOOK_SECONDS
            while smi.poll() is None and time.monotonic() < until:  # it takes longer to start than the GPU for hundreds
                for _ in range(20):
                    left @ left
                synchronize(device)
            smi.kill()
            said = smi.communicate()[0].strip()
        if smi.returncode == 0:
            return ", ".join(f"{name} {value.strip()}" for name, value in zip(_CLOCKS, said.split(","), strict=True))
    return None
