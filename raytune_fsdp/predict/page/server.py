"""The page at an address of this machine. A stranger may ask, from another program or through a browser: every request
is checked, none changes anything, and none is answered to another site."""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from raytune_fsdp.base.errors import ConfigError, UserError
from raytune_fsdp.predict.page.choices import Chosen, Offered, read_choice
from raytune_fsdp.predict.page.points import Points

LOCAL = "127.0.0.1"

_WAITING = 8
"""Requests that are computed or wait for it: the page has one at a time."""

_MOST_FIELDS = 16
_IDLE_SECONDS = 30


class PlanServer(ThreadingHTTPServer):
    """Threads, as browsers open connections that they do not use; what is computed is computed one at a time."""

    daemon_threads = True

    def __init__(self, port: int, page: str, points: Points, start: Chosen, among: Offered) -> None:
        self.points = points  # first: what cannot listen is closed again
        try:
            super().__init__((LOCAL, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--port {port} cannot be listened on ({reason}): give another, or 0 for any") from None
        self.page = page.encode()
        self.start, self.among = start, among
        self.room = BoundedSemaphore(_WAITING)
        own = self.server_address[1]
        self.hosts = {f"{name}:{own}" for name in (LOCAL, "localhost")}
        if own == 80:
            self.hosts |= {LOCAL, "localhost"}

    def server_close(self) -> None:
        super().server_close()
        self.points.end()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a page leaves as soon as something else is chosen
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{LOCAL}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: PlanServer
    server_version, sys_version = "raytune-fsdp", ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        # Another site's name may lead here (DNS rebinding); its pages then could read what is answered.
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN, f"this is {self.server.url}: ask for it by this address")
        place = urlsplit(self.path)
        if place.path == "/":
            return self._send(HTTPStatus.OK, "text/html", self.server.page)
        if place.path != "/point":
            return self._refuse(HTTPStatus.NOT_FOUND, "there are / and /point")
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return self._refuse(HTTPStatus.FORBIDDEN, "another site's page asks")
        return self._point(place.query)

    def _point(self, query: str) -> None:
        try:
            asked = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=_MOST_FIELDS)
            choice = read_choice(asked, self.server.start, self.server.among)
        except ConfigError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST, "this is no query: write it as ?gpus=8&method=lora")
        if not self.server.room.acquire(blocking=False):
            return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many ask at the same time: wait, and ask again")
        try:
            answer: dict[str, Any] = self.server.points.of(choice)
        finally:
            self.server.room.release()
        return self._send(HTTPStatus.OK, "application/json", json.dumps(answer).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself: another method than GET, a broken request."""
        unsupported = code == HTTPStatus.NOT_IMPLEMENTED
        self._refuse(
            HTTPStatus.METHOD_NOT_ALLOWED if unsupported else HTTPStatus(code),
            "only GET is answered" if unsupported else "this request cannot be read",
        )

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain", f"{why}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the page's own is in its head
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address."""
