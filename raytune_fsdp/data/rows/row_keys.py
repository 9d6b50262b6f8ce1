"""Keys that tell which rows are equal, without rendering a conversation or tokenizing a row.

Rows are equal if they become the same tokens with the same mask. Rows with the same *exact* key are equal: it is a hash
of all that a document is made of. Rows with different *loose* keys are not equal: it is a hash of what is said in the
row, without everything that templates and tokenizers may leave out or make the same: white space, case, reasoning. For
the few rows whose loose keys are equal but whose exact keys differ, the tokens decide (`duplicates`).

Texts, conversations and rows of tokens are each compared among themselves only. Rows with several answers are equal if
all of them are; they also have keys of their prompts alone. So have texts with a class or a score, of the texts.
"""

from __future__ import annotations

import json
import re
import struct
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash
from tokenizers.models import WordLevel, WordPiece

from raytune_fsdp.base.batch import Role
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import BinaryFormat, Format, PreferenceFormat, ScoreFormat, TokensFormat
from raytune_fsdp.data.mixture import FOURTH_ORDER
from raytune_fsdp.data.rows.conversation import SYSTEM_ROLES, Conversation
from raytune_fsdp.data.rows.formats import Document, Formatter, RowText, or_error
from raytune_fsdp.data.rows.pairs import Answers, Side, Texts
from raytune_fsdp.data.rows.turns import Loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_NO_KEY = (0, bytes(16))

Keys = tuple[int, bytes]
"""The loose key in 64 bits, and the exact key in 128."""


@dataclass(frozen=True, slots=True)
class _Said(RowText):
    """A conversation, not rendered, and what is said in it."""

    said: str


class RowKeys(Formatter):
    """Reads the rows of one dataset as its formatter does, but only for their keys.

    `prompts`: for the keys of the prompts of rows that have answers to one.
    """

    def __init__(
        self, format: Format, *, tokenizer: PreTrainedTokenizerBase, prompts: bool = False, **options: Any
    ) -> None:
        super().__init__(format, tokenizer=tokenizer, **options)
        self._made_of = (format, tokenizer, {**options, "prompts": True} if prompts else options)
        self._prompts = prompts
        self._eos_text = tokenizer.eos_token or ""
        self._normalizes = tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer is not None
        """Whether the tokenizer may treat similar characters as the same."""
        self._unknown = _unknown(tokenizer) if tokenizer.is_fast else ""
        self._around: list[str] = []
        """What the tokenizer adds before a text and after it, and its end, where a text that has them gets no second
        ones; as the loose keys of texts are made, without white space."""
        if self._once and not self.templates and not isinstance(self.format, TokensFormat):
            added = [tokenizer.convert_ids_to_tokens(each) for each in (self._encoder.prefix, self._encoder.suffix)]
            # None: an id without a token, which a stranger's tokenizer may add.
            texts = ["".join(each or "" for each in tokens) for tokens in added] if any(added) else []
            self._around = [self._without_space(each) for each in (*texts, self._eos_text)] if texts else []

    def __reduce__(self) -> Any:
        format, tokenizer, options = self._made_of
        return partial(RowKeys, format, tokenizer=tokenizer, **options), ()

    @property
    def about(self) -> dict[str, Any]:
        """All that decides the keys of a row, as JSON."""
        format, _, options = self._made_of
        deciding = {key: value for key, value in options.items() if key not in ("vocab_size", "template", "copied")}
        if "scoring" in deciding:
            deciding["scoring"] = asdict(deciding["scoring"])
        fields = format.model_dump(mode="json")
        for each in (fields, fields.get("then") or {}):
            if each.get("reasoning") == "template":  # as before there was this field
                del each["reasoning"]
            if each.get("type") == "chat" and each["prompt"] is None:
                del each["prompt"]
        if "order" in deciding:
            deciding["order"] = min(deciding["order"], FOURTH_ORDER)  # later ones render rows in another way
        return {
            **deciding,
            "format": fields,
            "special": self._special,
            "end": self._eos_text,
            "tokenizer": [self._normalizes, self._unknown],
            **({"around": self._around} if self._around else {}),
        }

    def keys(self, rows: Sequence[dict[str, Any] | RowError]) -> list[Keys]:
        """Return the keys of each row; zeros for a row that becomes no document."""
        if isinstance(self.format, PreferenceFormat | BinaryFormat):
            return [self._key_of_answers(or_error(self._answers, self._made(row, ""), "")) for row in rows]
        if isinstance(self.format, ScoreFormat):
            return [self._key_of_scored(self._made(row, "")) for row in rows]
        return [self._key(or_error(self._begin, self._made(row, ""), "")) for row in rows]

    def _key_of_answers(self, answers: Answers | RowError) -> Keys:
        if isinstance(answers, RowError):
            return _NO_KEY
        if self._prompts:
            exact = _key_of_prompt(answers.sides[0])
            return xxhash.xxh3_64_intdigest(exact) or 1, exact
        keys = [self._key(or_error(self._side, side, "")) for side in answers.sides]
        if _NO_KEY in keys:
            return _NO_KEY
        loose = b"".join(key.to_bytes(8, "little") for key, _ in keys)
        exact = bytes(answers.roles) + b"".join(key for _, key in keys)
        return xxhash.xxh3_64_intdigest(loose) or 1, xxhash.xxh3_128_digest(exact)

    def _key_of_scored(self, row: dict[str, Any] | RowError) -> Keys:
        told = or_error(self._told_of, row, "")
        if isinstance(told, RowError):
            return _NO_KEY
        loose, exact = self._key(or_error(self._begin, row, ""))
        if not loose:
            return _NO_KEY
        value = struct.pack("<d", told[2])
        if self._prompts:
            return xxhash.xxh3_64_intdigest(exact) or 1, exact
        return xxhash.xxh3_64_intdigest(loose.to_bytes(8, "little") + value) or 1, xxhash.xxh3_128_digest(exact + value)

    def _key(self, item: object) -> Keys:
        if isinstance(item, Document):
            exact = token_key(item)
            return xxhash.xxh3_64_intdigest(exact) or 1, exact
        if not isinstance(item, RowText):
            return _NO_KEY
        # Surrogates are refused where a row is rendered.
        content = f"{item.spans}{item.plain}{item.literals}\0{item.text}".encode("utf-8", "surrogatepass")
        # A text that ends with its end token gets no second one.
        said = item.said if isinstance(item, _Said) else item.text.removesuffix(self._eos_text)
        seed = 1 if isinstance(item, _Said) else 2
        return xxhash.xxh3_64_intdigest(self._loosely(said), seed) or 1, xxhash.xxh3_128_digest(content, seed)

    def _loosely(self, said: str) -> bytes:
        if self._unknown == "words":
            return b""  # any two texts may be the same tokens
        said = self._without_space(said)
        if self._around:  # after white space, which may stand before them
            before, after, end = self._around
            said = said.removesuffix(end).removeprefix(before).removesuffix(after)
        return said.encode("ascii", "ignore") if self._unknown else said.encode("utf-8", "surrogatepass")

    def _without_space(self, said: str) -> str:
        if self._normalizes and not said.isascii():
            said = unicodedata.normalize("NFKC", said)
        said = "".join(said.split())
        return said.casefold() if self._normalizes else said

    def _render(self, conversation: Conversation, loss: Loss | None) -> RowText:
        said = []
        for message in conversation.messages:
            # A template may add a system message of its own where there is none, and rewrite a tool's result.
            content = message.get("content") if message.get("role") in ("user", "assistant") else None
            for text in content if isinstance(content, list) else [content]:
                text = text.get("text") if isinstance(text, dict) else text
                if isinstance(text, str):
                    said.append(_THOUGHT.sub("", text) if "<think>" in text else text)
        # In the order of the row: a template may write an object as it stands.
        whole = json.dumps([conversation.messages, conversation.tools, conversation.train, loss], default=str)
        return _Said(whole, None, False, [], "\n".join(said))


