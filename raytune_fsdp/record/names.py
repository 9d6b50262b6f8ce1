"""Names of metrics and events, in one place. Dashboards and tests depend on them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raytune_fsdp.record.lines import is_number, preferences_of

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LR = "train/lr"
EPOCH = "train/epoch"
ACCURACY = "train/accuracy"
TOKEN_ACCURACY = "train/token_accuracy"
"""`train/accuracy` under a name that says what it counts. The older name stays, for dashboards that use it."""
PAIRS_RIGHT = "train/rewards/accuracies"
"""The share of pairs whose chosen answer has the higher reward. With an objective of pairs or of judged answers there
are also train/rewards/chosen and /rejected (of KTO: those of desirable and of undesirable answers), their difference
/margins, train/logps/chosen and /rejected, train/nll_loss, if there is a term of cross-entropy, and train/kl, KTO's:
the names that TRL gives them. With several datasets, those of each as train/<dataset>/rewards/chosen and so on."""
FROM_TEACHER = ("train/kl/forward", "train/kl/reverse", "train/nll")
"""With `train.objective.type=distill`: the divergences from teacher to student and back, those that have a weight, at
the temperature of `teacher`, in nats for each target; and the cross-entropy of the data's tokens."""
REWARDS = ("train/rewards/chosen", "train/rewards/rejected", "train/rewards/margins")
EXPERT_LOAD = ("train/expert_load/mean", "train/expert_load/max")
"""Mean and maximum over the layers of: tokens of the busiest expert / mean of its layer's experts. 1 is perfect
balance."""
EXPERTS_IDLE = "train/experts_idle"
TOKENS_PER_SECOND = "perf/tokens_per_second"
MFU = "perf/mfu"
STEP_SECONDS = "perf/step_seconds"
DATA_SECONDS = "perf/data_seconds"
COMPUTE_SECONDS = "perf/compute_seconds"
MEMORY_BYTES = "perf/memory_bytes"
HOST_MEMORY_BYTES = "perf/host_memory_bytes"
GPU_UTILIZATION = "perf/gpu_utilization"
RANKS = ("fastest", "median", "slowest")
"""perf/step_seconds/<rank>, perf/data_seconds/<rank> and perf/compute_seconds/<rank>, if there are several ranks."""
SPREAD = ("perf/step_seconds_min", "perf/step_seconds_median", "perf/step_seconds_max")
"""The same numbers as perf/step_seconds/<rank>, which stay."""
OLDER = (ACCURACY, *SPREAD)
"""Names whose numbers have another name beside them. A run that is new in MLflow lacks these."""
PREDICTION_ERRORS = ("predicted/kept_error", "predicted/peak_error", "predicted/seconds_error")
"""Relative errors (predicted / measured - 1) of what was predicted before the run: the memory that a rank keeps, its
peak, the time of a step. 0.05 means that 5 % too much was predicted."""
NODE_FIGURES = ("host_rss", "host_free", "gpu_util", "gpu_memory")
"""system/<node>/<figure>: bytes of memory that the node's ranks use, bytes of memory that are free, GPU utilization in
percent (the mean of its GPUs), bytes in use on its fullest GPU."""
_IN_BYTES = ("host_rss", "host_free", "gpu_memory")

