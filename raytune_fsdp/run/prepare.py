"""All that can be found out about a run, and found wrong, before a rank is started or a file is written.

The launcher calls `prepare` once, in its own process or on rank 0, and hands the result to every rank: other ranks need
not see the model's files.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.census import Builder, build_here, census
from raytune_fsdp.data.open_data import open_data
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import ConfigError, ModelError, first_line
from raytune_fsdp.evaluate import encode_prompt
from raytune_fsdp.model.attention import positions_of, takes_position_ids
from raytune_fsdp.model.files import locate
from raytune_fsdp.model.hub import check_push
from raytune_fsdp.model.skeleton import build_network, fit_vocabulary, init_buffers, load_architecture
from raytune_fsdp.run.checks import check_best, check_export, check_first
from raytune_fsdp.run.initial_weights import find_origin, model_directory, own_model_files
from raytune_fsdp.run.resume import files_of, find_resume, identity_of
from raytune_fsdp.run.standing import Prepared, Standing, confirm_complete, stand
from raytune_fsdp.tracking.names import evaluation_loss
from raytune_fsdp.types import Progress

logger = logging.getLogger(__name__)


def prepare(
    config: FinetuneConfig, world: int, progress: Progress | None = None, *, build: Builder = build_here
) -> tuple[Prepared, Standing]:
    """Check everything, count the data, and see where the run stands. Writes nothing but caches (data, hub).

    `build` builds the windows that are to be counted.
    """
    place = check_first(config, world)
    if config.export.push is not None:
        check_push(config.export.push)
    own = own_model_files(config, place)
    directory = own or model_directory(config, weights=False)
    hf_config = load_architecture(config.model, directory)
    tokenizer = load_tokenizer(config, directory)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=config.model.resize_embeddings)
    network = build_network(hf_config, config)
    _name_class(hf_config, network)
    init_buffers(network, torch.device("cpu"))  # a rank would fail at it otherwise
    _check_network(config, network, hf_config)
    origin = find_origin(config, network) if own is None else None
    for prompt in config.eval.prompts:
        encode_prompt(tokenizer, prompt, positions=positions_of(hf_config))
    train, evals = open_data(config, tokenizer, hf_config.get_text_config().vocab_size, progress)
    identity, files_of_data = identity_of(config, hf_config, train), files_of(train)
    # Before the census, which may take an hour: a run that cannot continue is refused in seconds.
    found = find_resume(place, identity, files_of_data, resume=config.run.resume)
    # A broken row of an evaluation is found now, not in the middle of training.
    built = sum(census(windows, progress=progress, build=build).built for windows in evals.values())
    counted = None
    if config.train.epochs is not None:
        counted = census(train, config.train.epochs, progress=progress, build=build)
        built += counted.built
    else:
        # The rest is read while training; a wrong column or template shows in the first rows.
        built += Stream(train, seed=config.run.seed).first_window(found.state.cursor)[1]
    prepared = Prepared(
        place=place,
        hf_config=hf_config,
        generation_config=_generation_config(network, directory),
        tokenizer=tokenizer,
        train=train,
        evals=evals,
        census=counted,
        origin=origin,
        identity=identity,
        files_of_data=files_of_data,
    )
    standing = stand(config, prepared, world, found, windows_built=built)
    check_best(config, standing.plan, map(evaluation_loss, evals))
    check_export(config, standing.plan)
    return prepared, confirm_complete(config, prepared, standing)


def prepare_data(
    config: FinetuneConfig, progress: Progress | None = None
) -> tuple[PreTrainedTokenizerBase, Windows, dict[str, Windows]]:
    """The tokenizer and the data of a config, without its weights."""
    directory = model_directory(config, weights=False)
    hf_config = load_architecture(config.model, directory)
    tokenizer = load_tokenizer(config, directory)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=config.model.resize_embeddings)
    train, evals = open_data(config, tokenizer, hf_config.get_text_config().vocab_size, progress)
    return tokenizer, train, evals


def load_tokenizer(config: FinetuneConfig, directory: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer that the config names, else the one in the model's `directory`."""
    name = config.model.tokenizer or config.model.path
    if name is None:
        raise ConfigError("model.tokenizer is not set and there is no model.path to take it from: set model.tokenizer")
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    if config.model.tokenizer:
        directory = locate(name, None, field=field, weights=False)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # many libraries read tokenizers
        first = first_line(error).rstrip(": ")
        raise ModelError(
            f"{field}={name}: no tokenizer could be loaded from {directory} ({first}); set model.tokenizer to one"
        ) from error
    if config.data.chat_template is not None:
        # The tokenizer takes it along, to prompts and into the exported model.
        tokenizer.chat_template = load_template(config.data.chat_template)
    return tokenizer


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id. Not the number of tokens: ids may have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def _generation_config(network: PreTrainedModel, directory: Path | None) -> GenerationConfig | None:
    """How the model's makers generate from it: an exported model keeps their end tokens and sampling."""
    if directory is not None and (directory / GENERATION_CONFIG_NAME).is_file():
        try:
            return GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is left out: %s", directory / GENERATION_CONFIG_NAME, error)
    return network.generation_config


def _name_class(hf_config: PretrainedConfig, network: PreTrainedModel) -> None:
    """Say in the config which network it describes, for whoever loads the exported model."""
    hf_config.architectures = [type(network).__name__]  # a config written by hand, or of the bare decoder, lacks it
    if type(network).__module__.startswith("transformers.") and hasattr(hf_config, "auto_map"):
        del hf_config.auto_map  # of code for another network; this one is transformers' own


def _check_network(config: FinetuneConfig, network: PreTrainedModel, hf_config: PretrainedConfig) -> None:
    """Refuse what this architecture cannot do."""
    positions = positions_of(hf_config)
    if config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the {positions} positions the model knows "
            f"(max_position_embeddings): set data.seq_len to at most {positions}"
        )
    if config.data.packing != "none" and not takes_position_ids(network):
        raise ConfigError(
            f"data.packing={config.data.packing}: {type(network).__name__} takes no position_ids, so documents packed "
            "together would see each other; set data.packing=none"
        )
    if config.parallel.activation_checkpointing != "none" and not network.supports_gradient_checkpointing:
        raise ConfigError(
            f"parallel.activation_checkpointing={config.parallel.activation_checkpointing}: {type(network).__name__} "
            "does not support it; set it to none"
        )
