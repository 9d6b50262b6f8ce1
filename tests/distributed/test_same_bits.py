"""With `run.exact` a run has the same bits at any number of ranks: weights, the optimizer's state, losses, norms."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

from raytune_fsdp.base.collectives import make_device_mesh
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.cli.digest import main as digest
from raytune_fsdp.cli.export import main as export
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.batches import filler
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.plan.division import Division
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.jsonl import JsonlTracker, read_evaluations, read_events, read_trajectory
from raytune_fsdp.record.names import ATTEMPT_STARTED, BITS_MAY_DIFFER, DIGESTED, SAVED
from raytune_fsdp.record.tracker import RunStart
from raytune_fsdp.run.described import why_bits_changed, why_bits_differ
from raytune_fsdp.run.open_record import _report_bits
from raytune_fsdp.step.in_order import SumsInOrder
from raytune_fsdp.step.parallel import reduce_by_sum
from tests.checkpoints import checkpoints, place_of, tensors_in
from tests.models import save_checkpoint
from tests.ranks import resident_ranks, run_ranks
from tests.runs import GPT2, LLAMA, largest_difference, make_config, train_rank, trajectory

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48, "num_local_experts": 5,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDER = {**LLAMA, "intermediate_size": 128}
OPTIM = {"lr": 3e-3, "max_grad_norm": 0.5}
CASES: dict[str, tuple[Mapping[str, Any], str, dict[str, Any]]] = {
    "gpt2": (GPT2, "fp64", {}),
    "fp32": (LLAMA, "fp32", {}),
    "bf16": (LLAMA, "bf16", {}),
    "fp16": (LLAMA, "fp16", {"train": {"max_steps": 12}}),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, "bf16", {}),
    "odd": ({**LLAMA, "hidden_size": 40, "intermediate_size": 67}, "fp32", {}),
    "experts": (MIXTRAL, "bf16", {"train": {"router_aux_loss_coef": 0.01}}),
    "lora": (LLAMA, "bf16", {"method": {"type": "lora", "rank": 4, "dropout": 0.1}}),
    "qlora": (LLAMA, "bf16", {"method": {"type": "qlora", "rank": 4, "dropout": 0.0}}),
    "freeze": (LLAMA, "bf16", {"method": {"type": "freeze", "trained": ["mlp.down_proj", "norm"]}}),
    "8-bit": (WIDER, "bf16", {"optim": {**OPTIM, "optimizer": {"type": "adamw", "moments": "8bit"}}}),
    "muon": (LLAMA, "fp32", {"optim": {**OPTIM, "optimizer": {"type": "muon"}}}),
    "adafactor": (GPT2, "fp64", {"optim": {**OPTIM, "optimizer": {"type": "adafactor"}}}),
    "plain loss": (LLAMA, "bf16", {"model": {"loss": "plain"}}),
    "kept": (
        LLAMA, "bf16",
        {
            "parallel": {"strategy": "shard_grad_op", "activation_checkpointing": "full"},
            "train": {"max_steps": None, "epochs": 1.4}, "tracking": {"documents": True},
        },
    ),
}  # fmt: skip
if torch.__version__ < "2.12":  # its FSDP takes no weights that are bytes
    del CASES["qlora"]
RARER = ("gpt2", "fp32", "bf16", "fp16", "qlora", "freeze", "8-bit", "muon", "plain loss")
"""`odd` is in fp32, `tied` in bf16, and `lora` has all of `qlora` but its base."""
OFTEN = [case for case in CASES if case not in RARER]
"""On every change: 4 s a case, all worlds together."""
SLOW = pytest.mark.slow
TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 5}
DIGESTS = 2
"""Steps from one digest to the next."""


def config_of(directory: Path, case: str, name: str, **sections: Any) -> FinetuneConfig:
    architecture, precision, more = CASES[case]
    parallel = {"precision": precision, **more.get("parallel", {})}
    chosen = {**more, "parallel": parallel, "train": {**TRAIN, **more.get("train", {})}, **sections}
    run = {"name": name.replace(" ", "-"), "exact": True, "digest_every": DIGESTS, **chosen.pop("run", {})}
    rows = {"path": str(directory / "tokens.jsonl"), "format": {"type": "tokens"}}
    chosen["data"] = {"train": [rows], "eval": [{**rows, "rows": {"limit": 40}}]}
    if "method" in chosen:
        base = directory / "base"
        if not base.exists():
            save_checkpoint(base, "llama")
        chosen["model"] = {"path": str(base), "init": "pretrained", "architecture": None}
    return make_config(directory, architecture, run=run, **chosen)


def train_each(values: Sequence[Mapping[str, Any]], stop: int | None, fault: str | None) -> None:
    if fault is not None:
        plant(fault)
    for each in values:
        train_rank(each, stop)


def plant(fault: str) -> None:
    """Have this process compute as if one of the parts of `run.exact` were missing."""
    from raytune_fsdp.model.objective import loss
    from raytune_fsdp.step import in_order, reduce_by_node, train_step
    from raytune_fsdp.step.optim import adafactor, adamw

    right, computed = in_order.SumsInOrder.next_round, train_step.micro_batch_loss

    def all_ranks(self: in_order.SumsInOrder, number: int) -> None:
        right(self, number)
        owners = self._owners
        owners[:] = [*owners, *(rank for rank in range(self._division.data_ranks) if rank not in owners)]

    def by_number(self: in_order.SumsInOrder, number: int) -> None:
        right(self, number)
        self._owners.sort()

    def whole(rows: torch.Tensor, parts: int, every: int) -> torch.Tensor:
        return torch.nn.functional.pad(rows.float().square().sum()[None].double(), (0, len(rows) * parts - 1))

    def overflowing(model: Any, batch: Any, *rest: Any) -> Any:
        found = computed(model, batch, *rest)
        return replace(found, total=found.total * float("nan")) if batch.is_filler else found

    def by_round(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **_: Any) -> None:
        got = torch.empty_like(input_tensor)
        dist.all_to_all_single(got, input_tensor, group=group)
        # FSDP adds this to the sum of earlier rounds.
        output_tensor.copy_(got.view(group.size(), -1).to(output_tensor).sum(0))

    def plainly(self: adafactor.Adafactor, squares: Any, shapes: Mapping[str, torch.Size]) -> list[torch.Tensor]:
        return self._summed([torch.cat([*squares(name)]).sum(0) for name in shapes])

    assert loss.micro_batch_loss is computed
    if "nodes of" in fault:
        per_node = int(fault.split()[-1])
        reduce_by_node.this_node = lambda: str(dist.get_rank() // per_node)  # type: ignore[assignment, return-value]
    if "filler" in fault:
        train_step.micro_batch_loss = overflowing  # type: ignore[attr-defined]
    planted: dict[str, tuple[Any, str, Any]] = {
        "fillers are added": (in_order.SumsInOrder, "next_round", all_ranks),
        "in the order of ranks": (in_order.SumsInOrder, "next_round", by_number),
        "as FSDP adds": (in_order._InOrder, "__call__", by_round),
        "as Adafactor adds": (adafactor.Adafactor, "_exactly", plainly),
        "squares by piece": (in_order, "_row_sums", whole),
        "the ends of pieces": (adamw, "_LANES", 1),
    }
    if fault in planted:
        setattr(*planted[fault])


def train(configs: Sequence[FinetuneConfig], world: int, stop: int | None = None, fault: str | None = None) -> None:
    """Train several runs, one after the other, in one group of processes."""
    ranks = resident_ranks if fault is None else run_ranks
    ranks(train_each, world, [each.model_dump() for each in configs], stop, fault, seconds=600)


def bits(config: FinetuneConfig) -> tuple[dict[str, str], list[dict[str, Any]], dict[str, float]]:
    """The hash of every tensor of the last checkpoint, and what is on record of every step and of evaluations."""
    place = Path(config.run.storage) / config.run.name
    last = checkpoints(place)[-1]
    hashes = {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors_in(last).items()
    }
    records = place / "metrics.jsonl"
    return hashes, read_trajectory(records), read_evaluations(records, last.step)


def digests_on_record(config: FinetuneConfig) -> dict[str, Any]:
    """The digests that the ranks have put into the last checkpoint, into events, and into the record of each second
    step."""
    place = Path(config.run.storage) / config.run.name
    last = checkpoints(place)[-1]
    found = read_manifest(storage_at(last.root), last.name).digest
    said = {kind: {} for kind in (SAVED, DIGESTED)}  # type: dict[str, dict[int, tuple[str, str]]]
    for each in read_events(place / "events.jsonl"):
        if each["event"] in said:
            fields = each["fields"]
            said[each["event"]][fields["step"]] = (fields["digest"], fields["everything"])
    saved, steps = said[SAVED], said[DIGESTED]
    assert saved[last.step] == (found["weights"], found["everything"]) and found["weights"] != found["everything"]
    assert [*steps] == [*range(DIGESTS, last.step + 1, DIGESTS)] and len(set(steps.values())) == len(steps)
    lines = read_trajectory(place / "metrics.jsonl")
    assert steps == {row["step"]: (row["digest"], row["digest_of_everything"]) for row in lines if "digest" in row}
    both = saved.keys() & steps.keys()
    assert all(saved[step] == steps[step] for step in both) and (last.step % DIGESTS or last.step in both)
    assert not [key for key in read_state(last).identity if "digest" in key], "it changes nothing that is learned"
    return {**found, "saved": saved, "steps": steps}


class OnOneRank(dict[str, Any]):
    """The bits of each case on one rank; of one of the rarer cases once it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(on_one_rank(directory, OFTEN))
        self._directory = directory

    def __missing__(self, case: str) -> Any:
        self.update(on_one_rank(self._directory, [case]))
        return self[case]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("alone")
    return directory, OnOneRank(directory)