ATTEMPT_STARTED = "attempt_started"
"""Fields: world_size, resumed_from, the part of the plan that depends on the world size, and what else the bits of the
results depend on: device, threads, versions, packages (those with kernels that are installed) and, on a CPU,
instructions of rank 0, with run.exact also bits, a digest of these, the kernels and the micro-batch; evaluates (whether
values are measured, and how many prompts are answered), if the ranks measure anything. If attempts after that
checkpoint have failed: lost_seconds, the time for which they have trained, and cut. from_peers, if it goes on from a
copy in the memory of the nodes (`checkpoint.peer_copies`)."""
LOST_SECONDS = "lost_seconds"
"""Attempts may fail before the clock asks for a checkpoint, so the next one's clock starts with this."""
CUT = "cut"
"""What was on record of steps after that checkpoint, an entry for each attempt that had trained some of them: attempt,
steps (how many), seconds (the sum of their times), last (the last of them) and until (when that had ended)."""
FROM_PEERS = "from_peers"
STARTED_BY = "started_by"
"""In attempts.jsonl, which no tracker gets a copy of. Fields: command (without secrets), directory, host, user, python,
and of the directory's git repository commit and uncommitted (whether files differ from it)."""
ATTEMPT_ENDED = "attempt_ended"
"""Rank 0 has left an attempt. Fields: status (finished, failed, interrupted, handed_over). There is no such event if
rank 0 was killed."""
TRAINING_FAILED = "training_failed"
"""Training itself has failed, so that another attempt would, too: it has diverged, does not fit its device, or has come
to a row that cannot be used. In the words of the first rank that says so, which may be followed by those of others.
Fields: rank, cause. Whatever fails around it (storage, a process, a node) has no such event."""
KERNELS = "kernels"
"""What an attempt computes with, where there is a choice. Fields: attention, loss, blocks (whether layers are compiled
or eager), in packed hybrids mixers (how their state mixers get documents), experts (all in one product, or one after
the other), on GPUs update (whether an update that torch has no kernel for is compiled), and for each the reason."""
SHARDED = "sharded"
"""Which weights an attempt gathers together. Fields: units (name, count, and bytes of the largest), gathered (when);
and what a rank receives in a step: weights_bytes, gradients_bytes, and, where ranks share samples, attention_bytes
(null: not known)."""
PREDICTED = "predicted"
"""What a rank of the attempt needs, by the planner's prediction. Fields: kept_bytes (device memory kept from step to
step), peak_bytes (of tensors), where (in which part of the step the peak is), beside_bytes (device memory that is not
tensors), checkpoint_bytes and step_seconds (null: the device is not known); or because: why nothing could be
predicted."""
PREDICTION_CHECKED = "prediction_checked"
"""The prediction was compared with what was measured. Fields: step; measured: kept_bytes, peak_bytes (null on CPUs),
step_seconds; relative errors of the prediction: kept_error, peak_error, seconds_error (null: one of the two is not
known)."""
COMPILED = "compiled"
"""Graphs were compiled in the steps since the last fetch of metrics, up to this one. After step 3 none should be,
except in the short last step of a run in epochs. Fields: step, graphs."""
PROFILED = "profiled"
"""A step was recorded with torch's profiler. Fields: step, path of the table, and on a GPU the percentages of the step
in which it was idle, and in which it only communicated."""
REFERENCE = "reference"
"""The log-probabilities that preferences are compared with are there. Fields: path of their files, documents, windows,
and of this attempt: computed (windows) and seconds."""
TEACHER = "teacher"
"""The predictions that a run of distillation learns are there. Fields: model, path of their files, top_k, temperature,
documents, windows, not_kept (of the teacher's probability, by dataset: mean and largest of a token), and of this
attempt: computed (windows) and seconds."""
SAVED = "saved"
"""Fields: step, seconds, bytes, path; recovery (true), if the clock chose the step; with run.exact digest, of
the weights, and everything, a digest with the optimizer's state and the place in the data."""
DIGESTED = "digested"
"""The numbers after a step were hashed, without saving them (run.digest_every). Fields: step, digest and everything, as
those of a save."""
FORKED = "forked"
"""The run begins where another one was. Fields: those of the link in lineage.json (record/lineage.py)."""
NO_ROOM_TO_SAVE = "no_room_to_save"
"""A checkpoint is due by the clock, but storage has no room for it and the next one, so none is written. Once in an
attempt. Fields: wanted and free (bytes)."""
ROOM_MADE = "room_made"
"""Storage had no room for another checkpoint, so recovery points were removed; never the only checkpoint of a run.
Fields: removed (their names, with commas)."""
MEMORY_SHORT = "memory_short"
"""A node has less memory than the copies that a save of its ranks makes. Fields: node, wanted and free (bytes), with
checkpoint.peer_copies also peer_copies (bytes of them for a rank)."""
NOTICE_SHORT = "notice_short"
"""A save took longer than the notice that the run gets before something ends it. Once for each kind of notice. Fields:
step, seconds (of the save), bytes, notices (seconds, by what ends the run: spot, job_stop, pod, scheduler, ranks)."""
SAVE_FAILED = "save_failed"
"""Nothing was committed, and training goes on. Fields: step, problem."""
SAVE_POSTPONED = "save_postponed"
"""A checkpoint was due while the previous one was being written; it starts after that. Fields: step."""
CHECKPOINT_DAMAGED = "checkpoint_damaged"
"""A checkpoint was set aside, and the run continues from an older one. Fields: path, problem, now (its place)."""
EXPORTED = "exported"
"""A checkpoint was exported while training went on. Fields: step, path, seconds."""
EXPORTED_ALONE = "exported_alone"
"""The base of a multimodal model could not be read, so an export has the language model alone. Fields: step, path,
model (the class), because."""
EXPORT_FAILED = "export_failed"
"""A checkpoint could not be exported; training goes on. Fields: step, problem."""
EVALUATED = "evaluated"
"""A checkpoint was evaluated while training went on; the values are in evaluations.jsonl. Fields: step, seconds."""
EVALUATION_FAILED = "evaluation_failed"
"""A checkpoint could not be evaluated; training goes on. Fields: step, problem."""
SKIPPED_UPDATE = "skipped_update"
"""Fields: step, loss, grad_norm."""
ANSWERED = "answered"
"""Fields: step, prompt, answer, and of a conversation its messages."""
ROWS_DROPPED = "rows_dropped"
"""Rows did not become documents. Fields: counts by reason; truncated, cut, rows."""
ROWS_HELD_OUT = "rows_held_out"
"""Rows of the training data are used for evaluation instead. Fields: rows (how many, by dataset)."""
ROWS_LEFT_OUT = "rows_left_out"
"""Rows are not trained on because equal rows are used for evaluation, or are trained on already. Fields: before, after
(rows by dataset)."""
COLUMN_NOT_READ = "column_not_read"
"""A well-known column is not empty, and the format of its dataset does not read it. Fields: dataset, column, share (of
rows that have something in it), rows (how many were looked at), read_by."""
ROWS_SKIPPED = "rows_skipped"
"""Unusable rows were left out. Fields: rows (where, reason and message of each), reasons (counts)."""
WINDOWS_BUILT = "windows_built"
"""Windows were tokenized, because no cache had them. Fields: windows; steps, the first and the last step that used them
(null: they were tokenized for a count before the first step)."""
RANKS_JOINED = "ranks_joined"
"""All ranks of an attempt have started. Fields: ranks (rank, node, node_id, pid, node_rank and local_rank of each)."""
NOT_SENT_TO_MLFLOW = "not_sent_to_mlflow"
"""The config asks for MLflow, but MLflow is not installed on rank 0, or not everything could be sent. Fields:
because."""
RECORD_REPAIRED = "record_repaired"
"""metrics.jsonl was broken; what can be trusted was kept. Fields: problems, kept (the file as it was)."""
SETTINGS_CHANGED = "settings_changed"
"""A run continues with other settings, which do not affect the result. Fields: old and new value of each."""
KERNELS_CHANGED = "kernels_changed"
"""A run continues with another attention, loss or way to call its state mixers than it was trained with, or with its
layers or updates newly compiled or no longer compiled: the same up to rounding. Fields: what, was, now, why."""
BITS_MAY_DIFFER = "bits_may_differ"
"""A run with run.exact continues on something else than it was trained on, or its ranks compute on different things, so
that its bits from here on need not be those that it would have had; or the attempt after one whose ranks did continues
from what that one has saved, and step is where it began. Fields: step, because; among_ranks (true), if ranks differ."""
FIRST_STEP = "first_step"
"""An attempt has ended its first step. Fields: seconds until then, in total and by phase, as the driver saw them."""
ATTEMPT_FAILED = "attempt_failed"
"""Fields: rank, node, cause, last_step (committed), logs (directory), reached (the step that it trained; 0: none),
seconds (since the attempt began), stop_seconds (of these, the last, in which it was known to have failed, and its ranks
were to end; null: Ray Train said both at once), and if it trained no step phases, those that it finished."""
STOP_SECONDS = "stop_seconds"
NO_ROOM = "no_room"
"""A command has ended: within `cluster.wait_minutes` the cluster had no room for the run. Fields: missing (what it was
waiting for, and what was free)."""
REGISTRY_REPAIRED = "registry_repaired"
"""Ray Train's own list of checkpoints was wrong or unreadable. Fields: what (what was done about it)."""
RESIZED = "resized"
"""The run goes on with another number of ranks. Fields: before, after, cause; seconds, from the end of the last attempt
to the end of the first step of this one; steps_redone, which had been trained but not saved."""
SLOW_RANK = "slow_rank"
"""The other ranks have been waiting for one rank. Fields: step, rank, node, seconds (of its own work in a step), others
(the median of theirs), spends_it_on (data, compute or storage)."""
STOPPED_EARLY = "stopped_early"
"""`eval.early_stop.patience` evaluations in a row have not improved, so the run is complete. Fields: step, metric, best
(its value) and best_step, and min_delta if there is one."""
AUDITED = "audited"
"""`raytune-fsdp audit --record` has trained steps of the run again. Fields: step (the last one), first, ranks,
difference (the first thing that differs; null: it has passed), exact (whether it had to be the same to the bit), cached
(whether tokenized rows were taken from the run's cache)."""
DRAINED = "drained"
"""A node of the run is about to be taken away. Fields: node, seconds_left (null: not known)."""