def _unknown(tokenizer: PreTrainedTokenizerBase) -> Literal["", "words", "characters"]:
    """Return what becomes the same token whatever it is, if the tokenizer does not know it."""
    model, before = tokenizer.backend_tokenizer.model, str(tokenizer.backend_tokenizer.pre_tokenizer)
    if getattr(model, "byte_fallback", False) or "ByteLevel" in before:
        return ""
    return "words" if isinstance(model, WordLevel | WordPiece) else "characters"


def _key_of_prompt(side: Side) -> bytes:
    """Return a hash of what is read of a prompt, without white space around it, which templates may strip."""
    if isinstance(side, Texts):
        return xxhash.xxh3_128_digest(side.prompt.strip().encode("utf-8", "surrogatepass"), 1)
    asked = [{**each, "content": each["content"].strip()} for each in side.messages[: side.answer]]
    empty = [{"role": role, "content": ""} for role in SYSTEM_ROLES]
    said = json.dumps([[each for each in asked if each not in empty], side.tools], default=str)
    return xxhash.xxh3_128_digest(said.encode("utf-8", "surrogatepass"), 2)


def token_key(document: Document) -> bytes:
    """Return a hash of the tokens and masks of a document and its group, which equal rows have in common."""
    state = xxhash.xxh3_128()
    for each in document.members:
        state.update(np.ascontiguousarray(each.input_ids).tobytes() + np.ascontiguousarray(each.labels).tobytes())
        state.update(bytes(map(int, each.columns[:1])))  # its role; the columns of a user's loss are not read here
        if each.columns[:1] == (Role.SCORED,):
            state.update(struct.pack("<d", each.columns[2]))
    return state.digest()
