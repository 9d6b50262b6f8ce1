"""Launch a run, on Ray or locally. Imports nothing heavy: obvious mistakes are reported before torch is imported."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.importing import importing
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.launch.torchrun import under_torchrun
from raytune_fsdp.launch.without_ray import check_without_ray
from raytune_fsdp.plan.plan import sizes_of
from raytune_fsdp.run.checks import check_first

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Progress
    from raytune_fsdp.run.resume_point import ResumePoint, RunInputs


def run(
    config: FinetuneConfig,
    progress: Progress | None = None,
    *,
    dry: bool = False,
    force: bool = False,
    trust_places: bool = False,
) -> tuple[RunInputs, ResumePoint]:
    """Prepare and train, following `cluster.launch`. Returns the run and its resume point when it is complete.

    Raises what stopped it. `dry`: save and evaluate nothing. `force`: start even what is known not to fit.
    `trust_places`: as in `prepare`.
    """
    launch = config.cluster.launch
    if launch == "auto":
        launch = "local" if under_torchrun() or find_spec("ray") is None else "ray"
    if launch == "local":
        check_without_ray(config)
        with importing():
            from raytune_fsdp.launch import local

        return local.run(config, progress, dry=dry, force=force, trust_places=trust_places, say=_say)
    if under_torchrun():
        raise ConfigError("cluster.launch=ray under torchrun: both would start the ranks; use only one of them")
    if find_spec("ray") is None:
        raise ConfigError(
            "cluster.launch=ray, but Ray is not installed: pip install 'ray[data,train]', or set it to local"
        )
    sizes = sizes_of(config)
    place = check_first(config, sizes[0])
    phases = Phases()
    with importing():
        from raytune_fsdp.launch.ray.apart import apart_from_ray
        from raytune_fsdp.launch.ray.forked.templates import Templates
        from raytune_fsdp.launch.ray.session import check_not_in_a_copy, connecting

    check_not_in_a_copy(config, place.path)
    with Signals() as signals:
        apart = nullcontext() if dry else apart_from_ray(place.path / "logs")  # a dry run leaves nothing
        templates = Templates(config.cluster, place.path)
        with apart, connecting(config.cluster, sizes[-1], templates) as session:
            with importing():  # while Ray starts, which mostly waits for its processes
                from raytune_fsdp.launch.ray import driver

            found = driver.run_on_ray(
                config, session, signals=signals, phases=phases, progress=progress, say=_say, dry=dry, force=force,
                trust_places=trust_places,
            )  # fmt: skip
        signals.check_export(config.export.at_end)
    return found


def _say(text: str) -> None:
    """Print a line. A closed pipe or a full disk under the output must not end the run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
