"""TRL: convert files for `trl sft --config`, with the options of SFTConfig, ModelConfig and ScriptArguments."""

from __future__ import annotations

import re
from typing import Any

from raytune_fsdp.base.redaction import redact
from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.adapters import Lora, base_of_flags, carry_lora, details_of_nf4
from raytune_fsdp.convert.rules import (
    Project,
    Said,
    Translation,
    a_map,
    ask,
    carry,
    flag,
    in_words,
    leave,
    number,
    refuse,
    same,
    settled,
    table,
    text,
    whole,
    words,
)
from raytune_fsdp.convert.runs import ATTENTION_HERE, BUILDERS, attention, is_directory, part_of_files, place
from raytune_fsdp.convert.sharding import sharded
from raytune_fsdp.convert.training import TRAINING_OPTIONS, evaluates, finish_training, prepare_training

_LR = 2e-5
LENGTH = 1024
"""The default of `max_length`, in all commands."""


def prepare(c: Translation) -> None:
    prepare_compute(c)
    rows = _format(c)
    _packing(c, texts=rows["type"] == "completion")
    _lengths(c)
    named_data(c, rows)


def prepare_compute(c: Translation, *, lr: float = _LR) -> None:
    """Settle what all commands of TRL share: length, batch, precision, adapters."""
    mixed = prepare_training(c, lr=lr, output="trainer_output", default_precision="bf16")
    # Mixed precision and the type in which weights are loaded: without sharding the optimizer updates those.
    own = c.first("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype")
    loaded = c.get(own, text, "float32").removeprefix("torch.")
    found = mixed
    if loaded == "float16" and not sharded(c):
        c.say(own, "refused", "weights of the optimizer are fp32, or bf16 (parallel.precision=bf16_pure)")
    elif loaded in ("bfloat16", "auto") and not sharded(c) and mixed != "fp16" and not c.get("use_peft", flag, False):
        found = "bf16_pure"
        c.carry(
            own, "parallel.precision", found, "with FSDP or DeepSpeed theirs is bf16: fp32 weights in the optimizer"
        )
    c.carry_all((own, "bf16", "fp16"), "parallel.precision", found)
    if found != "bf16":
        c.default("parallel.precision", found, "bf16 and dtype by default")
    adapters = c.get("use_peft", flag, False)
    quantized = base_of_flags(c, beside_adapters=adapters, way_out="write use_peft: true in the file")
    if adapters:
        carry_lora(c, _LORA, quantized)
    if quantized is not None and quantized.kind == "nf4":
        details_of_nf4(c, type_="bnb_4bit_quant_type", nested="use_bnb_nested_quant", nested_by_default=False)
    c.say("use_peft", "same", "every weight is trained (method.type=full)")


_LORA = Lora(
    owner="use_peft", rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
    saved="lora_modules_to_save", parameters="lora_target_parameters", stabilized="use_rslora", dora="use_dora",
    defaults=(16, 32, 0.05),
)  # fmt: skip


def _packing(c: Translation, *, texts: bool) -> None:
    """Carry the packing, and what becomes of documents that are too long, which depends on it."""
    packed, how = c.get("packing", flag, False), c.get("packing_strategy", text, "bfd")
    ours = {"bfd": "best_fit", "bfd_split": "best_fit", "bfd-requeue": "best_fit", "wrapped": "concat"}
    if packed and how not in ours:
        c.say("packing_strategy", "refused", "unknown to TRL; it has bfd, bfd_split and wrapped")
        return
    if packed and how == "wrapped" and not texts:
        c.say(
            "packing_strategy",
            "refused",
            "a conversation would be cut, and see those before it in its sample; here none does: drop it for best_fit",
        )
        how = "bfd"
    note = "there a document sees those before it, here none does" if packed and how == "wrapped" else ""
    c.carry("packing", "data.packing", ours[how] if packed else "none", note)
    if packed:
        c.carry("packing_strategy", "data.packing", ours[how], note)
    c.say("packing_strategy", "left", "means nothing without packing")
    c.default("data.packing", "none", "packing is off by default")
    if not (packed and how == "wrapped"):
        long = "split" if packed and how != "bfd" else "truncate"
        c.default("data.long_documents", long, "what TRL does with more than max_length tokens")


