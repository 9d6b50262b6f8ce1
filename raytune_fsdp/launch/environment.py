"""Environment variables for the libraries below: those that must not outlive the call that needs them, and a rank's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from raytune_fsdp.config import FinetuneConfig

_lock = Lock()
_held: Counter[str] = Counter()
"""Variables that are ours, and how many blocks need each: two threads may call finetune() at the same time."""


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those of these variables that a user has not set, while the block lasts."""
    with _lock:
        ours = [name for name in defaults if name not in os.environ or _held[name]]
        for name in ours:
            os.environ.setdefault(name, defaults[name])
        _held.update(ours)
    try:
        yield
    finally:
        with _lock:
            _held.subtract(ours)
            for name in ours:
                if not _held[name]:
                    os.environ.pop(name, None)


def settings_of_nccl(config: FinetuneConfig, known: Mapping[str, str]) -> dict[str, str]:
    """What has to be in a rank's environment before it joins the others."""
    # Switches that add up (NVLS) do so in another order each time. torch leaves them out itself in its deterministic
    # mode, but only if that is on when the group is made.
    alike = config.run.deterministic and config.cluster.device != "cpu" and "NCCL_ALGO" not in known
    return {"NCCL_ALGO": "^NVLS"} if alike else {}
