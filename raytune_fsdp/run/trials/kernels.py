"""Choose what a run computes with: its attention, its loss, and whether its layers are compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from raytune_fsdp.base.collectives import why_on_any_rank
from raytune_fsdp.base.errors import ConfigError, ResumeError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.run import MOST_THREADS
from raytune_fsdp.model.adapters.attach import why_not_compiled
from raytune_fsdp.model.attention.choose import SIXTEEN_BITS, KernelChoice, KernelNeeds, choose, set_attention
from raytune_fsdp.model.attention.kernel_trial import why_kernel_fails
from raytune_fsdp.model.attention.mixers import BY_DOCUMENT
from raytune_fsdp.model.compile_layers import EAGER, choose_compilation, why_not_compiled_here
from raytune_fsdp.model.network import MASTER_DTYPE, as_buffers, fixed_in_fp32
from raytune_fsdp.model.objective.chunked_head import WIDE, LossHead, install_chunked_loss
from raytune_fsdp.model.objective.routers import GROUPED, ONE_BY_ONE, why_routers_forbid
from raytune_fsdp.model.objective.score_head import choose_loss
from raytune_fsdp.model.split.sequence import check_attention_in_parts
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from raytune_fsdp.run.trials.experts import choose_experts, why_experts_fail
from raytune_fsdp.run.trials.mixers import KNOWN, check_bits, choose_mixers, why_borders_fail
from raytune_fsdp.run.trials.update import choose_update, why_update_differs
from raytune_fsdp.step.accumulation import AS_WEIGHTS, FP32
from raytune_fsdp.step.optim.build import is_fused
from raytune_fsdp.step.optim.groups import STATES_APART, rates_of_states
from raytune_fsdp.step.precision import COMPUTE_DTYPE, compute_dtype


def _why_parts_forbid(config: FinetuneConfig) -> str | None:
    """Return why layers that ranks share are not compiled; None if there are none.

    Graphs with exchanges between ranks inside of a layer were never tried on a GPU.
    """
    axis = next((axis for axis in ("sequence", "tensor") if getattr(config.parallel.mesh, axis) > 1), None)
    return axis and f"parallel.mesh.{axis}: layers that ranks share are not compiled"


def _why_mixers_forbid(config: FinetuneConfig, needs: KernelNeeds) -> str | None:
    """Return why layers around state mixers are not compiled: what is computed again, or exact, has to be one graph."""
    recompute, exact = config.parallel.activation_checkpointing, config.run.exact
    if not needs.mixers or recompute == "none" and not exact:
        return None
    where = "run.exact=true" if exact else f"parallel.activation_checkpointing={recompute}"
    return f"state mixers are called for documents, outside of graphs, and with {where} a layer has to be one graph"


def _why_experts_forbid(experts: KernelChoice | None) -> str | None:
    """Return why layers with such experts are not compiled, or None."""
    apart = experts is not None and experts.name == ONE_BY_ONE
    return "experts that are computed one after the other are not one graph" if apart else None


def _why_not_compiled(
    config: FinetuneConfig,
    needs: KernelNeeds,
    model: PreTrainedModel,
    experts: KernelChoice | None,
    device: torch.device,
) -> str | None:
    """Return why layers are not compiled, or None. Collective."""
    return (
        why_not_compiled(model)
        or _why_parts_forbid(config)
        or _why_mixers_forbid(config, needs)
        or why_routers_forbid(config.train)
        or _why_experts_forbid(experts)
        or why_on_any_rank(lambda: why_not_compiled_here(device))
    )


def kernels_of(
    config: FinetuneConfig,
    prepared: RunInputs,
    standing: ResumePoint,
    model: PreTrainedModel,
    device: torch.device,
    *,
    own: bool = True,
) -> Mapping[str, KernelChoice]:
    """Give the run's `own` network, or one that it asks, attention and loss; return these and all other choices."""
    # States from before there was a choice name none: those runs have transformers' attention, the plain loss, and
    # compiled only what their config asked for.
    before = {
        "attention": model.config._attn_implementation,
        "loss": "plain",
        "blocks": EAGER,
        "gradients": AS_WEIGHTS,
        "update": EAGER,
        "experts": GROUPED,
        **standing.state.kernels,
    }
    kept = before if standing.checkpoint is not None else standing.state.kernels
    chosen, dtype = config.model, compute_dtype(config.parallel.precision)
    attention = choose(
        chosen.attention, prepared.needs, kept=kept.get("attention"), device=device, dtype=dtype,
        fails=lambda name: why_on_any_rank(lambda: why_kernel_fails(name, prepared.needs, device, dtype)),
    )  # fmt: skip
    loss = choose_loss(chosen, prepared.needs, kept=kept.get("loss"))
    if loss.name == "chunked":
        install_chunked_loss(model)
    elif standing.plan.layout.tensor > 1:
        raise ConfigError(
            f"parallel.mesh.tensor={standing.plan.layout.tensor}: nobody would have the logits that the plain loss "
            f"needs ({loss.why}); set model.loss=chunked, or parallel.mesh.tensor=1"
        )
    experts = choose_experts(
        model, kept=kept.get("experts"), fails=lambda: why_on_any_rank(lambda: why_experts_fail(model, device, dtype))
    )  # fmt: skip
    compiled = choose_compilation(
        config.parallel.compile, kept=kept.get("blocks"), device=device, exact=config.run.exact,
        fails=lambda: _why_not_compiled(config, prepared.needs, model, experts, device),
    )  # fmt: skip
    attention, mixers = set_attention(model, attention), prepared.needs.mixers
    if standing.plan.layout.sequence > 1:
        check_attention_in_parts(standing.plan.layout.sequence, attention)
    found = {"attention": attention, "loss": loss, "blocks": compiled, **({"experts": experts} if experts else {})}
    found |= _choose_mixers(model, mixers, kept.get("mixers"), device, dtype)
    if config.parallel.precision == "bf16_pure":
        why = "as the run began" if kept else "the same sum at every number of ranks"
        found["gradients"] = KernelChoice(name=kept.get("gradients", FP32), why=why)
    if own:
        _check_bits(config, model, found.get("mixers"), mixers, device, begins=standing.checkpoint is None)
        found |= _only_newer(config, model, loss, kept)
    if (update := _choose_update(config, kept.get("update"), device)) is not None:
        found["update"] = update
    if config.run.exact and device.type == "cpu":
        found["threads"] = _set_threads(config, kept.get("threads"))
    return found


