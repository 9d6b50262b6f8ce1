"""LoRA beside weights of 4 or 8 bits: exact at every world size, and equal to LoRA beside what the bytes stand for."""

from __future__ import annotations

import ctypes
import gc
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.precision.quantized import Kind, QuantizedLayer, quantize, widen_rows
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints, tensors_in
from tests.distributed.test_adapters import FOR_FOUR, config_of, run_dir
from tests.distributed.test_loading_memory import MIB, SLACK, Peak
from tests.models import build
from tests.ranks import resident_ranks, run_ranks
from tests.runs import largest_difference, trajectory

pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="FSDP takes no bytes there: tests/unit/test_quantized.py"
)

CPU = torch.device("cpu")
QLORA: dict[str, Any] = {"type": "qlora", "rank": 4, "alpha": 8, "dropout": 0.1}
FP32: Any = {"parallel": {"precision": "fp32"}}


@pytest.mark.parametrize(
    ("model", "kind", "worlds"),
    [
        ("llama", "nf4", (3,)),
        pytest.param("gpt2", "int8", (2,), marks=pytest.mark.slow),
        *(
            pytest.param(model, "nf4", (2, 3, 4), marks=pytest.mark.slow)
            for model in ("llama", "qwen3", "gemma3_text", "gpt2", "mixtral")
        ),
    ],
)
def test_worlds_agree(tmp_path: Path, model: str, kind: Kind, worlds: tuple[int, ...]) -> None:
    method = {**QLORA, "quantization": kind}
    sections = FP32 if model == "mixtral" else {}  # torch has no product of experts in fp64
    whole = trajectory(config_of(tmp_path, model, method, name="1", train=FOR_FOUR, **sections), 1)
    for world in worlds:
        rows = trajectory(config_of(tmp_path, model, method, name=str(world), train=FOR_FOUR, **sections), world)
        assert largest_difference(whole, rows, "loss") < (1e-5 if sections else 1e-8)
        assert largest_difference(whole, rows, "grad_norm") < (1e-4 if sections else 1e-6)


def _bytes_of(config: FinetuneConfig, prepared: Any, standing: Any, fill: str) -> dict[str, str] | str:
    """The hash of every quantized weight, gathered."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"fill": fill})})
    try:
        model = assemble(config, prepared, standing, CPU).model
    except ModelError as error:
        return str(error)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            packed = module.packed.full_tensor() if isinstance(module.packed, DTensor) else module.packed
            found[name] = hashlib.sha256(packed.numpy(force=True).tobytes()).hexdigest()
            rows = -(-packed.shape[0] // dist.get_world_size())
            local = module.packed.to_local() if isinstance(module.packed, DTensor) else module.packed
            assert local.shape[0] <= rows and local.dtype == torch.uint8
    return found


@pytest.mark.slow
def test_the_bytes_are_the_same_at_every_world_and_however_they_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", QLORA, train=FOR_FOUR, **FP32)
    (first,) = resident_ranks(_bytes_of, 1, config, *prepare(config, 1), "sharded")
    assert len(first) == 14, "seven layers in each of two blocks; not the head"
    for world, fill in ((2, "sharded"), (2, "rank0"), (3, "sharded"), (4, "rank0")):
        begun = prepare(config, world)
        assert all(found == first for found in resident_ranks(_bytes_of, world, config, *begun, fill)), (world, fill)
    file = tmp_path / "base-llama" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][40, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    for fill in ("sharded", "rank0"):
        for said in resident_ranks(_bytes_of, 2, config, *prepare(config, 2), fill):
            assert "model.layers.1.mlp.up_proj.weight" in said and "not finite" in said


@pytest.mark.parametrize(
    ("model", "dora", "kind"), [("llama", True, "nf4"), pytest.param("gpt2", False, "int8", marks=pytest.mark.slow)]
)
def test_it_is_lora_beside_the_numbers_that_the_bytes_stand_for(
    tmp_path: Path, model: str, dora: bool, kind: Kind
) -> None:
    """Bit for bit: the same run beside a model whose weights are those numbers. Only adapters are saved."""
    config = config_of(tmp_path, model, {**QLORA, "dora": dora, "quantization": kind}, **FP32)
    rows = trajectory(config, 2)
    plain = config_of(tmp_path, model, {**QLORA, "type": "lora", "dora": dora}, name="plain", **FP32)
    file = tmp_path / f"base-{model}" / "model.safetensors"
    tensors = load_file(file)
    linear = [key for key, tensor in tensors.items() if tensor.ndim == 2 and ("proj" in key or "c_" in key)]
    for key in linear:
        tensors[key] = widen_rows(quantize(tensors[key], kind), tensors[key].shape[1], kind, torch.float32).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    beside = trajectory(plain, 2)
    assert [row["loss"] for row in rows] == [row["loss"] for row in beside]
    saved = tensors_in(checkpoints(run_dir(config))[-1])
    assert saved.keys() == tensors_in(checkpoints(run_dir(plain))[-1]).keys()
    assert not any("packed" in name for name in saved)


@pytest.mark.parametrize("adapted", [[], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]])
def test_it_is_said_which_weights_of_a_mixture_are_not_quantized(
    tmp_path: Path, adapted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With an adapter beside them or without one."""
    prepare(config_of(tmp_path, "mixtral", {**QLORA, "dropout": 0.0, "target_parameters": adapted}, **FP32), 1)
    (said,) = [record.getMessage() for record in caplog.records if "not quantized" in record.getMessage()]
    tensors = load_file(tmp_path / "base-mixtral" / "model.safetensors")
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    share = round(100 * experts / sum(tensor.numel() for tensor in tensors.values()))
    assert f"(mlp.experts.down_proj, mlp.experts.gate_up_proj), which are {share} % of" in said and 50 < share < 100
    caplog.clear()
    for name, method in (("dense", QLORA), ("lora", {**QLORA, "type": "lora"})):
        model = "llama" if name == "dense" else "mixtral"
        prepare(config_of(tmp_path, model, method, name=name, **FP32), 1)
    assert not any("not quantized" in record.getMessage() for record in caplog.records)


