"""Every recipe that is shipped parses, and the founding one says what its document says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config, recipes
from raytune_fsdp.config.sections.method import AdapterMethod, QloraMethod
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.tune.spec import SweepSpec

RECIPES = sorted((Path(__file__).resolve().parents[2] / "jobs" / "recipes").glob("*.yaml"))
assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe: Path) -> None:
    assert load_config(recipe, []).run.name


def test_a_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(recipes().values()) == RECIPES
    monkeypatch.chdir(tmp_path)
    assert load_config("llama3-8b-full-8xa100").run.name == "llama3-8b-full"
    with pytest.raises(ConfigError, match=r"llama3: no such file .*, and no recipe \(`raytune-fsdp recipes` lists"):
        load_config("llama3")
    (tmp_path / "demo").write_text("run: {nme: mine}")
    with pytest.raises(ConfigError, match="nme"):  # a file comes first
        load_config("demo")


HARDWARE = re.compile(
    r"^# Hardware: (?:any machine|(?P<gpus>\d+) x (?P<kind>[AH][12]00) (?P<memory>\d+) GB on (?P<nodes>\d+) nodes?)\. "
    r"Weights: (?P<weights>[\d.]+) billion(?:, (?P<trained>[\d.]+) trained)?(?:, (?P<few>[\d.]+) of 4 bits)?\.$",
    re.MULTILINE,
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_plans_on_the_hardware_it_names_and_fits_there(recipe: Path) -> None:
    config = load_config(recipe, [])
    (stated,) = HARDWARE.finditer(recipe.read_text())
    world = int(stated["gpus"] or 2)
    census = Census(seq_len=config.data.seq_len, epochs=(100_000,))
    plan = resolve(config, world, census)
    assert plan.layout.world == world
    assert plan.division.fillers == 0, "a shipped recipe wastes nothing"
    if stated["gpus"]:
        assert world == 1 or world == 8 * int(stated["nodes"])
        # Weights, gradients and moments in fp32; frozen weights in bf16, or quantized. What is left has to be enough
        # for a gathered block and activations.
        weights, few = float(stated["weights"]), float(stated["few"] or 0)
        trained = float(stated["trained"] or weights)
        assert isinstance(config.method, AdapterMethod) == (stated["trained"] is not None)
        assert isinstance(config.method, QloraMethod) == (stated["few"] is not None)
        states = (16e9 * trained + 2e9 * (weights - trained - few) + 0.52e9 * few) / (
            plan.layout.shard_size * plan.layout.tensor
        )
        assert states < 0.85 * int(stated["memory"]) * 2**30
        assert world == 1 or plan.layout.shard_size * plan.layout.tensor % 8 == 0, "copies of the model are whole nodes"


@pytest.mark.slow
def test_the_70b_of_4_bits_is_as_large_as_its_recipe_says() -> None:
    """By the shapes of the network, with every layer."""
    pytest.importorskip("peft")
    from transformers import LlamaConfig

    from raytune_fsdp.model.network import build_network
    from raytune_fsdp.model.precision.quantized import QuantizedLayer, quantize_layers
    from raytune_fsdp.step.precision import store_frozen

    config = load_config("llama3-70b-qlora")
    assert isinstance(config.method, QloraMethod)
    architecture = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    network = build_network(architecture, config)
    whole = sum(parameter.numel() for parameter in network.parameters() if not parameter.requires_grad)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    quantize_layers(network, config.method.quantization)
    store_frozen(network, config.parallel.precision)
    layers = [module for module in network.modules() if isinstance(module, QuantizedLayer)]
    few, packed = sum(m.packed.shape[0] * m.numbers for m in layers), sum(m.packed.numel() for m in layers)
    frozen = sum(p.numel() * p.element_size() for p in network.parameters() if not p.requires_grad)
    text = recipes()["llama3-70b-qlora"].read_text()
    assert f"Weights: {whole / 1e9:.1f} billion, {trained / 1e9:.3f} trained, {few / 1e9:.1f} of 4 bits." in text
    about = " ".join(line.removeprefix("# ") for line in text.splitlines()[2:5])
    assert f"layers take {packed / 1e9:.0f} GB ({packed / few:.2f} bytes a number)" in about
    assert f"embeddings and head {(frozen - packed) / 1e9:.0f} GB in bf16" in about
    assert f"{16 * trained / 1e9:.0f} GB: {(frozen + 16 * trained) / 8e9:.1f} GB of each GPU" in about
    assert f"{12 * trained / 1e9:.1f} GB each" in text


def test_the_hybrid_is_as_large_as_its_recipe_says() -> None:
    """The sizes of a Qwen3.5 9B are transformers' own for its architecture."""
    pytest.importorskip("peft")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    from raytune_fsdp.model.network import build_network, count_parameters

    network = build_network(Qwen3_5TextConfig(tie_word_embeddings=False), load_config("qwen3.5-9b-lora"))
    numbers = count_parameters(network)
    text = recipes()["qwen3.5-9b-lora"].read_text()
    assert f"Weights: {numbers.total / 1e9:.1f} billion, {numbers.trainable / 1e9:.3f} trained." in text
    kinds = network.config.layer_types
    assert kinds.count("linear_attention") / len(kinds) == 3 / 4 and "Three of four layers are delta rules" in text


