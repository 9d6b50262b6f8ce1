"""Convert axolotl's `reward_model: true`: a head that scores, and its pairs."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.convert.preferences import PAIRS, no_dropout, tell_own_dropout
from raytune_fsdp.convert.rules import Translation, ask, flag, in_words, refuse, settled, text, whole
from raytune_fsdp.convert.scores import carry_reward, objective_in_words, without_head

_TYPE = "bradley_terry.chat_template"
_CLASS = "ForSequenceClassification"


def trains_rewards(c: Translation) -> bool:
    return c.get("reward_model", flag, False)


def prepare_reward(c: Translation) -> None:
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
    c.say("reward_model", "carried", objective_in_words(c))


def format_of_reward(c: Translation, prefix: str) -> dict[str, Any]:
    """Return the format of a dataset of pairs, by its type."""
    key = f"{prefix}type"
    made: dict[str, Any] = {"type": PAIRS, "prompt": "input", "system": "system"}
    if c.get(key, text, "") != _TYPE:
        why = f"of pairs for rewards {_TYPE} is here, with chat_template: see `format` of type python for other rows"
        c.say(key, "refused", why, prefix.rstrip("."))
    c.say(key, "carried", in_words("format", made))
    return made


def _class(c: Translation, key: str) -> None:
    if not c.get(key, text, "").endswith(_CLASS):
        c.say(key, "same", "by the model's config")
    elif trains_rewards(c):
        c.say(key, "carried", "model.head.type=score")
    else:
        why = "axolotl trains such a head with reward_model: true only; for classes and scores see model.head"
        c.say(key, "refused", why)


def _outputs(c: Translation, key: str) -> None:
    if not trains_rewards(c):
        c.say(key, "left", "means nothing without reward_model")
    elif c.get(key, whole, 1) == 1:
        c.say(key, "same", "a reward is one number")
    else:
        c.say(key, "refused", "a reward is one number: write 1")


REWARD_OPTIONS = (
    settled("reward_model", "`train.objective.type: reward`, `model.head.type: score`"),
    settled("center_rewards_coefficient", "`train.objective.center`"),
    ask("model_type type_of_model", "by the model's config; AutoModelForSequenceClassification: `model.head`", _class),
    ask("num_labels", "same if it is 1, else refused", _outputs),
    refuse("process_reward_model", "rewards of single steps of an answer are not here"),
)
