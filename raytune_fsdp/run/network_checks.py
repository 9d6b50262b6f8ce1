"""Compare what a run asks of its network with what this architecture can do."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.method import LoraMethod, QloraMethod
from raytune_fsdp.model.adapters.attach import base_name, experts_without_adapter, frozen_experts, is_adapted
from raytune_fsdp.model.adapters.principal import check_ranks
from raytune_fsdp.model.added_rows import why_rows_not_alone
from raytune_fsdp.model.attention.choose import positions_of, takes_position_ids
from raytune_fsdp.model.network import fp32_in_bf16
from raytune_fsdp.model.objective.routers import check_routers
from raytune_fsdp.model.precision.fp8 import check_fp8, layers_in_fp8, left_in_bf16
from raytune_fsdp.model.precision.quantized import check_torch
from raytune_fsdp.run.checks import warn_of_method
from raytune_fsdp.run.starting_weights import StartingWeights
from raytune_fsdp.step.optim.groups import check_groups
from raytune_fsdp.step.optim.matrices import check_matrices

logger = logging.getLogger(__name__)


def check_lengths(config: FinetuneConfig, network: PreTrainedModel) -> None:
    """Refuse samples that are longer than the model knows positions, and packing where it takes none."""
    positions = positions_of(network.config)
    if config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the model's {positions} positions "
            f"(max_position_embeddings or max_seq_len in its config): set data.seq_len to at most {positions}"
        )
    if config.data.packing != "none" and not takes_position_ids(network):
        raise ConfigError(
            f"data.packing={config.data.packing}: {type(network).__name__} takes no position_ids, so documents packed "
            "together would see each other; set data.packing=none"
        )


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


def _warn_of_experts(network: PreTrainedModel) -> None:
    """Warn which weights qlora leaves as they are."""
    if stacked := frozen_experts(network):
        share = stacked.total() / sum(p.numel() for p in network.parameters() if not p.requires_grad)
        logger.warning(
            "method.type=qlora: the experts are not quantized (%s), which are %.0f %% of the frozen weights",
            ", ".join(sorted(stacked)), 100 * share,
        )  # fmt: skip


def _warn_of_bf16(network: PreTrainedModel) -> None:
    """Warn which linear layers fp8 leaves as they are."""
    if left := left_in_bf16(network):
        name, why = next(iter(left.items()))
        logger.warning(
            "parallel.precision=fp8: %d of %d linear layers of the transformer layers are computed in bf16 (%s: %s)",
            len(left), len(left) + len(layers_in_fp8(network)), name, why,
        )  # fmt: skip


def check_network(config: FinetuneConfig, network: PreTrainedModel, world: int) -> None:
    """Refuse what this architecture cannot do, and warn of what may not be meant."""
    warn_of_method(config)
    if isinstance(config.method, LoraMethod) and config.method.init != "zero":
        check_ranks(network, config.method.init)
    check_groups(network, config.optim)
    check_matrices(network, config.optim)
    if is_adapted(network) and (experts := experts_without_adapter(network)):
        logger.warning("the experts get no adapter: name their weights in method.target_parameters (%s)", experts)
    if isinstance(config.method, QloraMethod):
        check_torch()
        _warn_of_experts(network)
    if config.parallel.precision == "fp8":
        check_fp8(network)
        _warn_of_bf16(network)
    check_lengths(config, network)
    check_routers(network, config.train)
    if config.parallel.activation_checkpointing != "none" and not network.supports_gradient_checkpointing:
        raise ConfigError(
            f"parallel.activation_checkpointing={config.parallel.activation_checkpointing}: {type(network).__name__} "
            "does not support it; set it to none"
        )
    wide = [name for name, parameter in network.named_parameters() if parameter.dtype == torch.float32]
    # One rank alone is not wrapped, and may mix types.
    if config.parallel.precision == "bf16_pure" and wide and world > 1:
        raise fp32_in_bf16(network, wide)
