"""Record chosen steps with torch's profiler: a trace for a viewer, and a table for a terminal."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

_ROWS = 15
"""Rows of the table."""

Interval = tuple[str, float, float]
"""A kernel: its name, when it began, when it ended."""


@dataclass(slots=True)
class StepProfiler:
    """Records the steps of an attempt that the config names, on this rank."""

    steps: Collection[int]
    directory: Path
    device: torch.device
    rank: int
    _written: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Record the step that is trained in this context, if it is one of `steps`."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        with profile(activities=activities) as record:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        try:
            self._written.append(self._write(record, step))
        except OSError as error:  # a full disk must not stop training
            logger.warning("the profile of step %d could not be written: %s", step, error)

    def news(self) -> list[dict[str, Any]]:
        """Return what was recorded since the last call: step, path of the table, and shares of the step in percent."""
        news, self._written = self._written, []
        return news

    def _write(self, record: profile, step: int) -> dict[str, Any]:
        self.directory.mkdir(parents=True, exist_ok=True)
        place = self.directory / f"step-{step}-rank-{self.rank}"
        record.export_chrome_trace(f"{place}.json.gz")
        shares = shares_of(
            (event.name, event.time_range.start, event.time_range.end)
            for event in record.events() or ()  # type: ignore[no-untyped-call]
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )
        by = "self_device_time_total" if shares else "self_cpu_time_total"
        table = record.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=80)
        words = "".join(f"{name.replace('_', ' ')}: {share:.1f} % of the step\n" for name, share in shares.items())
        Path(f"{place}.txt").write_text(f"step {step}, rank {self.rank}\n{words}{table}\n", encoding="utf-8")
        return {"step": step, "path": f"{place}.txt", **shares}


def shares_of(kernels: Iterable[Interval]) -> dict[str, float]:
    """Return the shares of time, in percent, in which no kernel runs, and in which only communication does.

    The time counts from the first kernel to the last. Empty without kernels.
    """
    found = sorted(kernels, key=lambda kernel: kernel[1])
    if not found:
        return {}
    span = max(end for _, _, end in found) - found[0][1]
    everything = _covered(found)
    computing = _covered([kernel for kernel in found if not kernel[0].startswith("nccl")])
    return {
        "idle": 100 * (1 - everything / span) if span else 0.0,
        "exposed_communication": 100 * (everything - computing) / span if span else 0.0,
    }


def _covered(kernels: Iterable[Interval]) -> float:
    """Return how long at least one of these kernels runs. They come in the order of their beginnings."""
    covered, until = 0.0, float("-inf")
    for _, start, end in kernels:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
