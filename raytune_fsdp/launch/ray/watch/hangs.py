"""Find ranks that do not get on after their second step, from what rank 0 reports of itself, and the one to blame."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from statistics import median

from raytune_fsdp.launch.ray.board import Beat
from raytune_fsdp.launch.ray.watch.listening import Listening

_LEAST_SECONDS, _STEPS = 300.0, 20.0
"""The limit without `cluster.hang_minutes`: no micro-batch is done for at least this many seconds, and for as long as
this many median steps."""
_KEPT = 50  # steps of which the median is taken
_COLLECTIVE = re.compile(r"distributed_c10d\.py|_functional_collectives\.py|_fsdp_collectives\.py|cuda/streams\.py")
"""The files in which a rank waits for others; on a GPU it also waits for the device, which waits for others."""
_ENGINE = re.compile(r"autograd/graph\.py.* in _engine_run_backward")
"""Where a rank waits for autograd's thread for a GPU, which has no Python frames to show what that waits for. On a CPU
it computes itself there."""
_STATE = re.compile(r"^State:\s*(\S.*)$", re.MULTILINE)
IN_KERNEL = "a thread waits in the kernel, as for storage that does not answer"
"""The line that is added to the stacks of a rank that has such a thread."""


class Hang:
    """Watches an attempt from its second step on. All ranks wait for one that hangs, so rank 0 is enough to watch."""

    def __init__(self, minutes: float | None, clock: Listening) -> None:
        self._minutes = minutes
        self._clock = clock
        self._last: Beat | None = None
        self.got_on = 0.0
        """When rank 0 got on the last time, by the clock."""
        self._step_at = 0.0
        """When rank 0 began its last step, by its own clock: a driver that was away hears of many steps at once."""
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        """The seconds that steps have taken."""

    def heard(self, beat: Beat) -> None:
        last, self._last = self._last, beat
        if last is None or last.step == 0:
            self._step_at = beat.at
        elif beat.step > last.step:
            self._seconds.append((beat.at - self._step_at) / (beat.step - last.step))
            self._step_at = beat.at
        if last is None or beat.beats != last.beats:
            self.got_on = self._clock.now

    @property
    def in_force(self) -> bool:
        """Whether the second step has begun: before it nobody knows how long a step takes."""
        return bool(self._seconds)

    def overdue(self) -> float | None:
        """Return the seconds without progress, if they are too many."""
        if self._last is None or not self.in_force:
            return None
        usual = max(_LEAST_SECONDS, _STEPS * median(self._seconds))
        limit = usual if self._minutes is None else 60 * self._minutes
        silent = self._clock.now - self.got_on
        return silent if silent > limit + self._last.patience_seconds else None


def culprit(stacks: Mapping[int, str], on_gpus: bool = False) -> tuple[int, str] | None:
    """Return the rank for which the others wait, and what it is doing, if the stacks show it."""
    for rank, text in sorted(stacks.items()):
        state = _STATE.search(text)
        if state is not None:
            return rank, f"its process takes no signals ({state[1]})"
    busy = _busy(stacks, on_gpus)
    if len(busy) == 1:
        ((rank, frames),) = busy.items()
        return rank, f"it is at {frames[0].strip()}"
    return None


def waits_for_storage(text: str) -> bool:
    """Return whether a rank with these stacks waits for storage: its run has not caused the hang then."""
    state = _STATE.search(text)
    return IN_KERNEL in text or (state is not None and state[1].startswith("D"))


def what_all_do(stacks: Mapping[int, str], on_gpus: bool = False) -> str:
    """Say what the ranks are doing where none stands out."""
    busy = _busy(stacks, on_gpus)
    if not any(map(_training, stacks.values())):
        return "no stack of a rank could be had"
    if not busy:
        return "the ranks wait for each other"
    rank, frames = min(busy.items())
    return f"{len(busy)} of {len(stacks)} ranks do not wait for others; rank {rank} is at {frames[0].strip()}"


def _busy(stacks: Mapping[int, str], on_gpus: bool) -> dict[int, list[str]]:
    """Return the ranks that, as far as can be seen, wait for no other one, and the frames of each."""
    found = {rank: _training(text) for rank, text in stacks.items()}
    return {
        rank: frames
        for rank, frames in found.items()
        if frames and not any(map(_COLLECTIVE.search, frames)) and not (on_gpus and _ENGINE.search(frames[0]))
    }


def _training(text: str) -> list[str]:
    """Return the frames of the thread that trains, innermost first."""
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        frames = [line for line in thread.splitlines() if line.lstrip().startswith("File ")]
        if any(" in train_rank" in frame for frame in frames):
            return frames
    return []
