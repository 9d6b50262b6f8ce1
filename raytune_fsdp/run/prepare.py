"""Find everything that can be wrong with a run before a rank is started or a file is written.

The launcher calls `prepare` once, in its own process or on rank 0, and passes the result to every rank: other ranks
need not see the model's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.base.batch import Cursor, Progress
from raytune_fsdp.base.errors import ConfigError, ModelError, RaytuneError, first_line, is_panic
from raytune_fsdp.base.lease import lease_of
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.state import RunState, check_size
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import AdapterMethod
from raytune_fsdp.data.census import Builder, answers_of, build_here, census
from raytune_fsdp.data.mixture import Order
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.questions import check_names, open_tasks
from raytune_fsdp.data.rows.templates import TemplateChoice
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.adapters.attach import is_adapted
from raytune_fsdp.model.attention.choose import positions_of
from raytune_fsdp.model.directory.bounds import NEEDS_CODE, wants_code
from raytune_fsdp.model.directory.files import commit_of, locate
from raytune_fsdp.model.directory.hub_push import check_push
from raytune_fsdp.model.directory.scoring import describe_head, set_padding
from raytune_fsdp.model.directory.tokenizer import tokenizer_in, vocabulary_of
from raytune_fsdp.model.network import build_network, count_parameters, fit_vocabulary, init_buffers, load_architecture
from raytune_fsdp.model.own_network import name_class
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.run_dir import RunDir, check_links
from raytune_fsdp.run.base_model import Base, begun_with, check_base
from raytune_fsdp.run.beginning import orders_of, orders_on_record
from raytune_fsdp.run.checks import check_best, check_early_stop, check_export, check_first, warn_of_place
from raytune_fsdp.run.described import started_by
from raytune_fsdp.run.evaluation.answers import check_prompts, generation_config
from raytune_fsdp.run.evaluation.evaluation import metrics_of_run
from raytune_fsdp.run.forks.parent import entry_of_fork, fork_of
from raytune_fsdp.run.length import warn_of_schedule
from raytune_fsdp.run.network_checks import check_network, check_reached, warn_of_tokens
from raytune_fsdp.run.places import check_beginning, mark_of
from raytune_fsdp.run.reference.find import compared
from raytune_fsdp.run.resume import (
    adapted_before,
    check_same_adapters,
    check_same_run,
    code_of_model,
    files_of,
    files_of_code,
    find_resume,
    identity_of,
    own_code,
)
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs, confirm_complete, end_if_there, resume_point_of
from raytune_fsdp.run.starting_weights import (
    StartingWeights,
    find_adapter,
    find_origin,
    model_directory,
    own_model_files,
)
from raytune_fsdp.run.teacher.find import learned_from
from raytune_fsdp.run.tokenizer import add_tokens
from raytune_fsdp.run.trials.needs import network_needs
from raytune_fsdp.run.trials.probe import check_step


def prepare(
    config: FinetuneConfig,
    world: int,
    progress: Progress | None = None,
    *,
    build: Builder = build_here,
    dry: bool = False,
    trust_places: bool = False,
) -> tuple[RunInputs, ResumePoint]:
    """Check everything, count the data, and find out where the run stands. Only caches (data, hub) are written.

    `build` builds the windows to count. `dry`: the run saves and evaluates nothing. `trust_places`: of the command.
    """
    place = check_first(config, world)
    if config.export.push is not None:
        check_push(config.export.push)
    fork = fork_of(config)
    found = find_resume(place, resume=config.run.resume, fork=fork, trusted=trust_places)
    own = own_model_files(config, place if found.parent is None else found.parent.place)
    directory = own or model_directory(config, begun_with(config, found.state.base))
    hf_config, tokenizer, added = _fitted(config, directory)
    codes = own_code(config, hf_config)
    adapted = adapted_before(found) if isinstance(config.method, AdapterMethod) else None
    network = build_network(hf_config, config, added, adapted)
    name_class(hf_config, network)
    describe_head(config, hf_config, network, tokenizer)
    init_buffers(network, torch.device("cpu"))  # it may fail, and would fail on a rank otherwise
    needs = network_needs(config, hf_config, network)
    check_network(config, network, needs, world, begins=not (found.checkpoint or place.beginning.exists()))
    check_reached(config, network, adapted)
    check_step(config, hf_config, network, needs)
    begins = own is None or is_adapted(network)
    check_beginning(config, trusted=trust_places, begins=begins)
    origin = _origin(config, network, added, found.state.base, None if own else directory) if begins else None
    check_prompts(config, tokenizer, positions := positions_of(hf_config))
    vocabulary = hf_config.get_text_config().vocab_size
    train, evals = open_data(config, tokenizer, vocabulary, progress, **orders_of(found.state))
    rules = Order.of(train.order_version, found.state.newest_order).rules
    tasks = open_tasks(config, tokenizer, vocabulary, positions=positions, progress=progress, order=rules)
    check_names(tasks, evals)
    identity = identity_of(config, hf_config, train, codes, code_of_model(config, directory, found))
    identity |= entry_of_fork(config, found.parent, found.state, identity)
    # Before the census, which may take an hour, so that a run that cannot continue is refused in seconds.
    check_size(RunState(identity=identity, files=(files_of_data := files_of(train))))
    check_same_run(found, identity, files_of_data)
    check_same_adapters(found, config, network)
    by_count = getattr(config.train.objective, "desirable_weight", None) == "auto"
    counted, built = _counted(config, train, {} if dry else evals, found.state.cursor, progress, build)
    prepared = RunInputs(
        place=place,
        hf_config=hf_config,
        generation_config=generation_config(config, network, directory, tokenizer),
        tokenizer=tokenizer,
        train=train,
        evals=evals,
        tasks=tasks,
        census=counted,
        judged=answers_of(train, progress, build) if by_count else None,
        origin=origin,
        adapter=find_adapter(config, network, directory) if found.checkpoint is None else None,
        identity=identity,
        files_of_data=files_of_data,
        parameters=count_parameters(network),
        needs=needs,
        lease=lease_of(place.lock),
        added=tuple(added),
        adapted=adapted,
        dry=dry,
        mark=None if dry else mark_of(config, begins=begins),
        codes=codes,
        code=files_of_code(directory) if config.model.trust_remote_code and directory is not None else {},
        fork=fork,
        started_by=started_by(),
    )
    prepared = learned_from(config, compared(config, prepared, directory))
    standing = resume_point_of(config, prepared, world, found, windows_built=built)
    _check_with_length(config, standing, metrics_of_run(config, evals, tasks), dry=dry)
    standing = confirm_complete(config, prepared, standing)
    end_if_there(config, prepared, standing)
    return prepared, standing


def _check_with_length(config: FinetuneConfig, standing: ResumePoint, metrics: Sequence[str], *, dry: bool) -> None:
    """Refuse what is wrong, and warn of what may not be meant in a new run, once its length and the names of its
    evaluations are known."""
    check_best(config, standing.plan, metrics)
    check_early_stop(config, metrics)
    check_export(config, standing.plan)
    if standing.checkpoint is None and not dry:
        warn_of_schedule(config, standing.plan)
        warn_of_place(config)


def _counted(
    config: FinetuneConfig,
    train: Windows,
    evals: Mapping[str, Windows],
    cursor: Cursor,
    progress: Progress | None,
    build: Builder,
) -> tuple[Census | None, int]:
    """Return the census, where the length of the run needs it, and how many windows were built."""
    # Evaluation data is counted in every run: its broken rows show now, not in the middle of training.
    built = sum(census(windows, progress=progress, build=build).built for windows in evals.values())
    if config.train.epochs is not None:
        counted = census(train, config.train.epochs, progress=progress, build=build)
        return counted, built + counted.built
    # Only the first window; the others are built during training. A wrong column or template shows in it already.
    return None, built + Stream(train, seed=config.run.seed).load(cursor, 0)[1]


def _origin(
    config: FinetuneConfig,
    network: PreTrainedModel,
    added: Mapping[int, Sequence[int]],
    before: Base | None,
    directory: Path | None,
) -> StartingWeights | None:
    """Return the stored weights that the run begins with, or the base of its adapters.

    They are of the commit whose config was read in `directory`, or else of the commit that the run began with.
    """
    commit = begun_with(config, before) if directory is None else commit_of(directory)
    origin = find_origin(config, network, added, commit)
    if origin is not None and config.method.type != "full":
        warn_of_tokens(config, network, origin)
    if is_adapted(network):
        check_base(config, network, origin, before)
    return origin


def open_as_run(
    config: FinetuneConfig, progress: Progress | None = None
) -> tuple[PreTrainedTokenizerBase, Windows, dict[str, Windows]]:
    """Return the tokenizer and the data of a config, in the order of its run. No weights are fetched."""
    place, orders, commit = RunDir.of(config), orders_of(RunState()), None
    check_links(place.path)
    if is_url(place.checkpoints):  # a look at the data would have to wait for an object store
        orders = orders_on_record(place)
    else:
        with suppress(RaytuneError):
            found = find_resume(place, resume="auto")
            orders, commit = orders_of(found.state), begun_with(config, found.state.base)
    hf_config, tokenizer, _ = _fitted(config, model_directory(config, commit))
    vocab_size = hf_config.get_text_config().vocab_size
    train, evals = open_data(config, tokenizer, vocab_size, progress, **orders)
    return tokenizer, train, evals


def _fitted(
    config: FinetuneConfig, directory: Path | None
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, dict[int, tuple[int, ...]]]:
    """Return the architecture and the tokenizer, fitted to each other, and the tokens that were added."""
    hf_config = load_architecture(config.model, directory)
    tokenizer = load_tokenizer(config, directory)
    added = add_tokens(tokenizer, config.model.add_tokens)
    if not added and getattr(config.method, "train_added_tokens", False):
        raise ConfigError(
            "method.train_added_tokens=true: this tokenizer has all tokens of model.add_tokens already, and their rows "
            "are not distinguished from others: set it to false, or name embedding and head in method.modules_to_save"
        )
    if config.model.head is not None:
        set_padding(config.model.head, tokenizer)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=config.model.resize_embeddings or bool(added))
    return hf_config, tokenizer, added


def load_tokenizer(config: FinetuneConfig, directory: Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the config names, or else the one in the model's `directory`."""
    name = config.model.tokenizer or config.model.path
    if name is None:
        raise ConfigError(
            "model.tokenizer is not set, and there is no model.path to take one from: set model.tokenizer"
        )
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    if config.model.tokenizer:
        directory = locate(name, None, field=field, weights=False)
    assert directory is not None
    try:
        tokenizer = tokenizer_in(directory, trust_remote_code=config.model.trust_remote_code)
    except ModelError:
        raise
    except BaseException as error:  # many libraries read tokenizers, one of them in Rust
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if wants_code(error):
            raise ModelError(f"{field}={name} {NEEDS_CODE}, then set model.trust_remote_code=true") from error
        first = first_line(error).rstrip(": ")
        if "the backend tokenizer" in first:  # and then a list of ways to make one
            first = "it has no file that transformers knows as a tokenizer's, such as tokenizer.json"
        raise ModelError(
            f"{field}={name}: no tokenizer could be loaded from {directory} ({first}); set model.tokenizer to one"
        ) from error
    set_template(config, tokenizer)
    return tokenizer


def set_template(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the config's chat template and variables, so that prompts and the exported model have them."""
    TemplateChoice.of_prompts(config.data).keep_in(tokenizer)
