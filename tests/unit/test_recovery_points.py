"""Checkpoints by the clock: a crash loses little, and nothing else of a run depends on them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.batch import StopReason
from raytune_fsdp.base.errors import Interrupted, ResumeError, TransientError
from raytune_fsdp.checkpoint import by_clock
from raytune_fsdp.checkpoint.by_clock import Clock, Intervals
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, Keep, committed, in_the_way, to_remove
from raytune_fsdp.checkpoint.location import new_location
from raytune_fsdp.checkpoint.peers.keeper import Keeper
from raytune_fsdp.checkpoint.peers.storage import KeepersHere, PeerStorage
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.checkpoint.storage import PosixDraft
from raytune_fsdp.config import CheckpointConfig, FinetuneConfig
from raytune_fsdp.launch.worker import alone, work
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_trajectory, steps_after
from raytune_fsdp.run.assemble import LauncherHooks
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import checkpoints_to_average
from raytune_fsdp.run.resume_point import agree
from raytune_fsdp.run.saving import intervals_of, lost_seconds
from raytune_fsdp.tools.audit.segment import choose_segment
from tests import clock as clocks
from tests.checkpoints import pieces_of
from tests.quota import with_quota
from tests.runs import GPT2, make_config, write_tokens

CPU = torch.device("cpu")
SMALL = {**GPT2, "n_layer": 1}


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> clocks.Clock:
    found = clocks.Clock()
    monkeypatch.setattr(by_clock, "time", found)
    return found


def steps_of_saves(clock: Clock, time: clocks.Clock, minutes: float, *, step: float, hold: float = 0.0) -> list[float]:
    """The minutes after which a save is begun; each is committed half a minute later."""
    found, commit, end = [], float("inf"), time.now + 60 * minutes
    while time.now < end:
        if time.now >= commit:
            clock.committed(30.0)
            commit = float("inf")
        due = clock.due()
        time.now += step
        if due:
            clock.begins()
            found.append(round(time.now / 60, 1))
            commit = time.now + 30
            time.now += hold
            clock.held()
    return found


def test_the_first_within_ten_minutes_and_half_an_hour_at_stake_later(time: clocks.Clock) -> None:
    begun = steps_of_saves(Clock(Intervals(), fresh=True), time, 120, step=60)
    assert begun[0] <= 10
    # What is at stake when a save is complete, which is when a crash costs most.
    assert all(25 < later - before + 0.5 <= 30 for before, later in zip(begun, begun[1:], strict=False)), begun
    assert len(begun) == 4


def test_a_run_that_has_a_checkpoint_waits_half_an_hour(time: clocks.Clock) -> None:
    assert steps_of_saves(Clock(Intervals(), fresh=False), time, 31, step=10) == [30.0]


def test_saves_that_hold_training_up_are_made_less_often(time: clocks.Clock) -> None:
    """Each one for two minutes: 2 % are an hour and 40 minutes."""
    begun = steps_of_saves(Clock(Intervals(), fresh=True), time, 600, step=10, hold=120)
    assert [round(later - before) for before, later in zip(begun, begun[1:], strict=False)] == [100] * 5, begun
    assert 2 * len(begun) <= 600 * 0.021


def test_work_of_attempts_that_are_lost_counts(time: clocks.Clock) -> None:
    """A run that never lasts for ten minutes comes to its first checkpoint."""
    assert steps_of_saves(Clock(Intervals(), fresh=True, lost=540), time, 5, step=10) == [1.0]


def test_planned_saves_put_the_clock_s_off(time: clocks.Clock) -> None:
    clock, asked = Clock(Intervals(), fresh=True), 0
    for step in range(600):  # ten hours, with a save every 20 minutes
        asked += clock.due()
        time.now += 60
        if step % 20 == 19:
            clock.begins()
            clock.held()
            clock.committed(1.0)
    assert asked == 11, "only while the run has none, from the minute before the tenth on"


def test_a_save_that_fails_is_not_tried_again_at_once(time: clocks.Clock) -> None:
    clock, tries = Clock(Intervals(), fresh=True), []
    for minute in range(61):
        if clock.due():
            tries.append(minute)
            clock.begins()
            clock.held()
        time.now += 60
    assert tries == [9, 19, 29, 39, 49, 59]


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)), st.booleans())
def test_what_is_in_the_way_are_recovery_points_and_never_all_there_is(
    lasting: set[int], recovery: set[int], for_lasting: bool
) -> None:
    found = _found(sorted(lasting), sorted(recovery))
    removed = in_the_way(found, lasting=for_lasting)
    assert not any(each.lasting for each in removed)
    left = [each for each in found if each not in removed]
    assert left or not found
    if for_lasting:
        assert sum(not each.lasting for each in left) == (0 if lasting else min(1, len(found))), (
            "and no more than needed"
        )
    else:
        assert found[-1:] == left[-1:], "a run goes on from the newest"


def test_what_the_config_says_of_the_clock() -> None:
    assert CheckpointConfig().every == "auto" and intervals_of(CheckpointConfig()) == Intervals()
    chosen = CheckpointConfig.model_validate({"every": {"minutes": 20}})
    assert intervals_of(chosen) == Intervals(first=1200, later=1200, share=None)
    for every in (None, 5, {"per_epoch": 2}):
        chosen = CheckpointConfig.model_validate({"every": every})
        assert intervals_of(chosen) is None and not chosen.by_clock


def _found(lasting: Sequence[int], recovery: Sequence[int]) -> list[CommittedCheckpoint]:
    return sorted(
        CommittedCheckpoint(step, 1, "there", lasting=kind)
        for kind, steps in ((True, lasting), (False, recovery))
        for step in steps
    )


@given(
    st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)), st.one_of(st.none(), st.integers(2, 5)),
    st.one_of(st.none(), st.integers(1, 10)), st.integers(0, 3), st.dictionaries(st.integers(1, 40), st.floats(0, 1)),
)  # fmt: skip
def test_recovery_points_push_nothing_out_and_two_stay_only_while_there_is_nothing_else(
    lasting: set[int], recovery: set[int], last: int | None, every: int | None, best: int, scores: dict[int, float]
) -> None:
    keep = Keep(last=last, every=every, best=best)
    without = set(to_remove(_found(sorted(lasting), []), keep, scores))
    found = _found(sorted(lasting), sorted(recovery))
    removed = set(to_remove(found, keep, scores))
    assert {each for each in removed if each.lasting} == without
    newest = sorted(recovery)[-1:] if lasting else sorted(recovery)[-2:]
    stays = {step for step in newest if step > max(lasting, default=0)}
    assert {each.step for each in found if not each.lasting and each not in removed} == stays


def attempt(
    config: FinetuneConfig,
    time: clocks.Clock,
    *,
    step: float,
    of: Container[int] = range(100),
    crash_at: int | None = None,
    stop_at: int | None = None,
    peers: PeerStorage | None = None,
) -> RunDir:
    """An attempt in which these steps take so many seconds of the clock; it crashes after a step, as by a bug, or is
    stopped. `peers`: where peer copies go."""
    prepared, standing = prepare(config, 1)
    begun = standing.state.step

    def stop() -> StopReason | None:
        nonlocal begun
        if begun == crash_at:
            raise RuntimeError("a bug")
        begun += 1
        if begun in of:  # a save that the last of these steps began would put this one's off
            for thread in threading.enumerate():
                if thread.name.startswith("save-"):
                    thread.join()
            time.now += step
        return StopReason.SIGNAL if begun == stop_at else None

    with alone(CPU):
        work(config, prepared, agree(config, prepared, lambda: standing), CPU, stop, LauncherHooks(peers=peers))
    return prepared.place


def _config(home: Path, name: str, **checkpoint: Any) -> FinetuneConfig:
    if not (home / "held-out.jsonl").exists():
        write_tokens(home / "held-out.jsonl", rows=6, seed=5)
    config = make_config(
        home, SMALL, run={"name": name}, train={"global_batch": 4, "micro_batch": 2, "max_steps": 40},
        eval={"every": 8}, checkpoint={"asynchronous": False, "keep_best": 1, "keep_every": 16, **checkpoint},
        parallel={"precision": "fp32"},
    )  # fmt: skip
    held_out = {"path": str(home / "held-out.jsonl"), "format": {"type": "tokens"}}
    return config.model_validate({**config.model_dump(), "data": {**config.data.model_dump(), "eval": [held_out]}})


def saved(place: RunDir, *, recovery: bool) -> list[int]:
    """The steps of all saves on record, of the one kind or the other."""
    events = [each["fields"] for each in read_events(place.events) if each["event"] == names.SAVED]
    return [each["step"] for each in events if each.get("recovery", False) is recovery]


@pytest.mark.parametrize(
    ("chosen", "crash_at"),
    [
        pytest.param((3, 13, 27), 27, id="three", marks=pytest.mark.slow),
        pytest.param(tuple(step for step in range(1, 38, 3) if step % 8), 28, id="a dozen"),
        pytest.param(
            tuple(step for step in range(1, 38) if step % 8 and step != 33)[:30],
            28,
            id="thirty",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_with_none_and_with_many_of_them_a_run_is_the_same(
    tmp_path: Path, time: clocks.Clock, chosen: Sequence[int], crash_at: int
) -> None:
    """Its steps, evaluations, planned saves, what is kept of those, what an audit and a mean take by default; also
    where it crashes after one of them, and goes on from there. What is done to checkpoints beside training sees the
    same ones: tests/unit/test_after_commit.py."""
    plain = attempt(_config(tmp_path, "plain"), time, step=0.0)
    config = _config(tmp_path, "with-many")
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=chosen, crash_at=crash_at)
    there = committed(RunDir.of(config).checkpoints)
    assert [each.step for each in there if not each.lasting] == [crash_at]
    place = attempt(config, time, step=1801.0, of=chosen)
    assert saved(place, recovery=True) == list(chosen)
    assert read_trajectory(place.metrics) == read_trajectory(plain.metrics)
    assert read_evaluations(place.metrics, 40) == read_evaluations(plain.metrics, 40)
    assert [*dict.fromkeys(saved(place, recovery=False))] == saved(plain, recovery=False) == [8, 16, 24, 32, 40]
    there, mine = committed(place.checkpoints), committed(plain.checkpoints)
    assert [(each.step, each.lasting) for each in there] == [(each.step, each.lasting) for each in mine]
    assert read_state(there[-1]).cursor == read_state(mine[-1]).cursor
    segment = choose_segment(place, None, None)
    assert (segment.first, segment.last) == (32, 40)
    assert [each.step for each in checkpoints_to_average(str(place.path), steps=None, last=2)] == [32, 40]


def test_a_run_without_checkpoints_is_warned_of_once(
    tmp_path: Path, time: clocks.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """When it begins, not at every start; and by the clock nothing is saved."""
    config = make_config(tmp_path, SMALL, train={"global_batch": 4, "max_steps": 4}, parallel={"precision": "fp32"})
    with_nothing = config.model_copy(update={"checkpoint": CheckpointConfig(every=None)})
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(with_nothing, time, step=5000.0, crash_at=3)
    assert caplog.text.count("checkpoint.every=null: the run saves nothing before its end") == 1
    assert committed(RunDir.of(config).checkpoints) == []
    attempt(with_nothing, time, step=5000.0)
    caplog.clear()
    longer = config.train.model_copy(update={"max_steps": 5})
    optim = config.optim.model_copy(update={"schedule_steps": 5})
    attempt(with_nothing.model_copy(update={"train": longer, "optim": optim}), time, step=5000.0)
    assert "checkpoint.every" not in caplog.text
    assert saved(RunDir.of(config), recovery=True) == []


def test_a_crash_loses_what_the_clock_says_and_not_the_run(tmp_path: Path, time: clocks.Clock) -> None:
    """Attempts of six minutes each come to a checkpoint: what is lost counts on."""
    config = make_config(
        tmp_path, SMALL, train={"global_batch": 4, "max_steps": 30}, parallel={"precision": "fp32"},
        checkpoint={"asynchronous": False},
    )  # fmt: skip
    place = RunDir.of(config)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=60.0, crash_at=6)
    assert committed(place.checkpoints) == []
    lines = [line.replace('"step_seconds": ', '"step_seconds": 6') for line in place.metrics.read_text().splitlines()]
    place.metrics.write_text("\n".join(lines) + "\n")  # as on the clock of this test: a minute and a bit for each
    assert lost_seconds(place, 0, steps_after(place.metrics, 0)) == pytest.approx(6 * 60, abs=6)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=60.0, crash_at=6)
    there = committed(place.checkpoints)
    assert [(each.step, each.lasting) for each in there] == [(2, False)] and there[0].name == "step-00000002.a2.r"
    started = [each["fields"] for each in read_events(place.events) if each["event"] == names.ATTEMPT_STARTED]
    assert started[-1]["lost_seconds"] == pytest.approx(6 * 60, abs=6) and "lost_seconds" not in started[0]
    attempt(config, time, step=0.0)
    assert [(each.step, each.lasting) for each in committed(place.checkpoints)] == [(30, True)]


def test_storage_without_room_is_left_to_the_last_save(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock's saves leave room for one more, or are not made; that is said once."""
    config = make_config(tmp_path, train={"global_batch": 4, "max_steps": 12}, parallel={"precision": "fp32"})
    asked: list[int] = []

    def nearly_full(path: Path) -> Any:
        asked.append(1)
        return SimpleNamespace(free=300_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    place = attempt(config, time, step=700.0)
    assert [(each.step, each.lasting) for each in committed(place.checkpoints)] == [(12, True)]
    size = next(each["fields"]["bytes"] for each in read_events(place.events) if each["event"] == names.SAVED)
    said = [each["fields"] for each in read_events(place.events) if each["event"] == names.NO_ROOM_TO_SAVE]
    assert said == [{"wanted": said[0]["wanted"], "free": 300_000}] and len(asked) > 5
    assert 150_000 < said[0]["wanted"] / 2 <= size, "the numbers of a checkpoint, without what stands beside them"


def there(place: RunDir) -> list[tuple[int, bool]]:
    return [(each.step, each.lasting) for each in committed(place.checkpoints)]


def said(place: RunDir, *kinds: str) -> list[tuple[str, Any]]:
    """What has become of saves, and what was removed for them."""
    events = [each for each in read_events(place.events) if each["event"] in kinds]
    return [(each["event"], each["fields"].get("step", each["fields"].get("removed"))) for each in events]


def _short(home: Path, copies: int = 0, **sections: Any) -> FinetuneConfig:
    """Of 12 steps, with nothing planned. `copies`: a peer copy after every step, on so many other nodes."""
    return make_config(
        home, SMALL, train={"global_batch": 4, "max_steps": 12}, parallel={"precision": "fp32"},
        checkpoint={"asynchronous": False, **({"peer_copies": copies, "peer_every": 1} if copies else {})}, **sections,
    )  # fmt: skip


def test_a_damaged_recovery_point_leaves_one_to_go_back_to(tmp_path: Path, time: clocks.Clock) -> None:
    config, clean = _short(tmp_path), _short(tmp_path, run={"name": "clean"})
    place, plain = RunDir.of(config), attempt(clean, time, step=0.0)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(3, 6, 9), crash_at=10)
    assert there(place) == [(6, False), (9, False)], "the third has taken the place of the first"
    pieces_of(committed(place.checkpoints)[-1])[0].write_bytes(b"")
    attempt(config, time, step=0.0)
    started = [each["fields"] for each in read_events(place.events) if each["event"] == names.ATTEMPT_STARTED]
    assert started[-1]["resumed_from"] == 6
    assert read_trajectory(place.metrics) == read_trajectory(plain.metrics)
    assert there(place) == [(12, True)]


