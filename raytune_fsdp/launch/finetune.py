"""finetune(config) -> FinetuneResult: the whole program in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.batch import Progress
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.callbacks import Callback, StopHandle, calling_back, check_not_called_back, functions_of
from raytune_fsdp.launch.imported import leave_if_imported
from raytune_fsdp.launch.own_functions import with_names
from raytune_fsdp.launch.own_rows import load_with_rows
from raytune_fsdp.launch.result import FinetuneResult
from raytune_fsdp.plan.run_dir import RunDir

WAIT_FOR_TRACKING = 30.0
"""Seconds."""
if TYPE_CHECKING:
    from raytune_fsdp.run.resume_point import ResumePoint, RunInputs


def finetune(
    config: FinetuneConfig | Mapping[str, Any] | str | Path,
    progress: Progress | None = None,
    *,
    wait_for_tracking: float = WAIT_FOR_TRACKING,
    force: bool = False,
    trust_places: bool = False,
    on: Callback | Sequence[Callback] | None = None,
    stop: StopHandle | None = None,
) -> FinetuneResult:
    """Train to the end, from the newest checkpoint if there is one, export, and make the report. Raises RaytuneError.

    `config`: the sections of a config, the path of a YAML file, or what `load_config` returns. In sections, rows may
    stand for the `path` of a dataset (a Dataset, a table of pandas, polars or Arrow, an iterable of maps), and a
    function for its name in `train.loss`, `model.network` and a format's `function`.
    `progress(what, done, total)` is called while the data is prepared and counted, and while this waits for MLflow to
    take what it has missed, at most `wait_for_tracking` seconds. `force`: start even what does not fit the devices or
    the storage. `trust_places`: `model.path` may be a checkpoint that names places which you have not chosen. `on`:
    functions that are called, in a thread, with each step, evaluation, answer, checkpoint and attempt. `stop`: lets any
    thread stop the run, which raises Interrupted. Under torchrun every rank calls this; `on` and `stop` are rank 0's.
    """
    leave_if_imported()
    check_not_called_back()
    functions = functions_of(on, stop)
    if isinstance(config, Mapping):
        config = load_with_rows(with_names(config))
    config = config if isinstance(config, FinetuneConfig) else load_config(config)
    from raytune_fsdp.launch.environment import environment
    from raytune_fsdp.launch.quiet import ignoring_warnings, quieting
    from raytune_fsdp.launch.run_lock import locked
    from raytune_fsdp.launch.signals import Signals
    from raytune_fsdp.launch.torchrun import is_rank0

    with ExitStack() as stack:
        stack.enter_context(environment(quieting()))
        stack.enter_context(ignoring_warnings())
        if is_rank0():
            stack.enter_context(locked(config))
            stack.enter_context(calling_back(RunDir.of(config), functions, stop))
        with Signals():  # before the imports, which take seconds; transformers reads its variables while it is imported
            from raytune_fsdp.launch.start import run

            prepared, before = run(config, progress, force=force, trust_places=trust_places)
        return _result(config, prepared, before, wait_for_tracking, progress)


def _result(
    config: FinetuneConfig, prepared: RunInputs, before: ResumePoint, wait: float, progress: Progress | None
) -> FinetuneResult:
    """Make the export and the report of a complete run, and return its results."""
    # Not at the top: these import torch and transformers, and a mistake in the config is reported within a second.
    from raytune_fsdp.checkpoint.catalogue import committed
    from raytune_fsdp.launch.signals import Signals
    from raytune_fsdp.launch.torchrun import is_rank0
    from raytune_fsdp.record.report.page import make_curve, make_report
    from raytune_fsdp.run import open_record
    from raytune_fsdp.run.publish import publish

    place = prepared.place  # as rank 0 sees it: under torchrun another node may resolve a relative path differently
    newest = before.checkpoint if before.complete else committed(place.checkpoints)[-1]
    assert newest is not None, "a complete run has a checkpoint"
    export = place.export if config.export.at_end else None
    curve, report, pushed, registered, unsent, page = None, None, None, None, None, None
    if is_rank0():
        if before.complete:
            open_record.clean_config(place)
            open_record.keep_from_others(place)
            with suppress(OSError):  # another user's run
                open_record.put_mark(prepared)
            open_record.mend_record(config, place, before)
        # They send while the export is written.
        trackers = open_record.last_tracking(config, prepared, before, newest.step, seconds=wait, progress=progress)
        if export is not None:
            with Signals("during the export: training is complete, and the same command makes the export"):
                pushed = publish(
                    newest, export, config.export,
                    trust_remote_code=config.model.trust_remote_code, events=place.events,
                )  # fmt: skip
        curve, report = make_curve(place.path), make_report(place.path)
        for tracker in trackers:
            tracker.finish("finished")
        page = next((tracker.page for tracker in trackers if tracker.page), None)
        unsent = "; ".join(filter(None, (tracker.unsent for tracker in trackers))) or None
        if config.tracking.mlflow.enabled and trackers and trackers[0].unsent is None:
            with Signals("before the export was registered: training is complete, and the same command does it"):
                registered = open_record.register_export(config, place, newest.step)
    return FinetuneResult(
        run_dir=place.path,
        steps=newest.step,
        ended_early=newest.step < before.plan.steps,
        trained=newest.step - before.state.step,
        checkpoint=newest.path,
        export=export,
        pushed=pushed,
        curve=curve,
        report=report,
        registered=registered,
        unsent=unsent,
        mlflow_page=page,
    )
