"""The names of the modules to adapt, in PEFT's words: so that PEFT adapts what the method says, and nothing else.

In transformers 4 the experts of many architectures were linear layers, and now they are stacked weights. For these
architectures PEFT takes the last names of those layers for the weights, and an expression for the last names of what it
matches: `model\\.layers\\.1\\..*q_proj` would be every `q_proj`, here and where others load the adapter.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from raytune_fsdp.config.sections.method import ALL_LINEAR, LoraMethod


def targets_of(network: PreTrainedModel, method: LoraMethod) -> str | list[str]:
    """What PEFT is given as `target_modules`: names, or an expression that it keeps as one."""
    asked = method.target_modules
    if asked == ALL_LINEAR:
        return _linear_names(network)
    return _whole_names(network, asked, method.target_parameters) if is_expression(asked) else asked


def is_expression(targets: object) -> bool:
    """Whether modules are adapted whose whole names an expression matches."""
    return isinstance(targets, str) and targets.lower() != ALL_LINEAR


def _whole_names(network: PreTrainedModel, expression: str | list[str], parameters: list[str]) -> str | list[str]:
    """The whole names that an expression matches, if PEFT would not keep it. One in which it finds experts stays as it
    is: PEFT then says what it lacks, or `attach` refuses them by name."""
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


def _linear_names(network: PreTrainedModel) -> list[str]:
    """What all linear layers but the head are called, the last part of their names.

    Not in PEFT's word for it, which stands for the experts, too, and they take no dropout. So the names are left out
    that PEFT would take for experts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head = network.get_output_embeddings()
    linear = (nn.Linear, Conv1D)
    modules = dict(network.named_modules())
    names = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, linear)}
    # Some routers are linear layers that return two tensors (Llama 4's), of which an adapter knows nothing.
    kept = {
        name.rpartition(".")[2]
        for name, module in modules.items()
        if module is head or (isinstance(module, linear) and type(module).__name__.endswith("Router"))
    }
    probe = LoraConfig(target_modules=sorted(names - kept))
    convert_peft_config_for_transformers(probe, model=network, conversions=None)
    return sorted(probe.target_modules or ())
