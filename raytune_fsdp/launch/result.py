"""What a finished run left, for the program that called `finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.plan.run_dir import EVENTS_FILE, METRICS_FILE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """The results of a finished run."""

    run_dir: Path
    steps: int
    """The step at which the run ended."""
    ended_early: bool
    """Whether its evaluations ended it (`eval.early_stop`), before its last step."""
    trained: int
    """Steps trained by this call; 0 if the run was complete already."""
    checkpoint: str
    """The newest checkpoint: directory or URL."""
    export: Path | None
    """Hugging Face model directory; None unless `export.at_end`."""
    pushed: str | None
    """Address of the export on the hub; None if it was not pushed."""
    curve: Path | None
    """Loss curve as PNG; None if matplotlib is not installed, and on ranks other than 0."""
    report: Path | None = None
    """The page about the run; None if it could not be made, and on ranks other than 0."""
    registered: str | None = None
    """The export's version in MLflow's model registry; None unless `tracking.mlflow.register`, or if that failed."""
    unsent: str | None = None
    """A sentence about what MLflow, or another receiver of the record, lacks; None if all have everything."""
    mlflow_page: str | None = None
    """Where MLflow's pages show the run, after the address of the server; None if MLflow did not get it."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A map for each step, in the form of `metrics.jsonl`; `trajectory` is what no number of ranks changes."""
        from raytune_fsdp.record.jsonl import read_metrics

        return [line for line in read_metrics(self.run_dir / METRICS_FILE) if line["kind"] == "step"]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """What each evaluation measured, by step: `eval/<dataset>/loss` and the like."""
        from raytune_fsdp.record.jsonl import all_evaluations

        return all_evaluations(self.run_dir, self.steps)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Attempts, saves, failures and the like, in the form of `events.jsonl`."""
        from raytune_fsdp.record.jsonl import read_events

        return read_events(self.run_dir / EVENTS_FILE)

    @property
    def card(self) -> Path | None:
        """The model card of the export; None without an export."""
        return None if self.export is None else self.export / "README.md"

    def load(
        self, device: str | torch.device = "cpu", *, trust_remote_code: bool = False
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the trained model and its tokenizer, to be asked: from the export, or else the newest checkpoint."""
        import torch

        from raytune_fsdp.checkpoint.model_files import load_for_inference

        place = self.run_dir if self.export is None else self.export
        return load_for_inference(place, torch.device(device), trust_remote_code=trust_remote_code)
