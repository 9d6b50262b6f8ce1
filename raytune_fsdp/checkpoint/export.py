"""A committed checkpoint of a run as a model again: exported, or in memory. One process, no process group."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.checkpoint.commit import Found, as_checkpoint, checkpoints_of, newest, verify
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.errors import ModelError, ResumeError
from raytune_fsdp.model.export import export
from raytune_fsdp.model.keys import owned_tensors

MODEL_FILES = "model"
"""Directory in the run directory with the model's config and tokenizer: what an export needs besides the weights."""


def find_checkpoint(path: Path) -> Found:
    """The checkpoint that `path` means: itself, or the newest complete one of the run directory it is."""
    path = path.resolve()  # the run directory is found from a checkpoint by its parents
    found = as_checkpoint(str(path))
    if found is not None:
        problem = verify(found, hashes=True)
        if problem:
            raise ResumeError(f"checkpoint {path} is damaged: {problem}; use another one beside it")
        return found
    found, _ = newest(checkpoints_of(path), hashes=True)
    if found is None:
        raise ResumeError(f"{path} is neither a committed checkpoint nor a run directory that holds one")
    return found


def model_files(checkpoint: Found) -> Path:
    """Config and tokenizer of the run that a checkpoint belongs to."""
    return Path(checkpoint.root).parent / MODEL_FILES


def export_checkpoint(checkpoint: Found, destination: Path, *, dtype: str, max_file_bytes: int) -> None:
    """Write `destination` from a committed checkpoint, tensor by tensor."""
    export(
        CheckpointWeights(checkpoint), model_files(checkpoint), destination, dtype=dtype, max_file_bytes=max_file_bytes
    )


def load_for_inference(path: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run, a checkpoint or a Hugging Face directory, in the type they are stored in."""
    if not path.is_dir():
        raise ModelError(
            f"{path}: there is no such directory; give a run, a checkpoint, or a Hugging Face model directory"
        )
    if (path / "config.json").is_file():
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            return model.to(device).eval(), AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, RuntimeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{path} is not a whole Hugging Face model directory: {first}") from error
    checkpoint = find_checkpoint(path)
    files = model_files(checkpoint)
    if not (files / "config.json").is_file():
        raise ModelError(f"{checkpoint.path} is not in a run directory: {files} has no config.json")
    weights = CheckpointWeights(checkpoint)
    tensors = weights.read_all(list(weights.shapes()))
    hf_config = AutoConfig.from_pretrained(files)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=next(iter(tensors.values())).dtype)
    wanted = set(owned_tensors(model))
    if wanted != set(tensors):
        raise ModelError(
            f"{checkpoint.path} does not hold what {files / 'config.json'} describes: {wanted ^ set(tensors)}"
        )
    model.load_state_dict(tensors, strict=False)  # not strict: a tied weight is stored under one of its names
    return model.to(device).eval(), AutoTokenizer.from_pretrained(files)
