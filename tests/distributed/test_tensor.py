"""Ranks that compute every layer together learn what one rank alone learns: `parallel.mesh.tensor`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.collectives import Collectives
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.split.cuts import check_cut
from raytune_fsdp.plan.run_dir import MODEL_FILES
from raytune_fsdp.run.publish import export_checkpoint
from raytune_fsdp.run.trials.cut import difference_when_cut
from raytune_fsdp.tools.audit.comparison import TensorDifference, compare_tensors
from tests.distributed.test_sequence import FP32, LLAMA_FP64, MIXTRAL, QWEN3, STEPS, check_learns_the_same
from tests.formulas import summed_by_layers
from tests.models import ARCHITECTURES, EXPERTS, build, save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import LLAMA, largest_difference, make_config, trajectory

SLOW = pytest.mark.slow
LLAMA4 = {**LLAMA, "num_key_value_heads": 4}
TIED = {**QWEN3, "tie_word_embeddings": True}

CASES = [
    # Tokens and layers shared at once; then experts, and routers whose losses every rank has whole.
    pytest.param(LLAMA, 4, {"sequence": 2, "tensor": 2}, "fp64", {}, {}, LLAMA_FP64, id="llama-both"),
    pytest.param(
        MIXTRAL, 2, {"tensor": 2}, "fp32", {"activation_checkpointing": "full"},
        {"router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}, FP32, id="mixtral",
    ),
    pytest.param(
        TIED, 4, {"tensor": 2}, "fp64", {"strategy": "hybrid_shard", "shard_size": 2},
        {"neftune_noise_alpha": 5.0, "label_smoothing": 0.1, "z_loss": 1e-4}, LLAMA_FP64, id="qwen3-tied", marks=SLOW,
    ),
    pytest.param(
        LLAMA, 4, {"tensor": 2}, "fp64", {"strategy": "replicate"}, {}, LLAMA_FP64, id="llama-replicate", marks=SLOW
    ),
    pytest.param(LLAMA4, 4, {"tensor": 4}, "fp32", {"cpu_offload": True}, {}, FP32, id="llama-four", marks=SLOW),
    pytest.param(LLAMA, 8, {"sequence": 2, "tensor": 2}, "fp32", {}, {}, FP32, id="llama-eight", marks=SLOW),
    pytest.param(
        LLAMA, 8, {"tensor": 2}, "fp32", {"strategy": "hybrid_shard", "shard_size": 4}, {}, FP32, id="llama-hybrid",
        marks=SLOW,
    ),
    pytest.param(
        {**MIXTRAL, "num_attention_heads": 8}, 8, {"sequence": 4, "tensor": 2}, "fp32", {}, {}, FP32,
        id="mixtral-eight", marks=SLOW,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "world", "mesh", "precision", "parallel", "train", "bounds"), CASES)
def test_ranks_that_share_layers_learn_what_one_learns(
    tmp_path: Path,
    architecture: dict[str, Any],
    world: int,
    mesh: dict[str, int],
    precision: str,
    parallel: dict[str, Any],
    train: dict[str, Any],
    bounds: tuple[float, float],
) -> None:
    check_learns_the_same(tmp_path, architecture, world, mesh, precision, parallel, train, bounds)


def tried(names: list[str]) -> dict[str, str | None]:
    """Of each architecture, why ranks cannot compute its layers together, or None."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    found: dict[str, str | None] = {}
    for name in names:
        network = build(name, **({"num_local_experts": 4} if name == "mixtral" else {}))
        try:
            check_cut(mesh.size(), network, KernelNeeds())
        except ConfigError as error:
            found[name] = str(error)
            continue
        found[name] = difference_when_cut(network, mesh, torch.device("cpu"))
    return found


def test_every_architecture_is_computed_right_or_refused() -> None:
    """Losses and the gradients of every weight, of vocabularies that two ranks cannot share evenly."""
    found = resident_ranks(tried, 2, [*ARCHITECTURES, *EXPERTS])
    assert found[0] == found[1]
    refused = {name: why for name, why in found[0].items() if why is not None}
    assert refused.keys() == {"gpt2", "olmo2", "stablelm"}
    assert "does not say how a GPT2LMHeadModel is cut; it does for " in str(refused["gpt2"])
    assert "q_proj would be cut in the way 'colwise_gather_output'" in str(refused["olmo2"])


UNEVEN = 67
"""Tokens of a vocabulary that two ranks cannot share evenly, and three shards of a part neither: torch says of them
other offsets than the shards have."""


def config_of(directory: Path, name: str, mesh: Mapping[str, int], **sections: Any) -> FinetuneConfig:
    return make_config(
        directory, {**LLAMA, "vocab_size": UNEVEN}, run={"name": name},
        train={"global_batch": 6, "micro_batch": 2, "max_steps": STEPS}, parallel={"precision": "fp64", "mesh": mesh},
        **sections,
    )  # fmt: skip


HOPS = [(2, {"sequence": 2}), (2, {"tensor": 2})]


