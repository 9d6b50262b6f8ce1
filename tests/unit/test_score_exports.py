"""What a run with a head that scores leaves: a directory whose class in transformers scores texts as the run does."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from raytune_fsdp.base.errors import ConfigError, ModelError, RaytuneError
from raytune_fsdp.checkpoint.form import written_of
from raytune_fsdp.checkpoint.merged import base_weights, named_class, plain_network
from raytune_fsdp.checkpoint.model_files import describe_for_inference, load_for_inference
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.config.sections.model import HeadConfig, ModelConfig
from raytune_fsdp.launch.examine import StoredModel
from raytune_fsdp.model.adapters.attach import adapter_tensors
from raytune_fsdp.model.adapters.config_file import put_adapter_config
from raytune_fsdp.model.adapters.merge import MergedWeights
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.directory.scoring import describe_head, set_padding
from raytune_fsdp.model.export.adapter import export_adapter
from raytune_fsdp.model.export.write import export
from raytune_fsdp.model.network import build_network, choose_trained, init_buffers, load_architecture, stored_network
from raytune_fsdp.model.score_head import head_of, put_score_head
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.record.copies.mlflow_model import flavor_of
from raytune_fsdp.record.report.card_scores import of_scores
from raytune_fsdp.run.checks import check_trackers
from raytune_fsdp.run.starting_weights import find_adapter, find_origin
from raytune_fsdp.run.trials.export_proof import check_acts
from raytune_fsdp.run.trials.probe import with_memory
from raytune_fsdp.run.trials.score_proof import check_scores, scores_of_head
from tests.models import SEEING, architecture, save_checkpoint
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
    assert config.model.head is not None
    set_padding(config.model.head, tokenizer)
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


def loaded_from(place: Path) -> Any:
    """The class that transformers loads from a directory, all of whose tensors are there, and no others."""
    found, report = AutoModelForSequenceClassification.from_pretrained(
        place, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return found


def check_same(model: Any, wanted: torch.Tensor, *, exact: bool = True) -> None:
    """Each text alone (`exact`: bit for bit), and all of them together, padded on either side."""
    alone = torch.cat([theirs(model, input_ids=each[None]) for each in texts()])
    assert torch.equal(alone, wanted) if exact else (alone - wanted).abs().max() <= 1e-5, "batch 1"
    for side in ("left", "right"):
        inputs = padded(side)
        together = theirs(model, **inputs)
        assert (together - wanted).abs().max() <= 1e-5 * wanted.abs().max(), side
    assert len(set(wanted.flatten().tolist())) == wanted.numel(), "texts have different scores"


def begun(home: Path, model: str, **sections: Mapping[str, Any]) -> tuple[FinetuneConfig, Path]:
    """A run that begins with a model that predicts tokens, and the directory of that."""
    base = home / "base"
    if not base.exists():
        save_checkpoint(base, model)
    place = {"path": str(base), "init": "pretrained", "architecture": None, **sections.pop("model", {})}
    return scoring_config(home, {}, model=place, **sections), base


def adapted(home: Path, model: str, method: Mapping[str, Any]) -> tuple[PreTrainedModel, Held, Path, Path]:
    """A network with adapters and a head of random values, what its run keeps of it, its files, and its base."""
    config, base = begun(home, model, method=method)
    files = described(home, config, base)
    network = plain_network(files)
    choose_trained(network, config.method)
    torch.manual_seed(0)
    held = Held({name: torch.randn(tensor.shape) * 0.1 for name, tensor in adapter_tensors(network).items()})
    for name in held:
        if "vision" in name and (".lora_B." in name or ".ia3_l." in name):  # which no text reaches
            held[name].fill_(1.0 if ".ia3_l." in name else 0.0)
    put_adapter_config(network, files)
    return network, held, files, base


def with_adapters(base: Path, config: Method, held: Held) -> PreTrainedModel:
    """The network that a run trains, with these values."""
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    put_score_head(network, HeadConfig(type="score", outputs=len(LABELS)))
    choose_trained(network, config)
    values = {name: torch.nn.Parameter(tensor) for name, tensor in held.items()}
    network.load_state_dict(values, strict=False, assign=True)
    found: PreTrainedModel = network.eval()
    return found


def values_of(model: str) -> dict[str, Any]:
    return {"model_type": model, **SEEING[model]} if model in SEEING else architecture(model)


@pytest.mark.parametrize("model", CLASSES)
def test_transformers_scores_an_export_as_the_run_does(tmp_path: Path, model: str) -> None:
    config = scoring_config(tmp_path, values_of(model))
    files = described(tmp_path, config)
    network = stored_network(files)
    assert network is not None and head_of(network) is not None
    check_scores(config, network)  # and the class was found to score alike, beforehand
    place = exported(files, filled(network), tmp_path / "export")
    found = loaded_from(place)
    assert type(found).__name__ == CLASSES[model] == json.loads((place / "config.json").read_text())["architectures"][0]
    check_same(found, ours(network))
    head = head_of(network)
    assert head is not None and torch.equal(found.score.weight, head.weight)
    assert found.config.id2label == dict(enumerate(LABELS)) and found.config.problem_type.startswith("single_label")
    assert found.config.get_text_config().pad_token_id == PAD == AutoTokenizer.from_pretrained(place).pad_token_id


LORA = {"type": "lora", "rank": 4, "alpha": 8}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {**LORA, "dora": True, "target_modules": ["q_proj", "v_proj"]},
    "whole": {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "ia3": {"type": "ia3", "target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
}
ADAPTERS = [
    ("llama", "lora"),
    ("llama", "whole"),
    ("gemma3", "lora"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("llama", "dora"), ("llama", "ia3"), ("qwen3", "lora"), ("qwen3_5", "lora"))
    ),
]


@pytest.mark.parametrize(("model", "kind"), ADAPTERS)
def test_peft_scores_an_adapter_with_its_head_as_the_run_does(
    tmp_path: Path, model: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the class that transformers loads from the base for scores; and so does the same run exported merged."""
    from peft import PeftModel

    caplog.set_level(logging.DEBUG, "raytune_fsdp.run.trials")
    network, held, files, base = adapted(tmp_path, model, METHODS[kind])
    named, place = named_class(files, str(base), None), tmp_path / "adapter"
    prove = partial(check_acts, network=network, named=named)
    export_adapter(held, Held(), network, named, files, place, base=str(base), revision=None, card=str, prove=prove)
    assert "no small network" not in caplog.text, "the export was proven to act"
    config = json.loads((place / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    wanted = ours(with_adapters(base, TypeAdapter(Method).validate_python(METHODS[kind]), held))
    plain = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=len(LABELS))
    plain.config.get_text_config().pad_token_id = AutoTokenizer.from_pretrained(place).pad_token_id
    loaded = PeftModel.from_pretrained(plain, place)
    check_same(loaded, wanted, exact=kind != "dora")
    merged = MergedWeights(base_weights(find_weights(base), plain_network(files), {}), held, network)
    written = written_of(cast(Any, None), files, merged)
    export(written.source, files, tmp_path / "merged", dtype="fp32", max_file_bytes=10**6, form=written.form)
    check_same(loaded_from(tmp_path / "merged"), wanted, exact=False)


def test_without_positions_a_gpt2_scores_otherwise_when_padded_on_the_left(tmp_path: Path) -> None:
    """As the card says."""
    files = described(tmp_path, scoring_config(tmp_path, values_of("gpt2")))
    network = stored_network(files)
    assert network is not None
    found, inputs = loaded_from(exported(files, filled(network), tmp_path / "export")), padded("left")
    inputs.pop("position_ids")
    apart = (theirs(found, **inputs) - ours(network)).abs().amax(1)
    longest = max(map(len, texts()))
    assert [len(each) < longest for each in texts()] == (apart > 1e-3).tolist()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (values_of("cohere"), "transformers has no class that scores texts for a cohere, so nobody could load"),
        (
            {**values_of("llama"), "model_type": "modernbert-decoder"},
            r"for a modernbert-decoder \(a ModernBertDecoderForSequenceClassification has other layers\)",
        ),
        (
            {
                **values_of("llama"), "model_type": "minicpm3", "q_lora_rank": 16, "kv_lora_rank": 8, "v_head_dim": 8,
                "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4, "dim_model_base": 8,
            },
            r"MiniCPM3ForSequenceClassification does not score texts as this head does \(off by",
        ),
    ],
    ids=["no class", "other layers", "other scores"],
)  # fmt: skip
def test_a_network_that_nobody_could_load_is_refused(tmp_path: Path, values: Mapping[str, Any], said: str) -> None:
    config = scoring_config(tmp_path, values)
    network = build_network(load_architecture(config.model, None), config)
    with pytest.raises(RaytuneError, match=said) as refused:
        check_scores(config, network)
    assert str(refused.value).startswith("model.head") and "\n" not in str(refused.value)


