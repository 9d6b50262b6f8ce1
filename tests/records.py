"""Run directories as long runs leave them, made in a second: nothing is trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import recorded_text
from raytune_fsdp.plan.counts import Census, DatasetCount
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.record.lines import to_bytes
from raytune_fsdp.record.report.history import data_of

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script><img src=http://evil/x onerror=alert(2)>\"'&"
"""In the place of every text that a stranger may write."""
_LINE = (
    '{"kind": "step", "trajectory": {"step": %d, "epoch": %r, "samples": "%016x", "tokens": 8000, "target_tokens": '
    '6000, "loss": %s, "grad_norm": 1.5, "lr": %r}, "world_size": %d, "attempt": %d, "time": "%s", "accuracy": 0.5, '
    '"datasets": [[%s, %s, 0.5, 4000], ["code", %s, 0.5, 2000]], "step_seconds": 0.5, "data_seconds": 0.01, '
    '"tokens_per_second": 16000.0, "mfu": 0.41, "memory_bytes": 3000000000, "rank_seconds": [0.48, 0.5, 0.53], '
    '"rank_data_seconds": [0.001, 0.01, 0.02], "rank_compute_seconds": [0.4, 0.41, 0.47], "host_memory_bytes": '
    '9000000000, "gpu_utilization": 97.0, "windows_built": 0, "skipped": %s, "expert_load": [], "experts_idle": '
    "null}\n"
)


def make_config(**sections: Mapping[str, Any]) -> FinetuneConfig:
    values: dict[str, Any] = {
        "run": {"name": "long"},
        "model": {"path": "some/model"},
        "data": {"train": [{"path": "a.jsonl", "name": "chat"}, {"path": "b.jsonl", "name": "code"}], "seq_len": 1024},
        "eval": {"prompts": [HOSTILE]},
        "train": {"global_batch": 8, "max_steps": 100_000},
        "optim": {"lr": 1e-4, "warmup_steps": 10},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return FinetuneConfig.model_validate(values)


def write_run(
    directory: Path,
    steps: int,
    *,
    config: FinetuneConfig | None = None,
    loss: Callable[[int], float] | None = None,
    lr: Callable[[int], float] = lambda step: 1e-4,
    samples: Callable[[int], int] = lambda step: step,
    census: bool = True,
    world: int = 4,
) -> Path:
    """A run of several attempts, with events of every kind; `loss` of a step, else a falling one with noise."""
    config = config or make_config()
    draw = random.Random(0)
    loss = loss or (lambda step: 1.5 + 6 / (1 + step / 3000) + draw.gauss(0, 0.1))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(recorded_text(config))
    (directory / "plan.json").write_text(json.dumps(resolve(config, 1).to_dict()))
    (directory / "model").mkdir()
    (directory / "model" / "recipe.json").write_text('{"version": "0.2.0"}')
    if census:
        lengths = {bucket: 1000 - 20 * bucket for bucket in range(20, 44)}
        count = DatasetCount(rows=900, documents=880, tokens=900_000, target_tokens=600_000, dropped={"empty": 20})
        count.lengths = lengths
        counted = Census(seq_len=1024, epochs=(900,), windows=3, names=(HOSTILE, "code"), datasets=(count, count))
        (directory / "data.json").write_text(data_of(counted))
    with open(directory / "metrics.jsonl", "wb") as file:
        for step in range(1, steps + 1):
            value = _json(loss(step))
            time = (BEGAN + timedelta(seconds=step / 2)).isoformat(timespec="milliseconds")
            attempt, skipped = 1 + (step > steps // 3), "true" if value.startswith('"') else "false"
            name = json.dumps(HOSTILE)
            file.write(
                (
                    _LINE
                    % (
                        step, step / 1000, samples(step), value, lr(step), world, attempt, time, name, value, value,
                        skipped,
                    )
                ).encode()
            )  # fmt: skip
            if step % max(1, steps // 50) == 0:
                values = {
                    f"eval/{HOSTILE}/loss": 2 + 6 / (1 + step / 3000),
                    "eval/code/loss": 2.5,
                    "eval/code/accuracy": 0.5,
                }
                file.write(to_bytes({"kind": "eval", "step": step, "values": values, "attempt": attempt, "time": time}))
    (directory / "events.jsonl").write_bytes(b"".join(map(to_bytes, _events(steps))))
    return directory


def _json(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"'


def _events(steps: int) -> list[dict[str, Any]]:
    third = steps // 3
    found: list[tuple[int, int, str, dict[str, Any]]] = [
        (0, 1, "attempt_started", {"world_size": 4, "resumed_from": 0}),
        (0, 1, "rows_dropped", {"empty": 20, "truncated": 0, "cut": 0, "rows": 900}),
        (third, 1, "attempt_failed", {"rank": 1, "node": HOSTILE, "cause": HOSTILE, "last_step": third}),
        (third, 2, "attempt_started", {"world_size": 3, "resumed_from": third}),
        (third, 2, "resized", {"before": 4, "after": 3, "cause": HOSTILE}),
        (third + 9, 2, "slow_rank", {"step": third + 9, "rank": 2, "node": HOSTILE, "seconds": 2.0, "others": 1.0}),
        (third + 10, 2, "save_failed", {"step": third + 10, "problem": HOSTILE}),
        (third + 11, 2, "settings_changed", {"tracking.console": [True, HOSTILE]}),
        (third + 12, 2, "something_new", {"what": HOSTILE}),
    ]
    for step in range(0, steps + 1, max(1, steps // 500)):
        found.append((step, 1, "saved", {"step": step, "seconds": 1.0, "bytes": 10**9, "path": "x"}))
    for step in range(0, steps + 1, max(1, steps // 20)):
        for prompt in ("What is it?", HOSTILE):
            found.append((step, 1, "answered", {"step": step, "prompt": prompt, "answer": f"{HOSTILE} at {step}"}))
    return [
        {
            "time": (BEGAN + timedelta(seconds=step / 2)).isoformat(timespec="milliseconds"),
            "attempt": attempt,
            "event": name,
            "fields": fields,
        }
        for step, attempt, name, fields in sorted(found, key=lambda each: each[0])
    ]
