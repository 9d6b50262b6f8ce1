"""The page itself: one file that brings all it needs, and asks only its own server for points."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from raytune_fsdp import __version__
from raytune_fsdp.base.errors import ConfigError, UserError
from raytune_fsdp.predict.devices import DEVICES
from raytune_fsdp.predict.page import grid
from raytune_fsdp.predict.page.points import Chosen, Offered, Points, read_choice
from raytune_fsdp.record.report.page import rendered

_HERE = Path(__file__).parent

_CONTROLS = {
    # For each control: its label, and how it looks.
    "model": ("Model", "list"),
    "device": ("GPU", "list"),
    "gpus": ("Number of GPUs", "slider"),
    "method": ("Method", "buttons"),
    "seq_len": ("Tokens a sample", "slider"),
    "micro_batch": ("Samples at a time and GPU", "slider"),
    "global_batch": ("Samples a step, of all GPUs", "slider"),
    "recompute": ("Recomputed in backward", "buttons"),
    "strategy": ("How weights are spread", "list"),
}

_METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}

_ROOFLINE = (
    "Speed is a roofline over the operations of a traced step, of which published runs reach about 70 %: of 54 that "
    "were scored, 50 are within 30 %, and the median is off by 11 %. Samples are full, and of one document each."
)
_MEMORY = (
    "Memory is traced: the code of a run computes a step on tensors without data. What no tensor has, CUDA's context "
    "with libraries and the holes of the allocator, is assumed."
)


def live_page(title: str, start: Chosen, among: Offered, *, price: float | None, notes: Iterable[str]) -> str:
    """Return a page that asks the server it is from."""
    return _page(
        title,
        start={name: getattr(start, name) for name in _CONTROLS if hasattr(start, name)},
        among=among,
        price=price,
        notes=[*notes, _MEMORY, _ROOFLINE],
        connects=True,
    )


def static_page(points: Mapping[str, Any]) -> str:
    """Return a page that has its points inside, by model, method, length, recomputation and number of GPUs."""
    among = {
        "model": list(points),
        "device": grid.ON,
        "gpus": sorted({size for each in points.values() for one in each.values() for size in one["gpus"]}),
        "method": [name for name in _METHODS if any(name in each for each in points.values())],
        "seq_len": grid.LENGTHS,
        "recompute": grid.RECOMPUTE,
    }
    first = next(iter(points))
    return _page(
        "What fine-tuning needs",
        start={
            "model": first,
            "device": "H100",
            "gpus": 8,
            "method": next(iter(points[first])),
            "seq_len": 8192,
            "recompute": "selective",
        },  # fmt: skip
        among=among,
        price=None,
        notes=[
            "For each model, numbers of GPUs around the fewest that are enough. A step has one sample on every GPU; "
            "weights, gradients and the optimizer's state are spread over all of them (parallel.strategy: full_shard), "
            f"adapters have rank 16. Machines have {grid.PER_NODE} GPUs, and {grid.NETWORK} to the others. "
            "raytune-fsdp plan --serve has this page for any config, with batches, strategies and every GPU.",
            _MEMORY,
            _ROOFLINE,
        ],
        connects=False,
        points={
            "grid": points,
            "common": grid.COMMON,
            "of_device": grid.OF_DEVICE,
            "on": grid.ON,
            "lengths": grid.LENGTHS,
            "recompute": grid.RECOMPUTE,
            "tokens": 100_000_000,
        },  # fmt: skip
    )


def _page(
    title: str,
    *,
    start: Mapping[str, Any],
    among: Mapping[str, Sequence[Any]],
    price: float | None,
    notes: Sequence[str],
    connects: bool,
    points: Mapping[str, Any] | None = None,
) -> str:
    controls = [
        {"name": name, "label": label, "kind": kind, "values": list(among[name])}
        for name, (label, kind) in _CONTROLS.items()
        if name in among
    ]
    data = {
        "controls": controls,
        "start": dict(start),
        "price": price,
        "memory": {name: int(DEVICES[name].memory) for name in among["device"]},
        "compared": list(grid.ON),
        "methods": _METHODS,
        "points": points,
    }
    return rendered(
        "page.html.jinja",
        "page.js",
        data,
        _HERE,
        title=title,
        version=__version__,
        controls=controls,
        lasts=points is not None,
        notes=notes,
        connects=connects,
    )


# The page at an address of this machine. A stranger may ask, from another program or through a browser: every request
# is checked, none changes anything, and none is answered to another site.

LOCAL = "127.0.0.1"

_WAITING = 8
"""The most requests that are computed or wait for it: the page has one at a time."""

_MOST_FIELDS = 16
_IDLE_SECONDS = 30


class PlanServer(ThreadingHTTPServer):
    """A server with threads, as browsers open connections that they do not use; points are computed one at a time."""

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
        try:
            asked = parse_qsl(
                place.query, keep_blank_values=True, strict_parsing=bool(place.query), max_num_fields=_MOST_FIELDS
            )
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
        """Answer what http.server refuses by itself: another method than GET, a broken request."""
        unsupported = code == HTTPStatus.NOT_IMPLEMENTED
        self._refuse(
            HTTPStatus.METHOD_NOT_ALLOWED if unsupported else HTTPStatus(code),
            "only GET is answered" if unsupported else "this request cannot be read",
        )

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain", f"{why}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": "frame-ancestors 'none'",  # the page's own is in its head
            **({"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal shows the address."""
