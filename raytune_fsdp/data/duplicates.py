"""Find equal rows: the same tokens with the same mask, whatever the rows look like. Some are left out of the training.

Finding them is a pass of its own, before anything is tokenized. As many processes as there are cores read every row for
its keys (`rows.row_keys`), which are kept in the cache. Sorting then finds rows with equal keys. Only rows for which
the keys alone do not decide are tokenized.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.base.errors import DataError, RaytuneError
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.config.sections.data import DataConfig, DatasetConfig
from raytune_fsdp.data.mixture import ORDER_VERSION, SIXTH_ORDER
from raytune_fsdp.data.rows.formats import DOCUMENT_VERSION, Document, Formatter
from raytune_fsdp.data.rows.row_keys import RowKeys, token_key
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.rows.templates import TemplateChoice
from raytune_fsdp.data.sources.prepared import prepare_file
from raytune_fsdp.data.sources.selection import Selected, digest_of
from raytune_fsdp.data.sources.source import Source
from raytune_fsdp.data.trial import try_functions, try_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int64Array

logger = logging.getLogger(__name__)

# Kept in the cache with the keys: raise it when a row gets other keys.
_VERSION = 1
_AT_ONCE = 1024
# A process takes seconds to start, in which this one reads this many rows.
_ROWS_A_PROCESS = 100_000
_LOOK_SECONDS = 0.2
# Rows that are tokenized together.
_BATCH = 128


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads the rows of one dataset for their keys, and some of them as documents."""

    source: Source
    keys: RowKeys
    formatter: Formatter

    @classmethod
    def of(
        cls,
        dataset: DatasetConfig,
        source: Source,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        order: int = ORDER_VERSION,
        *,
        prompts: bool = False,
        scoring: Scoring | None = None,
    ) -> RowReader:
        """Make the reader of a dataset. `order`: the version by whose rules rows are read.

        `prompts`: for which rows with answers have equal prompts, instead of which are equal. `scoring`: as for
        `Formatter`.
        """
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "template": TemplateChoice.of(data, dataset),
            "columnar": source.columnar,
            "special_tokens": data.special_tokens_in_text,
            "order": order,
            "copied": True,
        } | ({} if scoring is None else {"scoring": scoring})
        formatter = Formatter(dataset.format, **options)
        try_functions([formatter], [source], order)
        try_templates([formatter], [source])
        if formatter.function is not None:  # keys in the cache are valid for these modules only
            options |= {"code": formatter.function.own.code, "modules": dict(formatter.function.own.modules)}
        return cls(source, RowKeys(dataset.format, prompts=prompts, **options), formatter)

    def token_keys(self, rows: Sequence[int]) -> list[bytes | None]:
        """Return a hash of tokens and mask for each of these rows; None for one that becomes no document."""
        found: list[bytes | None] = []
        for first in range(0, len(rows), _BATCH):
            some = rows[first : first + _BATCH]
            wheres = [self.source.where(row) for row in some]
            documents = self.formatter.documents(self.source.rows(some), wheres)
            found += [token_key(each) if isinstance(each, Document) else None for each in documents]
        return found


def is_read_cheaply(dataset: DatasetConfig, data: DataConfig, source: Source) -> bool:
    """Return whether all rows can be read once more. Not where each is fetched from a store whenever it is needed."""
    return not (dataset.path and is_url(dataset.path) and source.columnar and data.shuffle != "rows")


def groups_of(readers: Sequence[RowReader], cache: Path, progress: Progress | None = None) -> list[Int64Array]:
    """Return, for each source, the group of equal rows of each of its rows; -1 for a row that no other equals.

    A group is a number that is the same in all sources.
    """
    kept = [_kept(reader, cache, progress) for reader in readers]
    first = np.cumsum([0, *(len(loose) for loose, _ in kept)])
    loose = np.concatenate([each for each, _ in kept]) if kept else np.empty(0, np.uint64)
    groups = np.full(len(loose), -1, dtype=np.int64)
    order = np.argsort(loose, kind="stable")
    again = np.zeros(len(loose), dtype=np.bool_)
    again[1:] = (loose[order][1:] == loose[order][:-1]) & (loose[order][1:] != 0)
    alike = again.copy()
    alike[:-1] |= again[1:]
    rows = order[alike]
    if len(rows):
        run = np.cumsum(~again[alike], dtype=np.int64)
        exact = np.empty((len(rows), 2), dtype=np.uint64)
        for number, (_, keys) in enumerate(kept):
            own = (rows >= first[number]) & (rows < first[number + 1])
            exact[own] = keys[rows[own] - first[number]]
        number_of = _same(run, exact, rows, lambda wanted: _token_keys(readers, first, wanted))
        kinds, at, many = np.unique(number_of, return_inverse=True, return_counts=True)
        groups[rows] = np.where(many[at] > 1, kinds[at], -1)
    return [groups[first[number] : first[number + 1]] for number in range(len(readers))]


