"""Name the modules to adapt for PEFT, so that it adapts what the method says, and nothing else.

In transformers 4 the experts of many architectures were linear layers, and now they are stacked weights. For these
architectures PEFT reads the old layers' last names as the weights, and an expression as the last names of what it
matches: `model\\.layers\\.1\\..*q_proj` would be every `q_proj`, here and where others load the adapter.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.config.sections.method import ALL_LINEAR, AdapterMethod, LoraMethod
from raytune_fsdp.model.objective.routers import names_of_routers


def targets_of(network: PreTrainedModel, method: LoraMethod) -> str | list[str]:
    """Return what PEFT gets as `target_modules`: names, or an expression that it keeps as one."""
    asked = method.target_modules
    if asked == ALL_LINEAR:
        return _linear_names(network, routers_of_method(network, method))
    return _whole_names(network, asked, method.target_parameters) if is_expression(asked) else asked


def routers_of_method(network: PreTrainedModel, method: AdapterMethod) -> list[str]:
    """Return the names of the modules that choose experts, if the method says what becomes of them."""
    asked = isinstance(method, LoraMethod) and method.routers is not None
    return names_of_routers(network) if asked else []


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


def _linear_names(network: PreTrainedModel, left_out: list[str]) -> list[str]:
    """Return the last parts of the names of all linear layers but the head and those of these modules.

    PEFT's own `all-linear` is not used: it includes the experts, which take no dropout. Names that PEFT would take for
    experts are left out.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head = network.get_output_embeddings()
    linear = (nn.Linear, Conv1D)
    modules = dict(network.named_modules())
    names = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, linear)}
    # Some routers are linear layers that return two tensors (Llama 4's), which an adapter cannot handle.
    kept = {
        name.rpartition(".")[2]
        for name, module in modules.items()
        if module is head or (isinstance(module, linear) and type(module).__name__.endswith("Router"))
    }
    kept |= {name.rpartition(".")[2] for name in modules if any(f"{name}.".startswith(f"{each}.") for each in left_out)}
    probe = LoraConfig(target_modules=sorted(names - kept))
    convert_peft_config_for_transformers(probe, model=network, conversions=None)
    return sorted(probe.target_modules or ())
