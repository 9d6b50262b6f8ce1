"""Turn rows into documents: token ids, and labels that say which of them are trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config.sections.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    InstructionFormat,
    PythonFormat,
    TemplateFormat,
    TokensFormat,
    becomes_chat,
    parts_of,
)
from raytune_fsdp.data.mixture import FIFTH_ORDER, OLDEST_ORDER, ORDER_VERSION
from raytune_fsdp.data.rows.conversation import (
    MISSING_COLUMN,
    Conversation,
    check_text,
    check_unicode,
    read_column,
    read_conversation,
)
from raytune_fsdp.data.rows.encoding import Policy, SpanEncoder, SpecialTokens, Tokens
from raytune_fsdp.data.rows.habits import Habits
from raytune_fsdp.data.rows.learn import learn, needs_newer
from raytune_fsdp.data.rows.numbers import read_number
from raytune_fsdp.data.rows.template_program import Span
from raytune_fsdp.data.rows.templates import ChatTemplate, TemplateChoice, chat_template
from raytune_fsdp.data.rows.turns import Loss, Rendering, render_ahead, trained_spans
from raytune_fsdp.data.rows.user_functions import RowFunction
from raytune_fsdp.data.sources.source import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int32Array


logger = logging.getLogger(__name__)

DOCUMENT_VERSION = 2
"""Part of the identity of windows. Raise it whenever the tokens or the mask of any row change: by a change to the
shipped templates, the rules for masks, Alpaca's text, the names of roles, or the date given to templates."""


@dataclass(frozen=True, slots=True)
class Document:
    """A row after formatting and tokenizing. `labels[i]` is `input_ids[i]` where token i is trained on, else IGNORE."""

    input_ids: Int32Array
    labels: Int32Array
    columns: tuple[float, ...] = ()
    """What a loss of the user's own is told of its row."""

    @property
    def target_tokens(self) -> int:
        """The number of tokens that can be trained on; the first token cannot, because nothing predicts it."""
        return int((self.labels[1:] != IGNORE).sum())

    def cut(self, length: int) -> Document:
        """Return a document of the first `length` tokens."""
        return replace(self, input_ids=self.input_ids[:length], labels=self.labels[:length])


@dataclass(frozen=True, slots=True)
class RowText:
    """A row that has become text, before it is tokenized."""

    text: str
    spans: list[Span] | None
    """The characters that are trained on; None: all."""
    plain: bool
    """Whether the tokenizer's special tokens go around the text. Chat templates write them themselves."""
    literals: list[Span]
    """Special tokens in the text that are encoded as plain text."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A conversation that is not rendered yet."""

    rendering: Rendering
    conversation: Conversation
    guarded: Conversation
    """The same, with a break in each special token that is plain text."""
    loss: Loss


