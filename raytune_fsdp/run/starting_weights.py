"""Where a run's first weights come from: a model directory, a checkpoint of another run, or a seed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.base.errors import ModelError, ResumeError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import (
    CommittedCheckpoint,
    as_checkpoint,
    committed,
    looks_like_checkpoint,
    verify,
)
from raytune_fsdp.checkpoint.contents import INITIAL
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.merged import check_digests, located_base, merged_weights
from raytune_fsdp.checkpoint.model_files import model_files
from raytune_fsdp.checkpoint.reading import verify_together
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import LoraMethod, QloraMethod
from raytune_fsdp.data.teacher import Form, TeacherFiles
from raytune_fsdp.model.adapters.attach import AdaptedWeights, adapted_modules, check_adapter_shapes, is_adapted
from raytune_fsdp.model.adapters.config_file import adapter_method, read_adapter_config
from raytune_fsdp.model.adapters.names import keys_held, own_names
from raytune_fsdp.model.adapters.principal import PrincipalInit, ResidualWeights
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.model.directory.files import WeightFiles, known_weights, locate
from raytune_fsdp.model.directory.known_files import CONFIG_FILE, travelling
from raytune_fsdp.model.directory.named_class import find_named
from raytune_fsdp.model.directory.scoring import other_classes
from raytune_fsdp.model.fill import FillMode
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.model.network import build_base, build_network
from raytune_fsdp.model.precision.quantized import QuantizedWeights
from raytune_fsdp.model.score_head import name_of_embedding, name_of_head
from raytune_fsdp.model.weights.keys import (
    Match,
    check_shapes,
    grown_rows,
    match_keys,
    matched_weights,
    owned_tensors,
    rows_of_tokens,
)
from raytune_fsdp.model.weights.source import FileWeights, GrownWeights, RandomWeights, Weights, WithHead
from raytune_fsdp.plan.run_dir import RunDir, checkpoints_of, is_run
from raytune_fsdp.run.same_files import check_copies, digests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingWeights:
    """Stored weights to begin with. Picklable."""

    stored: WeightFiles | CommittedCheckpoint
    match: Match
    """Which key of the files holds which tensor. Empty for a checkpoint."""
    grown: Mapping[str, int]
    """Embeddings that get more rows than are stored, by name."""
    added: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    """Rows of new tokens by embedding, each with the rows whose mean it starts as; none means all."""
    base_files: WeightFiles | None = None
    """The files of the base, if `stored` is a checkpoint that holds adapters."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """What that checkpoint records about the files of its base."""
    seed: int = 0
    """Draws a head that scores, where none is stored."""

    def weights(self, model: PreTrainedModel) -> Weights:
        """Return the source to fill the network from. No model file is opened yet: this rank may not see any."""
        weights: Weights
        if isinstance(self.stored, CommittedCheckpoint):
            weights = merged_weights(self.stored, model_files(self.stored), self.base_files)
        else:
            weights = matched_weights(self.stored, self.match, model)
        weights = with_score_head(weights, model, self.seed, self.where)
        return GrownWeights(weights, self.grown, self.added) if self.grown or self.added else weights

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the files, to compare what different ranks see. Raise OSError if there are none."""
        if isinstance(self.stored, CommittedCheckpoint):
            base = {} if self.base_files is None else self.base_files.sizes()
            return {**storage_at(self.stored.root).sizes(self.stored.name), **{f"base/{n}": s for n, s in base.items()}}
        return self.stored.sizes()

    @property
    def where(self) -> str:
        return self.stored.path if isinstance(self.stored, CommittedCheckpoint) else str(self.stored.directory)


def with_score_head(weights: Weights, network: PreTrainedModel, seed: int, where: str) -> Weights:
    """Return the weights of a network with its head, if it has one that scores.

    It is drawn where nothing is stored, or what predicts tokens. One that scores, but of another shape, is refused.
    `where`: the files.
    """
    if (head := name_of_head(network)) is None:
        return weights
    name, shapes = f"{head}.weight", weights.shapes()
    wanted, found = tuple(network.get_parameter(name).shape), shapes.get(name)
    if found == wanted:
        return weights
    embedding = shapes.get(name_of_embedding(network))
    if found is not None and (embedding is None or found[0] != embedding[0]):
        raise ModelError(
            f"model.head: {weights.where(name)} has {found[0]} output(s) of {found[1]} numbers, and this head has "
            f"{wanted[0]} of {wanted[1]}: set model.head.outputs (or labels) to those of {where}, or begin with a "
            "model without such a head"
        )
    return WithHead(weights, network, head, seed)


