"""Convert DeepSpeed's options in axolotl, TRL and LLaMA-Factory: the name of its file, or its content as a map."""

from __future__ import annotations

import re

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import (
    Said,
    Translation,
    ask,
    flag,
    in_words,
    leave,
    number,
    plain,
    refuse,
    same,
    text,
    whole,
)

_ZERO = {0: "replicate", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
_SEE = "see that its file sets no optimizer, schedule or clipping of its own"
_AUTO = "as it is outside of deepspeed"


def _file(c: Translation, key: str) -> None:
    """Carry the stage of ZeRO, taken from the name of DeepSpeed's file."""
    name = c.get(key, text, "").rpartition("/")[2]
    found = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    if found is None:
        why = "no stage of ZeRO is in its name: set parallel.strategy (ZeRO 3 is full_shard)"
        c.say(key, "left", f"{why}; {_SEE}")
        return
    _strategy(c, key, int(found[1]))
    more = ""
    if "offload" in name:
        c.put("parallel.cpu_offload", True, key)
        more = ", parallel.cpu_offload=true"
    said = c.said[key].text
    c.said[key] = Said("carried", f"{said}{more}; {_SEE}")


def _strategy(c: Translation, key: str, stage: int) -> None:
    c.put("parallel.strategy", _ZERO[stage], key)
    c.say(key, "carried", in_words("parallel.strategy", _ZERO[stage]))


def _stage(c: Translation, key: str) -> None:
    stage = c.get(key, whole, 0)
    if stage in _ZERO:
        _strategy(c, key, stage)
    else:
        c.say(key, "refused", "ZeRO has the stages 0 to 3")


def _offload(c: Translation, key: str) -> None:
    """Carry offloading: `{device: cpu}`, or true in old files."""
    value = spelled(c.given[key])
    device = str(value.get("device", "none") if isinstance(value, dict) else value).lower()
    if device in ("none", "false", "0"):
        c.say(key, "same", "weights and optimizer stay on the GPUs")
    else:
        c.carry(key, "parallel.cpu_offload", True)


def _clipping(c: Translation, key: str) -> None:
    if plain(c.given[key]) == "auto":
        c.say(key, "same", _AUTO)
        return
    norm = c.get(key, number, 1.0)
    if "max_grad_norm" in c.given and c.get("max_grad_norm", number, 1.0) != norm:
        c.say(key, "refused", "max_grad_norm of the file is another number: correct one of the two")
    c.carry(key, "optim.max_grad_norm", norm or None)


def _optimizer(c: Translation, key: str) -> None:
    if c.get(key, text, "").lower() in ("adamw", "auto"):
        c.say(key, "same", "AdamW")
    else:
        c.say(key, "refused", "name it outside of deepspeed (optim, or optimizer)", "deepspeed.optimizer")


def _half(c: Translation, key: str) -> None:
    """Compare `deepspeed.bf16.enabled` or `fp16` with the precision that the file sets outside of deepspeed."""
    kind = key.split(".")[1]
    if plain(c.given[key]) == "auto":
        c.say(key, "same", _AUTO)
        return
    on = c.get(key, flag, False)
    if on == str(c.fields.get("parallel.precision", "bf16")).startswith(kind):
        c.say(key, "same", _AUTO)
    else:
        c.say(key, "refused", f"{kind} of the file says otherwise: correct one of the two")


def _deep(names: str) -> str:
    return " ".join(f"deepspeed.{name}" for name in names.split())


# The options in a map of DeepSpeed. `auto` means what the file says outside of it.
DEEPSPEED_OPTIONS = (
    ask("deepspeed", "`parallel.strategy`, by the stage in the file's name", _file),
    ask(_deep("zero_optimization.stage"), "`parallel.strategy` (1 and 2: `shard_grad_op`)", _stage),
    ask(
        _deep(
            "zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.cpu_offload "
            "zero_optimization.cpu_offload_params"
        ),
        "`parallel.cpu_offload`",
        _offload,
    ),
    leave(_deep("zero_optimization zero_optimization.*"), "how ZeRO moves weights; FSDP has its own ways"),
    ask(_deep("gradient_clipping"), "`optim.max_grad_norm`", _clipping),
    ask(_deep("optimizer.type"), "same, if it is AdamW; others are named outside of deepspeed", _optimizer),
    refuse(
        _deep("optimizer.params.* optimizer.params"),
        "set it outside of deepspeed, by its name there (learning_rate, weight_decay, adam_beta1, …)",
        off=("auto",),
        alike=_AUTO,
    ),
    refuse(
        _deep("scheduler.type scheduler.params scheduler.params.* scheduler.* scheduler"),
        "DeepSpeed's schedules are not here: set lr_scheduler_type or lr_scheduler outside of deepspeed",
        off=("auto",),
        alike=_AUTO,
    ),
    ask(_deep("bf16.enabled fp16.enabled"), "same, if the file says so outside of it; else refused", _half),
    leave(_deep("bf16 fp16 bf16.* fp16.*"), "how DeepSpeed scales an fp16 loss; here it is scaled automatically"),
    refuse(
        _deep("train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps"),
        "the file says its batch outside of deepspeed; write auto here",
        off=("auto",),
        alike=_AUTO,
    ),
    refuse(
        _deep("amp amp.enabled fp32_allreduce prescale_gradients gradient_predivide_factor sparse_gradients"),
        "gradients are summed in fp32, and nothing is scaled on the way",
        off=(False, 0, 1.0),
    ),
    same(_deep("optimizer"), "AdamW, as the file says outside of deepspeed"),
    leave(
        _deep(
            "steps_per_print wall_clock_breakdown dump_state memory_breakdown comms_logger flops_profiler "
            "tensorboard wandb csv_monitor autotuning aio checkpoint"
        ),
        "what DeepSpeed prints and writes; see `metrics.jsonl` and `checkpoint`",
    ),
    leave(
        _deep(
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type activation_checkpointing"
        ),
        "DeepSpeed is not used; see `parallel`",
    ),
)