def test_a_layer_more_than_are_tried_is_no_other_layer(tmp_path: Path) -> None:
    config = scoring_config(tmp_path, architecture("llama", num_hidden_layers=5))
    check_scores(config, build_network(load_architecture(config.model, None), config))


OF_THREE = {"type": "score", "outputs": 3}


def scoring_base(home: Path, model: str = "llama") -> tuple[Path, PreTrainedModel]:
    """A directory of a class that scores, as an export has it, and the network that it is of."""
    (home / "first").mkdir()
    files = described(home / "first", scoring_config(home / "first", values_of(model)))
    network = stored_network(files)
    assert network is not None
    return exported(files, filled(network), home / "base"), network


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_run_begins_with_the_head_of_a_model_that_scores(tmp_path: Path, model: str) -> None:
    """One that was exported, or a stranger's of the same class. Its classes keep their names where none are given."""
    base, network = scoring_base(tmp_path, model)
    config = scoring_config(
        tmp_path, {}, model={"path": str(base), "init": "pretrained", "architecture": None, "head": OF_THREE}
    )
    files = described(tmp_path, config, base)
    assert json.loads((files / "config.json").read_text())["id2label"] == {"0": "poor", "1": "fair", "2": "good"}
    own = build_network(load_architecture(config.model, base), config)
    origin = find_origin(config, own, {})
    assert origin is not None
    found, wanted = origin.weights(own), owned_tensors(network)
    assert found.shapes().keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found.read(name, 0, len(tensor)), tensor), name


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            None,
            "is a LlamaForSequenceClassification: its head scores texts, and predicts no tokens; set model.head",
        ),
        ({"type": "score", "outputs": 2}, "model.head.outputs=2, and the head of .* has 3: set model.head.outputs=3"),
    ],
)
def test_a_head_of_another_kind_is_not_taken(tmp_path: Path, head: Mapping[str, Any] | None, said: str) -> None:
    base, _ = scoring_base(tmp_path)
    values = {"path": str(base), "head": head}
    with pytest.raises(ModelError, match=said):
        load_architecture(ModelConfig.model_validate(values), base)


