"""Turn tensors that steps leave on the device into metrics; the host waits only for those it asks for."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from raytune_fsdp.base.batch import Cursor, StepBatches
from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.checkpoint.catalogue import ways_out_of_divergence
from raytune_fsdp.config.sections.objectives import ObjectiveChoice, SftObjective
from raytune_fsdp.model.objective.figures import group_values, kinds_of, right_of, taught_values
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.plan.step_counts import StepCounts, digest_of
from raytune_fsdp.run.measure.against_prediction import Forecast
from raytune_fsdp.run.measure.nodes import NodeFigures, known
from raytune_fsdp.step.flops import Architecture, mfu, peak_flops, training_flops
from raytune_fsdp.step.own_time import OwnTime, SlowRanks, typical
from raytune_fsdp.step.train_step import StepTensors


class _Arrival(Protocol):
    """An event that tells the host that a copy has arrived, as a CUDA event does."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    step: int
    lr: float
    data_seconds: float
    tensors: StepTensors
    """On the host, or on the way to it."""
    arrival: _Arrival | None
    """The event to wait for. None: the tensors are on the host."""


class Meter:
    """Collects steps, and turns them into metrics when they are fetched."""

    def __init__(
        self,
        plan: Plan,
        architecture: Architecture,
        device: torch.device,
        *,
        windows: Callable[[int], int],
        cursor: Cursor,
        datasets: Sequence[str],
        max_skipped: int,
        checkpoints: str,
        forecast: Forecast,
        skipped_in_row: int = 0,
        objective: ObjectiveChoice | None = None,
        experts: tuple[int, int] = (0, 0),
        own: OwnTime | None = None,
    ) -> None:
        self._plan = plan
        self._architecture = architecture
        self._device = device
        self._windows = windows
        self._datasets = datasets
        self.cursor = cursor
        """The sample after the last fetched step: a run that stops there continues from it."""
        self._max_skipped = max_skipped
        self._checkpoints = checkpoints
        self._objective = objective or SftObjective()
        self._experts = experts
        """The number of layers whose experts are watched, and of the experts of each."""
        self.skipped_in_row = skipped_in_row
        """Updates that were skipped in a row, up to the last fetched step."""
        self._diverged: TrainingError | None = None
        self._peak = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
        # A GPU computes one step while the host queues the next. The metrics of the latest step would make the host
        # wait until it has nothing left to do.
        self._late = 1 if device.type == "cuda" else 0
        self._pending: list[_Pending] = []
        self._own = own
        """None: this rank is alone."""
        self.forecast = forecast
        self._figures = NodeFigures(device, plan.layout.world)
        self._slow_ranks = SlowRanks(plan.layout.world, device)
        self._slow: list[dict[str, Any]] = []
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """Keep what was not a step (an evaluation, a checkpoint) out of the step time."""
        self._since = time.perf_counter()

    def add(self, batches: StepBatches, tensors: StepTensors, *, lr: float, data_seconds: float) -> None:
        tensors, arrival = to_host(tensors)
        if self._own is not None:
            self._own.end_step(len(batches.micro_batches))
        self._pending.append(
            _Pending(step=batches.step, lr=lr, data_seconds=data_seconds, tensors=tensors, arrival=arrival)
        )

    def fetch(self, *, last: bool = True) -> list[StepMetrics]:
        """Return the metrics of all steps since the last fetch, each with the mean step time. Wait until they are
        computed.

        Without `last`, the step that a GPU may still be computing is left for the next fetch, and not waited for.
        """
        ready = self._pending if last else self._pending[: len(self._pending) - self._late]
        if not ready:
            return []
        for pending in ready:
            if pending.arrival is not None:
                pending.arrival.synchronize()
        now = time.perf_counter()
        seconds = (now - self._since) / len(ready)
        machines = self._machines(seconds, [pending.data_seconds for pending in ready])
        nodes = machines.pop("nodes")
        rows = [
            self._metrics(pending, pending.tensors.counts.tolist(), pending.tensors.values.tolist(), seconds, machines)
            for pending in ready
        ]
        rows[-1] = replace(rows[-1], nodes=nodes)
        for row in rows:
            self.skipped_in_row = self.skipped_in_row + 1 if row.skipped else 0
            if self.skipped_in_row >= self._max_skipped:
                self._diverged = self._diverged or self._too_many(row)
        self._pending = self._pending[len(ready) :]
        self._since = now
        return self.forecast.compared(rows)

    def check(self) -> None:
        """Stop the run if `optim.max_skipped` updates in a row were skipped in the steps that were fetched."""
        if self._diverged is not None:
            raise self._diverged

    def _too_many(self, row: StepMetrics) -> TrainingError:
        return TrainingError(
            f"step {row.step}: loss {row.loss} or gradient norm {row.grad_norm} has not been finite for "
            f"{self.skipped_in_row} steps in a row (optim.max_skipped={self._max_skipped}); "
            f"{ways_out_of_divergence(self._checkpoints, row.step - self.skipped_in_row)}"
        )

    def slow(self) -> list[dict[str, Any]]:
        """Return the ranks that the others have begun to wait for since the last call."""
        found, self._slow = self._slow, []
        return found

    def _machines(self, seconds: float, data_seconds: Sequence[float]) -> dict[str, Any]:
        """Return what the ranks' machines report about themselves. Collective."""
        seen = self._figures.mine()
        memory = self._memory()  # once: this rank's figure must not exceed the largest of all ranks
        if self._own is None:
            used, busy = seen[:2]
            nodes = self._figures.of_nodes(np.array([seen]))
            return {
                "memory_bytes": memory, "host_memory_bytes": int(used), "gpu_utilization": known(busy), "nodes": nodes,
                "reserved_bytes": self._reserved() or None,
            }  # fmt: skip
        steps = len(data_seconds)
        own = np.column_stack([data_seconds, self._own.fetch(steps)])
        mine = [seconds, *seen, *own.mean(0)[:2], memory, self._reserved(), *typical(own)]
        everyone = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self._plan.layout.world)]
        # Over the hosts, which meet here once for every fetch.
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64))
        found = torch.stack(everyone).numpy()
        each_step, host, utilization, _, _, _, waits, computed, allocated, reserved = found.T[:10]
        slow = self._slow_ranks.judge(found[:, 10:], steps=steps, step_seconds=seconds)
        self._slow += [{**fields, "node": self._figures.nodes[fields["rank"]]} for fields in slow]
        return {
            "memory_bytes": memory,
            "rank_seconds": _spread(each_step),
            "rank_data_seconds": _spread(waits),
            "rank_compute_seconds": _spread(computed),
            "rank_memory_bytes": tuple(map(int, _spread(allocated))),
            "reserved_bytes": int(reserved.max()) or None,
            "host_memory_bytes": int(host.max()),
            "gpu_utilization": known(utilization.min()),
            "nodes": self._figures.of_nodes(found[:, 1:6]),
        }

    def _metrics(
        self, pending: _Pending, packed: list[int], values: list[float], seconds: float, machines: Mapping[str, Any]
    ) -> StepMetrics:
        many = len(self._datasets)
        counts = StepCounts.unpack(packed, pending.step, self._plan.division, many)
        self.cursor = counts.cursor
        loss, norm, skipped, *rest = values
        kinds = 2 + len(taught_values(self._objective))
        if self._objective.rows is not None:
            kinds = len(kinds_of(self._objective))
        load = np.array(rest[kinds * many :]).reshape(self._experts)
        sums = np.array(rest[: kinds * many]).reshape(kinds, many)
        flops = training_flops(
            self._architecture,
            tokens=counts.tokens, targets=counts.target_tokens, attended_pairs=counts.attended_pairs,
        )  # fmt: skip
        world, per_epoch = self._plan.layout.world, self._plan.samples_per_epoch
        if per_epoch:
            epoch = self._plan.division.samples_before(pending.step + 1) / per_epoch
        else:
            epoch = self.cursor.epoch + self.cursor.window / max(1, self._windows(self.cursor.epoch))
        return StepMetrics(
            step=pending.step,
            epoch=epoch,
            samples=digest_of(counts.sample_ids),
            tokens=counts.tokens,
            target_tokens=counts.target_tokens,
            loss=loss,
            grad_norm=norm,
            lr=pending.lr,
            skipped=bool(skipped),
            step_seconds=seconds,
            data_seconds=pending.data_seconds,
            tokens_per_second=counts.tokens / seconds,
            mfu=mfu(flops, seconds=seconds, devices=world, peak_flops=self._peak) if self._peak else None,
            **(self._of_tokens(sums, counts) if self._objective.rows is None else self._of_groups(sums)),
            windows_built=counts.windows_built,
            # For each layer with experts; a step without a token has none.
            expert_load=tuple((load.max(1) / np.maximum(load.mean(1), 1e-9)).tolist()) if load.size else (),
            experts_idle=int((load == 0).sum()) if load.size else None,
            **machines,
        )

    def _of_tokens(self, sums: np.ndarray[Any, Any], counts: StepCounts) -> dict[str, Any]:
        each = zip(self._datasets, *sums[:2].tolist(), counts.by_dataset, strict=True)
        datasets = tuple((name, total / many, hits / many, many) for name, total, hits, many in each if many)
        right, several = sum(sums[1].tolist()), len(self._datasets) > 1
        found = list[tuple[str, float]]()
        for key, own in zip(taught_values(self._objective), sums[2:].tolist(), strict=True):
            found += [(key, sum(own) / counts.target_tokens)] if counts.target_tokens else []
            by_dataset = zip(self._datasets, own, counts.by_dataset, strict=True)
            found += [(f"{name}/{key}", total / many) for name, total, many in by_dataset if several and many]
        return {
            "accuracy": right / counts.target_tokens if counts.target_tokens else None,
            "datasets": datasets if several else (), "preferences": tuple(found),
        }  # fmt: skip

    def _of_groups(self, sums: np.ndarray[Any, Any]) -> dict[str, Any]:
        whole = group_values(sums.sum(1).tolist(), self._objective)
        each = {
            name: group_values(own, self._objective) for name, own in zip(self._datasets, sums.T.tolist(), strict=True)
        }
        several = len(self._datasets) > 1
        found = [(key, value) for key, value in whole.items() if key != "loss"]
        found += [
            (f"{name}/{key}", own[key]) for name, own in each.items() for key, _ in found if key in own and several
        ]
        datasets = tuple(
            (name, own["loss"], right_of(own), int(groups))
            for (name, own), groups in zip(each.items(), sums[kinds_of(self._objective).index("groups")], strict=True)
            if own
        )
        return {"datasets": datasets if several else (), "preferences": tuple(found)}

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    def _reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0


def to_host(tensors: StepTensors) -> tuple[StepTensors, _Arrival | None]:
    """Copy the tensors of a step to the host; return them and the event to wait for (None on CPU)."""
    if not tensors.values.is_cuda:
        return tensors, None
    # Queued behind this step alone. A copy that is requested together with the metrics would come behind all steps that
    # were queued by then, and the host would wait for each of them.
    counts, values = (
        torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
        for each in (tensors.counts, tensors.values)
    )
    return StepTensors(counts=counts, values=values), torch.cuda.current_stream(tensors.values.device).record_event()


def _spread(values: Any) -> tuple[float, float, float]:
    return float(values.min()), float(np.median(values)), float(values.max())
