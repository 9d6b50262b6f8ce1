"""Where a model for inference goes: on the device, or on several if it is too large for one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.model_files import place
from tests.models import ARCHITECTURES

GPU = torch.device("cuda", 0)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of two blocks on a machine whose GPUs have room for half of it."""
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **ARCHITECTURES["llama"]))
    needed = sum(tensor.nbytes for tensor in (*made.parameters(), *made.buffers()))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (needed // 2, needed))
    return made


def test_on_a_cpu_it_stays_whole(model: Any) -> None:
    assert place(model, torch.device("cpu")) is model and not hasattr(model, "hf_device_map")


def test_whole_blocks_go_to_each_gpu_and_the_rest_stays_in_host_memory(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    embedding = model.get_input_embeddings().weight.nbytes
    room = {0: int((embedding + block) / 0.8) + 2000, 1: int(block / 0.8) + 2000, "cpu": 0}
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: room)
    given: dict[str, Any] = {}
    monkeypatch.setattr(accelerate, "dispatch_model", lambda model, **kwargs: given.update(kwargs) or model)
    assert place(model, GPU) is model
    where = given["device_map"]
    assert where["model.embed_tokens"] == 0 and where["lm_head"] == "cpu"
    assert "model.layers.0" in where and set(where.values()) <= {0, 1, "cpu"}, "no block is divided"


def test_without_accelerate_it_says_what_is_missing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModelError, match=r"GB of weights.*pip install .*spreads it over all GPUs and the host"):
        place(model, GPU)
