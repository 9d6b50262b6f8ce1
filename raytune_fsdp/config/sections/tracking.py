"""`tracking`: where metrics go besides the run directory."""

from __future__ import annotations

import warnings
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.rules import Section, safe_name

with warnings.catch_warnings():
    # Every pydantic class has a method of this name, from ABCMeta, for registering classes; a section has no use for it.
    warnings.filterwarnings("ignore", 'Field name "register"', UserWarning)

    class MlflowConfig(Section):
        enabled: bool = True
        """Send the run to MLflow, where it is installed (`pip install 'raytune-fsdp[mlflow]'`). It gets the steps up to the newest checkpoint, so it lags by `checkpoint.every` at most: with `auto` by half an hour of training."""

        uri: str | None = Field(default=None, repr=False)
        """Tracking server or database. Default: an SQLite file `mlflow.db` in `run.storage`. It is shown and written without its user and password, which are better set in the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

        experiment: str = "raytune_fsdp"
        """Experiment the run belongs to."""

        parent: str | None = None
        """Id of the MLflow run below which its pages show this one. `raytune-fsdp sweep` sets it for its trials."""

        register: Annotated[str, AfterValidator(safe_name)] | None = None
        """Register the export at the end as a version of this model. A server gets a copy of its files; a database has the path of `mlflow_model/`, which describes `export/`. `mlflow.transformers` loads either."""

        @model_validator(mode="after")
        def _somewhere_to_register(self) -> Self:
            if self.register is not None and not self.enabled:
                raise ValueError(f"register={self.register} needs MLflow: set enabled=true, or leave register out")
            return self


class WandbConfig(Section):
    enabled: bool = False
    """Send the run to Weights & Biases (`pip install wandb`). The key is taken from the environment (WANDB_API_KEY), and so is everything else that its library reads there: WANDB_MODE=offline, WANDB_BASE_URL."""

    project: str = "raytune_fsdp"
    """Project the run belongs to."""

    entity: str | None = None
    """User or team of the project. Null: the key's default."""


class TensorboardConfig(Section):
    enabled: bool = False
    """Write curves for TensorBoard to `<run>/tensorboard`."""


class PrometheusConfig(Section):
    enabled: bool = False
    """Ray: publish the newest step among Ray's metrics, as `ray_raytune_fsdp_train_loss` and so on."""


class TrackingConfig(Section):
    console: bool = True
    """Print the progress of the run: on a terminal in lines that are rewritten in place, elsewhere line by line (`console_every`)."""

    console_every: int | None = Field(default=None, ge=1)
    """Steps between two printed lines, where the output is not a terminal. Default: so that the whole run has 200 lines; each step of a short run has its own. Evaluations, saves and other events have their lines in any case."""

    documents: bool = False
    """Record the loss of every document in every step, for `raytune-fsdp step --loss`: about ten bytes each, in `<run>/documents`."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""

    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig)
    """TensorBoard."""

    prometheus: PrometheusConfig = Field(default_factory=PrometheusConfig)
    """Prometheus."""
