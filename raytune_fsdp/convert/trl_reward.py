"""TRL: convert files for `trl reward --config`."""

from __future__ import annotations

from raytune_fsdp.convert.preferences import PAIRS
from raytune_fsdp.convert.rules import Translation, carry, flag, refuse, settled, text
from raytune_fsdp.convert.scores import carry_reward, without_head
from raytune_fsdp.convert.trl_preferences import prepare_rows, project_of

_LR = 1e-4
_TOO_LONG = (
    "a pair is left out there if one of its answers is longer than max_length, here if both together are than twice"
)

_SEES = "TRL looks at the rows: this is for texts; for messages set format.style=chat; see `raytune-fsdp data preview`"


def _prepare(c: Translation) -> None:
    carry_reward(c, "center_rewards_coefficient")
    if c.get("use_peft", flag, False):
        without_head(c, "lora_modules_to_save")
    prepare_rows(c, PAIRS, lr=_LR, long=("drop", _TOO_LONG), sees=_SEES)
    why = "TRL takes a column `margin` if there is one: if so, set format.margin=margin"
    c.tell_default("data.train.*.format.margin", None, why)


TRL_REWARD = project_of(
    "reward",
    "Files for `trl reward --config`.",
    _prepare,
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
    lr=_LR,
)
