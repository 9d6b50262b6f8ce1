"""One step of a few blocks of a network, as a rank of the run computes it, on tensors that have no data.

The network is built, spread and stepped by the code that does it in a run. The collectives are those of a process group
that talks to nobody; a rank among 16 of a 70B needs 0.8 s for this, and no memory to speak of.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.assemble import as_stored, spread
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.data.batches import FILLER_INDEX, to_batch
from raytune_fsdp.model.attention import Needs, choose, use
from raytune_fsdp.model.blocks import blocks_of
from raytune_fsdp.model.calls import PREFIX
from raytune_fsdp.model.fill import allocate
from raytune_fsdp.model.head import LossHead, choose_loss, install
from raytune_fsdp.model.network import MASTER_DTYPE, build_network, init_buffers
from raytune_fsdp.model.objective import Objective
from raytune_fsdp.optim import Optimizer, build_optimizer
from raytune_fsdp.parallel import COMPUTE_DTYPE, make_mesh, reached_by_backward, units_of
from raytune_fsdp.plan import Plan
from raytune_fsdp.planner.live import Bytes, Kind, Live, Timeline, groups_of
from raytune_fsdp.run.probe import with_memory
from raytune_fsdp.step import LossScale, train_step
from raytune_fsdp.types import Batch, Cursor, PackedSample, StepBatches

CPU = torch.device("cpu")

_MARGIN = 2
"""Units that are kept at either end of a stretch of alike ones: what is fetched ahead, and what is still on its way,
belongs to a neighbour."""

_NUMBERED = ("idx", "index", "layer_id", "layer_number", "layer_num")
"""Parts of the names under which a module keeps its place, which says nothing about its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened on a rank in a step of a few blocks."""

    timeline: Timeline
    stands_for: tuple[int, ...]
    """For each block of the whole network, the traced one that is like it."""
    persistent: tuple[Bytes, ...]
    """What each traced block keeps from step to step."""
    passes: int
    """Forward and backward passes that were traced: two stand for all."""
    parallel: ParallelConfig
    """The config's, with what one rank alone does better."""
    attention: str
    """The kernel, as transformers knows it."""


def trace(
    config: FinetuneConfig,
    hf_config: PretrainedConfig,
    needs: Needs,
    plan: Plan,
    *,
    memory: int,
    device: str = "cuda",
    added: Sequence[int] = (),
    gloo: bool = False,
    whole: bool = False,
) -> Trace:
    """Compute one step of rank 0 on devices of so many bytes of `memory`.

    `device`: the type of device that the run will have, which decides on the kernels. `gloo`: collectives need memory
    as gloo's do. `whole`: trace every block.
    """
    from torch._subclasses import FakeTensorMode  # half of the compiler, a second

    model = build_network(copy.deepcopy(hf_config), config, added)
    attention = use(model, _attention(config, needs, device)).name
    if choose_loss(config.model.loss, needs, kept=None).name == "chunked":
        install(model)
        head = model.get_output_embeddings()
        assert isinstance(head, LossHead)
        head.stands_for = device
    if model._can_set_experts_implementation() and device == "cpu":
        model.set_experts_implementation("batched_mm")  # the others ask how many tokens come to an expert
    parallel = as_stored(model, config, plan.layout, memory)
    kept = range(len(blocks_of(model))) if whole else keep_blocks(model, parallel, ends=needs.ends)
    passes = min(2, plan.division.full_rounds)
    batches = full_batches(config, hf_config, passes)
    with as_rank_of(plan.layout.world), torch.random.fork_rng(devices=[]), torch.enable_grad():
        mesh = make_mesh(plan.layout, CPU)
        units = units_of(model, parallel, ends=needs.ends)
        spread(model, units, parallel, mesh, None, CPU)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        _allocate(model, fake)
        model.train()
        live = Live(copies_to_reduce=gloo, copies_to_promote=device == "cpu")
        with fake:
            optimizer = build_optimizer(model, config.optim, config.method)
            optimizer.init_state()
            recorder = Recorder(live, model, optimizer)
            recorder.record(lambda: _step(config, plan, parallel, model, recorder, batches))
    return Trace(
        timeline=live.timeline,
        stands_for=tuple(kept),
        persistent=recorder.persistent,
        passes=passes,
        parallel=parallel,
        attention=attention,
    )


