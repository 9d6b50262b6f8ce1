"""Adapters: exact at every world size, nothing else changes, and what is saved is what PEFT loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from raytune_fsdp.base.errors import ConfigError, ModelError, ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.model.adapters.attach import adapted_modules
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.beginning import put_beginning
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.publish import publish
from raytune_fsdp.run.starting_weights import fill_mode
from raytune_fsdp.step import parallel
from raytune_fsdp.tools.audit.repeat import repeat_of
from raytune_fsdp.tools.audit.segment import choose_segment
from tests.checkpoints import checkpoints, pieces_of, tensors_in
from tests.forgeries import put, with_hashes
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import largest_difference, make_config, train_rank, trajectory

pytest.importorskip("peft")

SLOW = pytest.mark.slow
STEPS = 4
TRAIN = {"global_batch": 6, "micro_batch": 2, "max_steps": STEPS}
FEW = {**TRAIN, "max_steps": 2}
FOR_FOUR = {**TRAIN, "global_batch": 10}
"""With fillers on two, three and four ranks."""
SAVES = {"every": 2, "asynchronous": False}

LORA = {"type": "lora", "rank": 4, "alpha": 8}
EXPERTS = {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "routers": "trained"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, "dropout": 0.1},
    "dora": {**LORA, "dora": True},
    "whole": {**LORA, "modules_to_save": ["lm_head"], "lr_ratio": 4.0, "rank_stabilized": True},
    "experts": EXPERTS,
    "ia3": {"type": "ia3"},
}
BOUNDS = {"gpt2": (1e-10, 1e-10), "llama": (1e-8, 1e-6), "mixtral": (1e-5, 1e-4)}
"""Relative, of losses and gradient norms: in fp64 (the norms of Llama's family compute in fp32), Mixtral in fp32."""


def config_of(
    directory: Path, model: str, method: dict[str, Any], name: str = "run", **sections: Any
) -> FinetuneConfig:
    """A run of adapters beside a model whose every weight was drawn at random."""
    base = directory / f"base-{model}"
    config = make_config(directory)  # writes data and tokenizer
    if not base.exists():
        save_checkpoint(base, model)
    values = {"path": str(base), "tokenizer": config.model.tokenizer, "init": "pretrained", "architecture": None}
    chosen = {"train": TRAIN, "checkpoint": SAVES, "method": method, **sections}
    return make_config(directory, run={"name": name}, model=values, **chosen)


def run_dir(config: FinetuneConfig) -> Path:
    return Path(config.run.storage) / config.run.name


@pytest.mark.parametrize("kind", ["lora", pytest.param("whole", marks=SLOW)])
def test_a_fork_has_its_parents_adapters_and_base(tmp_path: Path, kind: str) -> None:
    """And goes on when the parent is gone."""
    whole = trajectory(config_of(tmp_path, "llama", METHODS[kind]), 2)
    fork = {"name": "fork", "fork": {"run": "run", "step": 2}}
    config = config_of(tmp_path, "llama", METHODS[kind])
    config = config.model_copy(update={"run": type(config.run).model_validate({**config.run.model_dump(), **fork})})
    trajectory(config, 2, stop_after=3)
    shutil.rmtree(tmp_path / "runs" / "run")
    assert trajectory(config, 2) == whole[2:]


@pytest.mark.parametrize(
    ("model", "kind", "worlds"),
    [
        ("llama", "lora", (2,)),
        ("mixtral", "experts", (2,)),
        *(
            pytest.param(model, kind, (2, 3, 4), marks=SLOW)
            for model in ("gpt2", "llama", "qwen3", "gemma3_text")
            for kind in ("lora", "dora", "ia3")
        ),
        pytest.param("llama", "whole", (2, 3, 4), marks=SLOW),
        pytest.param("mixtral", "experts", (3, 4), marks=SLOW),
        pytest.param("mixtral", "lora", (2, 3, 4), marks=SLOW),
    ],
)
def test_worlds_agree(tmp_path: Path, model: str, kind: str, worlds: tuple[int, ...]) -> None:
    """Also at another number of ranks from the middle on; and only what is trained is saved."""
    # torch has no grouped products of experts in fp64.
    sections: Any = {"train": FOR_FOUR, "parallel": {"precision": "fp32" if model == "mixtral" else "fp64"}}
    alone = trajectory(config_of(tmp_path, model, METHODS[kind], **sections), 1)
    bounds = BOUNDS[model if model in BOUNDS else "llama"]
    for world in worlds:
        config = config_of(tmp_path, model, METHODS[kind], name=f"w{world}", **sections)
        trajectory(config, world, stop_after=3)
        rows = trajectory(config, world - 1)
        for key, bound in zip(("loss", "grad_norm"), bounds, strict=True):
            assert largest_difference(alone, rows, key) < bound
    tensors = tensors_in(checkpoints(run_dir(config))[-1])
    assert all(tensor.any() for tensor in tensors.values()), "everything that is saved has learned something"
    assert all(".lora_" in name or "modules_to_save" in name or ".ia3_l." in name for name in tensors), sorted(tensors)


def train_as_before(values: dict[str, Any], before: bool) -> None:
    """One rank of a run. `before`: FSDP gets the frozen weights, too, of which a rank has all."""
    left_alone, found = parallel.left_alone, list[int]()

    def counted(*given: Any) -> set[torch.nn.Parameter]:
        alone = set() if before else left_alone(*given)
        found.append(len(alone))
        return alone

    with mock.patch.object(parallel, "left_alone", counted):
        train_rank(values)
    assert before or min(found) > 8


def hashes(found: CommittedCheckpoint) -> dict[str, str]:
    rows = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors_in(found).items()}
    return {name: sha256(each.numpy()).hexdigest() for name, each in rows.items()}


