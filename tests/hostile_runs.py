"""Run directories of strangers, and the commands that read them: links, places, names, and forged files.

`HOSTILE[kind]` has for each a change to a good run, and what becomes of commands on it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests import forgeries
from tests.measured import Ending, changes, measured, opening, snapshot, touching
from tests.ranks import run_ranks

OLDER = Path(__file__).parent / "fixtures" / "aae7294"
CHECKPOINT = "checkpoints/step-00000006.a1"

Command = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Hostile:
    """A run, as somebody else has left it."""

    make: Callable[[Path], str | None]
    """Change a good run; returns what the line must say besides."""
    commands: tuple[Command, ...]
    """RUN stands for the run's directory, RUNS for that of all runs."""
    codes: tuple[int, ...] = (2,)
    lines: tuple[int, ...] = (1,)
    shows: str = ""
    """What the command prints, for all that."""
    writes: tuple[str, ...] = ()
    """What it may write to."""


# ---- links ----

DIRECTORIES = ("report", "checkpoints", "model", "exports", "export", "logs", "documents", "profile", "tensorboard")
FILES = (
    "config.yaml", "plan.json", "data.json", "metrics.jsonl", "events.jsonl", "evaluations.jsonl", "attempts.jsonl",
    "checkpoints_at", "metrics.jsonl.tmp", "config.yaml.tmp", "metrics.jsonl.a2.damaged",
    "checkpoint_manager_snapshot.json", ".validate_storage_marker",
)  # fmt: skip
INNER = (
    "checkpoints/step-00000006.a1", "checkpoints/step-00000009.a1.1.tmp", "exports/step-00000006", "report/index.html",
    "report/loss.png", "model/config.json", "model/additional_chat_templates/x.jinja", "logs/attempt-1",
    "logs/attempt-1/rank-0.log", "documents/attempt-1.jsonl", "profile/memory.pickle",
)  # fmt: skip


def linked(run: Path, name: str) -> Path:
    """Move what has this name elsewhere, and leave a link to it. What is there besides must not be touched."""
    link, elsewhere = run / name, run.parents[2] / "elsewhere"
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(elsewhere)
    elif "." in link.name.removesuffix(".tmp") and not link.name.startswith("step-"):
        elsewhere.write_text("mine")
    else:
        elsewhere.mkdir()
    if elsewhere.is_dir():
        for mine in ("notes.tmp", "step-00000001.a1.1.tmp", ".step-00000006.export-host-1-abcdef"):
            (elsewhere / mine).mkdir()
            (elsewhere / mine / "thesis").write_text("mine")
    link.symlink_to(elsewhere)
    return elsewhere


def _link(name: str) -> Callable[[Path], str]:
    def make(run: Path) -> str:
        return f"{run / name} is a link to {linked(run, name)}, and a run writes"

    return make


ON_A_RUN: tuple[Command, ...] = (
    ("report", "RUN"), ("report", "RUNS/epochs", "RUN"), ("step", "RUN", 1), ("audit", "RUN"),
    ("checkpoint", "list", "RUN"), ("checkpoint", "verify", "RUN"), ("checkpoint", "now", "RUN", "--wait", 0),
    ("diff", "RUN", "RUNS/epochs"), ("export", "RUN", "RUNS/out"),
    ("export", "RUN", "RUNS/out", "--merge"), ("generate", "RUN", "w1"), ("chat", "RUN"),
    ("eval", "RUN"), ("average", "RUN", "RUNS/out"),
)  # fmt: skip
_TRAIN: Command = ("train", "--config", "RUNS/mine.yaml")
_FOLLOWING: tuple[Command, ...] = (("logs", "RUN"), ("watch", "RUN"))


def _through(name: str) -> tuple[Command, ...]:
    # Without a plan it is no run to these.
    return (_TRAIN, *ON_A_RUN, *(() if name == "plan.json" else _FOLLOWING))


LINKS = {f"{name} is a link": Hostile(_link(name), _through(name)) for name in (*DIRECTORIES, *FILES, *INNER)}
LISTED = {
    f"a run in which {name} is a link": Hostile(
        _link(name), (("runs", "RUNS"), ("runs", "RUNS", "--json")), shows="epochs"
    )
    for name in (*DIRECTORIES, *(name for name in FILES if name != "plan.json"), *INNER)
}
"""What a command over many runs says of a bad one among them."""

