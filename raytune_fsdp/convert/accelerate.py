"""accelerate: files for `accelerate launch --config_file`. They say how a model is spread, not how it is trained."""

from __future__ import annotations

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import (
    Project,
    Translation,
    ask,
    carry,
    flag,
    in_words,
    leave,
    number,
    part,
    refuse,
    same,
    settled,
    switch,
    table,
    text,
    whole,
)
from raytune_fsdp.convert.sharding import FP8, FSDP_OPTIONS, activation_checkpointing, strategy

_MESH = {"tp": "tensor", "cp": "sequence", "sp": "sequence"}
_ZERO = {0: "no_shard", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}


def prepare(c: Translation) -> None:
    ranks = c.get("num_processes", whole, 0)
    if c.gpus is not None and ranks > 0 and ranks != c.gpus:
        c.problems.append(f"num_processes={ranks} in the file, and --gpus {c.gpus}: leave --gpus out, or correct one")
    c.gpus = ranks if ranks > 0 else c.gpus
    machines = max(1, c.get("num_machines", whole, 1))
    node = c.gpus // machines if c.gpus is not None and c.gpus >= machines else None
    for word in ("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward"):
        if (key := f"fsdp_config.{word}") in c.given:
            strategy(c, key, c.get(key, text, ""), node)
    _mesh(c)
    _distributed(c)
    activation_checkpointing(c)
    _precision(c)