class Formatter:
    """Turns the rows of one dataset into documents. Can be pickled.

    `columnar`: the rows come from columns (Parquet, Arrow), where a key that one row has is null in all others.
    Raises DataError for problems that concern all rows: a missing template or special token, a slow tokenizer.
    """

    def __init__(
        self,
        format: Format,
        *,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        template: TemplateChoice | str | None,
        columnar: bool = False,
        code: str | None = None,
        modules: Mapping[str, str] | None = None,
        special_tokens: Policy = "keep",
        order: int = ORDER_VERSION,
        copied: bool = False,
        by_turn: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        """`template`: its text, None for the tokenizer's own, or all that the config says of it. `code`, `modules`: see
        `RowFunction`. `order`: the version by whose rules rows are read.

        `copied`: made from another formatter, which has given the warnings already. `by_turn`: see `Habits`. `columns`:
        the columns that a loss is told.
        """
        self.function = RowFunction(format.function, code, modules) if isinstance(format, PythonFormat) else None
        """The user's function, if the format has one."""
        self._given: dict[str, Any] = {
            "format": format, "tokenizer": tokenizer, "vocab_size": vocab_size, "template": template,
            "columnar": columnar, "special_tokens": special_tokens, "order": order, "by_turn": by_turn,
            "columns": columns,
        }  # fmt: skip
        format = format.then if isinstance(format, PythonFormat) else format
        self.format = format
        self._columnar = columnar
        self._columns = columns
        self._order = order
        self._vocab_size = vocab_size
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._in_text = SpecialTokens(self._special, special_tokens)
        self._templates: list[ChatTemplate] = []
        self._habits: dict[tuple[bool, bool], Habits] = {}
        if isinstance(format, TokensFormat):
            return
        self._encoder = SpanEncoder(tokenizer)
        if becomes_chat(format):
            # Two, because a tokenizer may have another template for conversations with tools (Hermes, Command R).
            choice = template if isinstance(template, TemplateChoice) else TemplateChoice(text=template)
            self._templates = [chat_template(tokenizer, choice, tools=tools) for tools in (False, True)]
            # Without tags newer rules find an end, or refuse each row.
            is_seen = order < FIFTH_ORDER or self._templates[0].tags
            if getattr(format, "loss", None) != "all" and is_seen and not self._templates[0].trains_an_end():
                logger.log(logging.DEBUG if copied else logging.WARNING, _NO_END)
            return
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no eos_token, which must end every document with "
                f"format.type={format.type}; set eos_token in its tokenizer_config.json"
            )
        self._eos = int(tokenizer.eos_token_id)

    def read_by(self, order: int) -> None:
        """Read rows by the rules of another version."""
        self._given["order"] = self._order = order

    def __reduce__(self) -> Any:
        # Without the encoder, which each process makes once from the tokenizer (see encoding._backends).
        known: dict[str, Any] = (
            {} if self.function is None else {"code": self.function.code, "modules": self.function.modules}
        )
        return partial(Formatter, **self._given, **known, copied=True), ()

    @property
    def order_version(self) -> int:
        """The lowest version of the order that gives these documents, by its rules for turns."""
        if self._order < FIFTH_ORDER or not self._templates:
            return OLDEST_ORDER
        everything = getattr(self.format, "loss", None) == "all"
        kinds = zip((False, True), self._templates, strict=True)
        newer = any(needs_newer(each, self._special, tools=tools, everything=everything) for tools, each in kinds)
        return FIFTH_ORDER if newer else OLDEST_ORDER

    @property
    def by_turn(self) -> bool:
        """Whether each turn of the assistant is rendered to find it, however well the template is known."""
        return bool(self._given["by_turn"])

    def render_by_turn(self, by_turn: bool = True) -> None:
        """Say whether each turn of the assistant is rendered to find it."""
        self._given["by_turn"] = by_turn
        self._habits.clear()

    @property
    def templates(self) -> tuple[ChatTemplate, ...]:
        """The templates of conversations without tools and with them; none if the format needs none."""
        return tuple(self._templates)

    @property
    def finds_turns(self) -> bool:
        """Whether turns are found by where the template puts messages."""
        return isinstance(self.format, ChatFormat) and not all(each.tags for each in self._templates)

    @property
    def has_learned(self) -> bool:
        """Whether the templates could be learned from our own conversations."""
        newer = self._order >= FIFTH_ORDER
        kinds = enumerate(self._templates)
        return not any(learn(each, self._special, newer=newer, tools=bool(tools)).is_by_turn for tools, each in kinds)

    def renders_alike(self, row: dict[str, Any], where: str, messages: int) -> bool:
        """Return whether what is known of the template finds the first turns of a row as rendering each does."""
        assert isinstance(self.format, ChatFormat)
        try:
            row = row if self.function is None else self.function(row, where)
            whole = read_conversation(row, self.format, where, columnar=self._columnar, order=self._order)
        except RowError:
            return True
        first = replace(whole, messages=whole.messages[:messages], train=whole.train[:messages])
        template, options = self._templates[first.tools is not None], self._turns(first)
        found: list[Any] = []
        for habits in (options["habits"], options["habits"].by_turn()):
            try:
                found.append(trained_spans(template, first, loss="assistant", **{**options, "habits": habits}))
            except RowError as error:
                found.append(str(error))
        return bool(found[0] == found[1])

    def _turns(self, conversation: Conversation) -> dict[str, Any]:
        """Return what is needed to find the turns of a conversation."""
        tools, newer = conversation.tools is not None, self._order >= FIFTH_ORDER
        if (tools, newer) not in self._habits:
            habits = learn(self._templates[tools], self._special, newer=newer, tools=tools)
            self._habits[tools, newer] = habits.by_turn() if self._given["by_turn"] else habits
        return {"special": self._special, "newer": newer, "habits": self._habits[tools, newer]}

    def documents(
        self, rows: Sequence[dict[str, Any] | RowError], wheres: Sequence[str], *, made: bool = False
    ) -> list[Document | RowError]:
        """Return the document of each row, or what is wrong with the row.

        `wheres`: how errors name the rows. `made`: the user's function has made these rows already.
        """
        rows = rows if made else [self._made(row, where) for row, where in zip(rows, wheres, strict=True)]
        begun = [self._read_or_error(row, where) for row, where in zip(rows, wheres, strict=True)]
        render_ahead([each.rendering for each in begun if isinstance(each, _Begun)])
        read = [self._finish_or_error(each) if isinstance(each, _Begun) else each for each in begun]
        # All texts in one call: the tokenizer spreads a batch over its threads.
        texts = [item for item in read if isinstance(item, RowText)]
        encoded: Iterator[Tokens] = iter(())
        if texts:
            spans, literals = [each.spans for each in texts], [each.literals for each in texts]
            encoded = iter(self._encoder.encode([each.text for each in texts], spans, literals))
        documents: list[Document | RowError] = []
        for item, row, where in zip(read, rows, wheres, strict=True):
            document = self._assemble(item, next(encoded), where) if isinstance(item, RowText) else item
            if isinstance(document, Document):
                document = self._check(document, where) or self._told(document, row, where)
            documents.append(document)
        return documents

    def check_function(
        self,
        rows: Sequence[dict[str, Any] | RowError],
        wheres: Sequence[str],
        elsewhere: Sequence[dict[str, Any] | RowError] | None,
    ) -> None:
        """Refuse a user's function that makes two different documents of one row. Raises DataError.

        `elsewhere`: what it has made of the rows in another process, if it was called in one.
        """
        first, again = self.documents(rows, wheres), [self.documents(rows, wheres)]
        if elsewhere is not None:
            again.append(self.documents(elsewhere, wheres, made=True))
        for others in again:
            for one, other, where in zip(first, others, wheres, strict=True):
                if _content(one) != _content(other):
                    raise DataError(
                        f"{where}: the format's function, called twice, made two different documents of this row, so "
                        "the data would depend on who reads it; make it depend on the row alone (no random numbers, no "
                        "clocks, no order of a set: write sorted(…) around one)"
                    )

    def _made(self, row: dict[str, Any] | RowError, where: str) -> dict[str, Any] | RowError:
        """Return what the user's function makes of a row, if the format has one."""
        if self.function is None or isinstance(row, RowError):
            return row
        try:
            return self.function(row, where)
        except RowError as error:
            return error

    def _told(self, document: Document, row: dict[str, Any] | RowError, where: str) -> Document | RowError:
        """Return the document with the columns of its row that a loss is told."""
        if not self._columns or isinstance(row, RowError):
            return document
        try:
            return replace(document, columns=tuple(read_number(row, name, where) for name in self._columns))
        except RowError as error:
            return error

    def _read_or_error(self, row: dict[str, Any] | RowError, where: str) -> RowText | Document | _Begun | RowError:
        if isinstance(row, RowError):
            return row
        try:
            return self._begin(row, where)
        except RowError as error:
            return error

    def _finish_or_error(self, begun: _Begun) -> RowText | RowError:
        try:
            return self._finish(begun)
        except RowError as error:
            return error

    def _read(self, row: dict[str, Any], where: str) -> RowText | Document:
        begun = self._begin(row, where)
        return self._finish(begun) if isinstance(begun, _Begun) else begun

    def _begin(self, row: dict[str, Any], where: str) -> RowText | Document | _Begun:
        format = self.format
        if isinstance(format, ChatFormat):
            conversation = read_conversation(row, format, where, columnar=self._columnar, order=self._order)
            return self._render(conversation, format.loss)
        if isinstance(format, CompletionFormat):
            content = check_text(read_column(row, format.text, "text", where), f"{where}: {format.text}")
            return self._text(self._in_text.guard(content, where), None, plain=True)
        if isinstance(format, TokensFormat):
            return Document(*read_tokens(row, format, where))
        if isinstance(format, TemplateFormat):
            instruction = read_template(row, format, where)
        else:
            instruction = read_instruction(row, format, where)
        parts = ("prompt", "input", "completion", "system")
        if format.style != "chat":
            guarded = {name: self._in_text.guard(getattr(instruction, name), where) for name in parts}
            instruction = replace(instruction, **guarded)
        if format.style == "chat":
            return self._render(instruction.conversation(where), "all" if format.loss == "all" else "assistant")
        prompt = instruction.alpaca() if format.style == "alpaca" else instruction.plain()
        text = prompt + instruction.completion
        return self._text(text, None if format.loss == "all" else [(len(prompt), len(text))], plain=True)

    def _render(self, conversation: Conversation, loss: Loss) -> RowText | _Begun:
        guarded = replace(
            conversation,
            messages=self._in_text.guard(conversation.messages, conversation.where),
            tools=self._in_text.guard(conversation.tools, conversation.where),
        )
        template = self._templates[conversation.tools is not None]
        return _Begun(Rendering(template, guarded, **self._turns(conversation)), conversation, guarded, loss)

    def _finish(self, begun: _Begun) -> RowText:
        conversation = begun.conversation
        text = self._text(*begun.rendering.trained(begun.loss), plain=False)
        if begun.guarded != conversation:
            given = Rendering(begun.rendering.template, conversation, **self._turns(conversation)).text
            # An end may have been added to the text.
            if not text.text.startswith(given) or text.text.removeprefix(given).strip() not in ("", *self._special):
                raise RowError(
                    f"{conversation.where}: the chat template renders a message differently when a special token in it "
                    "is escaped; correct or remove the row, or set data.special_tokens_in_text to keep or error",
                    "special_token",
                )
        return text

    def _text(self, text: str, spans: list[Span] | None, *, plain: bool) -> RowText:
        text, spans, literals = self._in_text.without_breaks(text, spans)
        return RowText(text, spans, plain, literals)

    def _assemble(self, text: RowText, tokens: Tokens, where: str) -> Document | RowError:
        if tokens.missed is not None:
            missed = text.text[slice(*tokens.missed)]
            return RowError(
                f"{where}: the tokenizer makes no token of {shorten(missed)!r}, which should be trained on; "
                "correct or remove the row",
                "no_targets",
            )
        ids, trained = tokens.ids, tokens.trained
        if text.plain:
            prefix, suffix = self._encoder.prefix, self._encoder.suffix
            # The end token comes once, also if the tokenizer adds it or the text ends with it.
            ended = self._eos in (suffix[-1:] or ids[-1:])
            suffix = suffix if ended else [*suffix, self._eos]
            ids = np.concatenate([prefix, ids, suffix]).astype(np.int32)
            if trained is not None:
                trained = np.concatenate([np.zeros(len(prefix), bool), trained, np.ones(len(suffix), bool)])
        return Document(ids, ids if trained is None else np.where(trained, ids, np.int32(IGNORE)))

    def _check(self, document: Document, where: str) -> RowError | None:
        ids = document.input_ids
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            index = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            return RowError(
                f"{where}: token {index} has id {ids[index]}, the model's vocabulary ends at {self._vocab_size - 1}; "
                "use the model's own tokenizer, or set model.resize_embeddings=true if tokens were added to the "
                "tokenizer",
                "outside_vocabulary",
            )
        if not document.target_tokens:
            return RowError(
                f"{where}: no token of the row can be trained on ({len(ids)} tokens, the first is never a target); "
                f"{_NO_TARGET[self.format.type]}",
                "no_targets",
            )
        return None


