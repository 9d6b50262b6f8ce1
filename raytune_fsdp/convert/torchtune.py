"""torchtune: convert files for `tune run … --config`. A `_component_` names the function that makes a part of a run."""

from __future__ import annotations

import re
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.adapters import NOT_BIT_EQUAL
from raytune_fsdp.convert.optimizers import betas
from raytune_fsdp.convert.preferences import PAIRS, TOO_LONG, carry_objective, sample_of_two
from raytune_fsdp.convert.rules import (
    Project,
    Translation,
    a_map,
    ask,
    carry,
    flag,
    in_words,
    leave,
    number,
    plain,
    refuse,
    same,
    settled,
    switch,
    table,
    text,
    whole,
    words,
)
from raytune_fsdp.convert.runs import BUILDERS, global_batch, part_of_files, place, run_directory
from raytune_fsdp.convert.schedules import AHEAD
from raytune_fsdp.convert.sharding import FP8, strategy

_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_TYPES = {"bf16": "bf16_pure", "fp32": "fp32"}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "adamw"},
    "PagedAdamW": {"type": "adamw"},
    "AdamW8bit": {"type": "adamw", "moments": "8bit"},
    "PagedAdamW8bit": {"type": "adamw", "moments": "8bit"},
    "AdamW4bit": {"type": "adamw", "moments": "8bit"},
    "AdamWFp8": {"type": "adamw", "moments": "8bit"},
    "SGD": {"type": "sgd"},
}
_PAIRS = {"DPOLoss": "beta", "RSOLoss": "gamma"}
"""Losses of pairs, and what they call the scale of the difference."""
_OTHER_FORM = "reads files of another form: name the model's Hugging Face files"
_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")


def _made_by(c: Translation, part: str) -> str:
    """Return the last name of the component of a part; an empty text if there is none."""
    return c.get(f"{part}._component_", text, "").rpartition(".")[2]


def prepare(c: Translation) -> None:
    _fill_in(c)
    _model(c)
    kind = c.get("dtype", text, "bf16")
    if kind in _TYPES:
        note = "weights in bf16, too, as there" if kind == "bf16" else ""
        c.carry_or_default("dtype", "parallel.precision", _TYPES[kind], "dtype by default", note)
    else:
        c.say("dtype", "refused", "the types of a run there are bf16 and fp32")
    _length(c)
    _batch(c)
    run_directory(c, "output_dir", default="torchtune-out")
    if "train.epochs" in c.fields:
        c.default("checkpoint.every", {"per_epoch": 1}, "a checkpoint after every epoch")
    _schedule(c)
    _objective(c)
    _data(c)


def _fill_in(c: Translation) -> None:
    """Replace `${output_dir}` by what the file says under that name, as its loader does."""

    def value(found: re.Match[str]) -> str:
        named = c.given.get(found[1])
        if found[1] not in TORCHTUNE.options:
            c.say(found[1], "carried", f"in the values that have {found[0]}")
        return str(plain(named)) if isinstance(plain(named), str | int | float) else found[0]

    for key, given in c.given.items():
        word = plain(given)
        if isinstance(word, str) and "${" in word:
            c.given[key] = filled = re.sub(r"\$\{([\w.]+)\}", value, word)
            if "${" in filled and not key.startswith(("metric_logger.", "profiler.")):
                c.say(key, "refused", "stands for a value that is not in the file: write the value")


