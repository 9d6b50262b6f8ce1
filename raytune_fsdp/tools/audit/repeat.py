"""Make the config of the run that trains a segment again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.checkpoint.form import began_with
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.config import EvalConfig, FinetuneConfig, ProfileConfig, TrackingConfig
from raytune_fsdp.config.sections.tracking import MlflowConfig
from raytune_fsdp.plan.run_dir import RunDir, cache_of
from raytune_fsdp.run.length import plan_on_record
from raytune_fsdp.tools.audit.segment import Segment


def repeat_of(
    config: FinetuneConfig,
    place: RunDir,
    segment: Segment,
    directory: Path,
    *,
    use_cache: bool,
    parent: Path | None = None,
) -> FinetuneConfig:
    """Return the config of the run that trains the segment again: the same trajectory, without evaluations and such.

    `parent`: where a copy of the checkpoint is with which the run began as a fork, if the segment begins there.
    """
    plan = plan_on_record(place)
    # The length of the schedule in the segment, which later attempts may have changed.
    # A fork may have begun with another one than its parent had.
    ends = (None if parent is not None else segment.before, segment.after)
    lengths = [read_state(each).schedule_steps for each in ends if each is not None]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"optim.schedule_steps was {lengths[0]} at step {segment.first} and {lengths[1]} at step {segment.last}: "
            "audit the steps before and after that change apart"
        )
    schedule = lengths[0] if lengths else config.optim.schedule_steps
    fork = config.run.fork
    if fork is not None and parent is not None:
        fork = fork.model_copy(update={"run": str(parent)})
    sections: dict[str, Any] = {
        "run": {"storage": str(directory), "resume": "auto", "stop_after": None, "fork": fork},
        "data": {
            # The run's own cache has what the run was trained on, whatever the rows of its data are now.
            "cache": config.data.cache.model_copy(
                update={"path": str(cache_of(config) if use_cache else directory / "cache")}
            ),
            **({} if config.data.eval_decides_training else {"eval": []}),
        },
        "checkpoint": {
            "storage": None,
            "every": "auto",
            "keep_last": None,
            "keep_every": None,
            "keep_best": 0,
            "best": None,
        },
        "export": {"at_end": False, "every": None, "push": None},
        "optim": {"schedule_steps": schedule or plan.schedule_steps},
        # A stranger's config may ask for endless tries.
        "cluster": {"max_failures": config.cluster.max_failures if config.cluster.max_failures >= 0 else 3},
    }
    if segment.last < plan.steps or config.train.epochs is None:
        sections["train"] = {"max_steps": segment.last, "epochs": None}
    if segment.before is None:
        with suppress(ModelError):  # random weights, or a run of before there was such a record
            path, commit, on_hub = began_with(place.model_files)
            if on_hub and path == config.model.path and commit is not None:
                sections["model"] = {"revision": commit}  # the branch that the config names may have moved on since
    tracking = TrackingConfig(console=config.tracking.console, mlflow=MlflowConfig(enabled=False))
    return config.with_sections(**sections).model_copy(
        update={"eval": EvalConfig(), "tracking": tracking, "profile": ProfileConfig()}
    )