# ---- places ----

READERS: tuple[Command, ...] = (
    ("eval", "RUN"), ("step", "RUN", 1), ("audit", "RUN"), ("data", "preview", "--config", "RUN/config.yaml"),
    ("data", "stats", "--config", "RUN/config.yaml"), ("fork", "RUN", "--at", 6, "--print"),
)  # fmt: skip
"""Commands that go by the config of a run."""
OPENERS: tuple[Command, ...] = (
    ("export", "RUN", "out"), ("average", "RUN", "out"), ("generate", "RUN", "w1"), ("chat", "RUN"),
    ("checkpoint", "list", "RUN"), ("checkpoint", "verify", "RUN"),
)  # fmt: skip
"""And those that look for its checkpoints."""
URL = "http://127.0.0.1:9"
"""Where nobody answers: what is asked there fails, and is seen."""


def without_places(run: Path) -> None:
    """A run that names no place outside of it."""
    shutil.copy(run.parents[1] / "data" / "texts.jsonl", run / "texts.jsonl")
    change(run, ("data", "train", 0, "path"), to="runs/steps/texts.jsonl")
    change(run, ("model", "tokenizer"), to="owner/name")


def change(run: Path, keys: tuple[str | int, ...], to: Any) -> None:
    """Another value in the run's own config."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    inner = tree
    for key in keys[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
    inner[keys[-1]] = to
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


NAMED: dict[str, tuple[tuple[str | int, ...], Callable[[Path, str], Any]]] = {
    "data.train.path": (("data", "train", 0, "path"), lambda there, url: f"{url}/rows.jsonl"),
    "data.eval.hub": (("data", "eval"), lambda there, url: [{"hub": str(there)}]),
    "data.eval.path": (("data", "eval"), lambda there, url: [{"path": f"{there}/*.jsonl"}]),
    "eval.tasks.path": (
        ("eval",),
        lambda there, url: {"tasks": [{"type": "exact", "name": "x", "path": str(there / "q.jsonl")}]},
    ),
    "data.cache.path": (("data", "cache", "path"), lambda there, url: str(there / "cache")),
    "data.chat_template": (("data", "chat_template"), lambda there, url: str(there / "template.jinja")),
    "model.path": (("model",), lambda there, url: {"path": str(there / "model")}),
    "model.tokenizer": (("model", "tokenizer"), lambda there, url: "../tokenizer"),
    "checkpoint.storage": (("checkpoint", "storage"), lambda there, url: url),
    "tracking.mlflow.uri": (("tracking", "mlflow"), lambda there, url: {"enabled": True, "uri": url}),
    "method.adapter": (("method",), lambda there, url: {"type": "lora", "adapter": "~/adapter"}),
}  # fmt: skip
"""Fields of a config that name places: where they are, and what a stranger writes there."""
FROM_A_STORE, PASSWORD = "s3://bucket/rows.jsonl", "http://a:b@127.0.0.1:9/x"


def _names(field: str, keys: tuple[str | int, ...], value: Callable[[Path, str], Any]) -> Callable[[Path], str]:
    def make(run: Path) -> str:
        without_places(run)
        there = run.parents[2] / "there"
        named = value(there, URL)
        change(run, keys, to=named)
        return "must not hold credentials" if named == PASSWORD else f"{field}="

    return make


def _checkpoints_at(place: str) -> Callable[[Path], str]:
    def make(run: Path) -> str:
        without_places(run)
        named = place.replace("THERE", str(run.parents[2] / "there"))
        if named.startswith("/"):
            shutil.copytree(run / "checkpoints", named)
        (run / "checkpoints_at").write_text(named)
        return f"checkpoints_at={named}"

    return make


def other_base(run: Path) -> str:
    """A checkpoint that says it is beside a base elsewhere."""
    without_places(run)
    state, base = run / CHECKPOINT / "state.json", str(run.parents[2] / "there")
    values = json.loads(state.read_text())
    state.write_text(json.dumps({**values, "base": {"path": base, "revision": None, "files": {}, "added": {}}}))
    forgeries.with_hashes(state.parent)
    return f"base={base}"


_PLACED: dict[str, tuple[tuple[str | int, ...], Callable[[Path, str], Any]]] = {
    **{f"{field} elsewhere": each for field, each in NAMED.items()},
    "data.train.path of the system": (("data", "train", 0, "path"), lambda there, url: "/etc/passwd"),
    "data.train.path of a device": (("data", "train", 0, "path"), lambda there, url: "/dev/zero"),
    "data.train.path above": (("data", "train", 0, "path"), lambda there, url: "runs/steps/../../../there/rows.jsonl"),
    "data.train.path in a store": (("data", "train", 0, "path"), lambda there, url: FROM_A_STORE),
    "data.train.path of another file system": (
        ("data", "train", 0, "path"), lambda there, url: f"file://{there}/rows.jsonl"
    ),
    "data.train.path with a password": (("data", "train", 0, "path"), lambda there, url: PASSWORD),
    "data.train.path of two lines": (("data", "train", 0, "path"), lambda there, url: f"{there}/\n\x1b[31m\u202e"),
    "model.path of a home": (("model",), lambda there, url: {"path": "~/.ssh"}),
    "checkpoint.storage of the system": (("checkpoint", "storage"), lambda there, url: "/etc"),
    "data.cache.path of a store": (("data", "cache", "path"), lambda there, url: "s3://bucket/cache"),
}  # fmt: skip
PLACES = {
    f"a config names {name}": Hostile(_names(name.split(" ")[0], *each), READERS) for name, each in _PLACED.items()
} | {
    "checkpoints in a directory elsewhere": Hostile(_checkpoints_at("THERE"), (*READERS[:3], *OPENERS)),
    "checkpoints at an address": Hostile(_checkpoints_at(f"{URL}/checkpoints"), (*READERS[:3], *OPENERS)),
    "checkpoints in a store": Hostile(_checkpoints_at("s3://bucket/run/checkpoints"), (*READERS[:3], *OPENERS)),
    "a base elsewhere": Hostile(other_base, (*OPENERS[:4], ("eval", "RUN"), ("export", f"RUN/{CHECKPOINT}", "out"))),
}

# ---- names ----

STEERING = {
    "bidi": "st\u202eeps\u2066", "a title": "st\x1b]0;owned\x07eps", "a colour of 8 bits": "st\x9b31m",
    "lines": "st\neps\rx",
    "a byte that is no text": "st\udcff\udcfe", "separators": "st\u2028\u2029eps", "a tab and a bell": "st\t\x07",
    "nothing that is seen": "\u200b\u200f\u2062", "an error of ours": "x\nerror: y\n",
}  # fmt: skip
"""Names of run directories that steer a terminal."""


def _called(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        without_places(run)
        os.rename(run, run.parent / name)

    return make


NOT_OURS = [
    "step-00000099.a01", "step-000000099.a1", "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0669\u0669.a1",
    "step-00000099.a\u0661", "step-00000099.a", "step-00000099.a1\n", "step-00000099.a1 ", "Step-00000099.a1",
    "step-99.a1", "step-+0000099.a1", "step-" + "9" * 200 + ".a1",
]  # fmt: skip
"""Names that are nearly those of checkpoints."""


def _beside(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.copytree(run / CHECKPOINT, run / "checkpoints" / name) and None


_NAMED_COMMANDS: tuple[Command, ...] = (
    *ON_A_RUN, *_FOLLOWING, ("runs", "RUNS"), ("runs", "RUNS", "--json"), ("runs", "RUN"), ("convert", "RUN/none.yaml"),
    ("data", "preview", "--config", "RUN/config.yaml"), ("train", "--config", "RUN/none.yaml"),
)  # fmt: skip
NAMES = {
    f"a run whose name has {what}": Hostile(
        _called(name), _NAMED_COMMANDS, codes=(0, 1, 2, 130), lines=(0, 1),
        writes=("RUN", "RUNS/out", "RUNS/epochs/report")
    )
    for what, name in STEERING.items()
} | {
    f"a checkpoint called {ascii(name[:40])}": Hostile(
        _beside(name), (("checkpoint", "list", "RUN"), ("checkpoint", "verify", "RUN")), codes=(0,), lines=(0,),
        shows="step-00000006.a1",
    )
    for name in NOT_OURS
}  # fmt: skip

# ---- forged files ----

_OUT = ("RUNS/out",)
_OF_CHECKPOINTS: tuple[Command, ...] = (
    ("export", "RUN", "RUNS/out"), ("export", f"RUN/{CHECKPOINT}", "RUNS/out"), ("generate", "RUN", "w1"),
)  # fmt: skip
_VERIFY: Command = ("checkpoint", "verify", "RUN")
_OF_CONFIGS: tuple[Command, ...] = (
    *READERS, ("train", "--config", "RUN/config.yaml"), ("plan", "--config", "RUN/config.yaml"),
    ("convert", "RUN/config.yaml"),
)  # fmt: skip
_OF_RECORDS: tuple[Command, ...] = (
    ("report", "RUN"), ("report", "RUNS/epochs", "RUN"), ("runs", "RUNS"), ("diff", "RUN", "RUNS/epochs"),
    ("checkpoint", "list", "RUN"),
)  # fmt: skip


def _forged(forge: forgeries.Forge, *, ours: bool = True) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        if ours:
            without_places(run)
        forge(run)

    return make


CHECKPOINTS = {
    name: Hostile(_forged(forge), _OF_CHECKPOINTS if fit else (_VERIFY, *_OF_CHECKPOINTS), writes=_OUT)
    for fit, tables in (
        (True, (forgeries.INDEX, forgeries.STATE, forgeries.FILES)), (False, (forgeries.MANIFEST,)),
    )
    for table in tables
    for name, forge in forgeries.inside(CHECKPOINT, table, fit=fit).items()
}  # fmt: skip
CONFIGS = {name: Hostile(_forged(forge, ours=False), _OF_CONFIGS) for name, forge in forgeries.CONFIGS.items()}
FEW_CONFIGS = {name: replace(hostile, commands=_OF_CONFIGS[-1:]) for name, hostile in CONFIGS.items()}
_PIPES = {name: forge for name, forge in forgeries.RECORD.items() if name.startswith(("the events", "the metrics"))}
RECORDS = {
    name: Hostile(
        _forged(forge), _OF_RECORDS, codes=(0, 1, 2) if name in _PIPES else (0, 1), lines=(0, 1),
        writes=("RUN/report", "RUNS/epochs/report"),
    )
    for name, forge in {**forgeries.EVENTS, **forgeries.HOLES, **forgeries.CONFIGS, **_PIPES}.items()
}  # fmt: skip
FEW_RECORDS = {
    name: hostile
    for name, hostile in RECORDS.items()
    if name in (*_PIPES, "metrics that are 20 GB long", "an event of many values", "a config of merges")
}
BESIDES = {
    name: Hostile(_forged(forge), (("generate", "RUN", "w1"),)) for name, forge in forgeries.MODEL_OF_RUN.items()
} | {
    name: Hostile(_forged(forge), (("checkpoint", "list", "RUN"), _VERIFY, *_OF_CHECKPOINTS[::2], ("eval", "RUN")))
    for name, forge in forgeries.RECORD.items()
    if name not in _PIPES
}

HOSTILE: dict[str, dict[str, Hostile]] = {
    "links": LINKS, "listed": LISTED, "places": PLACES, "names": NAMES, "checkpoints": CHECKPOINTS, "configs": CONFIGS,
    "few configs": FEW_CONFIGS, "records": RECORDS, "few records": FEW_RECORDS, "besides": BESIDES,
}  # fmt: skip


# ---- commands on them ----


def project(sandbox: Path) -> Path:
    """A good run beside another, in a directory with all that it needs, and a user who has never trained anything."""
    shutil.copytree(OLDER, sandbox / "project", ignore=shutil.ignore_patterns("cache", "bucket", "objects", "*.py"))
    for name in ("home/.config", "home/.cache", "temporary"):
        (sandbox / name).mkdir(parents=True)
    os.environ |= {"HOME": str(sandbox / "home"), "TMPDIR": str(sandbox / "temporary")} | {
        f"XDG_{kind.upper()}_HOME": str(sandbox / "home" / f".{kind}") for kind in ("config", "cache")
    }
    tempfile.tempdir = str(sandbox / "temporary")
    os.chdir(sandbox / "project")
    run = sandbox / "project" / "runs" / "steps"
    shutil.copy(run / "config.yaml", run.parent / "mine.yaml")
    return run


def endings(
    kind: str, sandbox: Path, names: Iterable[str], each: int | None = None
) -> dict[str, tuple[Ending, list[str]]]:
    """On a process of its own: make the hostile runs, one after the other, and call all commands on them, or `each` on
    one and the next ones on the next. Returns how each has ended, and what is wrong with that."""
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    found = {}
    for number, name in enumerate(names):
        hostile, place = HOSTILE[kind][name], sandbox / str(number)
        run = project(place)
        says = hostile.make(run)
        if not run.exists():  # it has another name now
            (run,) = (each for each in run.parent.iterdir() if each.is_dir() and each.name != "epochs")
        outside = [each for each in (place / "elsewhere", place / "there") if each.exists()]
        with opening(*outside) as opened:
            before = snapshot(place)
            for command in _some_of(hostile.commands, number, each):
                opened()
                ending, before = ending_of(in_place(command, run), place, before, opened)
                found[f"{name}: {' '.join(map(str, command))}"] = (
                    ending,
                    wrong_with(ending, command, hostile, says, run),
                )
        os.chdir(sandbox)
        shutil.rmtree(place)
    return found


def _some_of(commands: Sequence[Command], number: int, each: int | None) -> Sequence[Command]:
    if each is None or each >= len(commands):
        return commands
    return [commands[(number * each + place) % len(commands)] for place in range(each)]


def in_place(command: Command, run: Path) -> list[str]:
    return [str(each).replace("RUNS", str(run.parent)).replace("RUN", str(run)) for each in command]


def ending_of(
    arguments: list[str], sandbox: Path, before: dict[str, str], opened: Callable[[], list[str]]
) -> tuple[Ending, dict[str, str]]:
    """How a command ends, and what it does outside of the project's directory, or changes anywhere; and what is there
    then."""
    from raytune_fsdp.cli.main import main

    with touching([sandbox / name for name in ("project", "home", "temporary")]) as touched:
        ending = measured(lambda: main(arguments))
    seen, after = opened(), snapshot(sandbox)
    # What is made among temporary files and removed again is nobody's.
    changed = [each for each in changes(before, after) if each != str(sandbox / "temporary")]
    return replace(ending, touched=touched + seen, changed=changed), after


def wrong_with(ending: Ending, command: Command, hostile: Hostile, says: str | None, run: Path) -> list[str]:
    # The user's own cache, and of `train` the lock, which it has had for a moment.
    writes = [f"{run.parents[2]}/home/.cache", *in_place(hostile.writes, run)]
    beside = {str(Path(each).parent) for each in writes} | ({str(run)} if command[0] == "train" else set())
    changed = [each for each in ending.changed if each not in beside and not each.startswith(tuple(writes))]
    wrong = replace(ending, changed=changed).problems(hostile.codes, hostile.lines)
    if says is not None and not any(says in line for line in ending.said):
        wrong.append(f"{says!r} is not said")
    if hostile.shows and hostile.shows not in ending.printed:
        wrong.append(f"{hostile.shows!r} is not shown")
    return wrong


def check_all(kind: str, sandbox: Path, names: Iterable[str] | None = None, each: int | None = None) -> int:
    """Every command on every run of this kind ends as it should; with `each`, so many on each run, so that each command
    meets some runs. Returns how many commands that were."""
    chosen = list(HOSTILE[kind] if names is None else names)
    (found,) = run_ranks(endings, 1, kind, sandbox, chosen, each, seconds=570)
    wrong = [f"{name}: {', '.join(problems)}\n    {ending}" for name, (ending, problems) in found.items() if problems]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(found)}:", *wrong])
    return len(found)
