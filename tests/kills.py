"""Kills: a run on a cluster of this machine of which something is killed again and again, and what became of it.

    make kills KILLS=30 SEED=1

What is killed, and at which moment, is drawn by the seed: every kind at every moment once, in another order each time.
A kind of which there is no process is left out. The next kill follows as soon as the run has trained 2 to 10 further
steps, or meets a start, or a checkpoint that is read: for these two a rank is killed first, which counts, too. Then the
run, which has `run.exact`, is stopped and compared with an undisturbed one of one rank: every step on record is equal
to the bit, and so is every checkpoint. Exits with 1 if not, if anything had to be done by hand, if anything is left, or
if a process that outlives attempts grows with each of them.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from raytune_fsdp.config import CheckpointConfig, FinetuneConfig
from raytune_fsdp.record.jsonl import read_events
from tests.disturbed import KEEPER, RECOVERY_SECONDS, Disturbed, compare, conclude, config_for, steps_of
from tests.ray.jobs import Nodes, events

RANKS, NODES = 3, 4
EVERY = 4
PACE = "0.1"
FURTHER = (2, 10)
"""Steps that are trained before the next kill."""
GONE_SECONDS = 75.0
HAS_PEERS = "peer_copies" in CheckpointConfig.model_fields
HAS_TEMPLATES = find_spec("raytune_fsdp.launch.ray.forked") is not None


class NothingToKill(Exception):
    """There is no such process now."""


@dataclass
class Kill:
    what: str
    moment: str
    time: float
    step: int
    """The last one on record."""
    noticed: float | None = None
    """Seconds until a failure is on record, and until another attempt has trained its first step; None: the next kill
    came before that, or no attempt ended."""
    next_step: float | None = None
    went_on_from: str = ""
    again: int | None = None
    """Steps that were trained once more."""


@dataclass(kw_only=True)
class Kills(Disturbed):
    deck: list[tuple[Victim, Moment]] = field(default_factory=list)
    done: list[Kill] = field(default_factory=list)

    # --- Victims: each is killed, and named -------------------------------------------------------------------------

    def a_rank(self) -> str:
        end(self.random.choice(self.workers(1)))
        return "a rank"

    def two_ranks(self) -> str:
        for each in self.random.sample(self.workers(2), 2):
            end(each)
        return "two ranks"

    def a_node(self) -> str:
        name = self.random.choice(list(self.living))
        joined = self.ranks()
        has = sum(each["node_id"] == self.living[name] for each in joined)
        del self.living[name]
        self.nodes.kill(name)
        return f"a node {'of a rank' if has else 'without a rank'}"

    def a_rank_and_the_driver(self) -> str:
        end(self.random.choice(self.workers(1)))
        self.run.process.kill()
        self.run.process.wait()
        return "a rank and the driver"

    def the_controller(self) -> str:
        end(self.one_of(self.of_ray("TrainController")))
        return "Ray Train's controller"

    def a_keeper(self) -> str:
        end(self.one_of(self.of_ray(KEEPER)))
        return "a keeper of peer copies"

    def a_template(self) -> str:
        end(self.one_of(self.templates()))
        return "a template of ranks"

    # --- Moments: each waits for it, and says what it has met; a process that stands still goes on afterwards --------

    def training(self) -> str:
        return "training"

    def a_save(self) -> str:
        """A rank stands still while it writes its part of a checkpoint, or rank 0 before it commits, or after that."""
        place = self.random.choice(["commit-0", "prune-0", *(f"file-{rank}" for rank in range(RANKS))])
        self.stand_still(place)
        draft = any((self.run.run_dir / "checkpoints").glob("*.tmp"))
        return f"a save, in {place}" if draft or place == "prune-0" else f"a peer copy, in {place}"

    def a_peer_copy(self) -> str:
        place = self.random.choice(["publish-0", *(f"send-{rank}" for rank in range(RANKS))])
        self.stand_still(place)
        return f"a peer copy, in {place}"

    def a_load(self) -> str:
        place = f"checkpoint-{self.random.randrange(RANKS)}"
        self.run.until(lambda: bool(events(self.run.run_dir, "saved")), RECOVERY_SECONDS)  # else nothing is read
        self.stand_still(place, self.a_start_begins)
        return f"a load, in {place}"

    def a_start(self) -> str:
        """At any time between the end of an attempt and the first step of the next one, by what that took so far."""
        trained = self.attempt()
        self.a_start_begins()
        took = [each.next_step for each in self.measured() if each.next_step is not None]
        time.sleep(self.random.uniform(0, median(took) if took else 10))
        return "a start" if self.attempt() == trained else "training, after a short start"

    # --- Around them -------------------------------------------------------------------------------------------------

    def workers(self, least: int) -> list[psutil.Process]:
        """The processes of ranks, at least so many: an attempt that begins has none at first."""
        self.run.until(lambda: len(self.of_ray("RayTrainWorker")) >= least, RECOVERY_SECONDS)
        return sorted(self.of_ray("RayTrainWorker"), key=lambda process: process.pid)

    def one_of(self, found: list[psutil.Process]) -> psutil.Process:
        if not found:
            raise NothingToKill
        return self.random.choice(sorted(found, key=lambda process: process.pid))

    def stand_still(self, place: str, bring: Callable[[], object] = lambda: None) -> None:
        """Wait until a process stands still there."""
        fault = self.run.faults / f"stopped-at-{place}"
        fault.touch()
        bring()
        self.run.until(lambda: not fault.exists(), RECOVERY_SECONDS)

    def a_start_begins(self) -> None:
        self.killed(Kills.a_rank, "training, before the next kill")

    def killed(self, victim: Victim, moment: str) -> None:
        kill = Kill("", moment, time.time(), self.run.steps())
        kill.what = victim(self)
        self.done.append(kill)
        print(f"{time.strftime('%H:%M:%S')} after step {kill.step}, {moment}: {kill.what}", flush=True)

    def strike(self) -> None:
        """Draw a kill, wait for its moment, and mend what is missing afterwards."""
        if not self.deck:
            pairs = list(product(VICTIMS, MOMENTS))
            self.deck = self.random.sample(pairs, len(pairs))
        victim, moment = self.deck.pop()
        if not self.done and moment in (Kills.a_start, Kills.a_load):  # no start has been measured, nothing is saved
            moment = Kills.training
        met = moment(self)
        with suppress(NothingToKill):
            self.killed(victim, met)
        for process in self.of_ray("RayTrainWorker"):
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)
        if self.run.process.poll() is not None:
            self.start()
        while len(self.living) < NODES:
            self.add_node()

    def go_on(self) -> None:
        """Wait until the run has trained further."""
        enough = self.run.steps() + self.random.randint(*FURTHER)
        self.run.until(lambda: self.run.steps() >= enough, RECOVERY_SECONDS)
        self.look()

    def measured(self) -> list[Kill]:
        return follow(self.done, list(read_events(self.run.run_dir / "events.jsonl")))


def end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
        process.kill()


def follow(kills: list[Kill], lines: list[dict[str, Any]]) -> list[Kill]:
    """What was killed, with what the record has of it until the next kill."""
    timed = [(datetime.fromisoformat(line["time"]).timestamp(), line) for line in lines]
    for kill, end in zip(kills, [*(each.time for each in kills[1:]), float("inf")], strict=True):
        after = [(when, line) for when, line in timed if kill.time < when <= end]
        failed = next((when for when, line in after if line["event"] == "attempt_failed"), None)
        trained = next((when for when, line in after if line["event"] == "first_step"), None)
        kill.noticed = None if failed is None else failed - kill.time
        if trained is not None:
            started = [line for when, line in timed if line["event"] == "attempt_started" and when <= trained]
            kill.next_step = trained - kill.time
            kill.went_on_from, step = whence(started[-1]["fields"])
            kill.again = max(0, kill.step - step)
    return kills


def whence(fields: dict[str, Any]) -> tuple[str, int]:
    """Where an attempt goes on from, in words, and after which step."""
    step = fields["resumed_from"]
    return ("a peer copy" if fields.get("from_peers") else "a commit" if step else "the beginning"), step


Victim = Callable[[Kills], str]
Moment = Callable[[Kills], str]
VICTIMS: list[Victim] = [
    Kills.a_rank, Kills.two_ranks, Kills.a_node, Kills.a_rank_and_the_driver, Kills.the_controller,
    *([Kills.a_keeper] if HAS_PEERS else []), *([Kills.a_template] if HAS_TEMPLATES else []),
]  # fmt: skip
MOMENTS: list[Moment] = [
    Kills.training, Kills.a_save, Kills.a_start, Kills.a_load, *([Kills.a_peer_copy] if HAS_PEERS else []),
]  # fmt: skip


def config_of(directory: Path) -> FinetuneConfig:
    return config_for(
        directory,
        checkpoint={"every": EVERY, "keep_last": 3, **({"peer_copies": 1, "peer_every": 1} if HAS_PEERS else {})},
        cluster={"workers": RANKS},
    )


def endure(directory: Path, kills: int, seed: int, first: Sequence[tuple[Victim, Moment]] = ()) -> dict[str, Any]:
    """The kills, of which the first may be chosen. Returns what was done, what was trained, and what is left."""
    config = config_of(directory)
    with Nodes(directory, head_cpus=1) as nodes:
        run = Kills(directory, config, nodes, random.Random(seed), deck=list(reversed(first)))
        for _ in range(NODES):
            run.add_node()
        began = time.monotonic()
        run.start()
        (run.run.faults / "pace").write_text(PACE)
        run.run.until(lambda: run.run.steps() > EVERY, RECOVERY_SECONDS)
        while len(run.done) < kills:
            run.strike()
            run.go_on()
        took = time.monotonic() - began
        run.run.process.send_signal(signal.SIGTERM)
        code, said = run.run.end(120)
        left = run.left_behind(GONE_SECONDS)
        if groups := run.groups():
            left.append(f"{groups} placement groups")
    left += run.shared_left()
    problems = [] if code == 130 else [f"the command ended with {code}: {said[-2000:]}"]
    problems += [f"left behind: {left}"] if left else []
    problems += run.memory.problems()
    return {
        "kills": run.measured(), "seconds": took, "memory": run.memory.record(), "growth": run.memory.growth(),
        "config": config, "lines": steps_of(run.run.run_dir), "problems": problems,
    }  # fmt: skip


def judge(found: dict[str, Any]) -> list[str]:
    """What is not as it should be; prints the rest."""
    equal, unequal = compare(found["config"], found["lines"])
    found |= {"steps": len(found["lines"]), "equal_checkpoints": equal}
    print(f"\n{'killed':36} {'while':36} {'noticed':>9} {'next step':>9} {'again':>6}  went on from")
    for kill in found["kills"]:
        noticed, following = (f"{'-':>9}" if it is None else f"{it:7.1f} s" for it in (kill.noticed, kill.next_step))
        again = f"{'-':>6}" if kill.again is None else f"{kill.again:6}"
        print(f"{kill.what:36} {kill.moment:36} {noticed} {following} {again}  {kill.went_on_from}")
    print(
        f"{len(found['kills'])} kills in {found['seconds']:.0f} s, {found['steps']} steps, "
        f"{equal} checkpoints compared with those of one rank"
    )
    for what, grown in found["growth"].items():
        print(f"{what}: {grown / 2**20:+.2f} MiB from attempt to attempt")
    return [*found["problems"], *unequal]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        found = endure(Path(name), arguments.kills, arguments.seed)
        problems = judge(found)
    what = "kills: what was killed, and what became of the run"
    found = {**found, "kills": [asdict(each) for each in found["kills"]]}
    return conclude(arguments.out, what, arguments.seed, found, problems)


if __name__ == "__main__":
    sys.exit(main())
