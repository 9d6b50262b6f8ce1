"""Windows: fixed groups of rows, packed together. The unit of data work, and a pure function of the inputs.

The rows of all datasets, one after the other, are one index space; `order` permutes it; window k is the k-th group of
`data.window` rows of that order. Which machine builds it, when and how often changes nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from raytune_fsdp.config.data import DataConfig, DatasetConfig
from raytune_fsdp.data.formats import Document, to_document
from raytune_fsdp.data.order import ORDER_VERSION, Permutation, derive_key
from raytune_fsdp.data.packing import pack
from raytune_fsdp.data.sources import JsonLines
from raytune_fsdp.errors import DataError
from raytune_fsdp.types import Census, PackedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bounded by bytes, because a window may hold 1 MB or 1 GB. Enough for every window of a small dataset, which is then
# tokenized once a process and not once an epoch; of a large one, only the newest window is ever asked for again.
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the rows of one window became."""

    samples: tuple[PackedSample, ...]
    rows: int
    documents: tuple[int, ...]
    """Documents of each dataset, after dropping."""
    tokens: int
    target_tokens: int
    dropped: Mapping[str, int]
    """Rows that did not become a document, by reason."""
    truncated: int


class Windows:
    """All windows of some datasets. Opening reads the files once, for hashes and offsets, and tokenizes nothing."""

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        data: DataConfig,
        *,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
    ) -> None:
        self.data = data
        self.seed = seed
        self.names = _names(datasets)
        """Names of the datasets, in the order that source ids count them."""
        self.sources = [JsonLines(dataset.path) for dataset in datasets]
        self._formats = [dataset.format for dataset in datasets]
        self._ends = list(accumulate(len(source) for source in self.sources))
        self.rows = self._ends[-1]
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._template = _read_template(data.chat_template)
        self.pad_id = _pad_id(tokenizer, vocab_size)
        self._order = Permutation(self.rows, key=derive_key("rows", seed)) if self.shuffled else None
        self._cache: OrderedDict[int, Window] = OrderedDict()
        self.fingerprint = self._fingerprint()
        """Hash of all that decides the windows: content of the files, tokenizer, config of the data, seed."""

    @property
    def seq_len(self) -> int:
        return self.data.seq_len

    @property
    def shuffled(self) -> bool:
        return self.data.shuffle == "rows"

    def __len__(self) -> int:
        return -(-self.rows // self.data.window)

    def build(self, k: int) -> Window:
        """Window k; reads and tokenizes its rows unless it is still in memory."""
        if k not in self._cache:
            self._cache[k] = self._build(k)
        self._cache.move_to_end(k)
        held = sum(len(window.samples) for window in self._cache.values()) * self.seq_len * 16
        while held > _CACHE_BYTES and len(self._cache) > 1:
            _, window = self._cache.popitem(last=False)
            held -= len(window.samples) * self.seq_len * 16
        return self._cache[k]

    def _build(self, k: int) -> Window:
        assert 0 <= k < len(self), f"window {k} of {len(self)}"
        first, last = k * self.data.window, min((k + 1) * self.data.window, self.rows)
        documents: list[Document] = []
        sources: list[int] = []
        dropped: Counter[str] = Counter()
        truncated = 0
        for index in range(first, last):
            source, document, where = self._document(self._order(index) if self._order else index)
            kept, reason = self._fit(document, where)
            if kept is None:
                dropped[reason] += 1
                continue
            truncated += kept is not document
            documents.append(kept)
            sources.append(source)
        samples = pack(documents, sources=sources, seq_len=self.seq_len, pad_id=self.pad_id, packing=self.data.packing)
        if self.shuffled:
            # The packer starts with the longest documents: without this, length would decide the place in training.
            order = Permutation(len(samples), key=derive_key("packed", self.seed, k))
            samples = [samples[order(i)] for i in range(len(samples))]
        by_source = Counter(sources)
        return Window(
            samples=tuple(samples),
            rows=last - first,
            documents=tuple(by_source[i] for i in range(len(self.sources))),
            tokens=sum(len(document.input_ids) for document in documents),
            target_tokens=sum(document.target_tokens for document in documents),
            dropped=dict(dropped),
            truncated=truncated,
        )

    def _document(self, row: int) -> tuple[int, Document, str]:
        source = bisect_right(self._ends, row)
        file = self.sources[source]
        index = row - (self._ends[source - 1] if source else 0)
        where = file.where(index)
        document = to_document(
            file.row(index),
            self._formats[source],
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            where=where,
            chat_template=self._template,
        )
        return source, document, where

    def _fit(self, document: Document, where: str) -> tuple[Document | None, str]:
        """The document as it is trained on, or None and the reason for dropping it."""
        length = len(document.input_ids)
        if length <= self.seq_len:
            return document, ""
        if self.data.long_documents == "error":
            raise DataError(
                f"{where}: the row has {length} tokens, data.seq_len={self.seq_len}; raise data.seq_len to {length}, "
                "or set data.long_documents=truncate or drop"
            )
        if self.data.long_documents == "drop":
            return None, "too_long"
        cut = document.cut(self.seq_len)
        return (cut, "") if cut.target_tokens else (None, "no_target_tokens")

    def identity(self) -> dict[str, object]:
        """All that decides the windows, by name: content of the files, formats, tokenizer, config of the data, seed."""
        # By place, not by name: the order of the datasets decides the windows, what they are called does not.
        files = {f"datasets.{i}.content": source.fingerprint for i, source in enumerate(self.sources)}
        formats = {f"datasets.{i}.format": format.model_dump() for i, format in enumerate(self._formats)}
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            **files,
            **formats,
            "tokenizer": _tokenizer_fingerprint(self._tokenizer),
            "chat_template": self._template,
            "pad_id": self.pad_id,
            **self.data.model_dump(include={"seq_len", "packing", "long_documents", "shuffle", "window"}),
        }

    def _fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.identity(), sort_keys=True).encode())


