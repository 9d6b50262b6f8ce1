"""A head that scores takes the place of one that predicts tokens: where its weight comes from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.model.score_head import head_of, name_of_head
from raytune_fsdp.model.weights.source import RandomWeights, Weights
from raytune_fsdp.run.network_checks import check_network
from raytune_fsdp.run.starting_weights import find_origin
from raytune_fsdp.run.trials.needs import network_needs
from tests.models import ARCHITECTURES, save_checkpoint
from tests.scores import LABELS, OBJECTIVES, score_config


def config_of(directory: Path, model: dict[str, Any], **sections: Any) -> FinetuneConfig:
    model = {"architecture": None, "init": "pretrained", "path": str(directory / "model"), **model}
    return score_config(directory, OBJECTIVES["classification"], model=model, **sections)


def built(config: FinetuneConfig) -> Any:
    directory = None if config.model.path is None else Path(config.model.path)
    return build_network(load_architecture(config.model, directory), config)


def weights_of(config: FinetuneConfig) -> tuple[Any, Weights]:
    network = built(config)
    origin = find_origin(config, network, {})
    assert origin is not None
    return network, origin.weights(network)


def whole(weights: Weights, name: str) -> torch.Tensor:
    return weights.read(name, 0, weights.shapes()[name][0])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "phi"])  # two are tied, one head has a bias
def test_a_head_that_is_not_stored_is_drawn_by_the_seed_and_the_rest_is_read(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", kind)
    network, weights = weights_of(config_of(tmp_path, {}))
    head = f"{name_of_head(network)}.weight"
    assert network.config.tie_word_embeddings is False
    drawn = whole(weights, head)
    assert drawn.shape == (3, 32) and 0.01 < drawn.std() < 0.03
    assert torch.equal(drawn, whole(RandomWeights(network, 3), head)), "as if all were drawn"
    other = config_of(tmp_path, {}, run={"name": "run", "storage": str(tmp_path), "seed": 4})
    assert not torch.equal(drawn, whole(weights_of(other)[1], head))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, shape in weights.shapes().items():
        if name != head:
            assert torch.equal(whole(weights, name), stored[name]) and shape == tuple(network.get_parameter(name).shape)


def test_an_embedding_that_is_stored_as_the_head_it_is_tied_to_is_found(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "qwen3")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    table = stored.pop("model.embed_tokens.weight")
    save_file({**stored, "lm_head.weight": table}, file, {"format": "pt"})
    _, weights = weights_of(config_of(tmp_path, {}))
    assert torch.equal(whole(weights, "model.embed_tokens.weight"), table)
    assert weights.shapes()["lm_head.weight"] == (3, 32)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_stored_head_that_scores_goes_on_if_it_is_of_the_right_shape(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(kind, num_labels=3, **ARCHITECTURES[kind])
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "model")
    network, weights = weights_of(config_of(tmp_path, {}))
    assert torch.equal(whole(weights, f"{name_of_head(network)}.weight"), model.score.weight)
    two = {"head": {"type": "score", "outputs": 2}}
    named = AutoConfig.for_model(kind, id2label=dict(enumerate(LABELS[::-1])), **ARCHITECTURES[kind])
    named.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"labels=\['bad', 'fair', 'good'\]: the classes in .* are \['good', "):
        weights_of(config_of(tmp_path, {}))
    with pytest.raises(ModelError, match=r"score\.weight.* has 3 output\(s\) of 32 numbers, and this head has 2 of 32"):
        weights_of(config_of(tmp_path, two))


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ({"type": "lora", "target_modules": ["q_proj", "lm_head"]}, "method.target_modules means lm_head, too"),
        (
            {"type": "lora", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "method.modules_to_save means",
        ),
        (
            {"type": "ia3", "target_modules": ["k_proj", "lm_head"], "feedforward_modules": []},
            "target_modules means lm_head",
        ),
    ],
)
def test_no_adapter_is_put_around_it(method: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{found}.*the head that scores, which is trained whole"):
        built(score_config(tmp_path, OBJECTIVES["reward"], architecture=_of("llama"), method=method))


def _of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **ARCHITECTURES[kind]}


@pytest.mark.parametrize(
    "method",
    [
        {"type": "full"}, {"type": "lora"}, {"type": "qlora"}, {"type": "freeze", "trained": ["embed_tokens"]},
        {"type": "ia3"},
    ],
    ids=lambda method: method["type"],
)  # fmt: skip
def test_it_is_trained_whatever_the_method_is(method: dict[str, Any], tmp_path: Path) -> None:
    precision: dict[str, Any] = {"parallel": {"precision": "fp32"}}
    network = built(score_config(tmp_path, OBJECTIVES["reward"], architecture=_of("llama"), method=method, **precision))
    head = head_of(network)
    assert head is not None and head.weight.requires_grad and head.weight.shape == (1, 32)


def test_a_network_whose_scores_nobody_could_load_is_refused(tmp_path: Path) -> None:
    config = score_config(tmp_path, OBJECTIVES["reward"], architecture={**_of("llama"), "model_type": "cohere"})
    network = built(config)
    needs = network_needs(config, network.config, network)
    with pytest.raises(ConfigError, match="transformers has no class that scores texts for a cohere"):
        check_network(config, network, needs, 1)


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"parallel": {"precision": "fp64", "mesh": {"tensor": 2}}}, "parallel.mesh.tensor=2 with model.head"),
        (
            {"data": {"eval": [{"path": "rows.jsonl", "format": {"type": "chat"}}]}},
            r"data.eval.0.format.type=chat with",
        ),
    ],
)
def test_what_needs_a_model_that_predicts_tokens_is_refused(
    sections: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=found):
        score_config(tmp_path, OBJECTIVES["classification"], **sections)
