"""A real MLflow server that tests may kill, stop and start again, and what may be between it and its clients."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server:
    """`mlflow server` with its own database and port, in a process group of its own."""

    def __init__(self, directory: Path, *, patience: float = 180) -> None:
        """`patience`: the seconds that it may take to start."""
        self._patience = patience
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
        try:
            until(self._answers, self._patience, f"the server does not start: {place / 'log'}")
        except BaseException:  # nobody has it to end it
            self.kill()
            raise

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


class Proxy:
    """Passes requests on to a server: late, not at all, or only with a password, as it is told."""

    def __init__(self, port: int) -> None:
        self.seconds = 0.0
        """How long every request takes at least."""
        self.fails = False
        """Answers every request with 500."""
        self.wanted: str | None = None
        """The Authorization that a request must have; None: any."""
        self.asked: list[str] = []
        """Method and path of every request that was passed on."""
        self._server_port = port
        self._port = 0
        self.open()
        self.uri = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._answer(self)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._listening = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._listening.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._port = self._listening.server_address[1]
        threading.Thread(target=self._listening.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """From now on connections are refused."""
        self._listening.shutdown()
        self._listening.server_close()

    def _answer(self, asked: BaseHTTPRequestHandler) -> None:
        time.sleep(self.seconds)
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        status, answer, kind = 500, b"broken", "text/plain"
        if self.wanted is not None and asked.headers.get("Authorization") != self.wanted:
            status, answer = 401, b"who are you?"
        elif not self.fails:
            connection = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=60)
            connection.request(asked.command, asked.path, body, dict(asked.headers))
            found = connection.getresponse()  # a server that is gone gives no answer: this raises
            status, answer, kind = found.status, found.read(), found.getheader("Content-Type") or kind
            self.asked.append(f"{asked.command} {asked.path}")
        asked.send_response(status)
        asked.send_header("Content-Type", kind)
        asked.send_header("Content-Length", str(len(answer)))
        asked.end_headers()
        asked.wfile.write(answer)


def until(condition: Callable[[], bool], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)


def whole(runs: Iterable[Any]) -> list[Any]:
    """Those of MLflow's runs that are not an attempt's."""
    return [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
