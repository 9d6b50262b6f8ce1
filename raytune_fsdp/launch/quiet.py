"""Keeps libraries from printing."""

from __future__ import annotations

import os
import sys


def quieting() -> dict[str, str]:
    """Variables that keep progress bars and advice of libraries out of the run's own lines."""
    found = {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",  # it warns of forks, and nothing is forked here
    }
    return found if sys.warnoptions else {**found, "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning"}


def quiet() -> None:
    """Set them in a process of our own. Those set by a user are left alone."""
    for name, value in quieting().items():
        os.environ.setdefault(name, value)