def _model(c: Translation) -> None:
    """Carry the weights, which the checkpointer names, and the adapters, which are a part of the model's name there."""
    key, named = "checkpointer.checkpoint_dir", _made_by(c, "checkpointer")
    if named and not named.endswith("HFCheckpointer"):
        c.say("checkpointer._component_", "refused", _OTHER_FORM)
    c.say("checkpointer._component_", "same", "weights are read from Hugging Face files")
    c.carry(key, "model.path", c.get(key, text, ""))
    if "model.path" not in c.fields:
        c.problems.append("no model is named: set checkpointer.checkpoint_dir in the file")
    name = _made_by(c, "model")
    adapted = re.match(r"(q?)lora_", name)
    if "vision" in name or "clip" in c.get("model._component_", text, ""):
        c.say("model._component_", "refused", "text only")
    if adapted is None:
        c.say("model._component_", "same", "every weight is trained (method.type=full)")
        return
    if "phi3" in name or "phi4" in name:
        c.say(
            "model._component_",
            "refused",
            "its projections are one layer in the Hugging Face files, with other adapters: use method.type=lora",
        )
    quantized = bool(adapted[1]) or c.get("model.quantize_base", flag, False)
    kind = "qlora" if quantized else "lora"
    c.put("method.type", kind, "model._component_")
    note = ""
    if quantized:
        c.put("method.quantization", "nf4", "model._component_")
        note = f", method.quantization=nf4: {NOT_BIT_EQUAL['nf4']}"
    c.say("model._component_", "carried", f"method.type={kind}{note}")
    c.say("model.quantize_base", "carried" if quantized else "same", f"method.type={kind}")
    for theirs, ours, read, default in (
        ("lora_rank", "rank", whole, 8),
        ("lora_alpha", "alpha", number, 16),
        ("lora_dropout", "dropout", number, 0.0),
    ):
        value = c.get(f"model.{theirs}", read, default)
        c.carry_or_default(f"model.{theirs}", f"method.{ours}", value, f"model.{theirs} by default")
    if c.get("model.use_dora", flag, False):
        c.carry("model.use_dora", "method.dora", True)
    _targets(c)


