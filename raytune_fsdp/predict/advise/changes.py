"""Change a few fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.text import put_at


def with_changes(config: FinetuneConfig, changes: Mapping[str, Any]) -> FinetuneConfig:
    """Return the config with these values, by the paths of their fields (`train.micro_batch`) or sections (`method`).

    Raise ValidationError if they do not go together. A field that is not named stays unwritten if it was: one GPU alone
    may then do better than full_shard.
    """
    values = config.model_dump(exclude_unset=True)
    for path, value in changes.items():
        put_at(values, path, value if "." in path else dict(value))
    parallel = values.get("parallel", {})
    if changes.get("parallel.strategy", "hybrid_shard") != "hybrid_shard":
        parallel.pop("shard_size", None)
    if "parallel.strategy" in changes:
        for axis in ("shard", "replicate"):  # they follow from the strategy
            parallel.get("mesh", {}).pop(axis, None)
    if changes.get("parallel.activation_checkpointing", "every_n") != "every_n":
        parallel.pop("recompute_every", None)
    return FinetuneConfig.model_validate(values)
