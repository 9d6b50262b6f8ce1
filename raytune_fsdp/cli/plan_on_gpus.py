"""`raytune-fsdp plan --gpu` and `--search`: predict which GPUs a run fits on, and how fast it is there."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.cli.common import ConfigParser
from raytune_fsdp.predict.devices import Device, device_of, find_device, link_speed, read_calibration

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.plan.plan import Plan
    from raytune_fsdp.predict.search import Offer


PER_NODE = 8


def add_flags(parser: ConfigParser) -> None:
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan memory and time on this device: A100-80GB, H100, ..., or --calibrate's FILE"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="of each machine (default: 8, or as calibrated)")
    parser.add_argument("--network", metavar="SPEED", help="speed between machines: 400Gbps, or 50GB/s (the same)")
    parser.add_argument(
        "--storage", metavar="SPEED",
        help="speed of writing checkpoints, over all ranks: 1.2GB/s (default: as this run has saved before)",
    )  # fmt: skip
    parser.add_argument("--price", type=float, metavar="X", help="with --gpu: price of a GPU for an hour")
    parser.add_argument(
        "--architecture", type=Path, metavar="FILE", help="a config.json, for a model that is neither here nor bundled"
    )
    parser.add_argument(
        "--alternatives", action="store_true", help="with --gpu: other ways on the same GPUs, and half or twice as many"
    )
    parser.add_argument(
        "--search", metavar="LIST", help="the cheapest of these GPUs, with their prices: A100-80GB=1.8,H100=2.9"
    )
    parser.add_argument("--hours", type=float, metavar="H", help="with --search: the run has to end within H hours")


def plan_on_gpus(
    parser: ConfigParser, found: Namespace, config: FinetuneConfig, plan: Plan
) -> tuple[str, dict[str, Any]] | None:
    """Plan the run on the GPUs that are asked for, for people and for programs; None if none are."""
    if found.gpu is None and found.search is None:
        return None
    # Before torch is imported, so that mistakes are reported at once.
    between = link_speed(found.network) if found.network else None
    if found.search is not None:
        return _search(found, config, plan, _offers(parser, found.search), between)
    device = gpu_of(found.gpu)
    speed = link_speed(found.storage) if found.storage else None
    measured = device.measured
    if plan.layout.world > 1:
        _check_links(parser, found.gpu, device)
    per_node = found.gpus_per_node or (PER_NODE if measured is None else measured.ranks)
    from raytune_fsdp.base.machine import free_space
    from raytune_fsdp.base.urls import is_url
    from raytune_fsdp.plan.run_dir import RunDir
    from raytune_fsdp.predict.page.text import as_data, as_page
    from raytune_fsdp.predict.planned import planned
    from raytune_fsdp.predict.prediction import Cluster
    from raytune_fsdp.predict.stopping import Writing, as_recorded
    from raytune_fsdp.record.jsonl import each_event

    writing = None if speed is None else Writing(speed, measured=False)
    if writing is None:
        with suppress(OSError, RaytuneError):  # as this run has saved before, if its record is here
            writing = as_recorded(each_event(RunDir.of(config).events))
    free: int | None = None
    if not is_url(checkpoints := RunDir.of(config).checkpoints):  # an object store does not say
        with suppress(OSError):  # where checkpoints would go may be elsewhere
            free = free_space(Path(checkpoints))
    each = planned(
        config, plan, Cluster(device=device, per_node=per_node, between=between),
        architecture=found.architecture, price=found.price, free=free, writing=writing,
        with_alternatives=found.alternatives,
    )  # fmt: skip
    return as_page(each), {"on_gpus": as_data(each)}


def _check_links(parser: ConfigParser, name: str, device: Device) -> None:
    if device.measured is not None and device.measured.ranks == 1:
        parser.error(
            f"{name} was measured by one rank alone, which says nothing about several: measure again with --calibrate "
            f"{name} --world-size N, N ranks on one machine"
        )


def gpu_of(name: str) -> Device:
    """Return a device of the table, or the one of a machine that was measured."""
    return device_of(read_calibration(Path(name))) if name.endswith(".json") else find_device(name)


def check(parser: ConfigParser, found: Namespace) -> None:
    if found.gpu is not None and found.search is not None:
        parser.error("--gpu plans one kind of GPU, --search finds one of several: give one of the two")
    if found.gpu is not None:
        gpu_of(found.gpu)  # an unknown one is refused before rows are counted
    lacks = {
        "network": found.gpu is None and found.search is None,
        "architecture": found.gpu is None and found.search is None,
        "storage": found.gpu is None,
        "price": found.gpu is None,
        "alternatives": found.gpu is None,
        "hours": found.search is None,
    }
    if found.search is not None:
        given = {f"--{flag}": bool(getattr(found, flag)) for flag in ("price", "alternatives", "storage")}
        parser.refuse_given(given, "is for one kind of GPU (--gpu); --search takes prices as in A100-80GB=1.8")
    for flag, lacking in lacks.items():
        if getattr(found, flag) not in (None, False) and lacking:
            instead = ", in the place of --gpu" if flag == "hours" and found.gpu else ", too"
            way = "--search A100-80GB=1.8,H100=2.9" if flag == "hours" else "--gpu A100-80GB"
            parser.error(f"--{flag} is for a plan on GPUs: name them{instead} ({way})")
    parser.check_least(found, "--gpus-per-node")
    for flag in ("price", "hours"):
        value = getattr(found, flag)
        if value is not None and not 0 <= value < float("inf"):
            parser.error(f"--{flag} {value} must be 0 or more")


def _offers(parser: ConfigParser, text: str) -> list[Offer]:
    from raytune_fsdp.predict.search import Offer

    offers = []
    for each in text.split(","):
        name, given, price = (part.strip() for part in each.partition("="))
        try:
            value = float(price) if given else None
        except ValueError:
            value = -1.0
        if not name or (value is not None and not 0 <= value < float("inf")):
            parser.error(f"--search {text}: write a device and its price by the hour, as in A100-80GB=1.8")
        device = gpu_of(name)
        _check_links(parser, name, device)
        offers.append(Offer(device=device, price=value))
    names = [each.device.name for each in offers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        parser.error(f"--search {text}: {twice} is there twice; give it one price")
    return offers


def _search(
    found: Namespace, config: FinetuneConfig, plan: Plan, offers: list[Offer], between: float | None
) -> tuple[str, dict[str, Any]]:
    from raytune_fsdp.predict.page.text import search_as_data, search_as_page
    from raytune_fsdp.predict.search import search
    from raytune_fsdp.predict.subject import ModelSpec

    subject = ModelSpec.of(config, found.architecture)
    clusters = search(
        subject, config, plan, offers,
        per_node=found.gpus_per_node or PER_NODE, between=between, most_hours=found.hours,
    )  # fmt: skip
    return search_as_page(clusters, found.hours), {"search": search_as_data(clusters)}
