"""Convert axolotl's `rl: dpo | ipo | kto | orpo | simpo` and `reward_model`: objectives, and types of datasets."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.convert.preferences import (
    JUDGED,
    PAIRS,
    carry_objective,
    carry_reward,
    losses_of_pairs,
    no_dropout,
    tell_own_dropout,
    without_head,
)
from raytune_fsdp.convert.rules import (
    Translation,
    a_map,
    ask,
    flag,
    in_words,
    leave,
    number,
    refuse,
    same,
    settled,
    text,
    whole,
)

_ROWS = {"dpo": PAIRS, "ipo": PAIRS, "orpo": PAIRS, "simpo": PAIRS, "kto": JUDGED}
TEMPLATES = {"chatml": "chatml", "llama3": "llama-3"}
"""axolotl's names of templates that come with this package."""
_SYSTEM = {"system": "system"}
_TYPES: dict[str, dict[str, dict[str, Any]]] = {
    PAIRS: {
        "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response", **_SYSTEM},
        "argilla_chat": {"prompt": None},
        "icr": {"prompt": "input", **_SYSTEM},
        "intel": {"prompt": "question", **_SYSTEM},
        "prompt_pairs": _SYSTEM,
        "ultra": {"prompt": None, **_SYSTEM},
    },
    JUDGED: {
        "argilla": {"prompt": "instruction", **_SYSTEM},
        "argilla_chat": {"prompt": None},
        "intel": {"prompt": "question", **_SYSTEM},
        "prompt_pairs": _SYSTEM,
        "ultra": _SYSTEM,
    },
}
"""What the columns of a type are called, after the name of its template."""
_OWN = ("field_prompt", "field_chosen", "field_rejected", "field_completion", "field_label")
_OWN_TEXTS = ("prompt_format", "chosen_format", "rejected_format", "completion_format")
FIELDS = (*_OWN, *(f"type.{key}" for key in (*_OWN, *_OWN_TEXTS)))
"""Keys of a dataset that only these types have."""


def rows_of_rl(c: Translation) -> str:
    """Return the type of rows that `rl` or `reward_model` is of; an empty text for supervised training."""
    if _trains_rewards(c):
        return PAIRS
    return _ROWS.get(c.get("rl", text, ""), "")


def prepare_rl(c: Translation) -> None:
    """Carry the objective, and settle what it says of adapters."""
    if _trains_rewards(c):
        _prepare_reward(c)
        return
    kind = c.get("rl", text, "")
    if not kind:
        return
    if kind not in _ROWS:
        c.say("rl", "refused", f"{kind} is not here; {', '.join(_ROWS)} are")
        return
    if "adapter" in c.given:
        no_dropout(c, "lora_dropout", "TRL turns off that of adapters with rl")
    tell_own_dropout(c)
    if kind in ("dpo", "ipo", "kto"):
        why = (
            "with rl axolotl may begin a new adapter beside it: drop it, and set method.adapter in the result; the "
            "reference is then the base with that adapter, or without it with reference.model=base"
        )
        c.say("lora_model_dir", "refused", why)
    c.say("train_on_inputs", "left", "with rl the answers alone count, there too")
    if kind == "dpo":
        _dpo(c)
    else:
        carry_objective(c, kind, {"beta": (_beta(c, kind), 0.1), **_NUMBERS[kind]})
    c.say("rl", "carried", in_words("train.objective", c.fields["train.objective"]))
    if c.get("dpo_use_weighting", flag, False):
        c.say("dpo_use_weighting", "refused", "pairs have weights of their own only (format.weight)")
    if c.get("max_prompt_len", number, 0):
        c.say("max_prompt_len", "refused", "prompts have no limit of their own; see data.long_documents")


_NUMBERS: dict[str, dict[str, tuple[str, float | None]]] = {
    "ipo": {},
    "kto": {f"{each}_weight": (f"kto_{each}_weight", 1.0) for each in ("desirable", "undesirable")},
    "orpo": {},
    "simpo": {"gamma": ("simpo_gamma", 0.5), "sft.weight": ("cpo_alpha", 1.0)},
}
"""What other objectives have besides beta, as `carry_objective` takes it."""


def _beta(c: Translation, kind: str) -> str:
    """Return the key that sets beta: of several, axolotl takes the first (before April 2025 orpo_alpha, if there)."""
    keys = ["trl.beta", "rl_beta", "dpo_beta"]
    if kind == "orpo":
        keys.append("orpo_alpha")
    return c.first(*keys)


