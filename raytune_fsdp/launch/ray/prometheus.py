"""The newest step as gauges among Ray's metrics, which every node offers to Prometheus.

Ray takes a value into the memory of this process and sends it from a thread of its own, so nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util.metrics import Gauge

from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.record.lines import step_lines
from raytune_fsdp.record.names import labelled, node_values, step_values, with_perplexity
from raytune_fsdp.record.tracker import Tracker

_LABELS = ("run", "of")


class PrometheusTracker(Tracker):
    """`ray_raytune_fsdp_train_loss{run="first", of=""}` for Prometheus; `of` is the name of a dataset or node."""

    def __init__(self, run: str, gauge: Callable[..., Any] = Gauge) -> None:
        self._run = run
        self._gauge = gauge
        self._gauges: dict[str, Any] = {}

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        for line in step_lines(metrics[-1:], world_size, attempt):
            self._set({"train/step": float(metrics[-1].step), **step_values(line), **node_values(line)})

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._set(with_perplexity(values))

    def _set(self, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            name, of = labelled(key)
            if name not in self._gauges:
                self._gauges[name] = self._gauge(f"raytune_fsdp_{name}", description=key, tag_keys=_LABELS)
            self._gauges[name].set(value, {"run": self._run, "of": of})