def _content(document: Document | RowError) -> Any:
    if isinstance(document, RowError):
        return None  # its text does not count: an object's address in it differs every time
    return document.input_ids.tolist(), document.labels.tolist(), document.columns


_NO_END = (
    "the chat template puts nothing that is trained on after the assistant's text, so the model does not learn to end "
    "its turn; write the token that ends a turn there ({{ eos_token }}; inside {% generation %} if there is one) in a "
    "copy of the template and name that file in data.chat_template"
)

_NO_TARGET = {
    "chat": "it needs a message of the assistant that the template marks as generated",
    "instruction": "an answer needs at least one token: remove the row",
    "template": "an answer needs at least one token: remove the row",
    "completion": "a text needs at least two tokens: remove the row",
    "tokens": "labels must repeat the input id (or mask must be 1) at some place after the first",
}


# Rows with a question and its answer in columns of their own.

# Word for word as in Stanford Alpaca, because other programs prompt models tuned on this format with the same words.
_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """A question and its answer, each from columns of its own."""

    prompt: str
    input: str | None
    completion: str
    system: str | None
    column: str

    def alpaca(self) -> str:
        """Return the text before the answer; a system message replaces Alpaca's introduction."""
        introduction = self.system or (_ALPACA if self.input is None else _ALPACA_INPUT)
        context = "" if self.input is None else f"### Input:\n{self.input}\n\n"
        return f"{introduction}\n\n### Instruction:\n{self.prompt}\n\n{context}### Response:\n"

    def plain(self) -> str:
        """Return the text before the answer: system message, question and input, separated by empty lines."""
        return "\n\n".join(text for text in (self.system, self.prompt, self.input) if text is not None)

    def conversation(self, where: str) -> Conversation:
        """Return question and answer as a conversation of one turn."""
        question = self.prompt if self.input is None else f"{self.prompt}\n\n{self.input}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": self.completion}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(messages, [True] * len(messages), None, where, self.column)


