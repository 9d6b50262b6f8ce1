"""Keeps libraries from printing, and from doing what we do ourselves."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from raytune_fsdp.tracking.mlflow_run import ENVIRONMENT

_LIBRARIES = r"(transformers|tokenizers|huggingface_hub|torch|datasets|raytune_fsdp)(\.|$)"
"""Whose warnings are not shown. Ours are lines of a log; what is warned of in our name is how we call the others."""


def quieting() -> dict[str, str]:
    """Variables that keep progress bars and advice of libraries out of the run's own lines, and those for MLflow."""
    found = {
        **ENVIRONMENT,
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",  # it warns of forks, and nothing is forked here
    }
    return found if sys.warnoptions else {**found, "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning"}


def quiet() -> None:
    """Set them in a process of our own, and ignore what libraries warn of. Variables set by a user are left alone."""
    for name, value in quieting().items():
        os.environ.setdefault(name, value)
    _ignore_warnings()


@contextmanager
def ignoring_warnings() -> Iterator[None]:
    """The same for warnings in a process that is not ours, while the block lasts."""
    with warnings.catch_warnings():
        _ignore_warnings()
        yield


def _ignore_warnings() -> None:
    # The variable above is for processes that start later: in this one it was read before.
    if not sys.warnoptions:
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