def _dpo(c: Translation) -> None:
    pair, weight = losses_of_pairs(c, "dpo_loss_type", "dpo_loss_weights")
    numbers: dict[str, tuple[str, float | None]] = {"beta": (_beta(c, "dpo"), 0.1)}
    made: dict[str, Any] = {}
    if pair not in ("hinge", "ipo"):
        numbers["label_smoothing"] = ("dpo_label_smoothing", 0.0)
    if pair == "hinge" or (pair == "robust" and c.get("dpo_label_smoothing", number, 0)):
        made["loss"] = pair
    if pair != "ipo" and (pair == "sigmoid_norm" or c.get("dpo_norm_loss", flag, False)):
        made["normalize"] = "length"
    c.say("dpo_norm_loss", "carried" if "normalize" in made else "same", in_words("train.objective", made))
    weight += c.get("rpo_alpha", number, 0.0)
    if weight:
        made["sft"] = {"weight": weight}
    note = "of these losses TRL itself reads it for robust alone, since 0.29" if pair != "robust" else ""
    carry_objective(c, "ipo" if pair == "ipo" else "dpo", numbers, {"label_smoothing": note}, **made)
    c.say_all(("rpo_alpha", "dpo_loss_weights"), "carried", in_words("train.objective.sft.weight", weight))
    c.say("dpo_loss_type", "carried", in_words("train.objective", c.fields["train.objective"]))


def format_of_rl(c: Translation, prefix: str, rows: str) -> dict[str, Any]:
    """Return the format of a dataset under `rl`, by its type."""
    if _trains_rewards(c):
        return _format_of_reward(c, prefix)
    if any(f"{prefix}type.{key}" in c.given for key in (*_OWN, *_OWN_TEXTS, "field_system")):
        return _own(c, prefix, rows)
    key = f"{prefix}type"
    kind = c.get(key, text, "")
    template, _, variant = kind.partition(".")
    made: dict[str, Any] = {"type": rows}
    if template == "chat_template":
        made |= _by_template(c, prefix, rows, variant)
    elif template in TEMPLATES and variant in _TYPES[rows]:
        made |= {name: column for name, column in _TYPES[rows][variant].items() if column != name or name == "system"}
    elif not kind or kind.startswith("passthrough"):
        made["style"] = "plain"
        c.tell_default(key, None, "rows go on as they are: this is for texts; for messages set format.style=chat")
    else:
        why = f"no format of ours; {', '.join(_TYPES[rows])} after chatml or llama3 are, and chat_template.default"
        c.say(key, "refused", f"{why}; see `format` of type python for rows of any kind", prefix.rstrip("."))
    c.say(key, "carried", in_words("format", made))
    return made


def template_of_rl(c: Translation, prefix: str) -> str:
    """Return the template that the name of a type begins with: `chatml.intel` has ChatML around its texts."""
    return TEMPLATES.get(c.get(f"{prefix}type", text, "").partition(".")[0], "") if rows_of_rl(c) else ""


def _by_template(c: Translation, prefix: str, rows: str, variant: str) -> dict[str, Any]:
    """Return the columns of rows whose messages the chat template renders."""
    made: dict[str, Any] = {}
    complete = variant in ("argilla", "argilla_chat")
    usual = (
        {"chosen": "chosen", "rejected": "rejected"}
        if rows == PAIRS
        else {"completion": "completion", "label": "label"}
    )
    if complete:
        made["prompt"] = None
    elif rows == PAIRS:
        made["prompt"] = c.get(f"{prefix}field_messages", text, "messages")
    for name in usual:
        key = f"{prefix}field_{name}"
        if (found := c.get(key, text, name)) != name:
            made[name] = found
        c.say(key, "carried", in_words(f"format.{name}", found))
    c.say(f"{prefix}field_messages", "left" if complete else "carried", in_words("format.prompt", made.get("prompt")))
    for key, expected in (("role", "role"), ("content", "content")):
        named = f"{prefix}message_property_mappings.{key}"
        if c.get(named, text, expected) == expected:
            c.say(named, "same", f"messages have {expected}")
        c.say(named, "refused", f"messages have {expected} here: rename it by a function, with format.type=python")
    named = f"{prefix}roles"
    roles = c.get(named, a_map, {})
    if all(names in (role, [role]) for role, names in roles.items()):
        c.say(named, "same", "roles have their usual names")
    c.say(named, "refused", "roles have their usual names here: rename them by a function, with format.type=python")
    return made


