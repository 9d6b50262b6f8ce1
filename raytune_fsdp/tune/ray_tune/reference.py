"""What Ray Tune keeps of a trial, and the config of the run that the trial is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError, ResumeError
from raytune_fsdp.base.untrusted import check_format, is_count, is_file_name, read_json, reason, shown
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import checkpoint_at, committed, digest_of
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.plan.run_dir import RunDir

BASE = "base"
"""The key of `param_space` that names the config which all trials share; all others are fields of it."""
REFERENCE_FILE = "run.json"
_REFERENCE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReference:
    """What Tune keeps as a trial's checkpoint: where its run was, and nothing of the run itself."""

    trial: str
    run: str
    """The run's name, below the `run.storage` of all trials."""
    step: int
    """That of a committed checkpoint: a fork begins there."""
    digest: str
    seen: int
    """The newest step with an evaluation that Tune had been told; -1 before the first."""
    given: str
    """A hash of what Tune had given the trial: with anything else it is another run."""
    fork: Mapping[str, Any] | None
    """What the run itself was forked of (`run.fork`)."""

    def write(self, directory: Path) -> None:
        (directory / REFERENCE_FILE).write_text(json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> TrialReference:
        """Read what Tune has kept. It may come from anywhere: `Tuner.restore` takes a path."""
        file = directory / REFERENCE_FILE
        try:
            found = read_json(file, limit=_REFERENCE_BYTES)
            check_format(found.pop("format", None) if isinstance(found, dict) else None)
            made = cls(**found)
            texts = made.trial, made.digest, made.given
            fork = made.fork is None or (
                isinstance(made.fork, dict)
                and made.fork.keys() == {"run", "step"}
                and is_file_name(made.fork["run"])
                and is_count(made.fork["step"])
            )
            if not (all(isinstance(each, str) for each in texts) and fork and is_file_name(made.run)):
                raise ValueError("it names no run")
            if not is_count(made.step) or type(made.seen) is not int or made.seen < -1:
                raise ValueError(f"it has step {shown(made.step)} and evaluation {shown(made.seen)}")
        except (OSError, ValueError, TypeError) as error:
            raise ResumeError(
                f"{file} is no reference to a run ({reason(error)}): restore another checkpoint"
            ) from error
        return made


def check_reference(found: TrialReference, place: RunDir, *, forks: bool = False) -> None:
    """Refuse a reference whose run is not in its place, which would silently begin from step 0. `forks`: also one to a
    checkpoint that is gone, or that is another one by now."""
    there = committed(place.checkpoints)
    if not there:
        raise ResumeError(
            f"run.storage={place.path.parent}: Tune has a checkpoint of trial {found.trial}, and its run {found.run} "
            f"has none in {place.checkpoints}. A relative run.storage or checkpoint.storage begins where Tune was "
            "started: start it there, or name the directory from the root on; if the run is lost, start a new sweep"
        )
    if not forks:
        return
    digest: str | None = None
    with suppress(FileNotFoundError):  # pruned just now
        if (chosen := checkpoint_at(there, found.step)) is not None:
            digest = digest_of(chosen)
    if digest != found.digest:
        problem = "has pruned it" if digest is None else f"has another one of that step, with the digest {digest}"
        raise ResumeError(
            f"run.fork: a trial is to go on from the checkpoint of step {found.step} of {place.path} (digest "
            f"{found.digest}), and that run {problem}: it cannot be had any more. Begin a new experiment with "
            "checkpoint.keep_last=null, which keeps all that another trial may take over"
        )


def config_of(given: Mapping[str, Any], cwd: Path) -> FinetuneConfig:
    """Return the config that Tune has given a trial: `base`, and its fields by dotted names or in sections."""
    base = given.get(BASE)
    if not isinstance(base, str | Path | Mapping):
        raise ConfigError(
            f"param_space[{BASE!r}]={shown(base)}: must be a YAML file, a recipe's name, or the sections of a config"
        )
    if not isinstance(base, Mapping) and (cwd / base).is_file():
        base = cwd / base  # Tune has sent this process elsewhere
    changes = {name: value for name, value in given.items() if name != BASE}
    config = load_config(base, [f"--{name}={_written(value)}" for name, value in _flat(changes)])
    if config.run.stop_after is not None:
        raise ConfigError(
            f"run.stop_after={config.run.stop_after}: Tune says after which step a trial ends: leave it out (with "
            f"param_space['run.stop_after']=None, if {BASE} has it), and give tune.RunConfig(stop={{'step': "
            f"{config.run.stop_after}}})"
        )
    # This process looks for the run and its checkpoints, too.
    config = with_run(config, storage=str(cwd / Path(config.run.storage).expanduser()), resume="auto")
    place = config.checkpoint.storage
    if place is not None and not is_url(place):
        config = _with(config, "checkpoint", storage=str(cwd / Path(place).expanduser()))
    return config


def with_run(config: FinetuneConfig, **fields: Any) -> FinetuneConfig:
    """Return a config with other values in its section `run`."""
    return _with(config, "run", **fields)


def _with(config: FinetuneConfig, section: str, **fields: Any) -> FinetuneConfig:
    values = config.model_dump(mode="json", exclude_unset=True)
    return load_config({**values, section: {**values[section], **fields}})


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _written(value: Any) -> str:
    """Return a value as it is on a command line. Some samplers of Tune's return numbers of numpy's."""
    return json.dumps(value, default=lambda each: each.item() if hasattr(each, "item") else str(each))


def hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
