"""`tracking`: where metrics go besides the run directory."""

from __future__ import annotations

from pydantic import Field

from raytune_fsdp.config.base import Section


class MlflowConfig(Section):
    enabled: bool = True
    """Send the run to MLflow, where it is installed (`pip install 'raytune-fsdp[mlflow]'`). It gets the steps up to the newest checkpoint, so it lags by `checkpoint.every` at most."""

    uri: str | None = Field(default=None, repr=False)
    """Tracking server or database. Default: an SQLite file `mlflow.db` in `run.storage`. It is shown and written without its user and password, which are better set in the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    experiment: str = "raytune_fsdp"
    """Experiment the run belongs to."""


class TrackingConfig(Section):
    console: bool = True
    """Print how the run goes: on a terminal in lines that are rewritten in place, elsewhere a line per step."""

    console_every: int | None = Field(default=None, ge=1)
    """Steps between two printed lines, where the output is not a terminal. Default: as many as make 200 lines of the whole run, so each step of a short one has its line. Evaluations, saves and whatever else happens have theirs in any case."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow."""
