"""A board whose process is stopped, or slow. No Ray is started."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raytune_fsdp.launch.ray import board as module
from raytune_fsdp.launch.ray.board import Board, Line, _Board


class Actor:
    """Each call of it is answered when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Future[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*_: object) -> Future[Any]:
            self.calls.append((name, Future()))
            return self.calls[-1][1]

        return SimpleNamespace(remote=remote)


def get(asked: Future[Any], timeout: float | None = None) -> Any:
    try:
        return asked.result(5 if timeout is None else timeout)
    except LateError:
        assert timeout is not None, "it would wait for ever"
        raise GetTimeoutError from None


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    made: list[Actor] = []

    def make(self: Board) -> Actor:
        made.append(Actor())
        return made[-1]

    monkeypatch.setattr(Board, "_make", make)
    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module.ray, "kill", lambda actor: None)
    monkeypatch.setattr(module, "_LATE_SECONDS", 0.05, raising=False)
    monkeypatch.setattr(module, "_START_SECONDS", 0.05, raising=False)
    return made


def test_a_board_that_is_stopped_does_not_stop_its_driver(actors: list[Actor]) -> None:
    """What it tells once it goes on is heard: an answer that nobody waits for would take the notices with it."""
    board = Board()
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(ActorUnavailableError):
            board.read(0.01)
        assert time.monotonic() - began < 2
    ((name, asked),) = actors[0].calls
    asked.set_result([Line("heard")])
    assert name == "read" and board.read(0.01) == [Line("heard")]
    with pytest.raises(ActorUnavailableError):
        board.read(0.01)
    assert len(actors[0].calls) == 2


@pytest.mark.parametrize("noticed", [True, False])
def test_the_next_attempt_has_another_board_than_one_that_does_not_answer(actors: list[Actor], noticed: bool) -> None:
    board = Board()
    if noticed:
        with pytest.raises(ActorUnavailableError):
            board.read(0.01)
    board.begin()
    assert len(actors) == 2 and board._actor is actors[1]
    actors[1].tell.remote()
    with pytest.raises(ActorUnavailableError):
        board.read(0.01)
    assert [name for name, _ in actors[1].calls] == ["begin", "tell", "read"]


def test_the_call_of_a_rank_that_has_ended_ends_with_its_attempt() -> None:
    """Else the board would keep it, and all that was posted, for good."""

    async def attempts() -> tuple[object, object]:
        board = _Board()
        waits = asyncio.ensure_future(board.wait_for_stop())
        await asyncio.sleep(0)
        await board.begin(1)
        ended = await asyncio.wait_for(waits, 5)
        waits = asyncio.ensure_future(board.wait_for_stop())
        await asyncio.sleep(0)
        await board.stop("signal")  # type: ignore[arg-type]
        return ended, await asyncio.wait_for(waits, 5)

    assert asyncio.run(attempts()) == (None, "signal")


def test_what_a_process_of_an_attempt_that_is_over_says_is_not_heard() -> None:
    """A node that was cut off may come back, with all that its ranks wanted to say meanwhile."""

    async def attempts() -> None:
        board = _Board()
        await board.begin(1)
        await board.begin(2)
        assert not await board.tell(1, Line("late")) and await board.tell(2, Line("now"))
        await board.share(1, "batches", ["late"])
        await board.share(2, "batches", ["now"])
        assert await board.read(0) == [Line("now")] and await board.shared(2, "batches") == ["now"]

    asyncio.run(attempts())


def test_a_rank_of_an_attempt_that_is_over_gets_nothing_of_the_next_one() -> None:
    """It would read the next one's batches, or write into its copies. One that asks early waits for its own."""

    async def attempts() -> None:
        board = _Board()
        await board.begin(1)
        waits, early = (asyncio.ensure_future(board.shared(attempt, "batches")) for attempt in (1, 2))
        await asyncio.sleep(0)
        await board.begin(2)
        with pytest.raises(RuntimeError, match="the attempt of this rank is over"):
            await asyncio.wait_for(waits, 5)
        await board.share(2, "batches", ["now"])
        assert await asyncio.wait_for(early, 5) == ["now"]
        with pytest.raises(RuntimeError, match="the attempt of this rank is over"):
            await asyncio.wait_for(board.shared(1, "batches"), 5)

    asyncio.run(attempts())