@pytest.mark.parametrize(
    ("kind", "world"),
    [("lora", 2), *(pytest.param(*each, marks=SLOW) for each in (("lora", 1), ("dora", 1), ("whole", 2)))],
)
def test_frozen_weights_that_are_left_alone_change_no_bit(tmp_path: Path, kind: str, world: int) -> None:
    found = []
    for name in ("now", "before"):
        sections: Any = {"train": FEW, "parallel": {"precision": "bf16", "strategy": "replicate"}}
        config = config_of(tmp_path, "llama", METHODS[kind], name, **sections)
        resident_ranks(train_as_before, world, config.model_dump(), name == "before")
        found.append((read_trajectory(RunDir.of(config).metrics), hashes(checkpoints(run_dir(config))[-1])))
    assert len(found[0][0]) == 2 and len(found[0][1]) > 20
    assert found[0] == found[1]


def test_one_rank_that_leaves_frozen_weights_alone_has_the_bits_of_three(tmp_path: Path) -> None:
    rows = []
    for world in (1, 3):
        config = config_of(tmp_path, "llama", METHODS["lora"], f"exact-{world}", parallel={"precision": "bf16"})
        exact = config.model_copy(update={"run": config.run.model_copy(update={"exact": True, "threads": 1})})
        rows.append(trajectory(exact, world))
    assert rows[0] == rows[1] and len(rows[0]) == STEPS