@pytest.mark.parametrize(
    ("room_for", "by_clock", "at_crash"),
    [
        pytest.param(2, [2], [2], marks=pytest.mark.slow),  # it and the last one
        (3, [2, 4, 6, 8], [8]),  # of another one, too, there would be no room for the next
        pytest.param(4, [2, 4, 6, 8], [6, 8], marks=pytest.mark.slow),
    ],
)
def test_the_older_recovery_point_gives_way_to_saves_that_follow(
    tmp_path: Path,
    time: clocks.Clock,
    monkeypatch: pytest.MonkeyPatch,
    room_for: int,
    by_clock: list[int],
    at_crash: list[int],
) -> None:
    """On a disk on which as many checkpoints fit, which says so."""
    config = _short(tmp_path)
    place = RunDir.of(config)
    size = 200_000

    def disk(path: Path) -> Any:
        return SimpleNamespace(free=(room_for - len(there(place))) * size)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    monkeypatch.setattr("raytune_fsdp.checkpoint.saver.Saver.nbytes", size)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(2, 4, 6, 8), crash_at=9)
    assert saved(place, recovery=True) == by_clock
    assert there(place) == [(step, False) for step in at_crash]
    attempt(config, time, step=1801.0, of=(10,))
    assert there(place) == [(12, True)]


