"""Export weights: a Hugging Face model directory that from_pretrained and inference servers load.

Tensors go from the source to safetensors files one by one, under the keys that transformers' save_pretrained gives
them. No more than one tensor is in memory at a time, and the converted one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from raytune_fsdp.base.errors import ModelError, TransientError
from raytune_fsdp.base.row_hashes import TensorRows, root
from raytune_fsdp.base.untrusted import MIB, read_file, read_json, reason
from raytune_fsdp.model.directory.bounds import check_tokenizer_files, read_config
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.directory.known_files import (
    CARD_FILE,
    CONFIG_FILE,
    SEEING_FILES,
    TOKENIZER_CONFIG_FILE,
    check_links,
    code_files,
    read_object,
    travelling,
)
from raytune_fsdp.model.directory.needed_code import check_there, function_in
from raytune_fsdp.model.directory.tensorfile import TensorFile
from raytune_fsdp.model.export.mark import new_export
from raytune_fsdp.model.export.older_names import add_older_names, rename_tokenizer
from raytune_fsdp.model.network import kept_in_fp32, stored_network
from raytune_fsdp.model.weights.conversion import outgoing, under_keys
from raytune_fsdp.model.weights.keys import match_keys, matched_weights, owned_tensors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "trained": None}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """The network that an export is written as, if it is not the one that was trained."""

    network: PreTrainedModel
    """A network on the meta device. The export has its class, its config and all of its tensors."""
    key_of: Mapping[str, str] = field(default_factory=dict)
    """Keys in the base's own files by names in the network. Other keys are those of transformers' save_pretrained."""
    base_directory: Path | None = None
    """A directory with the files that say how images and sounds become tensors."""


class WholeTensors(Protocol):
    """What an export reads: all tensors of a network, each whole."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def dtypes(self) -> dict[str, torch.dtype]: ...

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read several whole tensors, on the CPU."""


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


_HASHERS = 2
"""Threads that hash a tensor while it is written: each about 1.3 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensors:
    """The tensors of an export as its files have them, by key: merged, cast, and named as others load them."""

    shapes: Shapes
    """In the order in which they are made."""
    types: Mapping[str, torch.dtype]
    make: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Makes one after the other, so that no more than one is in memory."""

    def each(self, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, and hash it while the caller does something with it; put the digest into `digests`.

        The caller must not keep it.
        """
        with ThreadPoolExecutor(_HASHERS) as threads:
            for key, made in self.make():
                tensor = made.contiguous()  # once, for the hashes and for the file
                del made
                rows = TensorRows.of(key, tensor.dtype, tensor.shape)
                hashed = rows.hashed(0, tensor, threads)
                yield key, tensor
                digests[key] = rows.digest(hashed)
                del tensor, hashed  # before the next one is made


def export(
    source: WholeTensors,
    model_files: Path,
    destination: Path,
    *,
    dtype: str,
    max_file_bytes: int,
    card: Callable[[str], str] | None = None,
    form: ExportForm | None = None,
    trust_remote_code: bool = False,
    adopt: bool = False,
) -> None:
    """Write a model directory: weights from `source`, config and tokenizer from the directory `model_files`.

    It is written under a temporary name, read again, and renamed: `destination` is either complete or not there. Code
    that comes with the model is copied only if the user trusts it, and never run. `adopt`: replace an older export
    without a mark, too. `form`: the network to write it as, if it is not the one of the config. `card`: returns the
    text of the card for the digest of all tensors that are written.
    """
    if not (model_files / CONFIG_FILE).is_file():
        raise ModelError(f"{model_files} has no {CONFIG_FILE}, so the model of this run cannot be exported")
    check_tokenizer_files(model_files)
    _check_code(model_files, trust_remote_code)
    with new_export(destination, model_files, adopt=adopt) as staging:
        copy_known(model_files, staging, code=trust_remote_code)
        if form is not None:
            _put_form(form, staging)
        model = stored_network(model_files) if form is None else form.network
        stored = _stored(source, model, {} if form is None else form.key_of, DTYPES[dtype])
        digests = _write_weights(stored, staging, max_file_bytes)
        if card is not None:
            (staging / CARD_FILE).write_text(card(root(digests)), encoding="utf-8")
        _write_configs(staging, stored.types, code=trust_remote_code)
        if model is not None:
            check_complete(staging, model, source.shapes())


