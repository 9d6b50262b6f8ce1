"""The worst files of strangers, read by the commands as a user starts them: time and memory of whole processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forgeries, hostile_runs
from tests.hostile_runs import Command, Hostile, in_place, project
from tests.models import save_checkpoint

pytestmark = pytest.mark.slow

SECONDS, BYTES = 20.0, 1 << 30
"""What a command may take of the processor, with all that it starts; and of memory, above a good file's."""

# The peak of a process begins with that of whoever starts it, which here has imported torch.
_STARTER = """
import json, os, sys
child = os.fork()
if not child:
    os.execv(sys.executable, [sys.executable, "-m", "raytune_fsdp.cli.main", *sys.argv[2:]])
_, status, used = os.wait4(child, 0)
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10], file)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    seconds: float
    peak: int
    out: str
    err: str


def start(arguments: list[str], sandbox: Path) -> Ended:
    measured = sandbox / "measured.json"
    environment = {
        **os.environ, "HOME": str(sandbox / "home"), "TMPDIR": str(sandbox / "temporary"),
        "XDG_CONFIG_HOME": str(sandbox / "home" / ".config"), "XDG_CACHE_HOME": str(sandbox / "home" / ".cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _STARTER, str(measured), *arguments], cwd=sandbox / "project", env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace", timeout=200, check=False,
    )  # fmt: skip
    return Ended(*json.loads(measured.read_text()), done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[Path], object]
    """Of a run's directory, or of a model's if the command names one."""
    command: Command
    code: int = 2
    shows: str = ""
    said_before: int = 0
    """Lines before that of the error: what of a tokenizer's config is left out is said once."""


def _of(kind: str, name: str) -> Callable[[Path], object]:
    hostile: Hostile = hostile_runs.HOSTILE[kind][name]
    return hostile.make


def _device_as_vocabulary(model: Path) -> None:
    """A tokenizer without its file, whose config names one."""
    (model / "tokenizer.json").unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "vocab": "/dev/zero", "vocab_file": "/dev/zero"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


_ASK: Command = ("generate", "MODEL", "w1")
_EXPORT: Command = ("export", "RUN", "RUNS/out")
CASES = {
    "a file of tensors of 8 TB": Case(_of("checkpoints", "a file of tensors of 8 TB"), ("checkpoint", "verify", "RUN")),
    "an index in deep maps": Case(_of("checkpoints", "tensors.json is deep maps"), _EXPORT),
    "a state of many values": Case(_of("checkpoints", "state.json is many values"), _EXPORT),
    "a state that is a pipe": Case(_of("checkpoints", "state.json is a pipe"), _EXPORT),
    "metrics of 20 GB": Case(_of("records", "metrics that are 20 GB long"), ("report", "RUN"), 0, "index.html"),
    "metrics of 20 GB with lines": Case(_of("records", "metrics of 20 GB with lines"), ("runs", "RUNS"), 0, "epochs"),
    "merges to convert": Case(_of("configs", "a config of merges"), ("convert", "RUN/config.yaml")),
    "merges of a run": Case(_of("configs", "a config of merges"), ("eval", "RUN")),
    "a deep config": Case(_of("configs", "a deep config.yaml"), ("step", "RUN", 1)),
    "a config of 20 GB": Case(_of("configs", "a config of 20 GB"), ("train", "--config", "RUN/config.yaml")),
    "a place that is a pipe": Case(_of("besides", "the place is a pipe"), ("checkpoint", "list", "RUN")),
    "a report elsewhere": Case(_of("links", "report is a link"), ("report", "RUN")),
    "checkpoints elsewhere": Case(_of("links", "checkpoints is a link"), ("train", "--config", "RUNS/mine.yaml")),
    "a link among runs": Case(_of("listed", "a run in which model is a link"), ("runs", "RUNS"), shows="epochs"),
    "data at an address": Case(_of("places", "a config names data.train.path elsewhere"), ("eval", "RUN")),
    "data that is a device": Case(_of("places", "a config names data.train.path of a device"), ("step", "RUN", 1)),
    "a base elsewhere": Case(_of("places", "a base elsewhere"), _EXPORT),
    "a name that steers a terminal": Case(_of("names", "a run whose name has lines"), ("step", "RUN", 1)),
    "ten million layers": Case(forgeries.CONFIG["ten million layers"], _ASK),
    "a config that is a pipe": Case(forgeries.CONFIG["the config is a pipe"], _ASK),
    "a header of 900,000 tensors": Case(forgeries.WEIGHTS["weights of 900,000 tensors"], _ASK),
    "a vocabulary that is a device": Case(_device_as_vocabulary, _ASK, said_before=1),
    "a tokenizer of 1 GB": Case(forgeries.TOKENIZER["a tokenizer of 1 GB"], _ASK),
    **{name: Case(forgeries.TOO_MUCH[name], _ASK) for name in forgeries.TOO_MUCH},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "model"
    save_checkpoint(directory, "llama", tokenizer=True, vocab_size=1024, max_shard_size="200KB")
    return directory


def ended(case: Case | None, command: Command, sandbox: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """What comes of a command on a good or a bad run or model."""
    for name in ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, str(sandbox)))  # project() sets them, for its own process
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    sandbox.mkdir()
    monkeypatch.chdir(sandbox)
    run = project(sandbox)
    copy = Path(shutil.copytree(model, sandbox / "project" / "model"))
    if case is not None:
        case.make(copy if "MODEL" in command else run)
    if not run.exists():
        (run,) = (each for each in run.parent.iterdir() if each.is_dir() and each.name != "epochs")
    arguments = [str(each).replace("MODEL", str(copy)) for each in in_place(command, run)]
    return start(arguments, sandbox)


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    return {}


@pytest.mark.parametrize("name", CASES)
def test_a_command_ends_in_one_line_and_in_bounds(
    name: str, tmp_path: Path, model: Path, peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    kind = str(case.command[0])
    if kind not in peaks:
        # A good config would be trained.
        command = ("plan", *case.command[1:]) if kind == "train" else case.command
        good = ended(None, command, tmp_path / "good", model, monkeypatch)
        peaks[kind] = good.peak
    found = ended(case, case.command, tmp_path / "bad", model, monkeypatch)
    lines = found.err.splitlines()
    assert (found.code, len(lines)) == (case.code, case.said_before + int(case.code != 0)), found
    assert all(line.isprintable() for line in [*lines, *found.out.splitlines()]) and case.shows in found.out, found
    assert found.seconds <= SECONDS and found.peak - peaks[kind] <= BYTES, found
    print(f"{name}: {found.seconds:.1f} s, {found.peak >> 20} MB, {(found.peak - peaks[kind]) >> 20} MB above the base")