def on_one_rank(directory: Path, cases: Sequence[str]) -> dict[str, Any]:
    configs = {case: config_of(directory, case, f"{case}-1") for case in cases}
    train([*configs.values()], 1)
    return {case: bits(config) for case, config in configs.items()}


def check_on_three(directory: Path, expected: Mapping[str, Any]) -> None:
    """Five micro-batches a step: with three ranks, each step has a filler."""
    configs = {case: config_of(directory, case, f"{case}-3") for case in expected}
    train([*configs.values()], 3)
    for case, config in configs.items():
        assert bits(config) == expected[case], case
        assert digests_on_record(config) == digests_on_record(config_of(directory, case, f"{case}-1")), case
        run = directory / "runs" / f"{case}-3".replace(" ", "-")
        assert digest([str(run), "--trust-places"]) == 0, f"{case}: and that of the files"


@SLOW
def test_one_rank_and_three_in_rarer_cases(tmp_path: Path) -> None:
    check_on_three(tmp_path, on_one_rank(tmp_path, [case for case in RARER if case in CASES]))


@pytest.mark.timeout(900)
def test_one_rank_and_three(alone: tuple[Path, dict[str, Any]]) -> None:
    directory, expected = alone
    check_on_three(directory, {case: expected[case] for case in OFTEN})
    runs = directory / "runs"
    assert digest([str(runs / "odd-1"), str(runs / "odd-3"), "--trust-places"]) == 0
    assert digest([str(runs / "odd-1"), str(runs / "tied-1"), "--trust-places"]) == 1


