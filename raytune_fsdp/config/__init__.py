"""What a user may write: `FinetuneConfig` and its sections.

    sections/      one file for each section
    rules.py       what all sections have in common; checks that several of them share, and how often something is done
    together.py    whether the sections go together
    recorded.py    what others may read of a config, and where it differs from the defaults

How a YAML file and command-line flags become a `FinetuneConfig`, in the order of the data:

    text.py        YAML text -> a tree in which every scalar still has its spelling
    schema.py      which values are allowed where, read from the sections; and every field in words
    load.py        file and flags -> tree -> `FinetuneConfig`, and back to YAML
    problems.py    mistakes in a config, a line for each
    other_names.py  what other trainers call our fields

This room imports no torch, ray, mlflow or transformers, which take seconds: a mistake in a config is reported first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.recorded import check_no_marks
from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.sections.checkpoint import CheckpointConfig
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.config.sections.data import CacheConfig, DataConfig, DatasetConfig, HeldOutConfig, RowsConfig
from raytune_fsdp.config.sections.eval import EvalConfig
from raytune_fsdp.config.sections.export import ExportConfig
from raytune_fsdp.config.sections.formats import (
    BinaryFormat,
    ChatFormat,
    CompletionFormat,
    Format,
    InstructionFormat,
    PreferenceFormat,
    PythonFormat,
    ScoreFormat,
    TemplateFormat,
    TokensFormat,
)
from raytune_fsdp.config.sections.method import FreezeMethod, FullMethod, Ia3Method, LoraMethod, Method
from raytune_fsdp.config.sections.model import ModelConfig
from raytune_fsdp.config.sections.optim import GroupConfig, OptimConfig
from raytune_fsdp.config.sections.parallel import ParallelConfig
from raytune_fsdp.config.sections.reference import ReferenceConfig, TeacherConfig
from raytune_fsdp.config.sections.run import ProfileConfig, RunConfig
from raytune_fsdp.config.sections.tracking import TrackingConfig
from raytune_fsdp.config.sections.train import TrainConfig
from raytune_fsdp.config.together import check_exact, check_objective, check_stop, check_tensor


class FinetuneConfig(Section):
    """Everything a user may say about a run, exactly as written. `raytune_fsdp.plan.plan` derives the rest."""

    run: RunConfig
    """What the run is called, where it lives, what it starts from."""

    model: ModelConfig
    """Which network, which weights, which tokenizer."""

    data: DataConfig
    """Which rows, in which format, in which order, packed how."""

    method: Method = Field(default_factory=FullMethod)
    """Which weights are trained."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How the model is spread over the ranks and in which precision it computes."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer, its learning rate over time, clipping."""

    train: TrainConfig
    """How much is trained, in which batches, on which loss."""

    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """What an objective of preferences compares the model with."""

    teacher: TeacherConfig | None = None
    """Whose predictions an objective of distillation learns from."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When and where the state is saved, and how much of it is kept."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """When the model is evaluated and on what."""

    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    """Where metrics go besides the run directory."""

    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Steps to look at closely."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """What the run runs on."""

    export: ExportConfig = Field(default_factory=ExportConfig)
    """What the run leaves for others to load."""

    def with_sections(self, **sections: Mapping[str, Any]) -> Self:
        """Return a copy with other values in these sections. Nothing is validated."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _precision(self) -> Self:
        if self.optim.stochastic_rounding and self.parallel.precision != "bf16_pure":
            raise ValueError(
                f"optim.stochastic_rounding=true with parallel.precision={self.parallel.precision}: only weights in bf16 "
                "are rounded: set parallel.precision=bf16_pure, or leave stochastic_rounding out"
            )
        if self.parallel.precision == "fp8" and not self.method.takes_fp8:
            raise ValueError(
                f"method.type={self.method.type} with parallel.precision=fp8: fp8 is for layers that are trained, and "
                "with this method their weights are frozen (torchao would compute their gradients all the same, a third "
                "product where bf16 has two); set parallel.precision=bf16, or method.type=full"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> Self:
        check_exact(self.run, self.parallel)
        check_tensor(self.parallel.mesh.tensor, self.run, self.method, self.optim.optimizer)
        check_objective(
            self.train.objective, self.data, self.reference, self.eval, self.model, self.teacher, self.parallel
        )
        return self

    @model_validator(mode="after")
    def _named_elsewhere(self) -> Self:
        if getattr(self.method, "train_added_tokens", False) and not self.model.add_tokens:
            raise ValueError(
                "method.train_added_tokens=true: model.add_tokens names no token, so there are no rows to train: name "
                "the tokens there, or leave train_added_tokens out"
            )
        check_stop(self.run, self.eval)
        if self.tracking.mlflow.register is not None and not self.export.at_end:
            raise ValueError(
                f"tracking.mlflow.register={self.tracking.mlflow.register} registers the export at the end: set "
                "export.at_end=true, or leave register out"
            )
        check_no_marks(self.model_dump())
        return self


__all__ = [
    "BinaryFormat",
    "CacheConfig",
    "ChatFormat",
    "CheckpointConfig",
    "ClusterConfig",
    "CompletionFormat",
    "DataConfig",
    "DatasetConfig",
    "EvalConfig",
    "ExportConfig",
    "FinetuneConfig",
    "Format",
    "FreezeMethod",
    "FullMethod",
    "GroupConfig",
    "HeldOutConfig",
    "Ia3Method",
    "InstructionFormat",
    "LoraMethod",
    "Method",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PreferenceFormat",
    "ScoreFormat",
    "ReferenceConfig",
    "RowsConfig",
    "RunConfig",
    "ProfileConfig",
    "PythonFormat",
    "Section",
    "TemplateFormat",
    "TokensFormat",
    "TrackingConfig",
    "TrainConfig",
]
