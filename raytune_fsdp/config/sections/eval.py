"""`eval`: when the model is evaluated, and on what."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import PerEpoch, Section, check_expression
from raytune_fsdp.config.sections.data import SourceConfig


class EarlyStopConfig(Section):
    metric: str | None = None
    """The metric that has to improve, such as `eval/<dataset>/loss`. Null: the mean loss over all datasets. Whether higher is better follows from its name, as with `checkpoint.best_is: auto`."""

    patience: int = Field(default=3, ge=1)
    """How many evaluations in a row without an improvement end the run."""

    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How much better than the best one before it an evaluation must be to count as an improvement. Less than a millionth of the value never counts: that is rounding, which differs with the number of ranks."""


class MessageConfig(Section):
    role: Literal["system", "user", "assistant"]
    """Who says it."""

    content: str
    """The text of the message."""


class ConversationConfig(Section):
    messages: list[MessageConfig] = Field(min_length=1)
    """The messages up to the user's message that the model answers, as in a row of a chat file; the first may be a system message."""

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role != "user":
            raise ValueError(
                f"the last message has the role {self.messages[-1].role}; the model answers the user's: leave the last "
                "ones out, or add a question"
            )
        return self


class QuestionsConfig(SourceConfig):
    usual_split: ClassVar[str] = "test"
    takes_usual_split: ClassVar[bool] = True

    split: str | None = None
    """Split of the hub dataset, or of a directory, as in `data.train`. Default: `test`, or a directory's only split."""

    question: str = "question"
    """Column with the question."""

    answer: str = "answer"
    """Column with the right answer. With `choices`: its letter (A is the first), its index (0 is the first), its label or its text; what could be two of these is decided by the other rows, or refused. With `exact`: the answer itself, or a solution that ends with it."""

    subject: str | None = "subject"
    """Column with the subject, each of which gets a curve of its own. Rows without it are fine. Null: the column is not read."""

    style: Literal["auto", "chat", "plain"] = "auto"
    """`chat`: the question is a message of the user, rendered by the chat template; `plain`: `Question: … Answer:`, without a template. `auto`: `chat` if there is a chat template, else `plain`."""

    system: str | None = None
    """What comes before the questions: a system message, or with `plain` a text."""

    shots: int = Field(default=0, ge=0)
    """The first N rows are examples: with their answers, they come before every other question. They are not measured."""


class ChoicesTask(QuestionsConfig):
    type: Literal["choices"]
    """Multiple choice, as in MMLU and ARC: is the right answer the one that the model finds most likely?"""

    choices: str | list[str] = "choices"
    """Column with the list of answers, as texts or as ARC's map of `text` and `label`; or the columns of the single answers: `[A, B, C, D]`."""


class ExactTask(QuestionsConfig):
    type: Literal["exact"]
    """Questions whose answers the model writes, as in GSM8K and MATH: does it end with the right answer?"""

    find: Literal["number", "boxed", "regex"] = "number"
    """What counts of an answer: its last number, the content of its last `\\boxed{}`, or the last match of the group in `regex`."""

    regex: str | None = None
    """A regular expression with one group, such as `Answer: (.*)`, for `find: regex`."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum length of an answer, in tokens."""

    batch: int = Field(default=8, ge=1)
    """How many questions a rank answers at once."""

    @model_validator(mode="after")
    def _expression(self) -> Self:
        if (self.find == "regex") != (self.regex is not None):
            raise ValueError(
                f"find={self.find} and regex={self.regex!r}: set both, with find=regex, or leave regex out"
            )
        if self.regex is not None:
            check_expression("regex", self.regex)
            if re.compile(self.regex).groups != 1:
                raise ValueError(
                    f"regex: {self.regex!r} has {re.compile(self.regex).groups} groups; it must have one, around what "
                    "counts: write (?:…) for the others"
                )
        return self


Task = Annotated[ChoicesTask | ExactTask, Field(discriminator="type")]


class EvalConfig(Section):
    where: Literal["ranks", "task"] = "ranks"
    """`ranks`: training waits while its ranks measure the model. `task`: a Ray task measures a committed checkpoint while training goes on; nothing that happens to the task stalls or ends training."""

    task_cpus: int = Field(default=1, ge=1)
    """CPUs of that task. They must be free in addition to those of the ranks."""

    task_gpus: int = Field(default=0, ge=0)
    """GPUs of that task. 0: it computes on its CPUs."""

    task_minutes: float = Field(default=60, gt=0, allow_inf_nan=False)
    """Minutes that the task may take for a checkpoint once it has begun; after that it is ended."""

    every: Annotated[int, Field(ge=1)] | PerEpoch | None = None
    """Steps between two evaluations, or `{per_epoch: 4}`: four times in every pass over the data (needs `train.epochs`). Null: only at the end."""

    at_start: bool = False
    """Evaluate before the first step, too."""

    early_stop: EarlyStopConfig | None = None
    """End the run when its evaluations no longer improve: at the same step on any number of ranks, whatever happens in between. Null: it trains to its last step."""

    tasks: list[Task] = Field(default_factory=list)
    """Questions with known answers for the model at every evaluation: multiple choice, or answers that it writes."""

    prompts: list[str | ConversationConfig] = Field(default_factory=list)
    """What the model answers at every evaluation: texts, or conversations such as `{messages: [{role: system, content: Be brief.}, {role: user, content: Who was Ada?}]}`."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of those answers, in tokens."""
