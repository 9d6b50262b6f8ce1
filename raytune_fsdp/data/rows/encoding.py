"""Turn text into token ids, and spans of characters that are trained on into tokens that are trained on.

A text is encoded as a whole. If a token would lie across the border of a span (byte-level BPE merges wherever it can),
the text is cut at that border and the pieces are encoded separately. So the prompt has the tokens that it has in
generation, where it is encoded alone.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.data.rows.template_program import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import BoolArray, Int32Array

# The most characters encoded at once. An Encoding takes 25 to 55 bytes a character, so this is about 100 MB.
_CHARACTERS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens."""

    ids: Int32Array
    trained: BoolArray | None
    """Which tokens are trained on; None: all."""
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
        """Return the ids of each text, and which of them lie in its spans (None: all of it).

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
        by_bytes = self._bytes  # read once: another thread may give it up while this one encodes
        # Without offsets, where nobody asks for the places of tokens, or their bytes tell them.
        quick = [i for i, given in enumerate(spans) if not literals[i] and (given is None or by_bytes)]
        encodings = self._whole.encode_batch_fast([texts[index] for index in quick], add_special_tokens=False)
        for index, encoding in zip(quick, encodings, strict=True):
            results[index] = _tokens_by_bytes(by_bytes, texts[index], spans[index], _ids(encoding))
        if sum(results[index] is None for index in quick) > len(quick) // 2:
            self._bytes = None  # it fails with this tokenizer or template, and encoding twice takes twice as long
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

    def _tokens(self, text: _Text, encodings: Sequence[Encoding]) -> Tokens | None:
        """Return the tokens of a text. If a token lies across a border, cut the text into more pieces; return None."""
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
        """Yield the piece cut where a special token is plain text; nothing if there is no such token."""
        if piece.literal:
            # The model's own vocabulary may have the token, as Unigram's has </s>: then it is spelled.
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
        """Return the index of the first token after the border; None if a token lies across it."""
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
        """Yield the piece cut in two; in three if the tokenizer puts a space in front again after an added token."""
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


def _tokens_by_bytes(
    by_bytes: ByteTokens | None, text: str, spans: Sequence[Span] | None, ids: Int32Array
) -> Tokens | None:
    if spans is None:
        return Tokens(ids, None)
    assert by_bytes is not None
    place = by_bytes.places(text, ids, (border for span in spans for border in span))
    return None if place is None else _marked(ids, spans, place)


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
    """Return tokenizers for whole texts and for pieces after a cut, the bytes of tokens, and a text's special tokens.

    The bytes are None if only the tokenizer can say where its tokens lie. The special tokens go before and after a
    text. The tokenizers are copies, because callers change truncation and padding of the original.
    """
    content = {**json.loads(description), "truncation": None, "padding": None}
    whole = Tokenizer.from_str(json.dumps(content))
    encoding = whole.encode(probe)
    inside = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    prefix = encoding.ids[: inside[0]] if inside else encoding.ids
    suffix = encoding.ids[inside[-1] + 1 :] if inside else []
    # The special tokens are added here. Besides, some post-processors leave spaces out of the offsets of tokens.
    whole.post_processor = None
    # SentencePiece-like tokenizers put a space in front of a text. A piece after a cut must not get one.
    spaceless = _without_prefix(content)
    inner = whole if spaceless == content else Tokenizer.from_str(json.dumps({**spaceless, "post_processor": None}))
    # A space in front of a text may replace one that a token has swallowed: the bytes are the text's all the same.
    by_bytes = ByteTokens(whole) if inner is whole and is_byte_level(content) else None
    return whole, inner, by_bytes, prefix, suffix


@lru_cache(maxsize=2)
def _literal(description: str) -> Tokenizer:
    """Return a tokenizer that knows no added tokens, for special tokens that are plain text."""
    content = _without_prefix({**json.loads(description), "truncation": None, "padding": None})
    return Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))


def _without_prefix(description: Any) -> Any:
    """Return the description of this tokenizer without the space that it puts in front of a text."""
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


# Find where the tokens of a byte-level tokenizer lie in a text, by their bytes.
#
# The tokenizer can say it, too, but then encodes 512 conversations in 390 ms instead of 300. A token of such a
# tokenizer stands for some bytes. If the bytes of all tokens, joined, are exactly the text's, they show where each
# token lies. They are not if the text was normalized, or a token has swallowed white space; then the tokenizer must be
# asked.


class ByteTokens:
    """Finds the places of tokens in a text by the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __reduce__(self) -> Any:
        return ByteTokens, (self._tokenizer,)

    @cached_property
    def _table(self) -> tuple[list[bytes], np.ndarray[Any, np.dtype[np.int64]]]:
        """The bytes of each id and their number; made when the first text needs it: 128,000 tokens take 0.1 s."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        added = {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        table = [b""] * (1 + max([*vocabulary.values(), *added], default=0))
        for text, index in vocabulary.items():
            table[index] = _spelled(text)
        for index, text in added.items():
            table[index] = text.encode()
        return table, np.array([len(each) for each in table], dtype=np.int64)

    def places(self, text: str, ids: Int32Array, borders: Iterable[int]) -> dict[int, int] | None:
        """Return how many tokens come before each border, a place in characters.

        None if the tokens are not exactly the text, or one of them lies across a border.
        """
        table, sizes = self._table
        if b"".join([table[index] for index in ids.tolist()]) != text.encode():
            return None
        if not sizes[ids].all():
            return None  # a token without bytes could lie on either side of a border
        ends = np.cumsum(sizes[ids])
        wanted = sorted({*borders})
        before = _bytes_before(text, wanted)
        found = np.searchsorted(ends, before, side="right")
        at = np.concatenate(([0], ends))[found]
        return dict(zip(wanted, found.tolist(), strict=True)) if (at == before).all() else None


def is_byte_level(description: Any) -> bool:
    """Return whether a tokenizer (its tokenizer.json) turns bytes into characters before it looks them up."""
    parts = description.get("pre_tokenizer") or {}
    return any(part.get("type") == "ByteLevel" for part in (parts, *parts.get("pretokenizers", ())))


def _bytes_before(text: str, borders: Sequence[int]) -> Any:
    if text.isascii():
        return np.array(borders, dtype=np.int64)
    cut = [text[start:end] for start, end in zip((0, *borders), borders, strict=False)]
    return np.cumsum([len(part.encode()) for part in cut], dtype=np.int64)


def _alphabet() -> dict[int, int]:
    """Return GPT-2's characters for bytes, which all byte-level tokenizers use, as a table for `str.translate`."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {256 + number: byte for number, byte in enumerate(others)}