def _lengths(c: Translation) -> None:
    key = c.first("max_length", "max_seq_length")
    if key in c.given and spelled(c.given[key]) is None:
        c.say(key, "refused", "a sample has a fixed length here; give a number, such as the length of the longest row")
        return
    c.carry_or_default(key, "data.seq_len", c.get(key, whole, LENGTH), "max_length by default")


def named_data(c: Translation, rows: dict[str, Any]) -> None:
    """Carry the datasets that the file names, with the format of their rows."""
    found = (re.fullmatch(r"datasets\.([0-9]{1,9})\..+", key) for key in c.given)
    numbers = sorted({int(each[1]) for each in found if each})
    train = [each for index in numbers for each in _dataset(c, f"datasets.{index}.", rows)]
    if numbers:
        others = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
        c.say_all(others, "left", "datasets decides, there too")
    elif "dataset_name" in c.given:
        train = [_named(c, rows)]
    if not train:
        c.problems.append("no dataset is named: set dataset_name or datasets in the file")
        return
    shares = [each["share"] for each in train if "share" in each]
    for each in train:
        if "share" in each:
            each["share"] = round(each["share"] / sum(shares), 12) if sum(shares) > 0 else 0.0
    c.put("data.train", train, "datasets" if numbers else "dataset_name")
    size = c.get("test_split_size", number, 0)
    if size:
        held_out = {"fraction": size} if size < 1 else {"rows": int(size)}
        c.put("data.eval", held_out, "test_split_size")
        c.say("test_split_size", "carried", in_words("data.eval", held_out))


def _format(c: Translation) -> dict[str, Any]:
    """Guess the format from options that only one format uses. TRL itself looks at the first row."""
    answers, column = c.get("completion_only_loss", flag, None), c.first("dataset_text_field")
    if c.get("assistant_only_loss", flag, False):
        rows: dict[str, Any] = {"type": "chat", "loss": "assistant"}
        c.say("assistant_only_loss", "carried", "format.loss=assistant")
        c.say("completion_only_loss", "left", "means nothing to conversations in `messages`")
        c.say(column, "left", "means nothing to conversations")
    elif answers:
        rows = {"type": "instruction", "prompt": "prompt", "input": None, "completion": "completion", "style": "plain"}
        c.say("completion_only_loss", "carried", "format.type=instruction, format.loss=completion")
        c.say(column, "left", "means nothing to prompts and completions")
    elif column in c.given:
        rows = {"type": "completion", "text": c.get(column, text, "text")}
        c.say(column, "carried", f"format.type=completion, format.text={rows['text']}")
    else:
        rows = {"type": "chat", "loss": "all"}
        why = (
            "TRL looks at the rows: this is for `messages` of which all is trained on; see `raytune-fsdp data preview`"
        )
        c.tell_default("data.train.*.format", rows, why)
    c.say(
        "assistant_only_loss", "same" if rows["type"] != "chat" else "carried", f"format.loss={rows.get('loss', 'all')}"
    )
    c.say("completion_only_loss", "carried", f"format.loss={rows.get('loss', 'all')}")
    if rows["type"] == "chat":
        c.say("eos_token", "left", "only where an answer ends when one is generated; a turn ends as its template says")
    else:
        c.say("eos_token", "refused", "a text ends with the tokenizer's own end token")
    return rows


