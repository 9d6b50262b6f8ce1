"""From which runs a fork comes, as `lineage.json` in its directory says it: the whole chain, from its root.

A run's directory travels, and its ancestors may be gone: so a fork repeats what its parent says of its own ancestors.
The file may be a stranger's. What it says decides nothing that is trained: that is in the identity of the fork's
checkpoints.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.redaction import redact_shapes
from raytune_fsdp.base.untrusted import (
    MIB,
    UnsoundError,
    check_format,
    is_count,
    is_file_name,
    read_json_object,
    reason,
    shown,
)
from raytune_fsdp.plan.run_dir import LINEAGE_FILE

logger = logging.getLogger(__name__)

_BYTES, _MOST_FORKS = 16 * MIB, 10_000
_DIGEST = re.compile("[0-9a-f]{64}")
_LONGEST_PATH, _LONGEST_ID, _SHOWN = 4096, 256, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedFrom:
    """One link of a chain: the run that was forked, where, and what was changed."""

    run: str
    """The name of the run that was forked."""
    path: str
    """Its directory at that time."""
    mlflow_run_id: str | None
    step: int
    """The step of its checkpoint with which the fork began."""
    digest: str
    """The digest of that checkpoint, if it has one, else that of its manifest."""
    changed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The settings that decide the trajectory and differ, each with its value before and in the fork."""

    @property
    def words(self) -> str:
        """The link in one line: `base after step 400, with optim.lr 0.0001 -> 1e-05`."""
        return f"{self.run} after step {self.step:,}, with {self.changes or 'nothing changed'}"

    @property
    def changes(self) -> str:
        """What was changed, in one line; empty if nothing was."""
        return ", ".join(f"{key} {_short(before)} -> {_short(now)}" for key, (before, now) in self.changed.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The ancestors of a fork."""

    forks: Sequence[ForkedFrom]
    """The links from the root on; the last one is of the run itself. There is at least one."""

    @property
    def parent(self) -> ForkedFrom:
        return self.forks[-1]


def put_lineage(run_dir: Path, lineage: Lineage) -> None:
    """Write the lineage of a run into its directory."""
    values = {"format": 1, "forks": list(map(asdict, lineage.forks))}
    replace_durably(run_dir / LINEAGE_FILE, json.dumps(values, indent=1), private=True)


def read_lineage(run_dir: Path) -> Lineage | None:
    """Return the lineage of a run; None if it is no fork. ResumeError if its file is not one."""
    file = run_dir / LINEAGE_FILE
    try:
        values = read_json_object(file, limit=_BYTES)
        check_format(values.get("format"))
        return Lineage(forks=links_of(values.get("forks")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{file} does not say from which run this one comes ({reason(error)}); restore it, or move it away: "
            "then only the run's checkpoints tell its parent's step and digest"
        ) from error


def known_lineage(run_dir: Path) -> Lineage | None:
    """Return the lineage of a run for what can do without it: None, with a warning, if its file cannot be read."""
    try:
        return read_lineage(run_dir)
    except ResumeError as error:
        logger.warning("%s", error)
        return None


def links_of(values: Any) -> list[ForkedFrom]:
    """Return the links of a chain, which may be a stranger's. Raise UnsoundError if they are not what we write."""
    if not isinstance(values, list) or not 0 < len(values) <= _MOST_FORKS:
        raise UnsoundError("has no list of forks")
    return [_link_of(each) for each in values]


def _link_of(value: Any) -> ForkedFrom:
    if not isinstance(value, dict) or value.keys() != {each.name for each in fields(ForkedFrom)}:
        raise UnsoundError(f"has the fork {shown(value)}")
    path, mlflow, changed = value["path"], value["mlflow_run_id"], value["changed"]
    sound = (
        is_file_name(value["run"])
        and isinstance(path, str)
        and 0 < len(path) <= _LONGEST_PATH
        and path.isprintable()
        and (mlflow is None or (isinstance(mlflow, str) and len(mlflow) <= _LONGEST_ID and mlflow.isprintable()))
        and is_count(value["step"])
        and value["step"] > 0
        and isinstance(value["digest"], str)
        and _DIGEST.fullmatch(value["digest"]) is not None
        and isinstance(changed, dict)
        and all(key.isprintable() and isinstance(pair, list) and len(pair) == 2 for key, pair in changed.items())
    )
    if not sound:
        raise UnsoundError(f"has the fork {shown(value)}")
    return ForkedFrom(**{**value, "changed": redact_shapes(changed)})


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