def read_instruction(row: dict[str, Any], format: InstructionFormat, where: str) -> Instruction:
    """Return question and answer of a row. Raises RowError."""

    def required(column: str, field: str) -> str:
        return check_text(read_column(row, column, field, where), f"{where}: {column}")

    def optional(column: str | None) -> str | None:
        if column is None or row.get(column) in (None, "") or str(row[column]).isspace():
            return None
        return check_text(row[column], f"{where}: {column}")

    return Instruction(
        prompt=required(format.prompt, "prompt"),
        input=optional(format.input),
        completion=required(format.completion, "completion"),
        system=optional(format.system),
        column=format.prompt,
    )


def read_template(row: dict[str, Any], format: TemplateFormat, where: str) -> Instruction:
    """Return question and answer, filled in from a row's columns. Raises RowError."""
    completion = check_text(_filled(format.completion, row, "completion", where), f"{where}: the completion")
    return Instruction(_filled(format.prompt, row, "prompt", where), None, completion, None, "prompt")


def _filled(template: str, row: dict[str, Any], field: str, where: str) -> str:
    text = ""
    for before, column in parts_of(template):
        text += before
        if column is not None:
            value = read_column(row, column, field, where)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise RowError(
                    f"{where}: {column}={shorten(value)} is not text or a number but {type(value).__name__}; correct "
                    "or remove the row",
                    "wrong_type",
                )
            text += str(value)
    check_unicode(text, f"{where}: the {field}")
    return text


