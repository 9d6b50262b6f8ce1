"""Put together all weights of a checkpoint's network: a run of adapters saves only these, not their base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.contents import INITIAL
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.model.adapters.attach import added_rows_of, attach, check_adapter_shapes
from raytune_fsdp.model.adapters.config_file import adapter_method
from raytune_fsdp.model.adapters.merge import MergedWeights
from raytune_fsdp.model.adapters.names import keys_held, own_names
from raytune_fsdp.model.adapters.principal import ResidualWeights
from raytune_fsdp.model.added_rows import ROWS, train_rows
from raytune_fsdp.model.directory.files import WeightFiles, cached, find_weights, is_local, known_weights, locate
from raytune_fsdp.model.directory.known_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, read_object
from raytune_fsdp.model.directory.named_class import NamedClass, find_named
from raytune_fsdp.model.export.write import WholeTensors
from raytune_fsdp.model.network import stored_network
from raytune_fsdp.model.weights.keys import check_shapes, grown_rows, match_keys, matched_weights
from raytune_fsdp.model.weights.source import FileWeights, GrownWeights, Weights

_BASE = "the base of these adapters"
_WAY_OUT = "say with --base where the model is that they were trained on"


class WholeWeights(WholeTensors, Weights, Protocol):
    """Tensors that can be read whole and by rows."""


def merged_weights(checkpoint: CommittedCheckpoint, files: Path, base_files: WeightFiles | None) -> WholeWeights:
    """Return the weights of a checkpoint's network; those of adapters are merged into their base.

    `files`: the run's own. `base_files`: those of the base, from `base_of` or `located_base`.
    """
    base, weights = read_state(checkpoint).base, CheckpointWeights(checkpoint)
    if base is None:
        return weights
    assert base_files is not None, f"{checkpoint.path} holds adapters"
    added = {name: {int(row): like for row, like in rows.items()} for name, rows in base["added"].items()}
    stored = base_weights(base_files, plain_network(files), added)
    network, initial = saved_network(checkpoint, files), CheckpointWeights(checkpoint, INITIAL)
    if initial.shapes():
        stored = ResidualWeights(stored, initial, network)
    return _merged(stored, weights, network, checkpoint.path)


def base_of(checkpoint: CommittedCheckpoint, moved: str | None = None) -> WeightFiles | None:
    """Return the base files of a checkpoint's adapters, after comparing their hashes; None if it has no adapters.

    `moved`: where they are now, if not where the run found them.
    """
    files, known = located_base(checkpoint, moved), read_state(checkpoint).base
    if files is not None and known is not None:
        check_digests(files, files.digests(list(files.sizes())), known)
    return files


def located_base(
    checkpoint: CommittedCheckpoint, moved: str | None = None, *, fetch: bool = True
) -> WeightFiles | None:
    """Return the base files of a checkpoint's adapters without reading them: only their sizes are compared.

    Without `fetch`, those of the hub need not be on this machine.
    """
    base = read_state(checkpoint).base
    if base is None:
        if moved is not None:
            raise ModelError(f"--base {moved}: {checkpoint.path} holds a whole model, not adapters; leave --base out")
        return None
    path, revision = (base["path"], base["revision"]) if moved is None else (moved, None)
    files = find_weights(_located(path, revision)) if fetch else _known(path, revision)
    sizes, known = files.sizes(), {name: each["bytes"] for name, each in base["files"].items()}
    differ = sorted({name for name, _ in sizes.items() ^ known.items()})
    if differ:
        raise _another(files, differ[0])
    return files


def check_digests(files: WeightFiles, digests: Mapping[str, str], base: Mapping[str, Any]) -> None:
    """Refuse files that are not those of a `RunState.base`."""
    for name, digest in digests.items():
        if digest != base["files"][name]["xxh3"]:
            raise _another(files, name)


def _another(files: WeightFiles, name: str) -> ModelError:
    return ModelError(
        f"{files.directory / name} is not the file that these adapters were trained on: restore it, or {_WAY_OUT}"
    )


def base_of_adapter(directory: Path, moved: str | None) -> Path:
    """Return the directory of an exported adapter's base; `moved`: where it is now."""
    values = read_object(directory / ADAPTER_CONFIG_FILE)
    path, revision = (
        (moved, None) if moved is not None else (values.get("base_model_name_or_path"), values.get("revision"))
    )
    if not isinstance(path, str) or not path or not isinstance(revision, str | None):
        raise ModelError(f"{directory / ADAPTER_CONFIG_FILE} does not name the model it is for: say it with --base")
    return _located(path, revision)


