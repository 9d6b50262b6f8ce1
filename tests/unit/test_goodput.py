"""Where the time of a run went: planted records, whose sums are worked out by hand."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.goodput import PHASES, Goodput, StepTime, goodput, read_goodput, step_times
from raytune_fsdp.record.jsonl import JsonlTracker, read_events, steps_after
from raytune_fsdp.record.lines import to_bytes
from raytune_fsdp.record.tracker import RunStart
from tests.recorded import step
from tests.records import BEGAN

OF_COMMAND = {"start": 2.0, "checks": 1.0, "Ray": 3.0, "workers": 4.0, "imports": 5.0, "model": 2.0, "data": 1.0}
LATER = {"workers": 4.0, "imports": 2.0, "model": 3.0, "data": 1.0}


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def event(when: float, attempt: int, name: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": at(when), "attempt": attempt, "event": name, "fields": fields}


def first_step(seconds: float, attempt: int, phases: dict[str, float], took: float) -> dict[str, Any]:
    phases = {**phases, "step": took}
    return event(seconds, attempt, names.FIRST_STEP, seconds=sum(phases.values()), phases=phases)


def steps(first: int, last: int, attempt: int, ended: float, each: float = 2.0, waited: float = 0.0) -> list[Any]:
    """Steps one right after another; `ended`: when the first one did. It alone waited, and took so much longer."""
    return [
        {
            "kind": "step", "trajectory": {
                "step": number, "epoch": 0.1, "samples": "0", "tokens": 1, "target_tokens": 1, "loss": 1.0,
                "grad_norm": 1.0, "lr": 1e-4,
            },
            "world_size": 2, "attempt": attempt, "time": at(ended + each * (number - first)),
            "step_seconds": each + waited * (number == first), "data_seconds": waited * (number == first),
        }
        for number in range(first, last + 1)
    ]  # fmt: skip


def of(events: list[Any], lines: list[Any]) -> Goodput:
    found = goodput(events, step_times(map(to_bytes, lines)))
    assert found is not None
    return found


def seconds(found: Goodput, number: int) -> dict[str, float]:
    """The phases of an attempt that took any time."""
    return {phase: round(each, 6) for phase, each in found.attempts[number].seconds.items() if abs(each) > 1e-6}


# A command begins at 0 s. Attempt 1: 18 s until its first step, which ends at 20 s; steps of 2 s up to the 10th, which
# ends at 38 s; step 6 is saved, and at 40 s a rank dies in step 11. At 41.5 s the driver knows, at 43 s all has ended,
# and the next attempt begins at 44 s: 10 s until its first step, then 7 to 16 from 54 s to 74 s. It ends at 75 s.
ONCE = [
    event(15, 1, names.RANKS_JOINED),
    event(17, 1, names.ATTEMPT_STARTED, world_size=2, resumed_from=0),
    first_step(20, 1, OF_COMMAND, 2.0),
    event(31, 1, names.SAVED, step=6),
    event(
        43, 1, names.ATTEMPT_FAILED, rank=1, cause="its process died", reached=11, seconds=43.0, stop_seconds=1.5
    ),
    event(50, 2, names.RANKS_JOINED),
    event(
        53, 2, names.ATTEMPT_STARTED, world_size=2, resumed_from=6, lost_seconds=8.0,
        cut=[{"attempt": 1, "steps": 4, "seconds": 8.0, "last": 10, "until": at(38)}],
    ),
    first_step(56, 2, LATER, 2.0),
    event(75, 2, names.ATTEMPT_ENDED, status="finished"),
]  # fmt: skip
STAYED = [*steps(1, 6, 1, 20), *steps(7, 16, 2, 56)]


def test_a_failure_by_hand() -> None:
    found = of(ONCE, STAYED)
    assert seconds(found, 0) == {
        "start": 10, "load": 8, "productive": 12, "lost": 8, "detect": 3.5, "stop": 2.5,
    }  # fmt: skip
    assert seconds(found, 1) == {"start": 4, "load": 6, "productive": 20, "between": 1}
    assert (found.seconds, found.pauses) == (75, 0) and found.share == pytest.approx(32 / 75)
    first, second = found.attempts
    assert (first.steps, first.steps_lost, first.steps_again) == (6, 4, 0)
    assert (second.steps, second.steps_lost, second.steps_again, second.again) == (10, 0, 4, 8.0)
    assert (first.begins_command, second.begins_command) == (True, False)
    assert (found.failures, found.failure_seconds) == (1, 8 + 3.5 + 2.5 + 4 + 6)
    assert found.in_words() == (
        "42.7% of 1m 15s trained steps that stayed; 1 failure cost 24s; 4 steps were trained again"
    )
    assert found.metrics() == {
        "goodput/productive_share": found.share, "goodput/steps_again": 4.0, "goodput/seconds/pauses": 0.0,
        **{f"goodput/seconds/{phase}": pytest.approx(found.of(phase)) for phase in PHASES},
    }  # fmt: skip


def test_steps_that_no_line_has_are_counted_by_the_driver() -> None:
    """Rank 0 writes the metrics of a step when it has the next one: the 11th may be trained, and not on record."""
    events = [dict(each, fields={**each["fields"], "reached": 13}) if "reached" in each["fields"] else each
              for each in ONCE]  # fmt: skip
    found = of(events, STAYED)
    assert (found.attempts[0].steps_lost, found.attempts[1].steps_again) == (6, 6)
    assert found.attempts[1].again == 12 and found.seconds == 75


def test_the_first_batch_belongs_to_the_start() -> None:
    """Step 1 ends at 20 s, and took 8 s: for 6 of them the rank waited for its data."""
    found = of(ONCE, [*steps(1, 6, 1, 20, waited=6.0), *steps(7, 16, 2, 56)])
    assert seconds(found, 0)["load"] == 8 and seconds(found, 0)["productive"] == 12 and found.seconds == 75


def test_a_start_that_fails_and_a_pause() -> None:
    """After the failure at 43 s another attempt dies while it imports, from 44 to 49 s: noted under the last number.

    The command gives up. A day later the same command begins, and is stopped.
    """
    day = 86_400
    events = [
        *ONCE[:5],
        event(49, 1, names.ATTEMPT_FAILED, rank=0, cause="its process died", reached=0, seconds=5.0,
              stop_seconds=None, phases={"workers": 3.5}),
        event(day + 10, 2, names.ATTEMPT_STARTED, world_size=2, resumed_from=6,
              cut=[{"attempt": 1, "steps": 4, "seconds": 8.0, "last": 10, "until": at(38)}]),
        first_step(day + 20, 2, OF_COMMAND, 2.0),
        event(day + 41, 2, names.ATTEMPT_ENDED, status="interrupted"),
        event(day * 9, 2, names.AUDITED, step=10),
    ]  # fmt: skip
    found = of(events, [*steps(1, 6, 1, 20), *steps(7, 16, 2, day + 20)])
    assert [each.number for each in found.attempts] == [1, None, 2]
    assert [each.ended for each in found.attempts] == ["failed", "failed", "interrupted"]
    assert seconds(found, 0)["stop"] == 2.5, "until the next attempt began"
    assert seconds(found, 1) == {"start": 3.5, "load": 1.5}
    assert seconds(found, 2) == {"start": 10, "load": 8, "productive": 20, "between": 3}
    assert found.attempts[2].begins_command and found.pauses == day - 49 and found.seconds == 49 + 41
    assert (found.failures, found.failure_seconds) == (2, 8 + 3.5 + 2.5 + 5 + 10 + 8)
    assert found.in_words().endswith("; nobody ran it for another 23h 59m between commands")


def test_a_handover_has_no_failure() -> None:
    events = [
        *ONCE[:4],
        event(33, 1, names.ATTEMPT_ENDED, status="handed_over"),
        event(40, 2, names.ATTEMPT_STARTED, world_size=3, resumed_from=6),
        first_step(46, 2, LATER, 2.0),
        event(65, 2, names.ATTEMPT_ENDED, status="finished"),
    ]
    found = of(events, [*steps(1, 6, 1, 20), *steps(7, 16, 2, 46)])
    assert seconds(found, 0) == {"start": 10, "load": 8, "productive": 12, "between": 3, "stop": 1}
    assert seconds(found, 1) == {"start": 4, "load": 6, "productive": 20, "between": 1}
    assert (found.failures, found.steps_again, found.seconds) == (0, 0, 65)
    failed = event(38, 1, names.ATTEMPT_FAILED, cause="x", reached=0, seconds=4.0, phases={}, stop_seconds=None)
    later = [event(45, *(each[key] for key in ("attempt", "event")), **each["fields"]) for each in events[5:6]]
    found = of(
        [
            *events[:5],
            failed,
            *later,
            first_step(50, 2, LATER, 2.0),
            event(69, 2, names.ATTEMPT_ENDED, status="finished"),
        ],
        [*steps(1, 6, 1, 20), *steps(7, 16, 2, 50)],
    )
    assert [each.ended for each in found.attempts] == ["handed_over", "failed", "finished"]
    assert seconds(found, 1) == {"start": 4} and found.failure_seconds == 4 + 6 and found.seconds == 69


def test_a_command_that_was_killed_leaves_no_end() -> None:
    cut = ONCE[6]["fields"]["cut"]
    events = [*ONCE[:4], event(1010, 2, names.ATTEMPT_STARTED, world_size=2, resumed_from=6, cut=cut)]
    found = of([*events, first_step(1020, 2, OF_COMMAND, 2.0)], [*steps(1, 6, 1, 20), *steps(7, 9, 2, 1020)])
    assert seconds(found, 0) == {"start": 10, "load": 8, "productive": 12, "lost": 8}
    assert found.pauses == 1000 - 38 and found.seconds == 38 + 24 and found.failures == 0
    assert (found.steps_again, found.attempts[1].again) == (3, 6.0), "it is not yet where the run had been"


def test_without_ray_nobody_else_writes_a_failure() -> None:
    """The rank says it, and the same command begins anew: its checks are the start."""
    here = {"checks": 3.0, "model": 5.0}
    events = [
        event(8, 1, names.ATTEMPT_STARTED, world_size=1, resumed_from=0),
        first_step(12, 1, here, 4.0),
        event(21, 1, names.ATTEMPT_ENDED, status="failed"),
    ]
    found = of(events, steps(1, 6, 1, 10))
    assert seconds(found, 0) == {"start": 3, "load": 5, "productive": 12, "detect": 1}
    assert found.failures == 1 and found.failure_seconds == 1


def test_clocks_that_jump_never_make_less_than_nothing() -> None:
    """Rank 0's machine is half a minute behind the driver's, and at step 4 its clock is set back by a minute."""
    late = [*steps(1, 3, 1, -10), *steps(4, 6, 1, -70), *steps(7, 16, 2, 26)]
    found = of(ONCE, late)
    assert all(each >= 0 for attempt in found.attempts for each in (*attempt.seconds.values(), attempt.pause))
    assert found.seconds == pytest.approx(75, abs=20), "no jump adds more than it is long"
    assert found.of("productive") == 32 and 0 < found.share < 1


def test_records_of_older_versions(tmp_path: Path) -> None:
    """Neither what was cut nor how long a failure took to end: the seconds that were lost are there."""
    new = ("cut", "reached", "seconds", "stop_seconds")
    old = [
        each
        if each["event"] == names.FIRST_STEP
        else {**each, "fields": {key: value for key, value in each["fields"].items() if key not in new}}
        for each in ONCE
    ]
    found = of(old, STAYED)
    assert seconds(found, 0) == {"start": 10, "load": 8, "productive": 12, "lost": 8, "detect": 5, "stop": 1}
    assert seconds(found, 1) == {"start": 4, "load": 6, "productive": 20, "between": 1}
    assert (found.steps_again, found.seconds) == (0, 75)
    before_phases = [each for each in old if each["event"] != names.FIRST_STEP]
    found = of(before_phases, STAYED)
    assert seconds(found, 0) == {"load": 3, "productive": 12, "lost": 8, "detect": 5, "stop": 7}
    assert goodput([], step_times(map(to_bytes, STAYED))) is None
    assert read_goodput(tmp_path) is None


@pytest.mark.parametrize("broken", ["torn", "strange"])
def test_a_record_that_is_torn_or_a_strangers(tmp_path: Path, broken: str) -> None:
    place = RunDir(tmp_path, "x")
    events = [*ONCE]
    if broken == "strange":
        bad: Any
        for bad in (math.nan, -5, "x", None, [1], {"a": 1}, 10**40, 1e300):
            events.append(event(43, 1, names.ATTEMPT_FAILED, seconds=bad, stop_seconds=bad, phases={"workers": bad},
                                reached=bad))  # fmt: skip
            events.append(event(44, 3, names.ATTEMPT_STARTED, cut=[bad, {"attempt": bad, "steps": bad, "last": bad}],
                                lost_seconds=bad, world_size=bad))  # fmt: skip
            events.append({**event(45, 3, names.FIRST_STEP, seconds=bad, phases=bad), "time": bad})
    lines = [to_bytes(each) for each in events]
    place.events.write_bytes(b"".join(lines[:4]) + lines[4][:40] + b"\n" + b"".join(lines[4:]) + b'{"time": "2')
    rows = [to_bytes(each) for each in STAYED]
    place.metrics.write_bytes(b"".join(rows[:3]) + rows[3][:70] + b"\n" + b"\0\0\n" + b"".join(rows[3:]) + rows[0][:9])
    found = read_goodput(tmp_path)
    assert found is not None and found.of("productive") == 32
    assert all(math.isfinite(each) and each >= 0 for each in found.metrics().values())
    if broken == "torn":
        assert found.seconds == 75 and found.failures == 1


@pytest.mark.parametrize("strange", [1e308, math.inf, math.nan, -1.0])
def test_seconds_that_no_step_takes_are_none(strange: float) -> None:
    """The report reads its columns by itself, which may have any number."""
    lines = [StepTime(number, 1, BEGAN.timestamp() + 20 + number, strange, strange) for number in (1, 2)]
    found = goodput(ONCE[:3], lines)
    assert found is not None and found.of("productive") == 0 and found.share == 0 and math.isfinite(found.seconds)


def test_what_is_cut_is_counted_before_it_is_gone(tmp_path: Path) -> None:
    """Step 7 of the second attempt and 8 to 10 of the first, whose checkpoint of step 6 is damaged by then."""
    place = RunDir(tmp_path, str(tmp_path / "checkpoints"))
    lines = [*steps(1, 9, 1, 20), *steps(10, 10, 2, 90, each=3.0)]
    place.metrics.write_bytes(b"".join(map(to_bytes, lines)) + b'{"kind": "step", "traj')
    cut = steps_after(place.metrics, 6)
    assert cut == [
        {"attempt": 1, "steps": 3, "seconds": 6.0, "last": 9, "until": at(36)},
        {"attempt": 2, "steps": 1, "seconds": 3.0, "last": 10, "until": at(90)},
    ]
    assert steps_after(place.metrics, 10) == []
    tracker = JsonlTracker(tmp_path)
    tracker.start(RunStart(name="run", attempt=3, resumed_from=6))
    tracker.event(names.ATTEMPT_STARTED, resumed_from=6, cut=cut)
    assert read_events(place.events)[0]["fields"]["cut"] == cut
    assert steps_after(place.metrics, 0)[0]["steps"] == 6
    tracker.steps([step(7, seconds=0.5)], world_size=1, attempt=3)
    tracker.finish("finished")
    assert json.loads(place.metrics.read_bytes().splitlines()[-1])["attempt"] == 3
