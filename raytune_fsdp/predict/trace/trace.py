"""Compute one step of a few layers of a network as a rank of the run does, on tensors that have no data.

The network is built, spread and stepped by the code that does it in a run. The collectives are those of a process group
that talks to nobody. A rank among 16 of a 70B needs 0.8 s for this, and no memory to speak of.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.batch import Borders, Cursor, MicroBatch, PackedSample, StepBatches, Targets, Taught
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.config.sections.reference import TeacherConfig
from raytune_fsdp.data.batches import FILLER_INDEX, to_batch
from raytune_fsdp.data.shared_batches import own_parts
from raytune_fsdp.model.attention.calls import PREFIX
from raytune_fsdp.model.attention.choose import KernelChoice, KernelNeeds, choose, set_attention
from raytune_fsdp.model.compile_layers import EAGER
from raytune_fsdp.model.fill import allocate
from raytune_fsdp.model.network import init_buffers
from raytune_fsdp.model.objective.chunked_head import LossHead, install_chunked_loss
from raytune_fsdp.model.objective.distillation import Distillation
from raytune_fsdp.model.objective.groups import GroupStandIn
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.objective.own_loss import StandIn
from raytune_fsdp.model.objective.score_head import choose_loss
from raytune_fsdp.model.objective.scores import ScoreStandIn
from raytune_fsdp.model.offload_activations import Copies
from raytune_fsdp.model.split.sequence import check_attention_in_parts, split_tokens
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.layers import keep_layers
from raytune_fsdp.predict.trace.live import Bytes, MemoryTrace, Timeline
from raytune_fsdp.predict.trace.work import Operation, tensors_in
from raytune_fsdp.run.build import Counts, Site, build, optimizer_of, sums_of
from raytune_fsdp.run.network_checks import check_shared
from raytune_fsdp.run.trials.mixers import choose_mixers
from raytune_fsdp.step.accumulation import FP32
from raytune_fsdp.step.optim.execution import BY_OPERATION, AsKernel, Change, Execution
from raytune_fsdp.step.optim.update import Optimizer, UpdatesAfter
from raytune_fsdp.step.precision import compute_dtype
from raytune_fsdp.step.reduce_by_node import ranks_of_a_node
from raytune_fsdp.step.sums import Sums
from raytune_fsdp.step.traffic import Traffic
from raytune_fsdp.step.train_step import LossScale, train_step
from raytune_fsdp.step.units import fsdp_groups_of

# What happens in a traced step: where its phases begin, and what the memory in it is.


class Recorder:
    """Marks the timeline where passes, layers and the update begin, and says what is what."""

    def __init__(
        self, live: MemoryTrace, model: PreTrainedModel, layers: Sequence[nn.Module], optimizer: Optimizer
    ) -> None:
        """`layers`: the layers, as they were found before FSDP gave their classes other names."""
        self._live, self._model, self._layers = live, model, layers
        self._pass = -1
        live.name((_local(each) for each in (*model.parameters(), *model.buffers())), "weights")
        states = optimizer.state_tensors()
        live.name((_local(each) for each in states.values()), "optimizer")
        self.persistent = tuple(self._kept(layer, states) for layer in self._layers)
        self.trained = [_trained(layer.parameters()) for layer in self._layers]
        self.rest = _trained(model.parameters()) - sum(self.trained)

    def record(self, step: Any) -> None:
        """Follow a step."""
        with ExitStack() as hooks:
            hooks.enter_context(self._model.register_forward_pre_hook(self._begins))
            for number, layer in enumerate(self._layers):
                hooks.enter_context(layer.register_forward_pre_hook(partial(self._comes_to, number)))
                hooks.enter_context(layer.register_forward_hook(partial(self._leaves, number)))
            self._live.follow_gathered(self._model)
            with self._live:
                self._live.mark("start")
                step()
                self._live.mark("end")

    def update_begins(self) -> None:
        self._name_gradients()
        self._live.mark("update")

    def _begins(self, *_: Any) -> None:
        self._name_gradients()
        self._pass += 1
        self._live.mark(f"pass {self._pass}")

    def _comes_to(self, number: int, *_: Any) -> None:
        self._live.mark(f"forward {self._pass} {number}")

    def _leaves(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        """Mark the end of the last layer's forward, and where backward comes to a layer."""
        if number == len(self._layers) - 1:
            self._live.mark(f"head {self._pass}")
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            reached = partial(self._backward, number)
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def _backward(self, number: int, _: torch.Tensor) -> None:
        self._live.mark(f"backward {self._pass} {number}")

    def _name_gradients(self) -> None:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        self._live.name((_local(p.grad) for p in parameters), "gradients")
        for group in fsdp_groups_of(self._model):
            held = [each.unsharded_accumulated_grad for each in group.fsdp_params]
            held.append(group._partial_reduce_output)  # of replicas, until they are summed over all of them
            self._live.name((each for each in held if each is not None), "gradients")

    def _kept(self, layer: nn.Module, states: Mapping[str, torch.Tensor]) -> Bytes:
        ids = {id(parameter) for parameter in layer.parameters()}
        names = {name for name, parameter in self._model.named_parameters() if id(parameter) in ids}
        weights = sum(_local(parameter).nbytes for parameter in layer.parameters())
        state = sum(
            _local(tensor).nbytes for key, tensor in states.items() if any(key.startswith(f"{name}.") for name in names)
        )
        return {"weights": weights, "optimizer": state}


