"""A save in flight: this rank's thread writes its file, rank 0's commits when all have, and training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from raytune_fsdp.checkpoint.layout import METADATA_FILE, PieceLayout
from raytune_fsdp.checkpoint.manifest import PIECES, make_manifest
from raytune_fsdp.checkpoint.messages import Meeting
from raytune_fsdp.checkpoint.storage import INDEX_FILE, STATE_FILE, Draft
from raytune_fsdp.checkpoint.writing import NotFiniteError, Sum, write_pieces, write_small
from raytune_fsdp.types import Saved

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a save."""

    step: int
    saved: Saved | None = None
    problem: str | None = None
    """Why there is no checkpoint."""
    fatal: bool = False
    """Whether another save would fail as this one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """What is to be written, and how the ranks know each other."""

    step: int
    serial: int
    rank: int
    world: int
    path: str
    """Of the checkpoint, for people."""
    draft: Draft
    layout: PieceLayout
    pieces: Mapping[str, torch.Tensor]
    state: str
    seconds: float
    """How long it may take."""
    meeting: Meeting
    leftovers: Sequence[Draft]
    """What earlier saves that failed may have left. Rank 0 removes it first."""
    before: Callable[[], None]
    """Rank 0 calls this before the checkpoint is there for others."""
    after: Callable[[], None]
    """And this afterwards."""

    def key(self, rank: int) -> str:
        return f"{self.serial}/{rank}"


class Flight:
    """One rank's part in a save. The thread is its own; everything else is called by training."""

    def __init__(self, job: SaveJob) -> None:
        self.job = job
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._told = False
        self._waiting_for = 0
        self._given_up = False
        self._committing = False
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name=f"save-{job.step}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether what is written must not be touched yet."""
        if self._thread.is_alive():
            return True
        if not self._told:  # it was ended from outside: rank 0 must not wait for it in vain
            self._tell({"problem": "its writer ended without a word"})
        return False

    def outcome(self) -> Outcome | None:
        """On rank 0, once it is known. Late is as good as never: what is late then is not committed any more."""
        with self._lock:
            if self._outcome is None:
                if self._committing:
                    # What happens at once cannot be taken back any more: a storage that hangs in it gets as long again.
                    if self._left() < -self.job.seconds:
                        self._outcome = self._failed("the storage does not say whether it is there")
                elif not self._thread.is_alive():
                    self._outcome = self._failed("rank 0: its writer ended without a word")
                elif self._late():
                    self._outcome = self._failed(self._too_late())
                    self._given_up = True
            return self._outcome

    def wait(self) -> Outcome:
        """On rank 0: until it is known."""
        while (outcome := self.outcome()) is None:
            self._thread.join(0.2 if self._committing else max(0.01, min(0.2, self._left())))
        return outcome

    def join(self, seconds: float) -> None:
        """Wait for this rank's thread, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        job = self.job
        report: dict[str, Any] = {"problem": "its writer was ended"}
        try:
            for draft in job.leftovers if job.rank == 0 else ():
                self._clean_up(draft.discard)
            report = self._write()
        finally:
            self._tell(report)
            if job.rank == 0:
                outcome = self._failed("rank 0: its writer was ended")
                try:
                    outcome = self._gather()
                finally:
                    with self._lock:
                        self._outcome = self._outcome or outcome
                if outcome.saved is not None:
                    self._clean_up(job.after)

    def _write(self) -> dict[str, Any]:
        job = self.job
        if not job.layout.mine:
            return {"file": None, "spans": []}
        file = f"__{job.rank}_{job.serial}{PIECES}"
        try:
            written = write_pieces(job.draft, file, job.pieces, job.layout.mine)
        except NotFiniteError as error:
            return {"problem": f"{error} is not finite", "fatal": True}
        except Exception as error:  # whatever a storage raises, training goes on
            return {"problem": _in_words(error)}
        return {"file": file, "sum": asdict(written.sum), "spans": written.spans}

    def _tell(self, report: dict[str, Any]) -> None:
        self._told = True
        self.job.meeting.tell(self.job.key(self.job.rank), report)

    def _gather(self) -> Outcome:
        job = self.job
        try:
            reports = [self._hear(rank) for rank in range(job.world)]
            problems = [f"rank {r}: {said['problem']}" for r, said in enumerate(reports) if "problem" in said]
            if problems:
                job.draft.discard()
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                return self._failed(problems[0] + more, fatal=any(said.get("fatal") for said in reports))
            size = self._commit(reports)
        except Exception as error:
            job.draft.discard()
            return self._failed(f"rank 0: {_in_words(error)}")
        seconds = time.monotonic() - self._started
        return Outcome(step=job.step, saved=Saved(step=job.step, path=job.path, seconds=seconds, bytes=size))

    def _clean_up(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the checkpoint is there, or will be, whatever becomes of older ones
            logger.warning("older checkpoints could not be removed: %s", _in_words(error))

    def _hear(self, rank: int) -> dict[str, Any]:
        self._waiting_for = rank
        while (report := self.job.meeting.hear(self.job.key(rank))) is None:
            if self._given_up or self._late():
                raise TimeoutError(self._too_late())
        found: dict[str, Any] = report
        return found

    def _commit(self, reports: list[dict[str, Any]]) -> int:
        """Write what says where everything is, and publish. The size of the checkpoint."""
        job = self.job
        sums = {said["file"]: Sum(**said["sum"]) for said in reports if said["file"]}
        files, spans = [said["file"] for said in reports], [said["spans"] for said in reports]
        small = {
            INDEX_FILE: job.layout.index(files, spans),
            METADATA_FILE: job.layout.metadata_file(files, spans, job.path),
            STATE_FILE: job.state.encode(),
        }
        for name, content in small.items():
            sums[name] = write_small(job.draft, name, content)
        job.before()
        with self._lock:
            if self._given_up:
                raise TimeoutError("given up")
            self._committing = True
        job.draft.publish({name: each.bytes for name, each in sums.items()}, make_manifest(sums))
        return sum(each.bytes for each in sums.values())

    def _failed(self, problem: str, *, fatal: bool = False) -> Outcome:
        return Outcome(step=self.job.step, problem=problem, fatal=fatal)

    def _too_late(self) -> str:
        limit = f"{self.job.seconds:g} s (checkpoint.timeout_minutes)"
        return f"rank {self._waiting_for} had not written its part after {limit}"

    def _left(self) -> float:
        return self._started + self.job.seconds - time.monotonic()

    def _late(self) -> bool:
        return self._left() < 0


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
