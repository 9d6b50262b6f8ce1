"""The run directory: the only owner of its names and places, and the only reader of `run.storage`.

<run.storage>/<run.name>/
  config.yaml, plan.json       the config of the last attempt; what follows from it
  data.json                    what became of the rows, if they were counted before training (counts.py)
  metrics.jsonl, events.jsonl  the history of the run; metrics.jsonl.aN.damaged: as attempt N found it, if it was broken
  attempts.jsonl               the command of each attempt: who started it, where, on which code
  evaluations.jsonl            what evaluations outside the ranks measured, in the order of the steps (the driver's)
  documents/attempt-N.jsonl    the loss of every document (tracking.documents)
  checkpoints/                 or elsewhere; then the file checkpoints_at names the place
  model/                       config and tokenizer: everything an export needs besides the weights
  export/, exports/step-N/     model directories: the one at the end, and those made during training
  logs/attempt-N/rank-R.log    the output of each rank, under Ray
  report/index.html, loss.png  the run on a page; the loss curve
  profile/                     traces and tables of the steps in profile.steps; what held the memory when it ran out
  mlflow_run_id                the run's id in MLflow
  wandb_run_id, wandb/         its id in Weights & Biases, and how much has been sent; what its library spools
  tensorboard/                 curves for TensorBoard
  lock, lock.beat              while a command works on the run: which one, and that it is alive (launch/run_lock.py)
  lineage.json                 in a fork: the runs and steps from which it comes (record/lineage.py)
  pins/                        the checkpoints with which forks of this run began: not pruned (run/forks/pins.py)
  begins_as.json               in a run by which an audit repeats another one: how that one was begun
  checkpoint-now.*, stop.*     requests for a checkpoint now, and to stop (checkpoint/on_demand.py)
<run.storage>/cache/           prepared rows and packed windows of all runs
<run.storage>/own-rows/        rows that programs have given to `finetune` (launch/own_rows.py)
<run.storage>/mlflow.db        all runs of this storage, unless tracking.mlflow.uri names a server
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import UnsoundError, read_file, reason
from raytune_fsdp.base.urls import is_url

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig  # loads pydantic, which a command's usage does without

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVENTS_FILE = "events.jsonl"
ATTEMPTS_FILE = "attempts.jsonl"
"""Who started each attempt: not in EVENTS_FILE, as trackers send its events wherever they are told to."""
MLFLOW_ID_FILE = "mlflow_run_id"
MLFLOW_MODEL = "mlflow_model"
"""The directory beside an export that describes it to MLflow."""
MODEL_FILES = "model"
RECIPE_FILE = "recipe.json"
"""In MODEL_FILES: how the model was trained, for the model card."""
MARK_FILE = "places.json"
"""In MODEL_FILES: the places outside of the run that its files name, with the marks of the users who chose them."""
CHECKPOINTS = "checkpoints"
REPORT = "report"
TENSORBOARD = "tensorboard"
WANDB_ID_FILE = "wandb_run_id"
LINEAGE_FILE = "lineage.json"
PINS = "pins"
_CHECKPOINTS_AT = "checkpoints_at"
_PLACE_BYTES = 16 << 10  # a path has up to 4 KiB
_FILES = (
    CONFIG_FILE, PLAN_FILE, DATA_FILE, METRICS_FILE, EVALUATIONS_FILE, EVENTS_FILE, ATTEMPTS_FILE, _CHECKPOINTS_AT,
    LINEAGE_FILE,
)  # fmt: skip
_LEVELS = {CHECKPOINTS: 1, MODEL_FILES: 2, REPORT: 1, TENSORBOARD: 1, "documents": 1, "exports": 1, "logs": 2,
           PINS: 1, MLFLOW_MODEL: 3, "profile": 1, "export": 0, "wandb": 0}  # fmt: skip
"""The directories of a run, and to what depth names in them are ours. The content of an export is compared with its
mark, and what wandb's library spools has links of its own."""
_OF_RAY = ("checkpoint_manager_snapshot.json", ".validate_storage_marker")
"""The files that Ray Train writes into a run."""


