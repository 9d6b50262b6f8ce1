"""Launch a run, on Ray or locally. Imports nothing heavy: obvious mistakes are reported before torch is imported."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import Between
from raytune_fsdp.launch.importing import importing
from raytune_fsdp.launch.phases import Phases
from raytune_fsdp.launch.signals import Signals
from raytune_fsdp.launch.torchrun import under_torchrun, world_of_torchrun
from raytune_fsdp.plan.plan import sizes_of
from raytune_fsdp.run.checks import check_config, check_first

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
        _check_local(config)
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


def _check_local(config: FinetuneConfig) -> None:
    """Refuse what can be refused before torch is imported, which takes seconds, and a minute on a busy machine."""
    if config.export.every is not None:
        raise ConfigError(
            f"export.every={config.export.every}: exports during training are Ray tasks (cluster.launch=ray); "
            "without Ray, leave export.every unset and run `raytune-fsdp export` on a checkpoint when you want one"
        )
    if config.eval.where == "task":
        raise ConfigError(
            "eval.where=task: evaluations during training are Ray tasks, and this run is without Ray "
            "(cluster.launch=local, torchrun); set it to ranks, or cluster.launch=ray"
        )
    if config.tracking.prometheus.enabled:
        raise ConfigError(
            "tracking.prometheus.enabled=true: the numbers are served with Ray's, and this run is without Ray "
            "(cluster.launch=local, torchrun); set it to false, or cluster.launch=ray"
        )
    wanted = config.cluster.workers
    if isinstance(wanted, Between):
        raise ConfigError(
            f"cluster.workers={{min: {wanted.min}, max: {wanted.max}}}: without Ray (cluster.launch=local, torchrun) "
            f"the number of ranks cannot change; set cluster.workers={wanted.max}, or cluster.launch=ray"
        )
    if under_torchrun():
        # Not the storage: if one rank refused it alone, ranks on other nodes would wait for that rank for minutes. All
        # ranks look at it together (local.py).
        check_config(config, world_of_torchrun())
    else:
        check_first(config, None if wanted == "auto" else wanted)
