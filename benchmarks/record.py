"""A result: its numbers, and where they come from."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "mlflow", "pyarrow", "peft", "ray", "tokenizers", "trl")


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def origin() -> dict[str, Any]:
    """Date, versions and processor of a measurement."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := installed(name))},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def write_result(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin(), **values}, indent=1) + "\n")
    print(f"written: {path}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