def _mesh(c: Translation) -> None:
    """Carry the copies of the model and the ranks of each. Other axes are left: they do not change what is learned."""
    keys = {
        axis: f"parallelism_config.parallelism_config_{axis}_size"
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    copies, shard = c.get(keys["dp_replicate"], whole, 1), c.get(keys["dp_shard"], whole, 1)
    for axis in _MESH:
        ranks = c.get(keys[axis], whole, 1)
        c.say(
            keys[axis], "same" if ranks <= 1 else "left", f"train.global_batch decides; see parallel.mesh.{_MESH[axis]}"
        )
    if copies > 1 and shard > 1:
        c.put("parallel.strategy", "hybrid_shard", keys["dp_shard"])
        c.put("parallel.shard_size", shard, keys["dp_shard"])
    elif copies > 1:
        c.put("parallel.strategy", "replicate", keys["dp_replicate"])
    how = in_words("parallel.strategy", c.fields.get("parallel.strategy", "full_shard"))
    size = f", parallel.shard_size={shard}" if copies > 1 and shard > 1 else ""
    c.say_all((keys["dp_replicate"], keys["dp_shard"]), "carried", how + size)


def _distributed(c: Translation) -> None:
    # A kind that is dropped is one that we lack: the run is still spread by FSDP.
    kind = c.get("distributed_type", text, "FSDP" if "distributed_type" in c.dropping else "NO").upper()
    if kind in ("NO", "FALSE"):
        c.carry("distributed_type", "cluster.workers", 1)
        c.say("num_processes", "left", "distributed_type=NO is one process")
    elif kind == "FSDP":
        if "parallel.strategy" not in c.fields:
            c.carry("distributed_type", "parallel.strategy", "full_shard")
    elif kind == "DEEPSPEED":
        stage = c.get("deepspeed_config.zero_stage", whole, 2)
        for key in ("deepspeed_config.zero_stage", "distributed_type"):
            if key in c.given and key not in c.said:
                strategy(c, key, _ZERO.get(stage, str(stage)))
        if "deepspeed_config.deepspeed_config_file" in c.given and "deepspeed_config.zero_stage" not in c.given:
            c.said.pop("distributed_type", None)
            c.fields.pop("parallel.strategy", None)
            c.say(
                "distributed_type", "left", "set parallel.strategy by the stage in DeepSpeed's file (3 is full_shard)"
            )
    elif kind in ("MULTI_GPU", "MULTI_CPU"):
        strategy(c, "distributed_type", "no_shard")
        if kind == "MULTI_CPU":
            c.put("cluster.device", "cpu", "distributed_type")
    else:
        c.say("distributed_type", "refused", "a run is spread by FSDP, on GPUs or CPUs; set parallel.strategy")
    c.say("distributed_type", "carried", in_words("parallel.strategy", c.fields.get("parallel.strategy", "full_shard")))
    _offload(c)


def _offload(c: Translation) -> None:
    """Carry DeepSpeed's offloading, which moves the optimizer or the weights; here both are moved, or neither."""
    keys = [f"deepspeed_config.offload_{what}_device" for what in ("optimizer", "param")]
    moved = any(c.get(key, text, "none").lower() not in ("none", "no", "false") for key in keys)
    if any(key in c.given for key in keys):
        c.put("parallel.cpu_offload", moved)
    c.say_all(keys, "carried" if moved else "same", f"parallel.cpu_offload={str(moved).lower()}")


def _precision(c: Translation) -> None:
    how = c.get("mixed_precision", text, "no").lower()
    ours = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(how)
    if ours is None:
        why = FP8 if how == "fp8" else "parallel.precision is one of bf16, fp8, fp16, fp32, bf16_pure"
        c.say("mixed_precision", "refused", why)
        return
    c.carry("mixed_precision", "parallel.precision", ours)
    if c.get("fp16", flag, False):
        c.carry("fp16", "parallel.precision", "fp16")
    c.say("fp16", "same", "mixed_precision decides")
    c.default("parallel.precision", "fp32", "mixed_precision by default; a training script may have set another")


def _compiler(c: Translation, key: str) -> None:
    on = c.get(key, text, "no").lower() not in ("no", "none", "false")
    c.carry(key, "parallel.compile", on, "with torch's default backend" if on else "")


def _clipping(c: Translation, key: str) -> None:
    if c.get(key, text, "") in ("none", "auto"):
        c.say(key, "left", "as the training script says; see optim.max_grad_norm")
        return
    c.carry(key, "optim.max_grad_norm", c.get(key, number, 1.0) or None)


def _megatron(c: Translation) -> bool:
    return str(spelled(c.given.get("distributed_type"))).upper() == "MEGATRON_LM"


def _axes(names: str) -> str:
    return " ".join(f"parallelism_config.parallelism_config_{name}" for name in names.split())


def _deep(names: str) -> str:
    return " ".join(f"deepspeed_config.{name}" for name in names.split())


_OPTIONS = (
    settled("distributed_type", "`parallel.strategy`; NO: `cluster.workers: 1`"),
    settled("mixed_precision fp16", "`parallel.precision`"),
    carry("num_processes", "cluster.workers", whole),
    *FSDP_OPTIONS,
    settled(
        _axes("dp_replicate_size dp_shard_size tp_size cp_size sp_size"),
        "`parallel.strategy`, `parallel.shard_size`",
    ),
    leave(
        _axes("cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation"),
        "how ranks share a sample; see `parallel.mesh.sequence`",
    ),
    settled(_deep("zero_stage"), "`parallel.strategy` (1 and 2: `shard_grad_op`)"),
    settled(_deep("offload_optimizer_device offload_param_device"), "`parallel.cpu_offload`"),
    ask(_deep("gradient_clipping"), "`optim.max_grad_norm`", _clipping),
    refuse(
        _deep("gradient_accumulation_steps"),
        "a part of train.global_batch: set that to the samples of a GPU x this x GPUs",
        off=(1, "auto"),
        alike="one, or as the training script says",
        here="refused, unless it is 1 or auto: a part of `train.global_batch`",
    ),  # fmt: skip
    ask("dynamo_config.dynamo_backend dynamo_backend", "`parallel.compile`", _compiler),
    leave(
        "dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph",
        "torch's default; see `parallel.compile`",
    ),
    leave("dynamo_config.dynamo_use_regional_compilation dynamo_config", "each layer is compiled by itself"),
    switch("use_cpu", "cluster.device", "cpu", "GPUs, where there are any"),
    carry("num_cpu_threads_per_process", "cluster.cpus_per_worker", whole),
    leave(_deep("zero3_save_16bit_model zero3_init_flag"), "the export is whole, in `export.dtype`"),
    leave(_deep("deepspeed_config_file deepspeed_multinode_launcher deepspeed_hostfile"), "DeepSpeed is not used"),
    leave(
        _deep("deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names"),
        "DeepSpeed is not used; the Ray cluster says which machines there are",
    ),
    leave(_deep("offload_optimizer_nvme_path offload_param_nvme_path"), "offloading goes to memory"),
    leave(
        "compute_environment debug main_training_function downcast_bf16",
        "for accelerate's launcher and TPUs; `raytune-fsdp train` needs none of it",
    ),
    leave(
        "num_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network gpu_ids "
        "enable_cpu_affinity monitor_interval max_restarts mpirun_config",
        "the Ray cluster says which machines there are; see `cluster`",
    ),
    leave(
        "tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm command_file commands ipex_config",
        "for hardware that is not supported here",
    ),
    same("deepspeed_config parallelism_config", "an empty map sets nothing"),
    part("megatron_lm_config", "distributed_type", lambda c: c.given.get("megatron_lm_config") != {} and _megatron(c)),
    refuse("fp8_config", FP8),
)


ACCELERATE = Project(
    name="accelerate",
    title="accelerate",
    about="Files for `accelerate launch --config_file`. They say nothing about the model, the data and the training, "
    "so the result is a part of a config: put it into one. Options of accelerate 1.15, with FSDP 1, FSDP 2 or "
    "DeepSpeed.",
    options=table(*_OPTIONS),
    prepare=prepare,  # and nothing to finish: all defaults of accelerate are ours
    fragment=True,
)
