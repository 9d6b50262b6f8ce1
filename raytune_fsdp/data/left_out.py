"""Leave rows out of the training that equal another row: one of an evaluation, or an earlier one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config.sections.data import DataConfig
from raytune_fsdp.data.sources.selection import Selected, digest_of
from raytune_fsdp.data.sources.source import Source

if TYPE_CHECKING:
    from raytune_fsdp.base.batch import Int64Array

logger = logging.getLogger(__name__)


def warn_of_measured(train: Mapping[str, Int64Array], evals: Mapping[str, Int64Array], *, known: Sequence[str]) -> None:
    """Warn of rows that are both trained on and measured. `train`, `evals`: groups of equal rows, by dataset name.

    They are not refused: the loss on training data says little about new data, but some want to see it. `known`:
    evaluations that this has been said about already.
    """
    for name, measured in evals.items():
        equal = {each: int(np.isin(own, measured[measured >= 0]).sum()) for each, own in train.items()}
        if name in known or not any(equal.values()):
            continue
        shared = int(np.isin(measured, _grouped(train.values())).sum())
        rows = ", ".join(f"{many} of {each}" for each, many in equal.items() if many)
        logger.warning(
            "data.eval %s: %d of its %d row(s) are also trained on (%d row(s) of data.train are equal to them: %s), so "
            "its loss does not show how the model does on new data; data.drop_eval_duplicates=true takes them out of "
            "the training", name, shared, len(measured), sum(equal.values()), rows,
        )  # fmt: skip


def without_equal(
    names: Sequence[str],
    sources: Sequence[Source],
    train: Mapping[int, Int64Array],
    evals: Iterable[Int64Array],
    data: DataConfig,
) -> list[Source]:
    """Return the sources without the equal rows that the config leaves out.

    `train`: the groups of the rows of each source that is trained on, by its number. A source that loses no row is
    returned as it is: the same data is the same run.
    """
    out = [np.zeros(len(source), dtype=np.bool_) for source in sources]
    measured = _grouped(evals)
    seen = np.empty(0, dtype=np.int64)
    for number, own in train.items():
        gone = out[number]
        if data.drop_eval_duplicates:
            gone |= np.isin(own, measured)
        if data.drop_duplicates:
            left = np.flatnonzero((own >= 0) & ~gone)
            kinds, first = np.unique(own[left], return_index=True)
            repeated = np.ones(len(left), dtype=np.bool_)
            repeated[first[~np.isin(kinds, seen)]] = False
            gone[left[repeated]] = True
            seen = np.union1d(seen, kinds)
    found: list[Source] = []
    for number, (name, source, gone) in enumerate(zip(names, sources, out, strict=True)):
        numbers = np.flatnonzero(gone).astype(np.int64)
        if len(numbers) == len(source):
            set_ = {"drop_eval_duplicates": data.drop_eval_duplicates, "drop_duplicates": data.drop_duplicates}
            fields = " and ".join(f"data.{name}=true" for name, is_set in set_.items() if is_set)
            raise DataError(
                f"{fields}: none of the {len(source)} row(s) of the dataset {name!r} is left to train on; "
                f"remove it, set data.train.{number}.weight=0, or do not drop equal rows"
            )
        what = f"{len(numbers)} equal rows, {digest_of([numbers])}"
        found.append(
            Selected(source, numbers, {**source.selection, "without": what}, others=True) if len(numbers) else source
        )
    return found


def left_out_of(names: Sequence[str], sources: Sequence[Source]) -> dict[str, tuple[int, int]]:
    """Return how many rows there were and are left, for each dataset of which equal rows were left out."""
    return {
        name: (len(source.base), len(source))
        for name, source in zip(names, sources, strict=True)
        if isinstance(source, Selected) and "without" in source.selection
    }


def _grouped(groups: Iterable[Int64Array]) -> Int64Array:
    all_of_them = [own[own >= 0] for own in groups]
    return np.unique(np.concatenate(all_of_them)) if all_of_them else np.empty(0, dtype=np.int64)
