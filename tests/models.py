"""Tiny networks of several architectures, and checkpoints of them, for tests of all kinds."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 131
"""Prime, so that no world size divides it: the last rank's rows are fewer."""

_LIKE_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 8}

_LIKE_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LIKE_LLAMA, **_HEAD, "tie_word_embeddings": False},
    "qwen3": {**_LIKE_LLAMA, **_HEAD, "tie_word_embeddings": True},
    "mistral": {**_LIKE_LLAMA, **_HEAD, "tie_word_embeddings": False, "sliding_window": 16},
    "gemma3_text": {
        **_LIKE_LLAMA,
        **_HEAD,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": _LIKE_GPT2,
    "phi": {**_LIKE_LLAMA, "tie_word_embeddings": False},
    "olmo2": {**_LIKE_LLAMA, "tie_word_embeddings": False},
    "gpt_neox": {**_LIKE_LLAMA, "tie_word_embeddings": False},
    "starcoder2": {**_LIKE_LLAMA, "tie_word_embeddings": True},
    "stablelm": {**_LIKE_LLAMA, "tie_word_embeddings": False},
}
"""Small configs by model type: tied and untied, grouped heads, sliding windows, biases, rotary or learned positions."""

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**_LIKE_LLAMA, **_HEAD, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LIKE_LLAMA,
        **_HEAD,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        **_LIKE_LLAMA,
        **_HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Mixtures of experts: transformers stores the first two expert by expert, the third as it computes with it."""

REARRANGED: dict[str, dict[str, Any]] = {
    "hrm_text": {**_LIKE_LLAMA, **_HEAD},
    "olmo_hybrid": {**_LIKE_LLAMA, **_HEAD, "layer_types": ["linear_attention", "full_attention"]},
}
"""Of which some tensors are stored in other parts than they are used in."""
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "chunk_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
}  # fmt: skip
PARTICULAR: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_LIKE_LLAMA, "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
    },
    "nemotron_h": {
        **_LIKE_LLAMA, **_HEAD, **_MAMBA, "num_hidden_layers": 4, "moe_intermediate_size": 24, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_shared_expert_intermediate_size": 24,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    },
    "ernie4_5_moe": {
        **_LIKE_LLAMA, **_HEAD, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
        "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
    },
    "granitemoehybrid": {
        **_LIKE_LLAMA, **_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"], "position_embedding_type": "rope",
    },
}  # fmt: skip
"""With tensors that stay in fp32, or configs of which JSON needs help."""

ROTATED: dict[str, dict[str, Any]] = {
    "olmo3": {**_LIKE_LLAMA, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {**_LIKE_LLAMA, "tie_word_embeddings": False},
    "glm4": {**_LIKE_LLAMA, **_HEAD},
}
"""Whose rotary embeddings older versions of transformers described in their own way."""

SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_LIKE_LLAMA, **_HEAD, "query_pre_attn_scalar": 8, "sliding_window": 16, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {**_LIKE_LLAMA, "logits_scaling": 4.0, "tie_word_embeddings": False},
    "cohere": {**_LIKE_LLAMA, "logit_scale": 0.25},
    "opt": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.0,
    },
    "gptj": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip
"""With caps and scales on scores and logits, and families whose attention is given other things than most."""

_ALTERNATING = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
UNUSUAL: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **_LIKE_LLAMA, **_HEAD, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 64,
    },
    "gemma4_text": {
        **_LIKE_LLAMA, **_HEAD, "num_hidden_layers": 4, "global_head_dim": 16, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    },
    "zamba": {
        **_LIKE_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": _ALTERNATING,
        "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "zamba2": {
        **_LIKE_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": _ALTERNATING,
        "n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 16, "use_mem_rope": True,
        "use_shared_attention_adapter": True, "adapter_rank": 4,
    },
    "falcon_h1": {
        **_LIKE_LLAMA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 16, "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9],
    },
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
}  # fmt: skip
"""Heads that differ by layer, blocks that share weights, buffers computed by the decoder, positions of another name."""

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_EYES_OF_QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1,
}  # fmt: skip
_IMAGES_OF_QWEN = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_IMAGES = {"image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5}
LINEAR = {"qwen3_5_text": {**_LIKE_LLAMA, **_HEAD, **_LINEAR, "tie_word_embeddings": False}}
"""With layers of linear attention."""
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_LIKE_LLAMA, **_HEAD, **_LINEAR, **_FEW_EXPERTS, "shared_expert_intermediate_size": 16},
    "jamba": {
        **_LIKE_LLAMA, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2": {**_LIKE_LLAMA, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_LIKE_LLAMA, **_FEW_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": {**_LIKE_LLAMA, **_MAMBA, "mamba_chunk_size": 16, "attn_layer_indices": [1]},
    "mamba2": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
        "head_dim": 8, "n_groups": 2, "chunk_size": 16,
    },
    "falcon_mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}  # fmt: skip
"""With state mixers, besides those of the other lists."""
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**_LIKE_LLAMA, **_HEAD, **_LINEAR}, "vision_config": _EYES_OF_QWEN, **_IMAGES_OF_QWEN},
    "qwen3_5_moe": {
        "text_config": {
            **_LIKE_LLAMA, **_HEAD, **_LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "vision_config": _EYES_OF_QWEN,
        **_IMAGES_OF_QWEN,
    },
    "gemma3": {
        "text_config": {
            **_LIKE_LLAMA, **_HEAD, "query_pre_attn_scalar": 8, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _EYES,
        "mm_tokens_per_image": 4,
        **_IMAGES,
    },
    "llama4": {
        "text_config": {
            **_LIKE_LLAMA, **_HEAD, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
        },
        "vision_config": {**_EYES, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        **_IMAGES,
    },
}  # fmt: skip
"""Models that also see, as a vision tower around a language model: of the first two and the last a run trains the text
class, of Gemma 3 the whole."""
SEEING_CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}

TIED = ("qwen3", "gemma3_text", "gpt2", "starcoder2", "gemma4_text", "zamba", "zamba2", "mpt")


def architecture(model_type: str, **changes: Any) -> dict[str, Any]:
    """The content of a config.json."""
    known = {
        **ARCHITECTURES,
        **EXPERTS,
        **REARRANGED,
        **PARTICULAR,
        **ROTATED,
        **SCALED,
        **UNUSUAL,
        **LINEAR,
        **HYBRIDS,
    }
    return {"model_type": model_type, **known[model_type], **changes}


def build(model_type: str, *, seed: int = 1, **changes: Any) -> Any:
    """A network on the CPU whose every tensor is drawn at random: constant biases and norms would hide a mix-up."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = architecture(model_type, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.1)
    return model.eval()


def build_seeing(model_type: str, *, seed: int = 1, **changes: Any) -> Any:
    """A network that also sees, of the class that its config names, drawn as in `build`. `changes` are of its text."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = copy.deepcopy(SEEING[model_type])
    values["text_config"] |= changes
    torch.manual_seed(seed)
    model = getattr(transformers, SEEING_CLASSES[model_type])(CONFIG_MAPPING[model_type](**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.1)
    return model.eval()


def save_checkpoint(
    directory: Path, model_type: str, *, max_shard_size: str = "5GB", tokenizer: bool = False, **changes: Any
) -> Path:
    """A model directory as transformers writes it; with `tokenizer`, the demo's is beside it."""
    make = build_seeing if model_type in SEEING else build
    make(model_type, **changes).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        add_tokenizer(directory)
    return directory


def add_tokenizer(directory: Path) -> None:
    """Put the demo's tokenizer (1024 tokens) into a model directory."""
    from raytune_fsdp.demo import TOKENIZER

    shutil.copytree(TOKENIZER, directory, dirs_exist_ok=True)
