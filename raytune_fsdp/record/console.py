"""Show a run in a terminal: a line per step, evaluations, events in words, and the loss curve at the end."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TextIO

from raytune_fsdp.base.hushed import is_verbose
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.record import names
from raytune_fsdp.record.screen_messages import Looks, message
from raytune_fsdp.record.tracker import RunStart, Status, Tracker

_WINDOW = 20
"""The remaining time is estimated from this many steps."""
_MOST_LINES = 200
"""Lines of steps in a run of any length, unless `tracking.console_every` sets the interval."""
_TELL_SECONDS = 0.1
"""Seconds between two messages to the region of a terminal, which is drawn as often."""
_BOLD, _YELLOW, _RESET = "\033[1m", "\033[33m", "\033[0m"
_LAST_WORDS = {"finished": "finished", "interrupted": "interrupted; the same command continues"}
_WORDS = {
    names.ATTEMPT_STARTED: "started on {world_size} workers",
    names.KERNELS: "attention {attention} ({attention_why}), loss {loss} ({loss_why}), layers {blocks} ({blocks_why})",
    names.TRAINING_FAILED: "training itself has failed, on rank {rank}: {cause}",
    names.COMPILED: "compiled {graphs} graphs up to step {step}",
    names.PROFILED: "profiled step {step}: {path}",
    names.SAVE_FAILED: "checkpoint of step {step} was not written, training goes on: {problem}",
    names.SAVE_POSTPONED: "checkpoint of step {step} is postponed: the previous one is still being written",
    names.NO_ROOM_TO_SAVE: "nothing is saved by the clock: storage has {free} bytes left, and that and the next save "
    "take {wanted}",
    names.ROOM_MADE: "storage has no room for another checkpoint, so recovery points were removed: {removed}",
    names.CHECKPOINT_DAMAGED: "checkpoint {path} is damaged ({problem}), so an older one is used",
    names.EXPORTED_ALONE: "{path} has the language model alone, a {model} without the parts that see: {because}",
    names.WINDOWS_BUILT: "tokenized {windows} windows of data",
    names.COLUMN_NOT_READ: "dataset {dataset}: column {column} is not read; {share:.1%} of {rows} rows have it",
    names.NOT_SENT_TO_MLFLOW: "not sent to MLflow: {because}",
    names.KERNELS_CHANGED: "{what} is {now} ({why}), and was {was} until here",
    names.BITS_MAY_DIFFER: "run.exact: {because}, so the bits after step {step} may be others",
    names.RESIZED: "resized from {before} to {after} workers",
}
_DETAILS = (names.KERNELS, names.SHARDED)
"""Events for those who look for them: in events.jsonl, in the report, and with --verbose."""
_OF_TIME = ("reached", "seconds", names.STOP_SECONDS, "phases")
"""What a failure says for record/goodput.py."""
_RECEIVED = {"weights_bytes": "of weights", "gradients_bytes": "of gradients", "attention_bytes": "for attention"}
# Bits of a braille character, by dot: left and right column, from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


class ConsoleTracker(Tracker):
    """Print each line to `stream` (stdout) at once.

    Where a region of the terminal shows the steps (record/screen_messages.py), it gets messages instead of their lines.
    """

    def __init__(self, stream: TextIO | None = None, *, every: int | None = None) -> None:
        """`every`: steps between two lines of steps (`tracking.console_every`)."""
        self._stream = sys.stdout if stream is None else stream
        self._looks = Looks.of(self._stream)
        self._every = every
        self._name = ""
        self._total: int | None = None
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._losses: list[float] = []
        self._first_step = 0
        self._message: str | None = None
        self._told_at = 0.0
        self._evaluated: list[str] = []
        self._finished = False

    def start(self, run: RunStart) -> None:
        self._name, self._total = run.name, run.total_steps
        where = f"continues after step {run.resumed_from}" if run.resumed_from else "from the beginning"
        self._print(f"{run.name}: attempt {run.attempt}, {where}", _BOLD)
        for line in _about(run):
            self._print(f"     {line}")

    def steps(self, metrics: Sequence[StepMetrics], world_size: int, attempt: int) -> None:
        # The first steps waited for the first batch, minutes sometimes; no later step does.
        waited = metrics[0].data_seconds / len(metrics) if metrics and not self._losses else 0.0
        every = self._every or math.ceil((self._total or 1) / _MOST_LINES)
        for step in metrics:
            first = not self._first_step
            self._first_step = self._first_step or step.step  # steps count from 1, and an attempt may begin later
            self._losses.append(step.loss)
            self._seconds.append(max(0.0, step.step_seconds - waited))
            due = step.step % every == 0 or step.step == self._total
            if not self._looks.live and (first or step.skipped or due):
                fields = [
                    f"step {self._place(step.step)}",
                    f"loss {step.loss:8.4f}",
                    *_preferred(step),
                    f"grad {step.grad_norm:8.3f}",
                    f"lr {step.lr:8.2e}",
                    f"{short(step.tokens_per_second):>6} tok/s",
                    *([f"mfu {100 * step.mfu:4.1f}%"] if step.mfu is not None else []),
                    f"mem {gibibytes(step.memory_bytes):>10}",
                    *([f"eta {duration(self._left(step))}"] if self._total is not None else []),
                    *(["skipped"] if step.skipped else []),
                ]
                self._print("  ".join(fields), _YELLOW if step.skipped else "")
        if self._looks.live and metrics:
            self._message = self._message_of(metrics[-1], world_size)
            if time.monotonic() - self._told_at >= _TELL_SECONDS:
                self._tell()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._evaluated = [f"{key.removeprefix('eval/')} {value:.4f}" for key, value in values.items()]
        self._print(f"eval {self._place(step)}  {evaluation_in_words(values)}", _BOLD)

    def event(self, name: str, /, **fields: object) -> None:
        if name == names.WINDOWS_BUILT and fields.get("steps"):
            return  # the usual course of a run whose data is tokenized as it goes
        if name in (names.COLUMN_NOT_READ, names.DIGESTED):
            return  # said where the data was opened; for other commands to compare
        if name in _DETAILS and not is_verbose():
            return
        text = event_in_words(name, redact(fields))
        if name == names.PREDICTED and isinstance(each := fields.get("step_seconds"), int | float) and self._total:
            text += f", the {self._total:,} steps about {took(each * self._total)}"
        self._print(f"     {text}", _YELLOW if name not in (names.SAVED, names.PREDICTED) else "")

    def finish(self, status: Status) -> None:
        if self._finished:
            return
        self._finished = True
        if self._looks.live:
            self._message = message()  # nothing is trained now
            self._tell()
        if status in ("failed", "handed_over"):
            return  # perhaps another attempt follows; if none does, the launcher says what has failed
        if len(self._losses) > 2:  # two make no curve
            last = self._first_step + len(self._losses) - 1
            self._print(f"loss, steps {self._first_step} to {last}")
            self._print(curve(self._losses, width=60, height=8))
        self._print(_LAST_WORDS[status], _BOLD)

    def _message_of(self, step: StepMetrics, world_size: int) -> str:
        """Return the message that shows a step in the region. What matters most comes first, as a narrow terminal shows
        fewer fields."""
        wait = step.data_seconds / step.step_seconds if step.step_seconds > 0 else 0.0
        fields = [
            f"loss {step.loss:.4f}",
            *_preferred(step),
            f"lr {step.lr:.2e}",
            f"{short(step.tokens_per_second)} tok/s",
            *([f"mfu {100 * step.mfu:.1f}%"] if step.mfu is not None else []),
            f"mem {gibibytes(step.memory_bytes)}",
            f"data wait {100 * min(1.0, wait):.0f}%",
            f"grad {step.grad_norm:.3f}",
            f"{step.step_seconds:.3g} s/step",
            f"epoch {step.epoch:.2f}",
            f"workers {world_size}",
            *self._evaluated,
        ]
        left = {"left": self._left(step)} if self._total is not None else {}
        title = f"{self._name}  step {step.step:,}" + (f"/{self._total:,}" if self._total is not None else "")
        return message(title=title, done=step.step, total=self._total or 0, fields=fields, **left)

    def _left(self, step: StepMetrics) -> float:
        return fmean(self._seconds) * max((self._total or 0) - step.step, 0)

    def _place(self, step: int) -> str:
        return f"{step:>6}" if self._total is None else f"{step:>{len(str(self._total))}}/{self._total}"

    def _tell(self) -> None:
        if self._message is not None:
            self._message, found, self._told_at = None, self._message, time.monotonic()
            print(found, file=self._stream, flush=True)

    def _print(self, text: str, colour: str = "") -> None:
        self._tell()
        # Models answer, and rows say, whatever they like: no text of theirs may steer the terminal.
        text = printable(text, keep="\n\t")
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # A pipe in the C locale takes ASCII only: a question mark in a curve is better than the end of the run.
        text = text.encode(encoding, "replace").decode(encoding)
        coloured = f"{colour}{text}{_RESET}" if colour and self._looks.colours else text
        print(coloured, file=self._stream, flush=True)


def _preferred(step: StepMetrics) -> Iterator[str]:
    """Say how many pairs are right, and how far apart rewards are; or how far the student is from its teacher."""
    found = {f"train/{key}": value for key, value in step.preferences}
    if names.PAIRS_RIGHT in found:
        yield f"right {100 * found[names.PAIRS_RIGHT]:5.1f}%"
    if names.REWARDS[2] in found:
        yield f"margin {found[names.REWARDS[2]]:7.3f}"
    for name, said in zip(names.FROM_TEACHER, ("kl", "reverse kl", "nll"), strict=True):
        if name in found:
            yield f"{said} {found[name]:.4f}"


def _about(run: RunStart) -> Iterator[str]:
    """Say what is trained, and how long, to somebody who sees a run for the first time."""
    model = run.params.get("model.path") or run.params.get("model.architecture.model_type")
    size = run.parameters.words if run.parameters is not None else ""
    if said := ", ".join(filter(None, (str(redact(model)) if model else "", size))):
        yield said
    batch, at_once = run.plan.get("global_batch"), run.plan.get("micro_batch")
    if isinstance(batch, int) and run.total_steps is not None:
        yield f"{run.total_steps:,} steps of {batch:,} samples, {at_once} at a time on each worker"


def evaluation_in_words(values: Mapping[str, float]) -> str:
    """Return the values of an evaluation as one line, without those of single subjects."""
    return "  ".join(
        f"{key.removeprefix('eval/')} {value:.4f}"
        + (f" (perplexity {names.perplexity(value):.4g})" if names.is_cross_entropy(key, values) else "")
        for key, value in values.items()
        if not names.is_of_subject(key)
    )


def _memory_short(fields: Mapping[str, object]) -> str:
    wanted, free = (gibibytes(n) if isinstance(n := fields.get(key), int) else n for key in ("wanted", "free"))
    other = "checkpoint.asynchronous=false, which copies nothing"
    if fields.get("peer_copies"):
        other = "checkpoint.peer_copies=0, which keeps nothing there"
    return (
        f"node {fields.get('node')} has {free} of free memory, and saves copy {wanted} there: it may run out at the "
        f"first one; give it more, or set {other}"
    )


def event_in_words(name: str, fields: Mapping[str, object]) -> str:
    """Say an event as a person would; an unknown one by its name and fields."""
    get = fields.get
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in fields.items()}
    unsaid = _OF_TIME if name == names.ATTEMPT_FAILED else ("step",)
    rest = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items() if key not in unsaid)
    if name in _WORDS:
        also = [key for key in ("mixers", "experts", "update") if key in fields] if name == names.KERNELS else []
        more = "".join(f", {key} {{{key}}} ({{{key}_why}})" for key in also)
        text = f"{_WORDS[name]}{more}".format_map(defaultdict(lambda: "?", fields))
        return re.sub(r"\b1 (worker|graph|window)s\b", r"1 \1", text)
    match name:
        case names.SAVED:
            seconds, num_bytes = get("seconds"), get("bytes")
            took = f" in {seconds:.1f} s" if isinstance(seconds, int | float) else ""
            size = f", {gibibytes(num_bytes)}" if isinstance(num_bytes, int) else ""
            return f"saved step {get('step')}{took}{size}{' (recovery point)' if get('recovery') else ''}"
        case names.SKIPPED_UPDATE:
            return f"step {get('step')}: update skipped" + (f" ({rest})" if rest else "")
        case names.ANSWERED:
            return f"asked: {get('prompt')}\n     answered: {get('answer')}"
        case _ if name in _IN_WORDS:
            return _IN_WORDS[name](fields)
        case names.SLOW_RANK:
            mine, others = (f"{n:.3f}" if isinstance(n := get(key), float) else n for key in ("seconds", "others"))
            return (
                f"step {get('step')}: the others wait for rank {get('rank')} on {get('node')}: its own work takes "
                f"{mine} s a step, theirs {others} s; what takes longer is its {get('spends_it_on')}"
            )
        case names.SHARDED:
            units = get("units")
            listed = ", ".join(map(_unit, units)) if isinstance(units, list) else units
            sizes = [f"{gibibytes(sent)} {of}" for key, of in _RECEIVED.items() if isinstance(sent := get(key), int)]
            received = f"; in a step a rank receives {', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else ""
            return f"gathered {get('gathered')}: {listed}{received}"  # an older version wrote no sizes
        case names.ROWS_SKIPPED:
            reasons, rows = get("reasons"), get("rows")
            counts = ", ".join(f"{n} {reason}" for reason, n in reasons.items()) if isinstance(reasons, dict) else ""
            first = f"; the first: {rows[0]['message']}" if isinstance(rows, list) and rows else ""
            return f"rows left out: {counts}{first}"
        case names.SETTINGS_CHANGED:
            changes = ((key, *value) for key, value in fields.items() if isinstance(value, list) and len(value) == 2)
            return "settings changed: " + ", ".join(f"{key} {old} -> {new}" for key, old, new in changes)
        case names.RECORD_REPAIRED:
            problems = get("problems")
            what = "; ".join(map(str, problems)) if isinstance(problems, list) else str(problems)
            return f"metrics.jsonl was broken: {what}" + (f" (as it was: {get('kept')})" if get("kept") else "")
    step = f" at step {fields['step']}" if "step" in fields else ""
    return name.replace("_", " ") + step + (f": {rest}" if rest else "")


def _reference(fields: Mapping[str, object]) -> str:
    made, windows, documents, seconds, path = map(fields.get, ("computed", "windows", "documents", "seconds", "path"))
    how = f"{made} of {windows} windows computed in {seconds} s" if made else "as they were computed before"
    return f"the reference's log-probabilities of {documents} documents: {how} ({path})"


def _teacher(fields: Mapping[str, object]) -> str:
    made, windows, documents, seconds, path = map(fields.get, ("computed", "windows", "documents", "seconds", "path"))
    how = f"{made} of {windows} windows computed in {seconds} s" if made else "as they were computed before"
    rests = fields.get("not_kept")
    left = [
        f"{rest['mean']:.2%} in {name} on average, at most {rest['largest']:.1%} of one token's"
        for name, rest in (rests.items() if isinstance(rests, dict) else ())
        if isinstance(rest, dict) and all(isinstance(rest.get(key), int | float) for key in ("mean", "largest"))
    ]
    return (
        f"the predictions of {fields.get('model')} in {documents} documents: {how} ({path}); of its probability, "
        f"top_k={fields.get('top_k')} leaves out {'; '.join(left) or 'nothing'}"
    )


def _predicted(fields: Mapping[str, object]) -> str:
    kept, peak, seconds = (fields.get(key) for key in ("kept_bytes", "peak_bytes", "step_seconds"))
    if not isinstance(kept, int) or not isinstance(peak, int):
        return f"memory was not predicted: {fields.get('because')}"
    step = f"; a step takes about {took(seconds)}" if isinstance(seconds, int | float) else ""
    return f"memory of each worker: {gibibytes(peak)} at the most (predicted), {gibibytes(kept)} all the time{step}"


def _checked(fields: Mapping[str, object]) -> str:
    found = [
        f"{what} {off:+.2%}"
        for name, what in (("kept", "what a rank keeps"), ("peak", "its peak"), ("seconds", "the time of a step"))
        if isinstance(off := fields.get(f"{name}_error"), int | float)
    ]
    return f"predicted, compared with what is measured at step {fields.get('step')}: {', '.join(found) or 'nothing'}"


def _notice_short(fields: Mapping[str, object]) -> str:
    notices = fields.get("notices")
    listed = [
        f"the {seconds:g} s {_NOTICES.get(what, what)}"
        for what, seconds in (notices.items() if isinstance(notices, dict) else ())
        if isinstance(seconds, int | float)
    ]
    took = f"{seconds:.0f} s" if isinstance(seconds := fields.get("seconds"), int | float) else "?"
    return (
        f"a save takes {took}, longer than {' and '.join(listed) or '?'}: a run that is ended so may lose what it has "
        "trained since its last checkpoint. Make that time longer where you can, save more often (checkpoint.every), "
        "or write to faster storage"
    )


def _stopped_early(fields: Mapping[str, object]) -> str:
    get, best = fields.get, fields.get("best")
    by = f" by more than {least} (eval.early_stop.min_delta)" if (least := get("min_delta")) else ""
    since = f"since step {get('best_step')} ({f'{best:.4f}' if isinstance(best, float) else best})"
    return f"step {get('step')}: {get('metric')} has not improved{by} {since}, so the run ends here"


def _audited(fields: Mapping[str, object]) -> str:
    wrong = fields.get("difference")
    found = "the same" if wrong is None else f"not the same: {wrong}"
    return f"audited: steps {fields.get('first')} to {fields.get('step')} were trained again, and are {found}"


def _forked(fields: Mapping[str, object]) -> str:
    changed = fields.get("changed")
    pairs = changed.items() if isinstance(changed, dict) else ()
    changes = [f"{key} {pair[0]} -> {pair[1]}" for key, pair in pairs if isinstance(pair, list) and len(pair) == 2]
    said = ", ".join(changes) or "nothing changed"
    return f"a fork of {fields.get('run')} after step {fields.get('step')}, with {said}"


_IN_WORDS = {
    names.FORKED: _forked,
    names.AUDITED: _audited,
    names.PREDICTED: _predicted,
    names.MEMORY_SHORT: _memory_short,
    names.REFERENCE: _reference,
    names.TEACHER: _teacher,
    names.PREDICTION_CHECKED: _checked,
    names.NOTICE_SHORT: _notice_short,
    names.STOPPED_EARLY: _stopped_early,
}
_NOTICES = {
    "spot": "between a spot machine's notice and its end",
    "job_stop": "that `ray job stop` waits (RAY_JOB_STOP_WAIT_TIME_S where the head was started)",
    "pod": "that Ray gives a pod that is to end (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S in every pod)",
    "scheduler": "that its scheduler gives (RAYTUNE_FSDP_STOP_SECONDS)",
    "ranks": "that ranks have after a signal without Ray",
}


def _unit(unit: object) -> str:
    if not isinstance(unit, dict) or not isinstance(unit.get("bytes"), int):
        return str(unit)
    count, size = unit.get("count"), gibibytes(unit["bytes"])
    return f"{unit.get('name')} {size}" if count == 1 else f"{count} x {unit.get('name')} of {size}"


def short(value: float) -> str:
    """Return a count with three digits: 987, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return str(value)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:  # 999.5 would round to "1e+03"
            return f"{value / scale:.3g}{unit}" if abs(value) < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def gibibytes(num_bytes: int) -> str:
    """Return a size in GiB; less than a tenth of one in smaller units, so that it is not `0.00 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale / 10:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 2d 3h, 1h 05m, 3m 20s, 12s."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def took(seconds: float) -> str:
    """Return a duration in words; a short one with two digits, in s, ms or µs."""
    if not 0 <= seconds < 9.95:
        return duration(seconds)
    if seconds >= 0.00995 or not seconds:
        return f"{seconds:.2g} s"
    return f"{1e3 * seconds:.2g} ms" if seconds >= 0.0000995 else f"{1e6 * seconds:.2g} µs"


def curve(losses: Sequence[float], width: int, height: int) -> str:
    """Draw the losses in `height` lines of at most `width` braille characters, with the scale at the left.

    If there are more losses than dots in a line, each dot is the mean of several. A loss that is not finite is a gap.
    """
    # A braille character has two dots across and four down.
    points = _pooled(losses, 2 * width)
    finite = [value for value in points if math.isfinite(value)]
    if not finite:
        return "(no finite loss)"
    low, high = min(finite), max(finite)
    rows = 4 * height
    scale = (rows - 1) / (high - low) if high > low else 0.0
    cells = [[0] * math.ceil(len(points) / 2) for _ in range(height)]
    previous: int | None = None
    for column, value in enumerate(points):
        if not math.isfinite(value):
            previous = None
            continue
        row = round((high - value) * scale)
        # Joined to the previous point, so that a steep curve stays one line.
        start = row if previous is None else previous + (row > previous) - (row < previous)
        for dot in range(min(start, row), max(start, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        previous = row
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"} if height > 1 else {0: f"{high:.4g}"}
    margin = max(map(len, labels.values()))
    texts = ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
    return "\n".join(f"{labels.get(row, ''):>{margin}} ┤{text}" for row, text in enumerate(texts))


def _pooled(values: Sequence[float], count: int) -> list[float]:
    if len(values) <= count:
        return list(values)
    pooled = []
    for index in range(count):
        share = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in share if math.isfinite(value)]
        pooled.append(fmean(finite) if finite else math.nan)
    return pooled
