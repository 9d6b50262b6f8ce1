"""What a person wants to know when a run has ended: did it learn, what does it answer, where is it, what comes next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.report.figure import NOT_INSTALLED, can_draw
from raytune_fsdp.rundir import EVENTS_FILE, METRICS_FILE
from raytune_fsdp.tracking.jsonl import read_events, read_metrics
from raytune_fsdp.tracking.names import ANSWERED, perplexity
from raytune_fsdp.urls import is_url


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
    """A few lines about a finished run, from its files."""
    lines = read_metrics(run_dir / METRICS_FILE)
    steps = [line["trajectory"] for line in lines if line["kind"] == "step"]
    evals = [line["values"] for line in lines if line["kind"] == "eval"]
    answers = [e["fields"] for e in read_events(run_dir / EVENTS_FILE) if e["event"] == ANSWERED]
    answers = [fields for fields in answers if {"prompt", "answer", "step"} <= fields.keys()]
    parts = [f"loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f} in {len(steps)} steps"]
    for name in dict.fromkeys(name for values in evals for name in values):
        series = [values[name] for values in evals if name in values]
        also = f" (perplexity {perplexity(series[0]):.4g} -> {perplexity(series[-1]):.4g})"
        parts.append(f"{name} {series[0]:.4f} -> {series[-1]:.4f}{also if name.endswith('/loss') else ''}")
    parts += list(_before_and_after(answers))
    parts += [
        "",
        f"run         {_short(run_dir)}",
        f"checkpoint  {checkpoint if is_url(checkpoint) else _short(Path(checkpoint))}",
    ]
    if export is not None:
        parts.append(f"export      {_short(export)}")
    if pushed is not None:
        parts.append(f"pushed to   {pushed}")
    if registered is not None:
        parts.append(f"registered  {registered}")
    why = "it could not be drawn" if can_draw() else NOT_INSTALLED
    if report is not None:
        parts.append(f"report      {_short(report)}")
    parts.append(f"loss curve  {_short(curve) if curve is not None else f'none, {why}'}")
    return "\n".join(parts)


def next_commands(run_dir: Path, *, export: Path | None, mlflow_uri: str | None) -> str:
    """Commands to try with a finished run."""
    model = _short(export or run_dir)
    commands = [f'{_program("raytune-fsdp")} generate {model} "What does FSDP shard?"']
    if mlflow_uri is not None:
        commands.append(_mlflow(mlflow_uri))
    commands.append(f"{_program('raytune-fsdp')} train --help   (your own model and data: README.md)")
    return "\n".join(["next:", *(f"  {command}" for command in commands)])


def _mlflow(uri: str) -> str:
    """How to look at the runs: a server has a page, a database needs a program that shows it."""
    shown = shown_uri(uri)
    if uri.startswith(("http://", "https://", "databricks")):
        return f"{shown}   (MLflow)"
    login = "" if shown == uri else "   (with the database's user and password)"
    return f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(shown)}{login}"


def _program(name: str) -> str:
    """A command as it can be typed here: with its path if its environment is not active."""
    return name if shutil.which(name) else _short(Path(sys.executable).parent / name)


def _before_and_after(answers: list[Mapping[str, Any]]) -> Iterator[str]:
    """Each question with its first and its last answer."""
    for prompt in dict.fromkeys(answer["prompt"] for answer in answers):
        said = [answer for answer in answers if answer["prompt"] == prompt]
        yield ""
        yield f"  {prompt}"
        yield f"    step {said[0]['step']:>5}: {_readable(said[0]['answer'])}"
        if len(said) > 1:
            yield f"    step {said[-1]['step']:>5}: {_readable(said[-1]['answer'])}"


def _readable(text: str) -> str:
    """An answer on one line, even that of an untrained model, which may print anything."""
    clean = "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in text)
    return clean[:100] + ("..." if len(clean) > 100 else "") or "(nothing)"


def _short(path: Path) -> str:
    """The path relative to the working directory, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
