"""Set environment variables for libraries: some only during the call that needs them, some for a whole rank."""

from __future__ import annotations

import fcntl
import os
import platform
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import cache_of

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

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


def settings_of_nccl(config: FinetuneConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank needs in its environment before it joins the others."""
    # Switches that add up (NVLS) do so in another order each time. torch itself excludes them in its deterministic
    # mode, but only if that is on when the group is made.
    alike = config.run.repeats_bits and config.cluster.device != "cpu" and "NCCL_ALGO" not in known
    return {"NCCL_ALGO": "^NVLS"} if alike else {}


@contextmanager
def compiled_code_kept(config: FinetuneConfig, device: str) -> Iterator[None]:
    """Have torch keep what it compiles in the run's cache while the context lasts, where any node finds it again.

    This is left out if layers are not compiled on this type of device, if compiled code cannot be kept there, or if a
    user has named another place. torch's own place is among the machine's temporary files, which a new container does
    not have.
    """
    place = place_of_compiled_code(config, device)
    if place is None:
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    own = os.environ.get(_COMPILED)
    if own == os.path.abspath(default_cache_dir()):
        del os.environ[_COMPILED]  # torch sets it when its compiler is imported: that is nobody's wish
    elif own not in (None, str(place)):
        yield
        return
    # Triton's, or torch would set it to a directory in there when it first needs it, and leave it so.
    with environment({_COMPILED: str(place), "TRITON_CACHE_DIR": str(place / "triton")}):
        yield


def place_of_compiled_code(config: FinetuneConfig, device: str) -> Path | None:
    """Return the directory for what is compiled on this type of device, or None if there is none."""
    asked = config.parallel.compile
    if config.run.exact or not (asked is True or (asked == "auto" and device == "cuda")):
        return None
    # Of this user alone, as it is run: others may write to the cache, too.
    place = cache_of(config) / f"compiled-{os.geteuid()}"
    if not _keeps_code(place):
        return None
    from torch.backends.cpu import get_cpu_capability  # here, as a command that starts ranks does without torch

    # What is compiled for a CPU with wide registers is wrong on another one, and torch's keys do not tell them apart.
    return place / f"{platform.machine()}-{get_cpu_capability()}"


def _keeps_code(place: Path) -> bool:
    """Return whether this directory, which is made, is ours alone, and can have locks and programs."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = place.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            return False
        with open(place / ".lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return not os.statvfs(place).f_flag & os.ST_NOEXEC
    except OSError:
        return False