def adapter_beside(home: Path, **changes: Any) -> tuple[FinetuneConfig, Path, Held]:
    """A run that begins with an exported adapter that scores."""
    network, held, files, base = adapted(home, "llama", LORA)
    named, place = named_class(files, str(base), None), home / "adapter"
    export_adapter(
        held, Held(), network, named, files, place, base=str(base), revision=None, card=str, prove=lambda _: None
    )
    config, _ = begun(home, "llama", method={**LORA, "adapter": str(place)}, **changes)
    return config, base, held


def test_a_run_begins_with_an_adapter_and_its_head(tmp_path: Path) -> None:
    config, base, held = adapter_beside(tmp_path)
    found = find_adapter(config, build_network(load_architecture(config.model, base), config), base)
    assert found is not None
    weights = found.weights()
    assert weights.shapes().keys() == held.keys()
    assert all(torch.equal(weights.read(name, 0, len(tensor)), tensor) for name, tensor in held.items())


def test_a_head_is_drawn_beside_an_adapter_without_one_and_one_of_another_size_is_refused(tmp_path: Path) -> None:
    config, base, held = adapter_beside(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "score" not in name}, file)
    found = find_adapter(config, build_network(load_architecture(config.model, base), config), base)
    assert found is not None and held.keys() - found.key_of.keys() == {"lm_head.weight"}
    save_file({**tensors, "base_model.model.score.weight": torch.zeros(2, 32)}, file)
    with pytest.raises(ModelError, match=r"has a head of 2 output\(s\), and this one has 3: set model.head.outputs=2"):
        find_adapter(config, build_network(load_architecture(config.model, base), config), base)


def test_what_scores_is_not_talked_with(tmp_path: Path) -> None:
    base, network = scoring_base(tmp_path)
    cpu = torch.device("cpu")
    for refused in (lambda: describe_for_inference(base), lambda: load_for_inference(base, cpu)):
        with pytest.raises(ModelError, match="is a LlamaForSequenceClassification: it scores texts and predicts no"):
            refused()
    found, _ = load_for_inference(base, cpu, scores=True)
    assert torch.equal(ours(found), ours(network)), "and is measured by its scores"
    plain = save_checkpoint(tmp_path / "plain", "llama", tokenizer=True)
    with pytest.raises(ModelError, match="predicts tokens, and what is measured here is of scores"):
        load_for_inference(plain, cpu, scores=True)
    adapter_beside(tmp_path / "other")
    with pytest.raises(ModelError, match="an adapter with a head that scores texts"):
        load_for_inference(tmp_path / "other" / "adapter", cpu)


