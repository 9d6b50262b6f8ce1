"""Decide as which network a checkpoint is exported whose base also sees: with what was not trained, or alone.

The run has the language model. The vision tower and what joins the two are in the base's own files, untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raytune_fsdp.base.errors import ModelError, RaytuneError, first_line
from raytune_fsdp.base.untrusted import MIB, read_json
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, as_checkpoint, looks_like_checkpoint
from raytune_fsdp.checkpoint.contents import INITIAL
from raytune_fsdp.checkpoint.model_files import model_files
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.model.adapters.names import acts_outside
from raytune_fsdp.model.directory.bounds import read_config
from raytune_fsdp.model.directory.files import WeightFiles, find_weights, locate
from raytune_fsdp.model.directory.named_class import NamedClass, find_named, scoring_class_of
from raytune_fsdp.model.export.write import ExportForm, WholeTensors
from raytune_fsdp.model.network import stored_network
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.model.weights.keys import match_keys, matched_weights, owned_tensors, rows_of_tokens
from raytune_fsdp.model.weights.source import Weights, read_whole
from raytune_fsdp.plan.run_dir import RECIPE_FILE

_RECIPE_BYTES = 4 * MIB
_MOST_RUNS = 100
"""The most runs that are followed, each of which began with a checkpoint of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAs:
    """What is written of a checkpoint, and as which network."""

    source: WholeTensors
    form: ExportForm | None = None
    """None: it is written as the network that was trained."""
    alone: str | None = None
    """Why only the language model is written of a base that also sees."""

    @property
    def sentence(self) -> str | None:
        """The sentence for the card."""
        if self.form is None or (self.alone is None and self.form.base_directory is None):
            return None
        kind = type(self.form.network).__name__
        if self.alone is None:
            return f"It is a whole `{kind}`: what training did not reach, such as a vision tower, is that of its base."
        return f"It is the language model alone, a `{kind}`, without the parts of its base that see."


def written_of(
    checkpoint: CommittedCheckpoint,
    files: Path,
    source: WholeTensors,
    *,
    base_files: WeightFiles | None = None,
    moved: str | None = None,
) -> WrittenAs:
    """Return what to write of the weights of a checkpoint's network. `files`: the run's own.

    `base_files`: the base of adapters. `moved`: where the base of a run of all weights is now, if not where the run
    found it.
    """
    network = stored_network(files)
    if network is not None and head_of(network) is not None:
        named = scoring_class_of(network, files)
        return WrittenAs(source=_Renamed(source, named), form=ExportForm(network=named.network))
    if network is None or not sees(files):
        return WrittenAs(source=source)
    whole = network.config.model_type == read_config(files).get("model_type")
    try:
        base = base_files or find_weights(_base(checkpoint, files, moved))
        named = find_named(network, files, base.directory)
        if not whole and named.is_own:
            alone = f"{base.directory} is a {type(network).__name__}, which is the language model alone"
            raise ModelError(named.unbuilt or alone)
        match = match_keys(named.network, base)
        rest = matched_weights(base, match, named.network)
        # A base with other sizes is not the one that was trained. Rows of tokens may have been added since.
        tokens, stored = set(rows_of_tokens(named.network)), rest.shapes()
        for name, shape in source.shapes().items():
            there = named.there(name)
            if there not in tokens and tuple(stored.get(there, shape)) != tuple(shape):
                raise ModelError(
                    f"{str(base.directory)} is another model than the run began with: its {there} has another shape"
                )
    except (RaytuneError, OSError, ValueError) as error:  # ValueError: a place of an unknown protocol
        if whole:  # nothing is missing; it has the names that transformers gives it
            return WrittenAs(source=source)
        return WrittenAs(source=source, form=ExportForm(network=network), alone=first_line(error))
    # As the base has them: transformers may have renamed them since.
    keys = {name: key for name, key in match.key_of.items() if name in owned_tensors(named.network)}
    form = ExportForm(network=named.network, key_of=keys, base_directory=base.directory)
    adapters = CheckpointWeights(checkpoint), CheckpointWeights(checkpoint, INITIAL)
    untouched = base_files is not None and not acts_outside(named, *adapters)
    return WrittenAs(source=_Around(source, rest, named, untouched=untouched), form=form)


