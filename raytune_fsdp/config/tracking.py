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
    """Print a line per step."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow."""
