"""An adapter out: the directory that PEFT, transformers and inference servers load beside the base model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from raytune_fsdp.model.adapters import put_adapter_config, stored_names
from raytune_fsdp.model.bounds import check_tokenizer_files
from raytune_fsdp.model.export import copy_known, finish
from raytune_fsdp.model.exported import new_export
from raytune_fsdp.model.known_files import CARD_FILE, CONFIG_FILE, GENERATION_CONFIG_FILE
from raytune_fsdp.model.tensorfile import TensorFile
from raytune_fsdp.model.weights import Weights

WEIGHTS_FILE = "adapter_model.safetensors"

# These describe the whole model; with a config.json beside it, a loader would look for all weights here.
_OF_THE_BASE = (CONFIG_FILE, GENERATION_CONFIG_FILE)


def export_adapter(
    adapter: Weights,
    network: PreTrainedModel,
    model_files: Path,
    destination: Path,
    *,
    base: str,
    revision: str | None,
    card: str,
) -> None:
    """Write the adapter of `network` in fp32, whose base is the model at `base`, with the tokenizer of the run."""
    check_tokenizer_files(model_files)
    keys = stored_names(network)
    with new_export(destination, model_files) as staging:
        copy_known(model_files, staging, code=False, without=_OF_THE_BASE)
        (staging / CARD_FILE).write_text(card, encoding="utf-8")
        put_adapter_config(network, staging, base_model_name_or_path=base, revision=revision, inference_mode=True)
        shapes = {key: adapter.shapes()[name] for name, key in keys.items()}
        file = TensorFile(staging / WEIGHTS_FILE, shapes, dict.fromkeys(shapes, torch.float32))
        for name, key in keys.items():
            file.write(key, adapter.read(name, 0, shapes[key][0]).float())
        finish(staging / WEIGHTS_FILE, file)
