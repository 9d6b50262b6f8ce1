"""axolotl's options that do not change what is learned: reports, caches, kernels, machines."""

from __future__ import annotations

from raytune_fsdp.convert.rules import Translation, ask, carry, flag, leave, text


def _fp32_norms(c: Translation, key: str) -> None:
    if key == "fp32_norms" and not c.get(key, flag, False):
        c.say(key, "same", "norms have the type of the other weights")
    elif c.fields.get("parallel.precision") == "bf16_pure":
        c.say(key, "refused", "all weights have one type here; parallel.precision=bf16 keeps them in fp32")
    else:
        c.say(key, "same", "all weights are fp32 in the optimizer")


def _wandb_project(c: Translation, key: str) -> None:
    """A project turns Weights & Biases on, there too."""
    if project := c.get(key, text, ""):
        c.put("tracking.wandb.enabled", True, key)
        c.carry(key, "tracking.wandb.project", project, "and tracking.wandb.enabled=true")
    else:
        c.say(key, "same", "off")


LEFT_OPTIONS = (
    leave("dataset_prepared_path push_dataset_to_hub", "prepared data is in the cache (data.cache.path)"),
    leave(
        "dataset_processes dataset_num_proc dataset_keep_in_memory num_dataset_shards_to_save",
        "data is prepared automatically",
    ),
    leave(
        "shuffle_merged_datasets shuffle_before_merging_datasets streaming streaming_multipack_buffer_size",
        "the order is random; see data.shuffle",
    ),
    leave("pretrain_multipack_buffer_size preprocess_iterable", "see `data.window`"),
    leave(
        "sample_packing_sequentially sample_packing_group_size sample_packing_bin_size "
        "sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches total_num_tokens "
        "total_supervised_tokens",
        "it changes how full samples are; see `data.window`",
    ),
    leave("eval_sample_packing eval_batch_size eval_sequence_len", "an evaluation is packed as the training data"),
    leave("save_first_step dynamic_checkpoint", "see `raytune-fsdp checkpoint`"),
    carry("use_wandb", "tracking.wandb.enabled", flag),
    ask("wandb_project", "`tracking.wandb.project`, and `enabled`", _wandb_project),
    carry("wandb_entity", "tracking.wandb.entity", text),
    leave("wandb_name wandb_run_id", "a run has the name of its directory; see `run.name`"),
    leave("wandb_mode wandb_watch wandb_log_model", "see WANDB_MODE in the environment"),
    carry("use_tensorboard", "tracking.tensorboard.enabled", flag),
    leave(
        "use_comet comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
        "comet_experiment_config comet_api_key use_trackio trackio_project_name trackio_run_name "
        "trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port",
        "metrics go to the run directory, and to MLflow where it is installed",
    ),
    leave("mlflow_run_name hf_mlflow_log_artifacts", "a run has the name of its directory; see `run.name`"),
    leave("hf_use_auth_token", "HF_TOKEN in the environment"),
    leave("use_ray ray_run_name resources_per_worker", "see `cluster.launch`; a run has the name of its directory"),
    leave("do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split", "see `eval.tasks`"),
    leave(
        "eval_table_size eval_max_new_tokens generate_samples num_generation_samples generation_max_new_tokens "
        "generation_temperature generation_top_p generation_top_k generation_do_sample generation_prompt_ratio",
        "see `eval.prompts`",
    ),
    leave(
        "loss_watchdog_threshold loss_watchdog_patience",
        "steps whose loss is not finite are skipped; `optim.max_skipped` of them in a row end a run",
    ),
    leave(
        "gc_steps gc_collect_steps include_tokens_per_second include_tkps profiler_steps_start",
        "every step is in metrics",
    ),
    leave("profiler_steps", "see `profile.steps`"),
    leave("strict is_preprocess axolotl_config_path debug", "how axolotl's own commands read a file"),
    leave("freeze_mm_modules", "only text is trained on"),
)


# The options that decide where and with which kernels the run computes.
MACHINE_OPTIONS = (
    leave(
        "max_memory gpu_memory_limit low_cpu_mem_usage device_map device world_size ddp",
        "FSDP spreads the weights over all GPUs; see `parallel` and `cluster`",
    ),
    leave(
        "experimental_skip_move_to_device embeddings_skip_upcast layer_offloading",
        "where weights are, and in which type at rest, is `parallel`",
    ),
    ask("fp32_norms fp32_norm_classes", "same, unless weights are bf16 (`bf16_pure`): then refused", _fp32_norms),
    leave("selective_checkpointing", "see `parallel.activation_checkpointing: selective`"),
    leave("dp_shard_size dp_replicate_size", "see `parallel.strategy` and `shard_size`"),
    leave("fsdp_final_state_dict_type", "checkpoints are in shards, the export is whole"),
    leave("heads_k_stride ring_attn_func", "how ranks share a sample; see `parallel.mesh.sequence`"),
    leave("deepcompile", "DeepSpeed is not used; see `parallel.compile`"),
    leave(
        "use_kernels flash_attn_d512 gemma4_hybrid_attn_impl llama4_linearized_experts flash_attn_cross_entropy "
        "flash_attn_fuse_mlp flash_attn_rms_norm flash_attn_fuse_qkv flash_optimum large_head_attention "
        "sdpa_varlen fused_attn_kernel flex_attn_compile_kwargs experts_implementation chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp "
        "unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope cut_cross_entropy liger_rope liger_rms_norm "
        "liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
        "liger_fused_linear_cross_entropy",
        "other kernels for the same function; see `model.loss`",
    ),
)
