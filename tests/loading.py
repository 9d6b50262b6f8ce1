"""Build, shard and fill a network on this rank, the way `assemble` does, for tests that look at the result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raytune_fsdp.config import ModelConfig, ParallelConfig
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.network import build_base, fit_vocabulary, load_architecture
from raytune_fsdp.model.weights.keys import check_shapes, grown_rows, match_keys
from raytune_fsdp.model.weights.source import GrownWeights, RandomWeights, Weights
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.run.starting_weights import StartingWeights
from raytune_fsdp.step.parallel import Unit, make_mesh, shard, sharding_units

CPU = torch.device("cpu")

FULL: Mapping[str, Any] = {}
"""Fields of ParallelConfig for the default strategy."""


def mesh(parallel: ParallelConfig) -> DeviceMesh:
    """The mesh that the plan would choose for all ranks there are. Collective."""
    world = dist.get_world_size()
    size = {"hybrid_shard": parallel.shard_size, "replicate": 1}.get(parallel.strategy) or world
    return _mesh(dist.group.WORLD, world, size)


@lru_cache(4)
def _mesh(group: object, world: int, size: int) -> DeviceMesh:
    """Made once in a process group: its groups take longer to set up than a tiny network takes to load."""
    layout = Layout(world=world, data_ranks=world, replicas=world // size, shard_size=size)
    return make_mesh(layout, CPU)


def load(
    directory: Path,
    mode: str,
    *,
    parallel: Mapping[str, Any] = FULL,
    vocabulary: int | None = None,
) -> Any:
    """The checkpoint in `directory` as a sharded network on this rank. Collective."""
    config = ModelConfig(path=str(directory))
    spread = ParallelConfig.model_validate({"precision": "fp32", **parallel})
    hf_config = load_architecture(config, directory)
    fit_vocabulary(hf_config, vocabulary or 0, resize=True)
    model = build_base(hf_config, config, spread.precision)
    weights: Weights | None = None
    if mode == "sharded" or dist.get_rank() == 0:  # in rank0 mode the others cannot have opened anything
        files = find_weights(directory)
        stored = StartingWeights(stored=files, match=match_keys(model, files), grown={}).weights(model)
        weights = GrownWeights(stored, grown_rows(model, stored.shapes()))
        check_shapes(model, weights)
    shard(model, mesh(spread), spread, _units(model, spread))
    fill(model, weights, mode, CPU)
    return model


def draw(architecture: dict[str, Any], seed: int, *, parallel: Mapping[str, Any] = FULL) -> Any:
    """A randomly initialised sharded network on this rank. Collective."""
    config = ModelConfig(init="random", architecture=architecture)
    spread = ParallelConfig.model_validate({"precision": "fp32", **parallel})
    hf_config = load_architecture(config, None)
    model = build_base(hf_config, config, spread.precision)
    weights = RandomWeights(build_base(hf_config, config, spread.precision), seed)
    shard(model, mesh(spread), spread, _units(model, spread))
    fill(model, weights, "sharded", CPU)
    return model


def _units(model: Any, parallel: ParallelConfig) -> list[Unit]:
    head = model.get_output_embeddings()
    return sharding_units(
        model, parallel, ends=head is not None and head.weight is not model.get_input_embeddings().weight
    )


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """The whole state dict, on every rank. Collective."""
    return {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    """The same names, and under each the same bits in the same type."""
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{what} {name}: {found[name].dtype}, not {tensor.dtype}"
        assert torch.equal(found[name], tensor), f"{what} {name} differs"
