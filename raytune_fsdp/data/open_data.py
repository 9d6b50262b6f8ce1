"""From a config to its data: the windows to train on, and the windows of each evaluation dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from raytune_fsdp.config import DatasetConfig, FinetuneConfig, HeldOutConfig
from raytune_fsdp.data.sources import Selected, Source, dataset_name, hold_out
from raytune_fsdp.data.sources.places import find_files
from raytune_fsdp.data.unread import tell
from raytune_fsdp.data.windows import Windows, open_sources
from raytune_fsdp.errors import DataError
from raytune_fsdp.rundir import cache_of
from raytune_fsdp.types import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

HELD_OUT = "held_out"
"""Name of the evaluation of rows that are held out of the training."""


def open_data(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    order_version: int | None = None,
) -> tuple[Windows, dict[str, Windows]]:
    """The training data, and each evaluation dataset by its name. `order_version`: that of the run, if it continues."""
    train, evals = _open_data(config, tokenizer, vocab_size, progress, order_version)
    # The questions of tasks, too, which are opened apart.
    tasks = [find_files(task).order_version for task in config.eval.tasks if task.path and order_version is None]
    versions = {*(each.order_version for each in (train, *evals.values())), *tasks}
    if order_version is None and {train.order_version} != versions:
        # A run has one, and its evaluations must be of the same rows when it continues.
        train, evals = _open_data(config, tokenizer, vocab_size, progress, max(versions))
    tell([column for windows in (train, *evals.values()) for column in windows.unread])
    return train, evals


def open_evals(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    order_version: int | None = None,
) -> dict[str, Windows]:
    """The evaluation datasets alone, as a run of this version reads them. The training data need not be there, unless
    they are rows held out of it."""
    if isinstance(config.data.eval, HeldOutConfig):
        return open_data(config, tokenizer, vocab_size, progress, order_version=order_version)[1]
    evals = _named(config.data.eval, _opener(config, tokenizer, vocab_size, progress, order_version))
    tell([column for windows in evals.values() for column in windows.unread])
    return evals


def _open_data(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None,
    order_version: int | None,
) -> tuple[Windows, dict[str, Windows]]:
    windows = _opener(config, tokenizer, vocab_size, progress, order_version)
    datasets = config.data.train
    if isinstance(config.data.eval, HeldOutConfig):
        sources = open_sources(datasets, config.data, cache_of(config), progress, order_version)
        pairs = _hold_out(config.data.eval, datasets, sources)
        # Measured once each, however often they would be trained on.
        some = [i for i, (_, out) in enumerate(pairs) if len(out)]
        measured = [datasets[i].model_copy(update={"weight": None, "share": None}) for i in some]
        return windows(datasets, [rest for rest, _ in pairs]), {
            HELD_OUT: windows(measured, [pairs[i][1] for i in some])
        }
    train, evals = windows(datasets, None), _named(config.data.eval, windows)
    _warn_of_overlap(train, evals)
    return train, evals


_Opener = Callable[[Sequence[DatasetConfig], Sequence[Source] | None], Windows]


def _opener(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None,
    order_version: int | None,
) -> _Opener:
    cache = cache_of(config)
    return lambda datasets, sources: Windows(
        datasets, config.data, seed=config.run.seed, tokenizer=tokenizer, vocab_size=vocab_size, cache=cache,
        progress=progress, order_version=order_version, sources=sources,
    )  # fmt: skip


def _named(datasets: Sequence[DatasetConfig], windows: _Opener) -> dict[str, Windows]:
    evals = {dataset_name(dataset): windows([dataset], None) for dataset in datasets}
    if len(evals) != len(datasets):
        raise DataError("data.eval: two datasets have the same name; give each its own data.eval.*.name")
    return evals


def _hold_out(
    wanted: HeldOutConfig, datasets: Sequence[DatasetConfig], sources: Sequence[Source]
) -> list[tuple[Source, Source]]:
    """The rows to train on and those to measure, of each dataset. None of one whose weight is 0."""
    used = [i for i, dataset in enumerate(datasets) if (dataset.weight, dataset.share).count(0) == 0]
    total = sum(len(sources[i]) for i in used)
    field = f"data.eval.rows={wanted.rows}" if wanted.fraction is None else f"data.eval.fraction={wanted.fraction}"
    many = wanted.rows or max(1, round(Fraction(str(wanted.fraction)) * total))
    if many >= total:
        raise DataError(
            f"{field} holds {many} of the {total} row(s) of data.train out, so none is left to train on; lower it, or "
            "name other data in data.eval"
        )
    pairs: list[tuple[Source, Source]] = [(source, Selected(source, range(0), {})) for source in sources]
    for i, (rest, out) in zip(used, hold_out([sources[i] for i in used], many), strict=True):
        pairs[i] = rest, out
        if not len(rest):
            raise DataError(
                f"{field} holds all {len(out)} row(s) of the dataset {dataset_name(datasets[i])!r} out, so none is "
                f"left to train on; lower it, add rows, or set data.train.{i}.weight=0"
            )
    return pairs


def _warn_of_overlap(train: Windows, evals: Mapping[str, Windows]) -> None:
    """Warn, not refuse: the loss on training data says little about new data, but some want to see it."""
    trained = {fingerprint: file for source in train.sources for file, fingerprint in source.fingerprints.items()}
    for name, windows in evals.items():
        (source,) = windows.sources
        shared = [file for file, fingerprint in source.fingerprints.items() if fingerprint in trained]
        if shared:
            logger.warning(
                "data.eval %s: %d of its %d file(s) are also trained on (%s has the same content as %s), so its loss "
                "does not show how the model does on new data", name, len(shared), len(source.fingerprints), shared[0],
                trained[source.fingerprints[shared[0]]],
            )  # fmt: skip
