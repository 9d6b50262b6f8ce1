"""Two trees, the same trajectories: `make same BASE=<commit>`, or `python -m tests.same BASE`.

Trains small runs with the code of BASE and with the working tree as it is now, both on this machine, and compares what
`metrics.jsonl` says of every step and every evaluation, bit by bit. The working tree also goes on with checkpoints, its
own and those of BASE, which must give what BASE gives without a stop. Ends with 1 if anything differs.

A run that the working tree begins under a higher order version is meant to be another one: then only what BASE has
begun is compared, which must go on under its own order. A run that the working tree begins with another attention or
loss than BASE has is compared within BOUNDS; what BASE has begun keeps those of BASE, and must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models import architecture

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "fixtures" / "aae7294" / "data"
LEAST_RUNS = 12
MINUTES = 15
"""A tree that takes longer is stopped."""
BOUNDS = {
    "fp64": (1e-8, 1e-6), "fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-2), "bf16_pure": (2e-3, 2e-2), "fp16": (2e-3, 2e-2),
}  # fmt: skip
"""The largest relative difference of a loss, and of a norm, where the same is computed in another order."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

TOKENS = {"path": str(DATA / "tokens.jsonl"), "format": {"type": "tokens"}}
TEXTS = {"path": str(DATA / "texts.jsonl"), "format": {"type": "completion"}}
CHATS = {"path": str(DATA / "chats.jsonl"), "format": {"type": "chat"}}
LAST_TURNS = {"path": str(DATA / "chats.jsonl"), "format": {"type": "chat", "loss": "last_turn"}}
ANSWERS = {"path": str(DATA / "answers.jsonl"), "format": {"type": "instruction", "style": "plain"}}
ANSWERS_AS_CHATS = {"path": str(DATA / "answers.jsonl"), "format": {"type": "instruction", "style": "chat"}}

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is particular about one run."""

    model: Mapping[str, Any]
    world: int = 1
    torchrun: bool = False
    """The ranks are started as torchrun does it, which is quicker here than by the launcher."""
    data: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    from_step: int | None = None
    """The working tree also goes on from the checkpoints of this step: BASE's and, with `own`, its own."""
    own: bool = False


