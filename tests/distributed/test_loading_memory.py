"""While loading, no rank holds more than its share of the model and two of the largest tensors."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loading import load
from tests.models import build
from tests.ranks import run_ranks

MIB = 1 << 20

SLACK = 8 * MIB
"""For the interpreter, the process group and the allocator's rounding."""

LARGE = {
    "vocab_size": 40_001,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
}


class Peak:
    """The most anonymous memory this process has held while the context was open, above what it held before.

    Pages of the weight files are left out: they are the system's cache, which it takes back when it needs to.
    """

    def __enter__(self) -> Peak:
        self._base = self._most = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.0005):
            self._most = max(self._most, _anonymous())

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self._most, _anonymous()) - self._base


def _anonymous() -> int:
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) * 1024  # type: ignore[index]


def _peak(small: Path, directory: Path, mode: str) -> tuple[int, int, int]:
    load(small, mode)  # what is loaded and started once is not the weights'
    with Peak() as peak:
        model = load(directory, mode)
    local = [p.to_local() for p in model.parameters()]
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return peak.bytes, sum(t.untyped_storage().nbytes() for t in local), largest


@pytest.mark.parametrize("name", ["llama", "starcoder2"])
@pytest.mark.parametrize("mode", ["sharded", "rank0"])
def test_loading_holds_the_shard_and_two_tensors_at_most(tmp_path: Path, mode: str, name: str) -> None:
    build(name).save_pretrained(tmp_path / "small")
    build(name, **LARGE).save_pretrained(tmp_path / "large", max_shard_size="100MB")
    for rank, (peak, shard, largest) in enumerate(run_ranks(_peak, 2, tmp_path / "small", tmp_path / "large", mode)):
        print(f"{name} {mode} rank {rank}: {peak / MIB:.1f} MiB, shard {shard / MIB:.1f}, largest {largest / MIB:.1f}")
        assert largest > 70 * MIB
        assert peak >= shard - SLACK, "the sampler saw nothing"
        assert peak <= shard + 2 * largest + SLACK
        if mode == "sharded":
            assert peak <= shard + SLACK, "reading slices needs no copy"