def _targets(c: Translation) -> None:
    asked = c.get("model.lora_attn_modules", words, [])
    unknown = [each for each in asked if each not in _LAYERS]
    if unknown:
        c.say("model.lora_attn_modules", "refused", f"{', '.join(unknown)}: there are {', '.join(_LAYERS)}")
    targets = [_LAYERS[each] for each in asked if each in _LAYERS]
    targets += _MLP if c.get("model.apply_lora_to_mlp", flag, False) else ()
    targets += ["lm_head"] if c.get("model.apply_lora_to_output", flag, False) else []
    if not targets:
        c.refuse_unsaid("model.lora_attn_modules", "no layer has an adapter: name some in the file")
    c.put("method.target_modules", targets, "model.lora_attn_modules")
    keys = (f"model.{key}" for key in ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"))
    c.say_all(keys, "carried", f"method.target_modules={', '.join(targets)}")


def _length(c: Translation) -> None:
    epochs, most = c.get("epochs", whole, 1), c.get("max_steps_per_epoch", whole, None)
    if most is not None and most > 0:
        note = "there every epoch begins with the first rows of a new order, here a run goes on through the data"
        c.carry("max_steps_per_epoch", "train.max_steps", epochs * most, note)
        c.say("epochs", "carried", f"train.max_steps={epochs * most}")
        return
    c.say("max_steps_per_epoch", "same", "no limit in steps")
    c.carry_or_default("epochs", "train.epochs", epochs, "epochs by default")


def _batch(c: Translation) -> None:
    # Ranks that share the tokens or the weights of a batch do not add to it.
    shared = 1
    for key, axis in (("tensor_parallel_dim", "tensor"), ("context_parallel_dim", "sequence")):
        many = max(1, c.get(key, whole, 1))
        shared *= many
        c.say(key, "same" if many == 1 else "left", f"every rank has samples of its own; see parallel.mesh.{axis}")
    global_batch(c, "batch_size", "gradient_accumulation_steps", default=1, divided_by=shared)


def _schedule(c: Translation) -> None:
    key, name = "lr_scheduler._component_", _made_by(c, "lr_scheduler")
    if not name:
        c.default("optim.schedule", {"type": "constant"}, "without lr_scheduler the learning rate stays")
        c.default("optim.warmup_ratio", 0.0, "without lr_scheduler there is no warmup")
    elif name != "get_cosine_schedule_with_warmup" or c.get("lr_scheduler.num_cycles", number, 0.5) != 0.5:
        c.say(key, "refused", "no schedule of ours: half a cosine is, get_cosine_schedule_with_warmup")
    else:
        c.say(key, "same", "a cosine, from the peak to 0")
        c.say("lr_scheduler.num_cycles", "same", "half a cosine")
    warmup = "lr_scheduler.num_warmup_steps"
    c.carry(warmup, "optim.warmup_steps", c.get(warmup, whole, 0), AHEAD)
    if "optim.warmup_steps" not in c.fields:
        c.default("optim.warmup_ratio", 0.0, "no warmup by default")


def finish(c: Translation) -> None:
    if _made_by(c, "optimizer") in _OPTIMIZERS:
        c.default("optim.lr", 1e-3, f"lr of {_made_by(c, 'optimizer')} by default")
    c.default("optim.weight_decay", 0.01 if "AdamW" in _made_by(c, "optimizer") else 0.0, "weight_decay by default")
    c.default("optim.max_grad_norm", None, "gradients are not clipped by default")


def _optimizer(c: Translation, key: str) -> None:
    ours = dict(_OPTIMIZERS.get(c.get(key, text, "").rpartition(".")[2], {}))
    if ours.get("type") == "sgd":
        ours["momentum"] = c.get("optimizer.momentum", number, 0.0)
        c.say("optimizer.momentum", "carried", f"optim.optimizer.momentum={ours['momentum']}")
    if not ours:
        c.say(key, "refused", "the optimizers that are carried are AdamW, also in 8 bits, and SGD: see optim.optimizer")
    elif ours == {"type": "adamw"}:
        c.say(key, "same", "AdamW")
    else:
        c.carry(key, "optim.optimizer", ours, "groups of 256 within a row" if "moments" in ours else "")


def _objective(c: Translation) -> None:
    """Carry a loss of pairs, whose reference is the model that the run starts from, as here."""
    name = _made_by(c, "loss")
    if name not in _PAIRS:
        return
    numbers: dict[str, tuple[str, float | None]] = {"beta": (f"loss.{_PAIRS[name]}", 0.1)}
    if name == "DPOLoss":
        numbers["label_smoothing"] = ("loss.label_smoothing", 0.0)
    made: dict[str, Any] = {} if name == "DPOLoss" else {"loss": "hinge"}
    carry_objective(c, "dpo", numbers, **made)
    c.say("loss._component_", "carried", in_words("train.objective", c.fields["train.objective"]))
    if not re.match(r"q?lora_", _made_by(c, "model")):  # their recipe for adapters turns these off, and reads no other
        _reference(c)


def _reference(c: Translation) -> None:
    """Carry the model that a loss of pairs compares with, if it is not the one that the run starts from."""
    part, key = "ref_checkpointer", "ref_checkpointer.checkpoint_dir"
    named, where = _made_by(c, part), c.get(key, text, "")
    if named and not named.endswith("HFCheckpointer"):
        c.say(f"{part}._component_", "refused", _OTHER_FORM)
    c.say(f"{part}._component_", "same", "weights are read from Hugging Face files")
    if where.rstrip("/") == c.get("checkpointer.checkpoint_dir", text, "").rstrip("/"):
        c.say(key, "same", "the reference is what the run starts from")
    elif where:
        c.carry(key, "reference.model", where)


def _loss(c: Translation, key: str) -> None:
    if c.get(key, text, "").rpartition(".")[2] in _LOSSES:
        c.say(key, "same", "the cross entropy")
    else:
        c.say(key, "refused", f"the losses that are carried are the cross entropy, {', '.join(_PAIRS)}")


def _device(c: Translation, key: str) -> None:
    name = c.get(key, text, "cuda").partition(":")[0]
    if name in ("cuda", "cpu"):
        c.carry(key, "cluster.device", name)
    else:
        c.say(key, "refused", "a run is on cuda or on cpu")


def _logger(c: Translation, key: str) -> None:
    name = _made_by(c, "metric_logger")
    field = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow"}.get(name)
    if field is None:
        c.say(key, "left", "every step is in `metrics.jsonl`")
    else:
        c.carry(key, f"tracking.{field}.enabled", True)


def _project(c: Translation, key: str) -> None:
    if _made_by(c, "metric_logger") == "WandBLogger":
        c.carry(key, "tracking.wandb.project", c.get(key, text, ""))
    else:
        c.say(key, "left", "means nothing to this logger")


_OPTIONS = (
    settled("checkpointer._component_ checkpointer.checkpoint_dir", "`model.path`; Meta's own files are refused"),
    settled("model._component_", "`method.type`: full, or `lora` or `qlora` by its name"),
    settled("model.lora_rank model.lora_alpha model.lora_dropout", "`method.rank`, `alpha`, `dropout`"),
    settled(
        "model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output",
        "`method.target_modules` (`output_proj` is `o_proj`)",
    ),
    settled("model.use_dora", "`method.dora`"),
    settled("model.quantize_base", "`method.type: qlora`, `method.quantization: nf4`"),
    leave("model.use_hf model.max_seq_len", "the network is that of the model's files"),
    settled("dtype", "`parallel.precision`: bf16 `bf16_pure`, fp32 `fp32`"),
    settled("epochs max_steps_per_epoch", "`train.epochs`, or with a limit `train.max_steps`"),
    settled("batch_size gradient_accumulation_steps", "`train.micro_batch`, `train.global_batch`"),
    settled("tensor_parallel_dim context_parallel_dim", "left: `train.global_batch` is as there"),
    settled("output_dir", "`run.storage` and `run.name`"),
    ask("optimizer._component_", "`optim.optimizer`: AdamW, also in 8 bits, SGD; others are refused", _optimizer),
    carry("optimizer.lr", "optim.lr", number),
    carry("optimizer.weight_decay", "optim.weight_decay", number, "here it leaves out embeddings, norms and biases"),
    carry("optimizer.eps", "optim.eps", number),
    ask("optimizer.betas", "`optim.beta1`, `optim.beta2`", betas),
    settled("optimizer.momentum", "`optim.optimizer.momentum` of SGD"),
    leave("optimizer.fused optimizer.foreach optimizer_in_bwd", "when and how an update is computed"),
    settled("lr_scheduler._component_ lr_scheduler.num_cycles", "same for half a cosine; others are refused"),
    settled("lr_scheduler.num_warmup_steps", f"`optim.warmup_steps`: {AHEAD}"),
    ask(
        "loss._component_", "same for the cross entropy; DPOLoss, RSOLoss `train.objective`; others are refused", _loss
    ),
    settled("loss.beta loss.gamma loss.label_smoothing", "`train.objective.beta`, `label_smoothing`"),
    leave("loss.num_output_chunks", "see `model.loss`"),
    carry("clip_grad_norm", "optim.max_grad_norm", lambda value: number(value) or None),
    switch("enable_activation_checkpointing", "parallel.activation_checkpointing", "full", "none is computed again"),
    carry("enable_activation_offloading", "parallel.activation_offload", flag),
    leave("ac_mode ac_option", "see `parallel.activation_checkpointing`"),
    carry("compile", "parallel.compile", flag),
    carry("fsdp_cpu_offload", "parallel.cpu_offload", flag),
    ask(
        "fsdp_sharding_strategy fsdp_reshard_after_forward",
        "`parallel.strategy`",
        lambda c, key: strategy(c, key, c.get(key, text, "")),
    ),
    leave(
        "custom_sharded_layers memory_efficient_fsdp_wrap data_parallel_shard_dim data_parallel_replicate_dim "
        "tensor_parallel_plan tensor_parallel_plan._component_ fp8_recipe_name",
        "how a model is spread; see `parallel`",
    ),
    refuse("enable_fp8_training", FP8),
    ask("device", "`cluster.device`", _device),
    carry("seed", "run.seed", whole),
    switch("cudnn_deterministic_mode", "run.deterministic", True, "off, as here"),
    carry("log_every_n_steps", "train.log_every", whole),
    ask("metric_logger._component_", "`tracking.wandb`, `tracking.tensorboard`, `tracking.mlflow`; left", _logger),
    ask("metric_logger.project", "`tracking.wandb.project`", _project),
    leave("metric_logger.* metric_logger log_peak_memory_stats log_level", "every step is in `metrics.jsonl`"),
    leave("profiler.* profiler", "see `profile.steps`"),
    refuse(
        "resume_from_checkpoint should_load_recipe_state",
        "a run of another trainer cannot be continued; name its weights as the model",
        alike="the same name continues the same run (run.resume)",
    ),
    leave("save_adapter_weights_only enable_async_checkpointing", "checkpoints are complete, and written beside"),
    leave(
        "checkpointer.checkpoint_files checkpointer.checkpoint_files.* checkpointer.output_dir checkpointer.model_type "
        "checkpointer.safe_serialization checkpointer.keep_last_n_checkpoints",
        "the files of a model are found, and a run has a directory of its own",
    ),
    refuse(
        "checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint",
        "a run of another trainer cannot be continued; name its weights as the model",
    ),
    same("checkpointer", "it names the model"),
    settled(
        "ref_checkpointer._component_ ref_checkpointer.checkpoint_dir",
        "`reference.model` of DPO with every weight, if it is not the model itself; Meta's own files are refused",
    ),
    refuse("ref_checkpointer.recipe_checkpoint ref_checkpointer.adapter_checkpoint", "name weights as the reference"),
    leave(
        "ref_checkpointer ref_checkpointer.checkpoint_files ref_checkpointer.checkpoint_files.* "
        "ref_checkpointer.output_dir ref_checkpointer.model_type ref_checkpointer.safe_serialization "
        "ref_checkpointer.keep_last_n_checkpoints",
        "the files of a model are found",
    ),
)


# Datasets and the tokenizer: rows, their format, and how long a document may be.

_STACK_EXCHANGE = "stack_exchange_paired_dataset"
_KNOWN: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"hub": "tatsu-lab/alpaca", "all": True},
    "alpaca_cleaned_dataset": {"hub": "yahma/alpaca-cleaned", "all": True},
    "instruct_dataset": {},
    "chat_dataset": {},
    "slimorca_dataset": {"hub": "Open-Orca/SlimOrca-Dedup", "messages": "conversations"},
    "preference_dataset": {},
    _STACK_EXCHANGE: {"hub": "lvwerra/stack-exchange-paired"},
    "text_completion_dataset": {},
    "wikitext_dataset": {"hub": "EleutherAI/wikitext_document_level", "text": "page"},
}
"""The datasets of torchtune that are carried, with what they are by default: `all` of a row is trained on."""
_KEYS = (
    "_component_", "source", "data_files", "data_dir", "split", "name", "subset", "packed", "train_on_input",
    "column_map", "conversation_column", "conversation_style", "column", "new_system_prompt", "split_across_pack",
    "add_eos", "max_seq_len", "filter_fn",
)  # fmt: skip


