"""TRL: convert files for `trl dpo`, `trl kto` and `trl reward --config`, and those of its ORPO and CPO trainers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.preferences import (
    JUDGED,
    LOSSES,
    PAIRS,
    TOO_LONG,
    carry_objective,
    carry_reward,
    losses_of_pairs,
    sample_of_two,
    turn_off_dropout,
    without_head,
)
from raytune_fsdp.convert.rules import (
    Project,
    TheirOption,
    Translation,
    ask,
    carry,
    flag,
    in_words,
    leave,
    number,
    part,
    refuse,
    same,
    settled,
    table,
    text,
    whole,
)
from raytune_fsdp.convert.training import TRAINING_OPTIONS
from raytune_fsdp.convert.trl import COMPUTE_OPTIONS, LENGTH, NAMED_DATA, PREPARED, finish, named_data, prepare_compute

_LR = 1e-6
_REWARD_LR = 1e-4
_SEES = (
    "TRL looks at the rows: this is for texts; for messages set format.style=chat, where only "
    "the answer and its end count, not what the template writes around them; see `raytune-fsdp data preview`"
)
_REWARD_SEES = (
    "TRL looks at the rows: this is for texts; for messages set format.style=chat; see `raytune-fsdp data preview`"
)
_REWARD_TOO_LONG = (
    "a pair is left out there if one of its answers is longer than max_length, here if both together are than twice"
)


def prepare_rows(
    c: Translation, rows: str, *, lr: float = _LR, long: tuple[str, str] = ("truncate", TOO_LONG), sees: str = _SEES
) -> None:
    """Settle what all commands of TRL for such rows share.

    `long`: what becomes of long rows by default, and why. `sees`: what TRL finds in rows, and the file does not say.
    """
    turn_off_dropout(c, adapts=c.get("use_peft", flag, False))
    prepare_compute(c, lr=lr)
    if "max_length" in c.given and spelled(c.given["max_length"]) is None:
        why = "a sample has a fixed length here; give a number, such as the length of the longest row"
        c.say("max_length", "refused", why)
    sample_of_two(c, "max_length", c.get("max_length", whole, LENGTH), rows)
    made = {"type": rows, "style": "plain"}
    c.tell_default("data.train.*.format", made, sees if rows == PAIRS else f"{sees}. {_APART}")
    c.default("data.packing", "none", "a sample is one row there; best_fit packs several, and the steps get fewer")
    c.default("data.long_documents", *long)
    named_data(c, made)


_APART = "TRL makes two rows of a pair; here files have one row for each answer"


def _dpo(c: Translation) -> None:
    prepare_rows(c, PAIRS)
    pair, weight = losses_of_pairs(c, "loss_type", "loss_weights")
    numbers: dict[str, tuple[str, float | None]] = {"beta": ("beta", 0.1)}
    made: dict[str, Any] = dict(LOSSES[pair])
    if pair == "robust" and c.get("label_smoothing", number, 0) != 0:
        numbers["label_smoothing"] = ("label_smoothing", 0.0)
    elif pair == "robust":
        made = {}  # without smoothing it is the plain loss
        c.say("label_smoothing", "same", "none, with which robust is sigmoid")
    else:
        why = f"{pair} does not read it in TRL 1.16; in older versions sigmoid did: set train.objective.label_smoothing"
        c.say("label_smoothing", "left", why)
    kind = _without_reference(c, pair) or ("ipo" if pair == "ipo" else "dpo")
    weight += c.get("rpo_alpha", number, 0.0)
    if weight or kind == "cpo":
        made["sft"] = {"weight": weight}
    carry_objective(c, kind, numbers, **made)
    c.say_all(("rpo_alpha", "loss_weights"), "carried", in_words("train.objective.sft.weight", weight))
    c.say("loss_type", "carried", in_words("train.objective", c.fields["train.objective"]))


def _without_reference(c: Translation, pair: str) -> str:
    """Return the type of an objective without a reference, if there is to be none."""
    key = "reference_free"
    if not c.get(key, flag, False):
        c.say(key, "same", "compared with the reference")
        return ""
    if pair not in ("sigmoid", "hinge"):
        c.say(key, "refused", f"{pair} compares with a reference; sigmoid and hinge do without, as type cpo")
        return ""
    c.say(key, "carried", "train.objective.type=cpo, which is DPO without a reference")
    return "cpo"


def _kto(c: Translation) -> None:
    prepare_rows(c, JUDGED)
    weights = {f"{kind}_weight": (f"{kind}_weight", 1.0) for kind in ("desirable", "undesirable")}
    carry_objective(c, "kto", {"beta": ("beta", 0.1), **weights})
    c.tell_default("train.objective", {"type": "kto"}, "KTO's KL is that of a micro-batch there, of a step here")
    key = "train_sampling_strategy"
    if c.get(key, text, "sequential") != "sequential":
        c.say(
            key,
            "refused",
            "TRL's KTO takes sequential only, for its KL; for another order set data.shuffle",
        )
    if key not in c.given:
        c.default("data.shuffle", "none", "train_sampling_strategy=sequential by default")


def _orpo(c: Translation) -> None:
    prepare_rows(c, PAIRS)
    carry_objective(c, "orpo", {"beta": ("beta", 0.1)})


def _cpo(c: Translation) -> None:
    prepare_rows(c, PAIRS)
    loss = c.get("loss_type", text, "sigmoid")
    if loss not in ("sigmoid", "hinge", "simpo"):
        c.say("loss_type", "refused", f"{loss} is not here without a reference; sigmoid, hinge and simpo are")
    numbers: dict[str, tuple[str, float | None]] = {"beta": ("beta", 0.1), "sft.weight": ("cpo_alpha", 1.0)}
    if loss == "simpo":
        numbers["gamma"] = ("simpo_gamma", 0.5)
    if loss != "hinge":
        numbers["label_smoothing"] = ("label_smoothing", 0.0)
    unread = {"label_smoothing", "simpo_gamma"}.difference(key for key, _ in numbers.values())
    c.say_all(unread, "left", f"means nothing to {loss}, there too")
    made: dict[str, Any] = {"loss": "hinge"} if loss == "hinge" else {}
    carry_objective(c, "simpo" if loss == "simpo" else "cpo", numbers, **made)
    c.say("loss_type", "carried", in_words("train.objective", c.fields["train.objective"]))


def _reward(c: Translation) -> None:
    carry_reward(c, "center_rewards_coefficient")
    if c.get("use_peft", flag, False):
        without_head(c, "lora_modules_to_save")
    prepare_rows(c, PAIRS, lr=_REWARD_LR, long=("drop", _REWARD_TOO_LONG), sees=_REWARD_SEES)
    why = "TRL takes a column `margin` if there is one: if so, set format.margin=margin"
    c.tell_default("data.train.*.format.margin", None, why)


def _truncation(c: Translation, key: str) -> None:
    how = c.get(key, text, "keep_start")
    if how == "keep_end":
        c.carry(key, "data.long_documents", "truncate", "the prompt loses its start; there the longer answer's more")
    elif how == "keep_start":
        c.carry(key, "data.long_documents", "truncate", TOO_LONG)
    else:
        c.say(key, "refused", "unknown to TRL; it has keep_start and keep_end")


ROW_OPTIONS = (
    *COMPUTE_OPTIONS,
    *NAMED_DATA,
    settled("max_length", "`data.seq_len`, twice it: a sample holds two documents", takes_null=True),
    settled("disable_dropout", "`method.dropout: 0`, by default, too; for the model's own, see `model.overrides`"),
    leave("generate_during_eval", "see `eval.prompts`"),
    refuse(
        "max_prompt_length", "prompts have no limit of their own; data.long_documents=truncate shortens them", off=()
    ),
    refuse("is_encoder_decoder", "causal language models only"),
    leave("padding_value label_pad_token_id use_logits_to_keep", "padding does not change what is learned"),
    *PREPARED,
    same("pad_to_multiple_of", "padding does not change what is learned"),
    leave("label_smoothing_factor", "means nothing to this loss, there too"),
    *(option for option in TRAINING_OPTIONS if "label_smoothing_factor" not in option.names),
)


_REFERENCE = "the reference is what the run starts from, or reference.model"
_COMPARED = (
    same(
        "precompute_ref_log_probs",
        "the same numbers before and during training; see `reference.when`",
    ),
    leave("precompute_ref_batch_size", "it changes no log-probability"),
    refuse("sync_ref_model", "the reference stays as it is"),
    part("ref_model_mixup_alpha ref_model_sync_steps", "sync_ref_model", lambda c: c.on("sync_ref_model")),
    refuse("ref_model_init_kwargs model_adapter_name ref_adapter_name", _REFERENCE, off=()),
    leave("force_use_ref_model base_model_attribute_name", _REFERENCE),
    leave("use_liger_loss", "other kernels for the same function"),
)


_DPO_OPTIONS = (
    settled("beta", "`train.objective.beta`"),
    settled("loss_type", "`train.objective`: sigmoid, hinge, robust, sigmoid_norm or ipo, and sft; others refused"),
    settled("loss_weights rpo_alpha", "`train.objective.sft.weight`; refused unless the other loss has 1"),
    settled("label_smoothing", "`train.objective.label_smoothing` of robust, else left"),
    settled("reference_free", "`train.objective: {type: cpo, sft: {weight: 0}}`"),
    ask("truncation_mode", "`data.long_documents: truncate`", _truncation),
    refuse("max_completion_length", "answers have no limit of their own", off=()),
    refuse("use_weighting", "pairs have weights of their own only (`format.weight`)"),
    refuse("ld_alpha", "every token of an answer counts alike", off=(1,), alike="every token counts alike"),
    refuse("f_divergence_type", "the divergence is the reverse KL", off=("reverse_kl",), alike="the reverse KL"),
    part(
        "f_alpha_divergence_coef",
        "f_divergence_type",
        lambda c: spelled(c.given.get("f_divergence_type", "")) == "alpha_divergence",
    ),
    leave("discopop_tau", "only for the loss discopop, which is refused"),
    same("padding_free", "padding does not change what is learned"),
    leave("pad_token", "padding does not change what is learned"),
    *_COMPARED,
)


_KTO_OPTIONS = (
    settled("beta desirable_weight undesirable_weight", "the same fields of `train.objective`"),
    refuse("loss_type", "apo_zero_unpaired is not here", off=("kto",), alike="KTO's loss"),
    refuse("max_completion_length", "answers have no limit of their own", off=()),
    *_COMPARED,
)


_ORPO_OPTIONS = (
    settled("beta", "`train.objective.beta`"),
    leave("max_completion_length", "for encoder-decoders only"),
)


_CPO_OPTIONS = (
    settled("loss_type", "`train.objective`: sigmoid and hinge `cpo`, simpo `simpo`; others refused"),
    settled("beta label_smoothing", "the same fields of `train.objective`"),
    settled("cpo_alpha", "`train.objective.sft.weight`, 1 by default, of simpo, too"),
    settled("simpo_gamma", "`train.objective.gamma`, 0.5 by default: after scaling by beta, as there"),
    refuse("alpha", "a reward is the log-probability itself"),
    leave("max_completion_length", "for encoder-decoders only"),
)


_REWARD_OPTIONS = (
    settled("center_rewards_coefficient", "`train.objective.center`"),
    carry("pad_token", "model.head.pad_token", text, "no text may end with it"),
    refuse("eos_token", "a text ends with the tokenizer's own end token", off=()),
    refuse(
        "lora_task_type",
        "the model has a head that scores",
        off=("SEQ_CLS", "CAUSAL_LM"),
        alike="the model has a head that scores",
        here="same for SEQ_CLS, else refused",
    ),
)


def project_of(
    command: str,
    about: str,
    prepare: Callable[[Translation], None],
    *options: TheirOption,
    lr: float = _LR,
) -> Project:
    own = {name for option in options for name in option.names}
    others = (option for option in ROW_OPTIONS if own.isdisjoint(option.names))
    return Project(
        name=f"trl-{command}",
        title=f"TRL's {command.upper() if len(command) < 5 else command}",
        about=f"{about} Name them with `--from trl-{command}`, unless a key tells that. Options of TRL 1.16, and some "
        "older ones.",
        options=table(*options, *others),
        prepare=prepare,
        finish=partial(finish, lr=lr),
        like="trl",
    )


TRL_DPO = project_of("dpo", "Files for `trl dpo --config`.", _dpo, *_DPO_OPTIONS)
TRL_KTO = project_of("kto", "Files for `trl kto --config`.", _kto, *_KTO_OPTIONS)
TRL_ORPO = project_of("orpo", "Files of an `ORPOConfig` (`trl.experimental.orpo`).", _orpo, *_ORPO_OPTIONS)
TRL_CPO = project_of("cpo", "Files of a `CPOConfig` (`trl.experimental.cpo`), SimPO's, too.", _cpo, *_CPO_OPTIONS)
TRL_REWARD = project_of("reward", "Files for `trl reward --config`.", _reward, *_REWARD_OPTIONS, lr=_REWARD_LR)
