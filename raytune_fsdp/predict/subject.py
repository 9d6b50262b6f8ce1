"""Find out which network a config is about, without its weights, its tokenizer, or the internet."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from raytune_fsdp.base.errors import ConfigError, ModelError, first_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.model.directory.files import is_local
from raytune_fsdp.model.network import build_network, count_parameters, load_architecture
from raytune_fsdp.run.starting_weights import model_directory
from raytune_fsdp.run.trials.needs import network_needs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A network, and what it needs of its attention and its loss."""

    hf_config: PretrainedConfig
    needs: KernelNeeds
    added: tuple[int, ...] = ()
    """Ids of new tokens."""
    numbers: int = 0
    """The number of all its weights."""
    basis: str = "model.architecture"
    """Where its sizes are from."""

    @classmethod
    def of(cls, config: FinetuneConfig, architecture: Path | None = None) -> ModelSpec:
        """Build the network of a config on the meta device, and find out what it needs.

        `architecture` is a config.json that takes the place of the model's own.
        """
        config = with_torch_alone(config)
        hf_config, basis = _read(config, architecture)
        text = hf_config.get_text_config()
        # As if none of them were there already: only the tokenizer, which is not read, could say so.
        added = tuple(range(text.vocab_size, text.vocab_size + len(config.model.add_tokens)))
        text.vocab_size += len(added)
        network = build_network(copy.deepcopy(hf_config), config, added)
        return cls(
            hf_config=hf_config,
            needs=network_needs(config, hf_config, network),
            added=added,
            numbers=count_parameters(network).total,
            basis=basis,
        )


def with_torch_alone(config: FinetuneConfig) -> FinetuneConfig:
    """Return the config without packages that need not be installed where a run is planned.

    flash-attn keeps for backward what torch's own kernel keeps, and so does FlexAttention, which has no backward where
    it is traced.
    """
    if not config.model.attention.startswith(("flash_attention", "flex_attention")):
        return config
    return config.with_sections(model={"attention": "auto"})


def _read(config: FinetuneConfig, architecture: Path | None) -> tuple[PretrainedConfig, str]:
    model = config.model
    if architecture is not None:
        file = architecture / "config.json" if architecture.is_dir() else architecture
        if file.name != "config.json" or not file.is_file():
            raise ConfigError(f"--architecture {architecture}: give the config.json of a model, or its directory")
        return load_architecture(model.model_copy(update={"path": str(file.parent)}), file.parent), str(file)
    if model.path is None or is_local(model.path):
        return load_architecture(model, model_directory(config)), model.path or "model.architecture"
    known = {name.lower(): name for name in bundled()}
    if name := known.get(model.path.lower()):
        values = bundled()[name]["config"]
        return load_architecture(model.model_copy(update={"architecture": values}), None), f"{name}, as bundled"
    try:
        return load_architecture(model, model_directory(config)), model.path
    except ModelError as error:
        near = [known[each] for each in get_close_matches(model.path.lower(), known, n=3)]
        bundled_too = f"; bundled are {', '.join(near)}" if near else ""
        raise ModelError(
            f"model.path={model.path}: its sizes are not bundled, and it was not found ({first_line(error)}): give its "
            f"config.json with --architecture FILE{bundled_too}"
        ) from error


@cache
def bundled() -> dict[str, Any]:
    """Return, by the names of the hub, the number of parameters, and what of the config decides shapes."""
    text = files("raytune_fsdp.predict").joinpath("architectures.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
