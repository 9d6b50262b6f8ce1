"""All that can be found out about a run, and found wrong, before a rank is started or a file is written.

The launcher calls `prepare` once, in its own process or on rank 0, and hands the result to every rank: other ranks need
not see the model's files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Damaged, verify
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.store import verify_together
from raytune_fsdp.collectives import on_rank0
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.counts import Census
from raytune_fsdp.data.census import Builder, build_here, census
from raytune_fsdp.data.open_data import open_data
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import ConfigError, ModelError, ResumeError, first_line
from raytune_fsdp.evaluate import encode_prompt, positions_of
from raytune_fsdp.model.files import locate
from raytune_fsdp.model.hub import check_push
from raytune_fsdp.model.skeleton import (
    build_skeleton,
    fit_vocabulary,
    init_buffers,
    load_architecture,
    takes_position_ids,
)
from raytune_fsdp.plan import Plan, resolve
from raytune_fsdp.run.checks import check_first
from raytune_fsdp.run.initial_weights import Origin, find_origin, going_on, model_directory
from raytune_fsdp.run.resume import files_of, find_resume, identity_of
from raytune_fsdp.tracking.names import evaluation_loss
from raytune_fsdp.types import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What every rank needs to know before it builds its parts. Can be pickled."""

    hf_config: PretrainedConfig
    generation_config: GenerationConfig | None
    tokenizer: PreTrainedTokenizerBase
    train: Windows
    evals: Mapping[str, Windows]
    census: Census | None
    """None where the run is given in steps: nothing is counted then."""
    windows_built: int
    """Windows that were tokenized for all this."""
    origin: Origin | None
    """None with `model.init=random`."""
    resume: CommittedCheckpoint | None
    state: RunState
    damaged: Damaged
    """Checkpoints behind it, and why the run does not continue from them."""
    identity: Mapping[str, Any]
    files_of_data: Mapping[str, Sequence[str]]
    """Names of the files whose hashes are in the identity."""
    plan: Plan


def prepare(
    config: FinetuneConfig, world: int, progress: Progress | None = None, *, build: Builder = build_here
) -> Prepared:
    """Check everything and count the data. Writes nothing but caches: the one of the data, and the hub's.

    `build` builds the windows that are to be counted.
    """
    place = check_first(config, world)
    source = going_on(config, place)
    directory = model_directory(source, weights=False)
    hf_config = load_architecture(source.model, directory)
    tokenizer = load_tokenizer(source)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=config.model.resize_embeddings)
    skeleton = build_skeleton(hf_config, config.model, config.parallel.precision)
    _name_class(hf_config, skeleton)
    init_buffers(skeleton, torch.device("cpu"))  # a rank would fail at it otherwise
    _check_attention(config, skeleton, hf_config)
    if config.parallel.activation_checkpointing != "none" and not skeleton.supports_gradient_checkpointing:
        raise ConfigError(
            f"parallel.activation_checkpointing={config.parallel.activation_checkpointing}: {type(skeleton).__name__} "
            "does not support it; set it to none"
        )
    origin = find_origin(source, skeleton)
    vocab_size = hf_config.get_text_config().vocab_size
    for prompt in config.eval.prompts:
        encode_prompt(tokenizer, prompt, positions=positions_of(hf_config))
    train, evals = open_data(config, tokenizer, vocab_size, progress)
    identity, files_of_data = identity_of(config, hf_config, train), files_of(train)
    resume, state, damaged = find_resume(config, place, identity, files_of_data)
    # A broken row of an evaluation is found now, not when it comes.
    built = sum(census(windows, progress=progress, build=build).built for windows in evals.values())
    counted = None
    if config.train.epochs is not None:
        counted = census(train, config.train.epochs, progress=progress, build=build)
        built += counted.built
    else:
        # The rest is read while training; a wrong column or template shows in the first rows.
        built += Stream(train, seed=config.run.seed).first_window(state.cursor)[1]
    plan = resolve(config, world, counted, planned_schedule=state.schedule_steps)
    _check_extension(config, plan, state)
    _check_best(config, plan, evals)
    _check_export(config, plan)
    prepared = Prepared(
        hf_config=hf_config,
        generation_config=_generation_config(skeleton, directory),
        tokenizer=tokenizer,
        train=train,
        evals=evals,
        census=counted,
        windows_built=built,
        origin=origin,
        resume=resume,
        state=state,
        damaged=damaged,
        identity=identity,
        files_of_data=files_of_data,
        plan=plan,
    )
    return _unless_damaged(config, prepared)


def _unless_damaged(config: FinetuneConfig, prepared: Prepared) -> Prepared:
    """A run that is complete is not read by ranks: then its checkpoint is read here."""
    while (found := prepared.resume) is not None and prepared.state.step >= prepared.plan.steps:
        problem = verify(found, hashes=config.checkpoint.verify == "hashes")
        if problem is None:
            break
        prepared = _without(config, prepared, found, problem)
    return prepared


def on_world(config: FinetuneConfig, prepared: Prepared, world: int) -> Prepared:
    """The same for another number of ranks."""
    plan = resolve(config, world, prepared.census, planned_schedule=prepared.state.schedule_steps)
    # This may be another process, in another directory.
    return replace(prepared, plan=replace(plan, run_dir=prepared.plan.run_dir, checkpoints=prepared.plan.checkpoints))


def renewed(config: FinetuneConfig, prepared: Prepared, damaged: Damaged | None = None) -> Prepared:
    """The run as it stands now: what has been committed meanwhile is where it goes on, whatever `run.resume` says."""
    going_on = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    resume, state, damaged = find_resume(going_on, prepared.plan, prepared.identity, prepared.files_of_data, damaged)
    found = replace(prepared, resume=resume, state=state, damaged=damaged, windows_built=0)
    return on_world(config, found, prepared.plan.layout.world)


