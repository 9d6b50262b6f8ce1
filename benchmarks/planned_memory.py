"""What the planner says of a rank's memory, beside what real steps of real ranks take.

    python -m benchmarks.planned_memory [--only NAME ...] [--out benchmarks/results/planned_memory.json]

Each case is assembled as a run assembles it, on ranks over gloo with one thread each, and trains two steps on the
batches that the planner takes: full ones. The planner sees only the config. Of rank 0 three things are compared:

- *Between steps*: the storages of weights, buffers and optimizer state, added up. Must be the same to the byte.
- *Peak*: torch.profiler is on in both steps (`profile_memory`), and every allocation and every free of torch's CPU
  allocator in the second one is replayed in order of time. The most that is added above the level at which the step
  begins, plus what is there between steps, is the peak. Nothing of the tracker that predicts is in it.
- *Collectives*: what those of the first step move, counted as they are called, beside `parallel.traffic_of`. Must be
  the same to the byte.

The peak is given twice. `raw` is that of all events. CPU kernels take memory for themselves while they compute (oneDNN
repacks 16-bit matrices for a product, attention has buffers for each thread), which no tensor ever has; a GPU's kernels
differ in that. The planner predicts the memory of tensors. So `tensors`, which it is held against, leaves out what one
ATen operator allocates itself and frees before it returns, if no operator that it calls allocates anything: its
allocation and its free have the same innermost event. The planner is given 5 % or 8 MiB.

`LATER` names the cases that were chosen when planner and script were done and no case was changed any more.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.collectives import KINDS, Collectives
from benchmarks.ranks import one_step, run_ranks
from benchmarks.record import origin, write_result
from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.shared_batches import own_parts
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.memory import memory_of
from raytune_fsdp.predict.speed import moved_in_layers, phases_of
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import full_batches, sharding_of, trace
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.loop import RankRun
from raytune_fsdp.step.parallel import memory_of as memory_of_device
from tests.runs import prepare_on_rank0

CPU = torch.device("cpu")
MIB = 2**20
SHARE, SLACK = 0.05, 8 * MIB
"""How far the peak may be from what is planned: the larger of the two."""

_STEP = "the measured step"
_ROWS = 64


def llama(width: int, layers: int, vocabulary: int = 8192, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": width // 32, "num_key_value_heads": width // 64,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, **fields,
    }  # fmt: skip


LORA = {"type": "lora", "rank": 8, "alpha": 16}
QLORA = {**LORA, "type": "qlora"}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tiny, alone": (
        1,
        llama(64, 2, 1024),
        {"parallel": {"precision": "fp32"}},
    ),
    "tiny, full_shard": (
        2,
        llama(64, 6, 1024),
        {"parallel": {"precision": "bf16", "activation_checkpointing": "full"}, "train": {"global_batch": 8}},
    ),
    "10M, shard_grad_op": (
        2,
        llama(256, 8),
        {"parallel": {"precision": "fp32", "strategy": "shard_grad_op", "activation_checkpointing": "selective"}},
    ),
    "10M, hybrid_shard": (
        4,
        llama(256, 8),
        {"parallel": {"precision": "bf16", "strategy": "hybrid_shard", "shard_size": 2}},
    ),
    "40M, replicate": (
        2,
        llama(512, 8),
        {"parallel": {"precision": "bf16", "strategy": "replicate", "activation_checkpointing": "full"}},
    ),
    "40M, QLoRA": (
        1,
        llama(512, 8),
        {"parallel": {"precision": "bf16"}, "method": QLORA},
    ),
    "120M, LoRA": (
        4,
        llama(768, 14, 16384),
        {"parallel": {"precision": "fp32", "activation_checkpointing": "selective"}, "method": LORA},
    ),
    "450M, LoRA": (
        2,
        llama(1280, 20, 32768),
        {"parallel": {"precision": "bf16", "activation_checkpointing": "full"}, "method": LORA, "seq_len": 256},
    ),
    "20M GPT-2, hybrid_shard": (
        4,
        {"model_type": "gpt2", "vocab_size": 8192, "n_embd": 384, "n_layer": 8, "n_head": 6, "n_positions": 1024},
        {
            "parallel": {
                "precision": "bf16",
                "strategy": "hybrid_shard",
                "shard_size": 2,
                "activation_checkpointing": "selective",
            },
            "train": {"global_batch": 16},
        },
    ),
    "40M Gemma 3, QLoRA": (
        2,
        {
            "model_type": "gemma3_text",
            "vocab_size": 16384,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 2048,
        },
        {"parallel": {"precision": "bf16", "wrap": 2}, "method": QLORA, "seq_len": 768},
    ),
    # A sample's tokens over two and over four ranks; with four, keys and values travel twice.
    "10M, sequence 2": (
        2,
        llama(256, 8),
        {"parallel": {"precision": "bf16", "mesh": {"sequence": 2}}, "seq_len": 1024},
    ),
    "10M, sequence 4": (
        4,
        llama(256, 8, num_key_value_heads=2),
        {
            "parallel": {"precision": "bf16", "mesh": {"sequence": 4}, "activation_checkpointing": "full"},
            "seq_len": 2048,
        },
    ),
    # Every layer on two ranks; then with its shards on two others, and each sample as well. (Experts are computed on a
    # CPU in another way than the planner counts.)
    "10M, tensor 2": (
        2,
        llama(256, 8),
        {"parallel": {"precision": "bf16", "mesh": {"tensor": 2}}},
    ),
    "40M, tensor 2, LoRA": (
        4,
        llama(512, 8),
        {"parallel": {"precision": "bf16", "mesh": {"tensor": 2}, "activation_checkpointing": "full"}, "method": LORA},
    ),
    "10M, sequence 2, tensor 2": (
        4,
        llama(256, 8),
        {"parallel": {"precision": "bf16", "mesh": {"sequence": 2, "tensor": 2}}, "seq_len": 1024},
    ),
}
"""World, architecture, sections of the config."""

LATER = ("20M GPT-2, hybrid_shard", "40M Gemma 3, QLoRA")


def config_of(directory: Path, architecture: Mapping[str, Any], sections: Mapping[str, Any], world: int) -> Any:
    """A run of a few steps on rows that nobody trains on."""
    rows = directory / "rows.jsonl"
    chosen = copy.deepcopy(dict(sections))
    length = chosen.pop("seq_len", 512)
    if not rows.exists():
        row = json.dumps({"input_ids": [index % 500 for index in range(length)]})
        rows.write_text(f"{row}\n" * _ROWS)
    values: dict[str, Any] = {
        "run": {"name": "planned", "storage": str(directory)},
        "model": {"init": "random", "architecture": dict(architecture), "tokenizer": str(TOKENIZER)},
        "data": {"train": [{"path": str(rows), "format": {"type": "tokens", "labels": None}}], "seq_len": length},
        "train": {"global_batch": 2 * world, "micro_batch": 2, "max_steps": 3},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"launch": "local", "device": "cpu"},
        "export": {"at_end": False},
    }
    if "method" in chosen:  # adapters are beside weights of a model
        base = directory / "base"
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.bfloat16)
        network.save_pretrained(base)
        values["model"] |= {"init": "pretrained", "path": str(base), "architecture": None}
    for section, fields in chosen.items():
        values[section] = {**values.get(section, {}), **fields}
    return FinetuneConfig.model_validate(values)


# --- What is planned --------------------------------------------------------------------------------------------------


def planned(config: FinetuneConfig, world: int) -> dict[str, Any]:
    """Of rank 0, from the config alone."""
    spec, plan, here = ModelSpec.of(config), resolve(config, world), memory_of_device(CPU)
    rounds = plan.division.full_rounds
    traced = trace(config, spec.hf_config, spec.needs, plan, memory=here, device="cpu", gloo=True)
    memory = memory_of(traced)
    exchanged = (sharding_of(config, plan, spec, "cpu", here) or {}).get("attention_bytes", 0)
    moved = 0 if traced.traffic is None else traced.traffic.bytes
    added, _ = moved_in_layers(traced, dict(phases_of(traced)), rounds, "sum")
    summed = added * 2 * (plan.layout.tensor - 1) / plan.layout.tensor
    return {
        "parameters": spec.numbers,
        "between_steps": memory.start["weights"] + memory.start["optimizer"],
        "peak": memory.total,
        "where": memory.where,
        "parts": dict(memory.peak),
        "collectives": round(moved + exchanged + summed),
    }


# --- What is measured -------------------------------------------------------------------------------------------------


def measured(values: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of this rank. Collective: needs the process group."""
    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    parts = assemble(config, prepared, standing, CPU)
    parts.optimizer.init_state()
    whole = full_batches(config, prepared.hf_config, parts.plan.division.full_rounds)
    (batches,) = own_parts([whole], parts.plan.layout, torch.distributed.get_rank())
    # In both steps: a free is only recorded of what was allocated while the profiler was on.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        with Collectives() as collectives:
            _step(parts, batches)
        between = _kept(parts)
        with record_function(_STEP):
            _step(parts, batches)
    assert _kept(parts) == between, "a step changes what stays"
    events = [*_events(profiler.profiler.kineto_results.experimental_event_tree())]
    return {
        "between_steps": between,
        "raw": between + highest(events, scratch=True),
        "tensors": between + highest(events, scratch=False),
        "collectives": round(sum(collectives.bytes.get(kind, 0) for kind in (*KINDS, "exchanged", "summed"))),
    }


