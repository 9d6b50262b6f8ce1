"""Windows: fixed groups of rows, packed together. They are the unit of data work and of caching.

A window is a pure function of the inputs: which machine builds it, when and how often changes nothing. An epoch is an
order of the rows of all datasets (`mixture`); window k is its k-th group of `data.window` rows. If every epoch has the
same rows, every epoch also has the same windows, and epochs differ only by the order of the windows and of the samples
inside them (`stream.Stream`).
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import GROUP_COLUMNS, Progress
from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.errors import ConfigError, DataError, RowError
from raytune_fsdp.base.random import derive_key
from raytune_fsdp.config.sections.data import DataConfig, DatasetConfig
from raytune_fsdp.config.sections.formats import groups_of
from raytune_fsdp.data.cache import Window, WindowCache, finish_counts
from raytune_fsdp.data.groups import cut_to, judged, length_of, partners
from raytune_fsdp.data.identity import fingerprint_of, identity_of_windows, told_of, turns_of
from raytune_fsdp.data.mixture import FOURTH_ORDER, OLDEST_ORDER, THIRD_ORDER, Mixture, Order, Permutation, weights_of
from raytune_fsdp.data.packing import Arrangement, Gathered, RowOrigin, arrange, fill_samples, origins
from raytune_fsdp.data.rows.conversation import MISSING_COLUMN
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.pairs import trained_tokens
from raytune_fsdp.data.rows.scores.scored import cut_scored
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.rows.templates import TemplateChoice
from raytune_fsdp.data.sources.opening import columns_of, open_sources
from raytune_fsdp.data.sources.source import Source, dataset_names
from raytune_fsdp.data.trial import try_functions, try_templates
from raytune_fsdp.data.unread import unread_columns
from raytune_fsdp.plan.counts import DatasetCount, SkippedRow, WindowCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Bounded in bytes, because a window may hold 1 MB or 1 GB. A token takes 5 bytes here, so this is 27 M tokens: every
# window of a small dataset. In a large one only the newest window is ever asked for again.
_MEMORY_BYTES = 128 << 20

NO_OTHER = "no_other_answer"
"""Why a judged answer is left out: no row near it has another one, so it has no mismatched one."""

# Rows read, formatted and tokenized together: enough to keep all the tokenizer's threads busy.
_BATCH_ROWS = 128

# Above this many tokens a window is worth a warning: it takes about 24 bytes a token while it is built and written, so
# 0.8 GB here. A window of 4096 rows reaches it at a mean of 8192 tokens a row.
_MANY_TOKENS = 1 << 25


class Windows:
    """All windows of some datasets. Opening one prepares the files (see `sources`) but tokenizes nothing."""

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        data: DataConfig,
        *,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        cache: Path,
        progress: Progress | None = None,
        order_version: int | None = None,
        newest_order: int | None = None,
        sources: Sequence[Source] | None = None,
        columns: Sequence[str] = (),
        over_all: bool = False,
        scoring: Scoring | None = None,
    ) -> None:
        """`order_version`: the version of the run that continues; None or an unknown one for a new run. `newest_order`:
        the newest version when the run was begun, if it may have gained these datasets since. `sources`: those of the
        datasets, if they are open. `columns`: those that a loss of the user's own is told. `over_all`: whether all
        tokens of chosen documents are targets (`sft.over`). `scoring`: how documents are scored, if they are."""
        order = Order.of(order_version, newest_order)
        self._datasets, self.data, self.seed = datasets, data, seed
        self.kind = groups_of(datasets[0].format)
        """The kind of groups that rows make; None: documents stand alone."""
        self._told = tuple(columns), over_all and self.kind == "preference", scoring
        self.columns = self._told[0] if self.kind is None else GROUP_COLUMNS
        """Names of the numbers that a loss is told of each document."""
        self.names = dataset_names(datasets)
        """Names of the datasets; a source id is an index into them."""
        sources = sources or open_sources(datasets, data, cache, progress, order.rules)
        self.sources = _with_columns(sources, datasets, self._told[0], order.rules)
        formatters = self._made_formatters(tokenizer, vocab_size, order)
        self._formatters: list[Formatter] | bytes = formatters
        self.order_version = self._lowest_order(formatters, order)
        self.unread = unread_columns(datasets, self.sources, self.order_version)
        """Well-known columns that are not read."""
        with_modules = try_functions(formatters, self.sources, order.rules)
        try_templates(formatters, self.sources)
        self.pad_id = pad_id_of(tokenizer, vocab_size)
        rows = [len(source) for source in self.sources]
        weights = weights_of([each.weight for each in datasets], [each.share for each in datasets], rows)
        self._mixture = Mixture([each.blocks for each in self.sources], weights, shuffle=data.shuffle, seed=seed)
        self.repeats = self._mixture.repeats if data.reshuffle == "auto" else data.reshuffle == "windows"
        """Whether every epoch has the same windows."""
        self.weights = tuple(map(float, weights))
        self._check_mixture()
        self.identity = identity_of_windows(
            datasets, data, self.sources, weights, tokenizer,
            seed=seed, pad_id=self.pad_id, vocab_size=vocab_size, repeats=self.repeats,
            order_version=self.order_version, functions=[formatter.function for formatter in formatters],
        )  # fmt: skip
        self.identity |= turns_of([each.by_turn for each in formatters], self.order_version) | told_of(*self._told)
        """Everything that decides the windows, by name."""
        about = {"datasets": self.names, "sources": [each.label for each in self.sources], "seq_len": self.seq_len}
        self.cache = WindowCache(cache, fingerprint_of(self.identity), int(data.cache.max_gb * 1e9), about)
        if with_modules:
            self.raise_order(FOURTH_ORDER)
        self._memory: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._warned_of_size = self._warned_of_cache = False

    def _made_formatters(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, order: Order) -> list[Formatter]:
        columns, over_all, scoring = self._told
        options: Any = {
            "tokenizer": tokenizer, "vocab_size": vocab_size, "order": order.rules, "columns": columns,
            "special_tokens": self.data.special_tokens_in_text, "over_all": over_all, "scoring": scoring,
        }  # fmt: skip
        every = zip(self._datasets, self.sources, strict=True)
        return [
            Formatter(dataset.format, template=TemplateChoice.of(self.data, dataset), columnar=of.columnar, **options)
            for dataset, of in every
        ]

    def raise_order(self, version: int) -> None:
        """Raise the version of the order to this one if it is lower: a run reads all its windows by one version."""
        if version <= self.order_version:
            return
        assert isinstance(self._formatters, list), "not in another process"
        self.order_version = version
        for formatter in self._formatters:
            formatter.read_by(version)
        try_templates(self._formatters, self.sources)  # what was tried were other rules
        self.unread = unread_columns(self._datasets, self.sources, version)
        turns = turns_of([each.by_turn for each in self._formatters], version)
        self.identity = {**self.identity, "order_version": version, **turns}
        self.cache = replace(self.cache, fingerprint=fingerprint_of(self.identity))

    @property
    def fingerprint(self) -> str:
        return self.cache.fingerprint

    def _lowest_order(self, formatters: Sequence[Formatter], order: Order) -> int:
        """Return the lowest version that gives these rows in their order, and have them read by it."""
        lowest = [*(source.order_version for source in self.sources), *(each.order_version for each in formatters)]
        in_order = self.data.shuffle == "none" and self.data.packing == "best_fit"
        version = order.version(max(*lowest, THIRD_ORDER if in_order else OLDEST_ORDER))
        for formatter in formatters:
            formatter.read_by(version)
        return version

    @property
    def scoring(self) -> Scoring | None:
        """How documents are scored; None: their tokens are predicted."""
        return self._told[2]

    @property
    def seq_len(self) -> int:
        return self.data.seq_len

    @property
    def shuffled(self) -> bool:
        return self.data.shuffle != "none"

    def rows(self, epoch: int) -> int:
        """Return the number of rows in an epoch."""
        return self._mixture.length(0 if self.repeats else epoch)

    def count(self, epoch: int) -> int:
        """Return the number of windows in an epoch."""
        return -(-self.rows(epoch) // self.data.window)

    def enough(self) -> int:
        """Return a number of consecutive windows that include every row, wherever they start."""
        return self._mixture.epochs_for_all_rows() * (self.rows(0) // self.data.window + 2)

    def get(self, epoch: int, k: int, *, must_keep: bool = False) -> tuple[Window, bool]:
        """Return window k of an epoch, and whether it had to be built because neither memory nor cache had it.

        Failing to cache a new window is an error only with `must_keep`.
        """
        assert 0 <= k < self.count(epoch), f"window {k} of {self.count(epoch)}"
        key = (0 if self.repeats else epoch, k)
        window, built = self._memory.get(key) or self._cached(*key), False
        if window is None:
            with self.cache.building(*key):
                window = self._cached(*key)  # another process may have built it while this one waited
                if window is None:
                    rows = self._gather(*key)
                    arranged = self._arrange(rows, *key)
                    made = fill_samples(arranged, sources=rows.sources, seq_len=self.seq_len, pad_id=self.pad_id)
                    counts = finish_counts(made, rows.counts, rows.skipped, grouped=self.kind is not None)
                    window = Window(samples=made, counts=counts)
                    built = True
                    try:
                        self.cache.write(*key, window)
                    except DataError as error:
                        if must_keep:
                            raise
                        if not self._warned_of_cache:  # once: a full disk does not take the next window either
                            self._warned_of_cache = True
                            logger.warning(
                                "window %d was not cached, so it will be built again when needed, as any other that "
                                "the cache does not take: %s", key[1], error,
                            )  # fmt: skip
        self.check_skipped(window.counts.skipped)
        self._memory[key] = window
        self._memory.move_to_end(key)
        held = sum(each.samples.nbytes for each in self._memory.values())
        while held > _MEMORY_BYTES and len(self._memory) > 1:
            _, oldest = self._memory.popitem(last=False)
            held -= oldest.samples.nbytes
        return window, built

    def forget(self) -> None:
        """Free the windows that are held in memory: a large one may not be needed any more."""
        self._memory.clear()

    def check_skipped(self, skipped: Sequence[SkippedRow]) -> None:
        """Raise for rows left out while data.bad_rows was skip, if bad rows are errors now."""
        for row in skipped[:1]:
            self._refuse(RowError(row.message, row.reason))

    def counts(self, epoch: int, k: int) -> WindowCounts | None:
        """Return the counts of a window; None if it is not built, or no longer cached."""
        key = (0 if self.repeats else epoch, k)
        window = self._memory.get(key) or self._cached(*key)
        return None if window is None else window.counts

    def _cached(self, epoch: int, k: int) -> Window | None:
        """Return the window from the cache, unless its shape shows that it is another one."""
        window = self.cache.read(epoch, k)
        if window is not None:
            rows = sum(count.rows for count in window.counts.datasets)
            wanted = min(self.data.window, self.rows(epoch) - k * self.data.window)
            shape = (window.samples.input_ids.shape[1], len(window.counts.datasets), rows)
            if shape != (self.seq_len, len(self.sources), wanted) or not window.samples.tells(len(self.columns)):
                return None
        return window

    def origins(self, epoch: int, k: int) -> list[list[RowOrigin]]:
        """Return for each packed sample of a window where its documents come from, in their order.

        Reads the rows again, and raises DataError if the cache has something else for them.
        """
        key = (0 if self.repeats else epoch, k)
        rows = self._gather(*key)
        arranged = self._arrange(rows, *key)
        made = fill_samples(arranged, sources=rows.sources, seq_len=self.seq_len, pad_id=self.pad_id)
        held, parts = self.get(epoch, k)[0].samples, ("input_ids", "trained", "columns")
        pairs: list[Any] = [(getattr(made, part), getattr(held, part)) for part in parts]
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise DataError(
                f"window {k} of the cache is not what its rows make: it was changed, and a run that read it was not "
                f"trained on its data; look into {self.cache.directory}, or remove it"
            )
        return origins(rows, arranged)

    def _gather(self, epoch: int, k: int) -> Gathered:
        """Read and tokenize the rows of a window."""
        for source in self.sources:
            source.touch()
        rows = list(self._mixture.rows(epoch, k * self.data.window, (k + 1) * self.data.window))
        found = Gathered(counts=[DatasetCount() for _ in self.sources])
        documents = self._documents(rows)
        others = self._mismatched(rows, documents, epoch, k) if self.kind == "binary" else {}
        for number, (dataset, document, where) in enumerate(documents):
            count = found.counts[dataset]
            count.rows += 1
            if isinstance(document, RowError):
                self._skip(document, where, count, found.skipped)
                continue
            for part in self._fit(document, where, count, found.skipped):
                found.documents.append(part)
                found.sources.append(dataset)
                found.wheres.append(where)
                found.rows.append(number)
                if self.kind == "binary":
                    found.mismatched.append(others[number])
        # A huge window is in memory while it is built, and running out of memory kills silently.
        tokens = sum(document.length for document in found.documents)
        if tokens > _MANY_TOKENS and not self._warned_of_size:
            self._warned_of_size = True
            fewer = max(1, self.data.window * _MANY_TOKENS // tokens)
            logger.warning(
                "data.window=%d: a window of this data has %d million tokens, so each process that builds one needs "
                "about %.1f GB; with documents of this length data.window=%d needs 0.8 GB (this changes the order of "
                "the data, so set it only for a new run)",
                self.data.window,
                tokens // 10**6,
                tokens * 24e-9,
                fewer,
            )
        return found

    def _arrange(self, found: Gathered, epoch: int, k: int) -> Arrangement:
        order = None
        if self.shuffled:
            # The packer starts with the longest documents. Without this, they would be trained on first.
            def order(n: int) -> Permutation:
                return Permutation(n, key=derive_key("packed", self.seed, epoch, k))

        return arrange(
            found.documents, seq_len=self.seq_len, packing=self.data.packing,
            reorder=order, in_order=not self.shuffled and self.order_version > OLDEST_ORDER,
        )  # fmt: skip

    def _mismatched(
        self,
        rows: Sequence[tuple[int, int]],
        documents: list[tuple[int, Document | RowError, str]],
        epoch: int,
        k: int,
    ) -> dict[int, str]:
        """Put the mismatched document of each judged one behind it, in `documents`; return whose answer each has."""
        other_of: dict[int, int] = {}
        for dataset in range(len(self.sources)):
            places, answers = [], []
            for place, (of, document, _) in enumerate(documents):
                if of == dataset and isinstance(document, Document) and self._keeps(document):
                    places.append(place)
                    answers.append(trained_tokens(document).tobytes())
            found = partners(answers, key=derive_key("mismatched", self.seed, epoch, k, dataset))
            if found is not None:
                other_of |= {place: rows[places[at]][1] for place, at in zip(places, found, strict=True)}
            elif places and (one := self._elsewhere(dataset, rows[places[0]][1], answers[0])) is not None:
                other_of |= dict.fromkeys(places, one)
        asked = sorted(other_of)
        made = self._documents([rows[place] for place in asked], [other_of[place] for place in asked])
        for place, (dataset, other, _) in zip(asked, made, strict=True):
            _, own, where = documents[place]
            assert isinstance(own, Document), "it is kept"
            whole = other if isinstance(other, RowError) else judged(own, other, self.seq_len)
            documents[place] = dataset, whole, where
        return {place: self.sources[rows[place][0]].where(other_of[place]) for place in asked}

    def _elsewhere(self, dataset: int, row: int, answer: bytes) -> int | None:
        """Return a row of the dataset, one of those that follow this one in its files, with another answer."""
        many = len(self.sources[dataset])
        others = [(row + step) % many for step in range(1, min(many, _BATCH_ROWS + 1))]
        for other, (_, document, _) in zip(others, self._documents([(dataset, each) for each in others]), strict=True):
            if not isinstance(document, Document) or not self._keeps(document):
                continue
            if trained_tokens(document).tobytes() != answer:
                return other
        return None

    def _keeps(self, document: Document) -> bool:
        return document.length <= self.seq_len or self.data.long_documents == "truncate"

    def _documents(
        self, rows: Sequence[tuple[int, int]], others: Sequence[int] | None = None
    ) -> list[tuple[int, Document | RowError, str]]:
        """Return dataset, document and `where` of each of these rows, in order. Each batch is of one dataset.

        `others`: for each row the one of its dataset whose answer follows its prompt.
        """
        # A process that received this object makes its formatters, and with them a tokenizer, only now: most processes
        # just read windows from the cache.
        made = self._formatters
        self._formatters = formatters = pickle.loads(made) if isinstance(made, bytes) else made
        found: list[tuple[int, Document | RowError, str] | None] = [None] * len(rows)
        places_of: dict[int, list[int]] = {}
        for place, (dataset, _) in enumerate(rows):
            places_of.setdefault(dataset, []).append(place)
        batches = [
            (dataset, places[first : first + _BATCH_ROWS])
            for dataset, places in sorted(places_of.items())
            for first in range(0, len(places), _BATCH_ROWS)
        ]

        def read(batch: tuple[int, list[int]]) -> list[tuple[Document | RowError, str]]:
            dataset, places = batch
            beat()
            indices = [rows[place][1] for place in places]
            wheres = [self.sources[dataset].where(index) for index in indices]
            source = self.sources[dataset]
            if others is None:
                documents = formatters[dataset].documents(source.rows(indices), wheres)
            else:
                theirs = [others[place] for place in places]
                wheres = [
                    f"{each}, with the answer of {source.where(other)}"
                    for each, other in zip(wheres, theirs, strict=True)
                ]
                documents = formatters[dataset].mismatched(source.rows(indices), source.rows(theirs), wheres)
            if any(map(_lacks_column, documents)) and self.data.bad_rows == "error":
                _check_columns(formatters[dataset], self.sources[dataset])
            return list(zip(documents, wheres, strict=True))

        # The tokenizer releases Python's lock: while it encodes one batch, the other thread reads rows or makes arrays.
        # TRL takes 3.3 times as long from text to windows; it took 1.7 times as long as one thread here. A Ray task has
        # one CPU (RAYON_NUM_THREADS=1), where a second thread would only compete.
        alone = os.environ.get("RAYON_NUM_THREADS") == "1"
        with ThreadPoolExecutor(1 if alone else 2, thread_name_prefix="tokenize") as threads:
            coming = [threads.submit(read, batch) for batch in batches]
            try:
                for (dataset, places), future in zip(batches, coming, strict=True):
                    for place, (document, where) in zip(places, future.result(), strict=True):
                        found[place] = (dataset, document, where)
                        if isinstance(document, RowError):
                            self._refuse(document)
            finally:
                threads.shutdown(wait=True, cancel_futures=True)
        return [item for item in found if item is not None]

    def _refuse(self, error: RowError) -> None:
        if self.data.bad_rows == "error":
            raise RowError(f"{error}; or set data.bad_rows=skip", error.reason)

    def _skip(self, error: RowError, where: str, count: DatasetCount, skipped: list[SkippedRow]) -> None:
        self._refuse(error)
        count.dropped[error.reason] = count.dropped.get(error.reason, 0) + 1
        skipped.append(SkippedRow(where=where, reason=error.reason, message=str(error)))

    def _fit(self, document: Document, where: str, count: DatasetCount, skipped: list[SkippedRow]) -> list[Document]:
        """Return the document as it is packed: whole, shortened or in several parts; an empty list if it is dropped."""
        length, policy = document.length, self.data.long_documents
        bucket = int(4 * np.log2(length))  # see DatasetCount.lengths
        count.lengths[bucket] = count.lengths.get(bucket, 0) + 1
        if self.kind == "binary" and not document.others and self._keeps(document):
            count.dropped[NO_OTHER] = count.dropped.get(NO_OTHER, 0) + 1
            return []
        if length <= self.seq_len or (self.data.packing == "concat" and policy in ("error", "split")):
            return [document]
        if policy == "split":
            ends = [slice(start, start + self.seq_len) for start in range(0, length, self.seq_len)]
            return [
                replace(document, input_ids=document.input_ids[part], labels=document.labels[part]) for part in ends
            ]
        if policy == "truncate":
            cut = (cut_scored if self.kind == "score" else cut_to)(document, self.seq_len)
            if cut is not None:
                count.truncated += 1
                return [cut]
        if policy == "error":
            ways = "truncate, split or drop" if self.kind is None else "truncate or drop"
            message = (
                f"{where}: the row has {length_of(document)}, more than data.seq_len={self.seq_len}; raise "
                f"data.seq_len to {length}, or set data.long_documents to {ways}"
            )
            self._skip(RowError(message, "too_long"), where, count, skipped)
            return []
        reason = "too_long" if policy == "drop" else "no_targets_left"
        count.dropped[reason] = count.dropped.get(reason, 0) + 1
        return []

    def _check_mixture(self) -> None:
        if not self.rows(0):
            raise DataError(
                f"data.train: with the weights {self.weights} of {self.names} an epoch has no rows; raise a weight"
            )
        if self.repeats and not self._mixture.repeats:
            raise ConfigError(
                f"data.reshuffle=windows with the weights {self.weights} of {self.names}: every epoch would repeat the "
                "rows of the first one, and the other rows would never be seen; set data.reshuffle to full or auto"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A process that receives this mostly reads windows from the cache: formatters travel pickled (see _documents),
        # windows in memory not at all.
        made = self._formatters
        packed = made if isinstance(made, bytes) else pickle.dumps(made)
        return {**self.__dict__, "_memory": OrderedDict(), "_formatters": packed}


def _with_columns(
    sources: Sequence[Source], datasets: Sequence[DatasetConfig], columns: Sequence[str], order: int
) -> Sequence[Source]:
    """Return sources that read these columns besides those that the formats name."""
    if not columns:
        return sources
    read = [columns_of(dataset.format, order) for dataset in datasets]
    return [
        source.with_columns(own._replace(needed=tuple(dict.fromkeys((*own.needed, *columns)))))
        for source, own in zip(sources, read, strict=True)
    ]


def _check_columns(formatter: Formatter, source: Source) -> None:
    """Refuse a dataset whose first rows all lack a column, by its name: none of its rows is to blame."""
    rows = source.rows(range(min(_BATCH_ROWS, len(source))))
    documents = formatter.documents(rows, [source.label] * len(rows))
    if all(map(_lacks_column, documents)):
        raise DataError(str(documents[0]))


def _lacks_column(document: Document | RowError) -> bool:
    return isinstance(document, RowError) and document.reason == MISSING_COLUMN


def pad_id_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return the id of padding. It is masked everywhere, so any id will do that the embedding has a row for."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and 0 <= candidate < vocab_size:
            return int(candidate)
    return 0
