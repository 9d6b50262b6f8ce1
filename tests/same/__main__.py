"""Two trees, the same trajectories: `make same BASE=<commit>`, or `python -m tests.same BASE`.

Trains small runs with the code of BASE and with the working tree as it is now, both on this machine, and compares what
`metrics.jsonl` says of every step and every evaluation, bit by bit. The working tree also goes on with checkpoints, its
own and those of BASE, which must give what BASE gives without a stop. Of exports it compares the hashes of files, of
commands what they print, of wheels the files that are not Python. Ends with 1 if anything differs.

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
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.same.cases import DATA, RUNS, Site, config_of
from tests.same.outputs import after_runs, before_runs, difference, file_name, files_of_export, files_of_wheel, printed

ROOT = Path(__file__).resolve().parents[2]
LEAST_RUNS = 24
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
    "RAY_AUTH_MODE": "disabled",
    "RAY_ADDRESS": "local",
}
SHOWN = ("llama-lora-mixture-of-formats", "gpt2-dropout-epochs-mixture-evaluation")
"""Runs that commands are shown."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and the directory where its runs are."""

    code: Path
    runs: Path
    site: Site

    def run_dir(self, name: str, kind: str = "whole") -> Path:
        return self.runs / kind / name

    def problem(self, name: str, kind: str) -> Path:
        """Where a run that failed says why."""
        return self.runs / f"{kind}-{name}.error"

    def job(self, name: str, kind: str = "whole", begun: Path | None = None) -> dict[str, Any]:
        """A run as in_tree.py takes it."""
        return {
            "config": config_of(RUNS[name], name, self.runs / kind, self.site),
            "torchrun": RUNS[name].world if RUNS[name].torchrun else 0,
            "error": str(self.problem(name, kind)),
            "begun": None if begun is None else str(begun),
            "from_step": RUNS[name].from_step,
        }

    @property
    def before(self) -> dict[str, list[str]]:
        """Commands that need no run."""
        return before_runs({name: self.runs / f"{name}.json" for name in SHOWN})

    @property
    def after(self) -> dict[str, list[str]]:
        return after_runs(self.runs / "whole", *SHOWN)

    @property
    def printed(self) -> dict[str, str]:
        places = {f"{self.runs}/": "RUNS/", f"{self.code}/": "CODE/", f"{ROOT}/": "CODE/"}
        return dict(printed(self.runs / "printed", [*self.before, *self.after], places))

    def commands(self, lines: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        """Commands as in_tree.py takes them."""
        return [{"command": line, "out": str(self.runs / "printed" / file_name(name))} for name, line in lines.items()]

    def start(self, jobs: Sequence[Mapping[str, Any]]) -> subprocess.Popen[bytes]:
        """Train these one after the other, in a process of their own."""
        (self.runs / "printed").mkdir(parents=True, exist_ok=True)
        for name in SHOWN:
            shown = config_of(RUNS[name], f"{name}-shown", self.runs, self.site)
            (self.runs / f"{name}.json").write_text(json.dumps(shown))
        (self.runs / "jobs.json").write_text(json.dumps(jobs))
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                # -P: tests/ray must not be found before Ray.
                [sys.executable, "-P", str(Path(__file__).with_name("in_tree.py")), str(self.runs / "jobs.json")],
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same", description="Two trees, the same trajectories.")
    parser.add_argument("base", metavar="BASE", help="the commit to compare the working tree with")
    commit = git("rev-parse", "--verify", f"{parser.parse_args(argv).base}^{{commit}}")
    since = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        checkout(commit, Path(directory) / "base") as code,
        served(DATA) as url,
    ):
        site = Site(Path(directory) / "bases", url)
        site.make()
        base = Tree(code, Path(directory) / "runs-of-base", site)
        here = Tree(ROOT, Path(directory) / "runs-of-here", site)
        train(base, here)
        results = [*compare_all(base, here), *compare_outputs(base, here, Path(directory))]
    width = max(len(each.run) for each in results)
    for each in results:
        steps = f"{each.steps:3} steps " if each.steps else " " * 10
        print(f"{each.run:{width}}  {steps}{each.values:4} values  {each.verdict}")
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
    run_all(
        [
            base.start([*base.commands(base.before), *whole[base], *base.commands(base.after)]),
            here.start([*here.commands(here.before), *whole[here], *own, *here.commands(here.after)]),
        ]
    )
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
        failed = [why for tree in (base, here) if (why := tree.failure(name, "whole")) is not None]
        if failed:
            yield Result(name, difference=f"failed in {'both' if failed[1:] else 'one'}: {failed[0]}")
            continue
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
    if bounds is None:
        exports = [files_of_export(tree.run_dir(name, kind) / "export") for tree, name, kind in both]
        if exports[0] != exports[1]:
            files = sorted(name for name, _ in set(exports[0].items()) ^ set(exports[1].items()))
            return Result(run, steps, 0, f"other exports: {', '.join(files[:5])}")
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


def compare_outputs(base: Tree, here: Tree, scratch: Path) -> Iterator[Result]:
    """What commands print, in words that may be better now, and what a wheel has."""
    was, now = base.printed, here.printed
    for name, text in was.items():
        differs, note = difference(name, text, now[name])
        if differs is not None or note != "equal":
            yield Result(name, 0, 1, differs, note)
    same = sum(difference(name, text, now[name]) == (None, "equal") for name, text in was.items())
    yield Result(f"{same} commands of {len(was)}", 0, same)
    wheels = [files_of_wheel(tree.code, scratch / f"wheel-{index}") for index, tree in enumerate((base, here))]
    other = sorted(set(wheels[0]) ^ set(wheels[1]))
    yield Result("files of the wheel", 0, len(wheels[0]), f"other files: {', '.join(other)}" if other else None)


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


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The files of a directory by a server of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