def _step(parts: RankRun, batches: StepBatches) -> None:
    one_step(parts, batches)


def _kept(parts: RankRun) -> int:
    """Bytes of what stays from step to step, counting memory that tensors share once."""
    tensors = [*parts.model.parameters(), *parts.model.buffers(), *parts.optimizer.state_tensors().values()]
    local = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in _plain(local)}
    return sum(storages.values())


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from (tensor.detach() for tensor in tensors)


class _Event:
    """An allocation or a free."""

    __slots__ = ("at", "operator", "pointer", "size")

    def __init__(self, at: int, size: int, pointer: int, operator: Any) -> None:
        self.at, self.size, self.pointer, self.operator = at, size, pointer, operator


def _events(roots: Iterable[Any]) -> Iterator[_Event]:
    """Of the measured step, in order of time."""
    tag = torch._C._profiler._EventType
    every, begin, end = [], 0, 0
    waiting = [(root, None) for root in roots]
    while waiting:
        event, parent = waiting.pop()
        if event.tag == tag.Allocation:
            every.append(_Event(event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, parent))
        elif event.name == _STEP:
            begin, end = event.start_time_ns, event.end_time_ns
        waiting += [(child, event) for child in event.children]
    assert begin, "the step was not recorded"
    yield from sorted((each for each in every if begin <= each.at < end), key=lambda each: each.at)


