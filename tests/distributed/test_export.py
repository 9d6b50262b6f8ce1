"""An exported model is what was trained: from_pretrained loads every bit of it, from files as the format wants them."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import ModelCard, load_torch_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from raytune_fsdp.base.errors import ModelError, TransientError
from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.attention.choose import without_borders
from raytune_fsdp.model.directory.tensorfile import TensorFile
from raytune_fsdp.model.export.write import export
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import train
from raytune_fsdp.run.publish import publish
from tests.loading import CPU, assert_same, gathered
from tests.models import PARTICULAR, TIED, UNUSUAL, architecture, build, save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import make_config, prepare_on_rank0, write_tokenizer

NAMES = ("llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")
TYPES = {"trained": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ALONE = ("gemma4_text", "zamba2")
"""Of the unusual: layers that share what they have, and blocks that share weights."""
ONE_NETWORK = pytest.mark.parametrize("trained", ["llama"], indirect=True)
"""Where what is exported makes no difference."""
SMALL = 20_000
"""Bytes of a file: the embedding alone is larger, most files hold several tensors."""


def _train(values: Mapping[str, Any], reference: Path) -> None:
    """Train to the end on this rank; rank 0 writes the gathered weights and logits."""
    config = FinetuneConfig.model_validate(values)
    parts = assemble(config, *prepare_on_rank0(config), CPU)
    train(parts, stop=lambda: None)
    weights = gathered(parts.model)
    with torch.no_grad(), without_borders(parts.model, parts.generates_with):
        logits = parts.model.eval()(input_ids=_tokens(), use_cache=False).logits
    if dist.get_rank() == 0:
        save_file({**{name: t.clone() for name, t in weights.items()}, "logits": logits}, reference)


def _tokens() -> torch.Tensor:
    return torch.arange(20).view(1, 20) * 3 % 64


def run(home: Path, model: Mapping[str, Any]) -> Path:
    """A run of one step on two ranks: its directory, with what was trained beside it in `reference.safetensors`."""
    config = make_config(
        home,
        model={"tokenizer": None, "architecture": None, **model},
        parallel={"precision": "fp32"},
        train={"global_batch": 4, "max_steps": 1},
    )
    resident_ranks(_train, 2, config.model_dump(), home / "reference.safetensors")
    return home / "runs" / "run"


@pytest.fixture(
    scope="module",
    # Its head is tied as those of the next two are.
    params=[pytest.param(name, marks=pytest.mark.slow if name == "qwen3" else ()) for name in NAMES],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of each architecture, from random weights."""
    home = tmp_path_factory.mktemp(request.param)
    tokenizer = write_tokenizer(home / "words")
    inline = architecture(request.param, vocab_size=67)
    return request.param, run(home, {"init": "random", "architecture": inline, "tokenizer": str(tokenizer)})


def reference(directory: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors = load_file(directory.parents[1] / "reference.safetensors")
    return tensors, tensors.pop("logits")


@pytest.mark.parametrize(
    # What is particular to an architecture is exported in fp16, too, below.
    "dtype",
    [pytest.param(dtype, marks=pytest.mark.slow if dtype == "fp16" else ()) for dtype in TYPES],
)
def test_from_pretrained_loads_what_was_trained(trained: tuple[str, Path], tmp_path: Path, dtype: str) -> None:
    name, directory = trained
    publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype=dtype, max_file_bytes=SMALL))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    weights, logits = reference(directory)
    found = model.state_dict()
    assert found.keys() == weights.keys()
    for key, tensor in weights.items():
        assert found[key].dtype == TYPES[dtype] and torch.equal(found[key], tensor.to(TYPES[dtype])), key
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name in TIED)
    if dtype == "trained":
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=_tokens(), use_cache=False).logits, logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert len(tokenizer) == 64 and tokenizer.convert_tokens_to_ids("w63") == 63


