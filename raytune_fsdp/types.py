"""The values that travel between the stages. Plain frozen data, no behaviour beyond what follows from the fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    Int32Array = np.ndarray[Any, np.dtype[np.int32]]

Progress = Callable[[str, int, int], None]
"""Called during long work with what is being done, how much of it is done, and how much there is."""

IGNORE = -100
"""Label of a token that is not trained on."""

PADDING = -1
"""Source id of a token that belongs to no dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The next packed sample: epoch, place of its window in the epoch's order, place of the sample in the window."""

    epoch: int = 0
    window: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """One sequence of `seq_len` tokens. All four arrays are int32 of that length.

    `labels[i]` is `input_ids[i]` if token i is trained on, else IGNORE; it is predicted from token i-1 (the models do
    that shift). The first token of a document has label IGNORE. `position_ids` restart at 0 with every document and
    with the padding.
    `source_ids[i]` is the index of the dataset in `data.train` (or `data.eval`), PADDING for padding.
    """

    input_ids: Int32Array
    labels: Int32Array
    position_ids: Int32Array
    source_ids: Int32Array
    id: int
    """xxh3 of the four arrays, as a signed 64-bit integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A block: `micro_batch` packed samples (fewer only at the very end of a run), or a filler.

    A filler has the shape of a block and no target tokens. The counts leave padding out, and are taken on the host.
    """

    index: int
    """Index of the block in its step."""
    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    source_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    """Ids of the packed samples, in order; empty for a filler."""
    tokens: int
    target_tokens: int
    attended_pairs: int
    """Pairs (query, key) of one document with the key at or before the query: what causal attention has to compute."""
    after: Cursor
    """The sample after the block's last one."""

    @property
    def is_filler(self) -> bool:
        return not self.sample_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """The blocks of one rank in one optimizer step; every rank gets the same number, fillers included."""

    step: int
    """1 for the first optimizer step of a run."""
    blocks: tuple[Batch, ...]
    windows_built: int = 0
    """Windows beginning in this step that were tokenized for this rank because no cache had them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step as it is written: the trajectory, and what depends on the machines (times, memory, cache)."""

    step: int
    epoch: float
    samples: str
    """xxh3 of the ordered sample ids of the global batch, in hex."""
    tokens: int
    target_tokens: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    step_seconds: float
    data_seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    windows_built: int = 0
    """Windows that were tokenized for this step because no cache had them."""


class StopReason(IntEnum):
    """Why a run stops before its last step. If ranks have different reasons, all take the highest number."""

    SIGNAL = 1
    """SIGTERM, SIGINT or `ray job stop`."""

    @property
    def words(self) -> str:
        """For a message that begins with `stopped`."""
        return {StopReason.SIGNAL: "by a signal"}[self]


Stop = Callable[[], StopReason | None]
"""Called once per step on every rank: why the run must stop, None if it goes on. Costs nothing to call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint."""

    step: int
    path: str
    """Directory or URL."""
    seconds: float
    """From the copied state to the commit."""
    bytes: int
