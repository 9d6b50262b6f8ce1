"""TRL: convert files of a `GKDConfig` (`trl.experimental.gkd`), as far as they learn from the rows."""

from __future__ import annotations

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.preferences import turn_off_dropout
from raytune_fsdp.convert.rules import (
    Project,
    Translation,
    flag,
    leave,
    number,
    refuse,
    same,
    settled,
    table,
    text,
    whole,
)
from raytune_fsdp.convert.teachers import ALL_OTHERS, MIXED, ON_POLICY, carry_distillation, objective_in_words
from raytune_fsdp.convert.training import TRAINING_OPTIONS
from raytune_fsdp.convert.trl import COMPUTE_OPTIONS, LENGTH, NAMED_DATA, PREPARED, finish, named_data, prepare_compute

_GENERATE = "write them beforehand with `raytune-fsdp generate`, and train on those rows"


def _prepare(c: Translation) -> None:
    turn_off_dropout(c, adapts=c.get("use_peft", flag, False))
    prepare_compute(c)
    _policy(c)
    _divergence(c)
    teacher = "teacher_model_name_or_path"
    if teacher in c.given:
        c.carry(teacher, "teacher.model", c.get(teacher, text, ""))
    elif c.teacher is not None:
        c.put("teacher.model", c.teacher, "--teacher")
    else:
        c.problems.append(f"{teacher} is not set: name the model to learn from in the file, or with --teacher")
    c.tell_default("teacher.top_k", 64, f"there every token is compared, here the teacher's most likely; {ALL_OTHERS}")
    if "max_length" in c.given and spelled(c.given["max_length"]) is None:
        c.say("max_length", "refused", "a sample has a fixed length here; give a number")
    c.carry_or_default("max_length", "data.seq_len", c.get("max_length", whole, LENGTH), "max_length by default")
    c.default("data.long_documents", "truncate", "there the last max_length tokens stay, here the first")
    c.default("data.packing", "none", "a sample is one row there; best_fit packs several, and the steps get fewer")
    rows = {"type": "chat", "loss": "last_turn"}
    c.tell_default("data.train.*.format", rows, "TRL learns from the last of `messages`")
    named_data(c, rows)


def _policy(c: Translation) -> None:
    """Refuse what the student writes itself, half of the steps by default."""
    if c.get("lmbda", number, 0.5):
        c.say("lmbda", "refused", f"{ON_POLICY}: write lmbda: 0.0")
        c.refuse_unsaid("lmbda", f"0.5 by default, half of the steps: {ON_POLICY}. Write lmbda: 0.0 in the file")
    c.say("lmbda", "same", "every step learns from the rows")
    if c.get("seq_kd", flag, False):
        c.say(
            "seq_kd", "refused", f"answers that the teacher writes while the student trains are not here: {_GENERATE}"
        )
    c.say("seq_kd", "same", "every step learns from the rows")


def _divergence(c: Translation) -> None:
    beta = c.get("beta", number, 0.5)
    if beta not in (0, 1):
        c.say("beta", "refused", MIXED)
        c.refuse_unsaid("beta", f"0.5 by default: {MIXED} in the file")
        beta = 0
    carry_distillation(c, beta)
    c.say("beta", "carried", objective_in_words(c))


_OPTIONS = (
    settled("teacher_model_name_or_path", "`teacher.model`"),
    settled("beta", "`train.objective`: 0 `forward`, 1 `reverse`; others, 0.5 by default, too, are refused"),
    settled("lmbda", "0 same; others, 0.5 by default, too, are refused: the student's own answers"),
    settled("seq_kd", "refused: answers that the teacher writes meanwhile"),
    leave(
        "temperature max_new_tokens", "for answers that are written while the student trains; the loss is at 1 there"
    ),
    leave("teacher_model_init_kwargs.dtype teacher_model_init_kwargs.torch_dtype", "see `parallel.precision`"),
    leave("teacher_model_init_kwargs.attn_implementation", "see `model.attention`"),
    refuse("teacher_model_init_kwargs teacher_model_init_kwargs.*", "name a directory as the teacher", off=()),
    settled("max_length", "`data.seq_len`", takes_null=True),
    settled("disable_dropout", "`method.dropout: 0`, by default, too; for the model's own, see `model.overrides`"),
    leave("packing packing_strategy eval_packing padding_free", "GKD packs no rows"),
    leave(
        "dataset_text_field assistant_only_loss completion_only_loss dataset_kwargs shuffle_dataset loss_type "
        "truncation_mode eos_token",
        "GKD reads `messages`, and learns from the last of them, whatever they say",
    ),
    refuse(
        "max_completion_length use_vllm vllm_mode vllm_server_base_url generation_kwargs",
        f"options of `trl distillation`: {ON_POLICY}",
        off=(False,),
    ),
    same("pad_to_multiple_of", "padding does not change what is learned"),
    leave("pad_token", "padding does not change what is learned"),
    *PREPARED,
    leave("label_smoothing_factor", "means nothing to this loss, there too"),
    *(option for option in TRAINING_OPTIONS if "label_smoothing_factor" not in option.names),
)


TRL_GKD = Project(
    name="trl-gkd",
    title="TRL's GKD",
    about="Files of a `GKDConfig` (`trl.experimental.gkd`) that learn from rows alone: `lmbda: 0`. Files for `trl "
    "distillation`, which learns from the student's own answers, are refused. Name them with `--from trl-gkd`, unless "
    "a key tells that. Options of TRL 1.16.",
    options=table(*COMPUTE_OPTIONS, *NAMED_DATA, *_OPTIONS),
    prepare=_prepare,
    finish=finish,
    like="trl",
)
