"""Tasks of an evaluation: rows with a question and its right answer become the tokens that a model gets.

All rows are read and tokenized before any rank is started, so that a row which cannot be asked is reported by then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune_fsdp.base.answers_alike import TooSlowError, find
from raytune_fsdp.base.batch import IGNORE, Progress
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.eval import ChoicesTask, ExactTask
from raytune_fsdp.data.mixture import order_of
from raytune_fsdp.data.packing import PackedSamples, Packing, pack
from raytune_fsdp.data.rows.encoding import SpanEncoder
from raytune_fsdp.data.rows.formats import Document
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused, TemplateChoice, as_templates_see, chat_template
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Columns, Source, dataset_name, shorten
from raytune_fsdp.data.windows import pad_id_of
from raytune_fsdp.plan.run_dir import cache_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from raytune_fsdp.base.batch import Int32Array, Int64Array

_MOST_QUESTIONS, _MOST_SUBJECTS = 100_000, 200
"""Every rank holds all questions, and every subject is a curve: MMLU has 14,042 and 57."""

NEXT_QUESTION = "\n\nQuestion:"
"""The text that begins the next question where no chat template separates questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A multiple-choice task. Each choice is a document: its question, then the choice, whose tokens are targets."""

    name: str
    samples: PackedSamples
    """The documents, packed. Their `sources` are their numbers."""
    pad_id: int
    first: Int64Array
    """The number of each question's first choice, and at the end the number of all choices."""
    characters: Int64Array
    """Length of each choice in characters."""
    right: Int64Array
    """Which choice of each question is right, from 0."""
    subjects: tuple[str | None, ...]
    """The subject of each question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Questions whose answers the model writes."""

    name: str
    task: ExactTask
    prompts: tuple[Int32Array, ...]
    right: tuple[str, ...]
    """The right final answer of each question."""
    plain: bool
    """Whether the prompts have no chat template, so that the model may go on with a question of its own."""
    subjects: tuple[str | None, ...]


Questions = Choices | Written


@dataclass(frozen=True, slots=True)
class _Asked:
    """A row of a task, read."""

    where: str
    question: str
    answer: Any
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    subject: str | None
    right: int = 0
    """Which choice is right, from 0, where there are choices."""


def open_tasks(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    *,
    positions: int,
    progress: Progress | None = None,
    order: int | None = None,
) -> tuple[Questions, ...]:
    """Open the tasks of `eval.tasks`. Raises DataError for whatever cannot be asked.

    `order`: the version by whose rules rows are read; None for a new run.
    """
    found: list[Questions] = []
    for index, task in enumerate(config.eval.tasks):
        name, field = dataset_name(task), f"eval.tasks.{index}"
        choices = () if isinstance(task, ExactTask) else (task.choices,)
        needed = [task.question, task.answer]
        for each in choices:
            needed += [each] if isinstance(each, str) else each
        columns = Columns(tuple(dict.fromkeys(needed)), () if task.subject is None else (task.subject,))
        try:
            source = open_source(
                task, cache=cache_of(config), in_place=False, progress=progress,
                max_row_bytes=config.data.max_row_bytes, columns=columns, order=order_of(order),
            )  # fmt: skip
        except RowError:
            raise
        except DataError as error:
            raise DataError(f"{field}: {error}".replace("the dataset's ", f"{field}.")) from error
        rows = _read(source, task, field)
        rows = _with_right(rows) if isinstance(task, ChoicesTask) else rows
        prompter = _Prompter(task, tokenizer, rows[: task.shots], TemplateChoice.of_prompts(config.data))
        rows = rows[task.shots :]
        if not rows:
            raise DataError(f"{field}.shots={task.shots}: {source.label} has no more rows than that; lower it")
        if isinstance(task, ChoicesTask):
            found.append(_choices(config, name, rows, prompter, vocab_size, pad_id_of(tokenizer, vocab_size)))
        else:
            found.append(_written(task, name, rows, prompter, positions=positions, vocab_size=vocab_size, field=field))
    return tuple(found)


