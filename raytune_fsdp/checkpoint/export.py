"""Export a committed checkpoint of a run as a Hugging Face model directory. One process, no GPU, no process group."""

from __future__ import annotations

from pathlib import Path

from raytune_fsdp.checkpoint.commit import MANIFEST_FILE, newest, verify
from raytune_fsdp.checkpoint.weights import CheckpointWeights
from raytune_fsdp.errors import ResumeError
from raytune_fsdp.model.export import export

MODEL_FILES = "model"
"""Directory in the run directory with the model's config and tokenizer: what an export needs besides the weights."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest complete one of the run directory it is."""
    if (path / MANIFEST_FILE).is_file():
        problem = verify(path)
        if problem:
            raise ResumeError(f"checkpoint {path} is damaged: {problem}; use another one beside it")
        return path
    found = newest(path / "checkpoints")
    if found is None:
        raise ResumeError(f"{path} is neither a committed checkpoint nor a run directory that holds one")
    return found.path


def model_files(checkpoint: Path) -> Path:
    """Config and tokenizer of the run that a checkpoint belongs to."""
    return checkpoint.parent.parent / MODEL_FILES


def export_checkpoint(checkpoint: Path, destination: Path, *, dtype: str, max_file_bytes: int) -> None:
    """Write `destination` from a committed checkpoint, tensor by tensor."""
    export(
        CheckpointWeights(checkpoint), model_files(checkpoint), destination, dtype=dtype, max_file_bytes=max_file_bytes
    )
