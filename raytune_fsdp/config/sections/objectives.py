"""`train.objective`: what a step minimises, of single documents or of groups of documents."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import Section


class SftTerm(Section):
    weight: float = Field(default=0.0, ge=0)
    """Add this times the cross-entropy of the chosen answers, divided by their tokens in the global batch."""

    over: Literal["answer", "all"] = "answer"
    """The tokens of that cross-entropy: those of the answer, or all of the document, its prompt too."""


FurtherTerm = Annotated[SftTerm, Field(description="A term of cross-entropy besides.")]
Closeness = Annotated[float, Field(gt=0, description="How closely the model is held to the reference.")]
WrongWayRound = Annotated[float, Field(ge=0, lt=0.5, description="The probability that a pair is the wrong way round.")]


class _Objective(Section):
    rows: ClassVar[str | None] = None
    """The type of format whose rows make the groups that the objective is of; None: documents stand alone."""
    compares: ClassVar[bool] = False
    """Whether log-probabilities are compared with those of a reference."""
    scores: ClassVar[bool] = False
    """Whether it is of the numbers of `model.head`, at the last token of each document."""
    learns: ClassVar[bool] = False
    """Whether a teacher's predictions are learned from."""


class SftObjective(_Objective):
    type: Literal["sft"] = "sft"
    """The cross-entropy of every target, or `train.loss`."""


class _PairObjective(_Objective):
    rows = "preference"


class DpoObjective(_PairObjective):
    compares = True

    type: Literal["dpo"]
    """Direct preference optimization: the chosen answer gains on the rejected one, measured from a reference."""

    beta: Closeness = 0.1

    loss: Literal["sigmoid", "hinge", "robust"] = "sigmoid"
    """The loss of a pair. `robust` expects the fraction `label_smoothing` of the pairs to be the wrong way round."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The probability that a pair is the wrong way round: with `sigmoid`, a smoothed (conservative) loss."""

    normalize: Literal["none", "length"] = "none"
    """`length`: log-probabilities are divided by the number of tokens of their answer."""

    sft: FurtherTerm = Field(default_factory=SftTerm)

    @model_validator(mode="after")
    def _smoothing(self) -> Self:
        if self.loss == "hinge" and self.label_smoothing:
            raise ValueError(
                f"train.objective.label_smoothing={self.label_smoothing:g} with loss=hinge, which has no smoothing: set it "
                "to 0, or loss to sigmoid or robust"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError(
                "train.objective.loss=robust with label_smoothing=0 is loss=sigmoid: set label_smoothing to the share of "
                "pairs that may be the wrong way round, or loss to sigmoid"
            )
        return self


class IpoObjective(_PairObjective):
    compares = True

    type: Literal["ipo"]
    """Identity preference optimization: the mean gain of a token is drawn to 1 / (2 beta)."""

    beta: Closeness = 0.1

    sft: FurtherTerm = Field(default_factory=SftTerm)


class SimpoObjective(_PairObjective):
    type: Literal["simpo"]
    """SimPO: the mean log-probability of a token, without a reference."""

    beta: float = Field(default=2.0, gt=0)
    """The scale of the difference."""

    gamma: float = Field(default=1.0, ge=0)
    """How far apart, after scaling by beta, the answers are to be: the paper's gamma, beta times its
    `gamma_beta_ratio`."""

    label_smoothing: WrongWayRound = 0.0

    sft: FurtherTerm = Field(default_factory=SftTerm)


class CpoObjective(_PairObjective):
    type: Literal["cpo"]
    """Contrastive preference optimization: DPO without a reference, with a term of cross-entropy."""

    beta: float = Field(default=0.1, gt=0)
    """The scale of the difference."""

    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    """The loss of a pair."""

    label_smoothing: WrongWayRound = 0.0

    sft: SftTerm = Field(default_factory=lambda: SftTerm(weight=1.0))
    """The term of cross-entropy."""

    @model_validator(mode="after")
    def _smoothing(self) -> Self:
        if self.loss == "hinge" and self.label_smoothing:
            raise ValueError(
                f"train.objective.label_smoothing={self.label_smoothing:g} with loss=hinge, which has no smoothing: set it "
                "to 0, or loss to sigmoid"
            )
        return self


class OrpoObjective(_PairObjective):
    type: Literal["orpo"]
    """ORPO: the odds of the chosen answer against those of the rejected one, and cross-entropy; no reference."""

    beta: float = Field(default=0.1, gt=0)
    """The weight of the loss of the odds; the cross-entropy has `sft.weight`."""

    sft: SftTerm = Field(default_factory=lambda: SftTerm(weight=1.0, over="all"))
    """The term of cross-entropy."""


class KtoObjective(_Objective):
    rows, compares = "binary", True

    type: Literal["kto"]
    """KTO: single answers that are desirable or not, measured from a reference."""

    beta: Closeness = 0.1

    desirable_weight: float | Literal["auto"] = 1.0
    """The weight of desirable answers. `auto`: that which makes both kinds weigh the same, by a count of the first epoch."""

    undesirable_weight: float = Field(default=1.0, gt=0)
    """The weight of undesirable answers."""

    @model_validator(mode="after")
    def _weight(self) -> Self:
        if self.desirable_weight != "auto" and self.desirable_weight <= 0:
            raise ValueError(
                f"train.objective.desirable_weight={self.desirable_weight:g} must be greater than 0, or auto"
            )
        return self


class RewardObjective(_PairObjective):
    scores = True

    type: Literal["reward"]
    """A reward model, by Bradley and Terry: the score of the chosen answer is to be above that of the rejected one."""

    center: float = Field(default=0.0, ge=0)
    """Add this times the mean square of the sum of a pair's scores, which draws scores to 0; usually 0.01."""


class _ScoreObjective(_Objective):
    rows, scores = "score", True


class ClassificationObjective(_ScoreObjective):
    type: Literal["classification"]
    """The cross-entropy of a document's class."""

    class_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """The weight of each class's documents, in the order of `model.head.labels`. Null: 1."""


class RegressionObjective(_ScoreObjective):
    type: Literal["regression"]
    """The square of the difference between a document's score and what its row says."""


class DistillObjective(_Objective):
    learns = True

    type: Literal["distill"]
    """Learn the predictions of `teacher`."""

    forward: float = Field(default=1.0, ge=0)
    """The weight of the divergence from the teacher to the student, sum of p log(p / q) over tokens, where p is the
    teacher's: the student covers all that the teacher may say."""

    reverse: float = Field(default=0.0, ge=0)
    """The weight of the divergence from the student to the teacher, sum of q log(q / p): the student says what the teacher
    is likely to say."""

    cross_entropy: float = Field(default=0.0, ge=0)
    """The weight of the cross-entropy of the data's own tokens."""

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if not self.forward and not self.reverse:
            raise ValueError(
                "train.objective.forward=0 and reverse=0 with type=distill: nothing of the teacher is learned: give one of "
                "them a weight, or set type=sft"
            )
        return self


ObjectiveChoice = Annotated[
    SftObjective
    | DpoObjective
    | IpoObjective
    | SimpoObjective
    | CpoObjective
    | OrpoObjective
    | KtoObjective
    | RewardObjective
    | ClassificationObjective
    | RegressionObjective
    | DistillObjective,
    Field(discriminator="type"),
]