@SLOW  # the fork above is stopped, and goes on with the same bits
@pytest.mark.parametrize(("model", "kind"), [("llama", "lora"), ("gpt2", "dora")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_bit_equal(tmp_path: Path, model: str, kind: str, precision: str) -> None:
    sections: Any = {"parallel": {"precision": precision}}
    whole = trajectory(config_of(tmp_path, model, METHODS[kind], **sections), 2)
    stopped = config_of(tmp_path, model, METHODS[kind], name="stopped", **sections)
    trajectory(stopped, 2, stop_after=3)
    assert trajectory(stopped, 2) == whole


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("llama", "lora"),
        ("mixtral", "experts"),
        pytest.param("gpt2", "dora", marks=SLOW),  # the mean of checkpoints below merges them
        *(pytest.param(model, "lora", marks=SLOW) for model in ("gpt2", "qwen3", "gemma3_text", "mixtral")),
        *(pytest.param(model, "dora", marks=SLOW) for model in ("llama", "qwen3", "gemma3_text")),
        *(pytest.param(model, "ia3", marks=SLOW) for model in ("llama", "gpt2", "qwen3", "gemma3_text")),
        pytest.param("llama", "whole", marks=SLOW),
    ],
)
def test_what_is_exported_is_what_peft_loads_and_merges(tmp_path: Path, model: str, kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sections: Any = {"parallel": {"precision": "fp32"}}
    config = config_of(tmp_path, model, METHODS[kind], **sections)
    trajectory(config, 2)
    checkpoint = find_checkpoint(run_dir(config))
    publish(checkpoint, tmp_path / "adapter", ExportConfig())
    publish(checkpoint, tmp_path / "merged", ExportConfig(merge=True, dtype="fp32"))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and "An adapter of a `" in card
    assert "library_name: transformers" in (tmp_path / "merged" / "README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / f"base-{model}", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    tokenizer = json.loads((tmp_path / "adapter" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast", "a class that transformers 4 knows, too"
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = {
        name: p for name, p in adapted.named_parameters() if p.requires_grad or ".lora_" in name or ".ia3_l." in name
    }
    assert trained and all(bool(p.any()) for p in trained.values()), "no tensor is all zero after training"
    theirs = adapted.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], before[name]) for name in ours)
    inferred = load_for_inference(run_dir(config), torch.device("cpu"))[0].state_dict()
    assert all(torch.equal(inferred[name], theirs[name]) for name in theirs)


def plain_peft(values: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    """The first steps of a loop in plain PyTorch over PEFT's own model, begun with the values of ours."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from raytune_fsdp.base.batch import Cursor
    from raytune_fsdp.data.batches import stream_batch
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.run.prepare import prepare
    from raytune_fsdp.step.optim.schedule import lr_factor

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare(config, 1)
    begun = assemble(config, prepared, standing, torch.device("cpu")).model.state_dict()
    begun = {f"base_model.model.{name}": tensor for name, tensor in begun.items()}
    dist.destroy_process_group()
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    method = config.method
    assert method.type == "lora"
    model = get_peft_model(
        model,
        LoraConfig(r=method.rank, lora_alpha=method.alpha, target_modules="all-linear", use_dora=method.dora),
    )
    missing, unexpected = model.load_state_dict(begun, strict=False)
    assert not missing and not unexpected
    optim = config.optim
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
    )  # fmt: skip
    samples = Stream(prepared.train, seed=config.run.seed).samples(Cursor())
    results = []
    for step in range(1, steps + 1):
        batch = stream_batch([next(samples) for _ in range(config.train.global_batch)], index=0)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), batch.labels[:, 1:].reshape(-1), ignore_index=-100
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in trained], optim.max_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = optim.lr * lr_factor(step, optim, standing.plan)
        adamw.step()
        adamw.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


@pytest.mark.parametrize(
    ("model", "method"),
    [("llama", LORA), *(pytest.param(m, {**LORA, "dora": True}, marks=SLOW) for m in ("gpt2", "qwen3", "gemma3_text"))],
)
def test_two_ranks_equal_a_plain_loop_over_peft(tmp_path: Path, model: str, method: dict[str, Any]) -> None:
    def of(name: str) -> FinetuneConfig:
        values = config_of(tmp_path, model, method, name=name, parallel={"precision": "fp32"}).model_dump()
        values["model"]["overrides"] = (
            dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if model == "gpt2" else {}
        )
        return FinetuneConfig.model_validate(values)

    rows, beside = trajectory(of("ours"), 2), of("plain")
    for row, (loss, norm) in zip(rows, resident_ranks(plain_peft, 1, beside.model_dump(), STEPS)[0], strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_run_goes_on_beside_the_very_files_it_began_with(tmp_path: Path) -> None:
    """Moved they are found by `model.path`; one number changed is refused by the name of the file."""
    import shutil

    config = config_of(tmp_path, "llama", LORA)
    whole = trajectory(config_of(tmp_path, "llama", LORA, name="whole"), 1)
    trajectory(config, 1, stop_after=3)
    base, moved = tmp_path / "base-llama", tmp_path / "moved"
    shutil.copytree(base, moved)
    file = moved / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    values = config.model_dump()
    values["model"]["path"] = str(moved)
    there = FinetuneConfig.model_validate(values)
    file.write_bytes(content)
    with pytest.raises(AssertionError, match="model.safetensors is not the file that this run's adapters"):
        trajectory(there, 2)
    with pytest.raises(Exception, match="is not the file that these adapters were trained on"):
        load_for_inference(run_dir(config), torch.device("cpu"), base=str(moved))
    length = int.from_bytes(content[:8], "little")  # of the header, which may end in spaces
    file.write_bytes((length + 8).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 8 + content[8 + length :])
    with pytest.raises(ResumeError, match="model.safetensors is not the file"):  # by its size: no rank is started
        prepare(there, 1)
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.rmtree(base)
    assert trajectory(there, 1) == whole
    model, _ = load_for_inference(run_dir(config), torch.device("cpu"))
    assert model.dtype == torch.float64 or model.dtype == torch.float32


COMMITS = ("0" * 39 + "1", "0" * 39 + "2")


def _with_cache(cache: str, values: dict[str, Any], stop_after: int | None) -> None:
    from huggingface_hub import constants

    with mock.patch.object(constants, "HF_HUB_CACHE", cache):
        train_rank(values, stop_after)


def _segment_again(config: FinetuneConfig, directory: Path) -> FinetuneConfig:
    """The run that an audit of the first steps trains."""
    place = RunDir.of(config)
    return repeat_of(config, place, choose_segment(place, 0, 2), directory, use_cache=False)


def test_a_base_on_the_hub_is_that_of_the_commit_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another commit has come since: the run goes on beside the first, and its export names it."""
    import shutil

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config_of(tmp_path, "llama", LORA)
    repository = tmp_path / "hub" / "models--someone--some-model"
    (repository / "refs").mkdir(parents=True)

    def newest(commit: str, factor: float) -> None:
        place = repository / "snapshots" / commit
        shutil.copytree(tmp_path / "base-llama", place)
        tensors = {key: tensor * factor for key, tensor in load_file(place / "model.safetensors").items()}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-6 * factor}))
        (repository / "refs" / "main").write_text(commit)

    def of(name: str) -> FinetuneConfig:
        values = config_of(tmp_path, "llama", LORA, name=name).model_dump()
        values["model"]["path"] = "someone/some-model"
        return FinetuneConfig.model_validate(values)

    def rows(name: str, stop_after: int | None = None) -> list[dict[str, Any]]:
        resident_ranks(_with_cache, 1, str(tmp_path / "hub"), of(name).model_dump(), stop_after)
        return read_trajectory(run_dir(of(name)) / "metrics.jsonl")

    newest(COMMITS[0], 1.0)
    whole = rows("whole")
    rows("run", stop_after=3)
    newest(COMMITS[1], 0.9)
    assert rows("run") == whole
    assert rows("later", stop_after=1) != whole[:1]
    assert _segment_again(of("run"), tmp_path / "audit").model.revision == COMMITS[0], "as an audit trains it again"
    publish(find_checkpoint(run_dir(of("run"))), tmp_path / "adapter", ExportConfig())
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("someone/some-model", COMMITS[0])