PRODUCTIVE_SHARE, STEPS_AGAIN = "goodput/productive_share", "goodput/steps_again"
"""Of the time in which a command worked on the run, the share in which steps were trained that stayed; and how many
steps were trained again. MLflow gets them, and goodput/seconds/<phase>, after the first step of each attempt but the
first, and at the end: record/goodput.py computes them from the record, and no line has them."""


def goodput_seconds(phase: str) -> str:
    return f"goodput/seconds/{phase}"


OF_GROUPS = {
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margins",
    "rewards/chosen": "rewards_chosen", "rewards/rejected": "rewards_rejected", "nll_loss": "nll_loss", "kl": "kl",
    "logps/chosen": "logps_chosen", "logps/rejected": "logps_rejected",
    "accuracy": "accuracy", "confidence": "confidence", "mae": "mae", "score": "score",
}  # fmt: skip
"""What is measured of pairs, judged answers and scores, eval/<dataset>/<name>, by what it is called in training."""
_HIGHER_OF_GROUPS = ("margins", "rewards_chosen", "logps_chosen", "f1", "auc", "r2", "pearson")
_ONLY = {"groups": ("logps_chosen", "kl", "rewards_chosen"), "scores": ("f1", "mae", "confidence")}
"""What nothing else has."""
_CALIBRATION = re.compile(r"eval/(.+)/calibration/([0-9]{2})/(confidence|right)")