def sees(files: Path) -> bool:
    """Return whether a config.json describes a language model as a part of another model."""
    return isinstance(read_config(files).get("text_config"), dict)


def _base(checkpoint: CommittedCheckpoint, files: Path, moved: str | None) -> Path:
    """Return the directory of the model that the run began with, perhaps through checkpoints of other runs."""
    if moved is not None:
        return locate(moved, None, field="--base", weights=True)
    for _ in range(_MOST_RUNS):
        frozen = read_state(checkpoint).base
        path, revision, on_hub = (frozen["path"], frozen["revision"], True) if frozen is not None else began_with(files)
        if not looks_like_checkpoint(path):
            if not on_hub and not Path(path).expanduser().is_dir():
                raise ModelError(f"{path}, which the run began with, is not there: say with --base where it is now")
            return locate(path, revision, field="the base of this run", weights=True)
        found = as_checkpoint(path if is_url(path) else str(Path(path).expanduser().resolve()))
        if found is None:
            raise ModelError(f"{path}, which the run began with, is not there: say with --base where its base is")
        checkpoint, files = found, model_files(found)
    raise ModelError(f"{files} is of a run of a run of more than {_MOST_RUNS} runs: say with --base where its base is")


def began_with(files: Path) -> tuple[str, str | None, bool]:
    """Return path and revision of the model that a run of all weights began with, and whether it is on the hub."""
    file = files / RECIPE_FILE
    try:
        recipe: Any = read_json(file, limit=_RECIPE_BYTES)
        model, on_hub = recipe["config"]["model"], recipe["model_on_hub"]
        path, init = recipe.get("model_at") or model.get("path"), model.get("init")
        revision = recipe.get("model_commit") or model.get("revision")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} does not say what the run began with: say it with --base") from error
    if init != "pretrained" or not isinstance(path, str) or not isinstance(revision, str | None):
        raise ModelError("the run began with random weights, and has no base")
    return path, revision, on_hub is True


class _Renamed:
    """The tensors of a run under the names that its class for scores has for them."""

    def __init__(self, own: WholeTensors, named: NamedClass) -> None:
        self._own, self._here = own, {named.there(name): name for name in own.shapes()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._own.shapes()
        return {there: shapes[name] for there, name in self._here.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        types = self._own.dtypes()
        return {there: types[name] for there, name in self._here.items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = self._own.read_all([self._here[name] for name in names])
        return {name: found[self._here[name]] for name in names}


class _Around:
    """The tensors of the named class: those of the run, and all others from its base.

    `untouched`: the parts that see come from the base even where the run has them, with adapters that do nothing:
    merged, they would be rounded.
    """

    def __init__(self, own: WholeTensors, rest: Weights, named: NamedClass, *, untouched: bool) -> None:
        self._own, self._rest = own, rest
        trained, stored = own.shapes(), rest.shapes()
        left = {name for name in owned_tensors(named.network) if untouched and named.sees(name)}
        here = {name: None if name in left else named.here(name) for name in owned_tensors(named.network)}
        self._here: Mapping[str, str | None] = {name: each if each in trained else None for name, each in here.items()}
        self._shapes = {
            name: tuple(stored[name] if each is None else trained[each]) for name, each in self._here.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> dict[str, torch.dtype]:
        trained = self._own.dtypes()
        return {
            name: self._rest.read(name, 0, 0 if self._shapes[name] else 1).dtype if each is None else trained[each]
            for name, each in self._here.items()
        }

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> torch.Tensor:
        own = self._here[name]
        return read_whole(self._rest, name) if own is None else self._own.read_all([own])[own]