def test_numbers_that_were_changed_afterwards_are_not_those_that_the_ranks_had(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lowest bit of one number, with hashes of files that fit."""
    directory, _ = alone
    last = Path(checkpoints(directory / "runs" / "odd-1")[-1].path)
    forged = tmp_path / "checkpoints" / last.name
    shutil.copytree(last, forged)
    manifest = json.loads((forged / "manifest.json").read_text())
    (found,) = checkpoints(tmp_path)
    file, start = place_of(found, "model.model.norm.weight")
    content = bytearray(file.read_bytes())
    content[start] ^= 1
    file.write_bytes(content)
    manifest["files"][file.name]["xxh3"] = xxhash.xxh3_128_hexdigest(bytes(content))
    (forged / "manifest.json").write_text(json.dumps(manifest))
    assert digest([str(forged), "--trust-places"]) == 2
    assert "has other numbers than the ranks had: the digest of its weights is " in capsys.readouterr().err
    manifest["digest"] = {"weights": "0" * 63 + "\n", "everything": 1}
    (forged / "manifest.json").write_text(json.dumps(manifest))
    assert digest([str(forged), "--trust-places"]) == 2
    assert "manifest.json is not what was written: it has the digest '000" in capsys.readouterr().err


def test_a_run_that_is_resized(alone: tuple[Path, dict[str, Any]]) -> None:
    """From one rank to three, and then to two, after steps of which there is a digest; its last step is short."""
    directory, expected = alone
    cases = ("odd", "kept")
    configs = [config_of(directory, case, f"{case}-1-3-2") for case in cases]
    for world, stop in ((1, DIGESTS), (3, 2 * DIGESTS), (2, None)):
        train(configs, world, stop)
    for case, config in zip(cases, configs, strict=True):
        assert bits(config) == expected[case], case
        assert {DIGESTS, 2 * DIGESTS} < digests_on_record(config)["saved"].keys()
        events = read_events(Path(config.run.storage) / config.run.name / "events.jsonl")
        said = {each["fields"]["bits"] for each in events if each["event"] == ATTEMPT_STARTED}
        assert len(said) == 1 and BITS_MAY_DIFFER not in {each["event"] for each in events}


@pytest.mark.parametrize(
    ("ranks", "before", "said"),
    [
        ([{"threads": 2}, {"threads": 2}], {"threads": 2, "world_size": 9, "bits": "a"}, None),
        ([{"threads": 2}], None, None),
        ([{"threads": 2}], {"threads": 3}, None),
        ([{"threads": 2}, {"threads": 1}], None, "rank 0 has threads 2, and rank 1 has 1"),
        (
            [{"versions": {"torch": "2.14"}}], {"versions": {"torch": "2.13"}, "bits": "b"},
            "this attempt has torch '2.14', and the one before had '2.13'",
        ),
        ([{"threads": 2}], {"threads": 2, "bits": "b"}, "this attempt has another micro-batch or other kernels"),
    ],
)  # fmt: skip
def test_what_else_bits_depend_on_is_said_when_it_changes(
    ranks: list[dict[str, Any]], before: dict[str, Any] | None, said: str | None
) -> None:
    """A run from before there was a digest says nothing of it."""
    found = why_bits_differ(ranks) or why_bits_changed(ranks[0], "a", before)
    assert found is said is None or (said is not None and (found or "").startswith(said))


def test_an_attempt_whose_ranks_differed_is_told_by_the_next_one_alone(tmp_path: Path) -> None:
    """If it has saved something: a checkpoint of before it has the bits that it should have."""
    here, other, place = {"threads": 2, "versions": {}}, {"threads": 1, "versions": {}}, tmp_path / "events.jsonl"

    def attempt(number: int, ranks: Sequence[Mapping[str, Any]], resumed_from: int) -> list[Mapping[str, Any]]:
        tracker = JsonlTracker(tmp_path)
        tracker.start(RunStart(name="run", attempt=number))
        before = read_events(place)
        tracker.event(ATTEMPT_STARTED, resumed_from=resumed_from, bits="a", **ranks[0])
        _report_bits(tracker, resumed_from, ranks, "a", before)
        tracker.finish("failed")
        return [each["fields"] for each in read_events(place)[len(before) :] if each["event"] == BITS_MAY_DIFFER]

    said = "rank 0 has threads 2, and rank 1 has 1"
    assert attempt(1, [here, other], 4) == [{"step": 4, "because": said, "among_ranks": True}]
    assert attempt(2, [here, here], 4) == [] == attempt(3, [here], 4)
    assert attempt(4, [here, other], 4) == [{"step": 4, "because": said, "among_ranks": True}]
    assert attempt(5, [here, here], 9) == [{"step": 4, "because": f"in attempt 4 {said}"}]
    assert attempt(6, [here, here], 9) == []
    assert "bits after step 4 may be others" in event_in_words(BITS_MAY_DIFFER, {"step": 4, "because": said})


@pytest.mark.parametrize(
    "exports",
    [
        (("tied", "--dtype", "bf16"), ("tied", "--dtype", "fp32"), ("lora",), ("lora", "--merge")),
        pytest.param((("qlora", "--merge"),), marks=SLOW),
    ],
    ids=["of whole numbers", "of quantized ones"],
)
def test_the_digest_of_an_export_is_found_again_from_its_checkpoint(
    alone: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    exports: tuple[tuple[str, ...], ...],
) -> None:
    directory, expected = alone
    digests = set()
    for number, (case, *flags) in enumerate(exports):
        if case not in CASES:
            pytest.skip("needs torch 2.12")
        assert expected[case]
        run, place = str(directory / "runs" / f"{case}-1"), tmp_path / f"export-{number}"
        assert export([run, str(place), "--trust-places", *flags]) == 0
        capsys.readouterr()
        assert digest([str(place)]) == 0
        (found,) = (line.split()[:2] for line in capsys.readouterr().out.splitlines())
        assert digest([run, "--as-export", "--trust-places", *flags]) == 0
        lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        before = digests_on_record(config_of(directory, case, f"{case}-1"))["weights"]
        assert lines == [found, *([["weights", before]] if "--merge" in flags else [])]
        card = (place / "README.md").read_text()
        assert (
            f"of this directory have the digest `{found[1]}`" in card and f"have the digest `{before}`, at any" in card
        )
        assert (f"were merged have the digest `{before}`" in card) == ("--merge" in flags)
        digests.add(found[1])
        (file,) = place.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert digest([run, str(place), "--as-export", "--trust-places", *flags]) == 1
        assert capsys.readouterr().out.splitlines()[-1].startswith("1 of ")
    assert len(digests) == number + 1
    assert digest([run, "--merge"]) == 2
    assert "--merge says how a checkpoint would be exported: add --as-export" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault",
    [
        "nothing, but fillers overflow: filler",
        *(
            pytest.param(each, marks=SLOW)
            for each in (
                "in the order of ranks", "fillers are added", "as FSDP adds", "as Adafactor adds", "squares by piece",
                "the ends of pieces",
            )
        ),
    ],
)  # fmt: skip
def test_each_part_of_it_is_needed(alone: tuple[Path, dict[str, Any]], fault: str) -> None:
    directory, expected = alone
    name = "".join(each if each.isalnum() else "-" for each in fault)
    case = "adafactor" if "Adafactor" in fault else "odd"
    optim = {**CASES[case][2].get("optim", OPTIM), "max_skipped": 100}
    config = config_of(directory, case, name, optim=optim)
    train([config], 3, fault=fault)
    assert (bits(config) == expected[case]) == fault.startswith("nothing")


@pytest.mark.slow
def test_sums_that_are_passed_from_node_to_node_are_the_same(alone: tuple[Path, dict[str, Any]]) -> None:
    """Steps of five micro-batches begin on another rank each time, so that the turn of a node may come twice."""
    directory, expected = alone
    world, per_node = 4, 2
    cases = ("odd", "tied", "kept", "lora")
    configs = {}
    for case in cases:
        parallel = {**CASES[case][2].get("parallel", {}), "precision": CASES[case][1], "reduce": "hierarchical"}
        configs[case] = config_of(directory, case, f"{case}-{world}-by-{per_node}", parallel=parallel)
    train([*configs.values()], world, fault=f"nothing, but nodes of {per_node}")
    for case, config in configs.items():
        assert bits(config) == expected[case], case
        events = read_events(Path(config.run.storage) / config.run.name / "events.jsonl")
        assert any("inside of each" in str(each["fields"].get("reduced")) for each in events)


class _Turns(nn.Module):
    """Two weights of one size, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.each[which](x).sum()  # type: ignore[no-any-return]


def uses(order: Sequence[int]) -> str | None:
    """Sum the gradients of micro-batches that use these; return what is said of it."""
    model = _Turns()
    fully_shard(model, mesh=make_device_mesh("cpu", {"shard": dist.get_world_size()}))
    reduce_by_sum(model)
    division = Division(global_batch=2 * len(order), micro_batch=1, total_samples=None, data_ranks=2)
    sums = SumsInOrder(model, division)
    sums.start(1, torch.zeros(()))
    try:
        for number, which in enumerate(order):
            sums.next_round(number)
            model(torch.ones(2, 4), which).backward()
        sums.add(filler(1, seq_len=1, pad_id=0), torch.zeros(1, dtype=torch.float64), torch.zeros(1))
        trained = [each for each in model.parameters() if each.grad is not None]
        sums.over_ranks(trained, [local_piece(each.grad) for each in trained if each.grad is not None])
    except RuntimeError as error:
        return str(error)
    return None


def test_weights_that_are_used_in_turn_are_not_added_to_each_other() -> None:
    for order in ([0, 1], [0, 0, 1], [1, 0, 0]):
        for said in resident_ranks(uses, 2, order):
            assert said is not None and "a gradient from one micro-batch and none from another" in said, order
    assert resident_ranks(uses, 2, [0, 0, 0]) == [None, None]


@SLOW
def test_without_it_runs_are_equal_up_to_rounding(alone: tuple[Path, dict[str, Any]]) -> None:
    directory, expected = alone
    config = config_of(directory, "odd", "rounded", run={"exact": False})
    train([config], 3)
    (hashes, rows, _), (others, exactly, _) = bits(config), expected["odd"]
    assert hashes != others
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, exactly, strict=True)) < 1e-4


