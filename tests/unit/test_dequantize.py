"""Weights that are stored quantized: every code and scale, what is read for a row, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.cli.train import main
from raytune_fsdp.config import ModelConfig
from raytune_fsdp.demo import CONVERSATIONS
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.network import build_base, load_architecture, stored_network
from raytune_fsdp.model.weights.dequantize import DequantizedWeights, stored_weights
from raytune_fsdp.model.weights.keys import check_shapes, match_keys, matched_weights
from raytune_fsdp.model.weights.source import FileWeights, all_finite
from raytune_fsdp.run.resume import Resumed, check_same_run
from tests.models import add_tokenizer, save_checkpoint
from tests.quantized import MXFP4, quantized, save_fp8, save_mxfp4, spread, write

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def stored(directory: Path, quantization: dict[str, Any] | None = None, **tensors: torch.Tensor) -> DequantizedWeights:
    """These tensors in a file, under the names that they have there."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, directory / "model.safetensors")
    files = find_weights(directory)
    weights = stored_weights(files, {name: name for name in files.tensors()})
    assert isinstance(weights, DequantizedWeights)
    return weights


def test_every_code_with_every_scale_of_mxfp4(tmp_path: Path) -> None:
    """As transformers computes them, the smallest and the infinite ones too. The last scale stands for no number."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16).contiguous()
    weights = stored(tmp_path / "model", MXFP4, x_blocks=codes, x_scales=scales)
    assert weights.shapes() == {"x": (2, 512, 255)}
    expected = convert_moe_packed_tensors(codes, scales)
    assert expected.isinf().any() and (expected == 2.0**-127).any()
    found = weights.read("x", 0, 2)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(weights.read("x", 1, 2).view(torch.int16), expected[1:].view(torch.int16))
    assert weights.read("x", 1, 1).shape == (0, 512, 255) and weights.read("x", 0, 0).dtype == torch.bfloat16


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_every_code_of_fp8_and_every_row(tmp_path: Path, scales: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    numbers = codes.repeat(37).view(37, 256)[:, :250].contiguous().view(torch.float8_e4m3fn)
    several = (torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) + 0.3).to(scales)
    weights = stored(tmp_path / "model", FP8, **{"x.weight": numbers, "x.weight_scale_inv": several})
    expected = (numbers.float() * spread(several.float(), (37, 250), (16, 16))).bfloat16()
    for start in range(38):
        for stop in {start, min(37, start + 1), min(37, start + 17), 37} - set(range(start)):
            assert torch.equal(weights.read("x.weight", start, stop), expected[start:stop]), (start, stop)


def test_a_block_that_is_larger_than_any_matrix(tmp_path: Path) -> None:
    numbers = torch.arange(64, dtype=torch.uint8).view(4, 16).view(torch.float8_e4m3fn)
    parts = {"x.weight": numbers, "x.weight_scale_inv": torch.full((1, 1), 0.3)}
    weights = stored(tmp_path / "model", {**FP8, "weight_block_size": [10**18, 10**18]}, **parts)
    assert torch.equal(weights.read("x.weight", 1, 4), (numbers[1:].float() * 0.3).bfloat16())


def test_experts_in_one_tensor_and_one_scale_for_a_matrix(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    numbers = torch.randn(3, 20, 40, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3, generator=draw)
    expected = torch.stack([n.float() * spread(s, (20, 40), (16, 16)) for n, s in zip(numbers, scales, strict=True)])
    weights = stored(tmp_path / "blocks", FP8, experts=numbers, experts_scale_inv=scales)
    assert torch.equal(weights.read("experts", 1, 3), expected[1:].bfloat16())
    one = {**FP8, "weight_block_size": None}
    each = scales[:, :1, :1].contiguous()
    weights = stored(tmp_path / "each", one, experts=numbers, experts_scale_inv=each)
    assert torch.equal(weights.read("experts", 1, 3), (numbers.float() * each)[1:].bfloat16())
    for name, shape in {"none": (), "one": (1,), "matrix": (1, 1)}.items():
        scale, of_input = torch.full(shape, 0.3), torch.tensor(0.1)
        parts = {"x.weight": numbers[0], "x.weight_scale_inv": scale, "x.activation_scale": of_input}
        weights = stored(tmp_path / name, one, **parts)
        assert weights.shapes() == {"x.weight": (20, 40)}
        assert torch.equal(weights.read("x.weight", 3, 9), (numbers[0, 3:9].float() * 0.3).bfloat16())


def test_no_more_is_read_than_a_rank_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, scales = quantized(torch.randn(300, 256), (16, 16))
    weights = stored(tmp_path / "fp8", FP8, **{"x.weight": numbers, "x.weight_scale_inv": scales})
    experts = stored(
        tmp_path / "mxfp4", MXFP4, x_blocks=torch.zeros(8, 64, 2, 16).byte(), x_scales=torch.zeros(8, 64, 2).byte()
    )
    weights.shapes(), experts.shapes()
    read = FileWeights.read
    asked: list[tuple[int, int]] = []

    def spy(self: FileWeights, name: str, start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return read(self, name, start, stop)

    monkeypatch.setattr(FileWeights, "read", spy)
    weights.read("x.weight", 30, 50)
    experts.read("x", 3, 5)
    assert asked == [(30, 50), (1, 4), (3, 5), (3, 5)]


def _network(directory: Path) -> Any:
    config = ModelConfig(path=str(directory))
    return build_base(load_architecture(config, directory), config, "fp32")


def test_a_network_forgets_how_its_weights_were_stored(tmp_path: Path) -> None:
    directory = save_mxfp4(tmp_path / "model")
    assert hasattr(AutoConfig.from_pretrained(directory), "quantization_config")
    network, files = _network(directory), find_weights(directory)
    other = stored_network(directory)
    assert other is not None
    for each in (network.config, other.config):
        assert "quantization_config" not in each.to_dict()
    weights = matched_weights(files, match_keys(network, files), network)
    check_shapes(network, weights)
    assert {name: tuple(t.shape) for name, t in network.state_dict().items()} == dict(weights.shapes())


Broken = Callable[..., str]


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    """The error of a model some of whose tensors are others; None: that one is missing."""
    made: dict[str, Path] = {}

    def run(kind: str, changes: dict[str, torch.Tensor | None]) -> str:
        if kind not in made:
            place = tmp_path / kind
            made[kind] = save_mxfp4(place) if kind == "mxfp4" else save_fp8(place, "llama", (16, 16))
        directory = made[kind]
        quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
        tensors = {k: t for name in find_weights(directory).sizes() for k, t in load_file(directory / name).items()}
        assert changes.keys() & tensors.keys()
        write(directory, {k: t for k, t in {**tensors, **changes}.items() if t is not None}, quantization)
        files, network = find_weights(directory), _network(directory)
        try:
            with pytest.raises(ModelError) as failure:
                check_shapes(network, matched_weights(files, match_keys(network, files), network))
        finally:
            write(directory, tensors, quantization)
        return str(failure.value)

    return run


EXPERTS = "model.layers.1.mlp.experts.down_proj"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def test_parts_that_do_not_fit_each_other(broken: Broken) -> None:
    """Named with their file, before anything is started."""
    byte, fp8 = torch.uint8, torch.float8_e4m3fn
    for kind, key, value, expected in (
        ("mxfp4", f"{EXPERTS}_scales", None, f"{EXPERTS}_blocks in "),
        ("mxfp4", f"{EXPERTS}_scales", None, f"of no use without {EXPERTS}_scales, which is missing"),
        ("mxfp4", f"{EXPERTS}_blocks", None, f"of no use without {EXPERTS}_blocks, which is missing"),
        ("mxfp4", f"{EXPERTS}_scales", torch.zeros(4, 32, 3, dtype=byte), "is [4, 32, 3], and must be [4, 32, 2]"),
        ("mxfp4", f"{EXPERTS}_scales", torch.zeros(4, 32, 2), "is float32, and must be uint8 for"),
        ("mxfp4", f"{EXPERTS}_blocks", torch.zeros(4, 32, 2, 8, dtype=byte), "is [4, 32, 2, 8], and must be [..., 16]"),
        ("mxfp4", f"{EXPERTS}_blocks", torch.zeros(4, 32, 2, 16), "is float32, and must be uint8"),
        ("fp8", f"{WEIGHT}_scale_inv", None, f"{WEIGHT} in "),
        ("fp8", f"{WEIGHT}_scale_inv", None, "is float8_e4m3fn and has no scales"),
        ("fp8", WEIGHT, None, f"{WEIGHT}_scale_inv in "),
        ("fp8", WEIGHT, None, f"of no use without {WEIGHT}, which is missing"),
        ("fp8", f"{WEIGHT}_scale_inv", torch.ones(2, 4), f"be [4, 2] (groups of [16, 16]) for {WEIGHT}"),
        ("fp8", f"{WEIGHT}_scale_inv", torch.ones(()), "is [], and must be [4, 2]"),
        ("fp8", f"{WEIGHT}_scale_inv", torch.ones(4, 2).byte(), "is uint8, and must be float32"),
        ("fp8", WEIGHT, torch.ones(64, 32), "is float32, and must be float8_e4m3fn"),
        ("fp8", WEIGHT, torch.ones(64).to(fp8), "is [64], and must be a matrix"),
        ("fp8", WEIGHT, torch.ones(48, 32).to(fp8), "is [4, 2], and must be [3, 2]"),
    ):  # fmt: skip
        message = broken(kind, {key: value})
        assert expected in message and "safetensors" in message and message.count("\n") == 0, message


def test_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    numbers, scales = quantized(torch.randn(32, 32), (16, 16))
    parts = {"x.weight": numbers, "x.weight_scale_inv": scales}
    for index, value in enumerate((torch.nan, torch.inf)):
        bad = scales.clone()
        bad[1, 1] = value
        weights = stored(tmp_path / f"fp8-{index}", FP8, **{**parts, "x.weight_scale_inv": bad})
        assert not all_finite(weights.read("x.weight", 16, 32)) and all_finite(weights.read("x.weight", 0, 16))
        assert weights.where("x.weight").startswith("x.weight_scale_inv in ")
    numbers = numbers.clone()
    numbers.view(torch.uint8)[3, 3] = 127
    weights = stored(tmp_path / "numbers", FP8, **{**parts, "x.weight": numbers})
    assert not all_finite(weights.read("x.weight", 0, 16)) and weights.where("x.weight").startswith("x.weight in ")
    zeros = torch.zeros(1, 8, 1, 16).byte()  # of which a scale that is no number makes NaN, not infinity
    weights = stored(tmp_path / "mxfp4", MXFP4, x_blocks=zeros, x_scales=torch.full((1, 8, 1), 255).byte())
    assert not all_finite(weights.read("x", 0, 1)) and weights.where("x").startswith("x_scales in ")


def test_a_run_refuses_them_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_fp8(tmp_path / "model", "llama", (16, 16), vocab_size=1024)
    add_tokenizer(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [32, 16]
    (directory / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    flags = {"model.path": directory, "data.train.0.path": CONVERSATIONS, "data.seq_len": 64, "train.max_steps": 1}
    flags |= {"run.name": "run", "run.storage": tmp_path / "runs", "cluster.launch": "local", "train.global_batch": 1}
    assert main([word for key, value in flags.items() for word in (f"--{key}", str(value))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "weight_scale_inv in" in line and "must be [1, 4] (groups of [32, 16])" in line
    assert not (tmp_path / "runs").exists()


def test_weights_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has them in two formats, of which one is not read."""
    from raytune_fsdp.model.directory import files

    there = ["config.json", "model-00000-of-00002.safetensors", "original/model.safetensors", "original/dtypes.json"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": there[1]}}))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(files, "ask_hub", lambda name, revision: files.HubAnswer())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: asked.append(how) or str(tmp_path))
    files.locate("openai/gpt-oss-20b", None, field="model.path", weights=True)
    kinds = ("allow_patterns", "ignore_patterns")
    fetched = [list(filter_repo_objects(there, **{key: each.get(key) for key in kinds})) for each in asked]
    assert fetched == [there[:1], there[1:2]], "the small files, then what the index names"


def test_weights_that_are_not_quantized_are_read_as_before(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "model", "llama")
    files = find_weights(directory)
    assert files.quantization is None
    assert isinstance(stored_weights(files, {key: key for key in files.tensors()}), FileWeights)


def test_a_run_whose_config_said_quantized_goes_on() -> None:
    """Weights that were drawn at random: earlier versions kept what their config said, which meant nothing."""
    found = Resumed(
        checkpoint=CommittedCheckpoint(step=1, attempt=1, root="runs/checkpoints"),
        state=RunState(identity={"model.hidden_size": 8, "model.quantization_config": {"quant_method": "mxfp4"}}),
        damaged={},
    )
    check_same_run(found, {"model.hidden_size": 8}, {})
