"""Match the keys in weight files with the tensors of a network, and check that they fit. Reads no weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.known_files import CONFIG_FILE
from raytune_fsdp.model.directory.named_class import find_named
from raytune_fsdp.model.score_head import STORED, name_of_embedding, name_of_head
from raytune_fsdp.model.weights.conversion import Conversion, ConvertedWeights
from raytune_fsdp.model.weights.dequantize import stored_weights
from raytune_fsdp.model.weights.source import Weights

logger = logging.getLogger(__name__)

_COMPUTED = (
    r"(^|\.)inv_freq$", r"rotary_emb\.(cos|sin)_cached$", r"(^|\.)position_ids$", r"\._float_tensor$",
    r"\.(attn|attention)\.((masked_)?bias|causal_mask)$",
)  # fmt: skip
"""Buffers in old checkpoints: frequencies, positions, and the masks of GPT-2 and its like."""

_AGAIN = "Download it again, or export it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where the files have every tensor of a network. Picklable."""

    key_of: Mapping[str, str]
    """Keys in the files by names in the network. What conversions read has no name in the network: it is under its own
    key. Numbers and scales of a tensor count as one key, without the suffixes that tell them apart."""
    conversions: tuple[Conversion, ...] = ()
    """Conversions that make the tensors that are not stored as they are."""


def match_keys(model: PreTrainedModel, files: WeightFiles) -> Match:
    """Match the keys in the files with the names in the network; if they disagree, the error lists both sides.

    transformers' own rules for the architecture apply: they know older names of some modules, the prefix that a
    checkpoint of the bare decoder lacks, and which tensors are stored in parts.
    """
    name_of, converters = _naming(model)
    wanted, names = owned_tensors(model), set(model.state_dict())
    stored, head = files.tensors(), name_of_head(model)
    key_of = {} if head is None or STORED not in stored else {f"{head}.weight": STORED}
    parts: dict[str, dict[str, list[str]]] = {}
    extra = []
    # In natural order (experts.2 before experts.10): converters stack tensors in the order in which they come.
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = name_of(key)
        if head is not None and (key == STORED or name.startswith(f"{head}.")):
            continue  # the head of these files predicts tokens, and this one scores
        if pattern is not None and name in names:
            parts.setdefault(name, {}).setdefault(pattern, []).append(key)
        elif name in wanted:
            key_of.setdefault(name, key)
        elif name not in names and not _ignored(model, key):
            extra.append(key)
    _adopt_aliases(model, stored, key_of)
    if head is not None:
        _adopt_head(model, head, stored, name_of, key_of)
    conversions = tuple(_conversion(converters, name, sources) for name, sources in parts.items())
    made = {name for conversion in conversions for name in conversion.targets}
    missing = [name for name in wanted if name not in key_of and name not in made and name != f"{head}.weight"]
    if extra:
        extra = _without_other_parts(model, files.directory, extra)
    if missing or extra:
        raise _misfit(files.directory, model, missing, extra)
    taken = {key: key for conversion in conversions for keys in conversion.sources.values() for key in keys}
    return Match(key_of={**key_of, **taken}, conversions=conversions)


