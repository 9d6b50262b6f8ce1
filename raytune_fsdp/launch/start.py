"""Which way a run is launched."""

from __future__ import annotations

from importlib.util import find_spec

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.launch import local
from raytune_fsdp.prepare import Prepared
from raytune_fsdp.types import Progress


def run(config: FinetuneConfig, progress: Progress | None = None) -> Prepared:
    """Prepare and train, by `cluster.launch`. Returns when the run is complete; raises what stopped it."""
    launch = config.cluster.launch
    if launch == "auto":
        launch = "local" if local.under_torchrun() or find_spec("ray") is None else "ray"
    if launch == "local":
        return local.run(config, progress)
    if local.under_torchrun():
        raise ConfigError("cluster.launch=ray under torchrun: each would start the ranks; use one of them")
    if find_spec("ray") is None:
        raise ConfigError(
            "cluster.launch=ray, but Ray is not installed: pip install 'ray[data,train]', or set it to local"
        )
    from raytune_fsdp.launch import ray_train

    return ray_train.run(config, progress)
