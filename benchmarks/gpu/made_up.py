"""Weights that a GPU draws itself, and a base of adapters whose file has no data.

One thread of a CPU draws an 8B's weights in two minutes, and writing and reading those of a base takes another. How
fast a run is does not depend on where its numbers are from; that they are random it does, as a GPU that multiplies
zeros draws less power.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from raytune_fsdp.base.random import derive_key
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.model.weights.source import FileWeights


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Have the weights of runs in this context drawn on their device: those of files, too, whatever is in them."""

    @torch.no_grad()
    def draw(network: PreTrainedModel, unit: str, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
        module.to_empty(device=device)
        torch.manual_seed(derive_key("weights", seed, unit))
        for child in reversed(list(module.modules())):
            network._init_weights(child)
        return {f"{unit}.{name}": tensor for name, tensor in module.state_dict().items()}

    def read(self: FileWeights, name: str, start: int, stop: int) -> torch.Tensor:
        _, *columns = self.shapes()[name]
        rows = torch.empty(stop - start, *columns, dtype=torch.bfloat16, device=device)
        return rows.normal_(0.0, 0.02) if columns else rows.fill_(1.0)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("raytune_fsdp.model.weights.source._drawn", draw))
        stack.enter_context(mock.patch.object(FileWeights, "read", read))
        # Nothing is in the file that a hash could be of.
        stack.enter_context(mock.patch("raytune_fsdp.run.base_model.digests", lambda *_, **__: {}))
        yield


def write_base(directory: Path, architecture: dict[str, Any]) -> dict[str, Any]:
    """Write a model directory whose file of weights has a header and a size, and takes no room; return `model` of a
    config that starts from it."""
    directory.mkdir()
    config = LlamaConfig(**architecture, dtype="bfloat16")
    config.save_pretrained(directory)
    with torch.device("meta"):
        network = LlamaForCausalLM(config)
    header, end = {}, 0
    for name, weight in network.named_parameters():
        start, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {"path": str(directory), "init": "pretrained", "architecture": None, "tokenizer": str(TOKENIZER)}
