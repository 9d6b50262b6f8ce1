"""axolotl: convert files for `axolotl train`."""

from __future__ import annotations

import re

from raytune_fsdp.config.sections.method import ALL_LINEAR
from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.adapters import Lora, Quantized, base_of_flags, carry_lora
from raytune_fsdp.convert.axolotl_data import DATA_OPTIONS, prepare_data
from raytune_fsdp.convert.axolotl_kd import KD_OPTIONS, prepare_kd
from raytune_fsdp.convert.axolotl_left import LEFT_OPTIONS, MACHINE_OPTIONS
from raytune_fsdp.convert.axolotl_preferences import RL_OPTIONS, prepare_rl, rows_of_rl
from raytune_fsdp.convert.optimizers import optimizer
from raytune_fsdp.convert.preferences import sample_of_two
from raytune_fsdp.convert.rules import (
    Project,
    Translation,
    a_map,
    ask,
    carry,
    flag,
    leave,
    number,
    part,
    plain,
    refuse,
    same,
    settled,
    switch,
    table,
    text,
    unless_zero,
    whole,
    words,
)
from raytune_fsdp.convert.runs import (
    ATTENTION_HERE,
    FLASH,
    cadence,
    global_batch,
    length,
    run_directory,
    times_per_epoch,
)
from raytune_fsdp.convert.schedules import schedule, warmup
from raytune_fsdp.convert.sharding import FP8, activation_checkpointing, sharded
from raytune_fsdp.convert.training import OPTIM_OPTIONS, SHARED_OPTIONS, early_stopping

