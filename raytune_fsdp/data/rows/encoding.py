"""Text becomes token ids, and spans of characters that are trained on become tokens that are trained on.

A text is encoded as a whole. If a token would lie across the border of a span (byte-level BPE merges wherever it can),
the text is cut at that border and the pieces are encoded apart. Generation sees the same: it encodes the prompt alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.data.rows.byte_tokens import ByteTokens, is_byte_level
from raytune_fsdp.data.rows.sandbox import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int32Array

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

# The most characters encoded at once. An Encoding takes 25 to 55 bytes a character, so this is about 100 MB.
_CHARACTERS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens."""

    ids: Int32Array
    trained: BoolArray | None
    """None: all tokens are."""
    missed: Span | None = None
    """A span that got no token, if there is one."""


@dataclass(slots=True)
class _Piece:
    """Characters of a text that are encoded together."""

    start: int
    end: int
    inner: bool = False
    """Whether the tokenizer must not put a space in front, as it does at the start of a text."""
    literal: bool = False
    """Whether special tokens in it are plain text."""


@dataclass(slots=True)
class _Text:
    text: str
    spans: Sequence[Span]
    literals: Sequence[Span]
    pieces: list[_Piece] = field(default_factory=list)


class SpanEncoder:
    """Encodes texts, special tokens in them included, but adds none: a tokenizer would add `prefix` and `suffix`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: it does not say which characters a token stands "
                "for; use a tokenizer with a tokenizer.json, or datasets with format.type=tokens"
            )
        description = tokenizer.backend_tokenizer.to_str()
        backends = _backends(description, tokenizer.eos_token or "a")
        self._whole, self._inner, self._bytes, self.prefix, self.suffix = backends
        self._description = description
        self._added = np.array(sorted(self._whole.get_added_tokens_decoder()), dtype=np.int32)

    def encode(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[Span] | None],
        literals: Sequence[Sequence[Span]] | None = None,
    ) -> list[Tokens]:
        """The ids of each text, and which of them lie in its spans (None: all of it).

        `literals`: where each text has special tokens that are encoded as plain text.
        """
        results: list[Tokens] = []
        literals = literals if literals is not None else [()] * len(texts)
        for first, end in _chunks(texts):
            results += self._encode_chunk(texts[first:end], spans[first:end], literals[first:end])
        return results

    def _encode_chunk(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span] | None], literals: Sequence[Sequence[Span]]
    ) -> list[Tokens]:
        results: list[Tokens | None] = [None] * len(texts)
        # Without offsets: where tokens lie is not asked, or known by their bytes.
        quick = [i for i, given in enumerate(spans) if not literals[i] and (given is None or self._bytes)]
        encodings = self._whole.encode_batch_fast([texts[index] for index in quick], add_special_tokens=False)
        for index, encoding in zip(quick, encodings, strict=True):
            results[index] = self._tokens_by_bytes(texts[index], spans[index], _ids(encoding))
        if sum(results[index] is None for index in quick) > len(quick) // 2:
            self._bytes = None  # the wrong tokenizer or template for it, and to encode twice takes twice as long
        todo = {
            index: _Text(text, given if given is not None else (), literal, [_Piece(0, len(text))])
            for index, (text, given, literal) in enumerate(zip(texts, spans, literals, strict=True))
            if results[index] is None
        }
        while todo:  # once more for every text that had to be cut
            encoded = iter(self._encode_pieces(list(todo.values())))
            for index, text in list(todo.items()):
                tokens = self._tokens(text, [next(encoded) for _ in text.pieces])
                if tokens is not None:
                    results[index] = tokens if spans[index] is not None else Tokens(tokens.ids, None)
                    del todo[index]
        return [tokens for tokens in results if tokens is not None]

    def _encode_pieces(self, texts: Sequence[_Text]) -> list[Encoding]:
        pieces = [(text.text[piece.start : piece.end], piece) for text in texts for piece in text.pieces]
        encodings: list[Any] = [None] * len(pieces)
        for literal, inner in ((False, False), (False, True), (True, False)):
            places = [i for i, (_, piece) in enumerate(pieces) if (piece.literal, piece.inner) == (literal, inner)]
            if not places:
                continue
            tokenizer = _literal(self._description) if literal else self._inner if inner else self._whole
            batch = tokenizer.encode_batch([pieces[index][0] for index in places], add_special_tokens=False)
            for index, encoding in zip(places, batch, strict=True):
                encodings[index] = encoding
        return encodings

    def _tokens_by_bytes(self, text: str, spans: Sequence[Span] | None, ids: Int32Array) -> Tokens | None:
        if spans is None:
            return Tokens(ids, None)
        assert self._bytes is not None
        place = self._bytes.places(text, ids, (border for span in spans for border in span))
        return None if place is None else _marked(ids, spans, place)

    def _tokens(self, text: _Text, encodings: Sequence[Encoding]) -> Tokens | None:
        """The tokens of a text. If a token lies across a border: None, and the text is cut into more pieces."""
        ids = [_ids(encoding) for encoding in encodings]
        firsts = np.cumsum([0, *map(len, ids)])
        pieces: list[_Piece] = []
        place = {0: 0, len(text.text): int(firsts[-1])}
        ends = {end for _, end in text.spans}
        borders = sorted({border for span in text.spans for border in span})
        for piece, encoding, own, first in zip(text.pieces, encodings, ids, firsts, strict=False):
            place[piece.start] = int(first)
            apart = list(self._apart(text, piece, encoding, own))
            if apart:
                pieces += apart
                continue
            for border in borders:
                if piece.start < border < piece.end:
                    token = self._token_after(border, text.text, piece, encoding, own, is_end=border in ends)
                    if token is None:
                        pieces += self._cut(piece, border, encoding, own)
                        break
                    place[border] = int(first) + token
            else:
                pieces.append(piece)
        if pieces != text.pieces:
            text.pieces = pieces
            return None
        return _marked(np.concatenate(ids) if len(ids) > 1 else ids[0], text.spans, place)

    def _apart(self, text: _Text, piece: _Piece, encoding: Encoding, ids: Int32Array) -> Iterator[_Piece]:
        """The piece cut where a special token is plain text; nothing if it has none."""
        if piece.literal:
            # The model's own vocabulary may have it, as Unigram's has </s>: then it is spelled.
            if piece.end - piece.start > 1 and np.isin(ids, self._added).any():
                yield from (_Piece(at, at + 1, literal=True) for at in range(piece.start, piece.end))
            return
        for start, end in text.literals:
            if piece.start <= start < piece.end:
                if piece.start < start:
                    yield _Piece(piece.start, start, piece.inner)
                yield _Piece(start, end, literal=True)
                rest = piece.end
                if self._inner is not self._whole and not piece.inner:
                    added = [_characters(encoding, int(at))[0] for at in np.flatnonzero(np.isin(ids, self._added))]
                    rest = min((piece.start + at for at in added if piece.start + at >= end), default=rest)
                if end < rest:
                    yield _Piece(end, rest, True)
                if rest < piece.end:
                    yield _Piece(rest, piece.end)
                return

    def _token_after(
        self, border: int, text: str, piece: _Piece, encoding: Encoding, ids: Int32Array, *, is_end: bool
    ) -> int | None:
        """Index of the first token after the border; None if a token lies across it."""
        for at in range(border - piece.start, piece.end - piece.start):
            token = encoding.char_to_token(at)
            if token is None:
                continue  # a character that no token stands for, such as a space that was stripped
            start, end = _characters(encoding, token)
            if piece.start + start >= border:
                return int(token)
            swallowed = text[border : piece.start + end]
            if is_end and swallowed.isspace() and ids[token] in self._added:
                # A turn's end token that was added with rstrip=True swallows the white space after it.
                return int(token) + 1
            return None
        return len(ids)

    def _cut(self, piece: _Piece, border: int, encoding: Encoding, ids: Int32Array) -> Iterator[_Piece]:
        """The piece cut in two; in three if the tokenizer puts a space in front again after the next added token."""
        yield _Piece(piece.start, border, piece.inner)
        end = piece.end
        if self._inner is not self._whole and not piece.inner:
            token = encoding.char_to_token(border - piece.start)
            assert token is not None  # the token across the border
            added = token + 1 + np.flatnonzero(np.isin(ids[token + 1 :], self._added))
            end = piece.start + _characters(encoding, int(added[0]))[0] if len(added) else piece.end
        yield _Piece(border, end, True)
        if end < piece.end:
            yield _Piece(end, piece.end)


def _marked(ids: Int32Array, spans: Sequence[Span], place: Mapping[int, int]) -> Tokens:
    trained = np.zeros(len(ids), dtype=np.bool_)
    missed = None
    for start, end in spans:
        trained[place[start] : place[end]] = True
        if place[start] == place[end]:
            missed = (start, end)
    return Tokens(ids, trained, missed)


def _characters(encoding: Encoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None  # only tokens that are added around a text have none, and none are added here
    return span


def _ids(encoding: Encoding) -> Int32Array:
    return np.array(encoding.ids, dtype=np.int32)


def _chunks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    first = size = 0
    for index, text in enumerate(texts):
        if size and size + len(text) > _CHARACTERS_AT_ONCE:
            yield first, index
            first, size = index, 0
        size += len(text)
    yield first, len(texts)


# Shared by the datasets of a run: with a large vocabulary each tokenizer takes some 100 MB.
@lru_cache(maxsize=2)
def _backends(description: str, probe: str) -> tuple[Tokenizer, Tokenizer, ByteTokens | None, list[int], list[int]]:
    """A tokenizer for whole texts, one for pieces after a cut, the bytes of its tokens unless it has to be asked where
    they lie, and the special tokens that go around a text.

    Copies: truncation and padding of the original change with its callers.
    """
    content = {**json.loads(description), "truncation": None, "padding": None}
    whole = Tokenizer.from_str(json.dumps(content))
    encoding = whole.encode(probe)
    inside = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    prefix = encoding.ids[: inside[0]] if inside else encoding.ids
    suffix = encoding.ids[inside[-1] + 1 :] if inside else []
    # The special tokens are added by hand. Besides, some post-processors leave spaces out of the offsets of tokens.
    whole.post_processor = None
    # SentencePiece-like tokenizers put a space in front of a text. A piece after a cut must not get one.
    spaceless = _without_prefix(content)
    inner = whole if spaceless == content else Tokenizer.from_str(json.dumps({**spaceless, "post_processor": None}))
    # A space in front of a text may replace one that a token has swallowed: the bytes are the text's all the same.
    by_bytes = ByteTokens(whole) if inner is whole and is_byte_level(content) else None
    return whole, inner, by_bytes, prefix, suffix


@lru_cache(maxsize=2)
def _literal(description: str) -> Tokenizer:
    """A tokenizer that knows no added tokens, for special tokens that are plain text."""
    content = _without_prefix({**json.loads(description), "truncation": None, "padding": None})
    return Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))


def _without_prefix(description: Any) -> Any:
    """The description of the same tokenizer, but without the space it puts in front of a text."""
    if isinstance(description, list):
        parts = [part for part in description if not (isinstance(part, dict) and part.get("type") == "Prepend")]
        return [_without_prefix(part) for part in parts]
    if not isinstance(description, dict):
        return description
    if "normalizer" in description:
        normalizer = description["normalizer"]
        if isinstance(normalizer, dict) and normalizer.get("type") == "Prepend":
            normalizer = None
        pre_tokenizer = _without_prefix(description["pre_tokenizer"])
        return {**description, "normalizer": _without_prefix(normalizer), "pre_tokenizer": pre_tokenizer}
    changed = {key: _without_prefix(value) for key, value in description.items()}
    if changed.get("type") == "Metaspace":
        changed.update(prepend_scheme="never")
    if changed.get("type") == "ByteLevel":
        changed.update(add_prefix_space=False)
    return changed
