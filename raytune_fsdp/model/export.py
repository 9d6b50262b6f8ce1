"""Weights out: a Hugging Face model directory that from_pretrained and inference servers load.

Tensors go from the source to safetensors files one file at a time, so no more than a file is ever in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from raytune_fsdp.errors import ModelError, TransientError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "trained": None}


class WholeTensors(Protocol):
    """What an export reads from."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def dtypes(self) -> dict[str, torch.dtype]: ...

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]: ...


def export(source: WholeTensors, model_files: Path, destination: Path, *, dtype: str, max_file_bytes: int) -> None:
    """Write `destination` anew: weights from `source`, config and tokenizer from the directory `model_files`.

    Written under a temporary name and renamed, so `destination` is either whole or not there.
    """
    if not (model_files / "config.json").is_file():
        raise ModelError(f"{model_files} has no config.json, so this run's model cannot be exported")
    destination = destination.absolute()
    _check_replaceable(destination)
    target = DTYPES[dtype]
    staging = destination.with_name(f".{destination.name}.export-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(model_files, staging)
    stored = source.dtypes()
    types = {name: _export_type(stored[name], target) for name in source.shapes()}
    files = _split(source.shapes(), types, max_file_bytes)
    file_of: dict[str, str] = {}
    for i, names in enumerate(files, start=1):
        file_name = "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        # One by one: of what is stored in another type, no more than a tensor is in memory.
        tensors = {name: source.read_all([name])[name].to(types[name]) for name in names}
        save_file(tensors, staging / file_name, metadata={"format": "pt"})
        _check_written(staging / file_name, tensors)
        file_of.update(dict.fromkeys(names, file_name))
    if len(files) > 1:
        total = sum(_bytes(shape, types[name]) for name, shape in source.shapes().items())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _set_dtype(staging / "config.json", types)
    shutil.rmtree(destination, ignore_errors=True)
    staging.rename(destination)


def _check_written(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """What is read back must be what was to be written, bit by bit."""
    with safe_open(file, "pt") as written:
        there = set(written.keys())
        wrong = [n for n, tensor in tensors.items() if n not in there or not _same(written.get_tensor(n), tensor)]
    if wrong or there != set(tensors):
        raise TransientError(
            f"{file} was not written as it should be ({', '.join(wrong[:3]) or 'other tensors'}), so nothing was "
            "exported: check the disk, and export again"
        )


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit: a NaN is the same as itself."""
    left, right = left.contiguous().reshape(-1), right.contiguous().reshape(-1)
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _check_replaceable(destination: Path) -> None:
    """What will be deleted must be a model, not whatever else a user's slip may name."""
    if destination.exists() and not (destination / "config.json").is_file():
        if destination.is_dir() and not any(destination.iterdir()):
            return
        raise ModelError(f"{destination} exists and is not a model directory; export to another path, or remove it")


def _export_type(stored: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    return target if target is not None and stored.is_floating_point else stored


def _split(shapes: dict[str, tuple[int, ...]], types: dict[str, torch.dtype], max_file_bytes: int) -> list[list[str]]:
    """Names by file: in their order, a new file where the next tensor does not fit. A larger tensor has its own."""
    files: list[list[str]] = []
    used = max_file_bytes + 1
    for name, shape in shapes.items():
        size = _bytes(shape, types[name])
        if used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _set_dtype(config_file: Path, types: dict[str, torch.dtype]) -> None:
    """Say in config.json which type the weights have now; it is what from_pretrained loads them as."""
    config = json.loads(config_file.read_text())
    main = max(set(types.values()), key=list(types.values()).count)
    config["dtype"] = str(main).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
