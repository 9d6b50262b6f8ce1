"""The run directory: the only owner of the names and places in it, and the only reader of `run.storage`.

<run.storage>/<run.name>/
  config.yaml, plan.json       as it was run; what follows from it
  metrics.jsonl, events.jsonl  the history of the run
  checkpoints/                 or elsewhere, with the place in checkpoints_at
  model/                       config and tokenizer: what an export needs besides the weights
  export/, exports/step-N/     model directories: at the end, and beside training
  logs/attempt-N/rank-R.log    what each rank has printed, under Ray
  report/loss.png              the loss curve
  mlflow_run_id                the run's id with MLflow
  checkpoint-now.*             somebody asks for a checkpoint (checkpoint/on_demand.py)
<run.storage>/cache/           prepared rows and packed windows of all runs
<run.storage>/mlflow.db        every run of this storage, if no other server is named
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.urls import is_url

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
MODEL_FILES = "model"
RECIPE_FILE = "recipe.json"
"""In MODEL_FILES: how the model was trained, for the card."""
CHECKPOINTS = "checkpoints"
_CHECKPOINTS_AT = "checkpoints_at"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The places of one run. Absolute, so that a process in another directory sees the same; touches no file."""

    path: Path
    checkpoints: str
    """Directory or URL."""

    @classmethod
    def of(cls, config: FinetuneConfig) -> RunDir:
        """Where the run of this config is, or will be."""
        path = storage_of(config) / config.run.name
        place = config.checkpoint.storage
        if place is None:
            return cls(path, str(path / CHECKPOINTS))
        root = place.rstrip("/") if is_url(place) else str(_absolute(place))
        return cls(path, f"{root}/{config.run.name}/{CHECKPOINTS}")

    @property
    def config(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def plan(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def events(self) -> Path:
        return self.path / EVENTS_FILE

    @property
    def checkpoints_at(self) -> Path:
        return self.path / _CHECKPOINTS_AT

    @property
    def model_files(self) -> Path:
        return self.path / MODEL_FILES

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def loss_curve(self) -> Path:
        return self.path / "report" / "loss.png"

    @property
    def mlflow_id(self) -> Path:
        return self.path / "mlflow_run_id"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def log(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"rank-{rank}.log"


def storage_of(config: FinetuneConfig) -> Path:
    """The directory of all runs, with `~` and what is relative resolved as this process sees them."""
    return _absolute(config.run.storage)


def cache_of(config: FinetuneConfig) -> Path:
    """Where prepared rows and windows are kept."""
    return _absolute(config.data.cache.path) if config.data.cache.path else storage_of(config) / "cache"


def checkpoints_of(run_dir: Path) -> str:
    """Where the checkpoints of an existing run are: elsewhere, if it says so."""
    try:
        return (run_dir / _CHECKPOINTS_AT).read_text()
    except FileNotFoundError:
        return str(run_dir / CHECKPOINTS)


def checkpoints_below(url: str) -> str:
    """The same for a run that is named by the URL its checkpoints are below."""
    return f"{url}/{CHECKPOINTS}"


def is_run(path: Path) -> bool:
    """Whether this directory is a run's."""
    return (path / PLAN_FILE).is_file()


def mlflow_database(storage: Path) -> tuple[str, str]:
    """Tracking URI and artifact root of a storage directory that keeps its runs in an SQLite file."""
    storage = storage.resolve()
    return f"sqlite:///{storage / 'mlflow.db'}", str(storage / "mlartifacts")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
