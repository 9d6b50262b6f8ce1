"""Weights out: a Hugging Face model directory that from_pretrained and inference servers load.

Tensors go from the source to safetensors files one by one, under the keys that transformers' save_pretrained gives
them; no more than the largest of them is in memory, and what it becomes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raytune_fsdp.durable import sync_directory
from raytune_fsdp.errors import ModelError, TransientError
from raytune_fsdp.model.conversion import Outgoing, outgoing
from raytune_fsdp.model.tensorfile import TensorFile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "trained": None}

CARD_FILE = "README.md"

Shapes = Mapping[str, tuple[int, ...]]


class WholeTensors(Protocol):
    """What an export reads from."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def dtypes(self) -> dict[str, torch.dtype]: ...

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]: ...


def export(
    source: WholeTensors,
    model_files: Path,
    destination: Path,
    *,
    dtype: str,
    max_file_bytes: int,
    card: str | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """Write `destination` anew: weights from `source`, config and tokenizer from the directory `model_files`.

    Written under a temporary name, read again, and renamed: `destination` is either whole or not there. `leave_out`:
    files in `model_files` that are not the model's.
    """
    if not (model_files / "config.json").is_file():
        raise ModelError(f"{model_files} has no config.json, so this run's model cannot be exported")
    destination = destination.absolute()
    _check_replaceable(destination)
    staging = destination.with_name(f".{destination.name}.export-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(model_files, staging, ignore=shutil.ignore_patterns(*leave_out))
        if card is not None:
            (staging / CARD_FILE).write_text(card, encoding="utf-8")
        types = _write_weights(source, _skeleton(model_files), staging, DTYPES[dtype], max_file_bytes)
        _set_dtype(staging / "config.json", types)
        sync_directory(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(destination, ignore_errors=True)
    staging.rename(destination)
    sync_directory(destination.parent)


def _skeleton(model_files: Path) -> PreTrainedModel | None:
    """The network without memory, None if it needs code that is not transformers' own."""
    values = json.loads((model_files / "config.json").read_text())
    model_type = values.get("model_type")
    if "auto_map" in values or model_type not in CONFIG_MAPPING:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(values))
    return model


def _write_weights(
    source: WholeTensors, model: PreTrainedModel | None, staging: Path, target: torch.dtype | None, max_file_bytes: int
) -> dict[str, torch.dtype]:
    """Every tensor into its file, and the index. Returns the types in the files."""
    groups = outgoing(source.shapes(), model)
    stored_types = source.dtypes()
    shapes = {key: shape for group in groups for key, shape in group.stored.items()}
    types = {key: _export_type(stored_types[group.names[0]], target) for group in groups for key in group.stored}
    files = _split(shapes, types, max_file_bytes)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        for i in range(1, len(files) + 1)
    ]
    file_of = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
    _write_files(
        source, model, groups, {n: {k: shapes[k] for k in f} for n, f in zip(names, files, strict=True)}, types, staging
    )
    if len(files) > 1:
        total = sum(_bytes(shape, types[key]) for key, shape in shapes.items())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return types


def _write_files(
    source: WholeTensors,
    model: PreTrainedModel | None,
    groups: Sequence[Outgoing],
    files: Mapping[str, Shapes],
    types: Mapping[str, torch.dtype],
    staging: Path,
) -> None:
    """One file after the other: the groups come in the order of the files. A thread reads what is finished again."""
    pending = iter(files.items())
    name, left, file = "", set[str](), None
    with ThreadPoolExecutor(1) as reader:
        checks: list[Future[None]] = []
        for group in groups:
            read = {n: source.read_all([n])[n] for n in group.names}
            first = next(iter(group.stored))
            tensors = group.turn_back({n: read.pop(n).to(types[first]) for n in group.names}, model)
            for key in group.stored:
                if not left:
                    name, shapes = next(pending)
                    left, file = set(shapes), TensorFile(staging / name, shapes, types)
                assert file is not None and key in left, f"{key} is out of order"
                file.write(key, tensors.pop(key))
                left.remove(key)
                if not left:
                    checks.append(reader.submit(_finish, staging / name, file))
            for check in [each for each in checks if each.done()]:
                check.result()
        for check in checks:
            check.result()


def _finish(path: Path, file: TensorFile) -> None:
    """What is read back must be what was to be written, bit by bit."""
    file.close()
    wrong = file.differences()
    if wrong:
        raise TransientError(
            f"{path} was not written as it should be ({', '.join(wrong[:3])}), so nothing was exported: check the "
            "disk, and export again"
        )


def _check_replaceable(destination: Path) -> None:
    """What will be deleted must be a model, not whatever else a user's slip may name."""
    if destination.exists() and not (destination / "config.json").is_file():
        if destination.is_dir() and not any(destination.iterdir()):
            return
        raise ModelError(f"{destination} exists and is not a model directory; export to another path, or remove it")


def _export_type(stored: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    return target if target is not None and stored.is_floating_point else stored


def _split(shapes: Shapes, types: Mapping[str, torch.dtype], max_file_bytes: int) -> list[list[str]]:
    """Keys by file: in their order, a new file where the next tensor does not fit. A larger tensor has its own."""
    files: list[list[str]] = []
    used = max_file_bytes + 1
    for key, shape in shapes.items():
        size = _bytes(shape, types[key])
        if used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(key)
        used += size
    return files


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _set_dtype(config_file: Path, types: Mapping[str, torch.dtype]) -> None:
    """Say in config.json which type the weights have now; it is what from_pretrained loads them as."""
    config = json.loads(config_file.read_text())
    main = max(set(types.values()), key=list(types.values()).count)
    config["dtype"] = str(main).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
