"""Where the numbers of a run go: the run directory, the terminal, MLflow.

tracker.py          the interface of a tracker, one that does nothing, and several as one
names.py            the names of metrics and events
lines.py            what a line of metrics.jsonl looks like
jsonl.py            metrics.jsonl and events.jsonl, the truth about a run: writing and reading them
lineage.py          from which runs a fork comes
repair.py           checks a metrics.jsonl, and mends it
tail.py             reads the record of a run while it grows
goodput.py          where the time of a run went, and the share that counts
console.py          lines in the terminal; screen_messages.py: messages to a region of it
copies/             the record sent on: MLflow, Weights & Biases, TensorBoard; Prometheus's is in launch/ray
report/             what a person reads afterwards: summary, page about a run, model card

In: `StepMetrics`, evaluation losses and events of rank 0. Out: lines, curves, an MLflow run. Knows nothing of torch or
Ray, and never slows or stops training; only a failure to write the run directory's own files does.
"""
