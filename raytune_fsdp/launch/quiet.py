"""Keep libraries from printing, and from doing what we do ourselves; and print every warning only once.

`raytune-fsdp train --verbose` lets libraries print.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raytune_fsdp.base.hushed import HUSHED, hush, is_verbose, set_levels
from raytune_fsdp.base.untrusted import Printable
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT

_LIBRARIES = r"(transformers|tokenizers|huggingface_hub|torch|datasets|raytune_fsdp)(\.|$)"
"""Packages whose Python warnings are not shown. Ours among them: our own warnings are lines of a log, and a Python
warning in our name is about how we call other libraries."""


_MOST_REMEMBERED = 1000


def quieting() -> dict[str, str]:
    """Return variables that keep libraries' progress bars and advice out of the run's own lines, and MLflow's."""
    if is_verbose():
        return dict(ENVIRONMENT)
    found = {
        **ENVIRONMENT,
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        HUSHED: "1",
        "TOKENIZERS_PARALLELISM": "true",  # otherwise it warns of forks, and nothing is forked here
    }
    return found if sys.warnoptions else {**found, "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning"}


def quiet() -> None:
    """Set these variables in a process of our own, unless a user has set them, and ignore libraries' warnings."""
    for name, value in quieting().items():
        os.environ.setdefault(name, value)
    _ignore_warnings()


@contextmanager
def ignoring_warnings() -> Iterator[None]:
    """Ignore libraries' warnings while the context lasts, in a process that may not be ours."""
    with warnings.catch_warnings():
        levels = _ignore_warnings()
        try:
            yield
        finally:
            set_levels(levels)


def _ignore_warnings() -> Mapping[str, int]:
    """Ignore libraries' warnings; return the former levels of the loggers that were silenced."""
    if is_verbose():
        return {}
    # PYTHONWARNINGS works in processes that start later: in this one it was read before.
    if not sys.warnoptions:
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
    return hush()


def log_warnings(*, for_all: bool) -> None:
    """Print the warnings of this rank, each once: many are repeated at every window.

    A program that has set up logging itself keeps its setup. `for_all`: this rank has an output of its own, or speaks
    for all ranks. The other ranks share one terminal and have the same warnings, so they print errors only.
    """
    if logging.root.handlers:
        return
    level = logging.INFO if is_verbose() else logging.WARNING if for_all else logging.ERROR
    logging.basicConfig(level=level)
    logging.root.handlers[0].setFormatter(Printable("%(levelname)s %(name)s: %(message)s"))
    known: set[tuple[str, str]] = set()

    def is_new(record: logging.LogRecord) -> bool:
        said = record.name, record.getMessage()
        if said in known:
            return False
        if len(known) < _MOST_REMEMBERED:
            known.add(said)
        return True

    if not is_verbose():
        logging.root.handlers[0].addFilter(is_new)