def check_names(tasks: Sequence[Questions], datasets: Iterable[str]) -> None:
    """Refuse tasks whose metrics would have the same names as those of another task or dataset."""
    known = set(datasets)
    for index, task in enumerate(tasks):
        if task.name in known:
            raise DataError(
                f"eval.tasks.{index}: another task, or a dataset of data.eval, is called {task.name!r}, too: set "
                f"eval.tasks.{index}.name to a name of its own"
            )
        known.add(task.name)


def _read(source: Source, task: ChoicesTask | ExactTask, field: str) -> list[_Asked]:
    if len(source) > _MOST_QUESTIONS:
        raise DataError(
            f"{field}: {source.label} has {len(source):,} rows, and at most {_MOST_QUESTIONS:,} are asked: set "
            f"{field}.rows.limit"
        )
    rows: list[_Asked] = []
    subjects: set[str] = set()
    for index, row in enumerate(source.rows(range(len(source)))):
        where = source.where(index)
        if isinstance(row, RowError):
            raise row
        choices, labels = _choices_of(row, task.choices, where) if isinstance(task, ChoicesTask) else ((), ())
        subject = row.get(task.subject) if task.subject is not None else None
        # It becomes a part of metrics' names, where / separates.
        subject = None if subject is None else re.sub(r"[^\w.-]+", "_", str(subject)).strip("_")[:100]
        value = _value(row, task.question, where)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{where}: {task.question}='{shorten(value)}' is no text; correct the row, or name another column"
            )
        asked = _Asked(
            where=where,
            question=value.strip(),
            answer=_value(row, task.answer, where),
            choices=choices,
            labels=labels,
            subject=subject or None,
        )
        rows.append(asked)
        subjects |= {asked.subject} if asked.subject is not None else set()
        if len(subjects) > _MOST_SUBJECTS:
            raise DataError(
                f"{field}.subject={task.subject}: {where} has the {len(subjects)}th subject, and each is a curve: set "
                f"it to null, or to a column with at most {_MOST_SUBJECTS}"
            )
    return rows


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if row.get(column) is None:
        known = ", ".join(map(shorten, row)) or "none"
        raise DataError(f"{where}: the row has no {column!r} (it has {known}); correct it, or name another column")
    return row[column]


