"""finetune(config) -> FinetuneResult: the whole of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.config import FinetuneConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """What a finished run has left."""

    run_dir: Path
    steps: int
    checkpoint: Path
    export: Path | None


def finetune(config: FinetuneConfig, progress: Callable[[int, int], None] | None = None) -> FinetuneResult:
    """Train to the end, continuing what is there, and export. Raises RaytuneError for everything that can go wrong.

    `progress(done, total)` is called while the data is counted.
    """
    _quiet()
    from raytune_fsdp.checkpoint.commit import committed
    from raytune_fsdp.checkpoint.export import export_checkpoint
    from raytune_fsdp.launch import local

    plan = local.run(config, progress).plan
    checkpoint = committed(plan.checkpoint_dir)[-1].path
    export = None
    if config.export.at_end and int(os.environ.get("RANK", "0")) == 0:
        export = plan.run_dir / "export"
        export_checkpoint(checkpoint, export, dtype=config.export.dtype, max_file_bytes=config.export.max_file_bytes)
    return FinetuneResult(run_dir=plan.run_dir, steps=plan.steps, checkpoint=checkpoint, export=export)


def _quiet() -> None:
    """Keep bars and advice of libraries out of the run's own lines; what a user set is left alone."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