def _allocate(model: PreTrainedModel, fake: AbstractContextManager[object]) -> None:
    """Give weights shapes without data, and buffers real values: some architectures decide by what is in them."""
    init_buffers(model, CPU)
    real = [(module, dict(module._buffers)) for module in model.modules()]
    with fake:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            allocate(model, CPU)
        else:  # a parameter that has been shown to fake tensors cannot be changed in place
            with_memory(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), buffers=True)
        for module, buffers in real:
            kept = {name: buffer for name, buffer in buffers.items() if buffer is None or not buffer.is_meta}
            module._buffers.update(kept)


def _step(
    config: FinetuneConfig,
    plan: Plan,
    parallel: ParallelConfig,
    model: PreTrainedModel,
    optimizer: Optimizer,
    batches: StepBatches,
) -> None:
    train_step(
        model, optimizer, LossScale.start(enabled=config.parallel.precision == "fp16", device=CPU), batches,
        plan=plan, parallel=parallel, optim=config.optim, lr_factor=1.0, seed=0,
        objective=Objective.of(config.train, None, None),
    )  # fmt: skip


def _attention(config: FinetuneConfig, needs: Needs, device: str) -> Any:
    """The attention that ranks on such a device would choose, if nothing is installed beside torch."""
    # The flash-attn packages keep for backward what torch's own kernel keeps.
    precision = config.parallel.precision
    dtype = COMPUTE_DTYPE.get(precision, MASTER_DTYPE[precision])
    asked = config.model.attention
    if asked.startswith("flash_attention"):
        asked = "auto"
    return choose(
        asked, needs, kept=None, device=torch.device(device), dtype=dtype,
        fails=lambda name: None if name == f"{PREFIX}varlen" else "it is not looked for",
    )  # fmt: skip


def full_batches(config: FinetuneConfig, hf_config: PretrainedConfig, passes: int) -> StepBatches:
    """Blocks without padding, every token but the first trained on: no real one needs more."""
    length, vocabulary = config.data.seq_len, hf_config.get_text_config().vocab_size
    ids = (np.arange(length) % vocabulary).astype(np.int32)
    positions = np.arange(length, dtype=np.int32)
    sample = PackedSample(
        input_ids=ids,
        labels=np.where(positions == 0, -100, ids).astype(np.int32),
        position_ids=positions,
        source_ids=np.zeros_like(ids),
        id=0,
    )
    block = to_batch([sample] * config.train.micro_batch, index=0, after=Cursor())
    blocks: tuple[Batch, ...] = tuple(replace(block, index=index) for index in range(passes))
    assert all(each.index != FILLER_INDEX for each in blocks)
    counts = torch.ones(3 + len(config.data.train), dtype=torch.int64)
    return StepBatches(step=1, blocks=blocks, counts=counts)


