"""Convert the options of transformers' TrainingArguments, which TRL and LLaMA-Factory take, and axolotl in part."""

from __future__ import annotations

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.deepspeed import DEEPSPEED_OPTIONS
from raytune_fsdp.convert.optimizers import ADAMW_OPTIONS, optimizer
from raytune_fsdp.convert.rules import (
    Translation,
    ask,
    carry,
    flag,
    flag_or_auto,
    in_words,
    leave,
    number,
    refuse,
    same,
    settled,
    switch,
    text,
    unless_zero,
    whole,
    words,
)
from raytune_fsdp.convert.runs import ATTENTION_HERE, attention, cadence, global_batch, in_steps, length, run_directory
from raytune_fsdp.convert.schedules import AHEAD, schedule, warmup
from raytune_fsdp.convert.sharding import FSDP_OPTIONS, activation_checkpointing, fsdp

_LONGEST_SECONDS = 86400
"""How long a collective may take. LLaMA-Factory's examples have 180,000,000, so that ranks can wait while one prepares
the data."""


def precision(c: Translation, *, default: str) -> str:
    """Return the precision that the switches for mixed precision choose; without any of them, the default."""
    bf16, fp16 = c.get("bf16", flag, default == "bf16"), c.get("fp16", flag, False)
    if "bf16" not in c.given and fp16:
        bf16 = False
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _reports(c: Translation, key: str) -> None:
    found = c.get(key, words, [])
    if set(found) <= {"none"}:
        c.carry(key, "tracking.mlflow.enabled", False)
        return
    fields = [f"tracking.{each}.enabled" for each in ("mlflow", "wandb", "tensorboard") if each in found]
    if "all" in found:  # there it means: all that are installed
        fields = ["tracking.mlflow.enabled"]
    for field in fields:
        c.put(field, True, key)
    others = sorted({*found} - {"mlflow", "wandb", "tensorboard", "all", "none"})
    carried = ", ".join(in_words(field, True) for field in fields)
    rest = f"no {', '.join(others)} here" if others else ""
    if fields:
        c.say(key, "carried", "; ".join(filter(None, (carried, rest))))
    else:
        c.say(key, "left", f"{rest}: metrics go to the run directory, and to MLflow where it is installed")


def early_stopping(c: Translation, key: str) -> None:
    """Carry the number of evaluations without an improvement; with 0, no run ends early."""
    patience = c.get(key, whole, 0)
    if patience < 1:
        c.say(key, "same", "the run ends after its steps or epochs")
    elif "eval.every" in c.fields:
        c.carry(key, "eval.early_stop", {"patience": patience})
    else:
        c.say(key, "refused", "nothing is evaluated every N steps, so the run ends after its steps or epochs")


def _push(c: Translation, key: str) -> None:
    name = c.get("hub_model_id", text, "")
    if c.get("push_to_hub", flag, False) and name:
        c.carry(key, "export.push", name)
    elif not c.get("push_to_hub", flag, False):
        c.say(key, "same", "nothing is pushed")
    else:
        c.say(key, "left", "set export.push to owner/name")


def _keep(c: Translation, key: str) -> None:
    count = c.get(key, whole, 0)
    if count >= 1:
        c.carry(key, "checkpoint.keep_last", max(2, count), "" if count > 1 else "two, in case the last is damaged")
    else:
        c.say(key, "left", "all are kept there, the last two here; see checkpoint.keep_last")


def _timeout(c: Translation, key: str) -> None:
    seconds = c.get(key, number, 0.0)
    if seconds <= _LONGEST_SECONDS:
        c.carry(key, "cluster.collective_minutes", seconds / 60)
    else:
        c.say(key, "left", "longer than a day, in which nobody would notice a rank that hangs; see collective_minutes")


def _metric(c: Translation, key: str) -> None:
    if c.get(key, text, "loss") in ("loss", "eval_loss"):
        c.say(key, "same", "the mean loss over all evaluations")
    elif c.on("load_best_model_at_end"):
        c.say(key, "refused", "only losses are measured: without it, the lowest loss is best; see checkpoint.best")
    else:
        c.say(key, "left", "no best one is kept (checkpoint.keep_best=0)")


def _direction(c: Translation, key: str) -> None:
    """Carry which direction is better; it belongs to the metric, and is left without it."""
    metric = "metric_for_best_model"
    if metric in c.dropping or spelled(c.given.get(metric, "loss")) not in ("loss", "eval_loss"):
        c.say(key, "left", f"goes with {metric}, which is not carried")
    else:
        c.carry(key, "checkpoint.best_is", "highest" if c.get(key, flag, False) else "lowest")


def _sampling(c: Translation, key: str) -> None:
    how = c.get(key, text, "random")
    if how == "sequential":
        c.carry(key, "data.shuffle", "none")
    elif how == "random":
        c.say(key, "same", "the order is random")
    else:
        c.say(key, "left", "it changes the order only; packed samples are of one length")


