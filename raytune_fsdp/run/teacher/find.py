"""Which model is the teacher: one with weights, or what a pass of it has left somewhere, without the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError, DataError, ModelError
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.objectives import DistillObjective
from raytune_fsdp.config.sections.reference import TeacherConfig
from raytune_fsdp.data.cache import TEACHER
from raytune_fsdp.data.teacher import Form, TeacherFiles
from raytune_fsdp.model.directory.tokenizer import digest_of, vocabulary_of
from raytune_fsdp.plan.run_dir import cache_of
from raytune_fsdp.run.reference.find import other_model
from raytune_fsdp.run.resume_point import RunInputs
from raytune_fsdp.run.starting_weights import TeacherModel


def learned_from(config: FinetuneConfig, prepared: RunInputs) -> RunInputs:
    """Return the inputs of a run with its teacher, if it learns from one."""
    if config.teacher is None:
        return prepared
    teacher = find_teacher(config, config.teacher, prepared.tokenizer)
    check_possible(config, teacher.form, rows=prepared.hf_config.get_text_config().vocab_size)
    return replace(prepared, teacher=teacher)


def check_possible(config: FinetuneConfig, form: Form, *, rows: int) -> None:
    """Refuse a divergence that is infinite: of what the student may say and its teacher never does. `rows`: of the
    student's output embedding, which may have more than its tokenizer has tokens."""
    objective = config.train.objective
    if isinstance(objective, DistillObjective) and objective.reverse and form.top_k == form.vocabulary < rows:
        raise ConfigError(
            f"teacher.top_k={form.top_k} keeps all tokens of the tokenizer, and the model has {rows} rows, some of "
            "tokens that the teacher never says, so train.objective.reverse would be infinite; set teacher.top_k to "
            f"{form.vocabulary - 1} or less"
        )


def find_teacher(config: FinetuneConfig, wanted: TeacherConfig, tokenizer: PreTrainedTokenizerBase) -> TeacherModel:
    """Return the run's teacher, after checking that it knows the run's tokens."""
    form = form_of(config, wanted, vocabulary_of(tokenizer))
    tokens = digest_of(tokenizer)
    kept = None if is_url(wanted.model) else TeacherFiles.kept(Path(wanted.model).expanduser())
    if kept is None:
        try:
            model = other_model(config, "teacher.model", wanted.model, tokenizer)
        except ModelError as error:
            if (there := _said_before(config, wanted, form, tokens)) is None:
                raise
            raise ModelError(f"{error}; what it has predicted is in {there}, which may be teacher.model") from error
        return TeacherModel(model=model, kept=None, form=form, tokenizer=tokens)
    if (kept.tokenizer, kept.form.vocabulary) != (tokens, form.vocabulary):
        raise ConfigError(
            f"teacher.model={wanted.model} has predictions of {kept.model}, made with another tokenizer than the "
            "run's: its ids are other tokens; name a model with the run's tokenizer"
        )
    for field, asked, theirs in (
        ("top_k", form.top_k, kept.form.top_k),
        ("temperature", form.temperature, kept.form.temperature),
        ("dtype", form.dtype, kept.form.dtype),
    ):
        if asked != theirs:
            raise ConfigError(
                f"teacher.{field}={asked}: what teacher.model={wanted.model} keeps has {field}={theirs}: set it to "
                f"that, or name the teacher itself, {kept.model}"
            )
    return TeacherModel(model=None, kept=kept, form=form, tokenizer=tokens)


def _said_before(config: FinetuneConfig, wanted: TeacherConfig, form: Form, tokens: str) -> Path | None:
    """Return the directory of what a teacher of this name has predicted, which may be gone itself; None: nothing."""
    for directory in sorted((cache_of(config) / TEACHER).glob("*")):
        with suppress(DataError):
            kept = TeacherFiles.kept(directory)
            if kept is not None and (kept.model, kept.form, kept.tokenizer) == (redact(wanted.model), form, tokens):
                return directory
    return None


def form_of(config: FinetuneConfig, wanted: TeacherConfig, vocabulary: int) -> Form:
    """Return in which form the teacher's predictions are kept. `vocabulary`: of the tokenizer."""
    return Form(
        top_k=min(wanted.top_k, vocabulary), temperature=wanted.temperature,
        dtype=wanted.kept_in(config.parallel.precision), vocabulary=vocabulary,
    )  # fmt: skip
