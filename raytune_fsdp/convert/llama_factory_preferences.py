"""Convert LLaMA-Factory's `stage: dpo | kto | rm`: its objective, its reference, and the columns of its datasets."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.convert.preferences import (
    EACH_TOKEN,
    JUDGED,
    PAIRS,
    carry_objective,
    carry_reward,
    no_dropout,
    tell_own_dropout,
)
from raytune_fsdp.convert.rules import (
    NotHereError,
    TheirOption,
    Translation,
    flag,
    in_words,
    number,
    part,
    refuse,
    text,
)

STAGES = {"dpo": PAIRS, "kto": JUDGED, "rm": PAIRS}
_USUAL = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""The names that a message's keys and roles may have."""
_LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")


def rows_of_stage(c: Translation) -> str:
    """Return the type of rows that the stage is of; an empty text for supervised training."""
    return STAGES.get(c.get("stage", text, "sft"), "")


def prepare_stage(c: Translation) -> None:
    """Carry the objective of a stage of preferences, and its reference."""
    if not _scores(c):
        if c.get("finetuning_type", text, "lora") == "lora":
            no_dropout(c, "lora_dropout", "off in this stage there")
        tell_own_dropout(c)
    counted = "whole texts" if _scores(c) else "the answers alone"
    c.say_all(("train_on_prompt", "mask_history"), "left", f"{counted} count in this stage, there too")
    for key in ("packing", "neat_packing"):
        if not c.get(key, flag, False):
            c.say(key, "same", "each row is a sample")
        c.say(key, "left", "rows of this stage are not packed there: data.packing=none")
    c.default("data.packing", "none", "a sample is one row there; best_fit packs several, and the steps get fewer")
    why = "prompt and answers are both shortened there, here the prompt loses its start"
    c.default("data.long_documents", "truncate", why)
    if _scores(c):
        carry_reward(c)
        c.tell_default("model.head", {"type": "score"}, "there a value head, with a bias and dropout of 0.1")
    elif c.get("stage", text, "") == "kto":
        _kto(c)
    else:
        _pairs(c)
    c.say("stage", "carried", in_words("train.objective", c.fields["train.objective"]))


def _scores(c: Translation) -> bool:
    return c.get("stage", text, "") == "rm"


def _kto(c: Translation) -> None:
    weights: dict[str, tuple[str, float | None]] = {
        "desirable_weight": ("kto_chosen_weight", 1.0),
        "undesirable_weight": ("kto_rejected_weight", 1.0),
    }
    carry_objective(c, "kto", {"beta": ("pref_beta", 0.1), **weights})
    if c.get("pref_ftx", number, 0.0):
        c.say("pref_ftx", "refused", "KTO has no term of cross-entropy here")
    c.say("pref_ftx", "same", "no term of cross-entropy")
    _reference(c)


def _pairs(c: Translation) -> None:
    loss = c.get("pref_loss", text, "sigmoid")
    if loss not in _LOSSES:
        c.say("pref_loss", "refused", f"{loss} is not here; {', '.join(_LOSSES)} are")
        loss = "sigmoid"
    weight, numbers = c.get("pref_ftx", number, 0.0), {"beta": ("pref_beta", 0.1)}
    made: dict[str, Any] = {"loss": "hinge"} if loss == "hinge" else {}
    if loss == "sigmoid":
        numbers["label_smoothing"] = ("dpo_label_smoothing", 0.0)
    if loss == "simpo":
        numbers["gamma"] = ("simpo_gamma", 0.5)
    if loss == "orpo":
        made["sft"] = {"weight": 1 + weight, "over": "answer"}
        c.tell_default("train.objective.sft", made["sft"], f"of the answer alone; {EACH_TOKEN}")
    elif weight:
        made["sft"] = {"weight": weight}
    unread = {"dpo_label_smoothing", "simpo_gamma"}.difference(key for key, _ in numbers.values())
    c.say_all(unread, "left", f"means nothing to {loss}, there too")
    carry_objective(c, loss if loss in ("ipo", "orpo", "simpo") else "dpo", numbers, **made)
    c.say("pref_loss", "carried", in_words("train.objective", c.fields["train.objective"]))
    if weight:
        c.say("pref_ftx", "carried", f"{in_words('train.objective.sft.weight', made['sft']['weight'])}: {EACH_TOKEN}")
    c.say("pref_ftx", "same", "no further term of cross-entropy")
    if loss not in ("orpo", "simpo"):
        _reference(c)


def _reference(c: Translation) -> None:
    """Carry the reference: another model, or the base without the adapter that is continued."""
    c.carry("ref_model", "reference.model", c.get("ref_model", text, ""))
    if c.get("finetuning_type", text, "lora") == "lora" and "adapter_name_or_path" in c.given:
        c.default("reference.model", "base", "what is compared with is the model without adapter_name_or_path")


def format_of_stage(columns: dict[str, str], tags: dict[str, str], rows: str, *, conversations: bool) -> dict[str, Any]:
    """Return the format of a dataset. Raises NotHereError if its rows cannot be read."""
    named = {"chosen": "chosen", "rejected": "rejected"} if rows == PAIRS else {"label": "kto_tag"}
    missing = [theirs for theirs in named.values() if not columns.get(theirs)]
    if missing:
        raise NotHereError(f"a dataset of this stage has {' and '.join(missing)} in its columns")
    made: dict[str, Any] = {"type": rows}
    if conversations:
        if any(tags.get(tag, names[0]) not in names for tag, names in _USUAL.items()):
            raise NotHereError("messages and roles have their usual names here: rename them by format.type=python")
        made["prompt" if rows == PAIRS else "completion"] = columns.get("messages", "conversations")
        if rows == JUDGED:
            made["prompt"] = None
    else:
        made["prompt"] = columns.get("prompt", "instruction")
        if rows == JUDGED:
            made["completion"] = columns.get("response", "output")
    made |= {ours: columns[theirs] for ours, theirs in named.items()}
    for name in ("system", "tools"):
        if columns.get(name):
            made[name] = columns[name]
    return made


def _detail(names: str, here: str) -> TheirOption:
    """Make details that this module settles, and that mean nothing to other stages."""
    return part(names, "stage", lambda c: c.get("stage", text, "sft") not in ("sft", "pt", *STAGES), here)


STAGE_OPTIONS = (
    _detail("pref_beta", "`train.objective.beta`"),
    _detail("pref_loss", "`train.objective`: sigmoid, hinge `dpo`; ipo, orpo, simpo; kto_pair refused"),
    _detail("pref_ftx", f"`train.objective.sft.weight`: {EACH_TOKEN}"),
    _detail("dpo_label_smoothing simpo_gamma", "`train.objective.label_smoothing`, `gamma`"),
    _detail("kto_chosen_weight kto_rejected_weight", "`train.objective.desirable_weight`, `undesirable_weight`"),
    _detail("ref_model", "`reference.model`"),
    refuse("ref_model_adapters", "merge them into the model, and name that as ref_model"),
    refuse("ref_model_quantization_bit", "the reference is computed in the run's own precision"),
    refuse("pref_bco_weight", "there is no such term here"),
    refuse("ld_alpha", "every token of an answer counts alike", off=(1,), alike="every token counts alike"),
    _detail(
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters "
        "reward_model_quantization_bit reward_model_type",
        "refused with `stage`, else left",
    ),
)
