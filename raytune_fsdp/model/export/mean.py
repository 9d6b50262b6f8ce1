"""The mean of several networks of one shape, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.export.write import WholeTensors


class MeanTensors:
    """The mean of several sources' tensors, summed in fp64. One tensor of one source is in memory besides the sum."""

    def __init__(self, sources: Sequence[WholeTensors]) -> None:
        self._sources = sources
        first, *others = sources
        for other in others:
            differ = sorted({name for name, _ in first.shapes().items() ^ other.shapes().items()})
            if differ:
                raise ModelError(f"these checkpoints are not of one network: {differ[0]} differs; name others")
        self._dtypes = first.dtypes()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._sources[0].shapes()

    def dtypes(self) -> dict[str, torch.dtype]:
        return self._dtypes

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the means of several whole tensors, on the CPU."""
        return {name: self._mean(name) for name in names}

    def _mean(self, name: str) -> torch.Tensor:
        dtype = self._dtypes[name]
        tensors = (source.read_all([name])[name] for source in self._sources)
        if not dtype.is_floating_point:  # counts have no mean; the newest is as good as any
            return list(tensors)[-1]
        total = next(tensors).double()
        for tensor in tensors:
            total += tensor
        return (total / len(self._sources)).to(dtype)
