"""Losses and a network as a user would write them, for tests of all kinds. Every rank can import this file."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from raytune_fsdp import LossDocument


def minus(log_probabilities: torch.Tensor, document: LossDocument) -> torch.Tensor:
    return -log_probabilities


def focal(log_probabilities: torch.Tensor, document: LossDocument) -> torch.Tensor:
    return -((1 - log_probabilities.exp()) ** 2) * log_probabilities


def rewarded(log_probabilities: torch.Tensor, document: LossDocument) -> torch.Tensor:
    return -log_probabilities * document.columns["reward"]


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    """A Llama whose layers have other activations."""

    config_class = MineConfig

    def __init__(self, config: MineConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp.act_fn = nn.Tanh() if number % 2 else nn.GELU()


AutoConfig.register("mine", MineConfig, exist_ok=True)


def network(config: PretrainedConfig) -> MineForCausalLM:
    """Of a config of its own, or of a Llama's, whose weights it can begin with."""
    if isinstance(config, MineConfig):
        return MineForCausalLM(config)
    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    return MineForCausalLM(MineConfig(**values))


def as_it_was(config: PretrainedConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(config)


class UnknownConfig(LlamaConfig):
    model_type = "nobody_knows"


def unregistered(config: PretrainedConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(UnknownConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))


def a_layer(config: PretrainedConfig) -> nn.Linear:
    return nn.Linear(2, 2)


def on_a_device(config: PretrainedConfig) -> MineForCausalLM:
    made = network(config)
    made.lm_head = nn.Linear(32, 64, device="cpu")
    return made


def more_than_its_class(config: PretrainedConfig) -> MineForCausalLM:
    made = network(config)
    made.extra = nn.Linear(2, 2)
    return made


def failing(config: PretrainedConfig) -> MineForCausalLM:
    raise KeyError("width")
