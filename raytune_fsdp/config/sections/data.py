"""`data`: which rows, in which format, in which mixture and order, packed how."""

from __future__ import annotations

import json
import math
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from raytune_fsdp.config.rules import Section, local_path, safe_name, without_credentials
from raytune_fsdp.config.sections.formats import ChatFormat, Format

DATE = "2024-07-26"
"""The date that templates get unless the config has another one: the one that Llama 3's have by default."""

OURS = ("messages", "tools", "add_generation_prompt")
"""What templates get from here, and no config may set."""

EVERY_SPLIT = "all"
"""The `split` that makes every file of a directory be read."""


def _a_date(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is not a date; write year, month and day, such as {DATE}") from None


def _not_ours(value: dict[str, Any]) -> dict[str, Any]:
    if taken := [name for name in OURS if name in value]:
        raise ValueError(f"{', '.join(taken)}: templates get these from the rows; leave them out")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{value!r} is not what JSON can hold ({error}); use texts, numbers, true and false") from None
    return value


Variables = Annotated[dict[str, Any], AfterValidator(_not_ours)]


class PromptSettings(Section):
    """What a tokenizer keeps, so that a model is asked as it was trained. The fields are those of `data`."""

    chat_template_kwargs: Variables = Field(default_factory=dict)
    chat_template_date: Annotated[str, AfterValidator(_a_date)] = DATE


class RowsConfig(Section):
    first: int | None = Field(default=None, ge=1)
    """Only the first N rows, in the order of the files; all if there are fewer."""

    last: int | None = Field(default=None, ge=1)
    """Only the last N rows."""

    limit: int | None = Field(default=None, ge=1)
    """At most N rows, from all over the dataset. They are chosen by a key of the file's content and the row's number, so
    they are always the same."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(first=self.first, last=self.last, limit=self.limit)
        return self


class HeldOutConfig(Section):
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Instead of separate datasets: take this fraction of the rows of `data.train` out of the training, and measure them as
    the evaluation `held_out`. Which rows these are depends only on the content of their files, not on `run.seed` or the
    order of the files."""

    rows: int | None = Field(default=None, ge=1)
    """Like `fraction`, but a number of rows, over all datasets of `data.train` together."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(fraction=self.fraction, rows=self.rows)
        return self


def _exactly_one(**fields: float | None) -> None:
    if sum(value is not None for value in fields.values()) != 1:
        given = " and ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        raise ValueError(f"{given or 'nothing is set'}: set exactly one of {', '.join(fields)}")


class SourceConfig(Section):
    """Where rows come from."""

    name: Annotated[str, AfterValidator(safe_name)] | None = None
    """Name in metrics and messages. Default: the file's, directory's or hub dataset's name."""

    path: Annotated[str, AfterValidator(without_credentials)] | None = None
    """Files with rows: a file, a directory, a pattern such as `data/*.jsonl`, a folder written by
    `Dataset.save_to_disk`, or a URL such as `s3://bucket/data/*.parquet` or `hf://datasets/org/name/**.parquet`."""

    hub: str | None = None
    """Name of a dataset on the Hugging Face hub (or in its cache), instead of `path`."""

    subset: str | None = None
    """Configuration of the hub dataset."""

    usual_split: ClassVar[str] = "train"
    """The split of a hub dataset if none is named. Configs from before `split` had no default name it."""
    takes_usual_split: ClassVar[bool] = False
    """Whether a directory that has this split and others is also read by it."""

    split: str | None = None
    """Split of the hub dataset (default: `train`), or of a directory, as `configs` in its README.md or else the names of its
    files define it. A directory's default is its only split; if it has several, name one, or `all` for every file."""

    revision: str | None = None
    """Branch, tag or commit of the hub dataset."""

    file_type: Literal["auto", "jsonl", "json", "csv", "text", "parquet", "arrow"] = "auto"
    """Type of the files. `auto`: by their extension. Files that also end in `.gz` or `.zst` are decompressed."""

    rows: RowsConfig | None = None
    """Only some of the dataset's rows."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None) or self.hub == "":
            raise ValueError(f"path={self.path!r} and hub={self.hub!r}: set exactly one of the two")
        if self.path is not None and (self.subset is not None or self.revision is not None):
            raise ValueError("subset and revision belong to a hub dataset: set hub instead of path, or leave them out")
        return self


class DatasetConfig(SourceConfig):
    format: Format = Field(default_factory=ChatFormat)
    """How a row becomes a document."""

    chat_template: str | None = None
    """A chat template for this dataset, as in `data.chat_template`, which it replaces. Prompts and the exported model have
    what all datasets of `data.train` have alike; where these differ, that of `data`, or the tokenizer's own."""

    chat_template_kwargs: Variables | None = None
    """Variables for the template of this dataset, instead of those of `data.chat_template_kwargs`. Prompts get those that
    all datasets of `data.train` have alike; where these differ, those of `data`."""

    weight: float | None = Field(default=None, ge=0)
    """How often each row is seen in an epoch: 3 for three times, 0.25 for a quarter of the rows, a different quarter in
    each epoch. Default: 1, unless `share` is set."""

    share: float | None = Field(default=None, ge=0, le=1)
    """Fraction of an epoch's rows that come from this dataset, instead of `weight`; an epoch then has as many rows as all
    datasets together. If one dataset has a share, all need one."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.weight is not None and self.share is not None:
            raise ValueError(f"weight={self.weight} and share={self.share}: set at most one of the two")
        return self


Evaluation = Annotated[
    Annotated[list[DatasetConfig], Tag("list")] | Annotated[HeldOutConfig, Tag("held_out")],
    # Without a discriminator a mistake in a list would be reported for both.
    Discriminator(lambda value: "held_out" if isinstance(value, (dict, HeldOutConfig)) else "list"),
]


class CacheConfig(Section):
    path: Annotated[str, AfterValidator(local_path)] | None = None
    """Directory for prepared rows and packed windows, on storage that all nodes share. Null: `cache` in `run.storage`."""

    max_gb: float = Field(default=200.0, gt=0)
    """Maximum size, in 10^9 bytes. What has not been used for the longest time is removed first. What a reference or a
    teacher says does not count, and stays."""


class DataConfig(Section):
    train: list[DatasetConfig] = Field(min_length=1)
    """Datasets to train on, mixed by their weights."""

    eval: Evaluation = Field(default_factory=list)
    """Datasets to measure the loss on, each with a curve of its own. Or a map that says what to hold out of `data.train`."""

    drop_eval_duplicates: bool = False
    """Take rows out of the training that are equal to rows of `data.eval`: they become the same tokens, with the same mask.
    Without this they are counted, and a warning says how many there are."""

    drop_duplicates: bool = False
    """Train on the first of several equal rows only, in the order of the datasets and of their rows."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens in a packed sample."""

    packing: Literal["best_fit", "concat", "none"] = "best_fit"
    """`best_fit` combines whole documents; `concat` joins them end to end and cuts wherever a sample is full, for
    pretraining; `none` pads every document to `seq_len`. No document sees another."""

    long_documents: Literal["error", "truncate", "drop", "split"] = "error"
    """What happens to a document of more than `seq_len` tokens. `truncate` keeps its first `seq_len` tokens; `drop`
    leaves it out; `split` makes documents of at most `seq_len` tokens out of it. All of these are counted."""

    bad_rows: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be used: broken JSON, a missing column, no token to train on, and so on.
    `skip` leaves it out, counts it by reason and lists it in events.jsonl."""

    max_row_bytes: int = Field(default=8_000_000, ge=1)
    """A row of more bytes is an error, whatever `bad_rows` says: while it is tokenized it takes some 140 times its size in
    memory. You may change it on resume."""

    special_tokens_in_text: Literal["keep", "escape", "error"] = "keep"
    """What happens to the text of a special token, such as `<|im_end|>`, inside a row's contents. `keep`: it becomes
    that token, as in transformers; `escape`: it is encoded as plain text; `error`: the row is a bad row."""

    shuffle: Literal["rows", "blocks", "none"] = "rows"
    """`rows`: a permutation of all rows, keyed by `run.seed`; `blocks`: a permutation of the row groups of Parquet files
    (of other files: stretches of consecutive rows) and of the rows inside each, which reads files in place; `none`: the
    order of the files."""

    reshuffle: Literal["auto", "windows", "full"] = "auto"
    """What changes from epoch to epoch. `windows`: the order of the windows and of the samples in each, so that data is
    tokenized once; `full`: every epoch draws new windows. `auto`: `windows`, or `full` if a weight is not a whole
    number."""

    window: int = Field(default=4096, ge=1)
    """How many rows are packed together: the unit of data work."""

    chat_template: str | None = None
    """A file with a Jinja chat template, or the name of one that comes with this package (chatml, llama-2, llama-3,
    openassistant), to use instead of the tokenizer's own."""

    chat_template_kwargs: Variables = Field(default_factory=dict)
    """Variables for chat templates, such as `{enable_thinking: false}`: which ones a template reads, its maker says. They
    hold for the rows of training and of evaluations, for prompts and tasks, and, as the exported model keeps them, for
    `generate` and `chat`. Whoever serves that model sets them again."""

    chat_template_date: Annotated[str, AfterValidator(_a_date)] = DATE
    """The date (year-month-day) that chat templates get where they ask for today's, as those of gpt-oss and Llama 3 do. It
    stays the same, so that the same data is the same tomorrow."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    """Where prepared data is kept."""

    @property
    def eval_decides_training(self) -> bool:
        """Whether the rows of `eval` decide which rows are trained on."""
        return isinstance(self.eval, HeldOutConfig) or self.drop_eval_duplicates

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        shares = [dataset.share for dataset in self.train]
        if any(share is not None for share in shares):
            if any(share is None for share in shares):
                raise ValueError(f"data.train.*.share={shares}: if one dataset has a share, all need one")
            if not math.isclose(total := math.fsum(share or 0.0 for share in shares), 1.0, abs_tol=1e-9):
                raise ValueError(f"data.train.*.share={shares} add up to {total:g}; they must add up to 1")
        elif all(dataset.weight == 0 for dataset in self.train):
            raise ValueError(
                "data.train.*.weight: all are 0, so nothing would be trained on; give one a weight above 0"
            )
        for index, dataset in enumerate([] if isinstance(self.eval, HeldOutConfig) else self.eval):
            if dataset.weight is not None or dataset.share is not None:
                raise ValueError(
                    f"data.eval.{index}: weight and share are for data.train; an evaluation sees every row once"
                )
        return self
