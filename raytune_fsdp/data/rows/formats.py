"""Turn rows into documents: token ids, and labels that say which of them are trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config.sections.formats import (
    BinaryFormat,
    ChatFormat,
    CompletionFormat,
    Format,
    PreferenceFormat,
    PythonFormat,
    ScoreFormat,
    TemplateFormat,
    TokensFormat,
    becomes_chat,
)
from raytune_fsdp.data.mixture import FIFTH_ORDER, OLDEST_ORDER, ORDER_VERSION, SIXTH_ORDER
from raytune_fsdp.data.rows.conversation import (
    Conversation,
    check_text,
    read_column,
    read_conversation,
)
from raytune_fsdp.data.rows.encoding import Policy, SpanEncoder, SpecialTokens, Tokens
from raytune_fsdp.data.rows.habits import Habits
from raytune_fsdp.data.rows.instructions import read_instruction, read_template
from raytune_fsdp.data.rows.learn import learn, needs_newer
from raytune_fsdp.data.rows.numbers import read_number, read_tokens
from raytune_fsdp.data.rows.own_code import RowFunction
from raytune_fsdp.data.rows.pairs import Answers, Side, Texts, joined, mismatched, read_group
from raytune_fsdp.data.rows.scores.scored import compared, read_scored, read_told, with_padding
from raytune_fsdp.data.rows.scores.scoring import Scoring
from raytune_fsdp.data.rows.template_program import Span
from raytune_fsdp.data.rows.templates import ChatTemplate, TemplateChoice, chat_template
from raytune_fsdp.data.rows.turns import Loss, Rendering, render_ahead, trained_spans
from raytune_fsdp.data.sources.source import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int32Array

T = TypeVar("T")

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
    """What a loss is told of its row: the columns of a loss of the user's own, or GROUP_COLUMNS."""
    others: tuple[Document, ...] = ()
    """The documents that follow it at once, in the same packed sample: the rest of its group."""
    shared: int = 0
    """How many tokens at its start the whole group has in common and could do without."""

    @property
    def target_tokens(self) -> int:
        """The number of tokens that can be trained on; the first token cannot, because nothing predicts it."""
        return int((self.labels[1:] != IGNORE).sum())

    @property
    def members(self) -> tuple[Document, ...]:
        """All documents of its group, in order; itself alone if it has none."""
        return (self, *self.others)

    @property
    def length(self) -> int:
        """The number of tokens of its group."""
        return sum(len(each.input_ids) for each in self.members) if self.others else len(self.input_ids)

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
    loss: Loss | None
    """Which turns are trained on; None: a head scores all of it."""


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
        over_all: bool = False,
        scoring: Scoring | None = None,
    ) -> None:
        """`template`: its text, None for the tokenizer's own, or all that the config says of it. `code`, `modules`: see
        `RowFunction`. `order`: the version by whose rules rows are read.

        `copied`: made from another formatter, which has given the warnings already. `by_turn`: see `Habits`. `columns`:
        the columns that a loss is told. `over_all`: whether all tokens of chosen documents are targets (`sft.over`).
        `scoring`: how documents are scored, if they are.
        """
        self.function = RowFunction(format.function, code, modules) if isinstance(format, PythonFormat) else None
        """The user's function, if the format has one."""
        self._given: dict[str, Any] = {
            "format": format, "tokenizer": tokenizer, "vocab_size": vocab_size, "template": template,
            "columnar": columnar, "special_tokens": special_tokens, "order": order, "by_turn": by_turn,
            "columns": columns, "over_all": over_all, "scoring": scoring,
        }  # fmt: skip
        format = format.then if isinstance(format, PythonFormat) else format
        self.format = format
        self._columnar, self._order, self._vocab_size = columnar, order, vocab_size
        self._columns, self._over_all, self._scoring = columns, over_all, scoring
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._in_text = SpecialTokens(self._special, special_tokens)
        self.templates: tuple[ChatTemplate, ...] = ()
        """The templates for conversations without tools and with them; empty if the format needs none."""
        self._habits: dict[tuple[bool, bool], Habits] = {}
        if isinstance(format, TokensFormat):
            return
        self._encoder = SpanEncoder(tokenizer)
        if becomes_chat(format):
            # Two, because a tokenizer may have another template for conversations with tools (Hermes, Command R).
            choice = template if isinstance(template, TemplateChoice) else TemplateChoice(text=template)
            self.templates = tuple(chat_template(tokenizer, choice, tools=tools) for tools in (False, True))
            # Without tags newer rules find an end, or refuse each row.
            is_seen = scoring is None and (order < FIFTH_ORDER or self.templates[0].tags)
            if getattr(format, "loss", None) != "all" and is_seen and not self.templates[0].trains_an_end():
                logger.log(logging.DEBUG if copied else logging.WARNING, _NO_END)
            return
        if tokenizer.eos_token_id is None and not isinstance(format, ScoreFormat):
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no eos_token, which must end every document with "
                f"format.type={format.type}; set eos_token in its tokenizer_config.json"
            )
        self._eos = None if isinstance(format, ScoreFormat) else int(tokenizer.eos_token_id)

    def read_by(self, order: int) -> None:
        """Read rows by the rules of another version."""
        self._given["order"] = self._order = order

    def __reduce__(self) -> Any:
        # Without the encoder, which each process makes once from the tokenizer (see encoding._backends).
        known: dict[str, Any] = (
            {} if self.function is None else {"code": self.function.own.code, "modules": self.function.own.modules}
        )
        return partial(Formatter, **self._given, **known, copied=True), ()

    @property
    def order_version(self) -> int:
        """The lowest version of the order that gives these documents, by its rules for turns and for added tokens."""
        if self._order < FIFTH_ORDER or isinstance(self.format, TokensFormat):
            return OLDEST_ORDER
        if not self.templates:
            adds = self._once and (self._encoder.prefix or self._encoder.suffix)
            return SIXTH_ORDER if adds else OLDEST_ORDER
        if self._scoring is not None:
            return FIFTH_ORDER  # as old as heads that score
        everything = getattr(self.format, "loss", None) == "all"
        kinds = zip((False, True), self.templates, strict=True)
        newer = any(needs_newer(each, self._special, tools=tools, everything=everything) for tools, each in kinds)
        return FIFTH_ORDER if newer else OLDEST_ORDER

    @property
    def _once(self) -> bool:
        """Whether a text that has the tokens which the tokenizer adds, as a chat that was rendered before, gets no
        second ones. One that a head scores gets what the tokenizer gives it where it is served."""
        return self._order >= SIXTH_ORDER and self._scoring is None

    @property
    def by_turn(self) -> bool:
        """Whether each turn of the assistant is rendered to find it, however well the template is known."""
        return bool(self._given["by_turn"])

    def render_by_turn(self, by_turn: bool = True) -> None:
        """Say whether each turn of the assistant is rendered to find it."""
        self._given["by_turn"] = by_turn
        self._habits.clear()

    @property
    def finds_turns(self) -> bool:
        """Whether turns are found by where the template puts messages."""
        if self._scoring is not None:
            return False
        grouped = isinstance(self.format, PreferenceFormat | BinaryFormat) and self.format.style == "chat"
        found = grouped or isinstance(self.format, ChatFormat)
        return found and not all(each.tags for each in self.templates)

    @property
    def has_learned(self) -> bool:
        """Whether the templates could be learned from our own conversations."""
        newer = self._order >= FIFTH_ORDER
        kinds = enumerate(self.templates)
        return not any(learn(each, self._special, newer=newer, tools=bool(tools)).is_by_turn for tools, each in kinds)

    def renders_alike(self, row: dict[str, Any], where: str, messages: int) -> bool:
        """Return whether what is known of the template finds the first turns of a row as rendering each does."""
        try:
            row = row if self.function is None else self.function(row, where)
            whole = self._conversation(row, where)
        except RowError:
            return True
        first = replace(whole, messages=whole.messages[:messages], train=whole.train[:messages])
        template, options = self.templates[first.tools is not None], self._turns(first)
        found: list[Any] = []
        for habits in (options["habits"], options["habits"].by_turn()):
            try:
                found.append(trained_spans(template, first, loss="assistant", **{**options, "habits": habits}))
            except RowError as error:
                found.append(str(error))
        return bool(found[0] == found[1])

    def _conversation(self, row: dict[str, Any], where: str) -> Conversation:
        if isinstance(self.format, ChatFormat):
            return read_conversation(row, self.format, where, columnar=self._columnar, order=self._order)
        (first, *_) = self._answers(row, where).sides
        assert isinstance(first, Conversation), self.format
        return replace(first, train=[True] * len(first.train))

    def _turns(self, conversation: Conversation) -> dict[str, Any]:
        """Return what is needed to find the turns of a conversation."""
        tools, newer = conversation.tools is not None, self._order >= FIFTH_ORDER
        if (tools, newer) not in self._habits:
            habits = learn(self.templates[tools], self._special, newer=newer, tools=tools)
            self._habits[tools, newer] = habits.by_turn() if self._given["by_turn"] else habits
        return {"special": self._special, "newer": newer, "habits": self._habits[tools, newer]}

    def documents(
        self, rows: Sequence[dict[str, Any] | RowError], wheres: Sequence[str], *, made: bool = False
    ) -> list[Document | RowError]:
        """Return the document of each row, or what is wrong with the row.

        `wheres`: how errors name the rows. `made`: the user's function has made these rows already.
        """
        rows = rows if made else [self._made(row, where) for row, where in zip(rows, wheres, strict=True)]
        if isinstance(self.format, PreferenceFormat | BinaryFormat):
            groups = [or_error(self._answers, row, where) for row, where in zip(rows, wheres, strict=True)]
            return self._in_groups(groups, wheres)
        begun = [or_error(self._begin, row, where) for row, where in zip(rows, wheres, strict=True)]
        documents = self._tokenized(begun, wheres)
        if not self._columns and not isinstance(self.format, ScoreFormat):
            return documents
        every = zip(documents, rows, wheres, strict=True)
        return [self._told(document, row, where) for document, row, where in every]

    def mismatched(
        self,
        rows: Sequence[dict[str, Any] | RowError],
        others: Sequence[dict[str, Any] | RowError],
        wheres: Sequence[str],
    ) -> list[Document | RowError]:
        """Return each row's prompt with the answer of the other row, as KTO needs it; of formats of judged answers."""
        groups: list[list[Answers | RowError]] = [
            [or_error(self._answers, self._made(row, where), where) for row, where in zip(some, wheres, strict=True)]
            for some in (rows, others)
        ]
        begun: list[RowText | Document | _Begun | RowError] = []
        for one, other in zip(*groups, strict=True):
            error = one if isinstance(one, RowError) else other
            if isinstance(one, Answers) and isinstance(other, Answers):
                begun.append(or_error(self._side, one.with_answer_of(other), wheres[len(begun)]))
            else:
                assert isinstance(error, RowError), error
                begun.append(error)
        documents = self._tokenized(begun, wheres)
        return [
            mismatched(document, one) if isinstance(document, Document) and isinstance(one, Answers) else document
            for document, one in zip(documents, groups[0], strict=True)
        ]

    def _in_groups(self, groups: Sequence[Answers | RowError], wheres: Sequence[str]) -> list[Document | RowError]:
        """Return the first document of each group, with the others."""
        begun: list[RowText | Document | _Begun | RowError] = []
        places: list[str] = []
        for group, where in zip(groups, wheres, strict=True):
            if isinstance(group, RowError):
                continue
            own = [f"{where}: {column}" for column in group.columns]
            begun += [or_error(self._side, side, place) for side, place in zip(group.sides, own, strict=True)]
            places += own
        made = iter(self._tokenized(begun, places))
        found: list[Document | RowError] = []
        for group, where in zip(groups, wheres, strict=True):
            if isinstance(group, RowError):
                found.append(group)
                continue
            members = [next(made) for _ in group.sides]
            wrong = next((each for each in members if isinstance(each, RowError)), None)
            sound = [each for each in members if isinstance(each, Document)]
            if wrong is None and self._scoring is not None:
                found.append(compared(group, sound, where))
            else:
                found.append(wrong or joined(group, sound, where, over_all=self._over_all))
        return found

    def _tokenized(
        self, begun: Sequence[RowText | Document | _Begun | RowError], wheres: Sequence[str]
    ) -> list[Document | RowError]:
        """Render and encode what has been read; return documents, or what is wrong."""
        render_ahead([each.rendering for each in begun if isinstance(each, _Begun)])
        read = [or_error(self._finish, each) if isinstance(each, _Begun) else each for each in begun]
        # All texts in one call: the tokenizer spreads a batch over its threads.
        texts = [item for item in read if isinstance(item, RowText)]
        encoded: Iterator[Tokens] = iter(())
        if texts:
            spans, literals = [each.spans for each in texts], [each.literals for each in texts]
            encoded = iter(self._encoder.encode([each.text for each in texts], spans, literals))
        documents: list[Document | RowError] = []
        for item, where in zip(read, wheres, strict=True):
            document = self._assemble(item, next(encoded), where) if isinstance(item, RowText) else item
            if isinstance(document, Document):
                document = self._check(document, where) or document
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
        return row if self.function is None else or_error(self.function, row, where)

    def _told(self, document: Document | RowError, row: dict[str, Any] | RowError, where: str) -> Document | RowError:
        """Return the document with the columns of its row that a loss is told."""
        if isinstance(document, RowError):
            return document
        columns = or_error(self._told_of, row, where)
        return columns if isinstance(columns, RowError) else replace(document, columns=columns)

    def _told_of(self, row: dict[str, Any], where: str) -> tuple[float, ...]:
        if isinstance(self.format, ScoreFormat):
            assert self._scoring is not None, "such rows are for a head"
            return read_told(row, self.format, self._scoring, where)
        return tuple(read_number(row, name, where) for name in self._columns)

    def _answers(self, row: dict[str, Any], where: str) -> Answers:
        assert isinstance(self.format, PreferenceFormat | BinaryFormat)
        return read_group(row, self.format, where, columnar=self._columnar, order=self._order)

    def _side(self, side: Side, where: str) -> RowText | _Begun:
        whole = self._scoring is not None
        if not isinstance(side, Texts):
            return self._render(side, None if whole else "assistant")
        prompt, answer = (self._in_text.guard(text, where) for text in (side.prompt, side.answer))
        spans = None if whole else [(len(prompt), len(prompt) + len(answer))]
        return self._text(prompt + answer, spans, plain=True)

    def _begin(self, row: dict[str, Any], where: str) -> RowText | Document | _Begun:
        format = self.format
        if isinstance(format, ChatFormat):
            conversation = read_conversation(row, format, where, columnar=self._columnar, order=self._order)
            return self._render(conversation, format.loss)
        if isinstance(format, ScoreFormat):
            said = read_scored(row, format, where, columnar=self._columnar, order=self._order)
            if isinstance(said, Conversation):
                return self._render(said, None)
            return self._text(self._in_text.guard(said, where), None, plain=True)
        if isinstance(format, CompletionFormat):
            content = check_text(read_column(row, format.text, "text", where), f"{where}: {format.text}")
            return self._text(self._in_text.guard(content, where), None, plain=True)
        if isinstance(format, TokensFormat):
            return Document(*read_tokens(row, format, where))
        assert not isinstance(format, PreferenceFormat | BinaryFormat), "these make groups"
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

    def _render(self, conversation: Conversation, loss: Loss | None) -> RowText | _Begun:
        guarded = replace(
            conversation,
            messages=self._in_text.guard(conversation.messages, conversation.where),
            tools=self._in_text.guard(conversation.tools, conversation.where),
        )
        template = self.templates[conversation.tools is not None]
        return _Begun(Rendering(template, guarded, **self._turns(conversation)), conversation, guarded, loss)

    def _finish(self, begun: _Begun) -> RowText:
        conversation = begun.conversation
        rendering = begun.rendering
        text = (
            self._text(rendering.whole(), None, plain=False)
            if begun.loss is None
            else self._text(*rendering.trained(begun.loss), plain=False)
        )
        if begun.guarded != conversation:
            given = Rendering(rendering.template, conversation, **self._turns(conversation)).text
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
            if self._once:
                prefix = [] if ids[: len(prefix)].tolist() == prefix else prefix
                suffix = [] if ids[len(ids) - len(suffix) :].tolist() == suffix else suffix
            # The end token comes once, also if the tokenizer adds it or the text ends with it.
            if self._eos is not None and self._eos not in (suffix[-1:] or ids[-1:]):
                suffix = [*suffix, self._eos]
            ids = np.concatenate([prefix, ids, suffix]).astype(np.int32)
            if trained is not None:
                trained = np.concatenate([np.zeros(len(prefix), bool), trained, np.ones(len(suffix), bool)])
        if self._scoring is not None:
            made = with_padding(ids, self._scoring, where)
            return made if isinstance(made, RowError) else Document(*made)
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


def or_error(read: Callable[..., T], row: object, *where: str) -> T | RowError:
    """Return what is read of a row, or what is wrong with the row."""
    if isinstance(row, RowError):
        return row
    try:
        return read(row, *where)
    except RowError as error:
        return error


def _content(document: Document | RowError) -> Any:
    if isinstance(document, RowError):
        return None  # its text does not count: an object's address in it differs every time
    return [(each.input_ids.tolist(), each.labels.tolist(), each.columns) for each in document.members]


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
    "preference": "an answer needs a message of the assistant with at least one token: remove the row",
    "binary": "an answer needs a message of the assistant with at least one token: remove the row",
    "tokens": "labels must repeat the input id (or mask must be 1) at some place after the first",
}