def _naming(model: PreTrainedModel) -> tuple[Callable[[str], tuple[str, str | None]], list[WeightConverter]]:
    """Return a function from a key to a name in the network and the pattern of its converter, and the converters."""
    rules = get_model_conversion_mapping(model)
    renamings: Any = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names = dict(model.state_dict())

    def name_of(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        # A rule for older files would rename the key, but these files are not older.
        return (key, None) if name not in names and key in names else (name, pattern)

    return name_of, converters


def _without_other_parts(model: PreTrainedModel, directory: Path, extra: list[str]) -> list[str]:
    """Leave out the keys of parts that see or hear: transformers lists these for some text classes only."""
    if not (directory / CONFIG_FILE).is_file():
        return extra
    named = find_named(model, directory, directory)
    if named.unbuilt is not None:
        raise ModelError(f"{named.unbuilt}, so nothing says whether {extra[0]} is a part of it")
    name_of, names = _naming(named.network)[0], named.network.state_dict()
    return [key for key in extra if not (name_of(key)[0] in names and named.sees(name_of(key)[0]))]


def matched_weights(files: WeightFiles, match: Match, network: PreTrainedModel) -> Weights:
    """Return the weights in files under the names of the network. No file is opened before something is read."""
    weights = stored_weights(files, match.key_of)
    return ConvertedWeights(weights, match.conversions, network) if match.conversions else weights


def _conversion(converters: Sequence[Any], name: str, sources: Mapping[str, Sequence[str]]) -> Conversion:
    """Return the use of a converter for one tensor, given the keys that match each of its patterns."""
    # If several converters have the pattern, the last one is used, as in transformers.
    converter = next(c for c in reversed(converters) if next(iter(sources)) in c.source_patterns)
    for pattern, keys in sources.items():
        # transformers would not notice: the next expert would take the place of the missing one.
        gap = _gap(keys)
        if gap is not None:
            raise ModelError(
                f"the weights for {name} ({pattern}) have a gap in their numbers: {gap}; download the model again (is "
                "this only a part of it?)"
            )
    first, *others = converter.target_patterns
    return Conversion(
        converter=converter,
        label=name,
        sources={pattern: tuple(sources[pattern]) for pattern in converter.source_patterns if pattern in sources},
        targets=(name, *(name.replace(first, other) for other in others)),
    )


def _gap(keys: Sequence[str]) -> str | None:
    """Say where a number is missing; None if one part of the keys counts 0, 1, 2, ..."""
    for column in zip(*(key.split(".") for key in keys), strict=False):
        if len(set(column)) > 1 and list(column) != [str(i) for i in range(len(keys))]:
            found = next(i for i, part in enumerate(column) if part != str(i))
            return f"{keys[found]} comes " + (f"after {keys[found - 1]}" if found else "first")
    return None


def check_shapes(model: PreTrainedModel, weights: Weights) -> None:
    """Compare all shapes, so that a wrong one is found before anything is started."""
    stored = weights.shapes()
    wrong = [
        f"{name} is {list(stored[name])} in the files and {list(tensor.shape)} in the network"
        for name, tensor in owned_tensors(model).items()
        if name in stored and tuple(stored[name]) != tuple(tensor.shape)
    ]
    if wrong:
        raise ModelError(
            f"the weights do not fit the config of {model.config.model_type}: {wrong[0]}"
            + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
            + ". Does config.json belong to another model, or does model.overrides change a size?"
        )


def check_report(report: Mapping[str, Any], model: PreTrainedModel, directory: Path) -> None:
    """Judge what transformers reports (`output_loading_info`) about a model that it has loaded from a directory.

    transformers draws tensors at random that are missing or of another shape, and ignores those that it does not know.
    Only what no layer of this network has may be ignored: the tower of a model that also sees, layers that predict
    further tokens.
    """
    unknown = [key for key in report["unexpected_keys"] if not _ignored(model, key)]
    layers = _layers(model)
    lost = [key for key in unknown if not layers.isdisjoint(_around(key))]
    if report["missing_keys"] or lost:
        raise _misfit(directory, model, list(report["missing_keys"]), lost or unknown)
    if report["mismatched_keys"]:
        name, stored, shape = min(report["mismatched_keys"])
        raise ModelError(
            f"the weights in {directory} do not fit its config.json: {name} is {list(stored)} in the files and "
            f"{list(shape)} in the network ({len(report['mismatched_keys'])} in all differ). Are experts missing, or "
            f"is the config.json that of another model? {_AGAIN}"
        )
    if unknown:
        kind = type(model).__name__
        logger.warning("%s: not read, as no layer of a %s has them: %s", directory, kind, printable(_few(unknown)))


def _layers(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that have weights of their own, and of all modules in lists."""
    own: set[str] = set()
    listed: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            listed.update(f"{name}.{number}" for number in range(len(module)))
        elif any(True for _ in module.parameters(recurse=False)):
            own.add(name)
    return listed | (own - {around for name in listed for around in _around(name)})


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or tensor."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _misfit(directory: Path, model: PreTrainedModel, missing: Collection[str], extra: Collection[str]) -> ModelError:
    return ModelError(
        f"the weights in {directory} do not fit a {type(model).__name__} ({model.config.model_type}): "
        f"{_some('missing', missing)}; {_some('unknown', extra)}. Is it a checkpoint of another architecture, or a "
        f"part of one? {_AGAIN}"
    )


def grown_rows(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return embeddings with fewer rows in the files than in the network, each with the network's number of rows."""
    vocabulary = model.config.get_text_config().vocab_size
    return {n: vocabulary for n in rows_of_tokens(model) if n in stored and stored[n][0] < vocabulary}


def rows_of_tokens(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors with a row for each token: embeddings, head, the head's bias."""
    vocabulary = model.config.get_text_config().vocab_size
    return [n for n, t in owned_tensors(model).items() if t.ndim and t.shape[0] == vocabulary]


def owned_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; a tied weight only under its first name."""
    persistent = set(model.state_dict())
    tensors = dict(model.named_parameters())
    tensors.update((name, b) for name, b in model.named_buffers() if name in persistent)
    return tensors


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every weight, by its first name: a tied weight has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def _adopt_aliases(model: PreTrainedModel, stored: Collection[str], key_of: dict[str, str]) -> None:
    """Find tied weights that are stored only under their other name (lm_head.weight without embed_tokens.weight)."""
    for name, names in all_names(model).items():
        for alias in names:
            if name not in key_of and alias in stored:
                key_of[name] = alias


def _adopt_head(
    model: PreTrainedModel,
    head: str,
    stored: Collection[str],
    name_of: Callable[[str], tuple[str, str | None]],
    key_of: dict[str, str],
) -> None:
    """Find an embedding that is stored only under the name of the head that it was tied to, whose place another has."""
    if STORED not in stored:
        key_of.pop(f"{head}.weight", None)
    embedding = name_of_embedding(model)
    key = next((key for key in stored if name_of(key)[0] == f"{head}.weight"), None)
    if embedding not in key_of and key is not None:
        key_of[embedding] = key


def _ignored(model: PreTrainedModel, key: str) -> bool:
    """Return whether a key may be left over: old checkpoints hold buffers that the network computes itself."""
    # The files of many architectures have the buffers of `_COMPUTED`, and not all architectures list them.
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED]
    return any(re.search(pattern, key) for pattern in patterns)


def _some(what: str, keys: Collection[str]) -> str:
    return f"{len(keys)} {what} ({_few(keys)})" if keys else f"none {what}"


def _few(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")