def test_it_goes_with_what_it_was_begun_with(alone: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = alone
    config = config_of(directory, "odd", "odd-1", run={"exact": False})
    with pytest.raises(AssertionError, match="run.exact: was True, is 'not set'"):
        train([config], 1)


@SLOW
def test_a_run_keeps_its_threads_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Three threads add products of 1,024 tokens in another order than one; a launcher gives more to fewer ranks."""
    wide = {**LLAMA, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}

    def config_with(name: str, threads: int | None) -> FinetuneConfig:
        return make_config(
            tmp_path, wide, run={"name": name, "exact": True, "threads": threads}, data={"seq_len": 512},
            parallel={"precision": "fp32"}, train={"global_batch": 4, "micro_batch": 2, "max_steps": 2},
        )  # fmt: skip

    train([config_with("one", 1)], 1)
    train([config_with("three", 3)], 1)
    resized = config_with("resized", None)
    for world, threads, stop in ((1, 3, 1), (2, 1, None)):
        run_ranks(train_with_threads, world, resized.model_dump(), threads, stop)
    one, three = (bits(config_with(name, None))[0] for name in ("one", "three"))
    assert one != three == bits(resized)[0]
    train([config_with("again", 3)], 1, stop=1)
    with pytest.raises(AssertionError, match="run.threads=1: the run began with 3"):
        train([config_with("again", 1)], 1)


def train_with_threads(values: Mapping[str, Any], threads: int, stop: int | None) -> None:
    torch.set_num_threads(threads)
    train_rank(values, stop)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"parallel": {"strategy": "hybrid_shard", "shard_size": 2}},
            "parallel.strategy=hybrid_shard with run.exact=true",
        ),
        ({"run": {"threads": 2, "exact": False}}, "run.threads=2 without run.exact"),
        ({"parallel": {"precision": "bf16_pure"}}, "set it to fp64 or fp32 or bf16 or fp16, or set run.exact=false"),
        ({"parallel": {"mesh": {"sequence": 2}}}, "parallel.mesh.sequence=2 with run.exact=true"),
        ({"parallel": {"precision": "bf16", "reduce_dtype": "bf16"}}, "parallel.reduce_dtype=bf16 with run.exact=true"),
        ({"parallel": {"defer_gradient_sync": True}}, "parallel.defer_gradient_sync=true with run.exact=true"),
    ],
)
def test_what_it_does_not_cover_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(tmp_path, LLAMA, **{**sections, "run": {"name": "x", "exact": True, **sections.get("run", {})}})


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_an_exact_run_learns_what_any_other_learns(tmp_path: Path, precision: str) -> None:
    """The optimizer gets the gradients: in fp64 it once got their squares, which all worlds agreed on."""
    wide = {"parallel": {"precision": precision}, "train": {"max_steps": 8}}
    found = [
        trajectory(make_config(tmp_path, GPT2, run={"name": f"{precision}-{exact}", "exact": exact}, **wide), 1)
        for exact in (True, False)
    ]
    bound = 1e-9 if precision == "fp64" else 1e-4
    assert largest_difference(*found, "loss") < bound and largest_difference(*found, "grad_norm") < 10 * bound
