"""Convert several projects' options of FSDP. They decide where weights are, not what is learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import (
    Translation,
    ask,
    carry,
    flag,
    in_words,
    leave,
    plain,
    same,
    settled,
    switch,
    text,
    words,
)

FP8 = "fp8 is scaled in another way here: leave it out, and set parallel.precision=fp8 afterwards"

# FSDP 1 has names and numbers; FSDP 2 says whether weights are freed between forward and backward.
_STRATEGIES = {
    "full_shard": "full_shard",
    "1": "full_shard",
    "true": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "2": "shard_grad_op",
    "false": "shard_grad_op",
    "no_shard": "replicate",
    "3": "replicate",
    "hybrid_shard": "hybrid_shard",
    "4": "hybrid_shard",
    "hybrid_shard_zero2": "hybrid_shard",
    "5": "hybrid_shard",
}
_USUAL_NODE = 8


def strategy(c: Translation, key: str, word: str, gpus_of_a_node: int | None = None) -> None:
    """Carry `parallel.strategy`, by FSDP's word for it."""
    ours = _STRATEGIES.get(word.lower())
    if ours is None:
        c.say(
            key,
            "left",
            f"unknown to FSDP; see parallel.strategy, here {c.fields.get('parallel.strategy', 'full_shard')}",
        )
        return
    c.put("parallel.strategy", ours, key)
    note = ""
    if ours == "hybrid_shard":
        node = gpus_of_a_node or _USUAL_NODE
        node = node if c.gpus is None or c.gpus % node == 0 else c.gpus
        c.put("parallel.shard_size", node, key)
        note = f", parallel.shard_size={node}: the GPUs of a node"
    c.say(key, "carried", f"{in_words('parallel.strategy', ours)}{note}")


def fsdp(c: Translation, key: str) -> None:
    """Carry `fsdp`: words such as `full_shard auto_wrap offload`, as a text or a list; in newer files only true."""
    value = plain(c.given[key])
    if value is True:
        c.say(key, "same", "weights are sharded (parallel.strategy=full_shard)")
        return
    found = [] if value is False else c.get(key, words, [])
    if not found:
        c.say(key, "left", "weights are sharded nonetheless; set parallel.strategy=replicate for whole copies")
    for word in found:
        if word == "offload":
            c.put("parallel.cpu_offload", True, key)
        elif word != "auto_wrap":
            strategy(c, key, word)
    c.say(key, "carried", in_words("parallel.cpu_offload", "offload" in found))


def sharded(c: Translation) -> bool:
    """Return whether the file itself shards weights: then the optimizer's copy is fp32, whatever they are loaded as."""
    on = any(spelled(c.given[key]) not in (False, "", []) for key in ("fsdp", "deepspeed") if key in c.given)
    return on or any(key.startswith(("fsdp_config", "deepspeed.")) for key in c.given)


def activation_checkpointing(c: Translation, *own: str, read: Callable[[Any], bool] = flag) -> None:
    """Switch it on if any of these options does: projects have a switch of their own besides FSDP's."""
    given = [key for key in (*own, *_both("activation_checkpointing")) if key in c.given]
    mode = "full" if any(c.get(key, read if key in own else flag, False) for key in given) else "none"
    c.carry_all(given, "parallel.activation_checkpointing", mode)


def _both(word: str) -> tuple[str, str]:
    return f"fsdp_config.fsdp_{word}", f"fsdp_config.{word}"


def _names(these: str) -> str:
    return " ".join(name for word in these.split() for name in _both(word))


# The options below `fsdp_config`, which most files write with a second `fsdp_` and some without.
FSDP_OPTIONS = (
    ask(
        _names("sharding_strategy reshard_after_forward"),
        "`parallel.strategy` (hybrid: `shard_size`, too)",
        lambda c, key: strategy(c, key, c.get(key, text, "")),
    ),
    carry(_names("offload_params"), "parallel.cpu_offload", flag),
    switch(
        _names("cpu_ram_efficient_loading"),
        "model.fill",
        "rank0",
        "no rank needs memory for the whole model (model.fill=auto)",
    ),  # fmt: skip
    settled(_names("activation_checkpointing"), "`parallel.activation_checkpointing: full`"),
    carry(_names("activation_checkpointing_offload"), "parallel.activation_offload", flag),
    same(_names("version") + " fsdp_version", "always FSDP 2"),
    same(_names("sync_module_states"), "all ranks start from the same weights"),
    same(_names("transformer_layer_cls_to_wrap transformer_cls_names_to_wrap"), "a network's layers are found"),
    leave(_names("auto_wrap_policy min_num_params"), "a unit is one layer, or `parallel.wrap` layers"),
    same(_names("state_dict_type final_state_dict_type"), "checkpoints are in shards, the export is whole"),
    leave(_names("mixed_precision_policy"), "see `parallel.precision`"),
    leave(
        _names("backward_prefetch forward_prefetch limit_all_gathers use_orig_params cpu_offload_pin_memory")
        + " "
        + _names("xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings ignored_modules"),
        "FSDP 2 has no such switch, or needs none",
    ),
    leave("fsdp_config", "a file of its own: convert what it says by hand (see `parallel`)"),
)
