"""Where the numbers of a run go: the run directory, the terminal, MLflow.

    tracker.py      what a tracker is; none, and several as one
    names.py        the names of metrics and events
    jsonl.py        metrics.jsonl and events.jsonl, the truth about a run; and reading them
    lines.py        what a line of metrics.jsonl looks like
    repair.py       what a metrics.jsonl is worth, and mending it
    cursor.py       how far a tracker has sent metrics.jsonl, and what comes next
    follow.py       the record of a run, followed while it grows
    console.py      lines in the terminal, and
    live.py         what a region of a terminal is told, that shows how far the run is
    mlflow.py       the run in MLflow, sent from metrics.jsonl by a thread, with
    mlflow_run.py   the run as the server has it, and
    muted.py        silence for what its libraries print

In: `StepMetrics`, evaluation losses and events of rank 0. Out: lines, curves, an MLflow run. Knows nothing of torch or
Ray, and never slows or stops training; only a failure to write the run directory's own files does.
"""

from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Status, Tracker, flatten

__all__ = ["Composite", "NullTracker", "RunStart", "Status", "Tracker", "flatten"]
