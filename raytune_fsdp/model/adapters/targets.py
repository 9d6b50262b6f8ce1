"""Name the modules to adapt for PEFT, so that it adapts what the method says, and nothing else.

In transformers 4 the experts of many architectures were linear layers, and now they are stacked weights. For these
architectures PEFT reads the old layers' last names as the weights, and an expression as the last names of what it
matches: `model\\.layers\\.1\\..*q_proj` would be every `q_proj`, here and where others load the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.config.sections.method import ALL_LINEAR, AdapterMethod, LoraMethod
from raytune_fsdp.model.objective.routers import names_of_routers

_READ_PAST: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer"), ("dt_proj", "x_proj", "out_proj")),
    "JambaMambaMixer": ("dt_proj",),
    **dict.fromkeys(
        (
            "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        ("out_proj",),
    ),
    "LongcatFlashTopkRouter": ("classifier",),
}  # fmt: skip
"""By the class of a module, its linear layers whose weight its own code or a kernel multiplies with, past the layer.

An adapter of such a layer is never trained, and if it began as a part of the weight, that part is missing. Some weights
are read past the layer only where a package for GPUs is installed: a run may go there later. A test looks for others in
the source of transformers.
"""


def targets_of(
    network: PreTrainedModel, method: LoraMethod, routers: Collection[str], adapted: Collection[str] | None
) -> str | list[str]:
    """Return what PEFT gets as `target_modules`: names, or an expression that it keeps as one.

    `routers`: modules that `all-linear` leaves out. `adapted`: the modules that have adapters in a run that goes on,
    which are then what `all-linear` means; None: it begins now.
    """
    asked = method.target_modules
    if is_expression(asked):
        return _whole_names(network, asked, method.target_parameters)
    if not isinstance(asked, str):
        return asked
    if adapted is None:
        return _linear_names(network, routers)
    linear = _linear(network)
    return _endings(network, [name for name in adapted if name in linear])


def read_past(network: PreTrainedModel) -> dict[str, str]:
    """Return the layers that would never train an adapter, each with the class of the module that has it."""
    owners = ((name, type(module).__name__) for name, module in network.named_modules())
    return {f"{name}.{each}": owner for name, owner in owners for each in _READ_PAST.get(owner, ())}


def routers_of_method(network: PreTrainedModel, method: AdapterMethod) -> list[str]:
    """Return the names of the modules that choose experts, if the method says what becomes of them."""
    return names_of_routers(network) if isinstance(method, LoraMethod) and method.routers is not None else []


def is_expression(targets: object) -> bool:
    """Return whether the targets are an expression, which has to match the whole names of modules."""
    return isinstance(targets, str) and targets.lower() != ALL_LINEAR


def _whole_names(network: PreTrainedModel, expression: str | list[str], parameters: list[str]) -> str | list[str]:
    """Return the whole names that an expression matches, if PEFT would not keep it as an expression.

    An expression in which PEFT finds experts stays as it is: PEFT then says what it lacks, or `attach` refuses the
    experts by name.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=expression, target_parameters=parameters or None)
    try:
        convert_peft_config_for_transformers(probe, model=network, conversions=None)
    except ValueError:
        return expression
    if isinstance(probe.target_modules, str) or {*(probe.target_parameters or ())} != {*parameters}:
        return expression
    return sorted(name for name, _ in network.named_modules() if re.fullmatch(str(expression), name)) or expression


def _linear(network: PreTrainedModel) -> dict[str, nn.Module]:
    return {name: module for name, module in network.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def _linear_names(network: PreTrainedModel, left_out: Collection[str]) -> list[str]:
    """Return the ends of the names of all linear layers but the head, those of these modules, and those read past.

    PEFT's own `all-linear` is not used: it includes the experts, which take no dropout. Names that PEFT would take for
    experts are left out.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head, past = network.get_output_embeddings(), read_past(network)
    wanted = [
        name
        for name, module in _linear(network).items()
        # Some routers are linear layers that return two tensors (Llama 4's), which an adapter cannot handle.
        if not (module is head or type(module).__name__.endswith("Router") or name in past)
        and not any(f"{name}.".startswith(f"{each}.") for each in left_out)
    ]
    probe = LoraConfig(target_modules=_endings(network, wanted))
    convert_peft_config_for_transformers(probe, model=network, conversions=None)
    return sorted(probe.target_modules or ())


def _endings(network: PreTrainedModel, wanted: Collection[str]) -> list[str]:
    """Return the shortest ends of these modules' names, in whole parts, that no other module's name has."""
    others = {name for name, _ in network.named_modules()} - {*wanted}
    taken = {end for name in others for end in _ends(name)}
    return sorted({next((end for end in _ends(name) if end not in taken), name) for name in wanted})


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[at:]) for at in reversed(range(len(parts))))
