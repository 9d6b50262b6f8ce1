"""Set environment variables: for libraries, some only during the call that needs them, some for a whole rank; and for
processes, so that they find this package."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import raytune_fsdp
from raytune_fsdp.config import FinetuneConfig

SHARED = "RAYTUNE_FSDP_FORKS"
"""Variable that names what several runs belong to, such as the directory of a sweep: they share the processes that
their workers are forked from."""
_lock = Lock()
_held: Counter[str] = Counter()
"""Variables that we have set, and how many callers need each: two threads may call finetune() at the same time."""


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set these variables, except those that a user has set, while the context lasts."""
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


def with_package(known: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is to find this package: a job's copy of it need not be installed."""
    here = str(Path(raytune_fsdp.__file__).parents[1])
    return {**known, "PYTHONPATH": os.pathsep.join(filter(None, (here, known.get("PYTHONPATH"))))}


def settings_of_nccl(config: FinetuneConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank needs in its environment before it joins the others."""
    if not config.run.repeats_bits or config.cluster.device == "cpu":
        return {}
    # Switches that add up do so in another order each time, within a node (NVLS) and between nodes (NVLSTree): NCCL
    # compares whole names, and ^ holds for all of them. torch itself excludes the first in its deterministic mode, but
    # only if that is on when the group is made. Of flash attention transformers asks it nothing.
    alike = {"NCCL_ALGO": "^NVLS,NVLSTree", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    return {name: value for name, value in alike.items() if name not in known}