def in_either(one: Sequence[Int64Array], other: Sequence[Int64Array]) -> list[Int64Array]:
    """Return groups of rows that have all rows of a group of either kind together."""
    first, second = np.concatenate(list(one)), np.concatenate(list(other))
    number = np.where(first < 0, np.arange(len(first)), _first_rows(first))
    over = _first_rows(second)
    links = np.unique(np.stack([number, number[over]], axis=1)[second >= 0], axis=0)
    root: dict[int, int] = {}

    def find(group: int) -> int:
        while (above := root.get(group, group)) != group:
            group = above
        return group

    for own, its in links[links[:, 0] != links[:, 1]].tolist():
        low, high = sorted((find(own), find(its)))
        root[high] = low
    if root:
        moved = np.array(sorted(root), dtype=np.int64)
        at = np.minimum(np.searchsorted(moved, number), len(moved) - 1)
        number = np.where(moved[at] == number, np.array([find(group) for group in moved.tolist()])[at], number)
    return np.split(number, np.cumsum([len(each) for each in one])[:-1])


def _first_rows(groups: Int64Array) -> Int64Array:
    """Return for each row the first one of its group."""
    _, first, at = np.unique(groups, return_index=True, return_inverse=True)
    found: Int64Array = first[at].astype(np.int64)
    return found


def _same(
    run: Int64Array, exact: Any, rows: Int64Array, token_keys: Callable[[Int64Array], list[bytes | None]]
) -> Int64Array:
    """Return the group of each of these rows: the number of the group's first row. Rows of one `run` are alike."""
    by_key = np.lexsort((rows, exact[:, 1], exact[:, 0], run))
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = (np.diff(run[by_key]) != 0) | (np.diff(exact[by_key], axis=0) != 0).any(axis=1)
    which = np.empty(len(rows), dtype=np.int64)
    which[by_key] = np.cumsum(begins) - 1
    firsts = by_key[begins]
    number = rows[firsts]
    runs, keys_in_run = np.unique(run[firsts], return_counts=True)
    unclear = np.flatnonzero(np.isin(run[firsts], runs[keys_in_run > 1]))
    seen: dict[tuple[int, bytes], int] = {}
    for place, key in zip(unclear.tolist(), token_keys(number[unclear]) if len(unclear) else [], strict=True):
        if key is not None:
            number[place] = seen.setdefault((int(run[firsts[place]]), key), int(number[place]))
    return number[which]


def _token_keys(readers: Sequence[RowReader], first: Int64Array, rows: Int64Array) -> list[bytes | None]:
    found: list[bytes | None] = [None] * len(rows)
    for number, reader in enumerate(readers):
        own = np.flatnonzero((rows >= first[number]) & (rows < first[number + 1]))
        for place, key in zip(own.tolist(), reader.token_keys((rows[own] - first[number]).tolist()), strict=True):
            found[place] = key
    return found


def _kept(reader: RowReader, cache: Path, progress: Progress | None) -> tuple[Any, Any]:
    """Return the loose and the exact keys of all rows, from the cache or read now."""
    source, keys = reader.source, reader.keys
    identity = {
        "preparation": "row keys",
        "version": [_VERSION, DOCUMENT_VERSION],
        "files": list(source.fingerprints.values()),
        "selection": dict(source.selection),
        "reader": keys.about,
    } | ({"order": SIXTH_ORDER} if source.order_version >= SIXTH_ORDER else {})

    def make(directory: Path) -> Mapping[str, Any]:
        _read_keys(reader, directory, progress)
        return {"rows": len(source)}

    made = prepare_file(cache, identity, make, shown=source.label, progress=progress)
    rows = len(source)
    return (
        np.fromfile(made.path / "loose", dtype=np.uint64, count=rows),
        np.memmap(made.path / "exact", dtype=np.uint64, mode="r", shape=(rows, 2)),
    )