_CHARACTERS = _alphabet()


def _spelled(token: str) -> bytes:
    try:
        return token.translate(_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:  # not characters for bytes, but plain text, or a token that never comes
        return token.encode()


# Special tokens written out in the contents of rows: `data.special_tokens_in_text`.
#
# To the tokenizer, `<|im_end|>` in a user's question is the token that ends a turn. With `escape`, a private-use
# character is put behind the first character of each special token before the row becomes text. In the text these
# characters show the places of such tokens. They are taken out again, and the tokens are encoded as plain text.

Policy = Literal["keep", "escape", "error"]

BREAK = "\U0010fffd"


class SpecialTokens:
    """Handles special tokens of the tokenizer that a row's contents spell out."""

    def __init__(self, tokens: Sequence[str], policy: Policy) -> None:
        self._policy = policy
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def guard(self, content: Any, where: str) -> Any:
        """Return the content with a break in each special token; the same object if there is none. Raises RowError."""
        if self._policy == "keep" or content is None:
            return content
        if isinstance(content, str):
            return self._guarded(content, where)
        if isinstance(content, list):
            made: Any = [self.guard(item, where) for item in content]
        elif isinstance(content, dict):
            made = {self.guard(key, where): self.guard(item, where) for key, item in content.items()}
        else:
            return content
        return content if made == content else made

    def without_breaks(self, text: str, spans: list[Span] | None) -> tuple[str, list[Span] | None, list[Span]]:
        """Return the text and its spans without the breaks, and the spans of special tokens that are plain text."""
        if self._policy == "keep" or BREAK not in text:
            return text, spans, []
        breaks = [match.start() for match in re.finditer(BREAK, text)]
        text = text.replace(BREAK, "")
        if spans is not None:
            spans = [(start - bisect_left(breaks, start), end - bisect_left(breaks, end)) for start, end in spans]
        found = (self._pattern.match(text, max(0, at - index - 1)) for index, at in enumerate(breaks))
        return text, spans, [match.span() for match in found if match is not None]

    def _guarded(self, text: str, where: str) -> str:
        if self._policy == "error" and (match := self._pattern.search(text)):
            raise RowError(
                f"{where}: the text has the special token {match.group()!r}; correct or remove the row, or set "
                "data.special_tokens_in_text to escape (it is encoded as plain text) or keep",
                "special_token",
            )
        if BREAK in text:
            raise RowError(
                f"{where}: the text has the private-use character U+10FFFD, which data.special_tokens_in_text=escape "
                "needs; remove it or the row",
                "special_token",
            )
        return self._pattern.sub(lambda match: match.group()[0] + BREAK + match.group()[1:], text)
