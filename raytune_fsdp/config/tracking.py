"""`tracking`: where metrics go besides the run directory."""

from __future__ import annotations

import warnings
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.base import Section
from raytune_fsdp.config.rules import safe_name

with warnings.catch_warnings():
    # Every class of pydantic has a method of this name, from ABCMeta, for classes; a section has no use for it.
    warnings.filterwarnings("ignore", 'Field name "register"', UserWarning)

    class MlflowConfig(Section):
        enabled: bool = True
        """Send the run to MLflow, where it is installed (`pip install 'raytune-fsdp[mlflow]'`). It gets the steps up to the newest checkpoint, so it lags by `checkpoint.every` at most."""

        uri: str | None = Field(default=None, repr=False)
        """Tracking server or database. Default: an SQLite file `mlflow.db` in `run.storage`. It is shown and written without its user and password, which are better set in the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

        experiment: str = "raytune_fsdp"
        """Experiment the run belongs to."""

        register: Annotated[str, AfterValidator(safe_name)] | None = None
        """Register the export at the end as a version of this model. A server gets a copy of its files; a database has the path of `export/`."""

        @model_validator(mode="after")
        def _somewhere_to_register(self) -> Self:
            if self.register is not None and not self.enabled:
                raise ValueError(f"register={self.register} needs MLflow: set enabled=true, or leave register out")
            return self


class TrackingConfig(Section):
    console: bool = True
    """Print a line per step."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow."""