def _assembled(config: FinetuneConfig, prepared: Any, standing: Any, seen: dict[str, Path]) -> str:
    """How it was filled, or why not, where ranks other than 0 see these directories in place of the files'."""
    if dist.get_rank():
        origin = prepared.origin
        replaced = {each: replace(getattr(origin, each), directory=seen[each]) for each in seen if each != "adapter"}
        adapter = replace(prepared.adapter.files, directory=seen["adapter"]) if "adapter" in seen else None
        prepared = replace(prepared, origin=replace(origin, **replaced))
        if adapter is not None:
            prepared = replace(prepared, adapter=replace(prepared.adapter, files=adapter))
    try:
        mode = fill_mode(config, prepared.origin, prepared.adapter)
        assemble(config, prepared, standing, torch.device("cpu"))
    except ModelError as error:
        return str(error)
    return mode


def test_nodes_with_copies_of_their_own(tmp_path: Path) -> None:
    """Equal copies are used; one number that differs is found, although names and sizes are the same."""
    import shutil

    config_of(tmp_path, "llama", LORA)
    equal, other = tmp_path / "equal", tmp_path / "other"
    for copy in (equal, other):
        shutil.copytree(tmp_path / "base-llama", copy)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    for kind, method in (("full", {"type": "full"}), ("lora", LORA)):
        config = config_of(tmp_path, "llama", method, name=kind)
        begun = prepare(config, 2)
        assert resident_ranks(_assembled, 2, config, *begun, {"stored": equal}) == ["sharded"] * 2
        for said in resident_ranks(_assembled, 2, config, *begun, {"stored": other}):
            assert "model.safetensors is not the same file for rank 1 as for rank 0" in said


