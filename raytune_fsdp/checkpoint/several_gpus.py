"""Put a model for inference on the device, or spread it over all GPUs and the host if it is too large for one."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError, pip_install

_SHARE = 0.8
"""The share of a GPU's free memory that weights may take. The rest is for what is computed with them, and for the cache
of a long conversation."""


def place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Put the model where it can be called with inputs on the device."""
    if device.type != "cuda":
        return model.to(device)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = torch.cuda.mem_get_info(device)[0]
    if needed <= _SHARE * free:
        return model.to(device)
    # Whole layers on each GPU, and what is left in host memory. One layer after the other is computed.
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise ModelError(
            f"the model has {needed / 1e9:.1f} GB of weights, and the GPU has {free / 1e9:.1f} GB of free memory: "
            f"{pip_install('large')} spreads it over all GPUs and the host"
        ) from None
    room = {place: int(_SHARE * size) for place, size in get_max_memory().items() if place != "cpu"}
    # All of it is in host memory already, so whatever fits on no GPU can stay there.
    devices = infer_auto_device_map(
        model, max_memory={**room, "cpu": 2 * needed}, no_split_module_classes=sorted(model._no_split_modules or [])
    )
    spread: PreTrainedModel = dispatch_model(model, device_map=devices, skip_keys=model._skip_keys_device_placement)
    return spread
