"""What inductor schedules for a GPU that is not here: kernels, and the bytes that they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.config
from torch._inductor import ir
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor

GPU = torch.device("cuda", 0)
H100 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
)  # fmt: skip


class Count(NamedTuple):
    kernels: int
    nbytes: int
    products: int = 0
    """Kernels of libraries: products, attention."""

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


def scheduled_for_gpu(module: torch.fx.GraphModule, example_inputs: Sequence[Any], shape_env: Any) -> Count:
    """Lower a graph for a GPU, up to its schedule, and count that."""
    mode = next(each.fake_mode for each in example_inputs if isinstance(each, FakeTensor))

    def moved(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(moved, value))
        if not isinstance(value, FakeTensor):
            return value
        with mode:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(mode, like, GPU)

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"])
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": GPU}
    inputs = [moved(each) for each in example_inputs]
    there = GraphLowering(module, example_inputs=inputs, shape_env=shape_env)
    with (
        patch.object(DeviceProperties, "create", lambda _: H100),
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
        V.set_graph_handler(there),
        V.set_debug_handler(DebugContext()),
    ):
        there.run(*inputs)
        there.init_wrapper_code()
        there._update_scheduler()
    nodes = [each for each in there.scheduler.nodes if not isinstance(each, NopKernelSchedulerNode)]
    # A library's kernel has one node more for each of its results.
    nodes = [each for each in nodes if not isinstance(getattr(each, "node", None), ir.MultiOutput)]
    return Count(len(nodes), _moved(there), sum(isinstance(each, ExternKernelSchedulerNode) for each in nodes))


def _moved(graph: GraphLowering) -> int:
    """Return the bytes that its kernels read and write: what is made and used in one kernel alone is neither."""
    total = 0
    for node in graph.scheduler.nodes:
        own, outputs = node.get_operation_names(), node.get_outputs()
        read = {each.name for each in node.read_writes.reads if not isinstance(each, WeakDep)}
        read -= {each.get_name() for each in outputs}
        kept = {each.get_name() for each in outputs if any(user.get_name() not in own for user in each.users)}
        for name in read | kept:
            tensor = graph.graph_inputs.get(name) or graph.get_buffer(name)
            if isinstance(getattr(tensor, "layout", None), ir.MultiOutputLayout):
                continue  # all results of a library's kernel together
            total += int(graph.sizevars.optimization_hint(tensor.get_numel())) * tensor.get_dtype().itemsize
    return total