def _data(c: Translation) -> None:
    train = _datasets(c, "dataset")
    if train:
        c.put("data.train", train, "dataset")
    else:
        c.problems.append("no dataset is named: set dataset._component_ and dataset.source in the file")
    measured = _datasets(c, "dataset_val")
    if measured:
        c.put("data.eval", measured, "dataset_val")
        c.carry("run_val_every_n_steps", "eval.every", c.get("run_val_every_n_steps", whole, None))
    c.say("run_val_every_n_steps", "left", "nothing is evaluated")
    key = "tokenizer.max_seq_len"
    if key in c.given and spelled(c.given[key]) is None:
        c.say(key, "left", "no limit there; here a longer row is named: raise data.seq_len then")
    elif (length := c.get(key, whole, None)) is not None:
        if _made_by(c, "loss") in _PAIRS:
            sample_of_two(c, key, length, PAIRS)
        c.carry(key, "data.seq_len", length)
        why = TOO_LONG if _made_by(c, "loss") in _PAIRS else "what torchtune does with more than max_seq_len tokens"
        c.default("data.long_documents", "truncate", why)
    _packing(c, train)


def _prefixes(c: Translation, part: str) -> list[str]:
    found = (re.fullmatch(rf"{part}\.([0-9]{{1,9}})\..+", key) for key in c.given)
    numbers = sorted({int(each[1]) for each in found if each})
    return [f"{part}.{number}." for number in numbers] or [f"{part}."]