def evaluation_on(dataset: str, kind: str) -> str:
    """Return the name of what is measured on a dataset, by what it is called in training."""
    return f"eval/{dataset}/{OF_GROUPS.get(kind, kind)}"


def measured_of(metric: str, measured: Collection[str]) -> str:
    """Return what a metric is of, by what else was measured: `groups` (pairs or judged answers), `scores` (classes or
    numbers), or `tokens`."""
    place = metric.rpartition("/")[0]
    for kind, only in _ONLY.items():
        if any(f"{place}/{each}" in measured for each in only):
            return kind
    return "tokens"


def of_calibration(metric: str) -> tuple[str, str, str] | None:
    """Return the dataset, the tenth of confidence and the kind of a point on a reliability curve; None: it is none."""
    found = _CALIBRATION.fullmatch(metric)
    return None if found is None else (found[1], found[2], found[3])


ACCURACY_OF_CHOICES = ("accuracy", "accuracy_normalised")
"""Accuracies of multiple choice: by the probability of each choice, and by its logarithm per character."""
EXACT_MATCH = "exact_match"


def evaluation_of(task: str, kind: str, subject: str | None) -> str:
    """Return the name of a share of right answers, over all questions of a task or over those of a subject."""
    return f"eval/{task}/{kind}" if subject is None else f"eval/{task}/{subject}/{kind}"


def is_of_subject(metric: str) -> bool:
    """Return whether a metric is about one of a task's many subjects, which are for curves and not for text."""
    return metric.startswith("eval/") and metric.count("/") > 2


def higher_is_better(metric: str | None) -> bool:
    """Return whether the highest value of a metric is the best, by its name. None is the mean loss: lowest is best."""
    return metric is not None and metric.rpartition("/")[2] in (
        *ACCURACY_OF_CHOICES,
        EXACT_MATCH,
        *_HIGHER_OF_GROUPS,
    )


def is_neutral(metric: str) -> bool:
    """Return whether neither higher nor lower values of a metric are better: mean scores, mean confidence."""
    return metric.startswith("eval/") and metric.rpartition("/")[2] in ("score", "confidence")


def highest_is_best(metric: str | None, best_is: object) -> bool:
    """Return whether the highest value of a metric is the best, by `checkpoint.best_is`, or by name if it is `auto`."""
    return best_is == "highest" or (best_is == "auto" and higher_is_better(metric))


def score(values: Mapping[str, float], metric: str | None) -> float | None:
    """Return one number for an evaluation: `metric`, or else the mean loss. None if it is missing or not finite."""
    losses = [value for name, value in values.items() if name.endswith("/loss")]
    found = values.get(metric, math.nan) if metric else sum(losses) / len(losses) if losses else math.nan
    return found if math.isfinite(found) else None


def is_cross_entropy(metric: str, measured: Collection[str]) -> bool:
    """Return whether a metric is a mean cross-entropy of tokens, whose exponential means something."""
    return metric.endswith("/loss") and measured_of(metric, measured) == "tokens"


