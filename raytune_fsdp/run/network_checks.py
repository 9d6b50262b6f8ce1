"""Compare what a run asks of its network with what this architecture can do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import ALL_LINEAR, AdapterMethod, Ia3Method, LoraMethod, QloraMethod
from raytune_fsdp.model.adapters.attach import base_name, frozen_experts, is_adapted, is_adapter_layer, unadapted
from raytune_fsdp.model.adapters.principal import check_ranks
from raytune_fsdp.model.adapters.targets import read_past
from raytune_fsdp.model.added_rows import why_rows_not_alone
from raytune_fsdp.model.attention.choose import KernelNeeds, positions_of, takes_position_ids
from raytune_fsdp.model.attention.lengths import scaled_from, turned_beyond
from raytune_fsdp.model.network import class_name, fp32_in_bf16
from raytune_fsdp.model.objective.routers import check_routers
from raytune_fsdp.model.precision.fp8 import check_fp8, layers_in_fp8, left_in_bf16
from raytune_fsdp.model.precision.quantized import check_torch
from raytune_fsdp.model.split.cuts import check_cut, sharing_heads
from raytune_fsdp.model.split.sequence import check_sequence
from raytune_fsdp.run.checks import warn_of_method
from raytune_fsdp.run.starting_weights import StartingWeights
from raytune_fsdp.run.trials.score_proof import check_scores
from raytune_fsdp.step.optim.groups import check_groups
from raytune_fsdp.step.optim.matrices import check_matrices

logger = logging.getLogger(__name__)


def warn_of_tokens(config: FinetuneConfig, network: PreTrainedModel, origin: StartingWeights) -> None:
    """Warn which rows of new tokens stay as they begin, and say what trains them: whole weights, or none."""
    trained = [base_name(name) for name, parameter in network.named_parameters() if parameter.requires_grad]
    known = {base_name(name) for name, _ in network.named_parameters()}
    rows = sorted(name for name in {*origin.added, *origin.grown} if name in known)
    owners = {name: name.rpartition(".")[0] for name in rows}
    frozen = [name for name in rows if not any(each.startswith(f"{owners[name]}.") for each in trained)]
    if not frozen:
        return
    names = ", ".join(sorted({owners[name].rpartition(".")[2] for name in frozen}))
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    if not is_adapted(network):
        way_out = f"name them in method.trained ([{names}])"
    elif outputs is not None and getattr(outputs, "weight", None) is getattr(inputs, "weight", inputs):
        way_out = (
            "embedding and head are one weight here, which adapters cannot train: use method.type=freeze with "
            f"method.trained=[{names}], or let each token begin as one that it is like (model.add_tokens.N.like)"
        )
    else:
        way_out = f"name their modules in method.modules_to_save ([{names}])"
    if isinstance(config.method, LoraMethod) and origin.added and why_rows_not_alone(network) is None:
        way_out = f"set method.train_added_tokens=true; for all rows, {way_out}"
    logger.warning(
        "%s: with method.type=%s the rows of new tokens stay as they begin (%s); to train them, %s",
        "model.add_tokens" if origin.added else "model.resize_embeddings=true", config.method.type,
        ", ".join(frozen), way_out,
    )  # fmt: skip


def check_network(
    config: FinetuneConfig, network: PreTrainedModel, needs: KernelNeeds, world: int, *, begins: bool = True
) -> None:
    """Refuse what this architecture cannot do, and warn of what may not be meant. It is whole, on the meta device.

    `begins`: the run does now, and is no audit of one that has begun.
    """
    for check in CHECKS:
        check(config, network, needs, world)
    if (mixed := why_neighbours_matter(config, network, needs)) is not None:
        if begins:
            raise ConfigError(mixed)
        logger.warning("%s; the run goes on as it began", mixed)


def check_reached(config: FinetuneConfig, network: PreTrainedModel, adapted: Collection[str] | None) -> None:
    """Refuse adapters of layers that the architecture's code reads past; what has them already goes on with them.

    `adapted`: the modules that have adapters in a run that goes on; None: it begins now.
    """
    method = config.method
    if not isinstance(method, AdapterMethod):
        return
    past = read_past(network)
    layers = {base_name(name): type(layer) for name, layer in network.named_modules() if is_adapter_layer(layer)}
    lost = sorted(past.keys() & layers)
    if not lost:
        return
    names = ", ".join(sorted({name.rpartition(".")[2] for name in lost}))
    owners = ", ".join(sorted({past[name] for name in lost}))
    why = f"{owners}, or a kernel that it calls, multiplies with the weight itself, so an adapter is never trained"
    if adapted is None and method.adapter is None:
        field = "target_parameters" if layers[lost[0]].__name__ == "ParamWrapper" else "target_modules"
        raise ConfigError(
            f"method.{field}={shown(getattr(method, field))} adapts {names} of a {type(network).__name__}: {why}; "
            f"leave {names} out{'' if isinstance(method, Ia3Method) else f', as target_modules={ALL_LINEAR} does'}"
        )
    logger.warning("the adapters of %s stay as they began: %s", names, why)
    if isinstance(method, LoraMethod) and method.init != "zero":
        logger.warning(
            "method.init=%s: the network is without the part of these weights that their adapters began as; another "
            "run.name begins with the whole network", method.init,
        )  # fmt: skip


def _adapters(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    warn_of_method(config)
    if isinstance(config.method, LoraMethod) and config.method.init != "zero":
        check_ranks(network, config.method.init)
    if not is_adapted(network):
        return
    names, share = unadapted(network)
    if experts := sorted(frozen_experts(network).keys() & set(names)):
        logger.warning(
            "the experts get no adapter: name their weights in method.target_parameters (%s); now %.0f %% of the "
            "layers' weights have none", experts, 100 * share,
        )  # fmt: skip
    elif share > 0.5 and getattr(config.method, "target_modules", None) == ALL_LINEAR:
        logger.warning(
            "method.target_modules=%s: %.0f %% of the layers' weights are in no linear layer and get no adapter (%s); "
            "method.target_parameters names such weights", ALL_LINEAR, 100 * share, ", ".join(names[:6]),
        )  # fmt: skip


def _optimizer(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    check_groups(network, config.optim)
    check_matrices(network, config.optim)


def _quantized(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    if not isinstance(config.method, QloraMethod):
        return
    check_torch()
    if stacked := frozen_experts(network):
        share = stacked.total() / sum(p.numel() for p in network.parameters() if not p.requires_grad)
        logger.warning(
            "method.type=qlora: the experts are not quantized (%s), which are %.0f %% of the frozen weights",
            ", ".join(sorted(stacked)), 100 * share,
        )  # fmt: skip


def _fp8(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    if config.parallel.precision != "fp8":
        return
    check_fp8(network)
    if left := left_in_bf16(network):
        name, why = next(iter(left.items()))
        logger.warning(
            "parallel.precision=fp8: %d of %d linear layers of the transformer layers are computed in bf16 (%s: %s)",
            len(left), len(left) + len(layers_in_fp8(network)), name, why,
        )  # fmt: skip


def check_positions(config: FinetuneConfig, hf_config: PretrainedConfig) -> None:
    """Refuse samples that are longer than the model knows positions."""
    positions = positions_of(hf_config)
    if config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the model's {positions} positions "
            f"(max_position_embeddings or max_seq_len in its config): set data.seq_len to at most {positions}"
        )


def _lengths(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    check_positions(config, network.config)


def check_packed(config: FinetuneConfig, network: PreTrainedModel, needs: KernelNeeds, *_: object) -> None:
    """Refuse packing where nothing gets the borders of documents: no positions, and no mixers that are split."""
    if config.data.packing != "none" and not takes_position_ids(network) and not needs.mixers:
        raise ConfigError(
            f"data.packing={config.data.packing}: {type(network).__name__} takes no position_ids, so documents packed "
            "together would see each other; set data.packing=none"
        )


def why_neighbours_matter(config: FinetuneConfig, network: PreTrainedModel, needs: KernelNeeds) -> str | None:
    """Return why a document's loss would depend on which documents are beside it, and what to set; None: it does not.

    Some networks change where a document or a row is long, which no trial sees: its documents are short.
    """
    seq_len, many, groups = config.data.seq_len, config.train.micro_batch, config.train.objective.rows
    alone = config.data.packing == "none" and groups is None
    if alone and many == 1:
        return None
    apart = "" if groups else ", or data.packing=none with train.micro_batch=1"
    longest, scaled = turned_beyond(network.config), scaled_from(network.config)
    if longest is not None and seq_len > longest:
        return (
            f"data.seq_len={seq_len}: the rotary embedding (longrope) of {class_name(network)} is another one for all "
            f"documents of a micro-batch where one is longer than {longest} tokens, so that the loss of a document "
            f"would depend on its neighbours; set data.seq_len={longest}{apart}"
        )
    row = seq_len if needs.refused else seq_len * many  # with borders the samples of a micro-batch are one row
    if scaled is not None and row >= scaled and not (alone and needs.refused):
        return (
            f"data.seq_len={seq_len} with train.micro_batch={many}: {class_name(network)} scales queries from "
            f"token {scaled} of a row on (floor_scale), not of a document, so that the loss of a document would "
            f"depend on its neighbours; set them so that their product is less than {scaled}{apart}"
        )
    return None


def _routers(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    check_routers(network, config.train)


def _recomputed(config: FinetuneConfig, network: PreTrainedModel, *_: object) -> None:
    chosen = config.parallel.activation_checkpointing
    if chosen != "none" and not network.supports_gradient_checkpointing:
        raise ConfigError(
            f"parallel.activation_checkpointing={chosen}: {type(network).__name__} does not support it; set it to none"
        )


def _one_type(config: FinetuneConfig, network: PreTrainedModel, _: KernelNeeds, world: int) -> None:
    wide = [name for name, parameter in network.named_parameters() if parameter.dtype == torch.float32]
    # One rank alone is not wrapped, and may mix types.
    if config.parallel.precision == "bf16_pure" and wide and world > 1:
        raise fp32_in_bf16(network, wide)


def check_shared(config: FinetuneConfig, network: PreTrainedModel, needs: KernelNeeds, *_: object) -> None:
    """Refuse ranks that cannot share layers or tokens of this network."""
    mesh = config.parallel.mesh
    check_cut(mesh.tensor, network, needs)
    check_sequence(mesh.sequence, needs, sharing=sharing_heads(network, mesh.tensor))


CHECKS: tuple[Callable[[FinetuneConfig, PreTrainedModel, KernelNeeds, int], None], ...] = (
    _adapters,
    _optimizer,
    _quantized,
    _fp8,
    _lengths,
    check_packed,
    _routers,
    _recomputed,
    _one_type,
    check_shared,
    check_scores,
)
"""What is asked of every network before a rank is started. A feature that not every network can have adds a line."""