def _trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_local(parameter).nbytes for parameter in parameters if parameter.requires_grad)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    # Not detached: fake tensors' mode would make a copy of a buffer that has data, and that copy is gone at once.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened on a rank in a step of a few layers."""

    timeline: Timeline
    stands_for: tuple[int, ...]
    """For each layer of the whole network, the traced one that is like it."""
    persistent: tuple[Bytes, ...]
    """What each traced layer keeps from step to step."""
    passes: int
    """Forward and backward passes that were traced: two stand for all."""
    attention: str
    """The kernel, as transformers knows it."""
    counts: Counts
    traffic: Traffic | None
    """The traffic of a step; None: nothing is spread."""
    trained_bytes: int
    """Bytes of this rank's trained weights, in the whole network."""
    trained_bytes_traced: int
    """Bytes of this rank's trained weights, in the traced layers and outside of layers."""
    offloaded: bool
    """Whether weights, gradients and the optimizer's state are in the memory of the host."""


def trace(
    config: FinetuneConfig,
    hf_config: PretrainedConfig,
    needs: KernelNeeds,
    plan: Plan,
    *,
    memory: int,
    device: str = "cuda",
    added: Sequence[int] = (),
    gloo: bool = False,
    per_node: int | None = None,
    whole: bool = False,
    documents: float = 1,
    until: float | None = None,
) -> Trace:
    """Compute one step of rank 0 on devices with `memory` bytes.

    `device`: the type of device that the run will have, which decides on the kernels. `gloo`: collectives need memory
    as gloo's do. `per_node`: ranks of a machine. `whole`: trace every layer. `documents` of a sample, for what
    attention keeps of each. `until`: TookTooLong is raised then."""
    from torch._subclasses import FakeTensorMode  # half of the compiler, a second

    passes = min(2, plan.division.full_rounds)
    live = MemoryTrace(
        copies_to_reduce=gloo, copies_to_promote=device == "cpu", longest=config.data.seq_len,
        documents=math.ceil(documents * config.train.micro_batch), until=until,
    )  # fmt: skip
    site = replace(first_rank(plan, device, memory, per_node), copies=_ToHost(live))
    keep = None if whole else partial(keep_layers, ends=needs.ends)
    with as_rank_of(plan.layout.world), _same_random_state(), torch.enable_grad():
        built = build(
            config, hf_config, needs, site, partial(assume_kernels, config, needs, device), added=added, keep=keep
        )
        model = built.model
        if built.groups.sequence is not None:
            split_tokens(model, built.groups.sequence)
        (batches,) = own_parts([full_batches(config, hf_config, passes)], plan.layout, rank=0)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        allocate_without_data(model, fake)
        model.train()
        with fake:
            optimizer = optimizer_of(built, config, passes, _execution(config, device, live))
            optimizer.init_state()
            recorder, sums = Recorder(live, model, built.layers, optimizer), sums_of(built, config, plan)
            updates = UpdatesAfter(recorder.update_begins, optimizer)
            recorder.record(lambda: one_step(config, plan, built.parallel, model, updates, batches, CPU, sums))
    return Trace(
        timeline=live.timeline,
        stands_for=built.stands_for,
        persistent=recorder.persistent,
        passes=passes,
        attention=built.kernels["attention"].name,
        counts=built.counts,
        traffic=built.traffic,
        trained_bytes=recorder.rest + sum(recorder.trained[number] for number in built.stands_for),
        trained_bytes_traced=recorder.rest + sum(recorder.trained),
        offloaded=built.parallel.cpu_offload and device != "cpu",
    )


