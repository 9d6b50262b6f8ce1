"""`raytune-fsdp plan --serve`: serve the planner as a page on this machine, until Ctrl-C."""

from __future__ import annotations

import webbrowser
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import ConfigParser
from raytune_fsdp.cli.plan_on_gpus import PER_NODE
from raytune_fsdp.predict.devices import find_device, link_speed

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.plan.counts import Census
    from raytune_fsdp.predict.page.document import PlanServer


def add_flags(parser: ConfigParser) -> None:
    parser.add_argument("--serve", action="store_true", help="with --gpu: as a page with sliders, on this machine")
    parser.add_argument("--port", type=int, metavar="N", help="with --serve: its port (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="with --serve: print its address, and open nothing")


def serve_plan(found: Namespace, config: FinetuneConfig, census: Census | None, world: int) -> int:
    """Serve the page until somebody stops it."""
    with server_of(found, config, census, world) as server:
        print(f"the plan is at {server.url}\nCtrl-C ends it", flush=True)
        if not found.no_browser:
            with suppress(webbrowser.Error):  # there is none
                browser = webbrowser.get()
                # One that has a window: a text browser would take over this terminal.
                if not isinstance(browser, webbrowser.GenericBrowser) or isinstance(
                    browser, webbrowser.BackgroundBrowser
                ):
                    browser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # the intended end
            print()
    return 0


def server_of(found: Namespace, config: FinetuneConfig, census: Census | None, world: int) -> PlanServer:
    """Return the server, which listens already."""
    # Before torch is imported, so that mistakes are reported at once.
    device = find_device(found.gpu)
    between = link_speed(found.network) if found.network else None
    from raytune_fsdp.predict.page.document import PlanServer, live_page
    from raytune_fsdp.predict.page.points import Points, offered, start_of

    per_node = found.gpus_per_node or PER_NODE
    start = start_of(config, device.name, world)
    among = offered(start, per_node)
    points = Points(config, census=census, per_node=per_node, between=between, architecture=found.architecture)
    speed = f"{found.network} to the others" if found.network else "the same speed to the others as inside"
    page = live_page(
        printable(config.model.path or config.run.name), start, among, price=found.price,
        notes=[f"{printable(config.run.name)}: what is not chosen here is as in the config. Machines have "
               f"{per_node} GPUs, and {speed}."],
    )  # fmt: skip
    return PlanServer(found.port or 0, page, points, start, among)


def check(parser: ConfigParser, found: Namespace) -> None:
    if not found.serve:
        given = {"--port": found.port is not None, "--no-browser": found.no_browser}
        parser.refuse_given(given, "is for a page: give --serve, too")
        return
    if found.gpu is None:
        parser.error("--serve needs a device to begin with: --gpu A100-80GB")
    if found.gpu.endswith(".json"):
        parser.error(
            f"--serve --gpu {found.gpu}: the page has devices of the table only: name one, or leave --serve out"
        )
    others = {
        "--json": found.json, "--units": found.units, "--alternatives": found.alternatives,
        "--storage": found.storage is not None,
    }  # fmt: skip
    parser.refuse_given(others, "prints, --serve shows a page: give one of the two")
    if found.port is not None and not 0 <= found.port < 1 << 16:
        parser.error(f"--port {found.port} must be 0 (any that is free) to 65535")