def with_perplexity(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of an evaluation, with the perplexity after each loss of tokens, which alone is on record."""
    found: dict[str, float] = {}
    for key, value in values.items():
        found[key] = value
        if is_cross_entropy(key, values):
            found[f"{key.removesuffix('loss')}perplexity"] = perplexity(value)
    return found


def perplexity(loss: float) -> float:
    """Return exp(loss): guessing between this many equally likely tokens would give the same loss per token."""
    try:
        return math.exp(loss)
    except OverflowError:  # a loss over 709
        return math.inf


def labelled(key: str) -> tuple[str, str]:
    """Split a key into a Prometheus metric's name and the name of the dataset or node in it ("" if there is none)."""
    kind, _, rest = key.partition("/")
    of, _, figure = rest.rpartition("/")
    if kind == "perf" or key in EXPERT_LOAD:
        of, figure = "", rest
    elif kind == "train":
        longer = (*OF_GROUPS, *(name.removeprefix("train/") for name in FROM_TEACHER))
        figure = next((each for each in longer if "/" in each and rest.endswith(each)), figure)
        of = rest.removesuffix(figure).removesuffix("/")
    return re.sub(r"\W", "_", f"{kind}_{figure}", flags=re.ASCII), of


def _named(names: Sequence[str], values: Any) -> dict[str, Any]:
    """Return values by their names; nothing if a line has something else in their place."""
    known = isinstance(values, list | tuple) and len(values) == len(names)
    return dict(zip(names, values, strict=True)) if known else {}


def node_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what the line of a step says about the nodes, as named numbers; most lines say nothing.

    run/measure/meter.py measures them.
    """
    values: dict[str, float] = {}
    nodes = line.get("nodes")
    for entry in nodes if isinstance(nodes, list | tuple) else ():
        if isinstance(entry, list | tuple) and len(entry) == 1 + len(NODE_FIGURES) and isinstance(entry[0], str):
            named = zip(NODE_FIGURES, entry[1:], strict=True)
            values |= {f"system/{entry[0]}/{figure}": float(value) for figure, value in named if is_number(value)}
    return values


def once_in_gibibytes(values: Mapping[str, float]) -> dict[str, float]:
    """Return named numbers as charts want them: each once, and memory in GiB, as the end of its name then says."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if key.endswith("_bytes") or (key.startswith("system/") and key.endswith(_IN_BYTES)):
            found[f"{key.removesuffix('_bytes')}_gib"] = value / 2**30
        elif key not in OLDER:
            found[key] = value
    return found


def step_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the line of a step as named numbers, without those that it lacks, such as MFU on unknown devices."""
    of_ranks = {key: [f"{key}/{rank}" for rank in RANKS] for key in (STEP_SECONDS, DATA_SECONDS, COMPUTE_SECONDS)}
    load: Any = line.get("expert_load")
    known = isinstance(load, list | tuple) and len(load) > 0 and all(map(is_number, load))
    datasets, of_datasets = line.get("datasets"), dict[str, Any]()
    for entry in datasets if isinstance(datasets, list | tuple) else ():
        if isinstance(entry, list | tuple) and len(entry) == 4 and isinstance(entry[0], str):
            name, loss, accuracy, _ = entry
            of_datasets |= {f"train/{name}/loss": loss, f"train/{name}/accuracy": accuracy}
    values = {
        LOSS: line["trajectory"]["loss"],
        GRAD_NORM: line["trajectory"]["grad_norm"],
        LR: line["trajectory"]["lr"],
        EPOCH: line["trajectory"]["epoch"],
        ACCURACY: line.get("accuracy"),
        TOKEN_ACCURACY: line.get("accuracy"),
        **of_datasets,
        **{f"train/{key}": value for key, value in preferences_of(line)},
        **_named(EXPERT_LOAD, (sum(load) / len(load), max(load)) if known else None),
        EXPERTS_IDLE: line.get("experts_idle"),
        TOKENS_PER_SECOND: line.get("tokens_per_second"),
        STEP_SECONDS: line.get("step_seconds"),
        DATA_SECONDS: line.get("data_seconds"),
        MEMORY_BYTES: line.get("memory_bytes"),
        HOST_MEMORY_BYTES: line.get("host_memory_bytes"),
        GPU_UTILIZATION: line.get("gpu_utilization"),
        **_named(of_ranks[STEP_SECONDS], line.get("rank_seconds")),
        **_named(SPREAD, line.get("rank_seconds")),
        **_named(of_ranks[DATA_SECONDS], line.get("rank_data_seconds")),
        **_named(of_ranks[COMPUTE_SECONDS], line.get("rank_compute_seconds")),
        MFU: line.get("mfu"),
        **_named(PREDICTION_ERRORS, line.get("predicted")),
    }
    return {name: float(value) for name, value in values.items() if value is not None and is_number(value)}