def settled(config: FinetuneConfig, prepared: Prepared) -> Prepared:
    """The same if its checkpoint is what was written, else the run as it stands without it. Collective.

    All ranks read the files of the checkpoint together, and all come to the same result.
    """
    while (found := prepared.resume) is not None:
        problem = verify_together(found, hashes=config.checkpoint.verify == "hashes")
        if problem is None:
            break
        prepared = _agreed_without(config, prepared, found, problem)
    return prepared


def _without(config: FinetuneConfig, prepared: Prepared, found: CommittedCheckpoint, problem: str) -> Prepared:
    """The run as it stands without a checkpoint that turned out to be damaged."""
    logger.warning("checkpoint %s is damaged (%s); looking for an older one", found.path, problem)
    return renewed(config, prepared, {**prepared.damaged, found: problem})


def _agreed_without(config: FinetuneConfig, prepared: Prepared, found: CommittedCheckpoint, problem: str) -> Prepared:
    """The same on all ranks: rank 0 looks. Collective."""

    def look() -> dict[str, Any]:
        now = _without(config, prepared, found, problem)
        return {"resume": now.resume, "state": now.state, "plan": now.plan, "damaged": now.damaged}

    return replace(prepared, **on_rank0(look))


def prepare_data(
    config: FinetuneConfig, progress: Progress | None = None
) -> tuple[PreTrainedTokenizerBase, Windows, dict[str, Windows]]:
    """The tokenizer and the data of a config, without its weights."""
    hf_config = load_architecture(config.model, model_directory(config, weights=False))
    tokenizer = load_tokenizer(config)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=config.model.resize_embeddings)
    train, evals = open_data(config, tokenizer, hf_config.get_text_config().vocab_size, progress)
    return tokenizer, train, evals


def _check_extension(config: FinetuneConfig, plan: Plan, state: RunState) -> None:
    """A run whose last step was short cannot go on: a short step would be in its middle, unlike in a longer run."""
    whole = state.step * plan.global_batch
    if state.samples < whole and plan.total_samples != state.samples:
        raise ResumeError(
            f"the run ended with a short step: {state.samples} packed samples are no multiple of "
            f"train.global_batch={plan.global_batch}, so it cannot be extended (train.epochs={config.train.epochs}, "
            f"train.max_steps={config.train.max_steps}); start a run of the wanted length under another run.name"
        )


def _check_best(config: FinetuneConfig, plan: Plan, evals: Mapping[str, Windows]) -> None:
    """To keep the best checkpoints, they must have been evaluated, by something there is."""
    keep, best = config.checkpoint.keep_best, config.checkpoint.best
    known = [evaluation_loss(name) for name in evals]
    if keep and not known:
        raise ConfigError(f"checkpoint.keep_best={keep}, but nothing is evaluated: set data.eval, or keep_best to 0")
    if keep and best is not None and best not in known:
        raise ConfigError(f"checkpoint.best={best} is no number of an evaluation: choose one of {', '.join(known)}")
    if keep and plan.save_every % plan.eval_every:
        raise ConfigError(
            f"checkpoint.keep_best={keep}, but of the checkpoints (every {plan.save_every} steps) only some would be "
            f"evaluated (every {plan.eval_every}): make checkpoint.every a multiple of eval.every"
        )


def _check_export(config: FinetuneConfig, plan: Plan) -> None:
    """What is exported beside training are checkpoints; what is pushed at the end must have somewhere to go."""
    if config.export.push is not None:
        check_push(config.export.push)
    every = config.export.every
    if every is not None and every % plan.save_every:
        raise ConfigError(
            f"export.every={every}, but there is a checkpoint only every {plan.save_every} steps: make export.every a "
            "multiple of checkpoint.every"
        )


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase:
    name = config.model.tokenizer or config.model.path
    if name is None:
        raise ConfigError("model.tokenizer is not set and there is no model.path to take it from: set model.tokenizer")
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    if config.model.tokenizer:
        directory = locate(name, None, field=field, weights=False)
    else:
        found = model_directory(config, weights=False)
        assert found is not None, "there is a path"
        directory = found
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


def _generation_config(skeleton: PreTrainedModel, directory: Path | None) -> GenerationConfig | None:
    """How the model's makers generate from it: an exported model keeps their end tokens and sampling."""
    if directory is not None and (directory / GENERATION_CONFIG_NAME).is_file():
        try:
            return GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is left out: %s", directory / GENERATION_CONFIG_NAME, error)
    return skeleton.generation_config


def _name_class(hf_config: PretrainedConfig, skeleton: PreTrainedModel) -> None:
    """Say in the config which network it describes, for whoever loads the exported model."""
    hf_config.architectures = [type(skeleton).__name__]  # a config written by hand, or of the bare decoder, lacks it
    if type(skeleton).__module__.startswith("transformers.") and hasattr(hf_config, "auto_map"):
        del hf_config.auto_map  # of code for another network; this one is transformers' own


def _check_attention(config: FinetuneConfig, skeleton: PreTrainedModel, hf_config: PretrainedConfig) -> None:
    positions = positions_of(hf_config)
    if config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the {positions} positions the model knows "
            f"(max_position_embeddings): set data.seq_len to at most {positions}"
        )
    if config.data.packing != "none" and not takes_position_ids(skeleton):
        raise ConfigError(
            f"data.packing={config.data.packing}: {type(skeleton).__name__} takes no position_ids, so documents packed "
            "together would see each other; set data.packing=none"
        )