def _own(c: Translation, prefix: str, rows: str) -> dict[str, Any]:
    """Convert a type that the file defines, if it takes the columns as they are."""
    parts = ("prompt", "chosen", "rejected") if rows == PAIRS else ("prompt", "completion", "label")
    made: dict[str, Any] = {"type": rows, "style": "plain"}
    keys = [f"{prefix}type.{key}" for key in (*_OWN, *_OWN_TEXTS, "field_system")]
    for name in parts:
        column = c.get(f"{prefix}type.field_{name}", text, name)
        if column != name:
            made[name] = column
        shape = c.get(f"{prefix}type.{name}_format", text, "")
        if shape not in ("", f"{{{name}}}", f"{{{column}}}"):
            why = "the texts of a row are taken as they are: put them together by a function, with format.type=python"
            c.say(f"{prefix}type.{name}_format", "refused", why, prefix.rstrip("."))
    c.say(f"{prefix}type.field_system", "refused", "a plain text has no system message", prefix.rstrip("."))
    c.say_all(keys, "carried", in_words("format", made))
    return made


# Reward models.

_REWARD_TYPE = "bradley_terry.chat_template"
_REWARD_CLASS = "ForSequenceClassification"


def _trains_rewards(c: Translation) -> bool:
    return c.get("reward_model", flag, False)


def _prepare_reward(c: Translation) -> None:
    """Carry the objective and the head."""
    adapts = "adapter" in c.given
    if adapts:
        no_dropout(c, "lora_dropout", "TRL turns off that of adapters in reward models")
    tell_own_dropout(c)
    c.say("rl", "refused", "reward_model asks for another loss: drop one of the two")
    c.say("train_on_inputs", "left", "a reward is of the whole text, there too")
    carry_reward(c, "center_rewards_coefficient")
    if adapts:
        without_head(c, "lora_modules_to_save")
    objective = in_words("train.objective", c.fields["train.objective"])
    c.say("reward_model", "carried", f"{objective}, model.head.type=score")


def _format_of_reward(c: Translation, prefix: str) -> dict[str, Any]:
    """Return the format of a dataset of pairs, by its type."""
    key = f"{prefix}type"
    made: dict[str, Any] = {"type": PAIRS, "prompt": "input", "system": "system"}
    if c.get(key, text, "") != _REWARD_TYPE:
        why = (
            f"of pairs for rewards {_REWARD_TYPE} is here, with chat_template: see `format` of type python for other "
            "rows"
        )
        c.say(key, "refused", why, prefix.rstrip("."))
    c.say(key, "carried", in_words("format", made))
    return made


def _class(c: Translation, key: str) -> None:
    if not c.get(key, text, "").endswith(_REWARD_CLASS):
        c.say(key, "same", "by the model's config")
    elif _trains_rewards(c):
        c.say(key, "carried", "model.head.type=score")
    else:
        why = "axolotl trains such a head with reward_model: true only; for classes and scores see model.head"
        c.say(key, "refused", why)


def _outputs(c: Translation, key: str) -> None:
    if not _trains_rewards(c):
        c.say(key, "left", "means nothing without reward_model")
    elif c.get(key, whole, 1) == 1:
        c.say(key, "same", "a reward is one number")
    else:
        c.say(key, "refused", "a reward is one number: write 1")


RL_OPTIONS = (
    settled("rl", "`train.objective`: dpo, ipo, kto, orpo, simpo; others refused"),
    settled("trl.beta rl_beta dpo_beta orpo_alpha", "`train.objective.beta`: of the first that is there"),
    settled("dpo_loss_type dpo_norm_loss", "`train.objective`: its `loss` and `normalize`; ipo is a type"),
    settled("dpo_label_smoothing", "`train.objective.label_smoothing`"),
    settled("simpo_gamma", "`train.objective.gamma`, 0.5 by default"),
    settled("cpo_alpha rpo_alpha dpo_loss_weights", "`train.objective.sft.weight`; cpo_alpha is 1 by default"),
    settled("kto_desirable_weight kto_undesirable_weight", "the same fields of `train.objective`"),
    settled("dpo_use_weighting", "refused: pairs have weights of their own only"),
    settled("max_prompt_len", "refused: prompts have no limit of their own"),
    same("precompute_ref_log_probs", "the same numbers before and during training; see `reference.when`"),
    same("rl_adapter_ref_model", "the reference is what the run starts from"),
    same("dpo_padding_free", "padding does not change what is learned"),
    leave("dpo_use_liger_kernel dpo_use_logits_to_keep", "other kernels for the same function"),
    leave("dpo_generate_during_eval", "see `eval.prompts`"),
    leave("trl trl.* vllm ebft", "for kinds of rl that are refused"),
    settled("reward_model", "`train.objective.type: reward`, `model.head.type: score`"),
    settled("center_rewards_coefficient", "`train.objective.center`"),
    ask("model_type type_of_model", "by the model's config; AutoModelForSequenceClassification: `model.head`", _class),
    ask("num_labels", "same if it is 1, else refused", _outputs),
    refuse("process_reward_model", "rewards of single steps of an answer are not here"),
)