@pytest.mark.slow  # as is a run of QLoRA from principal parts, which is exported, too (test_principal)
def test_resume_is_bit_equal_and_what_comes_out_is_beside_the_stored_weights(tmp_path: Path) -> None:
    sections: Any = {"parallel": {"precision": "bf16"}}
    whole = trajectory(config_of(tmp_path, "llama", QLORA, name="whole", **sections), 2)
    config = config_of(tmp_path, "llama", QLORA, **sections)
    trajectory(config, 2, stop_after=3)
    assert trajectory(config, 2) == whole
    checkpoint = find_checkpoint(run_dir(config))
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(tmp_path / "base-llama" / "model.safetensors")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.model.{key}.lora_{each}.weight"] for each in "AB")
    assert torch.equal(merged[f"model.{key}.weight"], base[f"model.{key}.weight"].float() + (b @ a) * 2)
    loaded, _ = load_for_inference(run_dir(config), CPU)
    assert torch.equal(loaded.state_dict()[f"model.{key}.weight"], merged[f"model.{key}.weight"])
    again = config_of(tmp_path, "llama", {**QLORA, "adapter": str(tmp_path / "adapter")}, name="again", **sections)
    prepare(again, 2)


def test_what_is_trained_whole_begins_as_it_is_stored(tmp_path: Path) -> None:
    """Also where it has linear layers inside, of which others are quantized."""
    method = {**QLORA, "modules_to_save": ["mlp"]}
    config = config_of(tmp_path, "llama", method, optim={"lr": 1e-30, "weight_decay": 0.0}, **FP32)
    trajectory(config, 2)
    saved = tensors_in(checkpoints(run_dir(config))[-1])
    base = load_file(tmp_path / "base-llama" / "model.safetensors")
    for each in ("gate_proj", "up_proj", "down_proj"):
        trained = saved[f"model.model.layers.1.mlp.modules_to_save.default.{each}.weight"]
        assert torch.equal(trained, base[f"model.layers.1.mlp.{each}.weight"])


LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 32_000,
}
"""468 million numbers, 402 of them in linear layers. The largest tensor is the embedding: 62.5 MiB."""


def _held(small: Any, large: Any) -> tuple[int, int, int, float, float]:
    """Peak of filling; what stays on this rank; the largest tensor; bytes of a quantized and of any frozen number."""
    from raytune_fsdp.run import assemble as module_of_fill

    first_weights, fill, peaks = module_of_fill.first_weights, module_of_fill.fill, []  # type: ignore[attr-defined]

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        peaks.append(Peak().__enter__())
        return first_weights(*args, **options)

    def filled(*args: Any, **options: Any) -> None:
        fill(*args, **options)
        peaks[-1].__exit__()

    module_of_fill.first_weights, module_of_fill.fill = watched, filled  # type: ignore[attr-defined]
    assemble(*small, CPU)
    model = assemble(*large, CPU).model
    world, local = dist.get_world_size(), {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[operator]
    frozen = {name: tensor for name, tensor in local.items() if not model.get_parameter(name).requires_grad}
    packed = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    numbers = sum(module.packed.shape[0] * module.numbers for module in packed)
    quantized = sum(tensor.nbytes for tensor in frozen.values() if tensor.dtype == torch.uint8)
    rest = sum(model.get_parameter(name).numel() for name, tensor in frozen.items() if tensor.dtype != torch.uint8)
    own = sum(tensor.untyped_storage().nbytes() for tensor in local.values())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(tensor.nbytes for tensor in frozen.values()) * world / (numbers + rest)
    return peaks[-1].bytes, own, largest, quantized * world / max(1, numbers), whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "init"), [("qlora", "zero"), ("lora", "zero"), ("qlora", "pissa"), ("lora", "pissa"), ("lora", "olora")]
)
def test_the_16_bit_model_is_nowhere(tmp_path: Path, kind: str, init: str) -> None:
    """Of 468 million numbers on two ranks, in both modes. Nor are the adapters of the whole model on one rank."""
    method = {**QLORA, "type": kind, "init": init, "rank": 4 if init == "zero" else 64}
    bf16: Any = {"parallel": {"precision": "bf16"}}
    small = config_of(tmp_path, "llama", {**method, "rank": 4}, name="small", **bf16)
    build("llama", **LARGE).bfloat16().save_pretrained(tmp_path / "large", max_shard_size="300MB")
    values = small.model_dump()
    values["run"]["name"] = "large"
    values["model"]["path"], values["method"]["rank"] = str(tmp_path / "large"), method["rank"]
    for fill in ("sharded", "rank0"):
        values["model"]["fill"] = fill
        large = FinetuneConfig.model_validate(values)
        begun = [(config, *prepare(config, 2)) for config in (small, large)]
        for rank, (peak, own, largest, of_linear, of_all) in enumerate(run_ranks(_held, 2, *begun, seconds=900)):
            print(
                f"{kind} {init} {fill} rank {rank}: {peak / MIB:.0f} MiB at most, {own / MIB:.0f} own, "
                f"{largest / MIB:.0f} the largest; {of_linear:.4f} bytes a quantized number, {of_all:.4f} a frozen one"
            )
            assert of_linear <= 0.6 and of_all <= (0.8 if kind == "qlora" else 2.05)
            assert peak <= own + 2 * largest + SLACK
