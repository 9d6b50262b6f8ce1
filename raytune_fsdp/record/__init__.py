"""Where the numbers of a run go: the run directory, the terminal, MLflow.

tracker.py          what a tracker is; none, and several as one
names.py            the names of metrics and events
lines.py            what a line of metrics.jsonl looks like
jsonl.py            metrics.jsonl and events.jsonl, the truth about a run; and reading them
repair.py           what a metrics.jsonl is worth, and mending it
tail.py             the record of a run, read while it grows
console.py          lines in the terminal; screen_messages.py: what a region of it is told
copies/             sent on: MLflow, Weights & Biases, TensorBoard; Prometheus's is in launch/ray
report/             what a person reads afterwards: summary, page about a run, model card

In: `StepMetrics`, evaluation losses and events of rank 0. Out: lines, curves, an MLflow run. Knows nothing of torch or
Ray, and never slows or stops training; only a failure to write the run directory's own files does.
"""
