"""Jobs as a user starts them, for tests that watch and disturb them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.ray.nodes.spot import ENDPOINT
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.config_text import dump_config
from tests.mlflow_server import whole
from tests.ray.nodes import with_forks
from tests.runs import GPT2, make_config

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
DROPOUT = {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 30}
TEMPORARY = Path(tempfile.mkdtemp(prefix="t-"))
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)


def config_of(directory: Path, **sections: Any) -> FinetuneConfig:
    """Five blocks a step for two ranks: every other step begins on the other rank."""
    return make_config(
        directory,
        DROPOUT,
        **{"train": TRAIN, "parallel": {"precision": "fp32"}, "checkpoint": {"every": 4, "keep_last": 3}, **sections},
    )


def own_code(tree: Path) -> dict[str, str]:
    """The code of a checkout, with faults of its own: what they strike is called something else in each."""
    return {"PYTHONPATH": f"{tree / FAULTS.relative_to(ROOT)}:{tree}"}


KNOWN = """
import json, sys
from pydantic import ValidationError
from raytune_fsdp.config import FinetuneConfig
values = json.load(sys.stdin)
while True:
    try:
        FinetuneConfig.model_validate(values)
        break
    except ValidationError as error:
        for each in error.errors():
            assert each["type"] == "extra_forbidden", each
            *sections, name = each["loc"]
            place = values
            for section in sections:
                place = place[section]
            del place[name]
json.dump(values, sys.stdout)
"""


def known_to(tree: Path, config: FinetuneConfig) -> str:
    """What is set in a config, but for what another checkout does not know; JSON is YAML, too."""
    values = json.dumps(config.model_dump(exclude_unset=True))
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-c", KNOWN], input=values, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True,
        check=True,
    ).stdout  # fmt: skip


STARTED: list[Command] = []
"""What the tests have started; the last of it ends with its test (conftest.py)."""


class Pipe:
    """Between a command's output and a file, and full if somebody wants that."""

    def __init__(self, path: Path) -> None:
        reader, self.end = os.pipe()
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._copy, args=(reader, path), daemon=True).start()

    def _copy(self, reader: int, path: Path) -> None:
        with open(path, "ab", buffering=0) as file:
            while self._flows.wait() and (text := os.read(reader, 4096)):
                file.write(text)

    def block(self, seconds: float) -> None:
        """Nobody reads for so long, and there is no room for another byte."""
        self._flows.clear()
        os.set_blocking(self.end, False)  # of the command's descriptor, too, until it is full
        with contextlib.suppress(BlockingIOError):
            while os.write(self.end, b"\n" * 4096):
                pass
        os.set_blocking(self.end, True)
        time.sleep(seconds)
        self._flows.set()


class Command:
    """`python jobs/finetune.py` in a session of its own, in a directory that is not the ranks'."""

    def __init__(
        self,
        config: FinetuneConfig,
        directory: Path,
        *arguments: str,
        pipe: Pipe | None = None,
        tree: Path = ROOT,
        **environment: str,
    ) -> None:
        """`tree`: the checkout whose code runs."""
        file = directory / "config.yaml"
        file.write_text(dump_config(config) if tree == ROOT else known_to(tree, config))
        self.output = directory / "output.txt"
        self.faults = directory / "faults"
        self.faults.mkdir(exist_ok=True)
        self.run_dir = Path(config.run.storage) / config.run.name
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(tree / "jobs" / "finetune.py"), "--config", str(file), *arguments],
                stdout=output if pipe is None else pipe.end, stderr=subprocess.STDOUT,
                cwd=directory, start_new_session=True,
                env={
                    **os.environ, **own_code(tree), "OMP_NUM_THREADS": "1", "FAULTS": str(self.faults),
                    "RAY_ADDRESS": "local", "TMPDIR": str(TEMPORARY), **environment,
                },
            )  # fmt: skip

        STARTED.append(self)

    def until(self, condition: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"not in {seconds} s:\n{self.output.read_text()}"
            time.sleep(0.05)

    def end(self, seconds: float = 240) -> tuple[int, str]:
        try:
            code = self.process.wait(seconds)
        finally:
            for process in self.all():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return code, self.output.read_text()

    def all(self) -> list[psutil.Process]:
        """This process and all it has started, now, with the workers of its Ray that were forked."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return with_forks([own, *own.children(recursive=True)])
        return []

    def steps(self) -> int:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(read_trajectory(self.run_dir / "metrics.jsonl")[-1]["step"])
        return 0


class Nodes:
    """A cluster whose nodes come and go (nodes.py)."""

    def __init__(self, directory: Path, *, head_cpus: int, tree: Path = ROOT, **environment: str) -> None:
        self._temporary = tempfile.mkdtemp(prefix="ray-")
        (directory / "nodes").mkdir()
        with open(directory / "nodes.txt", "w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("nodes.py")), str(directory / "nodes"), str(head_cpus)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                env={
                    **os.environ, **own_code(tree), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self._temporary,
                    "FAULTS": str(directory / "faults"), "OMP_NUM_THREADS": "1",
                    ENDPOINT: "none",  # as on the nodes that are added: else no fork would be what they ask for
                    **environment,
                },
            )  # fmt: skip
        self.address = self._read()

    def __enter__(self) -> Nodes:
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def logs(self) -> Path:
        """Of Ray, of all nodes."""
        return Path(self._temporary) / "ray" / "session_latest" / "logs"

    @property
    def head(self) -> psutil.Process:
        """The process that everything else depends on."""
        processes = psutil.Process(self.pid).children(recursive=True)
        return next(each for each in processes if each.name() == "gcs_server")

    def add(self, name: str, cpus: int = 1, gpus: int = 1, metadata: str = "none", ranks: int = 0) -> str:
        """`metadata`: the address of its metadata service. Returns Ray's name of the node."""
        self.set(ENDPOINT, metadata)
        return self._do(f"add {name} {cpus} {gpus} {ranks}")

    def remove(self, name: str) -> None:
        self._do(f"remove {name}")

    def kill(self, name: str) -> None:
        """All processes of the node, at once."""
        self._do(f"kill {name}")

    def drain(self, name: str, seconds: float) -> None:
        self._do(f"drain {name} {seconds}")

    def set(self, variable: str, value: str) -> None:
        """For the nodes that are added from now on."""
        self._do(f"set {variable} {value}")

    def _do(self, line: str) -> str:
        """Returns what follows the line in the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        done = self._read()
        assert done.startswith(line), f"{line}: {done}"
        return done.removeprefix(line).strip()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_events(run_dir / "events.jsonl") if line["event"] == name]


def mlflow_runs(storage: Path) -> list[tuple[str, str]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    return [(run.info.run_id, run.info.status) for run in whole(client.search_runs([experiment.experiment_id]))]
