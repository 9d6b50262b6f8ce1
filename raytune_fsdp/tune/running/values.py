"""What the record of a trial's run says: what its evaluations have measured, what is committed, whether it is over."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError, RaytuneError, ResumeError, in_one_line
from raytune_fsdp.base.redaction import REDACTED
from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config, read_file
from raytune_fsdp.config.problems import shown
from raytune_fsdp.config.recorded import recorded
from raytune_fsdp.config.text import spelled
from raytune_fsdp.plan.run_dir import METRICS_FILE, RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event, read_evaluations
from raytune_fsdp.tune.place import SWEEP_FILE, SweepDir
from raytune_fsdp.tune.space import base_of, differing, is_run_name
from raytune_fsdp.tune.spec import SweepSpec

_MOST_STEPS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """Where a trial's run stands, by its record and its checkpoints."""

    values: Mapping[int, float] = field(default_factory=dict)
    """The sweep's metric by step; NaN where an evaluation lacks it, or has no finite number."""
    everything: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """All that evaluations have measured, by step."""
    committed: int = 0
    """The step of the newest checkpoint that no clock has chosen; 0 if there is none, or if they cannot be listed."""
    unlisted: str = ""
    """Why its checkpoints cannot be listed; empty if they can."""
    attempt: int = 0
    """The newest attempt; 0 if none has begun."""
    joined: int = 0
    """The newest attempt whose ranks were there, on Ray: before it has begun, they may have loaded a model for long."""
    over: bool = False
    """Whether the run has come to its end, has said so, and has its export, if it is to have one."""
    failure: str = ""
    """How training itself has failed in the newest attempt; empty if it has not."""
    no_room: int = 0
    """How many commands have ended because the cluster had no room for the run."""
    gave_up: str = ""
    """Why the newest attempt has failed, by the driver on Ray, which has tried as often as it may; empty if it has
    not."""

    @property
    def began(self) -> bool:
        """Whether an attempt has begun: then its data is prepared."""
        return self.attempt > 0

    def has(self, until: int | None) -> bool:
        """Return whether the run has trained to this step, and been measured there; None: to its end."""
        return self.over or (until is not None and self.committed >= until and until in self.values)


def has_export(config: FinetuneConfig, place: RunDir) -> bool:
    """Return whether a run that has trained to its end has made its export, or is to make none."""
    return not config.export.at_end or place.export.is_dir()


def measured_in(config: FinetuneConfig, place: RunDir, metric: str | None) -> TrialRecord:
    """Read what the record of a run says. What cannot be read is not there: the run's next attempt mends it."""
    evaluations: dict[int, dict[str, float]] = {}
    with suppress(RaytuneError, OSError):
        evaluations = read_evaluations(place.metrics, _MOST_STEPS)
    newest, unlisted = 0, ""
    try:
        newest = max((each.step for each in committed(place.checkpoints) if each.lasting), default=0)
    except (RaytuneError, OSError) as error:
        unlisted = in_one_line(error)
    attempt, joined, over, failure, gave_up, no_room = 0, 0, False, "", "", 0
    with suppress(RaytuneError, OSError):
        for event in each_event(place.events):
            name, fields = event["event"], event["fields"]
            if name == names.ATTEMPT_STARTED:
                attempt, over, failure, gave_up = event["attempt"], False, "", ""
            elif name == names.RANKS_JOINED:
                joined = event["attempt"]
            elif name == names.ATTEMPT_FAILED:  # also of one that has not come so far as to get a number
                gave_up = str(fields.get("cause"))
            elif name == names.NO_ROOM:
                no_room += 1
            elif event["attempt"] == attempt and name == names.ATTEMPT_ENDED:
                over = fields.get("status") == "finished"
            elif event["attempt"] == attempt and name == names.TRAINING_FAILED:
                failure = failure or str(fields.get("cause"))
    values = {step: names.score(found, metric) for step, found in evaluations.items()}
    return TrialRecord(
        values={step: math.nan if value is None else value for step, value in sorted(values.items())},
        everything=evaluations,
        committed=newest,
        unlisted=unlisted,
        attempt=attempt,
        joined=joined,
        over=over and has_export(config, place),
        failure=failure,
        gave_up=gave_up,
        no_room=no_room,
    )


def check_own(config: FinetuneConfig, place: RunDir) -> None:
    """Refuse a run of other settings where a trial's run belongs: what it has measured would count as the trial's. And
    a sweep, whose files the run's would be among.

    `config`: that of the trial. Raises ResumeError.
    """
    if (place.path / SWEEP_FILE).exists():
        raise ResumeError(
            f"{place.path} is a sweep, and a trial of this one has the same name: move it away, or give this sweep "
            "another name"
        )
    if not place.config.is_file():
        return
    try:
        there, now = base_of(_on_record(place, config)), base_of(config)
    except ConfigError as error:
        raise ResumeError(f"{place.config} cannot be read, so nothing says whose run it is: {error}") from error
    other = [f"{field}={shown(new)} (there {shown(old)})" for field, old, new in differing(there, now)]
    if other:
        raise ResumeError(
            f"{place.path} has a run of other settings than this trial of the sweep has: {', '.join(other)}: move it "
            "away, or give the sweep another name"
        )


def _on_record(place: RunDir, config: FinetuneConfig) -> FinetuneConfig:
    """Return the config on a run's record. Where that holds no secrets, `config` has those that it would leave out."""
    tree, own = read_file(place.config)[0], config.model_dump()
    if isinstance(cluster := tree.get("cluster"), dict):
        cluster.pop("env", None)  # it decides nothing, and its secrets may be others now
    return load_config(_with_secrets(tree, own, recorded(own)))


def _with_secrets(there: Any, own: Any, shown_of_own: Any) -> Any:
    if isinstance(there, dict):
        own, shown_of_own = (each if isinstance(each, Mapping) else {} for each in (own, shown_of_own))
        return {key: _with_secrets(each, own.get(key), shown_of_own.get(key)) for key, each in there.items()}
    if isinstance(there, list):
        own, shown_of_own = ([*each] if isinstance(each, list) else [] for each in (own, shown_of_own))
        return [_with_secrets(each, *now) for each, *now in zip_longest(there, own, shown_of_own)][: len(there)]
    text = spelled(there)
    if not isinstance(text, str) or REDACTED not in text:
        return there
    return own if text == shown_of_own else text.replace(REDACTED, "redacted")  # another secret: a value has no mark


def check_begins(spec: SweepSpec) -> None:
    """Refuse to begin a sweep whose trials have been measured: nothing says on what, and no process would be started
    that finds out. Raises ResumeError."""
    place = SweepDir.of(spec)
    there = sorted(place.path.parent.glob(f"{glob.escape(spec.name)}-*"))
    measured = [path for path in there if is_run_name(path.name, spec.name) and _is_measured(path)]
    if measured:
        raise ResumeError(
            f"{measured[0]} has been measured already, and the sweep has no log ({place.log}), so nothing says on "
            f"what: move away the {len(measured)} runs of this name, put back the log, or give the sweep another name"
        )


def _is_measured(run: Path) -> bool:
    with suppress(RaytuneError, OSError):
        return bool(read_evaluations(run / METRICS_FILE, _MOST_STEPS))
    return True  # it cannot be read