def _put_form(form: ExportForm, staging: Path) -> None:
    """Write the config of another network than the one that was trained, and the files of its processors."""
    config = read_object(staging / CONFIG_FILE)
    if config.get("model_type") != form.network.config.model_type:
        config = json.loads(form.network.config.to_json_string())
    _write_json(staging / CONFIG_FILE, {**config, "architectures": [type(form.network).__name__]})
    for file in [form.base_directory / name for name in SEEING_FILES] if form.base_directory is not None else []:
        try:
            check_links(file)
            # Copied as it is, if it is JSON and no larger than such a file is.
            read_json(file, limit=MIB, links=True)
            (staging / file.name).write_bytes(read_file(file, limit=MIB, links=True))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ModelError(f"{file} {reason(error)}: download the model again") from error


def check_complete(directory: Path, model: PreTrainedModel, shapes: Shapes) -> None:
    """Refuse an export that lacks a tensor of its network, or has another one, by transformers' rules for loading.

    Only the headers of its files are read: their content was read back when it was written.
    """
    try:
        files = find_weights(directory)
        found = matched_weights(files, match_keys(model, files), model).shapes()
    except ModelError as error:
        raise ModelError(f"the export is not what transformers would load, so nothing was exported: {error}") from error
    differ = sorted(name for name, _ in found.items() ^ shapes.items())
    if differ:
        raise ModelError(f"the export has another {differ[0]} than what was trained, so nothing was exported")


def _check_code(model_files: Path, trusted: bool) -> None:
    """Refuse to spread Python code that nobody has read. A tokenizer may name code that never came with it."""
    config = read_config(model_files)
    if (function := function_in(config)) is not None:  # it lies elsewhere, and nothing of it is copied
        check_there(function, model_files)
    named = code_files(model_files)
    if not trusted and (named or "auto_map" in config):
        raise ModelError(
            f"{model_files} has a model with Python code of its own ({', '.join(named) or 'auto_map in config.json'}), "
            "which an export contains: read it, then add --trust-remote-code (in a run: model.trust_remote_code=true)"
        )


def copy_known(model_files: Path, staging: Path, *, code: bool, without: Collection[str] = ()) -> None:
    """Copy the files that belong to a model besides its weights."""
    for name in travelling(model_files, code=code):
        if name in without:
            continue
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model_files / name, staging / name, follow_symlinks=False)


def _check_own(shapes: Shapes, model: PreTrainedModel) -> None:
    """Refuse weights of another network than config.json describes: nothing could load the export."""
    wanted = {name: tuple(tensor.shape) for name, tensor in owned_tensors(model).items()}
    differ = sorted({name for name, _ in wanted.items() ^ shapes.items()})
    if differ:
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        raise ModelError(f"the checkpoint is not of the network that config.json describes: {differ[0]} differs{more}")


def stored_model(
    source: WholeTensors, model_files: Path, *, dtype: str, form: ExportForm | None = None
) -> StoredTensors:
    """Return the tensors that `export` writes of these weights."""
    if form is not None:
        return _stored(source, form.network, form.key_of, DTYPES[dtype])
    return _stored(source, stored_network(model_files), {}, DTYPES[dtype])


