"""Whether the sections of a config go together: an objective with its rows, what it is compared with, its head and its
teacher; and the rest with `run.exact`, and with layers that several ranks share (`parallel.mesh.tensor`)."""

from __future__ import annotations

from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.sections.data import DataConfig, HeldOutConfig
from raytune_fsdp.config.sections.eval import EvalConfig
from raytune_fsdp.config.sections.formats import Format, PythonFormat, ScoreFormat, groups_of
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.config.sections.model import ModelConfig
from raytune_fsdp.config.sections.objectives import ClassificationObjective, ObjectiveChoice
from raytune_fsdp.config.sections.optimizers import OptimizerChoice
from raytune_fsdp.config.sections.parallel import ParallelConfig
from raytune_fsdp.config.sections.reference import ReferenceConfig, TeacherConfig
from raytune_fsdp.config.sections.run import RunConfig

_WAYS = {
    "preference": "set train.objective.type to dpo, ipo, simpo, cpo, orpo or reward",
    "binary": "set train.objective.type=kto",
    "score": "set train.objective.type to classification or regression",
}


def check_objective(
    objective: ObjectiveChoice,
    data: DataConfig,
    reference: ReferenceConfig,
    evaluation: EvalConfig,
    model: ModelConfig,
    teacher: TeacherConfig | None,
    parallel: ParallelConfig,
) -> None:
    """Refuse rows that the objective is not of, what would part the answers of a row, a reference or a teacher for
    nothing, and a head that it has no use for."""
    _check_rows(objective, data)
    _check_head(objective, model)
    if objective.scores:
        _check_scored(objective, data, evaluation)
        _check_without_tokens(data, parallel)
    if objective.learns and teacher is None:
        raise ValueError("train.objective.type=distill needs teacher.model: name the model to learn from")
    if teacher is not None and not objective.learns:
        raise ValueError(
            f"teacher.model={teacher.model} with train.objective.type={objective.type}, which learns from no teacher: leave "
            "the section out, or set the type to distill"
        )
    whole = "the answers of a row stay whole and together"
    if objective.rows == "score":
        whole = "a document that is scored stays whole"
    if objective.rows is not None and data.packing == "concat":
        raise ValueError(
            f"data.packing=concat with train.objective.type={objective.type}: {whole}; set packing to best_fit or none"
        )
    if objective.rows is not None and data.long_documents == "split":
        raise ValueError(
            f"data.long_documents=split with train.objective.type={objective.type}: {whole}; set long_documents to error, "
            "drop or truncate"
        )
    if reference.when == "during" and evaluation.where == "task" and data.eval:
        raise ValueError(
            "reference.when=during with eval.where=task: a task has no reference to compare with: set eval.where=ranks, or "
            "when to before"
        )
    if not objective.compares and reference != ReferenceConfig():
        raise ValueError(
            f"reference: train.objective.type={objective.type} compares with no reference: leave the section out, or set the "
            "type to dpo, ipo or kto"
        )


def _check_rows(objective: ObjectiveChoice, data: DataConfig) -> None:
    for number, dataset in enumerate(data.train):
        kind, (field, made) = groups_of(dataset.format), _made_by(dataset.format)
        if kind != objective.rows:
            single = f"set train.objective.type=sft, or {field}={objective.rows}"
            rows = "single documents" if objective.rows is None else f"{objective.rows} rows"
            raise ValueError(
                f"data.train.{number}.{field}={made} with train.objective.type={objective.type}, which is "
                f"of {rows}: {single if kind is None else _WAYS[kind]}"
            )
    for number, measured in enumerate([] if isinstance(data.eval, HeldOutConfig) else data.eval):
        kind = groups_of(measured.format)
        if kind != objective.rows and (kind is not None or objective.scores):
            field, made = _made_by(measured.format)
            raise ValueError(
                f"data.eval.{number}.{field}={made} with train.objective.type={objective.type}, whose "
                "loss does not measure such rows: give it another format, or leave it out"
            )


def _check_head(objective: ObjectiveChoice, model: ModelConfig) -> None:
    head, kind = model.head, objective.type
    if head is None:
        if objective.scores:
            raise ValueError(f"train.objective.type={kind} needs a head that scores: set model.head.type=score")
        return
    if not objective.scores:
        raise ValueError(
            f"model.head.type=score with train.objective.type={kind}, which is of predicted tokens: set the type to reward, "
            "classification or regression, or leave model.head out"
        )
    for field, why in _WHY_NOT.items():
        if (value := getattr(model, field)) not in ("auto", None, []):
            shown = value if isinstance(value, str) else ", ".join(each.text for each in value)
            raise ValueError(f"model.{field}={shown} with model.head: {why}: leave one of the two out")
    if isinstance(objective, ClassificationObjective):
        if head.size < 2:
            raise ValueError(
                f"model.head.outputs={head.size} with train.objective.type=classification: name two classes or more in "
                "model.head.labels"
            )
        weights = objective.class_weights
        if weights is not None and (len(weights) != head.size or not any(weights)):
            raise ValueError(
                f"train.objective.class_weights={weights}: must be {head.size} numbers, one for each class, not all of "
                "them 0"
            )
    elif head.size != 1:
        raise ValueError(
            f"model.head.outputs={head.size} with train.objective.type={kind}, which is of one number: leave outputs and "
            "labels out, or set the type to classification"
        )


