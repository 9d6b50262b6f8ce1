"""Open the data of a config: the windows to train on, and the windows of each evaluation dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config import DatasetConfig, FinetuneConfig, HeldOutConfig
from raytune_fsdp.config.sections.data import DataConfig
from raytune_fsdp.config.sections.formats import InstructionFormat, PythonFormat
from raytune_fsdp.data.duplicates import (
    RowReader,
    groups_of,
    in_either,
    is_read_cheaply,
    warn_of_measured,
    without_equal,
)
from raytune_fsdp.data.mixture import FOURTH_ORDER, Order, order_of
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.sources.opening import open_sources
from raytune_fsdp.data.sources.places import find_files
from raytune_fsdp.data.sources.selection import Selected, hold_out
from raytune_fsdp.data.sources.source import Source, dataset_name, dataset_names
from raytune_fsdp.data.unread import warn_of_unread
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.run_dir import cache_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int64Array

logger = logging.getLogger(__name__)

HELD_OUT = "held_out"
"""Name of the evaluation on rows that are held out of the training."""


def open_data(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    order_version: int | None = None,
    newest_order: int | None = None,
) -> tuple[Windows, dict[str, Windows]]:
    """Open the training data, and each evaluation dataset by its name.

    `order_version`: the version of a run that continues; None for a new run. `newest_order`: the newest version when
    that run was begun, by which evaluations are read that it has gained since. Where it is not known (None), they are
    read like the rest.
    """
    windows = _opener(config, tokenizer, vocab_size, progress, order_version)
    data, datasets, order = config.data, config.data.train, order_of(order_version)
    names, trained = dataset_names(datasets), [i for i, dataset in enumerate(datasets) if _is_trained(dataset)]
    sources: Sequence[Source] = open_sources(datasets, data, cache_of(config), progress, order)
    evals, compared = {}, [(datasets[i], sources[i], order) for i in trained]
    if not isinstance(data.eval, HeldOutConfig):
        evals = _named(data.eval, _opener(config, tokenizer, vocab_size, progress, order_version, newest_order))
        rules = Order.of(order_version, newest_order).rules
        compared += [(dataset, each.sources[0], rules) for dataset, each in zip(data.eval, evals.values(), strict=True)]
    groups = _groups(compared, config, tokenizer, vocab_size, progress)
    own, measured = dict(zip(trained, groups, strict=False)), dict(zip(evals, groups[len(trained) :], strict=True))
    if isinstance(data.eval, HeldOutConfig):
        alike = own if order >= FOURTH_ORDER else None
        if config.train.objective.rows is not None:
            scoring = _scoring_of(config, tokenizer)
            readers = [
                RowReader.of(*each[:2], data, tokenizer, vocab_size, order, prompts=True, scoring=scoring)
                for each in compared
            ]  # several answers to one prompt are measured, or trained on
            of_prompts = groups_of(readers, cache_of(config), progress)
            alike = dict(zip(trained, in_either(of_prompts, groups), strict=True))
        pairs = _hold_out(data.eval, datasets, sources, alike)
        sources = [rest for rest, _ in pairs]
        # Each row is measured once, however often it would be trained on.
        some = [i for i, (_, out) in enumerate(pairs) if len(out)]
        once = [datasets[i].model_copy(update={"weight": None, "share": None}) for i in some]
        evals = {HELD_OUT: windows(once, sources=[pairs[i][1] for i in some])}
        measured = {HELD_OUT: np.concatenate([own[i][pairs[i][1].numbers] for i in some])}
        own = {i: np.delete(each, pairs[i][1].numbers) for i, each in own.items()}
    rest = without_equal(names, sources, own, measured.values(), data)
    train = windows(datasets, sources=rest, columns=config.train.loss_columns)
    opened = [train, *evals.values()]
    if order_version is None:
        # A run has one version, and its evaluations must have the same rows when it continues. So must the questions of
        # tasks, which are opened separately.
        tasks = [find_files(task).order_version for task in config.eval.tasks if task.path]
        version = max([*(each.order_version for each in opened), *tasks])
        for each in opened:
            each.raise_order(version)
        _warn_of_headings(data, tokenizer)  # a run that goes on was trained so, and cannot change it
    if not data.drop_eval_duplicates:
        known = _warn_of_overlap(train, evals)
        warn_of_measured({names[i]: each for i, each in own.items()}, measured, known=known)
    warn_of_unread([column for each in opened for column in each.unread])
    return train, evals


def open_evals(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    order_version: int | None = None,
    newest_order: int | None = None,
) -> dict[str, Windows]:
    """Open only the evaluation datasets, as a run with these versions (see `open_data`) reads them.

    The training data may be missing, unless the evaluation is on rows held out of it.
    """
    if isinstance(config.data.eval, HeldOutConfig):
        return open_data(config, tokenizer, vocab_size, progress, order_version=order_version)[1]
    evals = _named(config.data.eval, _opener(config, tokenizer, vocab_size, progress, order_version, newest_order))
    warn_of_unread([column for windows in evals.values() for column in windows.unread])
    return evals


def _is_trained(dataset: DatasetConfig) -> bool:
    return (dataset.weight, dataset.share).count(0) == 0


def _groups(
    compared: Sequence[tuple[DatasetConfig, Source, int]],
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None,
) -> list[Int64Array]:
    """Return the groups of equal rows (`groups_of`) of each of these, read by the rules of its version.

    All rows count as different if nothing in the config asks for a comparison.
    """
    data = config.data
    asked = data.drop_eval_duplicates or data.drop_duplicates
    found = [np.full(len(source), -1, dtype=np.int64) for _, source, _ in compared]
    if not (data.eval or asked):
        return found
    some = [i for i, (dataset, source, _) in enumerate(compared) if asked or is_read_cheaply(dataset, data, source)]
    if len(some) < len(compared):
        left = ", ".join(source.label for i, (_, source, _) in enumerate(compared) if i not in some)
        logger.warning(
            "%s: not compared with the evaluations, as its rows are fetched from a store whenever they are needed; set "
            "data.drop_eval_duplicates=true or data.drop_duplicates=true to have them read once more for it", left,
        )  # fmt: skip
    readers = [
        RowReader.of(dataset, source, data, tokenizer, vocab_size, order, scoring=_scoring_of(config, tokenizer))
        for dataset, source, order in (compared[i] for i in some)
    ]
    for i, own in zip(some, groups_of(readers, cache_of(config), progress), strict=True):
        found[i] = own
    return found


def _opener(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None,
    order_version: int | None,
    newest_order: int | None = None,
) -> partial[Windows]:
    cache, term = cache_of(config), getattr(config.train.objective, "sft", None)
    over_all = term is not None and term.weight > 0 and term.over == "all"
    scoring = _scoring_of(config, tokenizer)
    return partial(
        Windows, data=config.data, seed=config.run.seed, tokenizer=tokenizer, vocab_size=vocab_size, cache=cache,
        progress=progress, order_version=order_version, newest_order=newest_order, over_all=over_all, scoring=scoring,
    )  # fmt: skip


def _scoring_of(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> Scoring | None:
    return None if config.model.head is None else Scoring.of(config.model.head, tokenizer)


def _named(datasets: Sequence[DatasetConfig], windows: partial[Windows]) -> dict[str, Windows]:
    evals = {}
    for index, dataset in enumerate(datasets):
        try:
            evals[dataset_name(dataset)] = windows([dataset])
        except DataError as error:
            if type(error) is not DataError:  # of a row, which names its file
                raise
            field = f"data.eval.{index}"  # recipes name evaluations that who starts them has not heard of
            raise DataError(f"{field}: {error}".replace("the dataset's ", f"{field}.")) from error
    if len(evals) != len(datasets):
        raise DataError("data.eval: two datasets have the same name; give each its own data.eval.*.name")
    return evals


def _hold_out(
    wanted: HeldOutConfig,
    datasets: Sequence[DatasetConfig],
    sources: Sequence[Source],
    groups: Mapping[int, Int64Array] | None,
) -> list[tuple[Source, Selected]]:
    """Return the rows to train on and the rows to measure, for each dataset.

    No row is held out of a dataset whose weight is 0. `groups` of equal rows, by dataset, are kept together.
    """
    used = [i for i, dataset in enumerate(datasets) if _is_trained(dataset)]
    total = sum(len(sources[i]) for i in used)
    field = f"data.eval.rows={wanted.rows}" if wanted.fraction is None else f"data.eval.fraction={wanted.fraction}"
    many = wanted.rows or max(1, round(Fraction(str(wanted.fraction)) * total))
    if many >= total:
        raise DataError(
            f"{field} holds {many} of the {total} row(s) of data.train out, so none is left to train on; lower it, or "
            "name other data in data.eval"
        )
    pairs: list[tuple[Source, Selected]] = [(source, Selected(source, range(0), {})) for source in sources]
    together = None if groups is None else [groups[i] for i in used]
    for i, (rest, out) in zip(used, hold_out([sources[i] for i in used], many, together), strict=True):
        pairs[i] = rest, out
        if not len(rest):
            raise DataError(
                f"{field} holds all {len(out)} row(s) of the dataset {dataset_name(datasets[i])!r} out, so none is "
                f"left to train on; lower it, add rows, or set data.train.{i}.weight=0"
            )
    return pairs


def _warn_of_headings(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of instructions that are trained under Alpaca's headings by default, while questions are asked without."""
    for name, dataset in zip(dataset_names(data.train), data.train, strict=True):
        format = dataset.format.then if isinstance(dataset.format, PythonFormat) else dataset.format
        by_default = isinstance(format, InstructionFormat) and "style" not in format.model_fields_set
        if by_default and (dataset.chat_template or data.chat_template or tokenizer.chat_template):
            logger.warning(
                "dataset %r: its questions are trained on under Alpaca's headings (format.style=alpaca, the default), "
                "but `chat`, `generate`, eval.prompts and servers ask them in the chat template that there is: set "
                "format.style=chat to train in that, too, or format.style=alpaca to keep the headings", name,
            )  # fmt: skip


def _warn_of_overlap(train: Windows, evals: Mapping[str, Windows]) -> list[str]:
    """Warn of evaluations of which whole files are trained on, and return their names.

    They are not refused: the loss on training data says little about new data, but some want to see it.
    """
    trained = {fingerprint: file for source in train.sources for file, fingerprint in source.fingerprints.items()}
    found = []
    for name, windows in evals.items():
        if name == HELD_OUT:
            continue  # other rows of the same files
        (source,) = windows.sources
        shared = [file for file, fingerprint in source.fingerprints.items() if fingerprint in trained]
        if shared:
            found.append(name)
            logger.warning(
                "data.eval %s: %d of its %d file(s) are also trained on (%s has the same content as %s), so its loss "
                "does not show how the model does on new data", name, len(shared), len(source.fingerprints), shared[0],
                trained[source.fingerprints[shared[0]]],
            )  # fmt: skip
    return found
