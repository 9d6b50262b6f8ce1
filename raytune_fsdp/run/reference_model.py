"""The model that an objective compares with, found before any rank is started (run/reference/find.py)."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.model.network import build_network
from raytune_fsdp.run.starting_weights import AdapterFiles, StartingWeights, find_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """A model to compare with, found before any rank is started. Picklable."""

    config: FinetuneConfig
    """Of a run that starts from it."""
    hf_config: PretrainedConfig
    needs: KernelNeeds
    origin: StartingWeights | None
    directory: Path | None
    """Of its config and tokenizer."""
    added: Collection[int] = ()
    adapted: Collection[str] | None = None
    is_start: bool = False
    """Whether it is what the run itself starts from."""

    def adapter_files(self) -> AdapterFiles | None:
        """Return the adapter that belongs to it, after checking that it fits."""
        if getattr(self.config.method, "adapter", None) is None:
            return None
        network = build_network(copy.deepcopy(self.hf_config), self.config, self.added, self.adapted)
        return find_adapter(self.config, network, self.directory)
