"""The metadata services of three clouds, as far as notices of an end go: their paths, headers and answers.

AWS: version 2, which asks for a token that was PUT first. Google: `preempted`. Azure: scheduled events, of a group of
machines, beside the name of this one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "AQAEAL"
NAME = "worker-7"


class Service(BaseHTTPRequestHandler):
    server: Server

    def do_PUT(self) -> None:
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        good = self.path == "/latest/api/token" and lifetime.isdecimal() and 1 <= int(lifetime) <= 21_600
        self._answer(200 if good else 400, TOKEN)

    def do_GET(self) -> None:
        server, path = self.server, self.path
        if server.nonsense:
            self.close_connection = True
            self.wfile.write(server.nonsense.pop(0))
            return None
        if path.startswith("/latest/"):
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                return self._answer(401)
            if path != "/latest/meta-data/spot/instance-action" or server.end is None:
                return self._answer(404)
            return self._answer(200, json.dumps({"action": "terminate", "time": f"{server.end:%Y-%m-%dT%H:%M:%SZ}"}))
        if path == "/computeMetadata/v1/instance/preempted":
            good = self.headers.get("Metadata-Flavor") == "Google"
            return self._answer(200 if good else 403, "FALSE" if server.end is None else "TRUE")
        if self.headers.get("Metadata") != "true":
            return self._answer(400)
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return self._answer(200, NAME)
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            end = None if server.end is None else format_datetime(server.end, usegmt=True)
            reboot = {"EventId": "1", "EventType": "Reboot", "Resources": [NAME], "NotBefore": ""}
            preempt = {"EventId": "2", "EventType": "Preempt", "Resources": server.machines, "NotBefore": end}
            return self._answer(200, json.dumps({"Events": [reboot, preempt] if end else [reboot]}))
        return self._answer(404)

    def _answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    nonsense: list[bytes]
    """What it answers before anything else, byte by byte."""
    end: datetime | None = None
    """When the machine will be taken away."""
    machines: tuple[str, ...] = (NAME, "worker-8")
    """Those that Azure will take away."""

    def __init__(self, address: tuple[str, int], service: type[Service]) -> None:
        super().__init__(address, service)
        self.nonsense = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def announce(self, seconds: float) -> None:
        self.end = datetime.now(UTC) + timedelta(seconds=seconds)


@contextmanager
def serving() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
