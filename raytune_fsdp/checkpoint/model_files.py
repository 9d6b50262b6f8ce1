"""The config and tokenizer that belong to a committed checkpoint, and the checkpoint as a model. Needs no ranks."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, as_checkpoint, newest, verify
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.errors import ModelError, ResumeError, first_line
from raytune_fsdp.model.bounds import check_tokenizer_files
from raytune_fsdp.model.files import find_weights
from raytune_fsdp.model.keys import owned_tensors
from raytune_fsdp.model.network import stored_network
from raytune_fsdp.rundir import MODEL_FILES, checkpoints_below, checkpoints_of
from raytune_fsdp.untrusted import UnsoundError, is_file_name, shown
from raytune_fsdp.urls import is_url

_COPIED_BYTES = 128 << 20  # a tokenizer's largest file; weights are never there
_MOST_PER_BYTE = 64  # bytes that a network may take for each of its files: those of 4 bits, read as fp32, take eight
READERS = 4
"""Files of a checkpoint that are read at the same time when one process reads them all: neither reading nor hashing
holds Python's lock."""


def find_checkpoint(place: Path | str) -> CommittedCheckpoint:
    """The verified checkpoint at a path or URL, or the newest intact one of a run directory."""
    # Resolved, since the run directory is found from a checkpoint by its parents.
    path = str(place) if is_url(str(place)) else str(Path(place).resolve())
    found = as_checkpoint(path)
    if found is not None:
        problem = verify(found, hashes=True, threads=READERS)
        if problem:
            raise ResumeError(f"checkpoint {path} is damaged: {problem}; use another one of the run")
        return found
    found, _ = newest(
        checkpoints_below(path) if is_url(path) else checkpoints_of(Path(path)), hashes=True, threads=READERS
    )
    if found is None:
        raise ResumeError(f"{path} is neither a committed checkpoint nor the directory of a run that has one")
    return found


def model_files(checkpoint: CommittedCheckpoint) -> Path:
    """The directory with config and tokenizer of a checkpoint's run; for an object store, a local copy."""
    return _copied(checkpoint.root) if is_url(checkpoint.root) else Path(checkpoint.root).parent / MODEL_FILES


def _copied(root: str) -> Path:
    beside = ObjectStorage(root.rpartition("/")[0])
    copy = Path(tempfile.mkdtemp(prefix="raytune-model-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for name in beside.sizes(MODEL_FILES):
        if not is_file_name(name):
            raise ModelError(f"{beside.where(MODEL_FILES)} has {shown(name)}, which is not the name of a model's file")
        try:
            (copy / name).write_bytes(beside.read(MODEL_FILES, name, _COPIED_BYTES))
        except UnsoundError as error:
            raise ModelError(f"{beside.where(MODEL_FILES)}/{name} {error}") from error
    return copy


def put_model_files(model: Path, checkpoints: str) -> None:
    """Copy config and tokenizer to where `model_files` looks, if the checkpoints are not in the run's directory."""
    if is_url(checkpoints):
        beside = ObjectStorage(checkpoints.rpartition("/")[0])
        for file in model.iterdir():
            beside.put(MODEL_FILES, file.name, file.read_bytes())
    elif Path(checkpoints).parent != model.parent:
        shutil.copytree(model, Path(checkpoints).parent / MODEL_FILES, dirs_exist_ok=True)


def load_for_inference(path: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run, a checkpoint or a Hugging Face directory, in the stored type."""
    if not path.is_dir():
        raise ModelError(
            f"{path}: there is no such directory; name a run, a checkpoint, or a Hugging Face model directory"
        )
    return _model_at(path, device) if (path / "config.json").is_file() else _model_of(find_checkpoint(path), device)


def _model_at(path: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a Hugging Face directory."""
    check_tokenizer_files(path)
    network, stored = stored_network(path), sum(find_weights(path).sizes().values())
    wanted = sum(tensor.nbytes for tensor in network.parameters()) if network is not None else 0
    if wanted > _MOST_PER_BYTE * stored:
        raise ModelError(
            f"{path / 'config.json'} describes a network of {wanted / 1e9:.1f} GB, but its weights have only "
            f"{stored / 1e9:.3f}: download the model again"
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        return model.to(device).eval(), AutoTokenizer.from_pretrained(path)
    except Exception as error:  # each of the libraries below has errors of its own
        raise ModelError(f"{path} is not a complete Hugging Face model directory: {first_line(error)}") from error


def _model_of(checkpoint: CommittedCheckpoint, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint."""
    files = model_files(checkpoint)
    if not (files / "config.json").is_file():
        raise ModelError(f"{checkpoint.path} is not in a run directory: {files} has no config.json")
    check_tokenizer_files(files)
    network, weights = stored_network(files), CheckpointWeights(checkpoint)
    shapes = weights.shapes()
    if network is not None:  # compared before it takes any memory
        wanted = {name: tuple(tensor.shape) for name, tensor in owned_tensors(network).items()}
        differ = sorted({name for name, _ in wanted.items() ^ shapes.items()})
        if differ:
            raise ModelError(
                f"{checkpoint.path} does not have the tensors of {files / 'config.json'}: {differ[0]} differs"
                + (f" (and {len(differ) - 1} more)" if len(differ) > 1 else "")
            )
    try:
        hf_config = AutoConfig.from_pretrained(files)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=next(iter(weights.dtypes().values())))
        tokenizer = AutoTokenizer.from_pretrained(files)
    except Exception as error:  # as above
        raise ModelError(f"{files} does not hold a model's config and tokenizer: {first_line(error)}") from error
    # Not strict: a tied weight is stored under one name only.
    model.load_state_dict(weights.read_all(list(shapes)), strict=False)
    return model.to(device).eval(), tokenizer