def test_files_and_index_are_as_the_format_wants_them(trained: tuple[str, Path], tmp_path: Path) -> None:
    name, directory = trained
    publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype="bf16", max_file_bytes=SMALL))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("export/*.safetensors"))
    count = len(files)
    assert count > 2
    assert [file.name for file in files] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    held: dict[str, str] = {}
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = {key: opened.get_tensor(key).nbytes for key in opened.keys()}  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes.values()) <= SMALL
        assert not held.keys() & sizes.keys(), "a key is in two files"
        held.update(dict.fromkeys(sizes, file.name))
        total += sum(sizes.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": held}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs:
        assert held.keys() == set(theirs.keys()), "the keys are those of save_pretrained"
        found = {key: load_file(tmp_path / "export" / file)[key] for key, file in held.items()}
        assert all(torch.equal(found[key], theirs.get_tensor(key)) for key in held)
    split = {key for key in held if ".experts." in key}
    assert bool(split) == (name in ("mixtral", "qwen3_moe"))
    load_torch_model(model, tmp_path / "export", strict=name not in (*TIED, "mixtral", "qwen3_moe"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_config_says_what_the_files_hold(trained: tuple[str, Path], tmp_path: Path) -> None:
    name, directory = trained
    for dtype in ("bf16", "fp32"):
        publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype=dtype, max_file_bytes=10**9))
        assert [file.name for file in tmp_path.glob("export/*.safetensors*")] == ["model.safetensors"]
        config = json.loads((tmp_path / "export" / "config.json").read_text())
        assert config["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        assert config["model_type"] == name and config["vocab_size"] == 67
        assert config["architectures"] == [CLASSES[name]]
        assert config.get("use_cache", True), "whoever generates from it wants the cache"


class Broken(Exception):
    pass


@ONE_NETWORK
def test_an_export_is_whole_or_not_there(
    trained: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = trained
    checkpoint, destination = find_checkpoint(directory), tmp_path / "export"

    def export() -> None:
        publish(checkpoint, destination, ExportConfig(dtype="bf16", max_file_bytes=SMALL))

    close = TensorFile.close

    def close_one(file: TensorFile) -> None:
        monkeypatch.setattr(TensorFile, "close", fail)
        close(file)

    def fail(file: TensorFile) -> None:
        raise Broken

    monkeypatch.setattr(TensorFile, "close", close_one)
    with pytest.raises(Broken):
        export()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(TensorFile, "close", close)
    export()
    before = {file.name: file.read_bytes() for file in destination.iterdir()}
    monkeypatch.setattr(TensorFile, "close", close_one)
    with pytest.raises(Broken):
        export()
    assert {file.name: file.read_bytes() for file in destination.iterdir()} == before, "the old one is whole"
    monkeypatch.setattr(TensorFile, "close", close)
    publish(checkpoint, destination, ExportConfig(dtype="bf16", max_file_bytes=10**9))
    assert [file.name for file in destination.glob("*.safetensors*")] == ["model.safetensors"], "replaced, not mixed"
    export()
    assert {file.name: file.read_bytes() for file in destination.iterdir()} == before


@ONE_NETWORK
def test_what_was_written_is_read_again(
    trained: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that is lost on the way to the disk is noticed, and nothing is exported."""
    _, directory = trained

    close = TensorFile.close

    def lossy(file: TensorFile) -> None:
        close(file)
        content = bytearray(file._path.read_bytes())
        content[-1] ^= 1
        file._path.write_bytes(content)

    monkeypatch.setattr(TensorFile, "close", lossy)
    with pytest.raises(TransientError, match=r"does not read back as it was written \("):
        publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype="bf16", max_file_bytes=SMALL))
    assert not (tmp_path / "export").exists()


@ONE_NETWORK
def test_only_a_model_is_replaced(trained: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = trained
    checkpoint = find_checkpoint(directory)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("three years of work")
    monkeypatch.chdir(tmp_path / "thesis")
    for destination in (Path("."), tmp_path / "thesis", tmp_path / "thesis" / "chapter.tex"):
        with pytest.raises(ModelError, match="is not replaced, as .*: export to another path, or move it away"):
            publish(checkpoint, destination, ExportConfig(dtype="bf16", max_file_bytes=SMALL))
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    (tmp_path / "empty").mkdir()
    publish(checkpoint, tmp_path / "empty", ExportConfig(dtype="bf16", max_file_bytes=10**9))
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_model_keeps_its_makers_way_to_generate(tmp_path: Path) -> None:
    """End tokens and sampling of a chat model, also where transformers would not write them down itself."""
    model = save_checkpoint(tmp_path / "model", "llama")
    write_tokenizer(model)
    generation = {
        "eos_token_id": [2, 5],
        "top_p": 0.6,
        "do_sample": False,
    }  # as Llama 2's, which save_pretrained refuses
    (model / "generation_config.json").write_text(json.dumps(generation))
    # Of what ends a turn its makers say nothing: servers would not stop there.
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} w0 {% endfor %}")
    directory = run(tmp_path, {"path": str(model), "init": "pretrained"})
    publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype="bf16", max_file_bytes=SMALL))
    found = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (found.eos_token_id, found.top_p) == ([2, 5, 0], 0.6)


@ONE_NETWORK
def test_the_card_says_what_it_is(trained: tuple[str, Path], tmp_path: Path) -> None:
    """Also without what lies beside a checkpoint: its metrics, and a recipe, which older versions did not write."""
    _, directory = trained
    publish(find_checkpoint(directory), tmp_path / "export", ExportConfig(dtype="bf16"))
    card = ModelCard.load(tmp_path / "export" / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.base_model is None and card.data.datasets is None, "nothing of it is on the hub"
    text = str(card)
    loss = read_trajectory(directory / "metrics.jsonl")[-1]["loss"]
    for part in (
        "# run",
        "`LlamaForCausalLM`",
        "random weights",
        "step 1,",
        f"{loss:.4f}",
        "tokens.jsonl",
        "lr: 0.003",
    ):
        assert part in text, part
    assert str(directory.parents[1]) not in text and "/tmp" not in text, "paths of this machine help nobody"
    assert not (tmp_path / "export" / "recipe.json").exists()
    torn = tmp_path / "runs" / "torn"
    shutil.copytree(directory, torn)
    (torn / "model" / "recipe.json").write_text("{")
    (torn / "metrics.jsonl").write_text('{"kind": "other"}\n')
    publish(find_checkpoint(torn), tmp_path / "export", ExportConfig(dtype="bf16"))
    assert "fine-tuned with raytune_fsdp" in (tmp_path / "export" / "README.md").read_text()
    bare = tmp_path / "runs" / "bare"
    shutil.copytree(directory / "checkpoints", bare / "checkpoints")
    shutil.copytree(directory / "model", bare / "model", ignore=shutil.ignore_patterns("recipe.json"))
    publish(find_checkpoint(bare), tmp_path / "export", ExportConfig(dtype="bf16"))
    assert "`LlamaForCausalLM`" in (tmp_path / "export" / "README.md").read_text()


@ONE_NETWORK
def test_an_export_stays_out_of_the_run(trained: tuple[str, Path], tmp_path: Path) -> None:
    _, directory = trained
    checkpoint = find_checkpoint(directory)
    before = sorted(path.name for path in (directory / "model").iterdir())
    (tmp_path / "link").symlink_to(directory / "model")
    for destination in (directory / "model", directory / "model" / "out", tmp_path / "link"):
        with pytest.raises(ModelError, match="which the run needs: export elsewhere"):
            publish(checkpoint, destination, ExportConfig())
    assert sorted(path.name for path in (directory / "model").iterdir()) == before
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "dangling").symlink_to(elsewhere)
    left = tmp_path / f".elsewhere.export-{socket.gethostname()}-99999999-abcdef"
    left.mkdir()
    publish(checkpoint, tmp_path / "dangling", ExportConfig())
    publish(checkpoint, tmp_path / "dangling", ExportConfig())
    assert (elsewhere / "model.safetensors").is_file() and (tmp_path / "dangling").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "elsewhere", "link"]
    with pytest.raises(TransientError, match="could not be written: .*; make room or choose another place"):
        publish(checkpoint, Path("/proc/export"), ExportConfig())


class Tensors(dict[str, torch.Tensor]):
    """What an export reads from, in memory."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self[name] for name in names}


@pytest.mark.parametrize(
    # The others have nothing that the exports of runs above, or these, do not have.
    "name",
    [*PARTICULAR, *(pytest.param(name, marks=() if name in ALONE else pytest.mark.slow) for name in UNUSUAL)],
)
def test_what_architectures_are_particular_about(tmp_path: Path, name: str) -> None:
    """Tensors that stay in fp32 (the first three), and a config with infinity in it (granitemoehybrid)."""
    model = build(name)
    model.save_pretrained(tmp_path / "model")
    state = Tensors({n: t.detach() for n, t in owned_tensors(model).items()})
    for dtype in (torch.bfloat16, torch.float16):
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        export(state, tmp_path / "model", tmp_path / short, dtype=short, max_file_bytes=SMALL)
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).save_pretrained(tmp_path / "theirs")
        theirs = load_file(tmp_path / "theirs" / "model.safetensors")
        found = {k: t for file in (tmp_path / short).glob("*.safetensors") for k, t in load_file(file).items()}
        assert_same(found, theirs, f"{name} {short}")
    assert (
        {t.dtype for t in found.values()} == {torch.float16, torch.float32}
        or name == "granitemoehybrid"
        or name in UNUSUAL
    )


def test_numbers_that_are_too_large_for_fp16(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    state = Tensors({n: t.detach() * 1e6 for n, t in owned_tensors(model).items()})
    with pytest.raises(ModelError, match="too large for fp16: export as bf16 or fp32"):
        export(state, tmp_path / "model", tmp_path / "out", dtype="fp16", max_file_bytes=SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