def _log(c: Translation, key: str) -> None:
    count = in_steps(c, c.get(key, number, 1) or 1)
    if count is None:
        c.say(key, "left", "a fraction of the run's steps; set train.log_every")
    else:
        c.carry(key, "train.log_every", count)


def prepare_training(c: Translation, *, lr: float, output: str, default_precision: str) -> str:
    """Settle what several options say together. Returns the precision, about which the caller may know more."""
    length(c, "num_train_epochs", default=3.0)
    global_batch(c, "per_device_train_batch_size", "gradient_accumulation_steps", default=8)
    run_directory(c, "output_dir", default=output)
    warmup(c, schedule(c, "lr_scheduler_type", default="linear", default_lr=lr))
    cadence(c, "checkpoint.every", "save_strategy", "save_steps", without="steps", every=500)
    strategy_key = c.first("eval_strategy", "evaluation_strategy")
    cadence(c, "eval.every", strategy_key, "eval_steps", without="no", every=c.get("logging_steps", number, None))
    activation_checkpointing(c, "gradient_checkpointing", "activation_checkpointing")
    return precision(c, default=default_precision)


def finish_training(c: Translation, *, lr: float) -> None:
    """Add the defaults of TrainingArguments that are not ours."""
    if lr != 5e-5:
        c.default("optim.lr", lr, "learning_rate by default")
    c.default("optim.weight_decay", 0.0, "weight_decay by default")
    if "optim.warmup_steps" not in c.fields:
        c.default("optim.warmup_ratio", 0.0, "no warmup by default")
    c.default("run.seed", 42, "seed by default")


def evaluates(c: Translation) -> bool:
    strategy_key = c.first("eval_strategy", "evaluation_strategy")
    return c.get(strategy_key, text, "no").lower() not in ("no", "false")


# The options of the optimizer, which have the same names in axolotl.
OPTIM_OPTIONS = (
    carry("learning_rate", "optim.lr", number),
    carry("weight_decay", "optim.weight_decay", number, "here it leaves out embeddings, not only norms and biases"),
    *ADAMW_OPTIONS,
    ask(
        "max_grad_norm",
        "`optim.max_grad_norm` (0: null)",
        lambda c, key: c.carry(key, "optim.max_grad_norm", c.get(key, number, 1.0) or None),
    ),
    settled("warmup_steps", f"`optim.warmup_steps`: {AHEAD}"),
    settled("warmup_ratio", f"`optim.warmup_ratio`: {AHEAD}"),
    settled(
        "lr_scheduler_kwargs lr_scheduler_kwargs.num_cycles lr_scheduler_kwargs.min_lr "
        "lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.power lr_scheduler_kwargs.lr_end "
        "lr_scheduler_kwargs.num_decay_steps lr_scheduler_kwargs.min_lr_ratio lr_scheduler_kwargs.decay_type "
        "lr_scheduler_kwargs.warmup_type",
        "`optim.schedule`: its `floor` and `decay`",
    ),
    refuse("optim_args", "set what you need of them in `optim.optimizer`"),
    refuse(
        "optim_target_modules",
        "no optimizer here projects gradients of some modules; for rates by pattern see `optim.groups`",
    ),
    unless_zero("neftune_noise_alpha", "train.neftune_noise_alpha"),
    refuse(
        "auto_find_batch_size",
        "a batch is what `train` says; a smaller micro_batch does not change what is learned",
    ),
)


# The other options that have the same names in axolotl.
SHARED_OPTIONS = (
    settled("gradient_accumulation_steps", "`train.global_batch`"),
    settled("max_steps", "`train.max_steps` (-1: none)"),
    settled("output_dir", "`run.storage` and `run.name`"),
    settled("save_strategy save_steps", "`checkpoint.every`, of epochs `{per_epoch: 1}`"),
    settled("eval_strategy evaluation_strategy eval_steps", "`eval.every`, of epochs `{per_epoch: 1}`"),
    settled("gradient_checkpointing", "`parallel.activation_checkpointing: full`"),
    settled("bf16 fp16", "`parallel.precision`"),
    ask("save_total_limit", "`checkpoint.keep_last`, at least 2", _keep),
    ask("logging_steps", "`train.log_every`", _log),
    switch(
        "load_best_model_at_end",
        "checkpoint.keep_best",
        1,
        "the run exports its end",
        "the run exports its end; the best one with `raytune-fsdp export`",
    ),  # fmt: skip
    ask("metric_for_best_model", "same for the loss, else refused with load_best_model_at_end", _metric),
    ask("greater_is_better", "`checkpoint.best_is`, if the metric is the loss", _direction),
    ask("ddp_timeout", "`cluster.collective_minutes`; more than a day is left", _timeout),
    refuse(
        "resume_from_checkpoint",
        "a run of another trainer cannot be continued; name its weights as the model",
        off=(True, False, 1, 0),
        alike="the same name continues the same run (run.resume)",
        here="same (`run.resume`); a path is refused",
    ),  # fmt: skip
    ask(
        "attn_implementation",
        ATTENTION_HERE,
        attention,
    ),
    ask("fsdp", "`parallel.strategy`, `parallel.cpu_offload`", fsdp),
    *DEEPSPEED_OPTIONS,
    *FSDP_OPTIONS,
    carry("trust_remote_code", "model.trust_remote_code", flag),
    carry("seed", "run.seed", whole),
    carry("torch_compile", "parallel.compile", flag_or_auto),
    same("save_safetensors", "always safetensors"),
    same("remove_unused_columns", "only the columns that a format names are read"),
    leave("torch_compile_backend torch_compile_mode torch_compile_options", "torch's default; see `parallel.compile`"),
    leave("gradient_checkpointing_kwargs.use_reentrant gradient_checkpointing_kwargs", "never reentrant here"),
    leave("group_by_length", "it changes the order only; packed samples are of one length"),
    leave("hub_strategy hub_revision", "the export is pushed once, at the end"),
    leave("dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor", "data is prepared automatically"),
    leave("dataloader_drop_last", "the last step has what is left of the data"),
    leave(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
        "how DDP sums gradients; here FSDP does",
    ),
    leave("save_only_model", "checkpoints are complete"),
    leave("torch_empty_cache_steps", "it changes memory only"),
    leave("local_rank", "`cluster` says what a run runs on"),
    refuse("accelerator_config", "it may change what a batch is; say it in `train`", off=()),
)


