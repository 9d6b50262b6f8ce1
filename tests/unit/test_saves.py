"""What all ranks agree on between two steps; here on one rank, with a storage that fails."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted, TransientError
from raytune_fsdp.checkpoint.messages import Messages
from raytune_fsdp.checkpoint.on_demand import Requests
from raytune_fsdp.checkpoint.save_in_flight import Outcome, SaveInFlight, SaveJob
from raytune_fsdp.checkpoint.saver import Saver
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.launch.worker import join
from raytune_fsdp.record.tracker import Tracker
from raytune_fsdp.run.saving import Saves


@pytest.fixture
def alone() -> Iterator[None]:
    join(torch.device("cpu"), alone=True)
    yield
    dist.destroy_process_group()


class Failing:
    """A saver whose storage does not answer."""

    asynchronous, seconds = True, 12.0

    def __init__(self) -> None:
        self._begun = False

    def status(self) -> tuple[None, bool]:
        return None, False

    def begin(self, state: RunState, *, before: object, lasting: bool) -> None:
        self._begun = True

    def finish(self) -> Outcome | None:
        problem = "rank 0 had not written its part after 12 s (checkpoint.timeout_minutes)"
        return Outcome(step=7, ending="failed", problem=problem) if self._begun else None


class Nobody:
    def waiting(self) -> bool:
        return False

    def stopping(self) -> bool:
        return False

    def take(self) -> None:
        pass

    def answer(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("stop", [None, StopReason.SIGNAL])
def test_a_stop_whose_checkpoint_cannot_be_written_is_still_a_stop(alone: None, stop: StopReason | None) -> None:
    """Not a failure, which another attempt would follow; without a stop it is one."""
    saves = Saves(
        saver=cast(Saver, Failing()), tracker=Tracker(), requests=cast(Requests, Nobody()), saved=lambda _: None
    )
    assert saves.agree(stop).stop == stop
    with pytest.raises(Interrupted if stop else TransientError) as ended:
        saves.last(RunState(step=7))
    message = str(ended.value)
    assert "the checkpoint of step 7 could not be written: rank 0 had not written its part after 12 s" in message
    assert message.startswith("stopped by a signal after step 7, but ") == (stop is not None)
    assert "continue from the previous checkpoint" in message and "\n" not in message


def test_what_ranks_report_may_be_larger_than_a_value_of_the_store() -> None:
    """Of 8 MiB its server takes none, and ends the connection. A message of hashes of many adapters is larger."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    before = store.num_keys()
    for size in (0, 10, 1 << 20, 20 << 20):
        messages, value = Messages(store), {"hashes": "\u00e9x" * (size // 7), "spans": [[1, 2], [3, 4]]}
        messages.send("1/0", value)
        assert messages.receive("1/0") == value
        assert store.num_keys() == before
    store.set("there", "still")
    assert store.get("there") == b"still"


def test_a_report_that_cannot_be_sent_fails_the_save_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def send(self, *_: object) -> None:
            raise RuntimeError("Broken pipe")

    class Layout:
        mine = ()

    job = SimpleNamespace(
        rank=1, step=3, messages=Broken(), layout=Layout(), written_key=str, leftovers=(), seconds=5.0, digest=None
    )
    save = SaveInFlight(cast(SaveJob, job))
    save.join(10)
    assert not save.busy and "could not report its part of a save: " in caplog.text