def highest(events: Iterable[_Event], *, scratch: bool) -> int:
    """The most that is added; without `scratch`, not what only the inside of one operator has.

    What a thread of gloo's gives back last, after a message between ranks, the profiler does not see. That it was given
    back shows at the latest when its place is taken again."""
    events = [*events]
    left_out = set() if scratch else _scratch(events)
    now = most = 0
    held: dict[int, int] = {}
    for number, event in enumerate(events):
        before = held.pop(event.pointer, 0)
        now -= before if event.size > 0 else 0
        if number in left_out:
            continue
        now += event.size
        most = max(most, now)
        if event.size > 0:
            held[event.pointer] = event.size
    return most


def _scratch(events: list[_Event]) -> set[int]:
    """The numbers of the events by which operators take memory for themselves and give it back."""
    allocated: dict[int, int] = {}
    found = set()
    for number, event in enumerate(events):
        if event.size > 0:
            allocated[event.pointer] = number
            continue
        began = allocated.pop(event.pointer, None)
        if began is not None and _is_inside(events[began].operator, event.operator):
            found |= {began, number}
    return found


def _is_inside(one: Any, other: Any) -> bool:
    if one is None or other is None or one.id != other.id or not one.name.startswith("aten::"):
        return False
    waiting = [*one.children]
    tag = torch._C._profiler._EventType
    calls = [child for child in waiting if child.tag != tag.Allocation]
    while calls:
        event = calls.pop()
        if event.tag == tag.Allocation:
            return False
        calls += event.children
    return True


# --- The command ------------------------------------------------------------------------------------------------------


def compare(name: str, directory: Path) -> dict[str, Any]:
    """A case, planned and measured. Starts its ranks, and waits for them."""
    world, architecture, sections = CASES[name]
    config = config_of(directory, architecture, sections, world)
    said = planned(config, world)
    run_ranks(_write, world, config.model_dump(exclude_unset=True), str(directory / "measured.json"))
    found = json.loads((directory / "measured.json").read_text())
    row = {
        "world": world,
        "precision": config.parallel.precision,
        "method": config.method.type,
        "strategy": config.parallel.strategy,
        "activation_checkpointing": config.parallel.activation_checkpointing,
        "later": name in LATER,
        "planned": said,
        "measured": found,
        "difference": said["peak"] / found["tensors"] - 1,
        "agrees": agrees(said, found),
    }
    print(
        f"{name}: between steps {found['between_steps'] / MIB:.2f} MiB, planned {said['between_steps'] / MIB:.2f}; "
        f"peak {found['tensors'] / MIB:.2f} (raw {found['raw'] / MIB:.2f}), planned {said['peak'] / MIB:.2f} "
        f"({row['difference']:+.2%}); collectives {found['collectives']}, planned {said['collectives']}"
        f"{'' if row['agrees'] else '  DISAGREES'}",
        flush=True,
    )
    return row


def agrees(said: Mapping[str, Any], found: Mapping[str, Any], slack: int = SLACK) -> bool:
    """To the byte where nothing is to be estimated, and the peak nearly."""
    exact = all(said[what] == found[what] for what in ("between_steps", "collectives"))
    return exact and abs(said["peak"] - found["tensors"]) <= max(SHARE * found["tensors"], slack)


def _write(values: Mapping[str, Any], path: str) -> None:
    found = measured(values)
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(found))


def _others(place: Path, rows: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says of cases that were not measured now, with the date of that measurement if it is not today."""
    if not place.exists():
        return {}
    before = json.loads(place.read_text())
    kept = {name: row for name, row in before["cases"].items() if name in CASES and name not in rows}
    dated = {} if before["date"] == origin()["date"] else {"date": before["date"]}
    return {name: {**dated, **row} for name, row in kept.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as directory:
            rows[name] = compare(name, Path(directory))
    if arguments.out:
        what = "bytes of rank 0: planned from the config, and measured in a real step over gloo"
        write_result(arguments.out, {"what": what, "cases": {**_others(arguments.out, rows), **rows}})
    if not all(row["agrees"] for row in rows.values()):
        raise SystemExit("planned and measured disagree")


if __name__ == "__main__":
    main()
