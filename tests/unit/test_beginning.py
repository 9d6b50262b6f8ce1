"""By which versions a run reads and adds, where no checkpoint says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.mixture import ORDER_VERSION
from raytune_fsdp.model.adapters.attach import adapted_modules
from raytune_fsdp.model.attention.choose import KernelChoice
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.weights.keys import owned_tensors
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.beginning import beginning_of, orders_on_record, put_beginning
from raytune_fsdp.run.trials.kernels import _only_newer
from raytune_fsdp.run.trials.probe import fill_small
from raytune_fsdp.step.precision import store_frozen
from tests.models import architecture
from tests.unit.test_probe import wanted

SAVED = {"time": "", "attempt": 1, "event": "saved", "fields": {"step": 1, "path": "s3://bucket/x"}}


def run_in(directory: Path, plan: Any, *events: dict[str, Any]) -> RunDir:
    (directory / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    (directory / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return RunDir(directory, "s3://bucket/run/checkpoints")


def test_a_run_that_repeats_another_begins_as_that_was_begun(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "again", "")
    assert beginning_of(place) == (RunState(newest_order=ORDER_VERSION), None), "a new one"
    older = RunState(step=9, identity={"data.order_version": 2}, kernels={"attention": "sdpa"})
    put_beginning(place, older)
    kernels = {"gradients": "bf16", "update": "eager", "blocks": "eager", "experts": "grouped_mm"}
    assert beginning_of(place) == (RunState(identity={"data.order_version": 2}, kernels=kernels), None)
    values = json.loads(place.beginning.read_text())
    assert [values.pop(key) for key in ("scaling", "decay", "fixed")] == [None] * 3, "as older versions did it"
    assert [values.pop(key) for key in ("update", "blocks", "experts")] == ["eager", "eager", "grouped_mm"]
    place.beginning.write_text(json.dumps(values))
    older_kernels = {"gradients": "bf16", "update": "eager"}
    assert beginning_of(place)[0].kernels == older_kernels, "as a version without those choices wrote it"
    kernels = {"gradients": "fp32", "update": "compiled", "blocks": "compiled", "experts": "eager"}
    kernels |= {"scaling": "wide", "decay": "states_apart", "fixed": "fp32"}
    later = RunState(identity={"data.order_version": 3}, newest_order=4, kernels=kernels)
    put_beginning(place, later)
    assert beginning_of(place)[0] == later
    adapters = adapted_modules(["model.q.lora_A.default.weight", "model.q.lora_B.default.weight", "model.norm.weight"])
    assert adapters == ["model.q"]
    put_beginning(place, later, adapters)
    assert beginning_of(place) == (later, adapters)


@pytest.mark.parametrize(
    ("name", "precision", "newer"),
    [
        ("llama", "bf16", {"scaling": "wide"}), ("llama", "fp32", {}), ("mamba2", "fp32", {}),
        ("falcon_mamba", "fp16", {"scaling": "wide", "decay": "states_apart"}),
    ],
)  # fmt: skip
def test_what_older_versions_did_otherwise_is_only_in_newer_runs(
    name: str, precision: str, newer: dict[str, str]
) -> None:
    config = wanted(architecture(name), precision=precision)

    def built() -> Any:
        network = build_network(load_architecture(config.model, None), config)
        install_chunked_loss(network)
        return network

    def found(kept: dict[str, str]) -> dict[str, str]:
        network = built()
        chosen = _only_newer(config, network, KernelChoice(name="chunked", why=""), kept)
        assert network.get_output_embeddings().wide is ("scaling" in chosen)
        return {what: each.name for what, each in chosen.items()}

    assert found({}) == newer
    assert found({"attention": "sdpa"}) == {}, "as the run began"
    assert found({"attention": "sdpa", **newer}) == newer
    plain = _only_newer(config, built(), KernelChoice(name="plain", why=""), {})
    assert plain.keys() == newer.keys() - {"scaling"}


@pytest.mark.parametrize(("kept", "dtype"), [({}, torch.float32), ({"attention": "sdpa"}, torch.bfloat16)])
@pytest.mark.parametrize("method", ["full", "freeze"])
def test_what_is_never_trained_stays_in_fp32_where_the_architecture_keeps_it(
    kept: dict[str, str], dtype: torch.dtype, method: str
) -> None:
    """A bias of ERNIE's routers, which was rounded in every run of older versions: their checkpoints have it so."""
    values = wanted(architecture("ernie4_5_moe")).model_dump()
    chosen = {"type": "freeze", "trained": ["lm_head"]} if method == "freeze" else {"type": "full"}
    config = FinetuneConfig.model_validate({**values, "method": chosen})
    network = build_network(load_architecture(config.model, None), config)
    names, name = list(owned_tensors(network)), "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    _only_newer(config, network, KernelChoice(name="plain", why=""), kept)
    store_frozen(network, "bf16")
    tensors = owned_tensors(network)
    assert tensors[name].dtype == dtype and {*tensors} == {*names}
    others = {each.dtype for key, each in tensors.items() if key != name and each.requires_grad is (method == "full")}
    assert others == {torch.float32 if method == "full" else torch.bfloat16}
    if not kept and method == "full":
        fill_small(network)
        network(input_ids=torch.arange(9)[None], use_cache=False)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": 2}', '{"format": 1, "order_version": 2, "newest_order": null}',
        *(
            json.dumps(
                {
                    "format": 1, "order_version": 2, "newest_order": 4, "gradients": "bf16", "adapters": None,
                    "threads": None, **change,
                }
            )
            for change in (
                {"order_version": "2"}, {"order_version": 99}, {"newest_order": True}, {"newest_order": 1},
                {"gradients": "fp8"}, {"gradients": None}, {"adapters": 7}, {"adapters": [7]}, {"base": {}},
                {"threads": 7}, {"update": "fused"}, {"update": None}, {"format": 1.0}, {"blocks": 1}, {"experts": "x"},
                {"scaling": "x"}, {"decay": 1}, {"fixed": "bf16"},
            )
        ),
    ],
)  # fmt: skip
def test_a_forged_beginning_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "begins_as.json").write_text(content)
    with pytest.raises(ResumeError, match=r"begins_as\.json does not say how this run begins \(.*remove the file") as e:
        beginning_of(RunDir(tmp_path, ""))
    assert str(e.value).isprintable()


def test_the_record_of_a_run_says_how_it_reads_its_rows(tmp_path: Path) -> None:
    known = {"order_version": 2, "newest_order": 4}
    assert orders_on_record(run_in(tmp_path, {"steps": 3, **known}, SAVED)) == known
    nothing = dict.fromkeys(known)
    assert orders_on_record(run_in(tmp_path, known)) == nothing, "it has saved nothing, and begins again"
    assert orders_on_record(run_in(tmp_path, {"steps": 3}, SAVED)) == nothing, "as older trees wrote it"
    assert orders_on_record(RunDir(tmp_path / "none", "")) == nothing
    (tmp_path / "plan.json").unlink()
    assert orders_on_record(RunDir(tmp_path, "")) == nothing


@pytest.mark.parametrize(
    "plan", ["", '{"order_version": "2"}', '{"order_version": 99}', '{"newest_order": true}', '{"newest_order": [4]}']
)
def test_a_record_with_a_forged_version_is_refused(tmp_path: Path, plan: str) -> None:
    with pytest.raises(ResumeError, match=r"plan\.json does not say how the run reads its rows \(") as error:
        orders_on_record(run_in(tmp_path, plan, SAVED))
    assert str(error.value).isprintable()
