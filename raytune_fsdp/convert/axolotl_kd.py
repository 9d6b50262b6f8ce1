"""Convert axolotl's distillation (`kd_trainer`): its divergence, and the teacher, which a file does not name."""

from __future__ import annotations

from raytune_fsdp.convert.rules import Translation, ask, flag, leave, number, refuse, settled, whole
from raytune_fsdp.convert.teachers import ALL_OTHERS, MIXED, NAME_IT, carry_distillation, objective_in_words

TYPES = "axolotl.integrations.kd."
"""What the type of a dataset's rows begins with, if it has a teacher's part."""
_OF_K = "there both are made to sum to 1 over the k tokens"
_WITHOUT = "means nothing without kd_trainer"


def learns(c: Translation) -> bool:
    """Return whether a teacher is learned from."""
    return c.on("kd_trainer")


def prepare_kd(c: Translation) -> None:
    """Carry the objective and the teacher."""
    if not learns(c):
        c.say("kd_trainer", "same", "the loss is the cross-entropy")
        return
    if "rl" in c.given or c.get("reward_model", flag, False):
        c.say("kd_trainer", "refused", "a step has one objective: drop it, or rl and reward_model")
        return
    weight, beta = c.get("kd_alpha", number, 1.0), c.get("kd_beta", number, 0.0)
    if beta not in (0, 1):
        c.say("kd_beta", "refused", MIXED)
        beta = 0
    carry_distillation(c, beta, weight, c.get("kd_ce_alpha", number, 0.0))
    c.say_all(("kd_alpha", "kd_ce_alpha", "kd_beta"), "carried", objective_in_words(c))
    c.carry("kd_temperature", "teacher.temperature", c.get("kd_temperature", number, 1.0))
    c.carry("kd_online_topk", "teacher.top_k", c.get("kd_online_topk", whole, 64))
    c.tell_default("teacher.top_k", c.fields.get("teacher.top_k", 64), f"{_OF_K}; here, {ALL_OTHERS}")
    if c.teacher is None:
        c.say("kd_trainer", "refused", NAME_IT)
    else:
        c.put("teacher.model", c.teacher, "--teacher")
        c.say("kd_trainer", "carried", f"train.objective.type=distill, teacher.model={c.teacher}")


def _predictions(c: Translation, key: str) -> None:
    """Say what becomes of log-probabilities in the rows, and of a server."""
    if not learns(c):
        c.say(key, "left", _WITHOUT)
    elif c.teacher is None:
        c.say(key, "refused", NAME_IT, "kd_trainer")
    else:
        c.say(key, "left", f"teacher.model={c.teacher} is asked again, before training")


def _over_k(c: Translation, key: str) -> None:
    if not learns(c):
        c.say(key, "left", _WITHOUT)
    elif c.get(key, flag, False):
        c.say(key, "refused", f"{_OF_K}; here, {ALL_OTHERS}")
    else:
        c.say(key, "same", ALL_OTHERS)


def _decay(c: Translation, key: str) -> None:
    if learns(c) and c.get(key, number, 1.0) != c.get("kd_temperature", number, 1.0):
        c.say(key, "refused", "the temperature stays as it is: what the teacher says is kept at that one")
    else:
        c.say(key, "same", "the temperature stays as it is")


KD_OPTIONS = (
    settled("kd_trainer", "`train.objective.type: distill` and, with `--teacher`, `teacher.model`; without it refused"),
    settled("kd_alpha kd_beta", "`train.objective`: beta 0 `forward`, 1 `reverse`; others are refused"),
    settled("kd_ce_alpha", "`train.objective.cross_entropy`"),
    settled("kd_temperature", "`teacher.temperature`"),
    settled("kd_online_topk", "`teacher.top_k`"),
    ask("kd_online_server_base_url", "left with `--teacher`, else refused: teacher.model computes", _predictions),
    leave(
        "kd_online_server kd_online_server_model kd_online_timeout kd_online_max_new_tokens kd_compiled_kernel",
        "the teacher computes before training, in this run; see `teacher`",
    ),
    ask("kd_normalize_topk kd_top_k_before_softmax", "refused if true: all other tokens count, too", _over_k),
    ask("kd_temperature_min", "refused, unless it is kd_temperature", _decay),
    refuse("kd_zscore_base_temp", "logits are not standardised"),
    ask(
        "datasets.*.logprobs_field test_datasets.*.logprobs_field",
        "left with `--teacher`, else refused: log-probabilities in rows are not read",
        _predictions,
    ),
    leave("datasets.*.temperature test_datasets.*.temperature", "the teacher is asked at `teacher.temperature`"),
)
