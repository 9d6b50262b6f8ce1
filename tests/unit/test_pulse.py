"""What counts as getting on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.callback import callback_handler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from raytune_fsdp.base.beat import pulse
from raytune_fsdp.checkpoint import manifest
from raytune_fsdp.checkpoint.storage import PosixStorage
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.compile_layers import Compiler, settings_restored
from raytune_fsdp.model.fill import fill
from raytune_fsdp.model.network import build_network
from raytune_fsdp.model.weights.source import RandomWeights
from raytune_fsdp.run.evaluation.answers import answers
from tests.runs import GPT2, make_config, write_tokenizer


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # inductor takes 40 s
    with settings_restored():
        yield Compiler()
    torch._dynamo.reset()


def test_a_compilation_is_said_to_run(compiler: Compiler) -> None:
    """It is one long call, which cannot beat: of each function, and of each kind of shapes."""
    seen: list[int] = []
    callback_handler.register_start_callback(lambda _: seen.append(pulse().computing))
    double = compiler.compiled(lambda weight: weight * 2)
    double(torch.ones(3))
    assert seen == [1] and pulse().computing == 0
    double(torch.ones(3))
    assert seen == [1]
    double(torch.ones(4, 5))
    assert seen == [1, 1] and pulse().computing == 0


def test_nothing_of_it_is_left_to_the_process() -> None:
    with settings_restored():
        Compiler()
        Compiler()
    assert not callback_handler.start_callbacks and not callback_handler.end_callbacks


@pytest.mark.parametrize("mode", ["sharded", "rank0"])
def test_every_tensor_of_a_model_that_is_filled(tmp_path: Path, mode: str) -> None:
    config = make_config(tmp_path)
    with alone(torch.device("cpu")):
        network = build_network(AutoConfig.for_model(**GPT2), config)
        weights = RandomWeights(build_network(AutoConfig.for_model(**GPT2), config), 7)
        before = pulse().beats
        fill(network, weights, mode, torch.device("cpu"))  # type: ignore[arg-type]
    assert pulse().beats >= before + len(list(network.parameters()))


def test_every_piece_of_a_checkpoint_that_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_CHUNK_BYTES", 100)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "file").write_bytes(bytes(1000))
    before = pulse().beats
    manifest.hash_file(PosixStorage(tmp_path), "step", "file", 1000)
    assert pulse().beats == before + 10


def test_every_token_of_an_answer(tmp_path: Path) -> None:
    """Many long answers take longer than a run may be silent."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**GPT2, "eos_token_id": None}))
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    tokenizer.eos_token = None
    before = pulse().beats
    answers(model, tokenizer, ["w5 w6"] * 2, max_new_tokens=7, device=torch.device("cpu"), attention="sdpa")
    assert pulse().beats == before + 14
    model(torch.tensor([[5]]))
    assert pulse().beats == before + 14, "other passes are none of its business"
