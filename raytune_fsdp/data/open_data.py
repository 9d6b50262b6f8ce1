"""From a config to its data: the windows to train on, and the windows of each evaluation dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raytune_fsdp.config import DatasetConfig, FinetuneConfig
from raytune_fsdp.data.sources import dataset_name
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.errors import DataError
from raytune_fsdp.rundir import cache_of
from raytune_fsdp.types import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def open_data(
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    order_version: int | None = None,
) -> tuple[Windows, dict[str, Windows]]:
    """The training data, and each evaluation dataset by its name. `order_version`: that of the run, if it continues."""
    cache = cache_of(config)

    def windows(datasets: Sequence[DatasetConfig]) -> Windows:
        return Windows(
            datasets, config.data, seed=config.run.seed, tokenizer=tokenizer, vocab_size=vocab_size, cache=cache,
            progress=progress, order_version=order_version,
        )  # fmt: skip

    train = windows(config.data.train)
    evals = {dataset_name(dataset): windows([dataset]) for dataset in config.data.eval}
    if len(evals) != len(config.data.eval):
        raise DataError("data.eval: two datasets have the same name; give each its own data.eval.*.name")
    _warn_of_overlap(train, evals)
    return train, evals


def _warn_of_overlap(train: Windows, evals: Mapping[str, Windows]) -> None:
    """Warn, not refuse: the loss on training data says little about new data, but some want to see it."""
    trained = {fingerprint: file for source in train.sources for file, fingerprint in source.fingerprints.items()}
    for name, windows in evals.items():
        (source,) = windows.sources
        shared = [file for file, fingerprint in source.fingerprints.items() if fingerprint in trained]
        if shared:
            logger.warning(
                "data.eval %s: %d of its %d file(s) are also trained on (%s has the same content as %s), so its loss "
                "does not show how the model does on new data", name, len(shared), len(source.fingerprints), shared[0],
                trained[source.fingerprints[shared[0]]],
            )  # fmt: skip