@pytest.mark.parametrize(
    ("method", "first"),
    [("full", (6, {"tensor": 2})), pytest.param("lora", (4, {"tensor": 2, "sequence": 2}), marks=SLOW)],
)
def test_a_run_goes_on_with_another_mesh(tmp_path: Path, method: str, first: tuple[int, dict[str, int]]) -> None:
    """And every mesh reads the numbers that another one has saved, and saves the same. Dropout is that of one rank."""
    sections: dict[str, Any] = {"checkpoint": {"keep_last": None}}
    if method == "lora":
        base = save_checkpoint(tmp_path / "base", "llama")
        config_of(tmp_path, "data", {})
        sections["model"] = {
            "path": str(base), "tokenizer": str(tmp_path / "tokenizer"), "init": "pretrained", "architecture": None,
        }  # fmt: skip
        sections["method"] = {"type": "lora", "rank": 4, "dropout": 0.1}
    alone = trajectory(config_of(tmp_path, "alone", {}, **sections), 1)
    for number, (world, mesh) in enumerate([first, *HOPS], start=1):
        config = config_of(tmp_path, "moved", mesh, **sections)
        trajectory(config, world, stop_after=number)
        run = Path(config.run.storage) / "moved"
        found = committed(str(run / "checkpoints"))[-1]
        others = [(4, {"tensor": 2, "sequence": 2}), (1, {})]
        for ranks, other in others if number == 1 else []:
            again = config_of(tmp_path, "moved", other, **sections)
            place = tmp_path / f"again{ranks}"
            shutil.copytree(run / MODEL_FILES, place / MODEL_FILES)
            resident_ranks(save_again, ranks, again.model_dump(), str(place / "checkpoints"))
            (saved,) = committed(str(place / "checkpoints"))
            differences = list(compare_tensors(found, saved, None))
            assert len(differences) > 20
            assert all(isinstance(each, TensorDifference) and each.equal for each in differences)
            assert exported(saved, place / "export") == exported(found, run / "export")
    moved = trajectory(config_of(tmp_path, "moved", {}, **sections), 1)
    assert len(moved) == STEPS
    assert largest_difference(alone, moved, "loss") <= LLAMA_FP64[0]
    assert largest_difference(alone, moved, "grad_norm") <= LLAMA_FP64[1]


def exported(checkpoint: CommittedCheckpoint, directory: Path) -> bytes:
    """Its weights, as others read them."""
    if not directory.exists():
        export_checkpoint(checkpoint, directory, ExportConfig(dtype="fp32"))
    (file,) = directory.glob("*.safetensors")
    return file.read_bytes()


def save_again(values: Mapping[str, Any], place: str) -> None:
    """Read a run's last checkpoint with this mesh, and save what was read in another place."""
    from raytune_fsdp.checkpoint.catalogue import Keep
    from raytune_fsdp.checkpoint.saver import open_saver
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    parts = assemble(config, prepared, standing, torch.device("cpu"))
    assert standing.checkpoint is not None
    saver = open_saver(
        place, parts.model, parts.optimizer, attempt=1, keep=Keep(last=None), seconds=60, asynchronous=False, scores={}
    )
    saver.begin(standing.state, before=lambda: None)
    outcome = saver.finish()
    assert outcome is not None and outcome.saved is not None, outcome


class Widest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The last axes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.last |= {each.shape[-1] for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.ndim}
        return result


def summed(values: Mapping[str, Any]) -> tuple[float, int, set[int]]:
    """The numbers that this rank receives in sums over parts of layers in a step, the tokens that it learns from, and
    the last axes of all tensors."""
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.step.train_step import train_step
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    parts = assemble(config, prepared, standing, torch.device("cpu"))
    # Not all losses at once: of fewer tokens of the vocabulary more would fit.
    chunk, batches = mock.patch.dict(chunked_head._CHUNK, cpu=67 * 66), next(parts.batches)
    with chunk, Collectives() as seen, Widest() as widest:
        train_step(
            parts.model, parts.optimizer, parts.scale, batches,
            plan=standing.plan, parallel=parts.parallel, optim=config.optim, lr_factor=1.0, seed=3,
        )  # fmt: skip
    return seen.numbers["summed"], sum(block.target_tokens for block in batches.micro_batches), widest.last


@pytest.mark.parametrize(("recompute", "times"), [("none", 0), ("full", 1)])
def test_what_layers_add_up_is_what_the_formula_says(tmp_path: Path, recompute: str, times: int) -> None:
    """And nobody has all logits."""
    architecture = {**LLAMA, "vocab_size": 133}
    config = make_config(
        tmp_path, architecture, train={"global_batch": 2, "micro_batch": 2, "max_steps": 3},
        parallel={"precision": "fp32", "mesh": {"tensor": 2}, "activation_checkpointing": recompute},
    )  # fmt: skip
    layers = summed_by_layers(tokens=96, width=32, layers=2, members=2, recomputed=times)
    for numbers, targets, last in resident_ranks(summed, 2, config.model_dump()):
        # The result of the embedding, the gradient of what the head gets, and five numbers of each target.
        assert numbers == layers + 96 * 32 + targets * (32 + 5)
        assert last & {66, 67} and 133 not in last
