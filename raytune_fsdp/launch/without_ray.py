"""What a run without Ray cannot do. Imports nothing heavy."""

from __future__ import annotations

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import Between
from raytune_fsdp.launch.torchrun import under_torchrun, world_of_torchrun
from raytune_fsdp.run.checks import check_config, check_first


def check_without_ray(config: FinetuneConfig) -> None:
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
    if config.checkpoint.peer_copies:
        raise ConfigError(
            f"checkpoint.peer_copies={config.checkpoint.peer_copies}: Ray keeps them on its nodes, and this run is "
            "without Ray (cluster.launch=local, torchrun); set it to 0, or cluster.launch=ray"
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
