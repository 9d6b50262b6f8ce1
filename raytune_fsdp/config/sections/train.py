"""`train`: how much is trained, in which batches, on which loss."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.rules import Section, function_name
from raytune_fsdp.config.sections.objectives import ObjectiveChoice, SftObjective


class TrainConfig(Section):
    # Every step sums the ids of its samples over the ranks, 8 bytes each: 128 MiB at this limit.
    global_batch: int = Field(ge=1, le=2**24)
    """Packed samples per optimizer step, over all ranks and gradient accumulation. It affects what is learned; the number of
    ranks that share it does not."""

    micro_batch: int = Field(default=1, ge=1)
    """Packed samples per forward pass on one rank. Must divide `global_batch`."""

    max_steps: int | None = Field(default=None, ge=1)
    """Length of the run in optimizer steps; the data repeats as often as needed."""

    epochs: float | None = Field(default=None, gt=0)
    """Length of the run in passes over the data, instead of `max_steps`."""

    log_every: int = Field(default=1, ge=1)
    """Steps between two reads of the device: the metrics of all steps in between are fetched and written together."""

    objective: ObjectiveChoice = Field(default_factory=SftObjective)
    """What a step minimises: the cross-entropy of documents; a loss of pairs, of judged answers, or of classes or scores; or
    the distance from what a teacher predicts."""

    loss: Annotated[str, AfterValidator(function_name)] | None = None
    """`module:function`: a loss of your own. It is called with the log-probabilities of one document's targets (a tensor) and
    a `LossDocument`, and returns a tensor with a value for each target, in place of its cross-entropy. The module must be
    importable wherever ranks run. Its file, and the files of your own modules that it imports, belong to the run: a
    changed one is refused. Evaluations measure cross-entropy."""

    loss_columns: list[str] = Field(default_factory=list)
    """Columns of numbers in the rows, which your loss gets as `document.columns`. Every row of `data.train` must have them (of
    a function's rows, those that it returns). True and false are 1 and 0."""

    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """NEFTune: add uniform noise to the embeddings of tokens, at most this over the square root of (tokens of the packed
    sample x width). Usually 5 to 15. Null: no noise."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of every target that is spread over the whole vocabulary. Evaluations leave it out."""

    z_loss: float = Field(default=0.0, ge=0)
    """Add this times the square of the logarithm of each softmax's sum, which keeps logits from drifting; usually 1e-4.
    Evaluations leave it out."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Add this times the load-balancing loss of a mixture of experts, over each micro-batch; the name and the usual value
    are in the model's config.json. Evaluations leave it out."""

    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Add this times the mean square of the logarithm of the sums in the softmax of a mixture's routers; usually 1e-3."""

    @model_validator(mode="after")
    def _own_loss(self) -> Self:
        if self.loss is None and self.loss_columns:
            raise ValueError(
                f"train.loss_columns={self.loss_columns} without train.loss: only a loss of your own reads them; name it, or "
                "leave them out"
            )
        if len(set(self.loss_columns)) < len(self.loss_columns):
            raise ValueError(f"train.loss_columns={self.loss_columns}: names a column twice; leave one out")
        for field in ("label_smoothing", "z_loss") if self.loss is not None else ():
            if value := getattr(self, field):
                raise ValueError(
                    f"train.{field}={value} with train.loss={self.loss}: it changes the cross-entropy, which your loss "
                    f"takes the place of: set {field} to 0, or leave loss out"
                )
        return self

    @model_validator(mode="after")
    def _objective(self) -> Self:
        for field in ("loss", "label_smoothing", "z_loss") if self.objective.learns else ():
            if value := getattr(self, field):
                raise ValueError(
                    f"train.{field}={value} with train.objective.type={self.objective.type}: it changes the cross-entropy, in "
                    f"whose place the teacher's predictions are learned: leave {field} out"
                )
        if self.objective.rows is None:
            return self
        fields = ("loss", "neftune_noise_alpha", "label_smoothing", "z_loss")
        for field in fields:
            if value := getattr(self, field):
                raise ValueError(
                    f"train.{field}={value} with train.objective.type={self.objective.type}: it changes the cross-entropy of "
                    f"documents, which this objective is not: leave {field} out"
                    + (
                        ", or set train.objective.label_smoothing"
                        if field == "label_smoothing" and hasattr(self.objective, field)
                        else ""
                    )
                )
        return self

    @model_validator(mode="after")
    def _length_and_batch(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError(
                f"train.max_steps={self.max_steps or 'null'} and train.epochs={self.epochs or 'null'}: set exactly one of "
                "the two"
            )
        if self.global_batch % self.micro_batch:
            low = self.global_batch // self.micro_batch * self.micro_batch
            near = [str(v) for v in (low, low + self.micro_batch) if v]
            raise ValueError(
                f"train.global_batch={self.global_batch} is not a multiple of train.micro_batch={self.micro_batch}; "
                f"nearest valid: {' or '.join(near)}"
            )
        return self