@dataclass(frozen=True, slots=True)
class _Named:
    """The place of a run under this name in its directory."""

    name: str

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The places of one run, as absolute paths, which mean the same in any working directory. Touches no file."""

    path: Path
    checkpoints: str
    """Directory or URL."""

    @classmethod
    def of(cls, config: FinetuneConfig) -> RunDir:
        """Return where the run of this config is, or will be."""
        path = storage_of(config) / config.run.name
        place = config.checkpoint.storage
        if place is None:
            return cls(path, str(path / CHECKPOINTS))
        root = place.rstrip("/") if is_url(place) else str(_absolute(place))
        return cls(path, f"{root}/{config.run.name}/{CHECKPOINTS}")

    config = _Named(CONFIG_FILE)
    plan = _Named(PLAN_FILE)
    data = _Named(DATA_FILE)
    metrics = _Named(METRICS_FILE)
    documents = _Named("documents")
    evaluations = _Named(EVALUATIONS_FILE)
    events = _Named(EVENTS_FILE)
    attempts = _Named(ATTEMPTS_FILE)
    checkpoints_at = _Named(_CHECKPOINTS_AT)
    beginning = _Named("begins_as.json")
    lineage = _Named(LINEAGE_FILE)
    pins = _Named(PINS)
    lock = _Named("lock")
    beat = _Named("lock.beat")
    model_files = _Named(MODEL_FILES)
    profile = _Named("profile")
    export = _Named("export")
    exports = _Named("exports")
    mlflow_id = _Named(MLFLOW_ID_FILE)

    @property
    def private(self) -> tuple[Path, ...]:
        """What tells how the run was made and what went through it: only owner and group may read it.

        Model, exports and checkpoints are left out: people pass them on and serve them.
        """
        own = (self.path / name for name in (*_FILES, REPORT, "documents", "logs", "wandb"))
        return (
            *own,
            self.model_files / RECIPE_FILE,
            self.model_files / MARK_FILE,
            report_of(self.path),
            curve_of(self.path),
        )

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"rank-{rank}.log"


def storage_of(config: FinetuneConfig) -> Path:
    """Return the directory of all runs, with `~` and relative paths resolved as this process sees them."""
    return _absolute(config.run.storage)


def forked_run(config: FinetuneConfig) -> Path | None:
    """Return the directory of the run that `run.fork` names: in `run.storage`, if it is a mere name."""
    if config.run.fork is None:
        return None
    path = Path(config.run.fork.run).expanduser()
    return storage_of(config) / path if len(path.parts) == 1 else path.absolute()


def cache_of(config: FinetuneConfig) -> Path:
    """Return the directory of prepared rows and windows."""
    return _absolute(config.data.cache.path) if config.data.cache.path else storage_of(config) / "cache"


def check_links(run_dir: Path) -> None:
    """Refuse a run that has a link where a file or a directory of its own belongs.

    What is written or removed there would be elsewhere. The run directory itself, and those above it, may be links.
    """
    for link in _links_in(run_dir):
        raise ResumeError(_refused_link(link, run_dir))


def check_checkpoint_links(checkpoints: str) -> None:
    """Refuse links among a run's checkpoints, if these are not in the run's directory."""
    place, model = Path(checkpoints), Path(checkpoints).parent / MODEL_FILES
    for link in (place, model, *_links_below(place, 1), *_links_below(model, 2)):
        if link.is_symlink():
            raise ResumeError(_refused_link(link, place.parent))


def _links_in(run_dir: Path) -> Iterator[Path]:
    for link in _links_below(run_dir, 1):  # metrics.jsonl.tmp, metrics.jsonl.a2.damaged: in the place of a file of ours
        if link.name in _LEVELS or link.name.startswith((*_FILES, *_OF_RAY)):
            yield link
    for name, levels in _LEVELS.items():
        yield from _links_below(run_dir / name, levels)


def _links_below(directory: Path, levels: int) -> Iterator[Path]:
    if not levels:
        return
    with suppress(OSError), os.scandir(directory) as entries:  # not there, or another user's
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)
            elif levels > 1 and entry.is_dir():
                yield from _links_below(Path(entry.path), levels - 1)


def _refused_link(link: Path, run_dir: Path) -> str:
    target = Path(os.path.realpath(link))
    here, there = shlex.quote(str(link)), shlex.quote(str(target))
    said = f"{link} is a link to {target}, and a run writes and removes nothing outside of its directory"
    if not target.is_dir():
        return f"{said}: remove it, or put the file itself in its place (`rm {here} && cp {there} {here}`)"
    moved = f"`rm {here} && mv {there} {here}`"
    if link != run_dir / CHECKPOINTS:
        return f"{said}: if that directory is the run's own, {moved} brings it back; if not, remove the link"
    name = run_dir.name
    # Not the directory that is moved, which cannot be moved into itself.
    storage = target.parent if target.name != name else target.parent / CHECKPOINTS
    if target.name == CHECKPOINTS and target.parent.name == name:
        storage, move = target.parent.parent, f"rm {here}"
    else:
        new = storage / name
        move = f"rm {here} && mkdir -p {shlex.quote(str(new))} && mv {there} {shlex.quote(str(new / CHECKPOINTS))}"
    return (
        f"{said}: `{move}`, then train with checkpoint.storage: {storage}, which keeps checkpoints there; or {moved} "
        "brings them back"
    )


def checkpoints_of(run_dir: Path) -> str:
    """Return the directory or URL of an existing run's checkpoints: what `checkpoints_at` names, if it exists."""
    check_links(run_dir)
    file = run_dir / _CHECKPOINTS_AT
    try:
        place = read_file(file, limit=_PLACE_BYTES).decode()
        if not place.isprintable():
            raise UnsoundError("is not a path or URL")
        return place
    except FileNotFoundError:
        return str(run_dir / CHECKPOINTS)
    except ValueError as error:
        raise ResumeError(
            f"{file} does not name a place ({reason(error)}); write the path or URL of the run's checkpoints into it"
        ) from error


def checkpoints_below(url: str) -> str:
    """Return the URL of the checkpoints of a run that is named by the URL above them."""
    return f"{url.rstrip('/')}/{CHECKPOINTS}"


def report_of(run_dir: Path) -> Path:
    """Return the path of the page about an existing run."""
    return run_dir / REPORT / "index.html"


def curve_of(run_dir: Path) -> Path:
    """Return the path of the picture of an existing run's loss."""
    return run_dir / REPORT / "loss.png"


def names_checkpoints(path: Path) -> bool:
    """Return whether this directory says that its checkpoints are elsewhere."""
    return os.path.lexists(path / _CHECKPOINTS_AT)


def is_run(path: Path) -> bool:
    """Return whether this is a run directory."""
    return (path / PLAN_FILE).is_file()


def is_place_of_exports(path: Path) -> bool:
    """Return whether a run exports to this path: `export/` of a run directory, or a directory in its `exports/`."""
    return (path.name == "export" and is_run(path.parent)) or (
        path.parent.name == "exports" and is_run(path.parent.parent)
    )


def mlflow_database(storage: Path) -> tuple[str, str]:
    """Return tracking URI and artifact root of the SQLite file in a storage directory."""
    storage = storage.resolve()
    return f"sqlite:///{storage / 'mlflow.db'}", str(storage / "mlartifacts")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
