"""Text and the characters of it that are trained on become token ids and the tokens that are trained on.

The text is encoded as a whole. Where one token would be partly inside of a span and partly outside (byte-level BPE
merges across any border it may), the text is cut at that border and the pieces are encoded apart. That is also what
generation sees: there the prompt is encoded alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from raytune_fsdp.data.rows.templates import Span
from raytune_fsdp.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.types import Int32Array

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

# Encodings take many times the memory of their text, so not more than this is encoded at once.
_CHARACTERS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens. `missed`: a span that got no token, if any."""

    ids: Int32Array
    trained: BoolArray | None
    """None where all tokens are."""
    missed: Span | None = None


@dataclass(slots=True)
class _Piece:
    """Characters of a text that are encoded together. `inner`: no space is to be put in front of them."""

    start: int
    end: int
    inner: bool = False


@dataclass(slots=True)
class _Text:
    text: str
    spans: Sequence[Span]
    pieces: list[_Piece] = field(default_factory=list)


class SpanEncoder:
    """Encodes the special tokens that stand in a text, but adds none: `before` and `behind` are what would be added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: it does not say which characters a token stands "
                "for; use a tokenizer with a tokenizer.json, or datasets with format.type=tokens"
            )
        description = tokenizer.backend_tokenizer.to_str()
        self._whole, self._inner, self.before, self.behind = _backends(description, tokenizer.eos_token or "a")
        self._added = np.array(sorted(self._whole.get_added_tokens_decoder()), dtype=np.int32)

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span] | None]) -> list[Tokens]:
        """Ids of each text, and which lie in its spans; None: all of them."""
        results: list[Tokens] = []
        for first, end in _chunks(texts):
            results += self._encode_chunk(texts[first:end], spans[first:end])
        return results

    def _encode_chunk(self, texts: Sequence[str], spans: Sequence[Sequence[Span] | None]) -> list[Tokens]:
        results: list[Tokens | None] = [None] * len(texts)
        whole = [index for index, given in enumerate(spans) if given is None]
        encodings = self._whole.encode_batch_fast([texts[index] for index in whole], add_special_tokens=False)
        for index, encoding in zip(whole, encodings, strict=True):
            results[index] = Tokens(_ids(encoding), None)
        todo = {
            index: _Text(text, given, [_Piece(0, len(text))])
            for index, (text, given) in enumerate(zip(texts, spans, strict=True))
            if given is not None
        }
        while todo:
            encoded = iter(self._encode_pieces(list(todo.values())))
            for index, text in list(todo.items()):
                tokens = self._tokens(text, [next(encoded) for _ in text.pieces])
                if tokens is not None:
                    results[index] = tokens
                    del todo[index]
        return [tokens for tokens in results if tokens is not None]

    def _encode_pieces(self, texts: Sequence[_Text]) -> list[Encoding]:
        pieces = [(text.text[piece.start : piece.end], piece.inner) for text in texts for piece in text.pieces]
        encodings: list[Any] = [None] * len(pieces)
        for inner, tokenizer in ((False, self._whole), (True, self._inner)):
            places = [index for index, piece in enumerate(pieces) if piece[1] == inner]
            batch = tokenizer.encode_batch([pieces[index][0] for index in places], add_special_tokens=False)
            for index, encoding in zip(places, batch, strict=True):
                encodings[index] = encoding
        return encodings

    def _tokens(self, text: _Text, encodings: Sequence[Encoding]) -> Tokens | None:
        """The tokens of a text; None, and more pieces in it, if a token stands across a border."""
        ids = [_ids(encoding) for encoding in encodings]
        firsts = np.cumsum([0, *map(len, ids)])
        pieces: list[_Piece] = []
        place = {0: 0, len(text.text): int(firsts[-1])}
        ends = {end for _, end in text.spans}
        borders = sorted({border for span in text.spans for border in span})
        for piece, encoding, own, first in zip(text.pieces, encodings, ids, firsts, strict=False):
            place[piece.start] = int(first)
            for border in borders:
                if piece.start < border < piece.end:
                    token = self._token_behind(border, text.text, piece, encoding, own, is_end=border in ends)
                    if token is None:
                        pieces += self._cut(piece, border, encoding, own)
                        break
                    place[border] = int(first) + token
            else:
                pieces.append(piece)
        if len(pieces) > len(text.pieces):
            text.pieces = pieces
            return None
        trained = np.zeros(firsts[-1], dtype=np.bool_)
        missed = None
        for start, end in text.spans:
            trained[place[start] : place[end]] = True
            if place[start] == place[end]:
                missed = (start, end)
        return Tokens(np.concatenate(ids) if len(ids) > 1 else ids[0], trained, missed)

    def _token_behind(
        self, border: int, text: str, piece: _Piece, encoding: Encoding, ids: Int32Array, *, is_end: bool
    ) -> int | None:
        """Index of the first token behind the border; None if a token stands across it."""
        for at in range(border - piece.start, piece.end - piece.start):
            token = encoding.char_to_token(at)
            if token is None:
                continue
            start, end = _characters(encoding, token)
            if piece.start + start >= border:
                return int(token)
            swallowed = text[border : piece.start + end]
            if is_end and swallowed.isspace() and ids[token] in self._added:
                # The token that ends a turn takes the white space behind it, if it was added with rstrip.
                return int(token) + 1
            return None
        return len(ids)

    def _cut(self, piece: _Piece, border: int, encoding: Encoding, ids: Int32Array) -> Iterator[_Piece]:
        """The piece in two; in three, where only the text up to the next added token is to have no space in front."""
        yield _Piece(piece.start, border, piece.inner)
        end = piece.end
        if self._inner is not self._whole and not piece.inner:
            token = encoding.char_to_token(border - piece.start)
            assert token is not None  # the one that stands across the border
            added = token + 1 + np.flatnonzero(np.isin(ids[token + 1 :], self._added))
            end = piece.start + _characters(encoding, int(added[0]))[0] if len(added) else piece.end
        yield _Piece(border, end, True)
        if end < piece.end:
            yield _Piece(end, piece.end)


def _characters(encoding: Encoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None  # it is None for tokens that are no part of the text, and none is added here
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


# Datasets of one run share them: with large vocabularies each takes some 100 MB.
@lru_cache(maxsize=2)
def _backends(description: str, probe: str) -> tuple[Tokenizer, Tokenizer, list[int], list[int]]:
    """What encodes whole texts, what encodes pieces behind a cut, and the special tokens put before and behind a text.

    Copies, because whoever calls the original may change its truncation and padding.
    """
    content = {**json.loads(description), "truncation": None, "padding": None}
    whole = Tokenizer.from_str(json.dumps(content))
    encoding = whole.encode(probe)
    inside = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    before = encoding.ids[: inside[0]] if inside else encoding.ids
    behind = encoding.ids[inside[-1] + 1 :] if inside else []
    # Special tokens are added by hand; and some tokenizers' leaves spaces out of the offsets of their tokens.
    whole.post_processor = None
    # Tokenizers in the manner of SentencePiece put a space in front of a text. The pieces behind a cut have none.
    spaceless = _without_prefix(content)
    inner = whole if spaceless == content else Tokenizer.from_str(json.dumps({**spaceless, "post_processor": None}))
    return whole, inner, before, behind


def _without_prefix(description: Any) -> Any:
    """The description of a tokenizer that puts no space in front of a text."""
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
