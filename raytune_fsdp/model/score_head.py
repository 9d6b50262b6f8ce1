"""A head that scores documents, in the place of the one that predicts tokens (`model.head`).

The network stays a causal LM whose output embedding is another linear layer, under the same name, never tied. So it is
sharded, saved and resumed like any weight. It is trained whole whatever the method is, and no adapter is put around it.
A document's scores are computed at its last token: the place of its only target, which is one more token behind it.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.model.added_rows import name_in
from raytune_fsdp.model.objective.score_head import ScoreHead

STORED = "score.weight"
"""What transformers calls the weight in the files of its classes for scores."""


def put_score_head(network: PreTrainedModel, config: HeadConfig) -> None:
    """Put a head that scores in the place of the one that predicts tokens. The network is on the meta device.

    Its config, which then says that no weights are tied, must not be anyone else's.
    """
    old, kind = network.get_output_embeddings(), type(network).__name__
    if type(old) is not nn.Linear:
        raise ModelError(
            f"model.head.type={config.type}: the head of a {kind} is not one linear layer behind its decoder, in whose "
            "place this one would be: choose another model, such as Llama, Qwen or Gemma"
        )
    head = ScoreHead(old.in_features, config.size, bias=False, device="meta", dtype=old.weight.dtype)
    network.set_submodule(name_in(network, old), head.train(old.training))
    for each in (network.config, network.config.get_text_config()):
        each.tie_word_embeddings = False
    network.all_tied_weights_keys = network.get_expanded_tied_weights_keys(all_submodels=True)


def head_of(network: PreTrainedModel) -> ScoreHead | None:
    """Return the head of a network that scores; None: it predicts tokens."""
    head = network.get_output_embeddings()
    return head if isinstance(head, ScoreHead) else None


def name_of_head(network: PreTrainedModel) -> str | None:
    """Return the name of the module that scores; None: the network predicts tokens."""
    head = head_of(network)
    return None if head is None else name_in(network, head)


def name_of_embedding(network: PreTrainedModel) -> str:
    """Return the name of the table of the network's tokens."""
    return f"{name_in(network, network.get_input_embeddings())}.weight"