def _choices_of(row: Mapping[str, Any], column: str | list[str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of a row's choices, and their labels if they have some."""
    value: Any
    labels: Any = ()
    if isinstance(column, str):
        value = _value(row, column, where)
        if isinstance(value, str):  # from a CSV file
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if isinstance(value, Mapping):
            value, labels = value.get("text"), value.get("label") or ()
    else:
        there = [row.get(name) not in (None, "") for name in column]
        value = [row[name] for name, given in zip(column, there, strict=True) if given]
        if not all(there[: len(value)]):
            raise DataError(
                f"{where}: {column[there.index(False)]} is empty and a later one of {', '.join(column)} is not, so the "
                "letters and indices of answers would mean other choices; leave only the last ones empty, or leave the "
                "row out"
            )
    texts = [str(each).strip() for each in value] if isinstance(value, list) else []
    if len(texts) < 2 or not all(texts) or not isinstance(labels, list | tuple):
        shown = column if isinstance(column, str) else ", ".join(column)
        raise DataError(
            f"{where}: {shown}={shorten(value)} is no list of two or more texts, nor a map of text and label; "
            "correct the row, or name another column in choices"
        )
    return tuple(texts), tuple(str(each).strip() for each in labels)


def _with_right(rows: Sequence[_Asked]) -> list[_Asked]:
    """Return a task's rows with the choice that is right: an answer is its label, its letter or index, or its text.

    Of an answer that is the letter of one choice and the text of another, the other rows decide, if only one of the two
    can be meant in all of them.
    """
    named, written = [_named(row) for row in rows], [_written_out(row) for row in rows]
    by_name, by_text = None not in named, None not in written
    found = []
    for row, name, text in zip(rows, named, written, strict=True):
        place = text if name is None else name
        if name is not None and text is not None and name != text and not row.labels:
            if by_name == by_text:
                raise DataError(
                    f"{row.where}: the answer '{shorten(row.answer)}' is the text of choice {text + 1}, and as a "
                    f"letter or index it is choice {name + 1}; the other rows do not say which is meant: make the "
                    "choices a map of text and label, and write labels, or leave the row out"
                )
            place = text if by_text else name
        if place is None:
            raise _none_of_the_choices(row)
        found.append(replace(row, right=place))
    return found


def _named(row: _Asked) -> int | None:
    """Return which choice an answer is the label, the letter or the index of; None: of none."""
    given, text = row.answer, str(row.answer).strip()
    place = row.labels.index(text) if text in row.labels else None
    if not row.labels and not isinstance(given, bool):
        if len(text) == 1 and text.isascii() and text.isalpha():
            place = ord(text.upper()) - ord("A")
        elif text.isascii() and text.isdecimal():
            place = int(text)
    return place if place is not None and place < len(row.choices) else None


def _written_out(row: _Asked) -> int | None:
    """Return which choice an answer is the text of; None: of none."""
    text = str(row.answer).strip()
    return row.choices.index(text) if text in row.choices else None


def _none_of_the_choices(row: _Asked) -> DataError:
    many = len(row.choices)
    letters = f"a letter (A to {chr(ord('A') + many - 1)}), an index (0 to {many - 1})"
    known = f"one of {', '.join(row.labels)}" if row.labels else letters
    return DataError(
        f"{row.where}: the answer '{shorten(row.answer)}' is none of the {many} choices; write {known} or its text"
    )


class _Prompter:
    """Writes and tokenizes questions as the model is asked them."""

    def __init__(
        self,
        task: ChoicesTask | ExactTask,
        tokenizer: PreTrainedTokenizerBase,
        shots: Sequence[_Asked],
        choice: TemplateChoice,
    ) -> None:
        self._encoder = SpanEncoder(tokenizer)
        self.plain = task.style == "plain" or (task.style == "auto" and not tokenizer.chat_template)
        # Chat templates write their own prefix.
        self._prefix = np.array(self._encoder.prefix if self.plain else [], dtype=np.int32)
        self._template: ChatTemplate | None = None if self.plain else chat_template(tokenizer, choice)
        self._system = task.system
        self._shots = [(row.question, row.choices[row.right] if row.choices else str(row.answer)) for row in shots]

    def prompt(self, row: _Asked) -> str:
        """Return the text up to where the answer begins."""
        if self._template is None:
            shots = [f"Question: {question}\nAnswer: {answer}" for question, answer in self._shots]
            before = [self._system] if self._system is not None else []
            return "\n\n".join([*before, *shots, f"Question: {row.question}\nAnswer:"])
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        for question, answer in self._shots:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": row.question})
        try:
            return self._template.render(as_templates_see(messages), None, prompt=True)[0]
        except Refused as error:
            raise DataError(f"{row.where}: the chat template refuses the question: {error}") from error

    def documents(self, prompts: Sequence[str], answers: Sequence[str]) -> list[Document]:
        """Tokenize each prompt with its answer; only the answer's tokens are targets.

        The prompt has the same tokens as without an answer.
        """
        answers = [f" {answer}" if self.plain else answer for answer in answers]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        spans = [[(len(prompt), len(text))] for prompt, text in zip(prompts, texts, strict=True)]
        found = []
        for tokens in self._encoder.encode(texts, spans):
            assert tokens.trained is not None, "its spans were given"
            ids = np.concatenate([self._prefix, tokens.ids])
            trained = np.concatenate([np.zeros(len(self._prefix), dtype=bool), tokens.trained])
            found.append(Document(ids, np.where(trained, ids, np.int32(IGNORE)).astype(np.int32)))
        return found

    def tokens(self, prompts: Sequence[str]) -> list[Int32Array]:
        """Tokenize the prompts without answers."""
        encoded = self._encoder.encode(prompts, [None] * len(prompts))
        return [np.concatenate([self._prefix, tokens.ids]) for tokens in encoded]


def _choices(
    config: FinetuneConfig, name: str, rows: Sequence[_Asked], prompter: _Prompter, vocab_size: int, pad_id: int
) -> Choices:
    flat = [(row, choice) for row in rows for choice in row.choices]
    prompts = {row.where: prompter.prompt(row) for row in rows}
    documents = prompter.documents([prompts[row.where] for row, _ in flat], [choice for _, choice in flat])
    seq_len = config.data.seq_len
    for (row, choice), document in zip(flat, documents, strict=True):
        if len(document.input_ids) > seq_len:
            raise DataError(
                f"{row.where}: the question and its choice '{shorten(choice)}' have {len(document.input_ids)} tokens, "
                f"more than data.seq_len={seq_len}: raise data.seq_len, or leave the row out"
            )
        if document.labels[0] != IGNORE or not document.target_tokens:
            raise DataError(
                f"{row.where}: the choice '{shorten(choice)}' is no token after the question; correct the row"
            )
        _check_known(document.input_ids, vocab_size, row)
    packing: Packing = "none" if config.data.packing == "none" else "best_fit"
    return Choices(
        name=name,
        samples=pack(documents, sources=range(len(documents)), seq_len=seq_len, pad_id=pad_id, packing=packing),
        pad_id=pad_id,
        first=np.cumsum([0, *(len(row.choices) for row in rows)]),
        characters=np.array([len(choice) for _, choice in flat]),
        right=np.array([row.right for row in rows]),
        subjects=tuple(row.subject for row in rows),
    )


def _written(
    task: ExactTask,
    name: str,
    rows: Sequence[_Asked],
    prompter: _Prompter,
    *,
    positions: int,
    vocab_size: int,
    field: str,
) -> Written:
    prompts = prompter.tokens([prompter.prompt(row) for row in rows])
    for row, ids in zip(rows, prompts, strict=True):
        # Each is checked, not only the longest: ranks answer together, and those that are done go on with the rest.
        if not 0 < len(ids) <= positions - task.max_new_tokens:
            raise DataError(
                f"{row.where}: the question has {len(ids)} tokens, and {field}.max_new_tokens={task.max_new_tokens} "
                f"more do not fit into the {positions} positions that the model knows: lower that, or leave the row out"
            )
        _check_known(ids, vocab_size, row)
    return Written(
        name=name,
        task=task,
        prompts=tuple(prompts),
        right=tuple(_final(row, task, field) for row in rows),
        plain=prompter.plain,
        subjects=tuple(row.subject for row in rows),
    )


def _final(row: _Asked, task: ExactTask, field: str) -> str:
    """Return the right final answer of a row: what is found in its solution, or else the answer as it is."""
    text = str(row.answer).strip()
    try:
        found = find(text, task.find, task.regex)
    except TooSlowError:
        raise DataError(
            f"{field}.regex={task.regex!r} takes more than a second for the answer of {row.where}: write it without "
            "repetitions inside of repetitions, such as (a+)+"
        ) from None
    if found is None and (task.find == "number" or not text):
        raise DataError(
            f"{row.where}: the answer '{shorten(row.answer)}' has no number; correct it, or set {field}.find to "
            "boxed or regex"
        )
    return text if found is None else found


def _check_known(ids: Int32Array, vocab_size: int, row: _Asked) -> None:
    if int(ids.max()) >= vocab_size:
        raise DataError(
            f"{row.where}: token {int(ids.max())} is beyond the model's vocabulary of {vocab_size}: the tokenizer is "
            "another model's"
        )
