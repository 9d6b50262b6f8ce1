"""Where the numbers of a run go: the run directory, the terminal, MLflow.

    tracker.py      what a tracker is; none, and several as one
    names.py        the names of metrics and events
    jsonl.py        metrics.jsonl and events.jsonl, the truth about a run; and reading them
    lines.py        what a line of metrics.jsonl looks like
    repair.py       what a metrics.jsonl is worth, and mending it
    cursor.py       how far a tracker has sent metrics.jsonl, and what comes next
    tail.py         the record of a run, read while it grows
    console.py      lines in the terminal, and
    live.py         what a region of a terminal is told, that shows how far the run is
    following.py    a tracker whose thread sends metrics.jsonl to somebody else
    mlflow.py       the run in MLflow, one of them, with
    mlflow_run.py   the run as the server has it,
    mlflow_beside.py  what it gets besides metrics, mlflow_model.py  the export in its registry, and
    muted.py        silence for what its libraries print
    wandb.py, tensorboard.py  two others; Prometheus's is in launch/ray, as Ray offers the numbers

In: `StepMetrics`, evaluation losses and events of rank 0. Out: lines, curves, an MLflow run. Knows nothing of torch or
Ray, and never slows or stops training; only a failure to write the run directory's own files does.
"""

from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Status, Tracker, flatten

__all__ = ["Composite", "NullTracker", "RunStart", "Status", "Tracker", "flatten"]