def _named(c: Translation, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the one dataset of `dataset_name`; its other split is for evaluation."""
    found: dict[str, Any] = {**place(c.get("dataset_name", text, "")), "format": rows}
    if "hub" not in found:
        return _local(c, found)
    c.say("dataset_name", "carried", in_words("data.train.0.hub", found["hub"]))
    if "dataset_config" in c.given:
        found["subset"] = c.get("dataset_config", text, None)
        c.say("dataset_config", "carried", in_words("data.train.0.subset", found["subset"]))
    test, train = (
        {**found, "split": c.get("dataset_test_split", text, "test")},
        c.get("dataset_train_split", text, "train"),
    )
    if train != "train":
        found["split"] = train
    c.say("dataset_train_split", "carried", in_words("data.train.0.split", train))
    if evaluates(c) and "test_split_size" not in c.given:
        c.put("data.eval", [test], c.first("eval_strategy", "evaluation_strategy"))
        c.say("dataset_test_split", "carried", in_words("data.eval.0.split", test["split"]))
    c.say("dataset_test_split", "left", "nothing is evaluated, or what test_split_size holds out")
    return found


def _local(c: Translation, found: dict[str, Any]) -> dict[str, Any]:
    """Return a dataset of files, which have no named configurations; a directory has splits."""
    c.say("dataset_config", "refused", "files have no configurations here: name those of this one in dataset_name")
    measured = {**found, "split": c.get("dataset_test_split", text, "test")}
    part_of_files(c, "dataset_train_split", found)
    where = in_words("data.train.0", {k: v for k, v in found.items() if k != "format"})
    c.say_all(("dataset_name", "dataset_train_split"), "carried", where)
    strategy = c.first("eval_strategy", "evaluation_strategy")
    if evaluates(c) and "test_split_size" not in c.given and is_directory(found["path"]):
        c.put("data.eval", [measured], strategy)
        c.say("dataset_test_split", "carried", in_words("data.eval.0.split", measured["split"]))
    elif evaluates(c) and "test_split_size" not in c.given:
        # Replaces what was recorded about how often it evaluates.
        c.said[strategy] = Said(
            "refused",
            "files have no split to evaluate here: set test_split_size in the file, or drop it and name data.eval in "
            "the result",
        )
        c.say("dataset_test_split", "refused", "files have no splits by name here", strategy)
    c.say("dataset_test_split", "left", "nothing is evaluated, or what test_split_size holds out")
    return found


def _dataset(c: Translation, prefix: str, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return our datasets for one of `datasets`: one for each file that it names."""
    name, files = c.get(f"{prefix}path", text, ""), c.get(f"{prefix}data_files", words, [])
    found: list[dict[str, Any]] = [place(name)]
    if files:
        folder = "" if name in BUILDERS or "hub" not in found[0] else f"hf://datasets/{name}/"
        found = [{"path": f"{folder}{file}"} for file in files]
    split = f"{prefix}split"
    if "hub" in found[0]:
        if f"{prefix}name" in c.given:
            found[0]["subset"] = c.get(f"{prefix}name", text, None)
        if c.get(split, text, "train") != "train":
            found[0]["split"] = c.get(split, text, None)
    else:
        c.say(f"{prefix}name", "refused", "files have no configurations here: name those of this one in data_files")
        if len(files) > 1 and c.get(split, text, "train") != "train":
            c.say(split, "refused", "it is a part of all the files together: use `rows` for a part of each")
        for each in found:
            part_of_files(c, split, each)
    where = in_words("data.train.*", found[0])
    if f"{prefix}fraction" in c.given:
        for each in found:
            each["share"] = c.get(f"{prefix}fraction", number, 0.0) / len(found)
        c.say(f"{prefix}fraction", "carried", "share: an epoch has as many rows as all datasets, theirs has fewer")
    c.say_all((f"{prefix}{key}" for key in ("path", "name", "split", "data_files")), "carried", where)
    return [{**each, "format": rows} for each in found]


def finish(c: Translation, *, lr: float = _LR) -> None:
    finish_training(c, lr=lr)
    c.default("parallel.activation_checkpointing", "full", "gradient_checkpointing by default")


def _environment(c: Translation, key: str) -> None:
    """Carry environment variables, but no secrets: these do not belong in a file that others read."""
    found = {name: str(each) for name, each in c.get(key, a_map, {}).items()}
    kept = {name: value for name, value in found.items() if redact(value, name) == value}
    secret = ", ".join(name for name in found if name not in kept)
    note = f"{secret} looks like a secret and is not written: set it in the environment of the run" if secret else ""
    if kept or not found:
        c.carry(key, "cluster.env", kept, note)
    c.say(key, "left", note)


def _template(c: Translation, key: str) -> None:
    name = c.get(key, text, "")
    if name.endswith((".jinja", ".j2")):
        c.carry(key, "data.chat_template", name)
    else:
        c.say(key, "refused", "the template of another tokenizer: save it to a file, and name that")


COMPUTE_OPTIONS = (
    carry("model_name_or_path", "model.path", text),
    carry("model_revision model_init_kwargs.revision", "model.revision", text),
    settled("dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype", "`parallel.precision`"),
    ask(
        "model_init_kwargs.attn_implementation",
        ATTENTION_HERE,
        attention,
    ),
    carry("model_init_kwargs.trust_remote_code", "model.trust_remote_code", flag),
    leave(
        "model_init_kwargs.use_cache model_init_kwargs.device_map model_init_kwargs.use_kernels",
        "where weights are and which kernels compute: see `parallel` and `model.attention`",
    ),
    carry("activation_offloading", "parallel.activation_offload", flag),
    settled("use_peft", "`method.type: lora` or `qlora`; off: every weight is trained"),
    settled("load_in_4bit load_in_8bit", "`method.type: qlora`, `method.quantization: nf4` or `int8`; alone refused"),
    settled("bnb_4bit_quant_type use_bnb_nested_quant", "nf4, and a byte for each scale; fp4 refused"),
    leave("bnb_4bit_quant_storage", "only the type in which bytes are stored; see `parallel`"),
    settled("lora_r lora_alpha lora_dropout", "`method.rank`, `alpha`, `dropout`"),
    settled("lora_target_modules lora_target_parameters lora_modules_to_save", "the same fields of `method`"),
    settled("use_rslora use_dora", "`method.rank_stabilized`, `method.dora`"),
    refuse("lora_task_type", "causal language models only", off=("CAUSAL_LM",), alike="a causal language model"),
    refuse(
        "router_aux_loss_coef",
        "set train.router_aux_loss_coef, if the model's output_router_logits is on",
        off=(),
    ),
    ask("env", "`cluster.env`, without secrets: these stay in the environment", _environment),
    same("ignore_bias_buffers", "there are no such buffers to ignore"),
)


NAMED_DATA = (
    settled("dataset_name", "`data.train.0.hub` or `path`"),
    settled("dataset_config", "`data.train.0.subset`"),
    settled(
        "dataset_train_split dataset_test_split",
        "`data.train.0.split`, `data.eval.0.split`; of a file `rows`, else refused",
    ),
    settled("datasets.*.path datasets.*.data_files", "`data.train.N.hub` or `path`"),
    settled("datasets.*.name datasets.*.split", "`data.train.N.subset`, `split`; of a file `rows`, else refused"),
    settled("datasets.*.fraction", "`data.train.N.share`"),
    leave("datasets.*.columns", "only the columns that a format names are read"),
    refuse("datasets.*.data_dir", "name its files in `data_files`", off=()),
    settled("test_split_size", "`data.eval.fraction` or `rows`"),
    ask("chat_template_path", "`data.chat_template`, if it is a file", _template),
)


PREPARED = (
    leave("dataset_num_proc", "data is prepared automatically"),
    leave("dataset_streaming streaming", "see `data.shuffle: blocks` for datasets too large to copy"),
)

_DATA_OPTIONS = (
    settled("max_length max_seq_length", "`data.seq_len`", takes_null=True),
    settled(
        "packing packing_strategy",
        "`data.packing`: bfd, bfd_split `best_fit`; wrapped `concat` for texts; off `none`",
    ),
    settled("dataset_text_field", "`format: {type: completion, text: …}`"),
    settled("assistant_only_loss completion_only_loss", "`format.type` and `format.loss`"),
    settled("eos_token", "left for chats, else refused"),
    refuse("truncation_mode", "the start of a document is kept", off=("keep_start",), alike="the start is kept"),
    refuse(
        "loss_type",
        "the loss is the cross entropy; a file for another command of TRL needs --from trl-dpo, trl-kto or trl-cpo",
        off=("nll", "chunked_nll"),
        alike="the cross entropy",
        here="same for the cross entropy, else refused",
    ),
    refuse("dataset_kwargs", "rows are always prepared", off=()),
    same("shuffle_dataset", "the order is random, drawn from `run.seed`"),
    same("padding_free pad_to_multiple_of", "padding does not change what is learned"),
    leave("pad_token", "padding does not change what is learned"),
    leave("eval_packing", "an evaluation is packed as the training data; it changes no loss of a token"),
    *PREPARED,
)


TRL = Project(
    name="trl",
    title="TRL",
    about="Files for `trl sft --config`. Tested with the options of TRL 1.16 and transformers 5.23; older spellings "
    "(`max_seq_length`, `torch_dtype`, `evaluation_strategy`, `warmup_ratio`) are known, too. A file that could be for "
    "any command of TRL is taken for one of `trl sft`.",
    options=table(*COMPUTE_OPTIONS, *NAMED_DATA, *_DATA_OPTIONS, *TRAINING_OPTIONS),
    prepare=prepare,
    finish=finish,
)