def _choose_mixers(
    model: PreTrainedModel, mixers: tuple[str, ...], kept: str | None, device: torch.device, dtype: torch.dtype
) -> dict[str, KernelChoice]:
    if not mixers:
        return {}
    way = choose_mixers(
        model, mixers, kept=kept, device=device,
        fails=lambda way: why_on_any_rank(lambda: why_borders_fail(way, model, mixers, device, dtype)),
    )  # fmt: skip
    return {"mixers": way}


def _check_bits(
    config: FinetuneConfig,
    model: PreTrainedModel,
    chosen: KernelChoice | None,
    mixers: tuple[str, ...],
    device: torch.device,
    *,
    begins: bool,
) -> None:
    """Have the bits of mixers tried where they matter; also of those that nothing has to split."""
    if device.type == "cuda" and config.run.repeats_bits:
        way, dtype = BY_DOCUMENT if chosen is None else chosen.name, compute_dtype(config.parallel.precision)
        check_bits(way, model, mixers or KNOWN, device, dtype, begins=begins)


def _only_newer(
    config: FinetuneConfig, model: PreTrainedModel, loss: KernelChoice, kept: Mapping[str, str]
) -> dict[str, KernelChoice]:
    """Do, and return, what older versions did in another way. A run that they began goes on in that way."""
    found, dtype = {}, COMPUTE_DTYPE.get(config.parallel.precision)
    if loss.name == "chunked" and compute_dtype(config.parallel.precision) in SIXTEEN_BITS:
        found["scaling"] = KernelChoice(name=WIDE, why="a factor in 16 bits would be off for all weights alike")
    if config.optim.weight_decay and rates_of_states(model):
        found["decay"] = KernelChoice(name=STATES_APART, why="rates of states would decay towards one rate")
    if fixed := [] if dtype is None else fixed_in_fp32(model, dtype):
        found["fixed"] = KernelChoice(name=FP32, why=f"the architecture keeps {fixed[0]} in it, and trains it never")
    found = {what: choice for what, choice in found.items() if not kept or what in kept}
    if "scaling" in found:
        head = model.get_output_embeddings()
        assert isinstance(head, LossHead)
        head.wide = True
    if "fixed" in found:
        as_buffers(model, fixed)
    return found


def _choose_update(config: FinetuneConfig, kept: str | None, device: torch.device) -> KernelChoice | None:
    """Choose how updates run that are written out; None: there are none on a GPU."""
    master, exact = MASTER_DTYPE[config.parallel.precision], config.run.exact
    fused = is_fused(config.optim, fp32=master == torch.float32)
    if device.type != "cuda" or config.parallel.cpu_offload or fused:
        return None
    return choose_update(
        config.parallel.compile, kept=kept,
        fails=lambda: why_on_any_rank(lambda: why_update_differs(config.optim, device, master, exact=exact)),
    )  # fmt: skip


def _set_threads(config: FinetuneConfig, kept: str | None) -> KernelChoice:
    """Compute with as many threads as the run began with: how a large product is split decides its last digits.

    A launcher gives a rank the machine's cores divided by the ranks on it, so another number at each world.
    """
    own = torch.tensor(config.run.threads or torch.get_num_threads())
    dist.broadcast(own, src=0)
    found = kept or str(own.item())
    if not re.fullmatch("[1-9][0-9]{0,3}", found) or int(found) > MOST_THREADS:
        raise ResumeError(
            f"the checkpoint says that the run has {shown(found)} threads: it is damaged; remove it, and the run goes "
            "on from the one before"
        )
    if config.run.threads not in (None, int(found)):
        raise ConfigError(
            f"run.threads={config.run.threads}: the run began with {found}, and with run.exact=true its bits depend on "
            "them: leave it out, or choose another run.name"
        )
    torch.set_num_threads(int(found))
    return KernelChoice(name=found, why="as the run began" if kept else "which the run keeps at any number of ranks")