@pytest.mark.parametrize("copies", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_room_that_was_filled_since_is_taken_from_the_older_recovery_point(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Something else fills the disk while there are two: the clock's next save finds room, and one stays from then.
    Peer copies between them change nothing."""
    config = _short(tmp_path, copies)
    here = PeerStorage(new_location(), KeepersHere({"a": Keeper()}), ["a"], own="a", count=1)
    peers = here if copies else None
    place, size, filled = RunDir.of(config), 200_000, 0

    def disk(path: Path) -> Any:
        return SimpleNamespace(free=(5 - filled - len(there(place))) * size)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    monkeypatch.setattr("raytune_fsdp.checkpoint.saver.Saver.nbytes", size)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(2, 4), crash_at=5, peers=peers)
    assert there(place) == [(2, False), (4, False)]
    filled = 2
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(6, 8), crash_at=9, peers=peers)
    assert there(place) == [(8, False)]
    assert said(place, names.NO_ROOM_TO_SAVE, names.ROOM_MADE) == [(names.ROOM_MADE, "step-00000002.a1.r")]


OUTCOMES = (names.SAVED, names.SAVE_FAILED, names.ROOM_MADE)


def test_a_quota_with_room_for_two_takes_the_older_recovery_point(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save that has met it is written again, and from then on one recovery point is kept."""
    monkeypatch.setattr(PosixDraft, "create", with_quota(lambda: 2.4))
    place = attempt(_short(tmp_path), time, step=1801.0, of=(2, 4, 6, 9))
    assert said(place, *OUTCOMES) == [
        ("saved", 2), ("saved", 4), ("save_failed", 6), ("room_made", "step-00000002.a1.r"), ("saved", 6),
        ("saved", 9), ("saved", 12),
    ]  # fmt: skip
    assert there(place) == [(12, True)]


@pytest.mark.parametrize(
    ("fits", "planned", "asked", "gone", "asynchronous"),
    [
        # While the run has nothing else.
        pytest.param(2.4, (8, 12), (3, 6), 3, False, marks=pytest.mark.slow),
        (2.4, (8, 12), (3, 6), 3, True),
        pytest.param(2.4, (8, 12), (3, 10), 10, False, marks=pytest.mark.slow),
        (3.4, (4, 8, 12, 16), (2, 6, 10), 10, False),  # it, the two that are kept and the next one would be four
    ],
)
def test_a_planned_save_within_a_quota_is_made_whatever_the_clock_has_made_before(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch,
    fits: float, planned: Sequence[int], asked: Sequence[int], gone: int, asynchronous: bool,
) -> None:  # fmt: skip
    """At its step, of the state after that step, so that what follows from it is the same."""
    monkeypatch.setattr(PosixDraft, "create", with_quota(lambda: fits))
    places = []
    for name, of in (("without", ()), ("with", asked)):
        config = _config(tmp_path, name, asynchronous=asynchronous, keep_every=None, best_is="highest")
        train = {**config.train.model_dump(), "max_steps": planned[-1]}
        values = {**config.model_dump(), "eval": {"every": planned[0]}, "train": train}
        places.append(attempt(config.model_validate(values), time, step=1801.0, of=of))
    without, found = places
    assert saved(found, recovery=False) == saved(without, recovery=False) == [*planned]
    assert said(found, names.ROOM_MADE) == [(names.ROOM_MADE, f"step-{gone:08}.a1.r")]
    for mine, its in zip(committed(without.checkpoints), committed(found.checkpoints), strict=True):
        assert mine.name == its.name
        assert [a.read_bytes() for a in pieces_of(mine)] == [b.read_bytes() for b in pieces_of(its)]


def test_the_last_save_never_takes_the_only_checkpoint(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while it is written would take the whole run. It fails, and the same command trains the rest later."""
    fits = 1.4
    monkeypatch.setattr(PosixDraft, "create", with_quota(lambda: fits))
    config = _short(tmp_path)
    place = RunDir.of(config)
    with pytest.raises(Interrupted, match=r"stopped by a signal after step 8, but the checkpoint of step 8 could not"):
        attempt(config, time, step=1801.0, of=(2, 5), stop_at=8)
    assert there(place) == [(2, False)], "a run that is stopped has to go on from it"
    with pytest.raises(TransientError, match=r"checkpoint of step 12 could not be written: .*quota.*; free space or"):
        attempt(config, time, step=0.0)
    assert said(place, *OUTCOMES) == [("saved", 2), ("save_failed", 5), ("save_failed", 8), ("save_failed", 12)]
    assert there(place) == [(2, False)]
    fits = 2.4
    attempt(config, time, step=0.0)
    assert there(place) == [(12, True)]


def test_the_last_save_is_tried_twice_and_leaves_the_newest_recovery_point(
    tmp_path: Path, time: clocks.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where room that was made for it is taken by something else."""
    fits = 3.4
    monkeypatch.setattr(PosixDraft, "create", with_quota(lambda: fits))
    config = _short(tmp_path)
    place = RunDir.of(config)
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(2, 5), crash_at=6)
    fits = 0.4
    with pytest.raises(TransientError, match="to continue from the previous checkpoint"):
        attempt(config, time, step=0.0)
    assert said(place, *OUTCOMES)[2:] == [("save_failed", 12), ("room_made", "step-00000002.a1.r"), ("save_failed", 12)]
    assert there(place) == [(5, False)]


def test_a_mean_of_recovery_points_has_to_be_asked_for(tmp_path: Path) -> None:
    for name in ("step-00000004.a1.r", "step-00000008.a1.r"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    with pytest.raises(ResumeError, match="has no checkpoint"):
        checkpoints_to_average(str(tmp_path), steps=None, last=2)


def test_a_run_leaves_more_than_a_recovery_point_at_its_end(tmp_path: Path, time: clocks.Clock) -> None:
    """Shortened to the step of one: no step is left, and a checkpoint is made of it all the same, once."""
    config = _config(tmp_path, "short", every=None, keep_every=None, keep_best=0)
    config = config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"every": "auto"}),
            "eval": config.eval.model_copy(update={"every": None}),
        }
    )
    with pytest.raises(RuntimeError, match="a bug"):
        attempt(config, time, step=1801.0, of=(5,), crash_at=6)
    place = RunDir.of(config)
    assert [(each.step, each.lasting) for each in committed(place.checkpoints)] == [(5, False)]
    shorter = config.model_copy(
        update={
            "train": config.train.model_copy(update={"max_steps": 5}),
            "optim": config.optim.model_copy(update={"schedule_steps": 40}),
        }
    )
    assert not prepare(shorter, 1)[1].complete
    attempt(shorter, time, step=0.0)
    assert (5, True) in [(each.step, each.lasting) for each in committed(place.checkpoints)]
    assert prepare(shorter, 1)[1].complete