def _datasets(c: Translation, part: str) -> list[dict[str, Any]]:
    found = [_dataset(c, prefix) for prefix in _prefixes(c, part)]
    return [each for each in found if each]


def _dataset(c: Translation, prefix: str) -> dict[str, Any]:
    """Return one of our datasets; an empty one if it is not named, or refused."""
    key = f"{prefix}_component_"
    name = c.get(key, text, "").rpartition(".")[2]
    if not name:
        return {}
    known = _KNOWN.get(name)
    if known is None:
        why = f"not a dataset that is carried; these are: {', '.join(_KNOWN)}; or name its files with instruct_dataset"
        c.say(key, "refused", why)
        c.say_all((prefix + each for each in _KEYS), "left", "belongs to this dataset")
        return {}
    source = c.get(f"{prefix}source", text, known.get("hub", ""))
    files = c.get(f"{prefix}data_files", text, "")
    found: dict[str, Any] = {"path": files} if source in BUILDERS and files else place(source)
    if name == _STACK_EXCHANGE:
        found = _stack_exchange(c, prefix)
    if not source or (source in BUILDERS and not files):
        c.say(key, "refused", "where its rows are is missing: set source, and data_files with a source such as json")
    if "hub" in found:
        for each in ("name", "subset"):
            if f"{prefix}{each}" in c.given:
                found["subset"] = c.get(f"{prefix}{each}", text, None)
        if (split := c.get(f"{prefix}split", text, "train")) != "train":
            found["split"] = split
    else:
        part_of_files(c, f"{prefix}split", found)
    found["format"] = _format(c, prefix, name, known)
    ours = "data.eval.*" if prefix.startswith("dataset_val") else "data.train.*"
    where = in_words(ours, {name: value for name, value in found.items() if name != "format"})
    c.say(key, "carried", f"{where}, format.type={found['format']['type']}")
    c.say_all((prefix + each for each in ("source", "data_files", "split", "name", "subset")), "carried", where)
    return found