class Recorder:
    """Marks the timeline where passes, blocks and the update begin, and says what is what."""

    def __init__(self, live: Live, model: PreTrainedModel, optimizer: Optimizer) -> None:
        self._live, self._model, self._optimizer = live, model, optimizer
        self._blocks = blocks_of(model)
        self._pass = -1
        weights = [_local(each) for each in (*model.parameters(), *model.buffers())]
        live.name(weights, "weights")
        live.name((_local(each) for each in optimizer.state_tensors().values()), "optimizer")
        self.persistent = tuple(self._kept(block) for block in self._blocks)

    def record(self, step: Any) -> None:
        """Follow a step."""
        hooks = [self._model.register_forward_pre_hook(self._begins)]
        for number, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._marker(number)))
            hooks.append(block.register_forward_hook(self._behind(number)))
        try:
            self._live.follow_gathered(self._model)
            with self._live:
                self._live.mark("start")
                step()
                self._live.mark("end")
        finally:
            for hook in hooks:
                hook.remove()

    def init_state(self) -> None:
        self._optimizer.init_state()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._optimizer.state_tensors()

    def step(self, lr_factor: float, found_inf: torch.Tensor) -> None:
        self._name_gradients()
        self._live.mark("update")
        self._optimizer.step(lr_factor, found_inf)

    def _begins(self, *_: Any) -> None:
        self._name_gradients()
        self._pass += 1
        self._live.mark(f"pass {self._pass}")

    def _marker(self, number: int) -> Any:
        def begins(*_: Any) -> None:
            self._live.mark(f"forward {self._pass} {number}")

        return begins

    def _behind(self, number: int) -> Any:
        """The end of the last block's forward, and where backward comes to a block."""
        last = number == len(self._blocks) - 1

        def behind(_: nn.Module, __: Any, output: Any) -> None:
            if last:
                self._live.mark(f"head {self._pass}")
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                reached = partial(self._backward, number)
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

        return behind

    def _backward(self, number: int, _: torch.Tensor) -> None:
        self._live.mark(f"backward {self._pass} {number}")

    def _name_gradients(self) -> None:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        self._live.name((_local(p.grad) for p in parameters), "gradients")
        for group in groups_of(self._model):
            held = [each.unsharded_accumulated_grad for each in group.fsdp_params]
            held.append(group._partial_reduce_output)  # of replicas, until they are summed over all of them
            self._live.name((each for each in held if each is not None), "gradients")

    def _kept(self, block: nn.Module) -> Bytes:
        ids = {id(parameter) for parameter in block.parameters()}
        names = {name for name, parameter in self._model.named_parameters() if id(parameter) in ids}
        weights = sum(_local(parameter).nbytes for parameter in block.parameters())
        state = sum(
            _local(tensor).nbytes
            for key, tensor in self._optimizer.state_tensors().items()
            if any(key.startswith(f"{name}.") for name in names)
        )
        found: dict[Kind, int] = {"weights": weights, "optimizer": state}
        return found


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    # Not detached: fake tensors' mode would make a copy of a buffer that has data, and that copy is gone at once.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def keep_blocks(model: PreTrainedModel, parallel: ParallelConfig, *, ends: bool) -> list[int]:
    """Cut blocks out of a network on the meta device that is not sharded yet; returns what stands for each of all."""
    blocks = blocks_of(model)
    units = units_of(model, parallel.model_copy(update={"wrap": 1}), ends=ends)
    reached = [
        flag for unit, flag in zip(units, reached_by_backward(model, units), strict=True) if unit.name == "block"
    ]
    every = parallel.recompute_every if parallel.activation_checkpointing == "every_n" else 1
    kinds = [
        (*_kind(block), flag, number % (every or 1), number % parallel.wrap)
        for number, (block, flag) in enumerate(zip(blocks, reached, strict=True))
    ]
    stands_for = representatives(kinds, _MARGIN * parallel.wrap)
    kept = sorted(set(stands_for))
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and any(b in blocks for b in m)]
    if len(lists) != 1 or [*lists[0]] != blocks:
        return list(range(len(blocks)))
    for number in reversed(range(len(blocks))):
        if number not in kept:
            del lists[0][number]
    return [kept.index(number) for number in stands_for]


def _kind(block: nn.Module) -> tuple[Hashable, ...]:
    """What makes two blocks need the same: what they are made of, and their settings."""
    weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
    settings = tuple(
        (key, value)
        for module in block.modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and not any(part in key for part in _NUMBERED)
    )
    return (type(block).__qualname__, weights, settings)


def representatives(kinds: Sequence[Hashable], margin: int) -> list[int]:
    """For each of a sequence, one that stands for it: repetitions are taken out of the middle of what is periodic, but
    for so many at either end."""
    stands_for = list(range(len(kinds)))
    kept = list(range(len(kinds)))
    while cut := _largest_cut([kinds[number] for number in kept], margin):
        start, stop, period = cut
        before = {kept[i]: kept[start - period + (i - start) % period] for i in range(start, stop)}
        stands_for = [before.get(number, number) for number in stands_for]
        del kept[start:stop]
    return stands_for


def _largest_cut(kinds: Sequence[Hashable], margin: int) -> tuple[int, int, int] | None:
    """[start, stop) of what can be left out, and the period that it repeats."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(kinds) // 2 + 1):
        first = 0
        for place in range(len(kinds) - period + 1):
            if place < len(kinds) - period and kinds[place] == kinds[place + period]:
                continue
            # kinds[first : place + period] repeats. What stands for others has a whole period before it and behind it:
            # the rotations of full attention, which all such layers share, belong to the first of them.
            edge = max(margin, period)
            start = first + edge + period
            periods = (place + period - edge - start) // period
            if periods > 0 and (best is None or periods * period > best[1] - best[0]):
                best = start, start + periods * period, period
            first = place + 1
    return best


@contextmanager
def as_rank_of(world: int) -> Iterator[None]:
    """In here this process is rank 0 of so many, of which there are no others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process of a run has a process group already"
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()
