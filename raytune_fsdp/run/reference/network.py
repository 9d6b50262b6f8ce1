"""What decides the values of a reference, and a network that has its weights.

A run that has just been filled with what it starts from is the reference already. For one that goes on, or for another
model, a second network is built in the same way, and let go before training begins.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.storage import PIECES
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.plan.identity import named
from raytune_fsdp.run.build import Build, Site, build
from raytune_fsdp.run.fetching import Say, brought
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.same_files import digests
from raytune_fsdp.run.starting_weights import AdapterFiles, ReferenceModel, StartingWeights, fill_mode, first_weights
from raytune_fsdp.run.trials.computation import check_computation, check_split_tokens
from raytune_fsdp.run.trials.kernels import kernels_of
from raytune_fsdp.step.precision import compute_dtype

MORE = "more"
"""What older versions did not know to decide values, where there is such. A run that they began goes on without."""


def decided_by(
    reference: ReferenceModel,
    identity: Mapping[str, Any],
    origin: StartingWeights | None,
    adapter: AdapterFiles | None,
    *,
    alone: bool,
) -> dict[str, Any]:
    """Return everything of a reference that decides its values, but for how they are computed. Collective.

    `identity`: the run's. `alone`: only rank 0 sees the files.
    """
    config = reference.config
    path = getattr(config.method, "adapter", None)
    gone = f"method.adapter={path}: the adapter" if path is not None and adapter is None else None
    if origin is None and config.model.init == "pretrained":
        gone = f"model.path={config.model.path}: the checkpoint"
    if gone is not None:
        raise ResumeError(
            f"{gone} that the run began with is not there any more, and not all that the reference has to say is kept: "
            "restore it, or the directory `reference` of data.cache.path"
        )
    text = reference.hf_config.to_diff_dict()
    if reference.is_start:
        architecture = {key: value for key, value in identity.items() if key.startswith("model.")}
    else:
        architecture = {key: text[key] for key in text if key not in ("transformers_version", "_name_or_path", "dtype")}
    # A new adapter adds nothing, so its rank is nobody's business; but the kinds of method keep weights in other types.
    method, more = named("method", config.method, exclude=("adapter",)), {}
    if adapter is None and getattr(config.method, "init", "zero") == "zero":
        more = _of_new_adapter(method)
        method = {key: value for key, value in method.items() if key in ("type", "quantization")}
    if reference.code and not reference.is_start:  # the run's own is in `architecture`
        more = {**more, "code": reference.code}
    decided: dict[str, Any] = json.loads(
        json.dumps(
            {
                "architecture": architecture,
                "method": method,
                "weights": {"seed": config.run.seed} if origin is None else _content(origin, alone=alone),
                "adapter": None if adapter is None else digests(adapter.files, alone=alone),
                "added": {} if origin is None else _added(origin),
                **({MORE: more} if more else {}),
            },
            default=str,
        )
    )
    return decided


def _of_new_adapter(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else of a method decides what a network computes whose adapters are new."""
    if method.get("dora"):
        # A layer's output is scaled by a length over the same length, which is computed again: not always by exactly 1.
        return {key: method[key] for key in ("dora", "target_modules", "modules_to_save")}
    # Layers that are trained whole are not quantized; neither are embedding and head in any case.
    whole = [name for name in method.get("modules_to_save", ()) if name not in ("embed_tokens", "lm_head")]
    return {"modules_to_save": whole} if method["type"] == "qlora" and whole else {}


def _added(origin: StartingWeights) -> dict[str, dict[str, list[int]]]:
    return {name: {str(row): list(like) for row, like in rows.items()} for name, rows in origin.added.items()}


def _content(origin: StartingWeights, *, alone: bool) -> dict[str, Any]:
    """Return the digests of the files that stored weights are in. Collective."""
    stored = origin.stored
    if isinstance(stored, WeightFiles):
        return digests(stored, alone=alone)
    read = on_rank0(
        lambda: dict(read_manifest(storage_at(stored.root), stored.name).files), what="read the reference's checkpoint"
    )
    base = {} if origin.base_files is None else digests(origin.base_files, alone=alone)
    return {**{name: digest for name, (_, digest) in read.items() if name.endswith(PIECES)}, **base}


def build_reference(
    reference: ReferenceModel, prepared: RunInputs, standing: ResumePoint, device: torch.device, say: Say
) -> tuple[PreTrainedModel, GroupObjective]:
    """Build and fill the reference as a network of its own, and return what measures its answers, too. Collective."""
    built = build_other(reference, prepared, standing, device, say)
    objective = GroupObjective.of(reference.config.train.objective, built.groups.sequence, judged=prepared.judged)
    return built.model, objective


def build_other(
    other: ReferenceModel, prepared: RunInputs, standing: ResumePoint, device: torch.device, say: Say
) -> Build:
    """Build and fill a network besides the run's own, spread over the ranks. Collective."""
    config = other.config
    if not other.is_start:
        prepared = replace(prepared, hf_config=other.hf_config, needs=other.needs)
        standing = replace(standing, checkpoint=None, state=replace(standing.state, kernels={}))
    built = build(
        config, other.hf_config, other.needs, Site.of_rank(standing.plan, device),
        lambda network: kernels_of(config, prepared, standing, network, device, own=other.is_start),
        added=other.added, adapted=other.adapted,
    )  # fmt: skip
    model, host = built.model, torch.device("cpu") if built.parallel.cpu_offload else None
    origin, adapter = brought(config, other.origin, other.adapter, say)
    mode = fill_mode(config, origin, adapter)
    weights, beginning = first_weights(config, origin, model, mode, adapter)
    fill(model, weights, mode, device, shards_at=host, before=beginning.turn_to if beginning else None)
    dtype = compute_dtype(config.parallel.precision)
    if not other.is_start:  # what the run starts from is checked as its own network
        check_computation(model, config.data.packing, device, dtype)
    if built.groups.sequence is not None:
        check_split_tokens(model, built.groups.sequence, device, dtype)
    return built


def let_go(device: torch.device) -> None:
    """Give back the memory of a network that nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
