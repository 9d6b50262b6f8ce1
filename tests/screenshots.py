"""Pictures of the pages that people see: a report, a comparison, the runs of a storage, a sweep, the planner, and
MLflow.

    python -m tests.screenshots                        # all of them, into docs/images
    python -m tests.screenshots --out DIR report runs  # some of them, to look at

The runs are made up: records as a training on eight GPUs could leave them, of which one was resized, failed once and
was audited. Needs Chromium; what is looked at without eyes is in tests/unit/test_report_looks.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from raytune_fsdp.config.load import recorded_text
from raytune_fsdp.plan.counts import Census, DatasetCount
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.record import names
from raytune_fsdp.record.lines import to_bytes
from raytune_fsdp.record.report.history import data_of
from raytune_fsdp.tune.log import Decision, Entry, SweepBegun, Trial, TrialEnded, Value, line_of
from tests.browser import CHROMIUM, Browser
from tests.mlflow_server import Server
from tests.records import BEGAN, make_config

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = ("report", "comparison", "runs", "sweep", "planner", "mlflow")
WIDTHS = (1400, 390)
MOST = {1400: 1500, 390: 1800}
"""Pixels of height that are kept."""
MOST_OF_SWEEP = 900
"""Of the page with a sweep: below it are the rows of its trials."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="*", metavar="PAGE", help=f"{', '.join(PAGES)} (default: all)")
    parser.add_argument("--out", type=Path, default=IMAGES)
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    assert CHROMIUM, "no Chromium is on PATH"
    with tempfile.TemporaryDirectory() as scratch:
        storage = Path(scratch, "runs")
        make_runs(storage)
        for page in found.page or PAGES:
            with (
                address(page, storage, Path(scratch)) as (url, ready),
                Browser(Path(scratch, f"with-{page}")) as browser,
            ):
                for width in WIDTHS[:1] if page == "mlflow" else WIDTHS:  # its page hides the curves on a phone
                    for scheme in ("light", "dark"):
                        browser.open(url, width=width, scheme=scheme)
                        browser.wait(ready, 300)
                        time.sleep(5 if page == "mlflow" else 0.5)  # it draws on after its text is there
                        picture = found.out / f"{page}-{width}-{scheme}.png"
                        browser.picture(picture, most=MOST_OF_SWEEP if page == "sweep" else MOST[width])
                        make_small(picture)
                        print(picture, flush=True)


