"""Keeps libraries from printing."""

from __future__ import annotations

import os
import sys
import warnings

_LIBRARIES = r"(transformers|tokenizers|huggingface_hub|torch|datasets|raytune_fsdp)(\.|$)"
"""Whose warnings are not shown. Ours are lines of a log; what is warned of in our name is how we call the others."""


def quiet() -> None:
    """Keep progress bars and advice of libraries out of the run's own lines. Variables set by a user are left alone."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # it warns of forks, and nothing is forked here
    if not sys.warnoptions:
        # The variable is for processes that start later: in this one it was read before.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