def _stored(
    source: WholeTensors, model: PreTrainedModel | None, key_of: Mapping[str, str], target: torch.dtype | None
) -> StoredTensors:
    if model is not None:
        _check_own(source.shapes(), model)
    groups = under_keys(outgoing(source.shapes(), model), key_of, source.shapes())
    stored_types = source.dtypes()
    shapes = {key: shape for group in groups for key, shape in group.stored.items()}
    kept = kept_in_fp32(model, target) if model is not None and target is not None else set()
    types: dict[str, torch.dtype] = {}
    for group in groups:
        # Integers keep their type, and so do tensors that the architecture keeps in fp32.
        stored = stored_types[group.names[0]]
        cast = target is not None and stored.is_floating_point and kept.isdisjoint(group.names)
        types |= dict.fromkeys(group.stored, target if target is not None and cast else stored)

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for group in groups:
            read = {n: source.read_all([n])[n] for n in group.names}
            first = next(iter(group.stored))
            tensors = group.turn_back({n: _cast(n, read.pop(n), types[first]) for n in group.names}, model)
            for key in group.stored:
                yield key, tensors.pop(key)

    return StoredTensors(shapes=shapes, types=types, make=make)


def _write_weights(stored: StoredTensors, staging: Path, max_file_bytes: int) -> dict[str, str]:
    """Write every tensor to its file, and the index. Return the digest of each, by key."""
    files = _split(stored.shapes, stored.types, max_file_bytes)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        for i in range(1, len(files) + 1)
    ]
    file_of = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
    digests = _write_files(stored, dict(zip(names, files, strict=True)), staging)
    if len(files) > 1:
        total = sum(_bytes(shape, stored.types[key]) for key, shape in stored.shapes.items())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return digests


def _write_files(stored: StoredTensors, files: Mapping[str, Sequence[str]], staging: Path) -> dict[str, str]:
    """Write one file after the other; tensors are in the order of the files. A thread meanwhile reads finished files.

    One tensor at a time: a model of 936 MB is written within 192 MiB of memory, its embedding in fp32 and in bf16. With
    all checks an export takes 2.38 s instead of 1.32 (docs/results.md).
    """
    pending = iter(files.items())
    name, left, file = "", set[str](), None
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(1) as reader:
        checks: list[Future[None]] = []
        for key, tensor in stored.each(digests):
            if not left:
                name, keys = next(pending)
                left, file = set(keys), TensorFile(staging / name, {k: stored.shapes[k] for k in keys}, stored.types)
            assert file is not None and key in left, f"{key} is out of order"
            file.write(key, tensor)
            del tensor
            left.remove(key)
            if not left:
                checks.append(reader.submit(finish, staging / name, file))
            for check in [each for each in checks if each.done()]:
                check.result()  # a bad disk ends the export here, not after the last file
        for check in checks:
            check.result()
    return digests


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if dtype == torch.float16 and cast.isinf().any() and not tensor.isinf().any():
        raise ModelError(f"{name} has values that are too large for fp16: export as bf16 or fp32")
    return cast


def finish(path: Path, file: TensorFile) -> None:
    """Close the file, read it back, and compare it bit by bit with the tensors that were written."""
    file.close()
    wrong = file.differences()
    if wrong:
        raise TransientError(
            f"{path} does not read back as it was written ({', '.join(wrong[:3])}), so nothing was exported: check the "
            "disk, then export again"
        )


def _split(shapes: Shapes, types: Mapping[str, torch.dtype], max_file_bytes: int) -> list[list[str]]:
    """Split keys into files, in order: a new file begins when the next tensor does not fit, so a huge one is alone."""
    files: list[list[str]] = []
    used = max_file_bytes + 1  # the first tensor begins a file
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


def _write_configs(staging: Path, types: Mapping[str, torch.dtype], *, code: bool) -> None:
    """Put transformers 4's names into the configs, and the type of most weights, in which from_pretrained loads all."""
    config = read_object(staging / CONFIG_FILE)
    main = max(set(types.values()), key=list(types.values()).count)
    add_older_names(config, str(main).removeprefix("torch."))
    _write_json(staging / CONFIG_FILE, config)
    write_tokenizer_config(staging, code=code)


def write_tokenizer_config(staging: Path, *, code: bool) -> None:
    """Put what transformers 4 knows into the config of a tokenizer, if there is one."""
    file = staging / TOKENIZER_CONFIG_FILE
    if file.exists():
        values = read_object(file)
        if not code:
            values.pop("auto_map", None)  # the tokenizer was loaded without its code, which is not exported
        rename_tokenizer(values, staging)
        _write_json(file, values)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
