"""Find out once in a process what a network needs: of a training of six steps, a sixth of the processor's time."""

from __future__ import annotations

import json
from functools import wraps
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.run import prepare
from raytune_fsdp.run.trials.needs import network_needs


def remember_needs() -> None:
    """Have `prepare` remember what networks need. Not where a test changes how they compute."""
    found: dict[tuple[Any, ...], KernelNeeds] = {}

    @wraps(network_needs)
    def remembered(config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel) -> KernelNeeds:
        sections: Any = {"method": True, "parallel": True, "data": {"packing", "seq_len"}}
        asked = config.model_dump(include=sections, mode="json")
        asked["train"] = config.train.model_dump(include={"micro_batch", "objective"}, mode="json")
        asked["model"] = config.model.model_dump(exclude={"path", "tokenizer"}, mode="json")
        key = type(network), json.dumps(asked), hf_config.to_json_string(use_diff=False)
        if key not in found:
            found[key] = network_needs(config, hf_config, network)
        return found[key]

    prepare.network_needs = remembered  # type: ignore[attr-defined]