def census(windows: Windows, progress: Callable[[int, int], None] | None = None) -> Census:
    """Build every window once and count. `progress(done, total)` is called after each; bad rows raise here."""
    samples = 0
    documents = [0] * len(windows.names)
    dropped: Counter[str] = Counter()
    rows = tokens = target_tokens = truncated = 0
    for k in range(len(windows)):
        window = windows.build(k)
        samples += len(window.samples)
        documents = [total + new for total, new in zip(documents, window.documents, strict=True)]
        dropped.update(window.dropped)
        rows += window.rows
        tokens += window.tokens
        target_tokens += window.target_tokens
        truncated += window.truncated
        if progress is not None:
            progress(k + 1, len(windows))
    for name, source, count in zip(windows.names, windows.sources, documents, strict=True):
        if not count:
            raise DataError(
                f"dataset {name!r} ({source.path}): none of its {len(source)} rows is left, dropped over all datasets: "
                f"{dict(dropped)}; raise data.seq_len={windows.seq_len} or remove the dataset"
            )
    return Census(
        rows=rows,
        documents=sum(documents),
        samples=samples,
        tokens=tokens,
        target_tokens=target_tokens,
        windows=len(windows),
        dropped=dict(dropped),
        truncated=truncated,
        seq_len=windows.seq_len,
    )


def _names(datasets: Sequence[DatasetConfig]) -> tuple[str, ...]:
    if not datasets:
        raise DataError("no dataset was given; data.train needs one entry at least")
    names = tuple(dataset.name or Path(dataset.path).stem for dataset in datasets)
    for name, count in Counter(names).items():
        if count > 1:
            paths = ", ".join(dataset.path for dataset, n in zip(datasets, names, strict=True) if n == name)
            raise DataError(f"{count} datasets are called {name!r} ({paths}); give each its own name in data.*.name")
    return names


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={path!r} cannot be read ({error}); it must be a text file with a Jinja template"
        ) from None


def _pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    # Padding is masked everywhere, so any id does, as long as the embedding has a row for it.
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and 0 <= candidate < vocab_size:
            return int(candidate)
    return 0


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by earlier calls with padding or truncation; no part of what the tokenizer is.
        content["padding"] = content["truncation"] = None
    else:
        content = tokenizer.get_vocab()
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template]
    text = json.dumps([type(tokenizer).__name__, content, special], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())
