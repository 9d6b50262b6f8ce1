"""Count the kernels of a training step: in layers, as they are and compiled, and what stays outside of graphs.

    python -m benchmarks.kernels [--only LoRA] [--out benchmarks/results/kernels.json]

Nothing is timed, no code is compiled, and no GPU is needed. A step of an 8B (full, LoRA) and of a 30B with 128 experts
goes over tensors without data, as a plan traces it: one rank, one sample of 4,096 tokens, nothing computed again. Calls
are counted; those of layers are divided by their number, in backward with the embedding's and the gradient's norm. A
layer then goes through torch.compile, forward and backward, up to inductor's schedule for a GPU (an H100's
properties), whose nodes are counted. What is in no layer, and what FSDP copies around them, stays eager. Attention is
one call here; FlashAttention launches one kernel forward and three backward.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, record_original_output_strides
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

from benchmarks.gpu.train_step import architecture_of
from benchmarks.inductor import Count, scheduled_for_gpu
from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import inputs_of
from raytune_fsdp.model.attention.flash import load
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.model.network import build_network
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict import memory
from raytune_fsdp.predict.subject import ModelSpec, bundled
from raytune_fsdp.predict.trace import trace as traces
from raytune_fsdp.predict.trace.live import MemoryTrace
from raytune_fsdp.predict.trace.work import NOTHING, name_of

TOKENS = 4096
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B, full": ("8b", {"type": "full"}),
    "8B, LoRA": ("8b", {"type": "lora", "rank": 16, "alpha": 32}),
    "30B with experts, full": ("Qwen/Qwen3-30B-A3B", {"type": "full"}),
}


def config_of(case: str) -> FinetuneConfig:
    model, method = CASES[case]
    architecture = bundled()[model]["config"] if "/" in model else architecture_of(model)
    return FinetuneConfig.model_validate({
        "run": {"name": "counted"},
        "model": {"init": "random", "tokenizer": "none", "architecture": architecture},
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": TOKENS},
        "train": {"max_steps": 1, "global_batch": 1, "micro_batch": 1},
        "parallel": {"precision": "bf16", "compile": False},
        "method": method,
    })  # fmt: skip


class _Named(MemoryTrace):
    """Notes each operation's name, and after how many marks it came."""

    names: list[tuple[int, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _Named.names = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What only looks at something in another way, or takes memory, starts no kernel.
        if not (func.is_view or name_of(func) in NOTHING or func.namespace in ("prim", "profiler")):
            _Named.names.append((len(self.timeline.marks), func._schema.name))
        return super().__torch_dispatch__(func, types, args, kwargs)


def by_operation(case: str) -> tuple[dict[str, dict[str, int]], int]:
    """The operations of each part of a step of the whole network, by name; and how many layers it has."""
    config = config_of(case)
    spec, plan = ModelSpec.of(config), resolve(config, 1)
    with mock.patch.object(traces, "MemoryTrace", _Named):
        found = traces.trace(config, spec.hf_config, spec.needs, plan, memory=10**15)
    marks = [mark.name for mark in found.timeline.marks]
    phases: dict[str, Counter[str]] = {name: Counter() for name in marks}
    for place, name in _Named.names:
        if place:
            phases[marks[place - 1]][name] += 1
    parts: dict[str, Counter[str]] = {}
    for phase in memory.all_phases(found, phases):
        word = phase.split()[0]
        part = {"forward": "layer, forward", "backward": "layer, backward", "update": "update"}.get(word, "outside")
        parts.setdefault(part, Counter()).update(phases[phase])
    return {part: dict(names.most_common()) for part, names in parts.items()}, len(found.stands_for)


class _Begins(Exception):
    """A layer is called."""


def compiled_layer(case: str) -> dict[str, Count]:
    """What inductor schedules for a layer, forward and backward."""
    config = config_of(case)
    spec = ModelSpec.of(config)
    network = build_network(copy.deepcopy(spec.hf_config), config, ()).to(torch.bfloat16).train()
    load(traces.assume_kernels(config, spec.needs, "cuda", network)["attention"].name)  # reads a signature
    layer = layers_of(network)[1]
    called: dict[str, Any] = {}

    def begins(_: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        called.update(args=args, kwargs=kwargs)
        raise _Begins

    hook = layer.register_forward_pre_hook(begins, with_kwargs=True)
    batch = traces.full_batches(config, spec.hf_config, 1).micro_batches[0]
    ids, positions = batch.input_ids.to("meta"), batch.position_ids.to("meta")
    borders = replace(batch.borders, starts=batch.borders.starts.to("meta"))
    with suppress(_Begins):
        network(**inputs_of(network, ids, positions, borders))
    hook.remove()
    found: list[Count] = []

    def count(module: Any, example_inputs: Any, **_: Any) -> Any:
        with V.set_fake_mode(next(each.fake_mode for each in example_inputs if isinstance(each, FakeTensor))):
            record_original_output_strides(module)
            _recursive_post_grad_passes(module, is_inference=False)
        outputs = [getattr(each, "meta", {}).get("val") for each in module.graph.find_nodes(op="output")[0].args[0]]
        found.append(scheduled_for_gpu(module, example_inputs, None))

        def run(_: Any) -> list[Any]:
            return [
                torch.empty(each.shape, dtype=each.dtype) if isinstance(each, torch.Tensor) else each
                for each in outputs
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=count)

    # Memory that nobody touches takes no room; on the meta device torch cannot divide the graph.
    layer.to_empty(device="cpu")
    here = partial(torch.empty_like, device="cpu")
    (states, *others), kwargs = tree_map_only(torch.Tensor, here, (called["args"], called["kwargs"]))
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)(
            states.detach().requires_grad_(), *others, **kwargs
        )
    forward, backward = found
    return {"forward": forward, "backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases with such a word in their name")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for case in CASES:
        if not any(word in case for word in arguments.only):
            continue
        parts, layers = by_operation(case)
        compiled = compiled_layer(case)
        copied = Counter[str]()
        for part in parts.values():
            copied.update({name: many for name, many in part.items() if name.startswith(("fsdp::", "c10d::"))})
        each: dict[str, Any] = {
            "layers": layers,
            "operations_of_a_layer": {
                way: sum(parts[f"layer, {way}"].values()) / layers for way in ("forward", "backward")
            },
            "names_in_a_layer": {
                way: {name: many / layers for name, many in parts[f"layer, {way}"].items()}
                for way in ("forward", "backward")
            },
            "kernels_of_a_compiled_layer": {way: count._asdict() for way, count in compiled.items()},
            "outside_of_layers": parts["outside"],
            "update": parts["update"],
            "copied_by_fsdp": dict(copied),
        }
        result[case] = each
        operations, kernels = each["operations_of_a_layer"], {way: count.kernels for way, count in compiled.items()}
        print(
            f"{case:25} {layers} layers: {operations['forward']:.1f} and {operations['backward']:.1f} operations, "
            f"{kernels['forward']} and {kernels['backward']} kernels compiled; outside "
            f"{sum(parts['outside'].values())}, update {sum(parts['update'].values())}",
            flush=True,
        )
    if arguments.out:
        write_result(arguments.out, {"what": "kernels of a step, by count", "tokens": TOKENS, "cases": result})


if __name__ == "__main__":
    main()
