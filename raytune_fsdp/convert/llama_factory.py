"""LLaMA-Factory: convert files for `llamafactory-cli train`."""

from __future__ import annotations

from typing import Any

from raytune_fsdp.config.sections.method import ALL_LINEAR
from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.adapters import Lora, Quantized, carry_lora, details_of_nf4
from raytune_fsdp.convert.llama_factory_data import TEMPLATES, prepare_data, without_thoughts
from raytune_fsdp.convert.llama_factory_preferences import STAGE_OPTIONS, STAGES, prepare_stage, rows_of_stage
from raytune_fsdp.convert.preferences import sample_of_two
from raytune_fsdp.convert.rules import (
    Project,
    TheirOption,
    Translation,
    ask,
    carry,
    flag,
    leave,
    part,
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
from raytune_fsdp.convert.runs import ATTENTION_HERE, FLASH
from raytune_fsdp.convert.sharding import FP8
from raytune_fsdp.convert.training import (
    TRAINING_OPTIONS,
    early_stopping,
    finish_training,
    prepare_training,
)

_ATTENTION = {"disabled": "eager", "sdpa": "sdpa"}
_LENGTH = 2048


def prepare(c: Translation) -> None:
    if c.gpus is None and "ray_num_workers" in c.given:
        c.gpus = max(1, c.get("ray_num_workers", whole, 1))
    mixed = prepare_training(c, lr=5e-5, output="saves", default_precision="fp32")
    found = "bf16_pure" if c.get("pure_bf16", flag, False) else mixed
    c.carry_all(("pure_bf16", "bf16", "fp16"), "parallel.precision", found)
    if found != "bf16":
        c.default("parallel.precision", found, "bf16 and fp16 are off by default")
    pretraining = c.get("stage", text, "sft") == "pt"
    if rows := rows_of_stage(c):
        prepare_stage(c)
        sample_of_two(c, "cutoff_len", c.get("cutoff_len", whole, _LENGTH), rows)
    _packing(c, pretraining)
    c.carry("cutoff_len", "data.seq_len", c.get("cutoff_len", whole, _LENGTH))
    prepare_data(c, pretraining=pretraining)
    everything, last = c.get("train_on_prompt", flag, False), c.get("mask_history", flag, False)
    c.say(
        "train_on_prompt", "carried" if everything else "same", f"format.loss={'all' if everything else 'the answers'}"
    )
    c.say("mask_history", "carried" if last else "same", f"format.loss={'last_turn' if last else 'all answers'}")
    off = c.get("disable_gradient_checkpointing", flag, False)
    c.carry("disable_gradient_checkpointing", "parallel.activation_checkpointing", "none" if off else "full")
    if c.get("use_unsloth_gc", flag, False):
        c.carry("use_unsloth_gc", "parallel.activation_offload", True)
    c.say("use_unsloth_gc", "same", "off")
    kind = "full" if "finetuning_type" in c.dropping else c.get("finetuning_type", text, "lora")
    quantized = _base(c, beside_adapters=kind == "lora")
    if kind == "full":
        c.say("finetuning_type", "same", "every weight is trained (method.type=full)")
    elif kind == "lora":
        if "finetuning_type" not in c.given:
            c.tell_default("method.type", "lora", "finetuning_type by default")
        carry_lora(c, _LORA, quantized)
    else:
        c.say("finetuning_type", "refused", "adapters are lora here; or write full")


def _base(c: Translation, *, beside_adapters: bool) -> Quantized | None:
    """Return the base that is quantized while it is loaded; None if it is not."""
    bits = c.get("quantization_bit", whole, None)
    if bits is None:
        return None
    if not beside_adapters:
        c.say("quantization_bit", "refused", "weights are quantized only under adapters: write finetuning_type: lora")
        return None
    if bits not in (4, 8):
        c.say("quantization_bit", "refused", "weights have 4 or 8 bits here: write one of the two")
        return None
    if c.get("quantization_method", text, "bnb") in ("bnb", "bitsandbytes"):
        c.say("quantization_method", "same", "rounded as they are read, without looking at data")
    else:
        c.say("quantization_method", "refused", "weights are quantized as with bnb only, the default there")
    if bits == 4:
        details_of_nf4(c, type_="quantization_type", nested="double_quantization", nested_by_default=True)
    c.say("quantization_device_map", "left", "see `parallel`")
    return Quantized("quantization_bit", "nf4" if bits == 4 else "int8")


_LORA = Lora(
    owner="finetuning_type", rank="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target",
    saved="additional_target", stabilized="use_rslora", dora="use_dora", ratio="loraplus_lr_ratio",
    adapter="adapter_name_or_path", defaults=(8, None, 0.0), all_words=("all", ALL_LINEAR), all_by_default=True,
)  # fmt: skip


def _adapts(c: Translation) -> bool:
    kind = spelled(c.given.get("finetuning_type", "lora"))
    return kind != "full" and "finetuning_type" not in c.dropping


def _packing(c: Translation, pretraining: bool) -> None:
    packed, apart = c.get("packing", flag, pretraining), c.get("neat_packing", flag, False)
    if apart or not packed or not pretraining:
        why = "LLaMA-Factory cuts a text at cutoff_len, too"
        if not pretraining:
            why = (
                "LLaMA-Factory shortens the question and the answer of each turn until all fit cutoff_len; here the "
                "first tokens stay, so the end of a long row, with its answer, is lost"
            )
        c.default("data.long_documents", "truncate", why)
    if apart:
        c.carry_all(("neat_packing", "packing"), "data.packing", "best_fit")
        return
    ours = "none" if not packed else "concat" if pretraining else "best_fit"
    note = "there a document sees those before it, here none does" if packed else ""
    c.carry("packing", "data.packing", ours, note)
    c.say("neat_packing", "same", f"data.packing={ours}")
    c.default("data.packing", ours, "packing is on for stage pt, else off, by default")


def finish(c: Translation) -> None:
    finish_training(c, lr=5e-5)
    c.default("parallel.activation_checkpointing", "full", "on by default")


def _template(c: Translation, key: str) -> None:
    name = c.get(key, text, "")
    if _has_no_chat(c):
        c.say(key, "left", "texts have no template")
    elif name in TEMPLATES:
        c.carry(key, "data.chat_template", TEMPLATES[name])
    else:
        c.say(
            key,
            "refused",
            "not a template of this package; without it, the tokenizer's own is used, often the same text",
        )


def _thinking(c: Translation, key: str) -> None:
    if _has_no_chat(c):
        c.say(key, "left", "texts have no template")
    elif c.get(key, flag, True):
        c.say(key, "same", "reasoning stays in the text")
    elif without_thoughts(c):
        note = (
            "with format.reasoning=drop for conversations. There, each answer of a conversation gets an empty thought, "
            "here those to which the template gives one; and what an Alpaca row thinks stays in its text"
        )
        c.carry(key, "data.chat_template_kwargs", {"enable_thinking": False}, note)
    else:
        c.say(key, "left", "this template knows no thoughts, there too")


def _has_no_chat(c: Translation) -> bool:
    formats = [each["format"].get("then", each["format"]) for each in c.fields.get("data.train", [])]
    chats = ("chat", *STAGES.values())
    return bool(formats) and not any(each["type"] in chats or each.get("style") == "chat" for each in formats)


def _stage(c: Translation, key: str) -> None:
    if c.get(key, text, "") in ("sft", "pt"):
        c.say(key, "carried", f"format.type={'completion' if c.get(key, text, '') == 'pt' else 'chat or instruction'}")
    else:
        c.say(key, "refused", "sft, pt, rm, dpo and kto are here")


def _attention(c: Translation, key: str) -> None:
    name = c.get(key, text, "auto")
    if name in _ATTENTION:
        c.carry(key, "model.attention", _ATTENTION[name])
    elif name in ("fa2", "fa3"):
        c.say(key, "same", FLASH)
    else:
        c.say(key, "same", "the best that is correct (model.attention=auto)")


def _revision(c: Translation, key: str) -> None:
    if c.get(key, text, "main") == "main":
        c.say(key, "same", "the main branch")
    else:
        c.carry(key, "model.revision", c.get(key, text, None))


def _new_tokens(c: Translation, key: str) -> None:
    added: list[dict[str, Any]] = [{"text": each} for each in c.get("add_tokens", words, [])]
    added += [{"text": each, "special": True} for each in c.get("add_special_tokens", words, [])]
    c.carry(key, "model.add_tokens", added, "their rows start as the mean of all")


_MODEL_OPTIONS = (
    carry("model_name_or_path", "model.path", text),
    ask("model_revision", "`model.revision`", _revision),
    ask("flash_attn", ATTENTION_HERE, _attention),
    carry("resize_vocab", "model.resize_embeddings", flag),
    ask("add_tokens add_special_tokens", "`model.add_tokens`", _new_tokens),
    switch("split_special_tokens", "data.special_tokens_in_text", "escape", "data.special_tokens_in_text=keep"),
    switch("train_from_scratch", "model.init", "random", "from the model's weights"),
    settled("pure_bf16", "`parallel.precision: bf16_pure`"),
    settled("disable_gradient_checkpointing", "`parallel.activation_checkpointing` (on by default there)"),
    settled("use_unsloth_gc", "`parallel.activation_offload`"),
    leave("use_reentrant_gc", "never reentrant here"),
    leave("use_unsloth enable_liger_kernel use_v1_kernels block_diag_attn", "other kernels for the same function"),
    leave(
        "cache_dir low_cpu_mem_usage use_fast_tokenizer print_param_status offload_folder device_map",
        "where files and weights are; see HF_HOME in the environment, and `parallel`",
    ),
    leave("upcast_layernorm upcast_lmhead_output", "weights are fp32; see `parallel.precision`"),
    leave("hf_hub_token ms_hub_token om_hub_token", "HF_TOKEN in the environment"),
    refuse("new_special_tokens_config", "list the tokens in `model.add_tokens`, with `like`"),
    leave("init_special_tokens", "see `model.add_tokens.N.like`"),
    refuse("rope_scaling", "set what you need in `model.overrides`", off=()),
    unless_zero("moe_aux_loss_coef", "train.router_aux_loss_coef"),
    refuse("shift_attn mixture_of_depths", "the network stays as it is"),
    settled("quantization_bit", "`method.type: qlora`, `method.quantization: nf4` or `int8`; alone refused"),
    settled("quantization_method", "as bnb does it; others refused"),
    settled("quantization_type double_quantization", "nf4, and a byte for each scale; fp4 refused"),
    settled("quantization_device_map", "left: see `parallel`"),
    refuse("use_kt", "weights are trained on GPUs, or offloaded by `parallel.cpu_offload`"),
    leave(
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels "
        "video_fps video_maxlen use_audio_in_video audio_sampling_rate media_dir freeze_vision_tower "
        "freeze_multi_modal_projector",
        "text only",
    ),
    refuse("freeze_language_model", "to train a part of the weights, set `method.type=freeze`"),
)


def _details(owner: str, names: str) -> TheirOption:
    return part(names, owner, lambda c: c.on(owner))


_METHOD_OPTIONS = (
    ask("stage", "`format` (sft, pt), and of rm, dpo and kto `train.objective`; others are refused", _stage),
    settled("finetuning_type", "`method.type`: full, or lora, the default; others refused"),
    settled("lora_rank lora_alpha lora_dropout", "`method.rank`, `alpha`, `dropout`"),
    settled("lora_target additional_target", "`method.target_modules`, `modules_to_save`"),
    settled("loraplus_lr_ratio use_rslora use_dora", "`method.lr_ratio`, `rank_stabilized`, `dora`"),
    settled("adapter_name_or_path", "`method.adapter`"),
    refuse("pissa_init", "there it is approximated in `pissa_iter` passes; here it is exact: set `method.init=pissa`"),
    refuse("create_new_adapter", "an adapter that is named is continued"),
    leave("pissa_iter pissa_convert", "belongs to pissa_init"),
    leave("loraplus_lr_embedding", "only for adapters of embeddings"),
    leave("adapter_folder", "name the directory itself in adapter_name_or_path"),
    part(
        "module_dropout oft_rank oft_block_size oft_target freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules",
        "finetuning_type",
        _adapts,
    ),
    *STAGE_OPTIONS,
    refuse("use_galore use_apollo use_badam use_adam_mini", "not here; `optim.optimizer` has those that are"),
    refuse("use_muon", "set `optim.optimizer.type=muon`, whose steps are as large as AdamW's"),
    _details(
        "use_galore",
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise",
    ),
    _details(
        "use_apollo",
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
        "apollo_scale_type apollo_layerwise apollo_scale_front",
    ),
    _details(
        "use_badam",
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode "
        "badam_verbose",
    ),
    refuse("use_dft_loss use_asft_loss use_eaft_loss", "not here; `train.loss` takes a function of your own"),
    _details("use_asft_loss", "asft_alpha"),
    _details("use_eaft_loss", "eaft_alpha"),
    refuse("use_llama_pro", "no layers are added; to train a part of the weights, set `method.type=freeze`"),
    refuse("use_mca use_megatron_bridge use_hyper_parallel", "weights are spread by FSDP2; see `parallel`"),
    refuse("fp8", FP8),
    _details("fp8", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    ask(
        "early_stopping_steps",
        "`eval.early_stop.patience`, with evaluations every N steps; else refused",
        early_stopping,
    ),
    leave("compute_accuracy plot_loss include_effective_tokens_per_second", "every step is in metrics; see the report"),
)


_DATA_OPTIONS = (
    settled("dataset eval_dataset", "`data.train`, `data.eval`, as dataset_info.json says"),
    settled("dataset_dir", "where dataset_info.json is"),
    ask("template", "`data.chat_template` (llama2, llama3, chatml); others are refused", _template),
    settled("cutoff_len", "`data.seq_len`"),
    settled(
        "packing neat_packing", "`data.packing`: `best_fit`, of stage pt `concat`, off `none`; no document sees another"
    ),
    settled("train_on_prompt mask_history", "`format.loss`: `all`, `last_turn`"),
    settled("val_size", "`data.eval.fraction` or `rows`"),
    ask("max_samples", "`data.train.N.rows.first`", lambda c, key: c.say(key, "carried", "data.train.*.rows.first")),
    refuse(
        "mix_strategy",
        "set data.train.*.share, which is exact instead of drawn",
        off=("concat",),
        alike="every row is seen once in an epoch",
        here="same for concat, else refused",
    ),  # fmt: skip
    switch("disable_shuffling", "data.shuffle", "none", "the order is random"),
    carry("ray_num_workers", "cluster.workers", whole),
    refuse("interleave_probs", "set data.train.*.share", off=()),
    refuse("tokenized_path", "name it under data.train with format.type=tokens", off=()),
    refuse("default_system tool_format", "put it into the rows, or into a template of your own", off=()),
    ask(
        "enable_thinking",
        "off: `data.chat_template_kwargs: {enable_thinking: false}` and `format.reasoning: drop`; on: same",
        _thinking,
    ),
    refuse(
        "preserve_thinking",
        "set data.chat_template_kwargs to what the model's template calls it, or put it into a template of your own",
    ),
    same("ignore_pad_token_for_loss", "padding is not trained on"),
    leave("streaming buffer_size", "see `data.shuffle: blocks` for datasets too large to copy"),
    leave(
        "overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system",
        "see `data.cache`",
    ),
    leave("eval_on_each_dataset eval_num_beams", "an evaluation has a curve for each dataset"),
    leave(
        "predict_with_generate generation_max_length generation_num_beams generation_config do_sample "
        "temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens",
        "see `eval.prompts`",
    ),
    leave(
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key "
        "swanlab_lark_webhook_url swanlab_lark_secret swanlab_logdir",
        "metrics go to the run directory, and to MLflow where it is installed",
    ),
    leave(
        "ray_run_name ray_storage_path ray_storage_filesystem ray_init_kwargs resources_per_worker",
        "every run is one of Ray's; see `cluster` and `run.storage`",
    ),
    leave("placement_strategy master_addr master_port", "Ray places the workers; see `cluster`"),
    leave("export_dir export_size export_device export_legacy_format export_hub_model_id", "see `export`"),
    leave("infer_backend infer_dtype use_kv_cache", "nothing is served here"),
    leave(
        "enable_torch_profiler profiler_output_dir profiler_active_steps profiler_wait_steps "
        "profiler_warmup_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
        "profiler_with_stack profile_modules",
        "see `profile.steps`",
    ),
    leave("fsdp_transformer_layer_cls_to_wrap", "a network's layers are found"),
)


LLAMA_FACTORY = Project(
    name="llama-factory",
    title="LLaMA-Factory",
    about="Files for `llamafactory-cli train`. Options of August 2026. The names in `dataset` are looked up in "
    "`dataset_info.json` in `dataset_dir`, seen from the current directory or from the file.",
    options=table(*_MODEL_OPTIONS, *_METHOD_OPTIONS, *_DATA_OPTIONS, *TRAINING_OPTIONS),
    prepare=prepare,
    finish=finish,
)