# The options of the launch command in Hugging Face's article on fine-tuning Llama 2 70B with FSDP.
FOUNDING = {
    "model_name": "meta-llama/Llama-2-70b-chat-hf",
    "max_seq_len": 2048,
    "max_steps": 500,
    "logging_steps": 25,
    "eval_steps": 100,
    "save_steps": 250,
    "bf16": True,
    "packing": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataset_text_field": "content",
    "use_gradient_checkpointing": True,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "warmup_ratio": 0.03,
    "use_flash_attn": True,
}


def test_the_founding_recipe_has_its_document_s_values() -> None:
    config = load_config("llama2-70b-full-16xa100")
    plan = resolve(config, 16)
    texts = {getattr(dataset.format, "text", None) for dataset in (*config.data.train, *config.data.eval)}
    ours = {
        "model_name": config.model.path,
        "max_seq_len": config.data.seq_len,
        "max_steps": plan.steps,
        "logging_steps": plan.log_every,
        "eval_steps": plan.eval_every,
        "save_steps": plan.save_every,
        "bf16": config.parallel.precision == "bf16",
        "packing": config.data.packing != "none",
        "per_device_train_batch_size": plan.division.micro_batch,
        "gradient_accumulation_steps": plan.division.full_rounds,
        "dataset_text_field": ", ".join(map(str, texts)),
        "use_gradient_checkpointing": config.parallel.activation_checkpointing == "full",
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": config.optim.schedule.type,
        "weight_decay": config.optim.weight_decay,
        "warmup_ratio": config.optim.warmup_ratio,
        "use_flash_attn": config.model.attention.startswith("flash_attention"),
    }
    assert len(FOUNDING) == 17 and ours == FOUNDING
    # Its floor must be what a plain cosine ends with, and it is spread as there.
    assert (config.optim.schedule.model_dump()["floor"], config.parallel.strategy) == (0.0, "full_shard")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["recipes", *arguments]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown(capsys, "list").splitlines()
    assert [line.split()[0] for line in listed] == ["recipe", *(path.stem for path in RECIPES)]
    about = "  The demo: a tiny Llama learns 181 conversations about training large models, on this machine, in about a"
    assert any(line.startswith("demo ") and line.endswith(f"{about} minute") for line in listed)
    begins = [listed[0].index(head) for head in ("columns", "what it is")]
    columns = {line.split()[0]: line[begins[0] : begins[1]].strip() for line in listed}
    assert columns["llama2-70b-full-16xa100"] == "content"
    assert columns["falcon-180b-lora"] == "instruction, response"
    assert columns["mixture"] == "messages | instruction, output | text"
    assert all(line[begins[1] - 1] == " " != line[begins[1]] for line in listed), "names of any length"
    assert shown(capsys).splitlines() == listed
    assert shown(capsys, "show", "llama3-8b-full-8xa100") == recipes()["llama3-8b-full-8xa100"].read_text()


def test_a_copied_recipe_works_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's files are in the package, wherever that is; of the others it is said what to set."""
    monkeypatch.chdir(tmp_path)
    assert shown(capsys, "copy", "demo") == "copied to demo.yaml\nthen: raytune-fsdp train --config demo.yaml\n"
    for config in (load_config("demo.yaml"), load_config("demo")):
        places = [config.model.tokenizer, *(dataset.path for dataset in (*config.data.train, *config.data.eval))]
        assert all(place is not None and Path(place).is_absolute() and Path(place).exists() for place in places)
    said = shown(capsys, "copy", "llama2-70b-full-16xa100", str(tmp_path)).splitlines()
    assert said[1:4] == [
        "set what is yours:",
        "  data.train.0.path: data/train.jsonl is not here (rows with content)",
        "  data.eval.0.path: data/eval.jsonl is not here (rows with content)",
    ]
    assert (tmp_path / "llama2-70b-full-16xa100.yaml").read_text() == recipes()["llama2-70b-full-16xa100"].read_text()


def test_mistakes_with_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text("mine")
    for arguments, expected in (
        (["copy", "demo"], "demo.yaml exists already; name another file, or remove it"),
        (["copy", "demo", "no/where.yaml"], "no/where.yaml cannot be written: No such file or directory"),
        (["show"], "show needs the name of a recipe; `raytune-fsdp recipes` lists them"),
        (["show", "mixtur"], "unknown recipe mixtur; nearest: mixture; `raytune-fsdp recipes` lists"),
        (["list", "demo"], "unexpected argument demo"),
        (["show", "demo", "x"], "unexpected argument x; only copy takes a destination"),
        (["sho"], "unknown recipes sho; nearest: show; there are list, show, copy"),
    ):
        said = shown(capsys, *arguments, code=2)
        assert said.startswith(f"error: {expected}") and said.count("\n") == 1, said
    assert (tmp_path / "demo.yaml").read_text() == "mine"


def test_the_schema_is_pydantic_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == FinetuneConfig.model_json_schema()
    assert main(["schema", "--sweep"]) == 0
    assert json.loads(capsys.readouterr().out) == SweepSpec.model_json_schema()
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "--scheduler.grace  integer >= 0  (default: 0)" in capsys.readouterr().out