def own_model_files(config: FinetuneConfig, place: RunDir) -> Path | None:
    """Return the run's own config and tokenizer, if it began with another run's checkpoint and has one of its own.

    The other checkpoint may be gone by then: its run prunes it as it continues.
    """
    path = config.model.path
    if path is None or config.model.init != "pretrained" or not looks_like_checkpoint(path):
        return None
    own = place.model_files
    if config.run.resume == "never" or not (own / CONFIG_FILE).is_file() or not committed(place.checkpoints):
        return None
    travelling(own, code=True)  # none of them is a link
    return own


def model_directory(config: FinetuneConfig, commit: str | None = None) -> Path | None:
    """Return the directory of the model's config and tokenizer. The weights of a hub model are not fetched."""
    path = config.model.path
    if path is None:
        return None
    checkpoint = _checkpoint(path)
    if checkpoint is not None:
        return model_files(checkpoint)
    return locate(path, commit or config.model.revision, field="model.path", weights=False)


def _checkpoint(path: str) -> CommittedCheckpoint | None:
    """Return the checkpoint that `model.path` names; None if it names a model. Refuse a whole run."""
    local = not is_url(path)
    place = str(Path(path).expanduser().resolve()) if local else path
    try:
        found = as_checkpoint(place)
        whole_run = found is None and local and is_run(Path(place))
    except (OSError, ValueError) as error:  # ValueError: an unknown protocol
        reason = "permission denied for this user" if isinstance(error, PermissionError) else error
        raise ModelError(f"model.path={path} cannot be read: {reason}") from error
    if whole_run:
        there = committed(checkpoints_of(Path(place)))
        choice = f", for example {there[-1].path}" if there else "; it has none yet"
        raise ModelError(
            f"model.path={path} is a whole run, whose newest checkpoint changes: name one of its checkpoints{choice}"
        )
    if found is None and not local:
        raise ModelError(f"model.path={path} is not a committed checkpoint, the only thing that a URL may name here")
    return found


def find_origin(
    config: FinetuneConfig, network: PreTrainedModel, added: Mapping[int, Sequence[int]], commit: str | None = None
) -> StartingWeights | None:
    """Return the stored weights for this network, after checking that they fit it; None if `model.init=random`.

    For a network with adapters, they are those of the network without. `added`: the ids of new tokens, each with the
    ids of the tokens that it starts as the mean of. `commit`: the commit of a hub model from which its config was read.
    """
    if config.model.init != "pretrained" or config.model.path is None:
        return None
    checkpoint = _checkpoint(config.model.path)
    if checkpoint is not None and is_adapted(network):
        raise ModelError(
            f"model.path={config.model.path} is a checkpoint, which its run removes one day, and a run with "
            f"method.type={config.method.type} needs its base for ever: export it as a whole model "
            f"(`raytune-fsdp export {config.model.path} DIRECTORY --merge`), and set model.path to DIRECTORY"
        )
    network = without_adapters(config, network)
    if checkpoint is not None:
        _check_whole(config, verify(checkpoint, hashes=False))
        base, frozen = read_state(checkpoint).base or {}, located_base(checkpoint, fetch=False)
        origin = StartingWeights(
            stored=checkpoint, match=Match(key_of={}), grown={}, base_files=frozen, base=base, seed=config.run.seed
        )
    else:
        files = known_weights(config.model.path, commit or config.model.revision, field="model.path")
        origin = StartingWeights(stored=files, match=match_keys(network, files), grown={}, seed=config.run.seed)
    weights = origin.weights(network)
    if not isinstance(weights, WithHead):
        _check_classes(config, network)
    if checkpoint is not None:
        # A checkpoint has exactly the network's own names; the keys of files were matched to them.
        differ = sorted(set(owned_tensors(network)) ^ set(weights.shapes()))
        if differ:
            raise ModelError(
                f"{origin.where} belongs to another network than its config.json describes: {differ[0]}"
                + (f" (and {len(differ) - 1} more)" if len(differ) > 1 else "")
            )
    grown = grown_rows(network, weights.shapes()) if config.model.resize_embeddings or added else {}
    check_shapes(network, GrownWeights(weights, grown))
    return replace(origin, grown=grown, added=dict.fromkeys(_rows_of_tokens(network), added) if added else {})