@contextmanager
def address(page: str, storage: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """Give the address of a page, and what is true in it once it shows everything."""
    runs, out = ["runs/first", "runs/second"], scratch / f"{page}.html"
    words = {"report": ["report", runs[0]], "comparison": ["report", *runs], "runs": ["runs", "--html"],
             "sweep": ["runs", "sweep", "--html"]}  # fmt: skip
    if page == "sweep":
        make_sweep(scratch / "sweep")
    if page in words:
        command = [sys.executable, "-m", "raytune_fsdp.cli.main", *words[page], "--out", str(out)]
        subprocess.run(command, check=True, cwd=scratch, env={**os.environ, "PYTHONPATH": str(ROOT)})
        yield out.as_uri(), "document.documentElement.className === 'js'"
    elif page == "planner":
        yield (ROOT / "docs" / "planner.html").as_uri(), "!document.querySelector('[aria-busy=true]')"
    else:
        server = Server(scratch / "mlflow", patience=900)
        try:
            yield sent_to(server.uri, storage / "first"), "document.body.innerText.includes('grad_norm')"
        finally:
            server.kill()


def sent_to(uri: str, run: Path) -> str:
    """Send a run to MLflow, and return the address of its curves there, as a run says it at its end."""
    from raytune_fsdp.record.copies.mlflow import MlflowTracker
    from raytune_fsdp.record.tracker import RunStart

    tracker = MlflowTracker(uri, experiment="made up", directory=run, artifact_root=None, finish_seconds=600)
    start = RunStart(name=run.name, attempt=2, resumed_from=0, total_steps=600)
    tracker.start(replace(start, config=(run / "config.yaml").read_text(), over=True, committed=600))
    tracker.finish("finished")
    assert tracker.unsent is None, tracker.unsent
    from raytune_fsdp.record.copies.mlflow_run import connect, get_run

    return f"{uri}/{get_run(connect(uri), (run / 'mlflow_run_id').read_text().strip()).page}"


def make_small(picture: Path) -> None:
    """Keep 128 colours: a page has few, and the pictures are in the repository."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


# Runs that nobody has trained.


def make_runs(storage: Path) -> None:
    make_run(storage, "first", lr=1e-4, model="Qwen/Qwen3-8B", resized=True)
    make_run(storage, "second", lr=3e-4, model="Qwen/Qwen3-8B", steps=380, ended="interrupted")
    make_run(storage, "adapters", lr=2e-4, model="Qwen/Qwen3-8B", method="lora")
    make_run(storage, "small", lr=5e-4, model="Qwen/Qwen3-0.6B")
    make_run(storage, "too-fast", lr=5e-3, model="Qwen/Qwen3-0.6B", steps=90, ended="failed")


def make_run(
    storage: Path, name: str, *, lr: float, model: str, method: str = "full", steps: int = 600, ended: str = "finished",
    resized: bool = False,
) -> None:  # fmt: skip
    config = make_config(
        run={"name": name, "exact": True}, model={"path": model}, method={"type": method}, optim={"lr": lr},
        train={"global_batch": 64, "max_steps": 600}, data={"seq_len": 4096},
        eval={"prompts": ["What does FSDP shard?"], "every": 50}, checkpoint={"every": 100},
    )  # fmt: skip
    run, draw = storage / name, random.Random(name)
    (run / "model").mkdir(parents=True)
    (run / "export").mkdir()
    (run / "config.yaml").write_text(recorded_text(config))
    (run / "plan.json").write_text(json.dumps(resolve(config, 8).to_dict()))
    (run / "model" / "recipe.json").write_text('{"version": "0.3.0"}')
    (run / "data.json").write_text(data_of(census()))
    day = BEGAN + timedelta(hours=len(list(storage.iterdir())) * 7)
    lines, at = [], 95.0
    for step in range(1, steps + 1):
        ranks = 6 if resized and step > 240 else 8
        attempt = 1 + (ranks == 6)
        at += (2.2 if ranks == 8 else 2.9) + abs(draw.gauss(0, 0.05)) + (90 if step == 241 and resized else 0)
        value = loss_of(lr, step) + draw.gauss(0, 0.04)
        lines.append(step_line(step, value, lr * min(1, step / 40), ranks, attempt, day + timedelta(seconds=at), draw))
        if step % 50 == 0:
            at += 14
            values = {
                "eval/heldout/loss": value + 0.12,
                "eval/code/loss": value - 0.2,
                "eval/heldout/accuracy": 1 - value / 3,
            }
            lines.append({"kind": "eval", "step": step, "values": values, "attempt": attempt,
                          "time": (day + timedelta(seconds=at)).isoformat()})  # fmt: skip
    (run / "metrics.jsonl").write_bytes(b"".join(map(to_bytes, lines)))
    times = {line["trajectory"]["step"]: line["time"] for line in lines if line["kind"] == "step"} | {
        0: day.isoformat()
    }
    events = [*events_of(steps, ended, resized=resized, until=later(times[min(240, steps)], 8.9))]
    (run / "events.jsonl").write_bytes(
        b"".join(to_bytes({"time": later(times[step], wait), "attempt": attempt, "event": event, "fields": fields})
                 for step, wait, attempt, event, fields in events)
    )  # fmt: skip
    by = {"command": f"raytune-fsdp train --config {name}.yaml", "directory": "/home/ada/tune", "host": "node-a",
          "user": "ada", "python": "3.11.7", "commit": "3f1c0de5a7b94c2f8d6e1a0b5c7d9e2f4a6b8c0d",
          "uncommitted": False}  # fmt: skip
    (run / "attempts.jsonl").write_bytes(
        to_bytes({"time": day.isoformat(), "attempt": 1, "event": names.STARTED_BY, "fields": by})
    )


def loss_of(lr: float, step: int) -> float:
    return 0.95 + 1.4 * math.exp(-step / 130 * (lr / 1e-4) ** 0.3) + (lr > 1e-3) * step / 40


def make_sweep(storage: Path) -> None:
    """A sweep of 24 trials by rungs, with the runs of its trials."""
    draw = random.Random("sweep")
    space = {"optim.lr": {"loguniform": [1e-5, 2e-3]}, "optim.warmup_steps": {"int": [0, 100]},
             "method.type": {"choice": ["full", "lora"]}, "train.z_loss": {"choice": [0, 1e-4, 1e-3]}}  # fmt: skip
    decides = {"space": space, "metric": "eval/heldout/loss"}
    trials = [
        Trial(
            number,
            {
                "optim.lr": float(f"{10 ** draw.uniform(-5, -2.7):.6g}"), "optim.warmup_steps": draw.randint(0, 100),
                "method.type": draw.choice(["full", "lora"]), "train.z_loss": draw.choice([0, 1e-4, 1e-3]),
            },
            number,
        )
        for number in range(24)
    ]  # fmt: skip
    log: list[Entry] = [SweepBegun(decides, {}, highest=False), *trials]
    on, last = list(range(24)), {}
    for step in (50, 100, 200, 400, 600):
        found = {}
        for number in on:
            changes = trials[number].changes
            worse = 0.1 * (changes["method.type"] == "lora") + changes["optim.warmup_steps"] / 1000
            found[number] = round(loss_of(changes["optim.lr"], step) + worse + draw.gauss(0, 0.02), 4)
            last[number] = step
        log += [Value(number, step, value) for number, value in found.items()]
        best = sorted(sorted(on, key=found.__getitem__)[: max(1, len(on) // 2)])
        if step < 600:
            log.append(Decision(step, tuple(best), tuple(number for number in on if number not in best)))
            on = best
    log += [TrialEnded(number, 600) for number in on]
    for number, steps in last.items():
        changes = trials[number].changes
        make_run(
            storage, f"rates-{number:03d}", lr=changes["optim.lr"], model="Qwen/Qwen3-0.6B",
            method=changes["method.type"], steps=steps, ended="finished" if steps == 600 else "interrupted",
        )  # fmt: skip
    (storage / "rates").mkdir()
    (storage / "rates" / "sweep.yaml").write_text("name: rates\n")
    (storage / "rates" / "log.jsonl").write_bytes(b"".join(map(line_of, log)))


def later(moment: str, seconds: float) -> str:
    return (datetime.fromisoformat(moment) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def step_line(
    step: int, loss: float, lr: float, ranks: int, attempt: int, time: datetime, draw: random.Random
) -> dict[str, Any]:
    seconds = (2.2 if ranks == 8 else 2.9) + abs(draw.gauss(0, 0.05))
    spread, wait = abs(draw.gauss(0, 0.03)), abs(draw.gauss(0.02, 0.01))
    nodes = [["node-a", 61 * 2**30 + step * 2**22, 190 * 2**30, 97.0 - spread * 9, 66 * 2**30]]
    return {
        "kind": "step",
        "trajectory": {"step": step, "epoch": step / 300, "samples": "0" * 16, "tokens": 258_000,
                       "target_tokens": 171_000, "loss": loss,
                       "grad_norm": 0.4 + 2 / (1 + step / 20) + abs(draw.gauss(0, 0.05)), "lr": lr},
        "world_size": ranks, "attempt": attempt, "time": time.isoformat(timespec="milliseconds"),
        "accuracy": 0.78 - loss / 9, "step_seconds": seconds, "data_seconds": wait,
        "tokens_per_second": 258_000 / seconds, "mfu": 0.46 - spread,
        "datasets": [["chat", loss + 0.05, 0.5, 114_000], ["code", loss - 0.12, 0.5, 57_000]],
        "memory_bytes": 61 * 2**30 + 2**27 * (step % 3), "host_memory_bytes": 74 * 2**30 + step * 2**22,
        "gpu_utilization": 96.0 - 20 * spread, "rank_seconds": [seconds - spread, seconds, seconds + spread],
        "rank_data_seconds": [wait / 3, wait, wait * 2], "nodes": nodes if step % 5 == 1 else None, "skipped": False,
        "rank_compute_seconds": [seconds - wait - spread, seconds - wait, seconds - wait + spread / 2],
    }  # fmt: skip


def events_of(
    steps: int, ended: str, *, resized: bool, until: str
) -> Iterator[tuple[int, float, int, str, dict[str, Any]]]:
    """Yield the step of each event, the seconds after it, its attempt, name and fields.

    `until`: when the last of four steps had ended that did not stay.
    """
    machine = {"device": "cuda: NVIDIA H100 80GB HBM3", "threads": 8,
               "packages": {"flash-attn": "2.8.3", "triton": "3.6.0"},
               "versions": {"raytune-fsdp": "0.3.0", "torch": "2.11.0", "transformers": "5.17.0"}}  # fmt: skip
    predicted = {
        "kept_bytes": 13 * 2**30,
        "peak_bytes": 58 * 2**30,
        "step_seconds": 2.3,
        "checkpoint_bytes": 92 * 2**30,
    }
    yield 0, 1, 1, names.ATTEMPT_STARTED, {"world_size": 8, "resumed_from": 0, **machine}
    yield 0, 2, 1, names.PREDICTED, {**predicted, "where": "norm, head and loss"}
    yield 0, 3, 1, names.ROWS_DROPPED, {"empty": 20, "truncated": 0, "cut": 0, "rows": 19_000}
    yield (
        8,
        0,
        1,
        names.PREDICTION_CHECKED,
        {"step": 8, "kept_bytes": 13 * 2**30, "peak_bytes": 61 * 2**30, "step_seconds": 2.2},
    )
    phases = {"start": 1.9, "checks": 3.1, "Ray": 2.4, "workers": 21.0, "imports": 9.5, "model": 38.2, "data": 14.9}
    yield 1, 0, 1, names.FIRST_STEP, {"seconds": 93.4, "phases": {**phases, "step": 2.4}}
    for step in (50, 300, 600) if steps == 600 else (50,):
        said = "The weights, gradients and optimizer state of a model, over all ranks."[: 20 + step // 12]
        yield step, 1, 1, names.ANSWERED, {"step": step, "prompt": "What does FSDP shard?", "answer": said}
    for step in range(100, steps + 1, 100):
        fields = {"step": step, "seconds": 11.4, "bytes": 92 * 2**30, "path": "x", "digest": f"{step:064x}"}
        yield step, 12, 1 + (resized and step > 240), names.SAVED, fields
    if resized:
        cause = "its machine was taken away (spot)"
        yield 240, 1, 1, names.DRAINED, {"node": "node-b", "seconds_left": 120}
        failed = {"reached": 246, "seconds": 640, names.STOP_SECONDS: 1.8}
        yield 240, 20, 1, names.ATTEMPT_FAILED, {
            "rank": 6, "node": "node-b", "cause": cause, "last_step": 240, **failed,
        }  # fmt: skip
        cut = [{"attempt": 1, "steps": 4, "seconds": 8.9, "last": 244, "until": until}]
        yield 240, 70, 2, names.ATTEMPT_STARTED, {"world_size": 6, "resumed_from": 240, names.CUT: cut, **machine}
        later = {"workers": 14.2, "imports": 0.4, "model": 41.5, "data": 12.6, "step": 2.9}
        yield 241, 0, 2, names.FIRST_STEP, {"seconds": 71.6, "phases": later}
        yield 241, 1, 2, names.RESIZED, {"before": 8, "after": 6, "cause": cause, "seconds": 90, "steps_redone": 0}
        yield 410, 0, 2, names.SLOW_RANK, {"step": 410, "rank": 3, "node": "node-a", "seconds": 3.4, "others": 2.8,
                                           "spends_it_on": "data"}  # fmt: skip
    yield steps, 30, 1 + resized, names.ATTEMPT_ENDED, {"status": ended}
    if resized:
        audit = {"first": 201, "step": 300, "ranks": 4, "difference": None, "exact": True, "cached": False}
        yield steps, 9000, 2, names.AUDITED, audit


def census() -> Census:
    """Counts of two datasets."""
    lengths = {bucket: round(2600 * math.exp(-(((bucket - 36) / 5) ** 2))) + 3 for bucket in range(22, 49)}
    count = DatasetCount(
        rows=19_000, documents=18_980, tokens=9_800_000, target_tokens=6_500_000, dropped={"empty": 20}
    )
    count.lengths = lengths
    other = replace(count, rows=7200, documents=7200, tokens=5_100_000, target_tokens=3_300_000, dropped={})
    return Census(seq_len=4096, epochs=(3820,), windows=4, names=("chat", "code"), datasets=(count, other))


if __name__ == "__main__":
    main()
