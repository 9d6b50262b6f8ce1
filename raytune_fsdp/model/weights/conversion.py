"""Convert tensors that transformers builds from others while it loads a model (all experts in one), and back.

The rules and the arithmetic are transformers' own. Added here: a rank reads no more than its rows, because it converts
a few experts at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key

from raytune_fsdp.base.errors import ModelError, first_line
from raytune_fsdp.model.weights.source import Weights, all_finite, read_whole

# Bytes converted at a time, but at least a row (an expert). Pieces this small keep a rank with 201 MiB of a Mixtral's
# weights at 229 MiB, although its largest tensor has 80 MiB (docs/results.md).
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One use of a converter. Picklable."""

    converter: WeightConverter
    label: str
    """The name that was matched; the converter derives the others from it."""
    sources: Mapping[str, tuple[str, ...]]
    """Names of the tensors that it reads, by the converter's patterns."""
    targets: tuple[str, ...]
    """Names of the tensors that it makes."""

    def convert(self, tensors: Mapping[str, Sequence[torch.Tensor]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Convert the tensors given for each pattern; return the results by name."""
        # Put where transformers' loader would collect whole tensors.
        self.converter.collected_tensors = defaultdict(list, {key: list(found) for key, found in tensors.items()})
        try:
            made = self.converter.convert(self.label, model=model, config=model.config)
        except Exception as error:  # any kind: operations do not check the shapes that they get
            raise ModelError(
                f"transformers cannot convert {self.label} of {model.config.model_type}: {first_line(error)}. Does "
                "config.json belong to another model, or are weights missing?"
            ) from error
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    @property
    def merges(self) -> bool:
        """Whether row i of the result is made from the i-th tensor of every pattern, and from nothing else."""
        first, *others = self.converter.operations
        return type(first).__name__ == "MergeModulelist" and first.dim == 0 and all(map(_keeps_rows, others))

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of the result are made from the same rows of one tensor of every pattern."""
        return all(map(_keeps_rows, self.converter.operations)) and all(len(k) == 1 for k in self.sources.values())


def _keeps_rows(operation: Any) -> bool:
    # Compared by name: some versions of transformers lack some of these classes.
    if type(operation).__name__ == "Transpose":
        return not getattr(operation, "check_dims", False) and min(operation.dim0, operation.dim1) >= 1
    return type(operation).__name__ in ("Chunk", "Concatenate", "Interleave") and operation.dim >= 1


class ConvertedWeights:
    """Weights in files, some of which are converted while they are read."""

    def __init__(self, stored: Weights, conversions: Sequence[Conversion], model: PreTrainedModel) -> None:
        self._stored = stored
        self._conversions = conversions
        self._by_target = {name: conversion for conversion in conversions for name in conversion.targets}
        self._model = model
        self._whole: tuple[Conversion, dict[str, torch.Tensor]] | None = None
        self._dtypes: dict[str, torch.dtype] = {}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        used = {key for c in self._conversions for keys in c.sources.values() for key in keys}
        shapes = {name: shape for name, shape in self._stored.shapes().items() if name not in used}
        for conversion in self._conversions:
            sources = {
                pattern: [torch.empty(self._stored.shapes()[key], device="meta") for key in keys]
                for pattern, keys in conversion.sources.items()
            }
            shapes.update((n, tuple(t.shape)) for n, t in conversion.convert(sources, self._model).items())
        return shapes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        conversion = self._by_target.get(name)
        if conversion is None:
            return self._stored.read(name, start, stop)
        shape, dtype = self._shapes[name], self._dtype(conversion)
        if start == stop:
            return torch.empty((0, *shape[1:]), dtype=dtype)
        if not (conversion.merges or conversion.keeps_rows):
            return self._converted_whole(conversion)[name][start:stop].to(dtype)
        self._whole = None  # if a whole conversion was kept, all of its rows and targets have been read
        at_once = max(1, _PIECE_BYTES // max(1, dtype.itemsize * torch.Size(shape[1:]).numel()))
        if stop - start <= at_once:
            return self._converted(conversion, start, stop)[name].to(dtype)
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        for first in range(start, stop, at_once):
            last = min(stop, first + at_once)
            rows[first - start : last - start] = self._converted(conversion, first, last)[name]
        return rows

    def where(self, name: str) -> str:
        conversion = self._by_target.get(name)
        if conversion is None:
            return self._stored.where(name)
        keys = [key for each in conversion.sources.values() for key in each]
        # Called only if something is wrong.
        broken = (key for key in keys if not all_finite(read_whole(self._stored, key)))
        return self._stored.where(next(broken, keys[0]))

    def _dtype(self, conversion: Conversion) -> torch.dtype:
        """Return the type that all sources promote to together. A few experts may have only one of several types."""
        if conversion.label not in self._dtypes:
            keys = [key for each in conversion.sources.values() for key in each]
            self._dtypes[conversion.label] = reduce(
                torch.promote_types, (self._stored.read(key, 0, 0).dtype for key in keys)
            )
        return self._dtypes[conversion.label]

    def _converted(self, conversion: Conversion, first: int, last: int) -> dict[str, torch.Tensor]:
        """Convert rows [first, last) of a conversion's results, reading only what they are made from."""
        if conversion.merges:
            sources = {
                pattern: [read_whole(self._stored, key) for key in keys[first:last]]
                for pattern, keys in conversion.sources.items()
            }
        else:
            sources = {p: [self._stored.read(keys[0], first, last)] for p, keys in conversion.sources.items()}
        return conversion.convert(sources, self._model)

    def _converted_whole(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        """Convert all of a conversion that mixes rows. Kept until another is needed: its other rows are read next."""
        if self._whole is None or self._whole[0] is not conversion:
            self._whole = None  # freed before the next is made: two at once are more than loading may take
            sources = {p: [read_whole(self._stored, key) for key in keys] for p, keys in conversion.sources.items()}
            self._whole = conversion, conversion.convert(sources, self._model)
        return self._whole[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Tensors of a network that are converted together for storing, and their keys and shapes in files."""

    names: tuple[str, ...]
    stored: Mapping[str, tuple[int, ...]]
    """Keys in the files, with their shapes."""
    conversion: Conversion | None = None
    renamings: Sequence[Any] = ()

    def turn_back(self, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel | None) -> dict[str, torch.Tensor]:
        """Turn the tensors `names` into the stored ones, by key."""
        if self.conversion is None or model is None:
            return dict(zip(self.stored, tensors.values(), strict=True))
        sources = {p: [tensors[name] for name in names] for p, names in self.conversion.sources.items()}
        made = self.conversion.convert(sources, model)
        return {_renamed(key, self.renamings): tensor for key, tensor in made.items()}


def outgoing(shapes: Mapping[str, tuple[int, ...]], model: PreTrainedModel | None) -> list[Outgoing]:
    """Return how the tensors of a network are stored: as transformers' save_pretrained would store them.

    `model` is None if the model brings its own code: transformers has no rules for it, so every tensor keeps its name.
    """
    if model is None:
        return [Outgoing(names=(name,), stored={name: shape}) for name, shape in shapes.items()]
    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    # Without the rules for prefixes: the network's names have prefixes, whether the files that it came from had them or
    # not.
    back = [rule.reverse_transform() for rule in reversed(rules) if type(rule).__name__ != "PrefixChange"]
    renamings = [rule for rule in back if not isinstance(rule, WeightConverter)]
    converters = [rule for rule in back if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: list[Outgoing] = []
    groups: dict[str, dict[str, list[str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        label, pattern = _matched(name, converters)
        if pattern is None:
            found.append(Outgoing(names=(name,), stored={_renamed(name, renamings): shapes[name]}))
        else:
            groups.setdefault(label, {}).setdefault(pattern, []).append(name)
    for label, sources in groups.items():
        conversion = Conversion(
            converter=of_pattern[next(iter(sources))],
            label=label,
            sources={pattern: tuple(names) for pattern, names in sources.items()},
            targets=(),
        )
        group = Outgoing(
            names=tuple(name for names in sources.values() for name in names),
            stored={},  # known only after a conversion on the meta device, below
            conversion=conversion,
            renamings=renamings,
        )
        made = group.turn_back({n: torch.empty(shapes[n], device="meta") for n in group.names}, model)
        found.append(replace(group, stored={key: tuple(tensor.shape) for key, tensor in made.items()}))
    return sorted(found, key=lambda each: dot_natural_key(each.names[0]))


def under_keys(
    groups: Sequence[Outgoing], key_of: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> list[Outgoing]:
    """Return these groups, with tensors that have a key in `key_of` stored under that key, unconverted."""
    found: list[Outgoing] = []
    for group in groups:
        if all(name in key_of for name in group.names):
            found += [Outgoing(names=(name,), stored={key_of[name]: shapes[name]}) for name in group.names]
        else:
            found.append(group)
    return found


def _matched(name: str, converters: Sequence[Any]) -> tuple[str, str | None]:
    """Return the name after the first converter that matches, and its pattern; the name and None if none matches."""
    for converter in converters:
        label, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return label, pattern
    return name, None


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