def _check_classes(config: FinetuneConfig, network: PreTrainedModel) -> None:
    """Refuse to go on with a stored head whose classes have other names, or another order."""
    head = config.model.head
    stored = None if head is None else other_classes(network.config, head)
    if head is not None and stored is not None:
        raise ModelError(
            f"model.head.labels={shown(head.labels)}: the classes in {config.model.path} are {shown(stored)}: "
            "write them as they are stored, or begin with a model without such a head"
        )


def without_adapters(config: FinetuneConfig, network: PreTrainedModel) -> PreTrainedModel:
    """Return the same network without adapters, as its weights are stored."""
    if not is_adapted(network):
        return network
    # Building writes what `model.attention` asks for into the config, and this one holds what was chosen.
    return build_base(copy.deepcopy(network.config), config.model, config.parallel.precision)


def find_adapter(config: FinetuneConfig, network: PreTrainedModel, base: Path | None) -> AdapterFiles | None:
    """Return the adapter that a run begins with, after checking that it fits; None: a new one.

    `base` is the directory of the model's config.
    """
    path = getattr(config.method, "adapter", None)
    if path is None:
        return None
    files = known_weights(path, None, field="method.adapter", name="adapter_model")
    directory = files.directory
    assert base is not None, "adapters have a base"
    named = find_named(without_adapters(config, network), base, base)
    # The same matrices, scaled otherwise, mean something else under this method.
    there = adapter_method(directory, files.file_of, own_names(named))
    if not isinstance(config.method, type(there)):
        raise ModelError(f"method.adapter={path} is of the kind {there.type}: set method.type to it")
    for each in ("alpha", "rank", "rank_stabilized", "dora"):
        ours, other = getattr(config.method, each, None), getattr(there, each, None)
        if ours != other:
            raise ModelError(
                f"method.adapter={path} has {each}={other}, and method.{each} is {ours}: set it to {other}"
            )
    key_of = keys_held(network, named, files.file_of)
    if (head := name_of_head(network)) is not None:
        _check_head(path, files, key_of, f"{head}.weight", tuple(network.get_parameter(f"{head}.weight").shape))
    found = AdapterFiles(files=files, key_of=key_of)
    unknown = sorted(files.file_of.keys() ^ set(found.key_of.values()))
    if unknown:
        raise ModelError(
            f"method.adapter={path} is not an adapter of this method: {unknown[0]} is "
            f"{'in its file only' if unknown[0] in files.file_of else 'not in its file'}"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
            + (f" ({named.unbuilt})" if named.unbuilt else "")
            + "; set method.target_modules and the rest as in its adapter_config.json"
        )
    check_adapter_shapes(network, found.weights(), path, found.key_of)
    theirs = read_adapter_config(directory).get("base_model_name_or_path")
    if isinstance(theirs, str) and Path(theirs).name != Path(str(config.model.path)).name:
        here = config.model.path
        logger.warning("method.adapter=%s is of %s, and model.path is %s: is it the same?", path, theirs[:200], here)
    return found