def _read_keys(reader: RowReader, directory: Path, progress: Progress | None) -> None:
    rows = len(reader.source)
    np.zeros(rows, dtype=np.uint64).tofile(directory / "loose")
    np.zeros((rows, 2), dtype=np.uint64).tofile(directory / "exact")
    processes = max(1, min(len(os.sched_getaffinity(0)), rows // _ROWS_A_PROCESS))
    parts = [range(rows * n // processes, rows * (n + 1) // processes) for n in range(processes)]
    shown = f"comparing the rows of {reader.source.label}"
    if processes == 1:
        for done in _write_keys(reader.source, reader.keys, directory, parts[0]):
            if progress is not None:
                progress(shown, done, rows)
        return
    np.zeros(processes, dtype=np.int64).tofile(directory / "done")
    with _started(reader, directory, parts) as started:
        while any(each.poll() is None for each in started):
            time.sleep(_LOOK_SECONDS)
            if progress is not None:
                progress(shown, int(np.fromfile(directory / "done", dtype=np.int64).sum()), rows)
            if any(each.poll() for each in started):
                break
    (directory / "done").unlink()


@contextmanager
def _started(reader: RowReader, directory: Path, parts: Sequence[range]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that each read a part of the rows. Not forked: the tokenizer's threads may hold locks."""
    code = f"from {__name__} import work; work()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": "1"}
    started = []
    try:
        for number, part in enumerate(parts):
            with open(directory / f"problem-{number}", "wb") as errors:
                each = subprocess.Popen(  # -P: a file of the working directory is no module of ours or of Python's
                    [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stderr=errors, env=environment
                )
            started.append(each)
            assert each.stdin is not None
            with suppress(BrokenPipeError), each.stdin:  # if it has ended already, its file says why
                pickle.dump((reader.source, reader.keys, directory, part, number), each.stdin)
        yield started
        for number, each in enumerate(started):
            if each.poll():
                raise _problem(directory / f"problem-{number}", each)
            (directory / f"problem-{number}").unlink()
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
            each.wait()


def _problem(path: Path, process: subprocess.Popen[bytes]) -> RaytuneError:
    said = path.read_bytes()
    if process.returncode == DataError.exit_code:
        error: RaytuneError = pickle.loads(said.partition(_BEGIN)[2])
        return error
    last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return DataError(
        f"a process that compares rows ended with code {process.returncode} ({last[:300]}); start again, and if it "
        "happens again with fewer rows (rows.limit), report it"
    )


_BEGIN = b"\n--- a problem with the data ---\n"


def work() -> None:
    """Do the work of one of the processes of `_started`."""
    source, keys, directory, part, number = pickle.load(sys.stdin.buffer)
    done = np.memmap(directory / "done", dtype=np.int64, mode="r+")
    try:
        for many in _write_keys(source, keys, directory, part):
            done[number] = many
    except RaytuneError as error:
        sys.stderr.buffer.write(_BEGIN + pickle.dumps(error))
        sys.exit(DataError.exit_code)


def _write_keys(source: Source, keys: RowKeys, directory: Path, part: range) -> Iterator[int]:
    rows = len(source)
    loose = np.memmap(directory / "loose", dtype=np.uint64, mode="r+")
    exact = np.memmap(directory / "exact", dtype=np.uint64, mode="r+", shape=(rows, 2))
    for first in range(part.start, part.stop, _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, part.stop))
        found = keys.keys(source.rows(some))
        loose[some.start : some.stop] = [key for key, _ in found]
        exact[some.start : some.stop] = np.frombuffer(b"".join(key for _, key in found), np.uint64).reshape(-1, 2)
        yield some.stop - part.start
    loose.flush()
    exact.flush()


# Rows that are not trained on, as they equal another row: one of an evaluation, or an earlier one.


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
