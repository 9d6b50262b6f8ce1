"""Export an adapter: the directory that PEFT, transformers and inference servers load with the base model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.row_hashes import root
from raytune_fsdp.model.adapters.attach import ADAPTER, added_rows_of
from raytune_fsdp.model.adapters.config_file import put_adapter_config
from raytune_fsdp.model.adapters.names import acts_outside, check_loads, keys_there, targets_there
from raytune_fsdp.model.adapters.principal import PlainAdapter
from raytune_fsdp.model.added_rows import ROWS
from raytune_fsdp.model.directory.bounds import check_tokenizer_files
from raytune_fsdp.model.directory.files import is_local
from raytune_fsdp.model.directory.known_files import (
    ADAPTER_CONFIG_FILE,
    CARD_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    read_object,
)
from raytune_fsdp.model.directory.named_class import NamedClass
from raytune_fsdp.model.directory.scoring import SCORE
from raytune_fsdp.model.directory.tensorfile import TensorFile
from raytune_fsdp.model.export.mark import new_export
from raytune_fsdp.model.export.write import StoredTensors, copy_known, finish, write_tokenizer_config
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.model.weights.source import Weights

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"

# These files describe the whole model; with a config.json next to an adapter, a loader would look for all weights here.
_OF_THE_BASE = (CONFIG_FILE, GENERATION_CONFIG_FILE)


def check_found_by_others(base: str, name: str) -> None:
    """Refuse to push an adapter of a model that only this machine has."""
    if is_local(base):
        raise ConfigError(
            f"export.push={name}: {base} is a directory here, and who loads the adapter from the hub will look for its "
            "base under this name: set export.merge=true, or push it later (raytune-fsdp export --push, with "
            "--base and the name that the base has on the hub)"
        )


def _not_served(network: PreTrainedModel) -> str:
    """Return what an adapter has that vLLM refuses; empty if nothing."""
    peft = network.peft_config[ADAPTER]  # type: ignore[union-attr, index]
    if str(peft.peft_type.value) != "LORA":
        return f"{peft.peft_type.value} instead of it"
    found = {
        "a head that scores": head_of(network) is not None,
        "DoRA": peft.use_dora,
        "whole modules": peft.modules_to_save,
        "adapted weights": peft.target_parameters,
        "rows of tokens": added_rows_of(network),
    }
    return " and ".join(what for what, has in found.items() if has)


def stored_adapter(adapter: Weights, initial: Weights, network: PreTrainedModel, named: NamedClass) -> StoredTensors:
    """Return the tensors that `export_adapter` writes, which takes the same."""
    keys = keys_there(network, named, outside=acts_outside(named, adapter, initial))
    held = PlainAdapter(adapter, initial, network) if initial.shapes() else adapter
    shapes = {key: tuple(held.shapes()[name]) for name, key in keys.items()}

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for name, key in keys.items():
            yield key, held.read(name, 0, shapes[key][0]).float()

    return StoredTensors(shapes=shapes, types=dict.fromkeys(shapes, torch.float32), make=make)


def export_adapter(
    adapter: Weights,
    initial: Weights,
    network: PreTrainedModel,
    named: NamedClass,
    model_files: Path,
    destination: Path,
    *,
    base: str,
    revision: str | None,
    card: Callable[[str], str],
    prove: Callable[[Path], None],
) -> None:
    """Write the adapter of `network` in fp32, for the base model at `base`, with the tokenizer of the run.

    `initial`: the adapter's initial values, if these were taken out of the base; PEFT then gets an adapter of twice the
    rank. `named`: the class that the base's config names, whose names are written. `card`: returns the text of the card
    for the digest of all written tensors. `prove` is called before the export is in its place, and raises if it is bad.
    """
    check_tokenizer_files(model_files)
    outside = acts_outside(named, adapter, initial)
    config = {
        # Targets as the run's config has them, not as the list of names that an expression matched.
        **targets_there(network, named, read_object(model_files / ADAPTER_CONFIG_FILE), outside=outside),
        "base_model_name_or_path": str(Path(base).expanduser().absolute()) if is_local(base) else base,
        "revision": revision,
    }
    if initial.shapes():
        config |= PlainAdapter(adapter, initial, network).config
    if head_of(network) is not None:  # PEFT is to load it in the place of the one that it draws
        saved = config.get("modules_to_save", read_object(model_files / ADAPTER_CONFIG_FILE).get("modules_to_save"))
        config |= {"task_type": "SEQ_CLS", "modules_to_save": sorted({*(saved or ()), SCORE})}
    if named.unbuilt is not None:
        logger.warning(
            "%s, so the adapter has the names of a %s: what builds the other class, such as vLLM, may load none of it; "
            "merge it (export.merge=true, or raytune-fsdp export --merge), or export it where the class can be built",
            named.unbuilt, type(named.network).__name__,
        )  # fmt: skip
    if special := _not_served(network):
        logger.warning(
            "inference servers such as vLLM load plain LoRA only, and this adapter has %s: for them, merge it "
            "(export.merge=true, or raytune-fsdp export --merge)", special,
        )  # fmt: skip
    if rows := added_rows_of(network):
        # Whole names: PEFT compares the ends of names, and another module's name may end alike.
        modules = {named.there(name.removesuffix(f".{ROWS}")): list(ids) for name, (_, ids) in rows.items()}
        config["trainable_token_indices"] = modules
    stored, digests = stored_adapter(adapter, initial, network, named), dict[str, str]()
    with new_export(destination, model_files) as staging:
        copy_known(model_files, staging, code=False, without=_OF_THE_BASE)
        write_tokenizer_config(staging, code=False)
        put_adapter_config(network, staging, **config, inference_mode=True)
        file = TensorFile(staging / WEIGHTS_FILE, stored.shapes, stored.types)
        for key, tensor in stored.each(digests):
            file.write(key, tensor)
            del tensor
        (staging / CARD_FILE).write_text(card(root(digests)), encoding="utf-8")
        finish(staging / WEIGHTS_FILE, file)
        check_loads(staging, named, stored.shapes)
        prove(staging)