def test_a_rank_that_does_not_see_what_there_is_gets_it_from_rank_0(tmp_path: Path) -> None:
    """An adapter to begin with, and the base of a checkpoint of adapters."""
    first = config_of(tmp_path, "llama", LORA, train={**TRAIN, "max_steps": 1})
    trajectory(first, 1)
    publish(find_checkpoint(run_dir(first)), tmp_path / "adapter", ExportConfig())
    nowhere = Path("/nowhere/to/be/seen")
    again = config_of(tmp_path, "llama", {**LORA, "adapter": str(tmp_path / "adapter")}, name="again")
    assert resident_ranks(_assembled, 2, again, *prepare(again, 2), {"adapter": nowhere}) == ["rank0"] * 2
    values = config_of(tmp_path, "llama", {"type": "full"}, name="merged").model_dump()
    values["model"]["path"] = checkpoints(run_dir(first))[-1].path
    merged = FinetuneConfig.model_validate(values)
    assert resident_ranks(_assembled, 2, merged, *prepare(merged, 2), {"base_files": nowhere}) == ["rank0"] * 2
    values["method"] = config_of(tmp_path, "llama", LORA).method.model_dump()
    with pytest.raises(ModelError, match=r"which its run removes one day.* DIRECTORY --merge`\), and set"):
        prepare(FinetuneConfig.model_validate(values), 2)


def test_what_is_said_about_an_adapter_that_others_may_not_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    config = config_of(tmp_path, "llama", {**LORA, "dora": True}, train={**TRAIN, "max_steps": 1})
    trajectory(config, 1)
    publish(find_checkpoint(run_dir(config)), tmp_path / "adapter", ExportConfig())
    assert "this adapter has DoRA: for them, merge it" in caplog.text
    shutil.copytree(tmp_path / "base-llama", tmp_path / "another")
    values = config.model_dump()
    values["run"]["name"], values["model"]["path"] = "again", str(tmp_path / "another")
    values["method"]["adapter"] = str(tmp_path / "adapter")
    prepare(FinetuneConfig.model_validate(values), 1)
    assert f"is of {tmp_path / 'base-llama'}, and model.path is {tmp_path / 'another'}" in caplog.text
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="is a directory here, and who loads the adapter .* set export.merge=true"):
        publish(find_checkpoint(run_dir(config)), tmp_path / "adapter", ExportConfig(push="someone/adapter"))
    assert not (tmp_path / "adapter").exists()


def test_a_run_whose_names_were_written_in_another_order_goes_on(tmp_path: Path) -> None:
    """Checkpoints of before have them as they were written."""
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.run.resume import Resumed, check_same_run

    config = config_of(tmp_path, "llama", {**LORA, "target_modules": ["v_proj", "q_proj"]})
    prepared, _ = prepare(config, 1)
    assert prepared.identity["method"]["target_modules"] == ["q_proj", "v_proj"]
    before = {**prepared.identity, "method": {**prepared.identity["method"], "target_modules": ["v_proj", "q_proj"]}}
    trajectory(config, 1, stop_after=3)
    found = Resumed(checkpoint=checkpoints(run_dir(config))[-1], state=RunState(identity=before), damaged={})
    check_same_run(found, prepared.identity, {})
    other = {**before, "method": {**before["method"], "target_modules": ["v_proj", "k_proj"]}}
    with pytest.raises(ResumeError, match=r"method\.\w+: was"):
        check_same_run(replace(found, state=RunState(identity=other)), prepared.identity, {})