_ATTENTION_SWITCHES = {
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
_OFFLOADING = ("offload", "offload_disk", "unsloth")
_LORA = Lora(
    owner="adapter", rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
    saved="lora_modules_to_save", parameters="lora_target_parameters", stabilized="peft_use_rslora",
    dora="peft_use_dora", ratio="loraplus_lr_ratio", adapter="lora_model_dir", defaults=(8, 8, 0.0),
)  # fmt: skip


def prepare(c: Translation) -> None:
    if c.gpus is None and "ray_num_workers" in c.given:
        c.gpus = max(1, c.get("ray_num_workers", whole, 1))
    prepare_rl(c)
    prepare_kd(c)
    _method(c)
    length(c, "num_epochs", default=1.0)
    # The batch of one GPU. Ranks that share the tokens or the weights of a batch do not add to it.
    shared = 1
    for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        shared *= max(1, c.get(key, whole, 1))
        field = f"parallel.mesh.{'tensor' if key.startswith('tensor') else 'sequence'}"
        c.say(key, "left", f"every rank has samples of its own unless {field} is set; train.global_batch is as there")
    passes = None
    if "batch_size" in c.given and "gradient_accumulation_steps" not in c.given:
        passes = c.get("batch_size", whole, 1) // max(1, c.get("micro_batch_size", whole, 1))
        c.say("batch_size", "carried", f"train.global_batch: {passes} micro-batch(es) on each GPU")
    c.say("batch_size", "left", "gradient_accumulation_steps decides, there too")
    global_batch(c, "micro_batch_size", "gradient_accumulation_steps", default=1, passes=passes, divided_by=shared)
    run_directory(c, "output_dir", default="./model-out")
    kind = schedule(c, "lr_scheduler", default="cosine", default_lr=5e-5)
    floor = c.get("cosine_min_lr_ratio", number, 0)
    if kind == "cosine":
        c.carry("cosine_min_lr_ratio", "optim.schedule", {"type": "cosine", "floor": floor})
    c.say("cosine_min_lr_ratio", "left", f"means nothing to {kind}")
    given = any(key in c.given for key in ("warmup_steps", "warmup_ratio"))
    if given or kind == "constant":
        warmup(c, kind)
    # Without either, warmup is 3 % of the steps, but at most 100.
    elif (c.fields.get("train.max_steps") or 0) > 3_400:
        c.default("optim.warmup_steps", 100, "3 % of the steps, at most 100, by default")
    else:
        c.tell_default(
            "optim.warmup_ratio", 0.03, "by default; in runs of more than 3,400 steps axolotl ends it at 100"
        )
    _cadence(c, "checkpoint.every", "saves_per_epoch", "save_strategy", "save_steps")
    _cadence(c, "eval.every", "evals_per_epoch", c.first("eval_strategy", "evaluation_strategy"), "eval_steps")
    # Which activations are kept, and where.
    kept = spelled(c.given.get("gradient_checkpointing"))
    moved = spelled(c.given.get("activation_offloading"))
    if kept in _OFFLOADING or moved not in (None, False, "false"):
        c.put("parallel.activation_offload", True, "activation_offloading")
    c.say(
        "activation_offloading", "carried", f"parallel.activation_offload={str(moved not in (False, 'false')).lower()}"
    )
    activation_checkpointing(c, "gradient_checkpointing", read=lambda value: plain(value) in _OFFLOADING or flag(value))
    _precision(c)
    if rows := rows_of_rl(c):
        sample_of_two(c, "sequence_len", c.get("sequence_len", whole, 512), rows)
    c.carry_or_default("sequence_len", "data.seq_len", c.get("sequence_len", whole, 512), "sequence_len by default")
    packed = "best_fit" if c.get("sample_packing", flag, False) else "none"
    c.carry_or_default("sample_packing", "data.packing", packed, "sample_packing is off by default")
    prepare_data(c)


def _method(c: Translation) -> None:
    """Settle what the options of adapters and of their base say together.

    In axolotl of July 2026 `qlora` alone means 4 bits, and so does `lora` with load_in_4bit.
    """
    kind = c.get("adapter", text, "")
    quantized = base_of_flags(c, beside_adapters=kind in ("lora", "qlora"), way_out="write adapter: qlora in the file")
    if kind not in ("lora", "qlora"):
        c.say("adapter", "refused", f"{kind} is not here; lora and qlora are")
        return
    if kind == "qlora":
        if "load_in_4bit" in c.given and quantized is None:
            c.say("adapter", "refused", "load_in_4bit is off: write adapter: lora in the file, or load_in_4bit: true")
        elif quantized is not None and quantized.kind == "int8":
            c.say(quantized.key, "refused", "qlora has 4 bits: write adapter: lora for 8")
        quantized = quantized or Quantized("load_in_4bit", "nf4")
    if c.get("lora_target_linear", flag, False):
        if c.get("lora_target_modules", words, []):
            c.say("lora_target_modules", "refused", "lora_target_linear names all linear layers: drop one of the two")
        c.carry("lora_target_linear", "method.target_modules", ALL_LINEAR)
    for key in ("lora_r", "lora_alpha"):
        c.refuse_unsaid(key, "adapters need it: write it in the file")
    carry_lora(c, _LORA, quantized)


def _cadence(c: Translation, field: str, per_epoch: str, strategy: str, steps: str) -> None:
    """Carry how often something is done. Times per epoch exclude the other two options, there too."""
    if per_epoch not in c.given:
        cadence(c, field, strategy, steps, without="steps", every=None)
        return
    times_per_epoch(c, field, per_epoch, c.get(per_epoch, whole, 0))
    c.say_all((strategy, steps), "left", f"{per_epoch} decides")


def _precision(c: Translation) -> None:
    """Carry the precision. axolotl's bf16 also loads the weights in bf16.

    FSDP and DeepSpeed make them fp32 again for the optimizer, and so does PEFT with adapters.
    """

    def on(key: str, default: bool) -> bool:
        return c.get(key, lambda value: plain(value) in ("auto", "full") or flag(value), default)

    fp16, half = on("fp16", False) or on("float16", False), on("bfloat16", False)
    bf16 = half or on("bf16", not fp16 and not on("float32", False))
    if fp16 and spelled(c.given.get("bf16")) == "auto":
        bf16 = False
    found = ("bf16" if sharded(c) or "method.type" in c.fields else "bf16_pure") if bf16 else "fp16" if fp16 else "fp32"
    note = "weights in bf16, too, as without FSDP and DeepSpeed there" if found == "bf16_pure" else ""
    c.carry_all(("bf16", "bfloat16"), "parallel.precision", found, note)
    c.carry_all(("fp16", "float16", "float32"), "parallel.precision", found)
    if found != "bf16":
        c.default("parallel.precision", found, f"bf16=auto by default{note and f': {note}'}")


def finish(c: Translation) -> None:
    c.default("optim.weight_decay", 0.0, "weight_decay by default")
    c.default("run.seed", 42, "seed by default")
    if "learning_rate" not in c.given:
        c.problems.append("learning_rate is not set: axolotl has no default for it; write it into the file")


def _attention_switch(c: Translation, key: str) -> None:
    if not c.get(key, flag, False):
        c.say(key, "same", "another one is used, or the best that is correct (model.attention=auto)")
    elif key == "flash_attention":
        c.say(key, "same", FLASH)
    elif key in _ATTENTION_SWITCHES:
        c.carry(key, "model.attention", _ATTENTION_SWITCHES[key])
    else:
        c.say(key, "left", "other kernels for the same function; model.attention=auto takes the best that is correct")


def _tf32(c: Translation, key: str) -> None:
    if spelled(c.given[key]) == "auto":
        c.say(key, "left", "set parallel.tf32; with bf16 hardly anything is computed in fp32")
    else:
        c.carry(key, "parallel.tf32", c.get(key, flag, False))


def _plugins(c: Translation, key: str) -> None:
    others = [
        name for name in c.get(key, words, []) if not re.search(r"(?i)liger|cut_?cross_?entropy|kernels|kdplugin", name)
    ]
    if others:
        c.say(key, "refused", f"what {', '.join(others)} does is not known here")
    else:
        c.say(key, "left", "other kernels for the same function; see model.loss, and for KDPlugin its options")


def _base_config(c: Translation, key: str) -> None:
    if c.get(key, text, "") == c.get("base_model", text, ""):
        c.say(key, "same", "the model's own")
    else:
        c.say(key, "refused", "the architecture is the model's own; change single attributes with model.overrides")


def _new_rows(c: Translation, key: str) -> None:
    if c.get(key, flag, False):
        c.say(key, "same", "the row of a new token starts as the mean of all")
    elif "model.add_tokens" in c.fields:
        c.say(
            key, "refused", "the row of a new token starts as the mean of all, or of those of model.add_tokens.N.like"
        )
    else:
        c.say(key, "same", "no token is new")


def _dropped_rows(c: Translation, key: str) -> None:
    if c.get(key, whole, 2) <= 2:
        c.say(key, "same", "a row without a token to train on is reported")
    else:
        c.say(key, "refused", "short rows are not dropped: leave them out of the files")


_METHOD_OPTIONS = (
    settled("adapter", "`method.type: lora` or `qlora`; others refused"),
    settled("load_in_4bit load_in_8bit", "`method.type: qlora`, `method.quantization: nf4` or `int8`; alone refused"),
    settled("lora_r lora_alpha lora_dropout", "`method.rank`, `alpha`, `dropout`"),
    settled("lora_target_linear lora_target_modules", "`method.target_modules`"),
    settled("lora_target_parameters lora_modules_to_save", "`method.target_parameters`, `modules_to_save`"),
    settled("loraplus_lr_ratio peft_use_dora peft_use_rslora", "`method.lr_ratio`, `dora`, `rank_stabilized`"),
    settled("lora_model_dir", "`method.adapter`"),
    same("lora_fan_in_fan_out peft_ensure_weight_tying", "as the network has it"),
    same(
        "peft_autocast_adapter_dtype",
        "adapters are fp32",
    ),
    leave("loraplus_lr_embedding", "only for adapters of embeddings"),
    leave(
        "lora_on_cpu lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel merge_lora merge_method "
        "qlora_sharded_model_loading",
        "it does not change what is learned",
    ),
    part(
        "lora_rank_pattern lora_alpha_pattern peft peft_layers_to_transform peft_layers_pattern peft_layer_replication "
        "peft_init_lora_weights peft_trainable_token_indices loftq_config bnb_config_kwargs",
        "adapter",
        lambda c: "adapter" in c.given,
    ),
)


_OPTIONS = (
    carry("base_model", "model.path", text),
    ask("base_model_config", "same, if it is the model's; else refused", _base_config),
    carry("revision_of_model model_revision", "model.revision", text),
    carry("tokenizer_config", "model.tokenizer", text),
    carry("overrides_of_model_config model_config", "model.overrides", a_map),
    switch("reinit_weights", "model.init", "random", "from the weights of base_model"),
    same("tokenizer_type", "by the model's config"),
    leave("resize_token_embeddings_to_32x", "rows that no token has; see `model.resize_embeddings`"),
    ask("mean_resizing_embeddings", "same, if it is true or no token is new; else refused", _new_rows),
    refuse("shrink_embeddings", "rows that no token has stay"),
    leave("tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files", "the tokenizer is as its files say"),
    leave(
        "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model",
        "the model's config says what it is",
    ),
    *_METHOD_OPTIONS,
    refuse("gptq", "a base that is stored quantized by GPTQ is not here"),
    refuse("model_quantization_config", "say it by load_in_4bit or load_in_8bit"),
    leave("model_quantization_config_kwargs", "means nothing without model_quantization_config, which is refused"),
    settled("sequence_len", "`data.seq_len`"),
    settled("sample_packing", "`data.packing: best_fit` (off: `none`)"),
    settled("micro_batch_size batch_size", "`train.micro_batch`, `train.global_batch`"),
    settled("num_epochs", "`train.epochs`"),
    settled("saves_per_epoch evals_per_epoch", "`checkpoint.every`, `eval.every`: `{per_epoch: N}`"),
    ask("optimizer", "`optim.optimizer`: AdamW, also in 8 bits, Adafactor, Lion, SGD; others are refused", optimizer),
    settled("lr_scheduler cosine_min_lr_ratio", "`optim.schedule`"),
    settled("bfloat16 float16 float32", "`parallel.precision`"),
    settled("activation_offloading", "`parallel.activation_offload`"),
    settled(
        "tensor_parallel_size context_parallel_size sequence_parallel_degree",
        "left, and counted in the batch; `parallel.mesh` has both",
    ),
    ask("tf32", "`parallel.tf32`", _tf32),
    ask(
        "flash_attention sdp_attention eager_attention flex_attention xformers_attention sage_attention",
        ATTENTION_HERE,
        _attention_switch,
    ),
    ask(
        "early_stopping_patience",
        "`eval.early_stop.patience`, with evaluations every N steps; else refused",
        early_stopping,
    ),
    ask("plugins", "left, if they bring kernels only; else refused", _plugins),
    switch("curriculum_sampling", "data.shuffle", "none", "the order is random"),
    switch("dataset_exact_deduplication", "data.drop_duplicates", True, "equal rows are kept"),
    carry("hub_model_id", "export.push", text),
    ask("min_sample_len", "same up to 2, else refused", _dropped_rows),
    carry("use_mlflow", "tracking.mlflow.enabled", flag),
    carry("mlflow_tracking_uri", "tracking.mlflow.uri", text),
    carry("mlflow_experiment_name", "tracking.mlflow.experiment", text),
    carry("ray_num_workers", "cluster.workers", whole),
    same("auto_resume_from_checkpoints", "the same name continues the same run (run.resume)"),
    same("pad_to_sequence_len pad_to_multiple_of batch_flattening", "padding does not change what is learned"),
    refuse("pretrain_multipack_attn", "no document sees another", off=(True,), alike="no document sees another"),
)


_REFUSED_OPTIONS = (
    refuse("qat quantization use_onebitllms", "computing in fewer than 8 bits is not here"),
    refuse("fp8", FP8),
    leave("fp8_enable_fsdp_float8_all_gather", "means nothing without fp8, which is refused"),
    refuse("relora lisa_n_layers", "what is trained does not change during a run"),
    refuse("unfrozen_parameters spectrum_top_fraction", "name what is trained with `method.type=freeze`"),
    leave(
        "relora_prune_ratio relora_prune_method relora_cpu_offload lisa_step_interval lisa_layers_attribute",
        "means nothing without relora or lisa_n_layers, which are refused",
    ),
    refuse("lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor", "no schedule of ours has this"),
    refuse(
        "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps",
        "no schedule of ours has this",
    ),
    refuse("embedding_lr embedding_lr_scale lr_groups", "set rates by pattern in `optim.groups`"),
    refuse("adam_beta3 adam_epsilon2 torchdistx_path", "for optimizers that are not here"),
    unless_zero("noisy_embedding_alpha", "train.neftune_noise_alpha"),
    refuse("overrides_of_model_kwargs model_kwargs", "set what you need under `model`"),
    refuse("use_pose use_eaft scaling_softmax s2_attention", "the network and its loss stay as they are"),
    refuse("fix_untrained_tokens", "rows of tokens that were never trained stay as the model has them"),
    refuse(
        "pretraining_sample_concatenation",
        "texts are packed by sample_packing only, and no document sees another: see data.packing=concat",
    ),
    refuse("rope_scaling", "set it as model.overrides.rope_scaling"),
    refuse("max_packed_sequence_len", "a sample is as long as sequence_len says"),
    refuse("added_tokens_overrides", "tokens keep their names: add new ones with model.add_tokens"),
    refuse("trainer_cls", "what a trainer of your own does is not known here"),
    refuse("quantize_moe_experts", "experts stay in 16 bits"),
    refuse(
        "tokenizer_use_mistral_common processor_kwargs cls_model_config",
        "the tokenizer and the network stay as they are",
    ),
    leave(
        "eaft_alpha eaft_k pose_max_context_len pose_num_chunks pose_split_on_token_ids",
        "means nothing without use_eaft or use_pose, which are refused",
    ),
    leave("scaling_softmax_factor scaling_softmax_bias", "means nothing without scaling_softmax, which is refused"),
    leave(
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap "
        "qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size "
        "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size",
        "means nothing to AdamW; optimizers to which it does are refused",
    ),
    refuse("processor_type", "text only"),
    refuse("test_split_size dataset_shard_num dataset_shard_idx skip_prepare_dataset", "use `rows` of a dataset"),
)


AXOLOTL = Project(
    name="axolotl",
    title="axolotl",
    about="Files for `axolotl train`. Options of July 2026; older spellings (`sharegpt`, `flash_attention: "
    "true`, `evaluation_strategy`) are known, too.",
    options=table(
        *_OPTIONS,
        *DATA_OPTIONS,
        *RL_OPTIONS,
        *KD_OPTIONS,
        *OPTIM_OPTIONS,
        *SHARED_OPTIONS,
        *_REFUSED_OPTIONS,
        *LEFT_OPTIONS,
        *MACHINE_OPTIONS,
    ),
    prepare=prepare,
    finish=finish,
)
