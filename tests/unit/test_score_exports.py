"""What a run with a head that scores leaves: a directory whose class in transformers scores texts as the run does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from raytune_fsdp.checkpoint.form import written_of
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.directory.scoring import describe_head
from raytune_fsdp.model.export.write import export
from raytune_fsdp.model.network import build_network, init_buffers, load_architecture, stored_network
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.run.trials.probe import with_memory
from raytune_fsdp.run.trials.score_proof import check_scores, scores_of_head
from tests.models import SEEING, architecture
from tests.runs import make_config, write_tokenizer
from tests.unit.test_named_class import Held

PAD = 0
LABELS = ["poor", "fair", "good"]
CLASSES = {
    "llama": "LlamaForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "mixtral": "MixtralForSequenceClassification",
    "gemma3": "Gemma3ForSequenceClassification",
    "qwen3_5": "Qwen3_5TextForSequenceClassification",
}
"""Of one that also sees, the class of what the run trains: of Gemma 3 all, of Qwen 3.5 the language model."""
THOROUGH = pytest.mark.thorough


def scoring_config(home: Path, values: Mapping[str, Any], **sections: Mapping[str, Any]) -> FinetuneConfig:
    """A run that learns the classes of texts."""
    model = {"architecture": dict(values), "head": {"type": "score", "labels": LABELS}}
    data = {
        "train": [{"path": str(home / "texts.jsonl"), "format": {"type": "score", "text": "text", "label": "label"}}]
    }
    changes: dict[str, Any] = {
        "parallel": {"precision": "fp32"},
        "train": {"objective": {"type": "classification"}},
        **sections,
    }
    changes["model"] = {**model, **changes.get("model", {})}
    return make_config(home, **{"data": data, **changes})


def described(home: Path, config: FinetuneConfig, directory: Path | None = None) -> Path:
    """The directory with config and tokenizer that a run of this config has."""
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(home / "tokenizer"))
    hf_config = load_architecture(config.model, directory)
    describe_head(config, hf_config, build_network(hf_config, config), tokenizer)
    hf_config.save_pretrained(home / "files")
    tokenizer.save_pretrained(home / "files")
    return home / "files"


def filled(network: PreTrainedModel) -> PreTrainedModel:
    """The network with values: what is constant where transformers draws it would hide a mix-up."""
    with_memory(network, lambda tensor: torch.empty(tensor.shape), buffers=False)
    init_buffers(network, torch.device("cpu"))
    torch.manual_seed(2)
    for parameter in network.parameters():
        parameter.data.normal_(0.1, 0.1)
    return network.eval()


class Whole(Held):
    """The tensors of a network, in memory, as an export reads them."""

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self[name].detach() for name in names}


def exported(files: Path, network: PreTrainedModel, destination: Path) -> Path:
    source = Whole(owned_tensors(network))
    written = written_of(cast(Any, None), files, source)
    export(written.source, files, destination, dtype="trained", max_file_bytes=30_000, form=written.form)
    return destination


def texts() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randint(7, 60, (length,)) for length in (3, 17, 9, 24, 12, 5, 20, 11)]


def padded(side: str) -> dict[str, torch.Tensor]:
    """All texts as one batch, as a tokenizer pads them, with the positions that each text's own tokens have alone."""
    longest = max(map(len, texts()))
    rows = [torch.full((longest - len(each),), PAD) for each in texts()]
    ids = torch.stack([torch.cat([a, b] if side == "left" else [b, a]) for a, b in zip(rows, texts(), strict=True)])
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@torch.no_grad()
def theirs(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.eval()(**inputs, use_cache=False).logits
    return found


def ours(network: PreTrainedModel) -> torch.Tensor:
    return torch.cat([scores_of_head(network, each[None]) for each in texts()])


def check_same(model: Any, wanted: torch.Tensor, *, positions: bool = True) -> None:
    """Each text alone, bit for bit, and all of them together, padded on either side."""
    alone = torch.cat([theirs(model, input_ids=each[None]) for each in texts()])
    assert torch.equal(alone, wanted), "batch 1"
    for side in ("left", "right"):
        inputs = padded(side)
        together = theirs(model, **inputs)
        assert (together - wanted).abs().max() <= 1e-5 * wanted.abs().max(), side
    assert len(set(wanted.flatten().tolist())) == wanted.numel(), "texts have different scores"


def values_of(model: str) -> dict[str, Any]:
    return {"model_type": model, **SEEING[model]} if model in SEEING else architecture(model)


@pytest.mark.parametrize("model", [pytest.param(each, marks=THOROUGH if each in SEEING else ()) for each in CLASSES])
def test_transformers_scores_an_export_as_the_run_does(tmp_path: Path, model: str) -> None:
    config = scoring_config(tmp_path, values_of(model))
    files = described(tmp_path, config)
    network = stored_network(files)
    assert network is not None and head_of(network) is not None
    check_scores(config, network)  # and the class was found to score alike, beforehand
    place = exported(files, filled(network), tmp_path / "export")
    found, report = AutoModelForSequenceClassification.from_pretrained(
        place, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(found).__name__ == CLASSES[model] == json.loads((place / "config.json").read_text())["architectures"][0]
    check_same(found, ours(network))
    head = head_of(network)
    assert head is not None and torch.equal(found.score.weight, head.weight)
    assert found.config.id2label == dict(enumerate(LABELS)) and found.config.problem_type.startswith("single_label")
    assert found.config.get_text_config().pad_token_id == PAD == AutoTokenizer.from_pretrained(place).pad_token_id