def test_a_run_that_has_adapters_which_its_expression_does_not_match_is_refused_with_a_way_over(tmp_path: Path) -> None:
    """Older versions let PEFT take it for last names where experts were linear layers."""
    expression, sections = r"model\.layers\.1\..*q_proj", {"parallel": {"precision": "fp32"}}
    as_it_was = config_of(tmp_path, "mixtral", {**LORA, "target_modules": ["q_proj"]}, **sections)
    trajectory(as_it_was, 1, stop_after=2)
    state = Path(checkpoints(run_dir(as_it_was))[-1].path) / "state.json"
    put("state.json", "identity", "method", "target_modules", to=expression)(state.parent)
    with_hashes(state.parent)
    with pytest.raises(ResumeError, match=r"adapts model\.layers\.0\.self_attn\.q_proj .*=\[q_proj\]; to train"):
        prepare(config_of(tmp_path, "mixtral", {**LORA, "target_modules": expression}, **sections), 1)
    as_written = config_of(tmp_path, "mixtral", {**LORA, "target_modules": expression}, name="again", **sections)
    held = CheckpointWeights(checkpoints(run_dir(as_it_was))[-1]).shapes()
    put_beginning(RunDir.of(as_written), RunState(), adapted_modules(held))  # as an audit does
    with pytest.raises(ResumeError, match="the run adapted other modules than the expression matches"):
        prepare(as_written, 1)
    put_beginning(RunDir.of(as_written), RunState(), adapted_modules(name for name in held if "layers.1" in name))
    prepare(as_written, 1)
    publish(find_checkpoint(run_dir(as_it_was)), tmp_path / "export", ExportConfig())
    method = {**LORA, "target_modules": ["q_proj"], "adapter": str(tmp_path / "export")}
    prepared, _ = prepare(config_of(tmp_path, "mixtral", method, name="over", **sections), 1)
    assert prepared.adapter is not None and len(prepared.adapter.key_of) == 4


def test_a_checkpoint_is_as_large_as_the_adapters_and_their_state(tmp_path: Path) -> None:
    """Of a rank at which the 1.5 kB that torch writes around each of the 56 pieces are few."""
    sections: Any = {"train": {**TRAIN, "max_steps": 1}, "parallel": {"precision": "fp32"}}
    config = config_of(tmp_path, "llama", {**LORA, "rank": 2000, "alpha": 1}, **sections)
    trajectory(config, 1)
    found = checkpoints(run_dir(config))[-1]
    useful = sum(tensor.nbytes for tensor in tensors_in(found).values())
    assert useful == 3 * 4 * 2000 * 2 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 64)) + 4 * 28
    assert sum(piece.stat().st_size for piece in pieces_of(found)) < 1.05 * useful


def test_rows_of_new_tokens_are_trained_with_their_modules_or_stay(tmp_path: Path) -> None:
    """What the warning says: without `modules_to_save` they end as they begin, to the bit; with it worlds agree."""
    ends, rows = {}, []
    for world, saved in ((2, []), (1, ["embed_tokens", "lm_head"]), (2, ["embed_tokens", "lm_head"])):
        name = f"{world}-{len(saved)}"
        method = {**LORA, "modules_to_save": saved}
        values = config_of(tmp_path, "llama", method, name=name, train=FEW).model_dump()
        values["model"]["add_tokens"] = [{"text": "tram"}]
        config = FinetuneConfig.model_validate(values)
        rows.append(trajectory(config, world))
        publish(find_checkpoint(run_dir(config)), tmp_path / name, ExportConfig(merge=True, dtype="fp32"))
        ends[name] = load_file(tmp_path / name / "model.safetensors")
    stored = load_file(tmp_path / "base-llama" / "model.safetensors")
    for weight in ("model.embed_tokens.weight", "lm_head.weight"):
        begun = stored[weight].double().mean(0).float()
        assert torch.equal(ends["2-0"][weight][64], begun)
        assert torch.allclose(ends["2-2"][weight], ends["1-2"][weight], rtol=1e-6)
    assert not torch.allclose(ends["2-2"]["lm_head.weight"][64], begun, rtol=1e-3)
    assert largest_difference(*rows[1:], "loss") < 1e-8


def test_a_head_that_is_the_embedding_is_not_trained_apart(tmp_path: Path) -> None:
    for model, name in (("gpt2", "lm_head"), ("qwen3", "embed_tokens")):
        with pytest.raises(ConfigError, match=f"method.modules_to_save: '{name}' of a .* shares its weight"):
            prepare(config_of(tmp_path, model, {**LORA, "modules_to_save": [name]}), 1)


