"""Collect the facts about a machine. Imports only the standard library at the top.

This file goes to the nodes of a cluster by value: a node may have another version of this package, or none.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

PACKAGES = (
    "torch", "transformers", "tokenizers", "ray", "numpy", "pyarrow", "datasets", "safetensors", "pydantic",
    "peft", "mlflow", "accelerate", "flash-attn", "flash-attn-3", "flash-attn-4",
)  # fmt: skip
_SECONDS = 12.0
_SMI_SECONDS, _LEAST_SECONDS = 8.0, 2.0
_STORAGE_SECONDS = 6.0
"""How long storage may take to answer after the imports: longer than storage that shows files late."""
_TICK = 0.1
NO_ANSWER = "run.storage does not answer there"
NOT_CHECKED = "not checked within"
_SEEN_BY_TORCH = """
import json, torch
found = {"count": torch.cuda.device_count(), "cuda": torch.version.cuda, "nccl": None}
if found["count"]:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        if "out of memory" not in str(error):  # else torch can use it: a job has all of its memory
            raise
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def look(try_torch: bool = True, token: tuple[str, ...] | None = None, seconds: float = _SECONDS) -> dict[str, Any]:
    """Return the facts about this machine, as plain data: on a node, classes of this file would be other classes.

    `try_torch`: also try whether torch can use the GPUs, which takes seconds. `token`: what to look for in the run's
    storage (writing.py). `seconds`: what takes longer is reported as NOT_CHECKED.
    """
    began, end = time.time(), time.monotonic() + seconds
    stored = _begin_storage(token, seconds) if token is not None else None
    gpus, why_none = _gpus(min(_SMI_SECONDS, seconds))
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "own": _own(),
        "gpus": gpus,
        "smi": why_none,
        "torch": _seen_by_torch(max(_LEAST_SECONDS, end - time.monotonic())) if gpus and try_torch else None,
        "shm": shm.f_frsize * shm.f_blocks if shm else None,
        "shm_free": shm.f_frsize * shm.f_bavail if shm else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "storage": _end_storage(*stored) if stored is not None else None,
        "clock": (began, time.time()),
    }


def _begin_storage(token: tuple[str, ...], seconds: float) -> tuple[Thread, list[tuple[str | None, float]]]:
    found: list[tuple[str | None, float]] = []
    stages: list[str] = []

    def work() -> None:
        try:
            from raytune_fsdp.tools.doctor.writing import from_node

            stages.append("asked")
            found.append(from_node(*token, seen=lambda: stages.append("seen")))
        except Exception as error:  # another version of this package, or none
            found.append((f"it could not be tried there ({type(error).__name__}: {error})", 0.0))

    def watch() -> None:
        thread = Thread(target=work, daemon=True)  # a dead mount would hold it for ever
        thread.start()
        end, asked = time.monotonic() + seconds, 0.0
        while thread.is_alive() and time.monotonic() < end and asked < _STORAGE_SECONDS:
            thread.join(_TICK)
            asked += _TICK if stages == ["asked"] else 0.0  # ticks, not the clock: this process may be stopped
        if found:
            return
        if asked >= _STORAGE_SECONDS:
            found.append((f"{NO_ANSWER} within {_STORAGE_SECONDS:g} s", 0.0))
        else:
            slow = (
                "it answers, and a write of some MB takes longer" if stages[1:] else "that node or its imports are slow"
            )
            found.append((f"{NOT_CHECKED} {seconds:.0f} s ({slow})", 0.0))

    watching = Thread(target=watch, daemon=True)
    watching.start()
    return watching, found


def _end_storage(watching: Thread, found: list[tuple[str | None, float]]) -> tuple[str | None, float]:
    watching.join()
    return found[0]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _own() -> tuple[str, str] | None:
    """Return this package's version here, and a hash of its code: two checkouts may have the same version."""
    spec = find_spec("raytune_fsdp")
    if spec is None or spec.origin is None:
        return None
    top = Path(spec.origin).parent
    said = re.search(r'__version__ = "([^"]*)"', (top / "__init__.py").read_text())
    code = hashlib.sha256()
    for file in sorted(top.rglob("*.py")):
        code.update(f"{file.relative_to(top)}\n".encode() + file.read_bytes())
    return (said[1] if said else "?", code.hexdigest()[:10])


def _gpus(seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that the driver knows, and the reason if it could not be asked."""
    fields = "name,memory.total,driver_version,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        return [], None
    except subprocess.TimeoutExpired:
        return [], f"{NOT_CHECKED} {seconds:.0f} s (nvidia-smi has not ended)"
    except OSError as error:
        return [], f"nvidia-smi: {type(error).__name__}"
    if done.returncode and not _nvidia_is_there():
        return [], None  # a machine of CPUs alone whose image has the driver
    if done.returncode:
        return [], f"nvidia-smi fails: {(done.stdout + done.stderr).strip()[:200]}"
    keys = ("name", "mib", "driver", "capability")
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)], None


def _nvidia_is_there(devices: str = "/dev", buses: str = "/sys/bus/pci/devices") -> bool:
    """Return whether the machine has an NVIDIA device, also one that its driver does not know."""
    cards = Path(buses).glob("*/vendor")
    return any(Path(devices).glob("nvidia*")) or any(card.read_text().strip() == "0x10de" for card in cards)


def _seen_by_torch(seconds: float) -> dict[str, Any]:
    """Ask torch about the GPUs, in another process: Ray hides them from a task that has reserved none."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _SEEN_BY_TORCH], capture_output=True, text=True, timeout=seconds,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"count": 0, "error": f"{NOT_CHECKED} {seconds:.0f} s"}
    except OSError as error:
        return {"count": 0, "error": type(error).__name__}
    if done.returncode:
        return {"count": 0, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