def _execution(config: FinetuneConfig, device: str, live: MemoryTrace) -> Execution:
    """Return how written-out updates run on such devices."""
    compiled = device == "cuda" and config.parallel.compile is not False and not config.parallel.cpu_offload
    return _OneKernel(live) if compiled else BY_OPERATION


def sharding_of(
    config: FinetuneConfig, plan: Plan, spec: ModelSpec, device: str, memory: int
) -> Mapping[str, Any] | None:
    """Return what of a network is gathered together on devices with `memory` bytes; None: nothing is."""
    with as_rank_of(plan.layout.world), _same_random_state():
        return build(
            config, spec.hf_config, spec.needs, first_rank(plan, device, memory, per_node=None),
            partial(assume_kernels, config, spec.needs, device), added=spec.added,
            keep=partial(keep_layers, ends=spec.needs.ends),
        ).sharding  # fmt: skip


def first_rank(plan: Plan, kind: str, memory: int, per_node: int | None) -> Site:
    """Return the site of the first rank, whose tensors have no data. `per_node`: ranks of a machine."""
    layout = plan.layout
    nodes = None if per_node is None else [rank // per_node for rank in range(layout.world)]
    return Site(
        layout=layout, division=plan.division, device=CPU, kind=kind, memory=memory, real=False,
        together=lambda: None if nodes is None else ranks_of_a_node(nodes, layout.shard_size),
    )  # fmt: skip


def allocate_without_data(model: PreTrainedModel, fake: AbstractContextManager[object]) -> None:
    """Give weights shapes without data, and buffers real values: some architectures decide by what is in them."""
    init_buffers(model, CPU)
    real = [(module, dict(module._buffers)) for module in model.modules()]
    # What FSDP leaves alone gets another parameter: one that has been shown to fake tensors cannot be changed in place.
    plain = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    with fake:
        for module, name, _ in plain:
            module._parameters[name] = None
        allocate(model, CPU)
        made: dict[int, nn.Parameter] = {}
        for module, name, parameter in plain:
            if id(parameter) not in made:  # tied ones stay tied
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for module, buffers in real:
            kept = {name: buffer for name, buffer in buffers.items() if buffer is None or not buffer.is_meta}
            module._buffers.update(kept)


class _OneKernel(AsKernel):
    """Counts an update as one kernel: it reads each tensor once, and writes once what changes."""

    needs_trial = False

    def __init__(self, live: MemoryTrace) -> None:
        self._live = live
        self._numbers = {}

    def __call__(self, change: Change, into: Any, *args: Any) -> None:
        changed, read = (sum(each.nbytes for each in tensors_in(given)) for given in (into, args))
        self._live.timeline.operations.append(Operation("rest", 0.0, 2 * changed + read, 4))


class _ToHost(Copies):
    """Copies activations to the memory of the host, and none back: where they are in use is for the plan to say."""

    def __init__(self, live: MemoryTrace) -> None:
        self._live = live

    def behind_compute(self) -> AbstractContextManager[None]:
        return self._live.sending_to_host()


def one_step(
    config: FinetuneConfig,
    plan: Plan,
    parallel: ParallelConfig,
    model: PreTrainedModel,
    optimizer: Optimizer,
    batches: StepBatches,
    device: torch.device,
    sums: Sums,
) -> None:
    """Compute a run's step, without anything that is watched or recorded."""
    train_step(
        model, optimizer, LossScale.start(enabled=config.parallel.precision == "fp16", device=device), batches,
        plan=plan, parallel=parallel, optim=config.optim, lr_factor=1.0, seed=0,
        objective=_stood_for(config), sums=sums,
    )  # fmt: skip


def _stood_for(config: FinetuneConfig) -> Objective:
    """Return what takes the work of a run's objective, whose numbers of documents are not counted."""
    train = config.train
    groups = ScoreStandIn() if train.objective.scores else GroupStandIn()
    return Objective.of(
        train,
        own=None if train.loss is None else StandIn(),
        groups=None if train.objective.rows is None else groups,
        distillation=Distillation.of(config),
    )


def assume_kernels(
    config: FinetuneConfig, needs: KernelNeeds, device: str, model: PreTrainedModel
) -> Mapping[str, KernelChoice]:
    """Give the network what such devices would choose with nothing installed besides torch; return the choices."""
    check_shared(config, model, needs)
    loss = choose_loss(config.model, needs, kept=None)
    if loss.name == "chunked":
        install_chunked_loss(model)
        head = model.get_output_embeddings()
        assert isinstance(head, LossHead)
        head.stands_for = device
    if model._can_set_experts_implementation() and device == "cpu":
        model.set_experts_implementation("batched_mm")  # the others ask how many tokens come to an expert
    dtype = compute_dtype(config.parallel.precision)
    attention = choose(
        config.model.attention, needs, kept=None, device=torch.device(device), dtype=dtype,
        fails=lambda name: None if name == f"{PREFIX}varlen" else "it is not looked for",
    )  # fmt: skip
    chosen = set_attention(model, attention)
    if config.parallel.mesh.sequence > 1:
        check_attention_in_parts(config.parallel.mesh.sequence, chosen)
    found = {"attention": chosen, "loss": loss, "blocks": KernelChoice(name=EAGER, why="nothing is compiled here")}
    if needs.mixers:
        found["mixers"] = choose_mixers(
            model, needs.mixers, kept=None, device=torch.device(device), fails=lambda _: "it is not looked for"
        )
    if config.parallel.precision == "bf16_pure":
        found["gradients"] = KernelChoice(name=FP32, why="as in a new run")
    return found


def full_batches(config: FinetuneConfig, hf_config: PretrainedConfig, passes: int) -> StepBatches:
    """Return micro-batches without padding, every token but the first trained on: no real one needs more.

    A head that scores has one target in each document, here the last token of a sample.
    """
    length, vocabulary = config.data.seq_len, hf_config.get_text_config().vocab_size
    ids = (np.arange(length) % vocabulary).astype(np.int32)
    positions = np.arange(length, dtype=np.int32)
    trained = positions == length - 1 if config.model.head is not None else positions > 0
    sample = PackedSample(
        input_ids=ids,
        labels=np.where(trained, ids, -100).astype(np.int32),
        position_ids=positions,
        source_ids=np.zeros_like(ids),
        id=0,
    )
    micro_batch = _repeated(to_batch([sample], index=0, after=Cursor()), config.train.micro_batch)
    if config.teacher is not None:
        said = _any_teacher(config.teacher, len(micro_batch.targets.ids), vocabulary)
        micro_batch = replace(micro_batch, targets=replace(micro_batch.targets, teacher=said))
    micro_batches: tuple[MicroBatch, ...] = tuple(replace(micro_batch, index=index) for index in range(passes))
    assert all(each.index != FILLER_INDEX for each in micro_batches)
    counts = torch.ones(3 + len(config.data.train), dtype=torch.int64)
    return StepBatches(step=1, micro_batches=micro_batches, counts=counts)


def _any_teacher(teacher: TeacherConfig, targets: int, vocabulary: int) -> Taught:
    """Return predictions that take the work of real ones. To write billions of them would take seconds."""
    kept = min(teacher.top_k, vocabulary)
    each = torch.full((1, 1), -math.log(kept + 1))
    return Taught(
        ids=torch.arange(kept, dtype=torch.int32).expand(targets, kept),
        log_probabilities=each.expand(targets, kept), rest=each[0].expand(targets),
    )  # fmt: skip


def _repeated(one: MicroBatch, times: int) -> MicroBatch:
    """Return a micro-batch of `times` equal samples. To put millions of tokens together one by one takes seconds."""
    first_tokens = torch.arange(times)[:, None] * one.input_ids.numel()
    starts = (one.borders.starts[:-1] + first_tokens).flatten()
    targets = one.targets
    return replace(
        one,
        input_ids=one.input_ids.repeat(times, 1),
        labels=one.labels.repeat(times, 1),
        position_ids=one.position_ids.repeat(times, 1),
        source_ids=one.source_ids.repeat(times, 1),
        borders=Borders(
            starts=torch.cat([starts, starts.new_tensor([times * one.input_ids.numel()])]).int(),
            longest=one.borders.longest,
            lengths=one.borders.lengths * times,
        ),
        targets=Targets(
            places=(targets.places + first_tokens).flatten(),
            ids=targets.ids.repeat(times),
            datasets=targets.datasets.repeat(times),
            by_dataset=tuple(times * count for count in targets.by_dataset),
            by_document=targets.by_document * times,
        ),
        sample_ids=one.sample_ids * times,
        tokens=times * one.tokens,
        target_tokens=times * one.target_tokens,
        attended_pairs=times * one.attended_pairs,
    )


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore the random state at the end: tensors without data draw names from `random`."""
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before)


@contextmanager
def as_rank_of(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world` ranks, of which there are no others."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process of a run has a process group already"
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch keeps results of operations on DTensors by the shape of their mesh, and these name groups of the mesh
        # that there was. Under torchrun this process is a rank next: its weights would name groups that are gone, or
        # another run of ranks, and wait for that for ever.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