def weights_of_adapter(directory: Path, moved: str | None) -> tuple[WholeWeights, Path]:
    """Return the weights of an exported adapter's network, merged into its base, and the directory of the base."""
    base = base_of_adapter(directory, moved)
    files = find_weights(directory, "adapter_model")
    plain = plain_network(base)
    named = find_named(plain, base, base)
    network = plain_network(base)
    attach(network, adapter_method(directory, files.file_of, own_names(named)))
    keys = keys_held(network, named, files.file_of)
    differ = sorted(files.file_of.keys() ^ set(keys.values()))
    if differ:
        why = f" ({named.unbuilt})" if named.unbuilt else ""
        raise ModelError(f"{directory}: {differ[0]} is in its file or in its config, not in both{why}: export it again")
    adapter = FileWeights(files, keys)
    return _merged(base_weights(find_weights(base), plain, {}), adapter, network, str(directory)), base


def _merged(base: Weights, adapter: Weights, network: PreTrainedModel, where: str) -> WholeWeights:
    check_adapter_shapes(network, adapter, where)
    return MergedWeights(base, adapter, network)


def plain_network(files: Path) -> PreTrainedModel:
    """Return the network of a directory's config.json without adapters, on the meta device."""
    network = stored_network(files)
    if network is None:
        raise ModelError(
            f"{files} is a network with Python code of its own, and adapters can be merged into transformers' own "
            "networks only: export them alone (raytune-fsdp export), and load them with PEFT"
        )
    return network


def named_class(files: Path, base: str, revision: str | None) -> NamedClass:
    """Return the class that the config of a run's base names. `files`: the run's own.

    Nothing is fetched: if the base cannot be read here, it is the class that transformers has for its type.
    """
    there = Path(base).expanduser() if is_local(base) else cached(base, revision)
    readable = there is not None and (there / CONFIG_FILE).is_file()
    return find_named(plain_network(files), files, there if readable else None)


def saved_network(checkpoint: CommittedCheckpoint, files: Path) -> PreTrainedModel:
    """Return the network with the adapters that a checkpoint holds. `files`: the run's own."""
    base, held = read_state(checkpoint).base, CheckpointWeights(checkpoint).shapes()
    network = plain_network(files)
    attach(network, adapter_method(files, held))
    if base is not None and any(name.endswith(f".{ROWS}") for name in held):
        train_rows(network, {int(row) for rows in base["added"].values() for row in rows})
    return network


def check_rows_stored(checkpoint: CommittedCheckpoint, files: Path, moved: str | None) -> None:
    """Refuse to write adapters for PEFT if new tokens have rows that they do not hold, or that have no place there.

    `files`: the run's own. `moved`: where the base is now.
    """
    from peft.utils.other import ModulesToSaveWrapper

    base, network = read_state(checkpoint).base, saved_network(checkpoint, files)
    if base is None:
        return
    held = {weight for weight, _ in added_rows_of(network).values()}
    grown: Collection[str] = ()
    if held:
        plain, frozen = plain_network(files), located_base(checkpoint, moved)
        assert frozen is not None, "there is a base"
        grown = grown_rows(plain, matched_weights(frozen, match_keys(plain, frozen), plain).shapes())
    held |= {f"{name}.weight" for name, each in network.named_modules() if isinstance(each, ModulesToSaveWrapper)}
    if left := sorted({*grown, *(base["added"].keys() - held)}):
        raise ConfigError(
            f"export.merge=false: {left[0]} has rows for new tokens that the base does not have, and PEFT's directory "
            "does not hold them: set export.merge=true (raytune-fsdp export --merge)"
        )


def base_weights(
    files: WeightFiles, network: PreTrainedModel, added: Mapping[str, Mapping[int, Sequence[int]]]
) -> Weights:
    """Return the weights of the base under adapters, in which rows of tokens may have been `added`."""
    weights = matched_weights(files, match_keys(network, files), network)
    grown = grown_rows(network, weights.shapes())
    if grown or added:
        weights = GrownWeights(weights, grown, added)
    check_shapes(network, weights)
    return weights


def _located(path: str, revision: str | None) -> Path:
    try:
        return locate(path, revision, field=_BASE, weights=True)
    except ModelError as error:
        raise ModelError(f"{error}; {_WAY_OUT}") from error


def _known(path: str, revision: str | None) -> WeightFiles:
    try:
        return known_weights(path, revision, field=_BASE)
    except ModelError as error:
        raise ModelError(f"{error}; {_WAY_OUT}") from error


def dtype_of(weights: WholeWeights) -> torch.dtype | None:
    """Return the widest type of the weights, in which a network can hold all of them."""
    types = {dtype for dtype in weights.dtypes().values() if dtype.is_floating_point}
    return max(types, key=lambda dtype: dtype.itemsize, default=None)