def _check_scored(objective: ObjectiveChoice, data: DataConfig, evaluation: EvalConfig) -> None:
    """Refuse rows without what they are scored by, and what needs a model that predicts tokens."""
    field = "label" if isinstance(objective, ClassificationObjective) else "score"
    measured = [] if isinstance(data.eval, HeldOutConfig) else data.eval
    for place, datasets in (("data.train", data.train), ("data.eval", measured)):
        for number, dataset in enumerate(datasets):
            returned = dataset.format.then if isinstance(dataset.format, PythonFormat) else dataset.format
            if isinstance(returned, ScoreFormat) and getattr(returned, field) is None:
                raise ValueError(
                    f"{place}.{number}.format names no {field} with train.objective.type={objective.type}: name the "
                    f"column of its {field}"
                )
    for name in ("tasks", "prompts"):
        if getattr(evaluation, name):
            raise ValueError(
                f"eval.{name} with train.objective.type={objective.type}: a model with model.head predicts no token, so it "
                f"answers nothing: leave {name} out"
            )


def _check_without_tokens(data: DataConfig, parallel: ParallelConfig) -> None:
    """Refuse what a head that predicts no tokens cannot do."""
    if parallel.mesh.tensor > 1:
        raise ValueError(
            f"parallel.mesh.tensor={parallel.mesh.tensor} with model.head: ranks that share layers share the rows of a head "
            "that predicts tokens, and this one has hardly any: set parallel.mesh.tensor=1"
        )
    for number, measured in enumerate([] if isinstance(data.eval, HeldOutConfig) else data.eval):
        if groups_of(measured.format) is None:
            field, made = _made_by(measured.format)
            raise ValueError(
                f"data.eval.{number}.{field}={made} with model.head: the loss of predicted tokens is measured of such rows, "
                "and this model predicts none: give it another format, or leave it out"
            )


_WHY_NOT = {
    "loss": "it is of the head that predicts tokens",
    "network": "its class in transformers is not known, so nobody could load what it has learned",
    "add_tokens": "new tokens get rows in a head that predicts tokens, too, and this model has none",
}


def _made_by(format: Format) -> tuple[str, str]:
    """Return the field that says what rows become, and what that is."""
    if isinstance(format, PythonFormat):
        return "format.then.type", format.then.type
    return "format.type", format.type


def check_exact(run: RunConfig, parallel: ParallelConfig) -> None:
    """Refuse what makes the order of sums depend on the number of ranks."""
    if not run.exact:
        if run.threads is not None:
            raise ValueError(
                f"run.threads={run.threads} without run.exact: only exact runs keep their threads; set run.exact=true, or "
                "set OMP_NUM_THREADS instead"
            )
        return
    mesh = parallel.mesh
    for field, value, right in (
        ("parallel.strategy", parallel.strategy, ("full_shard", "shard_grad_op")),
        ("parallel.mesh.replicate", mesh.replicate, (None, 1)),
        ("parallel.mesh.sequence", mesh.sequence, (1,)),
        ("parallel.mesh.tensor", mesh.tensor, (1,)),
        ("parallel.precision", parallel.precision, ("fp64", "fp32", "bf16", "fp16")),
        ("parallel.reduce_dtype", parallel.reduce_dtype, ("auto", "fp32")),
        ("parallel.defer_gradient_sync", parallel.defer_gradient_sync, (False,)),
    ):
        if value not in right:
            known = " or ".join(str(each).lower() for each in right if each is not None)
            raise ValueError(
                f"{field}={str(value).lower()} with run.exact=true: the order of its sums depends on the number of ranks: "
                f"set it to {known}, or set run.exact=false"
            )


def check_tensor(size: int, run: RunConfig, method: Method, optimizer: OptimizerChoice) -> None:
    """Refuse what looks at whole weights, of which each rank has a part."""
    if size == 1:
        return
    combined = f"with parallel.mesh.tensor={size}"
    if run.digest_every is not None:
        raise ValueError(
            f"run.digest_every={run.digest_every} {combined}: digests are of whole rows, of which each rank has a part; "
            "leave it out, or leave tensor out"
        )
    if not method.takes_cut_layers:
        *kinds, last = (kind for kind, each in sections_of(Method).items() if each.takes_cut_layers)
        known = f"{', '.join(kinds)} and {last}"
        raise ValueError(
            f"method.type={method.type} {combined}: only {known} know layers that are cut; set method.type=lora, or leave "
            "tensor out"
        )
    if getattr(method, "dora", False) or getattr(method, "target_parameters", None):
        field = "dora=true" if method.dora else "target_parameters"  # type: ignore[union-attr]
        raise ValueError(
            f"method.{field} {combined}: it looks at whole weights, of which each rank has a part; leave it out, or leave "
            "tensor out"
        )
    if optimizer.type in ("muon", "adafactor") or getattr(optimizer, "moments", None) == "8bit":
        field = "moments=8bit" if optimizer.type == "adamw" else f"type={optimizer.type}"
        raise ValueError(
            f"optim.optimizer.{field} {combined}: it computes with whole rows of weights, some of which are cut; set "
            "optim.optimizer.type=adamw with moments=as_weights, fp32 or bf16, or leave tensor out"
        )


def check_stop(run: RunConfig, chosen: EvalConfig) -> None:
    """Raise ValueError if a run is to stop by itself where nobody waits for its evaluation."""
    if run.stop_after is not None and chosen.where == "task":
        raise ValueError(
            f"run.stop_after={run.stop_after} with eval.where=task: a run that stops does not wait for its tasks: set "
            "eval.where=ranks, or leave stop_after out"
        )