# Rows that are already tokens.


def read_tokens(row: dict[str, Any], format: TokensFormat, where: str) -> tuple[Int32Array, Int32Array]:
    """Return input ids and labels of a row. Raises RowError."""
    ids = _integers(read_column(row, format.input_ids, "input_ids", where), format.input_ids, where)
    column = format.labels if format.mask is None else format.mask
    if column is None:
        return ids, ids
    if column not in row:
        field = "labels" if format.mask is None else "mask"
        raise RowError(
            f"{where}: has no column {column!r}; name the right one in the dataset's format.{field}, "
            "or set it to null to train on every token",
            MISSING_COLUMN,
        )
    values = read_column(row, column, "labels", where)
    if format.mask is not None and isinstance(values, list):
        values = [int(value) if isinstance(value, bool) else value for value in values]  # JSON's true and false
    given = _integers(values, column, where)
    if len(given) != len(ids):
        raise RowError(
            f"{where}: {column} has {len(given)} entries, {format.input_ids} has {len(ids)}; each token needs one",
            "wrong_type",
        )
    if format.mask is not None:
        wrong = (given != 0) & (given != 1)
        rule = "must be 1 where the token is trained on, and 0 elsewhere"
    else:
        wrong = (given != IGNORE) & (given != ids)
        rule = f"must be {IGNORE} or equal to the input id at the same place: do not shift labels, the model does"
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise RowError(
            f"{where}: {column}[{index}]={given[index]}, {format.input_ids}[{index}]={ids[index]}; it {rule}",
            "wrong_type",
        )
    return ids, given if format.mask is None else np.where(given == 1, ids, np.int32(IGNORE))


def _integers(values: Any, column: str, where: str) -> Int32Array:
    if isinstance(values, list) and not values:
        raise RowError(f"{where}: {column}=[] has no tokens; correct or remove the row", "empty")
    if not isinstance(values, list):
        raise RowError(
            f"{where}: {column}={shorten(values)} is not a list of integers; correct or remove the row", "wrong_type"
        )
    # Not isinstance: True is an int to Python. Nor numpy's own check, which would cut 1.5 off to 1.
    if set(map(type, values)) != {int}:
        index = next(index for index, value in enumerate(values) if type(value) is not int)
        raise RowError(
            f"{where}: {column}[{index}]={shorten(values[index])} is not an integer; correct or remove the row",
            "wrong_type",
        )
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        index = next(index for index, value in enumerate(values) if not -(2**31) <= value < 2**31)
        raise RowError(
            f"{where}: {column}[{index}]={values[index]} is larger than any vocabulary; correct or remove the row",
            "outside_vocabulary",
        ) from None