@pytest.mark.slow
def test_an_adapter_goes_on_from_its_directory(tmp_path: Path) -> None:
    """A run that begins with another's exported adapter begins where that one ended."""
    sections: Any = {"parallel": {"precision": "fp32"}}
    first = config_of(tmp_path, "llama", METHODS["dora"], **sections)
    trajectory(first, 2)
    publish(find_checkpoint(run_dir(first)), tmp_path / "adapter", ExportConfig())
    again = config_of(
        tmp_path, "llama", {**METHODS["dora"], "adapter": str(tmp_path / "adapter")}, name="again",
        optim={"lr": 1e-30, "weight_decay": 0.0}, **sections,
    )  # fmt: skip
    trajectory(again, 3)
    other = {**METHODS["dora"], "alpha": 9, "adapter": str(tmp_path / "adapter")}
    with pytest.raises(ModelError, match=r"has alpha=8, and method.alpha is 9: set it to 8"):
        prepare(config_of(tmp_path, "llama", other, name="other", **sections), 1)
    ends = [tensors_in(checkpoints(run_dir(each))[-1]) for each in (first, again)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0] if name.startswith("model."))


def test_frozen_weights_do_not_change(tmp_path: Path) -> None:
    method = {"type": "freeze", "trained": [r"layers\.1\.", "lm_head"]}
    sections: Any = {"parallel": {"precision": "bf16"}}
    config = config_of(tmp_path, "llama", method, **sections)
    rows = trajectory(config, 2)
    tensors = tensors_in(checkpoints(run_dir(config))[-1])
    first = tensors_in(checkpoints(run_dir(config))[0])
    for name, tensor in tensors.items():
        trained = "layers.1." in name or "lm_head" in name
        if name.startswith("model."):
            assert tensor.dtype == (torch.float32 if trained else torch.bfloat16)
            assert torch.equal(tensor, first[name]) == (not trained), name
        else:
            assert trained, f"{name}: there is no state of what is not trained"
    again = config_of(tmp_path, "llama", method, name="again", **sections)
    trajectory(again, 2, stop_after=3)
    assert trajectory(again, 2) == rows


@pytest.mark.parametrize(
    ("method", "many"), [pytest.param({"type": "full"}, 21, marks=SLOW), (METHODS["dora"], 14)], ids=["full", "dora"]
)
def test_the_mean_of_checkpoints_is_that_of_their_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: dict[str, Any], many: int
) -> None:
    """Adapters are merged before: a mean of their matrices would be something else."""
    from transformers import AutoModelForCausalLM

    from raytune_fsdp.cli.main import main

    saves = {**SAVES, "keep_last": None}
    config = config_of(tmp_path, "llama", method, parallel={"precision": "fp32"}, checkpoint=saves)
    trajectory(config, 1)
    for wrong, message in (
        (["--steps", "2", "3"], "has no checkpoint of step 3 (it has 2, 4)"),
        (["--steps", "2"], "has only the checkpoint of step 2: the mean of one is an export of it"),
        (["--last", "1"], "--last 1 must be at least 2"),
    ):
        assert main(["average", str(run_dir(config)), str(tmp_path / "mean"), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["average", str(run_dir(config)), str(tmp_path / "mean"), "--steps", "4", "2", "--dtype", "fp32"]) == 0
    assert "exported the mean of steps 2, 4 to" in capsys.readouterr().out
    each = []
    for checkpoint in (checkpoints(run_dir(config))[0], checkpoints(run_dir(config))[-1]):
        publish(checkpoint, tmp_path / str(checkpoint.step), ExportConfig(merge=True, dtype="fp32"))
        each.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(checkpoint.step)).state_dict())
    mean = AutoModelForCausalLM.from_pretrained(tmp_path / "mean").state_dict()
    changed = 0
    for name, tensor in mean.items():
        assert torch.equal(tensor, ((each[0][name].double() + each[1][name].double()) / 2).float())
        changed += not torch.equal(each[0][name], each[1][name])
    assert changed == many, "seven layers in each of two blocks; or two norms as well, and three at the ends"