# All options of TrainingArguments.
TRAINING_OPTIONS = (
    settled("per_device_train_batch_size", "`train.micro_batch`, `train.global_batch`"),
    settled("num_train_epochs", "`train.epochs`"),
    settled("lr_scheduler_type", "`optim.schedule`"),
    ask("optim", "`optim.optimizer`: AdamW, also in 8 bits, Adafactor, Lion, SGD; others are refused", optimizer),
    *OPTIM_OPTIONS,
    *SHARED_OPTIONS,
    unless_zero("label_smoothing_factor", "train.label_smoothing", "in training only"),
    settled("activation_checkpointing", "`parallel.activation_checkpointing: full`"),
    carry("tf32", "parallel.tf32", flag),
    carry("full_determinism", "run.deterministic", flag),
    carry("eval_on_start", "eval.at_start", flag),
    carry("hub_private_repo", "export.private", flag),
    ask("push_to_hub hub_model_id", "`export.push`", _push),
    ask("report_to", "`tracking.mlflow`, `tracking.wandb` and `tracking.tensorboard`; others are left", _reports),
    ask("train_sampling_strategy", "`data.shuffle`", _sampling),
    switch("use_cpu no_cuda", "cluster.device", "cpu", "GPUs, where there are any"),
    refuse(
        "average_tokens_across_devices",
        "a loss is the mean over all tokens of a step, not of each GPU's mean",
        off=(True,),
        alike="a loss is the mean over all tokens of a step",
    ),
    same(
        "restore_callback_states_from_checkpoint skip_memory_metrics logging_nan_inf_filter",
        "what is saved and logged is whole here",
    ),
    leave("run_name project", "a run has the name of its directory; see `run.name`"),
    leave("per_device_eval_batch_size eval_accumulation_steps", "it changes no loss; `train.micro_batch` counts"),
    leave("do_train do_eval do_predict", "training, and evaluating where there is data for it"),
    leave("overwrite_output_dir", "a finished run is not overwritten; see `run.resume`"),
    leave("data_seed", "`run.seed` decides the order, too"),
    leave("use_liger_kernel liger_kernel_config use_ipex", "other kernels for the same function; see `model.loss`"),
    leave("use_cache jit_mode_eval", "nothing is cached in training"),
    leave("bf16_full_eval fp16_full_eval half_precision_backend fp16_opt_level fp16_backend", "`parallel.precision`"),
    leave(
        "logging_strategy logging_first_step logging_dir log_level log_level_replica log_on_each_node disable_tqdm "
        "include_num_input_tokens_seen include_tokens_per_second include_for_metrics",
        "every step is in `metrics.jsonl`",
    ),
    leave(
        "prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object eval_delay "
        "label_names include_inputs_for_metrics",
        "an evaluation measures the loss",
    ),
    leave(
        "save_on_each_node enable_jit_checkpoint ignore_data_skip",
        "checkpoints are whole, on shared storage, and continue where they were taken; see `checkpoint`",
    ),
    leave("hub_token hub_always_push", "HF_TOKEN in the environment; pushed once, at the end"),
    leave("trackio_space_id trackio_bucket_id trackio_static_space_id", "metrics go to MLflow; see `tracking`"),
    leave(
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order length_column_name",
        "data is prepared automatically",
    ),
    leave(
        "ddp_backend ddp_static_graph parallelism_config tpu_num_cores debug ray_scope past_index",
        "how processes are started and communicate; see `cluster`",
    ),
    leave(
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs.*",
        "how activations are computed again; see `parallel.activation_checkpointing`",
    ),
)
