"""Read weights that are stored quantized as 16-bit numbers: each row is computed when it is read.

The results are bit for bit those of transformers (`dequantize=True`), with no more than a few rows in memory. The
numbers are bf16, as before they were quantized, whatever type the network has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property

import torch

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.quantization import Quantization
from raytune_fsdp.model.weights.source import FileWeights, Weights, all_finite

DTYPE = torch.bfloat16

# Bytes of results computed at a time. The computation takes about six times as much: indices or fp32.
_PIECE_BYTES = 1 << 20

_GROUP = 16
"""Bytes of MXFP4 that share a scale: they are 32 numbers."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

Shape = tuple[int, ...]


def stored_weights(files: WeightFiles, key_of: Mapping[str, str]) -> Weights:
    """Return the tensors in files by their names in the network, quantized ones in 16 bits. Opens no file yet."""
    if files.quantization is None:
        return FileWeights(files, key_of)
    return DequantizedWeights(files, files.quantization, key_of)


def check_packed(files: WeightFiles) -> None:
    """Refuse tensors that cannot be dequantized: numbers without scales, or with scales that do not fit."""
    if files.quantization is not None:
        DequantizedWeights(files, files.quantization, {name: name for name in files.tensors()}).shapes()


class DequantizedWeights:
    """Weights in files, some of which are stored as numbers of few bits and scales."""

    def __init__(self, files: WeightFiles, quantization: Quantization, key_of: Mapping[str, str]) -> None:
        """Take in `key_of` the names of `files.tensors()` by names in the network."""
        stored = files.tensors()
        packed = {name: parts for name, key in key_of.items() if (parts := stored[key]) is not None}
        numbers = {name: packed[name].numbers if name in packed else key for name, key in key_of.items()}
        self._quantization = quantization
        self._numbers = FileWeights(files, numbers)
        # A separate reader, though mostly for the same files: no file is opened twice for a tensor.
        self._scales = FileWeights(files, {name: parts.scales for name, parts in packed.items()})
        self._packed = packed

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        """Shapes by name. Refuses what cannot be dequantized: every caller asks for shapes before rows."""
        numbers, scales = self._numbers.shapes(), self._scales.shapes()
        shapes = {}
        for name, shape in numbers.items():  # file by file
            dtype = self._numbers.read(name, 0, 0 if shape else 1).dtype
            if name in self._packed:
                of_scales = self._scales.read(name, 0, 0 if scales[name] else 1).dtype
                shape = self._unpacked(name, shape, dtype, scales[name], of_scales)
            elif self._quantization.method == "fp8" and dtype.is_floating_point and dtype.itemsize == 1:
                raise ModelError(
                    f"{self._numbers.where(name)} is {_short(dtype)} and has no scales, although the weights of this "
                    "model are quantized (fp8): download the model again"
                )
            shapes[name] = shape
        return shapes

    def _unpacked(self, name: str, shape: Shape, dtype: torch.dtype, scales: Shape, of_scales: torch.dtype) -> Shape:
        """Return the shape of a tensor, from the shapes of its numbers and scales."""
        if self._quantization.method == "mxfp4":
            wanted = shape[:-1]  # of the three dimensions (experts, outputs, inputs) the last is in groups
            self._check(name, len(shape) == 4 and shape[3:] == (_GROUP,), shape, f"[..., {_GROUP}] in 4 dimensions")
            self._check(name, dtype == torch.uint8, dtype, "uint8")
            self._check_scales(name, of_scales == torch.uint8, of_scales, "uint8")
            self._check_scales(name, scales == wanted, scales, list(wanted))
            return shape[0], shape[2] * 2 * _GROUP, shape[1]
        self._check(name, dtype == torch.float8_e4m3fn, dtype, "float8_e4m3fn")
        self._check(name, len(shape) in (2, 3), shape, "a matrix, or one of each expert")
        self._check_scales(name, of_scales in _SCALES, of_scales, "float32")
        group = self._quantization.block or shape[-2:]
        wanted = (*shape[:-2], *(-(-size // each) for size, each in zip(shape[-2:], group, strict=True)))
        alone = self._quantization.block is None and len(shape) == 2 and scales in ((), (1,))
        self._check_scales(name, scales == wanted or alone, scales, f"{list(wanted)} (groups of {list(group)})")
        return shape

    def _check(self, name: str, fits: bool, found: object, rule: object) -> None:
        _refuse(self._numbers.where(name), fits, found, rule)

    def _check_scales(self, name: str, fits: bool, found: object, rule: object) -> None:
        _refuse(self._scales.where(name), fits, found, f"{rule} for {self._packed[name].numbers}")

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._packed:
            return self._numbers.read(name, start, stop)
        shape = self._shapes[name]
        rows = torch.empty((stop - start, *shape[1:]), dtype=DTYPE)
        at_once = max(1, _PIECE_BYTES // max(1, DTYPE.itemsize * torch.Size(shape[1:]).numel()))
        for first in range(start, stop, at_once):
            last = min(stop, first + at_once)
            self._dequantize(name, first, last, rows[first - start : last - start])
        return rows

    def _dequantize(self, name: str, first: int, last: int, into: torch.Tensor) -> None:
        numbers = self._numbers.read(name, first, last)
        if self._quantization.method == "mxfp4":
            for expert, exponents in enumerate(self._scales.read(name, first, last)):
                _from_mxfp4(numbers[expert], exponents, into[expert])
            return
        *several, height, width = self._shapes[name]
        # No more than the matrix has: a stranger's config may say any size.
        rows, columns = map(min, self._quantization.block or (height, width), (height, width))
        # The scales of these rows; rows of a matrix may begin within a group.
        above, below = (first, last) if several else (first // rows, -(-last // rows))
        scales = self._scales.read(name, above, below).float()
        scales = scales.reshape(*numbers.shape[:-2], -1, -(-width // columns))  # a single scale may have no dimensions
        skipped = 0 if several else first - above * rows
        scales = scales.repeat_interleave(rows, -2)[..., skipped : skipped + numbers.shape[-2], :]
        scales = scales.repeat_interleave(columns, -1)[..., :width]
        into.copy_(numbers.float().mul_(scales))  # in fp32, rounded once

    def where(self, name: str) -> str:
        """Say where a tensor that is wrong is stored: in its scales, unless its numbers are wrong."""
        if name not in self._packed:
            return self._numbers.where(name)
        numbers = self._numbers.read(name, 0, self._numbers.shapes()[name][0])
        return (self._scales if all_finite(numbers) else self._numbers).where(name)


def _from_mxfp4(numbers: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor) -> None:
    """Dequantize one expert's matrix from [outputs, groups, 16] bytes. It is stored by outputs and used by inputs."""
    pairs, scales = _mxfp4_tables()
    at_once = max(1, _PIECE_BYTES // max(1, into.shape[0] * DTYPE.itemsize))
    for first in range(0, numbers.shape[0], at_once):
        codes = numbers[first : first + at_once]
        values = pairs.index_select(0, codes.flatten().int()).view(DTYPE).view(*codes.shape[:2], 2 * _GROUP)
        values.mul_(scales[exponents[first : first + at_once].int()].unsqueeze(-1))
        into[:, first : first + at_once] = values.flatten(1).T


@cache
def _mxfp4_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return both numbers of every byte as one integer, and every scale, of which the last is NaN.

    Products are exact in bf16, which has the exponents of fp32. With these tables a core makes 950 million numbers a
    second; with torch.ldexp on every number, 105 million.
    """
    numbers = torch.tensor([*_FP4, *(-each for each in _FP4)], dtype=DTYPE)
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], -1).view(torch.int32).flatten()
    return pairs, torch.tensor([*(2.0 ** (each - 127) for each in range(255)), torch.nan], dtype=DTYPE)


def _refuse(where: str, fits: bool, found: object, rule: object) -> None:
    if not fits:
        shape = list(found) if isinstance(found, tuple) else _short(found)
        raise ModelError(
            f"{where} is {shape}, and must be {rule}: its config.json describes another quantization; download the "
            "model again"
        )


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
