"""Whether an objective of groups of documents suits the rest of a config."""

from __future__ import annotations

from raytune_fsdp.config.sections.data import DataConfig, HeldOutConfig
from raytune_fsdp.config.sections.eval import EvalConfig
from raytune_fsdp.config.sections.formats import Format, PythonFormat, groups_of
from raytune_fsdp.config.sections.objectives import ObjectiveChoice
from raytune_fsdp.config.sections.reference import ReferenceConfig

_WAYS = {
    "preference": "set train.objective.type to dpo, ipo, simpo, cpo or orpo",
    "binary": "set train.objective.type=kto",
}


def check_groups(
    objective: ObjectiveChoice, data: DataConfig, reference: ReferenceConfig, evaluation: EvalConfig
) -> None:
    """Refuse rows that the objective is not of, what would part the answers of a row, and a reference for nothing."""
    _check_rows(objective, data)
    whole = "the answers of a row stay whole and together"
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
        if groups_of(measured.format) not in (None, objective.rows):
            field, made = _made_by(measured.format)
            raise ValueError(
                f"data.eval.{number}.{field}={made} with train.objective.type={objective.type}, whose "
                "loss does not measure such rows: give it another format, or leave it out"
            )


def _made_by(format: Format) -> tuple[str, str]:
    """Return the field that says what rows become, and what that is."""
    if isinstance(format, PythonFormat):
        return "format.then.type", format.then.type
    return "format.type", format.type
