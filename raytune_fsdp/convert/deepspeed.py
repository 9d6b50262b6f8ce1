"""Convert DeepSpeed's options: in axolotl, TRL and LLaMA-Factory (the name of its file, or its content as a map), and
in a JSON file of its own, which says how a model is spread, and perhaps its optimizer and batch."""

from __future__ import annotations

import re
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.optimizers import betas
from raytune_fsdp.convert.rules import (
    Project,
    Rule,
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
    settled,
    table,
    text,
    whole,
)
from raytune_fsdp.convert.schedules import ratio

_ZERO = {0: "replicate", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
_ZERO_LEFT = "how ZeRO moves weights; FSDP has its own ways"
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
    leave(_deep("zero_optimization zero_optimization.*"), _ZERO_LEFT),
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


# A file of its own. `auto` is left to the training script.

_SCRIPT = "as the training script says"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_WITH_PEAK = ("WarmupLR", "WarmupDecayLR")
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion"}


def _is_auto(c: Translation, key: str) -> bool:
    return key in c.given and bool(plain(c.given[key]) == "auto")


def _auto(c: Translation, key: str) -> bool:
    """Return whether there is nothing to carry; say so of what is left to the training script."""
    if _is_auto(c, key):
        c.say(key, "left", _SCRIPT)
    return key not in c.given or key in c.said


def prepare(c: Translation) -> None:
    stage = c.get("zero_optimization.stage", whole, 0)
    if stage not in _ZERO:
        c.say("zero_optimization.stage", "refused", "ZeRO has the stages 0 to 3")
    else:
        c.carry("zero_optimization.stage", "parallel.strategy", _ZERO[stage])
        c.default("parallel.strategy", _ZERO[stage], "without a stage of ZeRO nothing is sharded")
    _precision(c)
    _batch(c)
    _schedule(c)


def _precision(c: Translation) -> None:
    keys = {kind: f"{kind}.enabled" for kind in ("bf16", "fp16")}
    if any(key in c.given and _auto(c, key) for key in keys.values()):
        return
    on = [kind for kind, key in keys.items() if c.get(key, flag, False)]
    found = on[0] if on else "fp32"
    c.carry_all(keys.values(), "parallel.precision", found)
    c.default("parallel.precision", found, "neither bf16 nor fp16 is on")


def _batch(c: Translation) -> None:
    """Carry the batch: of a GPU, the passes of a step, and that of all GPUs, of which any two say the third."""
    micro, passes, whole_batch = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    given = {key: c.get(key, whole, 1) for key in (micro, passes, whole_batch) if not _auto(c, key)}
    if micro in given:
        c.carry(micro, "train.micro_batch", given[micro])
    if whole_batch in given:
        c.carry(whole_batch, "train.global_batch", given[whole_batch])
        c.say(passes, "left", "train_batch_size decides")
    elif micro in given and c.gpus is not None:
        total = given[micro] * given.get(passes, 1) * c.gpus
        c.put("train.global_batch", total, micro)
        c.say(passes, "carried", f"train.global_batch={total}")
    elif micro in given:
        c.problems.append(
            f"{micro}={given[micro]} is the batch of one GPU, and train.global_batch is that of all: give the number "
            "of GPUs that the file was meant for with --gpus N"
        )
    c.say(passes, "left", "a part of train.global_batch, which this file does not say")


def _schedule(c: Translation) -> None:
    key, steps = "scheduler.type", "scheduler.params.warmup_num_steps"
    if not _auto(c, key):
        kind = c.get(key, text, "")
        _peak(c, kind)
        floor = _least(c, kind)
        if kind not in _SCHEDULES:
            c.say(key, "refused", f"the schedules that are carried are {', '.join(_SCHEDULES)}: see optim.schedule")
        else:
            ours: dict[str, Any] = {"type": _SCHEDULES[kind], **({"floor": floor} if floor else {})}
            c.carry(key, "optim.schedule", ours, "its warmup is a straight line here, whatever its type")
    if not _auto(c, steps):
        c.carry(steps, "optim.warmup_steps", c.get(steps, whole, 0))
    total = "scheduler.params.total_num_steps"
    if not _auto(c, total):
        c.carry(total, "train.max_steps", c.get(total, whole, 1))


def _warmup_type(c: Translation, key: str) -> None:
    is_line = c.get(key, text, "log") == "linear"
    c.say(key, "same" if is_line else "carried", "a warmup is a straight line here")


def _peak(c: Translation, kind: str) -> None:
    """Carry the peak of the learning rate from a schedule that sets it itself, whatever the optimizer's is."""
    most, lr = "scheduler.params.warmup_max_lr", "optimizer.params.lr"
    if kind not in _WITH_PEAK:
        c.say(most, "left", f"means nothing without {' or '.join(_WITH_PEAK)}")
        return
    if _is_auto(c, most):
        c.say(most, "left", _SCRIPT)  # and transformers refuses an optimizer with another one
        return
    peak = c.get(most, number, 1e-3)
    c.carry(most, "optim.lr", peak)
    c.default("optim.lr", peak, "warmup_max_lr by default, which is the peak, whatever optimizer.params.lr says")
    if not _is_auto(c, lr) and c.get(lr, number, peak) != peak:
        c.say(lr, "left", "warmup_max_lr of the schedule is the peak, there too")


def _least(c: Translation, kind: str) -> float:
    """Return the fraction of the peak at which a schedule ends; 0 for most."""
    key = "scheduler.params.warmup_min_lr"
    least = 0 if _auto(c, key) else c.get(key, number, 0)
    if not least or kind != "WarmupDecayLR":
        c.say(key, "left" if least else "same", "a warmup begins near 0 here")
        return 0.0
    lr = "optimizer.params.lr"
    peak = c.fields.get("optim.lr") or (0 if _is_auto(c, lr) else c.get(lr, number, 0))
    if not peak:
        c.say(key, "refused", "a fraction of the peak here, which this file does not say: set optim.schedule.floor")
        return 0.0
    floor = ratio(least, peak)
    c.say(key, "carried", f"optim.schedule.floor={floor}, where it ends; a warmup begins near 0 here")
    return floor


def finish(c: Translation) -> None:
    """Tell DeepSpeed's defaults for the parts of training that the file has. Others are as the training script says."""
    optimizer = c.get("optimizer.type", text, "").lower()
    parts = [part for part in ("optimizer", "scheduler") if any(key.startswith(f"{part}.") for key in c.given)]
    if optimizer in _OPTIMIZERS:
        if "optimizer.params.lr" not in c.given and not _is_auto(c, "scheduler.params.warmup_max_lr"):
            c.default("optim.lr", 1e-3, "optimizer.params.lr by default")
        if "optimizer.params.weight_decay" not in c.given:
            decay = 0.01 if c.on("optimizer.params.torch_adam") else 0.0
            c.default("optim.weight_decay", decay, "optimizer.params.weight_decay by default")
    if c.get("scheduler.type", text, "") in _SCHEDULES and "scheduler.params.warmup_num_steps" not in c.given:
        c.default("optim.warmup_steps", 1000, "scheduler.params.warmup_num_steps by default")
    if parts and "gradient_clipping" not in c.given:
        c.default("optim.max_grad_norm", None, "gradients are not clipped by default")


def _number(field: str, *, off: float | None = None) -> Rule:
    def rule(c: Translation, key: str) -> None:
        if not _auto(c, key):
            value = c.get(key, number, 0)
            c.carry(key, field, None if value == off else value)

    return rule


def _own_optimizer(c: Translation, key: str) -> None:
    ours = None if _auto(c, key) else _OPTIMIZERS.get(c.get(key, text, "").lower())
    if ours is None:
        c.say(key, "refused", "the optimizers that are carried are AdamW, Adam and Lion: see optim.optimizer")
    elif ours == "adamw":
        c.say(key, "same", "AdamW: Adam is that, too, unless adam_w_mode is off")
    else:
        c.carry(key, "optim.optimizer", {"type": ours})


def _betas(c: Translation, key: str) -> None:
    if not _auto(c, key):
        is_lion = c.get("optimizer.type", text, "").lower() == "lion"
        betas(c, key, "set optim.optimizer.beta1 and beta2 afterwards" if is_lion else "")


_FILE_OPTIONS = (
    settled("zero_optimization.stage", "`parallel.strategy` (1 and 2: `shard_grad_op`)"),
    ask(
        "zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.cpu_offload "
        "zero_optimization.cpu_offload_params",
        "`parallel.cpu_offload`",
        _offload,
    ),
    leave("zero_optimization zero_optimization.*", _ZERO_LEFT),
    settled("bf16.enabled fp16.enabled", "`parallel.precision`"),
    leave("bf16 fp16 bf16.* fp16.*", "how DeepSpeed scales an fp16 loss; here it is scaled automatically"),
    settled("train_micro_batch_size_per_gpu", "`train.micro_batch`"),
    settled("train_batch_size gradient_accumulation_steps", "`train.global_batch`"),
    ask("gradient_clipping", "`optim.max_grad_norm` (0: null)", _number("optim.max_grad_norm", off=0)),
    ask("optimizer.type", "AdamW, and `optim.optimizer` of Lion; others are refused", _own_optimizer),
    ask("optimizer.params.lr", "`optim.lr`", _number("optim.lr")),
    ask("optimizer.params.weight_decay", "`optim.weight_decay`", _number("optim.weight_decay")),
    ask("optimizer.params.eps", "`optim.eps`", _number("optim.eps")),
    ask("optimizer.params.betas", "`optim.beta1`, `optim.beta2`", _betas),
    leave("optimizer.params.torch_adam", "how AdamW is computed"),
    refuse("optimizer.params.bias_correction", "moments are corrected for bias", off=(True,), alike="as here"),
    refuse("optimizer.params.adam_w_mode", "weight decay is apart from the gradient", off=(True,), alike="as here"),
    settled("scheduler.type", "`optim.schedule`: constant, linear and cosine, each with a warmup; others are refused"),
    settled("scheduler.params.warmup_num_steps", "`optim.warmup_steps`"),
    settled("scheduler.params.total_num_steps", "`train.max_steps`"),
    settled("scheduler.params.warmup_max_lr", "`optim.lr`, whatever `optimizer.params.lr` says"),
    settled("scheduler.params.warmup_min_lr", "`optim.schedule.floor` of WarmupDecayLR; a warmup begins near 0"),
    ask("scheduler.params.warmup_type", "a warmup is a straight line here", _warmup_type),
    refuse(
        "amp amp.enabled fp32_allreduce prescale_gradients gradient_predivide_factor sparse_gradients",
        "gradients are summed in fp32, and nothing is scaled on the way",
        off=(False, 0, 1.0),
    ),
    leave("optimizer scheduler optimizer.params scheduler.params", "an empty map sets nothing"),
    refuse(
        "optimizer.params.* scheduler.params.* scheduler.*",
        "not an option that is carried: see optim.optimizer and optim.schedule",
        off=("auto",),
        alike=_SCRIPT,
    ),
    leave(
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown comms_logger flops_profiler tensorboard "
        "wandb csv_monitor autotuning aio checkpoint comms_logger.* flops_profiler.* tensorboard.* wandb.* "
        "csv_monitor.* "
        "autotuning.* aio.* checkpoint.*",
        "what DeepSpeed prints and writes; see `metrics.jsonl` and `checkpoint`",
    ),
    leave(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type data_types data_types.* "
        "gradient_accumulation_dtype",
        "DeepSpeed is not used; see `parallel`",
    ),
    leave(
        "activation_checkpointing activation_checkpointing.*",
        "how activations are computed again; whether is said by parallel.activation_checkpointing",
    ),
)


DEEPSPEED = Project(
    name="deepspeed",
    title="DeepSpeed",
    about="The JSON file that Transformers, accelerate and axolotl take together with their config. It names no model "
    "and no data, so the result is a part of a config: put it into one. `auto` is left to what the rest says.",
    options=table(*_FILE_OPTIONS),
    prepare=prepare,
    finish=finish,
    fragment=True,
)
