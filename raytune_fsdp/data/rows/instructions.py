"""Rows with a question and its answer in columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.formats import InstructionFormat, TemplateFormat, parts_of
from raytune_fsdp.data.rows.conversation import (
    Conversation,
    are_messages,
    check_text,
    check_unicode,
    of_lists,
    read_column,
)
from raytune_fsdp.data.sources.source import shorten

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
        if are_messages(row.get(column)):
            way_out = of_lists(format.prompt, format.completion)
            raise RowError(f"{where}: {column}={shorten(row[column])} is not text; {way_out}", "wrong_type")
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