def _stack_exchange(c: Translation, prefix: str) -> dict[str, Any]:
    """Return where the rows of Stack Exchange are: torchtune reads one of the directories of that dataset."""
    hub = _KNOWN[_STACK_EXCHANGE]["hub"]
    if c.get(f"{prefix}source", text, hub) == hub:
        c.say(f"{prefix}source", "carried", "its directory data/rl, as there")
    why = "this dataset reads data/rl of its source: leave this out, and set the dataset's path in the result"
    c.say_all((f"{prefix}source", f"{prefix}data_files"), "refused", why)
    return {"path": f"hf://datasets/{hub}/data/rl/*"}


def _format(c: Translation, prefix: str, name: str, known: dict[str, Any]) -> dict[str, Any]:
    columns = {str(each): str(value) for each, value in c.get(f"{prefix}column_map", a_map, {}).items()}
    everything = c.get(f"{prefix}train_on_input", flag, bool(known.get("all")))
    made: dict[str, Any]
    if name.startswith("alpaca"):
        made = {"type": "instruction", "style": "alpaca", "loss": "all" if everything else "completion"}
        made |= {ours: columns[theirs] for theirs, ours in _ALPACA.items() if theirs in columns}
        c.tell_default("data.train.*.format", made, "Alpaca's text; there the model's chat template is around it, too")
    elif name == "instruct_dataset":
        prompt, completion = columns.get("input", "input"), columns.get("output", "output")
        made = {"type": "instruction", "prompt": prompt, "input": None, "completion": completion, "style": "chat"}
        made["loss"] = "all" if everything else "completion"
    elif name == "preference_dataset":
        made = {"type": PAIRS, "prompt": None}
        made |= {each: columns[each] for each in ("chosen", "rejected") if columns.get(each, each) != each}
    elif name == _STACK_EXCHANGE:
        columns = columns or {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
        made = {"type": PAIRS, **{each: columns.get(each, each) for each in ("prompt", "chosen", "rejected")}}
    elif name in ("text_completion_dataset", "wikitext_dataset"):
        made = {"type": "completion", "text": c.get(f"{prefix}column", text, known.get("text", "text"))}
    else:
        column = c.get(f"{prefix}conversation_column", text, known.get("messages", "messages"))
        made = {"type": "chat", "messages": column, "loss": "all" if everything else "assistant"}
    if made["type"] == PAIRS:
        c.say(f"{prefix}train_on_input", "same", "a prompt that both answers have adds nothing to their difference")
    elif "loss" not in made:
        c.say(f"{prefix}train_on_input", "same", "every token of a text is trained on")
    told = ", ".join(f"format.{field}={value}" for field, value in made.items() if value is not None)
    keys = ("column_map", "column", "conversation_column", "conversation_style", "train_on_input")
    c.say_all((prefix + each for each in keys), "carried", told)
    return made


_ALPACA = {"instruction": "prompt", "input": "input", "output": "completion"}


def _packing(c: Translation, train: list[dict[str, Any]]) -> None:
    keys = [f"{prefix}packed" for prefix in _prefixes(c, "dataset")]
    top = c.get("packed", flag, False)
    packed = top or any(c.get(key, flag, False) for key in keys)
    texts = bool(train) and all(each["format"]["type"] == "completion" for each in train)
    cut = texts and all(c.get(f"{prefix}split_across_pack", flag, True) for prefix in _prefixes(c, "dataset"))
    ours = "none" if not packed else "concat" if cut else "best_fit"
    c.carry_all((*keys, "packed"), "data.packing", ours)
    cuts = (f"{prefix}split_across_pack" for prefix in _prefixes(c, "dataset"))
    c.say_all(cuts, "carried" if packed else "left", f"data.packing={ours}")
    c.default("data.packing", ours, "packed is off by default")


def _shuffle(c: Translation, key: str) -> None:
    if c.get(key, flag, True):
        c.say(key, "same", "the order is random")
    else:
        c.carry(key, "data.shuffle", "none")


def _each(names: str) -> str:
    """Return the names of options of a dataset, of one of several, and of one to evaluate."""
    return " ".join(
        f"{part}.{star}{name}" for part in ("dataset", "dataset_val") for star in ("", "*.") for name in names.split()
    )


_DATA_OPTIONS = (
    settled(_each("_component_"), f"`data.train` and `format`: {', '.join(_KNOWN)}; others are refused"),
    settled(_each("source data_files split name subset"), "`data.train.N.hub` or `path`, `split`, `subset`"),
    settled(_each("column_map column conversation_column conversation_style train_on_input"), "`data.train.N.format`"),
    settled(_each("packed split_across_pack") + " packed", "`data.packing`"),
    refuse(_each("new_system_prompt"), "put it into the rows, or into a template of your own"),
    refuse(_each("filter_fn data_dir"), "name the files that are meant in data_files", off=()),
    refuse(_each("add_eos"), "a text ends with the end token", off=(True,), alike="a text ends with the end token"),
    leave(_each("max_seq_len"), "tokenizer.max_seq_len decides"),
    settled("tokenizer.max_seq_len", "`data.seq_len`", takes_null=True),
    leave(
        "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.special_tokens_path",
        "the tokenizer of the model's directory, whose chat template is used; see model.tokenizer",
    ),
    refuse("tokenizer.prompt_template", "put it into a template of your own (data.chat_template)"),
    ask("shuffle", "`data.shuffle: none`, if it is off", _shuffle),
    settled("run_val_every_n_steps", "`eval.every`"),
    leave("batch_size_val max_validation_batches", "an evaluation is of all its rows"),
)


TORCHTUNE = Project(
    name="torchtune",
    title="torchtune",
    about="Files for `tune run … --config` of its recipes for supervised training and DPO, full and LoRA, of torchtune "
    "0.6. The recipe itself is not named in the file.",
    options=table(*_OPTIONS, *_DATA_OPTIONS),
    prepare=prepare,
    finish=finish,
)
