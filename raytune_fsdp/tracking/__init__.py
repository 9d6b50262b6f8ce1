"""Where the numbers of a run go: the run directory, the terminal, MLflow.

Comes in: `StepMetrics`, evaluation losses and events of rank 0. Goes out: lines, curves, an MLflow run. Knows nothing
of torch or Ray, and never slows or stops training; only the run directory's own files may fail, as they are the truth.
"""

from raytune_fsdp.tracking.tracker import Composite, NullTracker, RunStart, Status, Tracker, flatten

__all__ = ["Composite", "NullTracker", "RunStart", "Status", "Tracker", "flatten"]