def test_a_pad_token_that_is_a_part_of_words_is_in_the_config_alone(tmp_path: Path) -> None:
    """transformers would split words at it, if the exported tokenizer named it as a special token."""
    head = {"type": "score", "labels": LABELS, "pad_token": "w5"}
    files = described(tmp_path, scoring_config(tmp_path, values_of("llama"), model={"head": head}))
    tokenizer = AutoTokenizer.from_pretrained(files)
    assert tokenizer.pad_token_id is None and json.loads((files / "config.json").read_text())["pad_token_id"] == 5
    assert tokenizer("w5 w55 w6").input_ids == [5, 55, 6]
    tokenizer.pad_token_id = 5  # as the card says
    assert tokenizer(["w55 w6", "w7"], padding=True).input_ids == [[55, 6], [7, 5]]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"labels": LABELS[::-1]}, r"the classes of .* are \['poor', 'fair', 'good'\].*set --model.head.labels to"),
        ({"labels": LABELS[:2]}, r"has a head of 3 output\(s\), and what is measured here is of 2: name a model with"),
        ({"labels": LABELS}, None),
        ({"outputs": 3}, None),
    ],
)
def test_what_scores_is_measured_on_rows_of_its_own_classes(
    tmp_path: Path, head: Mapping[str, Any], said: str | None
) -> None:
    base, _ = scoring_base(tmp_path)
    config = scoring_config(tmp_path, values_of("llama"), model={"head": {"type": "score", **head}})
    if said is None:
        assert StoredModel(path=base).described(config)[0].num_labels == 3
        return
    with pytest.raises(ModelError, match=said):
        StoredModel(path=base).described(config)


@pytest.mark.parametrize("adds", [False, True])
def test_a_text_ends_once_by_the_card_as_in_training(tmp_path: Path, adds: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "words"))
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A w2", special_tokens=[("w2", 2)])
    recipe = {"config": {"data": {"train": [{"format": {"type": "preference", "style": "plain"}}]}}}
    lines = [each for each in of_scores({}, recipe, adapter=False) if each.startswith(("end_token = ", "texts = "))]
    scope: dict[str, Any] = {"tokenizer": tokenizer, "prompt": "w30 ", "answer": "w31 "}
    exec("\n".join(lines), scope)
    assert tokenizer(scope["texts"]).input_ids == [[30, 31, 2]]


def test_mlflow_is_told_the_class_and_the_task(tmp_path: Path) -> None:
    base, _ = scoring_base(tmp_path)
    said = flavor_of(base, "model")
    assert said["pipeline_model_type"] == "LlamaForSequenceClassification" and said["task"] == "text-classification"
    method = {"method": LORA, "tracking": {"mlflow": {"register": "rewards"}}, "export": {"at_end": True}}
    config, _ = begun(tmp_path, "llama", **method)
    with pytest.raises(ConfigError, match="mlflow.transformers loads no adapter with a head"):
        check_trackers(config)


def test_a_card_names_classes_in_their_order_as_texts() -> None:
    """Whatever they are called, and however the file sorts them."""
    names = [f"c{number}" for number in range(12)]
    names[2:7] = ["<b>x</b>", "a | b", "`tick`", "two\nlines", "\x1b[31mred"]
    config = {"architectures": [CLASSES["llama"]], "pad_token_id": 7}
    config["id2label"] = dict(sorted((str(number), name) for number, name in enumerate(names)))
    lines = list(of_scores(config, {"config": {"train": {"objective": {"type": "classification"}}}}, adapter=False))
    table = [line for line in lines if re.match(r"\| \d", line)]
    assert [line.split(" | ")[0].strip("| ") for line in table] == [str(number) for number in range(12)]
    assert all(re.fullmatch(r"\| \d+ \| `[^`|\n\x1b]*` \|", line) for line in table), table
    assert table[1] == '| 1 | `"c1"` |' and table[11] == '| 11 | `"c11"` |'
    assert "# (texts, 12)" in "\n".join(lines) and "padding token (number 7)" in "\n".join(lines)
