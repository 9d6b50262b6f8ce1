"""Keeps libraries from printing."""

from __future__ import annotations

import os
import sys


def quiet() -> None:
    """Keep progress bars and advice of libraries out of the run's own lines. Variables set by a user are left alone."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of forks, and nothing is forked here
    if not sys.warnoptions:
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
