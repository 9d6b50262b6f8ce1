"""The directory of a sweep: `<storage>/<sweep>`, beside the runs of its trials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.tune.log import LOG_FILE, TIMES_FILE

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig  # loads pydantic
    from raytune_fsdp.tune.spec import SweepSpec

SWEEP_FILE, BEST_FILE, MLFLOW_ID_FILE = "sweep.yaml", "best.yaml", "mlflow_run_id"


@dataclass(frozen=True, slots=True)
class SweepDir:
    """The places of one sweep. Touches no file."""

    path: Path

    @classmethod
    def of(cls, spec: SweepSpec) -> SweepDir:
        return cls(Path(spec.storage).expanduser().absolute() / spec.name)

    @property
    def spec(self) -> Path:
        """The sweep as its last command understood it, for people."""
        return self.path / SWEEP_FILE

    @property
    def log(self) -> Path:
        return self.path / LOG_FILE

    @property
    def times(self) -> Path:
        return self.path / TIMES_FILE

    @property
    def best(self) -> Path:
        """The config of the best trial."""
        return self.path / BEST_FILE

    @property
    def mlflow_id(self) -> Path:
        return self.path / MLFLOW_ID_FILE

    @property
    def outputs(self) -> Path:
        """What the commands of trials have printed, a file for each run."""
        return self.path / "logs"

    def output(self, run: str) -> Path:
        return self.outputs / f"{run}.log"


def as_run(spec: SweepSpec, config: FinetuneConfig) -> FinetuneConfig:
    """Return the config of a run that would be where the sweep is: what locks a run locks the sweep. `config`: of any
    trial."""
    return config.with_sections(run={"name": spec.name, "storage": spec.storage}, checkpoint={"storage": None})
