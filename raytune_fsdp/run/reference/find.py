"""Which model is the reference. By default it is what the run starts from: the base, or another run's checkpoint, and
the adapter that the run begins with."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError, ModelError, RaytuneError, first_line
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config import FinetuneConfig, FullMethod
from raytune_fsdp.data.sources.source import shorten
from raytune_fsdp.model.attention.choose import positions_of
from raytune_fsdp.model.directory.bounds import read_config
from raytune_fsdp.model.directory.known_files import CONFIG_FILE
from raytune_fsdp.model.directory.needed_code import function_in
from raytune_fsdp.model.directory.tokenizer import tokenizer_in, vocabulary_of
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.run.network_checks import check_packed, check_shared, why_neighbours_matter
from raytune_fsdp.run.resume import code_in, code_of
from raytune_fsdp.run.resume_point import RunInputs
from raytune_fsdp.run.starting_weights import (
    AdapterFiles,
    ReferenceModel,
    StartingWeights,
    find_adapter,
    find_origin,
    model_directory,
)
from raytune_fsdp.run.trials.needs import network_needs

BASE = "base"

logger = logging.getLogger(__name__)


def compared(config: FinetuneConfig, prepared: RunInputs, directory: Path | None) -> RunInputs:
    """Return the inputs of a run with the model that its objective compares with, if it compares.

    `directory`: of the config and the tokenizer of the run's own model.
    """
    if not config.train.objective.compares:
        return prepared
    start = ReferenceModel(
        config=config, hf_config=prepared.hf_config, needs=prepared.needs,
        origin=prepared.origin or _begun(config, prepared),
        adapter=prepared.adapter or _adapter(config, prepared, directory),
        added=prepared.added, adapted=prepared.adapted, is_start=True, code=code_of(prepared.identity),
    )  # fmt: skip
    return replace(prepared, reference=find_reference(config, start, prepared.tokenizer))


def _begun(config: FinetuneConfig, prepared: RunInputs) -> StartingWeights | None:
    """Return what a run began with that has its own checkpoints now, and needs it for its reference alone.

    None: it is gone, or there never was any.
    """
    with suppress(RaytuneError):  # a new token's row would be another mean, of which only the run's beginning knew
        if config.model.init != "pretrained" or prepared.added:
            return None
        return find_origin(config, build_network(copy.deepcopy(prepared.hf_config), config), {})
    return None


def _adapter(config: FinetuneConfig, prepared: RunInputs, directory: Path | None) -> AdapterFiles | None:
    """Return the adapter that a run began with, which goes on; None: it began with none, or it is gone."""
    if getattr(config.method, "adapter", None) is not None:
        with suppress(RaytuneError):
            network = build_network(copy.deepcopy(prepared.hf_config), config, prepared.added, prepared.adapted)
            return find_adapter(config, network, directory)
    return None


def find_reference(config: FinetuneConfig, start: ReferenceModel, tokenizer: PreTrainedTokenizerBase) -> ReferenceModel:
    """Return the model that the run's objective compares with. `start`: what the run starts from."""
    wanted = config.reference.model
    if wanted is None or (wanted == BASE and getattr(config.method, "adapter", None) is None):
        return start
    if wanted == BASE:
        bare = config.with_sections(method={"adapter": None})
        return replace(start, config=bare, adapter=None, is_start=False)
    return other_model(config, "reference.model", wanted, tokenizer)


def other_model(config: FinetuneConfig, field: str, wanted: str, tokenizer: PreTrainedTokenizerBase) -> ReferenceModel:
    """Return a model besides the run's own, which a field names, after checking that it knows the run's texts."""
    if config.model.add_tokens:
        raise ConfigError(
            f"{field}={wanted} with model.add_tokens: it has no rows for the new tokens: leave one of the two out"
        )
    model = config.model.elsewhere(wanted)
    other = config.model_copy(update={"model": model, "method": FullMethod()})
    with _said_of(field, wanted):
        directory = model_directory(other)
        assert directory is not None, "it has a path"
        check_same_tokenizer(field, wanted, directory, tokenizer, trust_remote_code=config.model.trust_remote_code)
        _check_own_network(field, wanted, directory)
        hf_config = load_architecture(model, directory)
        known, rows = vocabulary_of(tokenizer), hf_config.get_text_config().vocab_size
        if known > rows:
            raise ModelError(
                f"{field}={wanted} has rows for {rows} tokens, and the run's tokenizer has ids up to {known - 1}: it "
                "says nothing of the others; name a model whose embedding has a row for each"
            )
        if config.data.seq_len > (positions := positions_of(hf_config)):
            raise ConfigError(
                f"{field}={wanted} knows {positions} positions, and data.seq_len is {config.data.seq_len}: lower "
                "seq_len, or name another model"
            )
        network = build_network(copy.deepcopy(hf_config), other)
        needs = network_needs(other, hf_config, network)
        check_packed(other, network, needs)
        check_shared(other, network, needs)
        if (mixed := why_neighbours_matter(other, network, needs)) is not None:
            logger.warning("%s=%s: %s", field, wanted, mixed)
        return ReferenceModel(
            config=other, hf_config=hf_config, needs=needs, origin=find_origin(other, network, {}),
            code=code_in(directory) if model.trust_remote_code else {},
        )  # fmt: skip


@contextmanager
def _said_of(field: str, wanted: str) -> Iterator[None]:
    """Say of a field what is found wrong with its model, which is read as the model of a run is."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        named = f"{field}={wanted}"
        first, *rest = (str(each).replace(f"model.path={wanted}", named) for each in error.args)
        raise type(error)(first if named in first else f"{named}: {first}", *rest) from error


def _check_own_network(field: str, wanted: str, directory: Path) -> None:
    """Refuse a model that a function builds: `model.network` is of the run's own model."""
    there = directory / CONFIG_FILE
    function = function_in(read_config(directory)) if there.is_file() else None
    if function is not None:
        raise ModelError(
            f"{field}={wanted} needs a network of its maker's own, which {shown(function)} builds, and only model.path "
            "may have one (model.network): name another model"
        )


def check_same_tokenizer(
    field: str, wanted: str, directory: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> None:
    """Refuse a model that means other tokens by the same ids."""
    try:
        theirs = tokenizer_in(directory, trust_remote_code=trust_remote_code).get_vocab()
    except ModelError:
        raise
    except Exception as error:  # many libraries read tokenizers
        raise ModelError(
            f"{field}={wanted}: no tokenizer could be loaded from {directory} ({first_line(error)}), so "
            "nobody knows whether it has the run's tokens: put its tokenizer there"
        ) from error
    differ = sorted(token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number)
    if differ:
        raise ModelError(
            f"{field}={wanted} has another tokenizer than the run: {shorten(differ[0])} "
            f"{'has another id there' if differ[0] in theirs else 'is unknown there'} (and {len(differ) - 1} more); "
            "its probabilities would be of other texts: name a model with the same tokenizer"
        )