RUNS = {
    "gpt2-fp64-accumulation": Run(
        model=architecture("gpt2", **NO_DROPOUT),
        parallel={"precision": "fp64"},
        more={"optim": {"schedule": {"type": "linear", "floor": 0.1}}},
        from_step=4,
    ),
    "gpt2-dropout-epochs-mixture-evaluation": Run(
        model=architecture("gpt2"),
        data={"train": [LAST_TURNS, {**TOKENS, "weight": 2}], "eval": [TEXTS], "chat_template": "chatml",
              "long_documents": "truncate"},
        train={"global_batch": 8, "max_steps": None, "epochs": 2.5},
        more={"eval": {"every": 4, "at_start": True, "prompts": ["w5 w6"], "max_new_tokens": 4}},
        from_step=8,
        own=True,
    ),
    "gpt2-fp16": Run(model=architecture("gpt2"), parallel={"precision": "fp16"}, from_step=4, own=True),
    "llama-bf16-concat-recomputed": Run(
        model=architecture("llama", attention_dropout=0.1),
        data={"train": [TEXTS], "packing": "concat", "reshuffle": "full"},
        parallel={"precision": "bf16", "activation_checkpointing": "full"},
        from_step=4,
    ),
    "llama-shares-chats-split": Run(
        model=architecture("llama"),
        data={"train": [{**CHATS, "share": 0.3}, {**ANSWERS, "share": 0.7}], "chat_template": "chatml",
              "long_documents": "split"},
        more={"optim": {"schedule": {"type": "wsd", "decay": 0.3}, "max_grad_norm": None}},
        from_step=8,
    ),
    "qwen3-bf16_pure-drop-blocks": Run(
        model=architecture("qwen3"),
        data={"long_documents": "drop", "shuffle": "blocks", "seq_len": 32},
        parallel={"precision": "bf16_pure"},
        from_step=4,
        own=True,
    ),
    "gemma3-split-in-order": Run(
        model=architecture("gemma3_text"),
        data={"train": [ANSWERS], "long_documents": "split", "shuffle": "none"},
        from_step=4,
    ),
    "mistral-bf16-llama-3-chats": Run(
        model=architecture("mistral"),
        data={"train": [ANSWERS_AS_CHATS], "chat_template": "llama-3", "long_documents": "truncate"},
        parallel={"precision": "bf16"},
    ),
    "mixtral-no-packing": Run(
        model=architecture("mixtral"), data={"train": [TEXTS], "packing": "none", "long_documents": "truncate"}
    ),
    "qwen3_moe-bf16": Run(model=architecture("qwen3_moe"), parallel={"precision": "bf16"}),
    "2-ranks-llama-filler": Run(
        model=architecture("llama", attention_dropout=0.1), world=2, torchrun=True, from_step=4, own=True
    ),
    "2-ranks-launched-gpt2-replicate-bf16": Run(
        model=architecture("gpt2"), world=2,
        parallel={"strategy": "replicate", "precision": "bf16", "defer_gradient_sync": True},
    ),
    "3-ranks-mixtral-shard_grad_op": Run(
        model=architecture("mixtral"), world=3, torchrun=True, parallel={"strategy": "shard_grad_op"}
    ),
    "4-ranks-llama-fp64-hybrid_shard": Run(
        model=architecture("llama"), world=4, torchrun=True,
        parallel={"strategy": "hybrid_shard", "shard_size": 2, "precision": "fp64"},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and the directory where its runs are."""

    code: Path
    runs: Path

    def run_dir(self, name: str, kind: str = "whole") -> Path:
        return self.runs / kind / name

    def problem(self, name: str, kind: str) -> Path:
        """Where a run that failed says why."""
        return self.runs / f"{kind}-{name}.error"

    def job(self, name: str, kind: str = "whole", begun: Path | None = None) -> dict[str, Any]:
        """A run as tests/same_runs.py wants to be told of it."""
        return {
            "config": config_of(RUNS[name], name, self.runs / kind),
            "torchrun": RUNS[name].world if RUNS[name].torchrun else 0,
            "error": str(self.problem(name, kind)),
            "begun": None if begun is None else str(begun),
            "from_step": RUNS[name].from_step,
        }

    def start(self, jobs: Sequence[Mapping[str, Any]]) -> subprocess.Popen[bytes]:
        """Train these one after the other, in a process of their own."""
        self.runs.mkdir(exist_ok=True)
        (self.runs / "jobs.json").write_text(json.dumps(jobs))
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                # -P: tests/ray must not be found before Ray.
                [sys.executable, "-P", str(ROOT / "tests" / "same_runs.py"), str(self.runs / "jobs.json")],
                cwd=self.code,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self.code)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.runs / "log"

    def failure(self, name: str, kind: str) -> str | None:
        """In a line why there is no such run, None if there is one."""
        if self.problem(name, kind).exists():
            return self.problem(name, kind).read_text().strip().splitlines()[-1]
        if not (self.run_dir(name, kind) / "metrics.jsonl").exists():
            said = self.log.read_text(errors="replace").strip().splitlines()
            return f"it did not get there; the last it said: {said[-1] if said else 'nothing'}"
        return None


def config_of(run: Run, name: str, storage: Path) -> dict[str, Any]:
    values: dict[str, Any] = {
        "run": {"name": name, "storage": str(storage), "seed": 3},
        "model": {"init": "random", "architecture": run.model, "tokenizer": str(DATA / "tokenizer")},
        "data": {"train": [TOKENS], "seq_len": 48, "window": 16, **run.data},
        "parallel": {"precision": "fp32", **run.parallel},
        "optim": {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_ratio": 0.1},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 10, **run.train},
        "checkpoint": {"every": run.from_step, "keep_last": None},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"launch": "local", "device": "cpu", "workers": run.world},
        "export": {"at_end": False},
    }
    for section, changes in run.more.items():
        values[section] = {**values.get(section, {}), **changes}
    return values


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same", description="Two trees, the same trajectories.")
    parser.add_argument("base", metavar="BASE", help="the commit to compare the working tree with")
    commit = git("rev-parse", "--verify", f"{parser.parse_args(argv).base}^{{commit}}")
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, checkout(commit, Path(directory) / "base") as code:
        base = Tree(code, Path(directory) / "runs-of-base")
        here = Tree(ROOT, Path(directory) / "runs-of-here")
        train(base, here)
        results = list(compare_all(base, here))
    width = max(len(each.run) for each in results)
    for each in results:
        print(f"{each.run:{width}}  {each.steps:3} steps {each.values:4} values  {each.verdict}")
    differing = sum(each.difference is not None for each in results)
    compared = sum(each.values > 0 for each in results)
    print(
        f"{compared} of {len(results)} runs compared with {commit[:7]}, "
        f"{f'{differing} NOT EQUAL' if differing else 'all equal'}, in {time.monotonic() - since:.0f} s"
    )
    if compared < LEAST_RUNS:
        print(f"only {compared} runs were compared; {LEAST_RUNS} are the least")
    return int(differing > 0 or compared < LEAST_RUNS)


def train(base: Tree, here: Tree) -> None:
    """Both trees at once; then the working tree goes on with what BASE has begun."""
    whole = {tree: [tree.job(name) for name in RUNS] for tree in (base, here)}
    own = [here.job(name, "own", here.run_dir(name)) for name, run in RUNS.items() if run.own]
    run_all([base.start(whole[base]), here.start([*whole[here], *own])])
    going_on = [name for name, run in RUNS.items() if run.from_step is not None]
    run_all([here.start([here.job(name, "across", base.run_dir(name)) for name in going_on])])


def run_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for them; none is left behind. What they did not get done is found missing later."""
    until = time.monotonic() + 60 * MINUTES
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks it has started, too
            process.wait()


@dataclass(frozen=True, slots=True)
class Result:
    run: str
    steps: int = 0
    values: int = 0
    difference: str | None = None
    note: str = "equal"

    @property
    def verdict(self) -> str:
        return self.note if self.difference is None else f"NOT EQUAL: {self.difference}"


def compare_all(base: Tree, here: Tree) -> Iterator[Result]:
    """Whatever the working tree did, with what BASE did without a stop."""
    for name, run in RUNS.items():
        orders = [order_of(tree.run_dir(name)) for tree in (base, here)]
        if run.from_step is not None and not run.own and None not in orders and orders[0] != orders[1]:
            yield Result(name, note=f"begins with order version {orders[1]}, in BASE with {orders[0]}: not compared")
        else:
            other = kernels_of(base.run_dir(name)) != kernels_of(here.run_dir(name))
            bounds = BOUNDS[run.parallel.get("precision", "fp32")] if other else None
            yield compare(name, (base, name, "whole"), (here, name, "whole"), bounds=bounds)
            if run.own:
                whole = here if other else base
                yield compare(f"{name}, continued", (whole, name, "whole"), (here, name, "own"))
        if run.from_step is not None:
            yield compare(f"{name}, begun by BASE", (base, name, "whole"), (here, name, "across"))


def compare(run: str, *both: tuple[Tree, str, str], bounds: tuple[float, float] | None = None) -> Result:
    """Of two runs all values that both have: their bits, or within the bounds."""
    for (tree, name, kind), whose in zip(both, ("BASE", "the working tree"), strict=True):
        if (why := tree.failure(name, kind)) is not None:
            return Result(run, difference=f"{whose} failed: {why}")
    was, now = (read_record(tree.run_dir(name, kind)) for tree, name, kind in both)
    steps = sum(moment.startswith("step") for moment in was)
    if was.keys() != now.keys():
        return Result(run, steps, 0, f"only one of them has {', '.join(sorted(was.keys() ^ now.keys()))}")
    pairs = [(moment, key) for moment in was for key in was[moment] if key in now[moment]]
    largest = dict.fromkeys(("loss", "grad_norm"), 0.0)
    for moment, key in pairs:
        before, after = was[moment][key], now[moment][key]
        kind = key.rpartition("/")[2]
        if bounds is not None and kind in largest:
            largest[kind] = max(largest[kind], abs(after - before) / abs(before))
            equal = largest[kind] <= bounds[kind == "grad_norm"]
        else:
            equal = repr(before) == repr(after)  # of floats: all their bits
        if not equal:
            return Result(run, steps, len(pairs), f"{moment}: {key} was {before!r}, is {after!r}")
    if not pairs:
        return Result(run, steps, difference="they have no value in common")
    if bounds is None:
        return Result(run, steps, len(pairs))
    found = ", ".join(
        f"{kind} {value:.0e} of {bound:.0e}" for (kind, value), bound in zip(largest.items(), bounds, strict=True)
    )
    return Result(run, steps, len(pairs), note=f"within bounds: {found}")


def kernels_of(run_dir: Path) -> tuple[str | None, ...]:
    """The attention and the loss that a run was begun with, and how it adds gradients in 16 bits; trees from before
    there was a choice name none."""
    with open(run_dir / "events.jsonl") as events:
        chosen = [line["fields"] for line in map(json.loads, events) if line["event"] == "kernels"]
    first = chosen[0] if chosen else {}
    return tuple(first.get(what) for what in ("attention", "loss", "gradients"))


def order_of(run_dir: Path) -> int | None:
    """The order version that a run was begun with, by any of its checkpoints; None if it has none."""
    for state in run_dir.glob("checkpoints/step-*/state.json"):
        found: int = json.loads(state.read_text())["identity"]["data.order_version"]
        return found
    return None


def read_record(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The trajectory of every step, and what evaluations have found."""
    record: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "step":
            record[f"step {line['trajectory']['step']}"] = line["trajectory"]
        else:
            record.setdefault(f"evaluation after step {line['step']}", {}).update(line["values"])
    return record


@contextmanager
def checkout(commit: str, directory: Path) -> Iterator[Path]:
    """The tree of a commit, beside ours."""
    git("worktree", "add", "--detach", str(directory), commit)
    try:
        yield directory
    finally:
        git("worktree", "remove", "--force", str(directory))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
