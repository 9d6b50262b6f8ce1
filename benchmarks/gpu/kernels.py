"""What a GPU does in a few steady steps, kernel by kernel."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from raytune_fsdp.step.profiling import shares_of

PROFILED_STEPS = 3
_KEPT = 60
"""Kernels in the JSON, the longest first; the page shows fewer."""


class StepKernels:
    """Records steps that follow one another as in a run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Only one of the two: to note what the host does slows it down, and the GPU would seem idle.
        self._record = profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])

    def start(self) -> None:
        synchronize(self._device)
        self._record.start()

    def stop(self) -> dict[str, Any]:
        """Return what was done since `start`."""
        synchronize(self._device)
        self._record.stop()
        if self._device.type != "cuda":
            events = self._record.key_averages()
            operations = {event.key: event.self_cpu_time_total for event in events}
            return {"rows": _rows(operations, Counter({event.key: event.count for event in events}))}
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "trace.json"
            self._record.export_chrome_trace(str(file))
            return of_trace(json.loads(file.read_text())["traceEvents"])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        "rows": _rows(spent, Counter(name for name, _, _ in kernels)),
        "kernels_of_a_step": len(kernels) / PROFILED_STEPS,
        "idle_percent": shares_of(kernels)["idle"],
        "gpu_ms_of_a_step": span / 1e3 / PROFILED_STEPS,
    }


def _rows(microseconds: Mapping[str, float], times: Mapping[str, int]) -> list[dict[str, Any]]:
    total = sum(microseconds.values())
    longest = sorted(microseconds.items(), key=lambda each: each[1], reverse=True)[:_KEPT]
    return [
        {
            "name": name[:160],
            "ms_of_a_step": value / 1e3 / PROFILED_STEPS,
            "times_in_a_step": times[name] / PROFILED_STEPS,
            "percent": 100 * value / total,
        }
        for name, value in longest
    ]
