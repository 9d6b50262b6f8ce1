"""A real MLflow server that tests may kill, stop and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Server:
    """`mlflow server` with its own database and port, in a process group of its own."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self.start()

    def start(self) -> None:
        place = self._directory
        place.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{place}/server.db", "--artifacts-destination", str(place / "a")]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--workers", "1"], stdout=log, stderr=log, cwd=place, env=environment, start_new_session=True
            )
        until(self._answers, 180, f"the server does not start: {place / 'log'}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def lives(self) -> bool:
        return self._process.poll() is None

    def send(self, kind: signal.Signals) -> None:
        os.killpg(self._process.pid, kind)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait()


def until(condition: Callable[[], bool], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)


def whole(runs: Iterable[Any]) -> list[Any]:
    """Those of MLflow's runs that are not an attempt's."""
    return [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