def _check_head(path: str, files: WeightFiles, key_of: dict[str, str], name: str, shape: tuple[int, ...]) -> None:
    """Leave out a head that scores if an adapter has none: it then begins as new. Refuse one of another size."""
    if key_of[name] not in files.file_of:
        del key_of[name]
        return
    there = FileWeights(files, {name: key_of[name]}).shapes()[name]
    if there != shape:
        raise ModelError(
            f"method.adapter={path} has a head of {there[0]} output(s), and this one has {shape[0]}: set "
            f"model.head.outputs={there[0]} (or as many labels), or begin with another adapter"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A stored adapter. Picklable."""

    files: WeightFiles
    key_of: Mapping[str, str]
    """The key of every tensor, by its name in the network. Parts that see or hear, and a head that scores, may have
    none, and begin as new."""

    def weights(self) -> Weights:
        return FileWeights(self.files, self.key_of)


def _rows_of_tokens(network: PreTrainedModel) -> list[str]:
    """Return the names of embeddings and head. A layer's tensor may have as many rows as there are tokens by chance."""
    inside = {id(tensor) for layer in layers_of(network) for tensor in layer.parameters()}
    owned = owned_tensors(network)
    return [name for name in rows_of_tokens(network) if id(owned[name]) not in inside]


def first_weights(
    config: FinetuneConfig,
    origin: StartingWeights | None,
    model: PreTrainedModel,
    mode: FillMode,
    adapter: AdapterFiles | None = None,
    checkpoint: CommittedCheckpoint | None = None,
) -> tuple[Weights | None, PrincipalInit | None]:
    """Return the source to fill `model` from, and what all ranks must turn to the tensor that is filled next.

    The source is None if rank 0 reads for this rank; the other is None if nothing has to be turned. Collective.
    `checkpoint`: the one that a run of adapters continues from; the base is not in it.
    """
    if origin is None:
        adapted = adapted_modules(name for name, _ in model.named_parameters()) if is_adapted(model) else None
        twin = build_network(copy.deepcopy(model.config), config, adapted=adapted)
        return RandomWeights(twin, config.run.seed), None
    # What will be read is compared with its hashes, and the copies of different nodes with each other.
    alone, hashes = mode == "rank0", config.checkpoint.verify == "hashes"
    if isinstance(origin.stored, CommittedCheckpoint):
        _check_whole(config, verify_together(origin.stored, hashes=hashes, only_rank0=alone))
        if hashes and origin.base_files is not None:
            check_digests(origin.base_files, digests(origin.base_files, alone=alone), origin.base)
    elif hashes and not alone and not is_adapted(model):  # the base of adapters is hashed anyhow
        check_copies(origin.stored)
    if hashes and not alone and adapter is not None:
        check_copies(adapter.files)
    opened: list[Weights] = []

    def open_them() -> None:
        if mode == "sharded" or dist.get_rank() == 0:
            opened.append(origin.weights(without_adapters(config, model)))

    on_all_ranks(open_them)  # an open file stays with its rank
    weights = opened[0] if opened else None
    return _with_adapters(config, weights, model, adapter, checkpoint) if is_adapted(model) else (weights, None)


def _with_adapters(
    config: FinetuneConfig,
    base: Weights | None,
    model: PreTrainedModel,
    adapter: AdapterFiles | None,
    checkpoint: CommittedCheckpoint | None,
) -> tuple[Weights | None, PrincipalInit | None]:
    """Return the weights of a network with adapters, from those of the network without. Collective."""
    method, seed = config.method, config.run.seed
    start, beginning = None if adapter is None else adapter.weights(), None
    if isinstance(method, LoraMethod) and method.init != "zero":
        if checkpoint is None:
            start = beginning = PrincipalInit(base, model, method.init, seed)
        else:
            start = CheckpointWeights(checkpoint, INITIAL)
        base = None if base is None else ResidualWeights(base, start, model)
    if base is None:
        return None, beginning
    if isinstance(method, QloraMethod):
        base = QuantizedWeights(base, model)
    return AdaptedWeights(base, model, seed, start), beginning


def _check_whole(config: FinetuneConfig, problem: str | None) -> None:
    if problem is not None:
        raise ResumeError(f"model.path={config.model.path} is damaged: {problem}; use another checkpoint of that run")


def fill_mode(config: FinetuneConfig, origin: StartingWeights | None, adapter: AdapterFiles | None = None) -> FillMode:
    """Return `sharded` if every rank sees the files that rank 0 sees, else `rank0`. Collective."""
    if origin is None:
        return "sharded"
    if config.model.fill == "rank0":
        return "rank0"

    def look() -> Mapping[str, int]:
        added = {} if adapter is None else adapter.files.sizes()
        return {**origin.sizes(), **{f"adapter/{name}": size for name, size in added.items()}}

    wanted = on_rank0(look, what="look at the files of the model")
    try:
        sees = look() == wanted
    except OSError:
        sees = False
    views = on_all_ranks(lambda: sees)
    if all(views):
        return "sharded"
    if config.model.fill == "sharded":
        blind = [rank for rank, view in enumerate(views) if not view]
        raise ModelError(
            f"model.fill=sharded, but rank(s) {blind} do not see the same files in {origin.where}: put the model on "
            "storage that all nodes share, or set model.fill=rank0"
        )
    return "rank0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """A model to compare with, found before any rank is started. Picklable."""

    config: FinetuneConfig
    """Of a run that starts from it."""
    hf_config: PretrainedConfig
    needs: KernelNeeds
    origin: StartingWeights | None
    adapter: AdapterFiles | None = None
    """The adapter that belongs to it."""
    added: Collection[int] = ()
    adapted: Collection[str] | None = None
    is_start: bool = False
    """Whether it is what the run itself starts from."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """The hashes of its own code, if it has some, as an identity names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel:
    """Whose predictions a run learns, found before any rank is started. Picklable."""

    model: ReferenceModel | None
    """None: `kept` is all that there is of it."""
    kept: TeacherFiles | None
    """What an earlier pass has left, if the config names that."""
    form: Form
    tokenizer: str
    """A digest of the run's tokenizer."""
