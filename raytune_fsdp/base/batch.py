"""The values that travel between stages: plain frozen data, without behaviour beyond what the fields imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
    Int32Array = np.ndarray[Any, np.dtype[np.int32]]
    Int64Array = np.ndarray[Any, np.dtype[np.int64]]
    Float64Array = np.ndarray[Any, np.dtype[np.float64]]

Progress = Callable[[str, int, int], None]
"""Called during long work with what is being done, how much is done, and how much there is in total."""

IGNORE = -100
"""The label of a token that is not trained on."""

PADDING = -1
"""The source id of padding."""


class Role(IntEnum):
    """What a document is in its group."""

    CHOSEN = 1
    REJECTED = 2
    """Follows the chosen answer of its pair at once."""
    DESIRABLE = 3
    UNDESIRABLE = 4
    MISMATCHED = 5
    """The prompt of the document before it, with another row's answer."""
    SCORED = 6
    """Has a class or a score, and stands alone."""


GROUP_COLUMNS = ("role", "weight", "margin", "skipped")
"""What a loss of groups is told of each document: its `Role`, the weight and the margin of its row, and how many of its
first targets are not the answer's (those of the prompt, with `sft.over: all`). Where there is a reference, its
log-probability of the answer follows. Of a scored document, the margin is its class's number, or its score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position in the stream, as the packed sample that comes next. All three count from 0."""

    epoch: int = 0
    window: int = 0
    """Place of the window in the order of the epoch."""
    index: int = 0
    """Place of the sample in the order of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """One sequence of `seq_len` tokens. All four arrays are int32 of that length.

    `labels[i]` is `input_ids[i]` if token i is trained on, otherwise IGNORE; models shift the labels themselves, so
    token i is predicted from token i-1. The first token of a document has label IGNORE. `position_ids` restart at 0
    with every document and with the padding. `source_ids[i]` is the index of the dataset in `data.train` (in an
    evaluation, among those that it measures), or PADDING.
    """

    input_ids: Int32Array
    labels: Int32Array
    position_ids: Int32Array
    source_ids: Int32Array
    id: int
    """xxh3_64 of the four arrays, as a signed integer."""
    columns: Float64Array | None = None
    """[columns, seq_len]: what a loss of the user's own is told of each token's row; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Where documents begin in a micro-batch, its samples laid out one after another. Padding is a document."""

    starts: torch.Tensor
    """int32: the first token of each document, and at the end the number of all tokens."""
    longest: int
    """Tokens of the longest document."""
    lengths: tuple[int, ...] = ()
    """Tokens of each document, which the host need not wait for; empty if only the device knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What a teacher predicts for targets: its most likely tokens, at the temperature of the run."""

    ids: torch.Tensor
    """int32 [targets, k]: these tokens, the most likely first."""
    log_probabilities: torch.Tensor
    """[targets, k], of these."""
    rest: torch.Tensor
    """[targets]: the logarithm of the probability of all other tokens together; minus infinity if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The tokens of a micro-batch that are trained on, found on the host: only their predictions are ever computed."""

    places: torch.Tensor
    """int64: for each, the place of the token that predicts it, with the samples laid out one after another."""
    ids: torch.Tensor
    """int64: what is to be predicted."""
    datasets: torch.Tensor
    """int64: the dataset of each, as in `source_ids`."""
    by_dataset: tuple[int, ...]
    """How many targets each dataset has, up to the last dataset that has any."""
    by_document: tuple[int, ...] = ()
    """How many targets each document has, of those that have any; of a part: those of the whole micro-batch."""
    columns: tuple[tuple[float, ...], ...] = ()
    """What a loss is told of each of these documents; empty: nothing."""
    before: int = 0
    """Of a part: how many targets of the micro-batch come before it."""
    teacher: Taught | None = None
    """What the teacher predicts in the place of each; of a part: in the part's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPart:
    """Which tokens of a micro-batch a member of its group has, with the samples laid out one after another."""

    member: int
    members: int
    """The number of parts, which are equally long."""
    lengths: torch.Tensor
    """int64: for each token, the length of its sample without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The samples of one forward on one rank: `micro_batch` packed samples (fewer only at a run's end), or a filler.

    A filler has the shape of a full micro-batch but no target tokens. The counts leave out padding, and are taken on
    the host. With a `part`, everything is the part's own, places of targets included, except borders and sample ids.
    """

    index: int
    """Index of the micro-batch in its step, from 0."""
    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    source_ids: torch.Tensor
    borders: Borders
    targets: Targets
    sample_ids: tuple[int, ...]
    """Ids of the packed samples, in order; empty for a filler."""
    tokens: int
    target_tokens: int
    attended_pairs: int
    """Pairs (query, key) in the same document, the key not after the query: the work of causal attention."""
    after: Cursor
    """The place of the sample after the last one of the micro-batch."""
    part: MicroBatchPart | None = None
    """Which part of a micro-batch this is; None: the whole."""
    counts: bool = True
    """Whether its losses count on this rank: only on the first of the ranks that compute the same tokens together."""

    @property
    def is_filler(self) -> bool:
        return not self.sample_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """The micro-batches of one rank in one optimizer step. All ranks get the same number, fillers included."""

    step: int
    """1 for the first optimizer step of a run."""
    micro_batches: tuple[MicroBatch, ...]
    counts: torch.Tensor
    """int64: this rank's share of `StepCounts`, packed."""
    windows_built: int = 0
    """Windows that begin in this step and had to be tokenized for this rank, because they were not in the cache."""


class StopReason(IntEnum):
    """Why a run stops before its last step. If ranks have different reasons, all take the highest number."""

    RESIZE = 1
    """There is room for more ranks."""
    DRAIN = 2
    """A node of the run is about to be taken away."""
    SIGNAL = 3
    """SIGTERM, SIGINT or `ray job stop`."""
    ASKED = 4
    """`raytune-fsdp stop`, or the program that called `finetune`."""

    @property
    def ends_run(self) -> bool:
        """Whether the command ends, too. If not, another attempt goes on from here."""
        return self in (StopReason.SIGNAL, StopReason.ASKED)

    @property
    def words(self) -> str:
        """The reason as the rest of a message that begins with `stopped`."""
        return {
            StopReason.RESIZE: "to go on with more ranks",
            StopReason.DRAIN: "because a node is about to be taken away",
            StopReason.SIGNAL: "by a signal",
            StopReason.ASKED: "as it was asked to",
        }[self]


Stop = Callable[[], StopReason | None]
"""Called once per step on every rank: returns why the run must stop, None if it goes on. Costs nothing to call."""
