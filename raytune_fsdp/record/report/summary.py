"""Sum up a finished run: did it learn, what does it answer, where is it, what comes next."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.base.untrusted import MIB, printable, read_json
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.plan.run_dir import EVENTS_FILE, METRICS_FILE, MODEL_FILES
from raytune_fsdp.record.goodput import known_goodput
from raytune_fsdp.record.jsonl import all_evaluations, each_event
from raytune_fsdp.record.lines import preferences_of, step_of
from raytune_fsdp.record.names import (
    ANSWERED,
    PAIRS_RIGHT,
    REWARDS,
    higher_is_better,
    is_cross_entropy,
    is_neutral,
    is_of_subject,
    perplexity,
)
from raytune_fsdp.record.report.curves import NOT_INSTALLED, can_draw
from raytune_fsdp.record.report.overview import first_step, last_step


def summary(
    run_dir: Path,
    *,
    checkpoint: str,
    export: Path | None,
    curve: Path | None,
    report: Path | None = None,
    pushed: str | None = None,
    registered: str | None = None,
) -> str:
    """Return a few lines about a finished run, from its files."""
    why = "it could not be drawn" if can_draw() else NOT_INSTALLED
    time = known_goodput(run_dir)
    rows = {
        "time": None if time is None else time.in_words(),
        "run": _short(run_dir),
        "checkpoint": checkpoint if is_url(checkpoint) else _short(Path(checkpoint)),
        "export": _short(export) if export is not None else None,
        "pushed to": pushed,
        "registered": registered,
        "report": _short(report) if report is not None else None,
        "loss curve": _short(curve) if curve is not None else f"none, {why}",
    }
    places = [f"{name:12}{value}" for name, value in rows.items() if value is not None]
    return "\n".join([*_losses(run_dir), *_before_and_after(_answers(run_dir)), "", *places])


def _losses(run_dir: Path) -> Iterator[str]:
    """Yield what changed: the loss, and every number of the evaluations."""
    metrics = run_dir / METRICS_FILE
    first, last = first_step(metrics), last_step(metrics)
    if first is not None and last is not None:
        count, (one, other) = step_of(last) - step_of(first) + 1, (each["trajectory"]["loss"] for each in (first, last))
        yield f"loss {one:.4f} -> {other:.4f} in {count} steps"
        pairs = [dict(preferences_of(each)) for each in (first, last)]
        if all(PAIRS_RIGHT.removeprefix("train/") in each for each in pairs):
            right, margin = (name.removeprefix("train/") for name in (PAIRS_RIGHT, REWARDS[2]))
            yield (
                f"right pairs {' -> '.join(f'{each[right]:.1%}' for each in pairs)}, margin of their rewards "
                f"{' -> '.join(f'{each[margin]:.3f}' for each in pairs)}"
            )
    evals = all_evaluations(run_dir)
    for name in dict.fromkeys(name for values in evals.values() for name in values if not is_of_subject(name)):
        series = {step: values[name] for step, values in evals.items() if name in values}
        steps = list(series)
        ends = [series[step] for step in dict.fromkeys((steps[0], steps[-1]))]  # of one evaluation once
        text = f"{printable(name)} {' -> '.join(f'{value:.4f}' for value in ends)}"
        if is_cross_entropy(name, set().union(*evals.values())):
            text += f" (perplexity {' -> '.join(f'{perplexity(value):.4g}' for value in ends)})"
        finite = [step for step in steps if math.isfinite(series[step])]
        sign = -1.0 if higher_is_better(name) else 1.0
        best = min(finite, key=lambda step: sign * series[step], default=steps[-1])
        yield text if best == steps[-1] or is_neutral(name) else f"{text}, best {series[best]:.4f} at step {best}"


def _answers(run_dir: Path) -> list[Mapping[str, Any]]:
    found = [event["fields"] for event in each_event(run_dir / EVENTS_FILE) if event["event"] == ANSWERED]
    kinds = {"prompt": str, "answer": str, "step": int}
    return [fields for fields in found if all(isinstance(fields.get(key), kind) for key, kind in kinds.items())]


def _scores(run_dir: Path) -> bool:
    """Return whether a run's model scores texts, by the class that its config.json names."""
    try:
        named = read_json(run_dir / MODEL_FILES / "config.json", limit=MIB)["architectures"]
        return any(str(name).endswith("ForSequenceClassification") for name in named)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def next_commands(run_dir: Path, *, export: Path | None, mlflow_uri: str | None, mlflow_page: str | None = None) -> str:
    """Return commands to try with a finished run."""
    program, model = _program("raytune-fsdp"), shlex.quote(_short(export or run_dir))
    prompts = [fields["prompt"] for fields in _answers(run_dir)]
    question = shlex.quote(prompts[0]) if prompts and prompts[0].isprintable() else '"a question"'
    commands = [f"{program} generate {model} {question}"]
    if _scores(run_dir):  # it answers nothing, and is measured where there is something to measure it on
        commands = [f"{program} eval {shlex.quote(_short(run_dir))}"] if all_evaluations(run_dir) else []
    if export is None:
        commands.append(f"{program} export {model} my-model   (a Hugging Face model directory)")
    if mlflow_uri is not None:
        shown = shown_uri(mlflow_uri)
        login = "" if shown == mlflow_uri else "   (with the database's user and password)"
        is_server = mlflow_uri.startswith(("http://", "https://", "databricks"))
        ui = f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(shown)}{login}"  # a database has no page
        page = "" if mlflow_page is None or shown.startswith("databricks") else f"/{mlflow_page}"
        commands.append(f"{shown.rstrip('/')}{page}   (MLflow)" if is_server else ui)
        if page and not is_server:
            commands.append(f"  then http://127.0.0.1:5000{page}")
    commands.append(f"{program} train --help   (your own model and data: README.md)")
    return "\n".join(["next:", *(f"  {command}" for command in commands)])


def _program(name: str) -> str:
    """Return a command as it can be typed here: with its path if its environment is not active."""
    return name if shutil.which(name) else _short(Path(sys.executable).parent / name)


def _before_and_after(answers: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each question with its first and its last answer."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:  # the same question may end several conversations
        series.setdefault(repr((answer["prompt"], answer.get("messages"))), []).append(answer)
    for said in series.values():
        yield ""
        yield "  " + printable(said[0]["prompt"], keep="\n")
        yield f"    step {said[0]['step']:>5}: {_readable(said[0]['answer'])}"
        if len(said) > 1:
            yield f"    step {said[-1]['step']:>5}: {_readable(said[-1]['answer'])}"


def _readable(text: str) -> str:
    """Return an answer on one line; an untrained model may answer with any characters."""
    clean = printable(text).replace("\ufffd", "·")
    return clean[:100] + ("..." if len(clean) > 100 else "") or "(nothing)"


def _short(path: Path) -> str:
    """Return the path relative to the working directory, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
