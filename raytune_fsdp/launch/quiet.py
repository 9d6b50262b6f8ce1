"""Keeps libraries from printing, and from doing what we do ourselves; and warnings from being said more than once.

`raytune-fsdp train --verbose` lets them.
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
"""Whose warnings are not shown. Ours are lines of a log; what is warned of in our name is how we call the others."""


_MOST_REMEMBERED = 1000


def quieting() -> dict[str, str]:
    """Variables that keep progress bars and advice of libraries out of the run's own lines, and those for MLflow."""
    if is_verbose():
        return dict(ENVIRONMENT)
    found = {
        **ENVIRONMENT,
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        HUSHED: "1",
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
        levels = _ignore_warnings()
        try:
            yield
        finally:
            set_levels(levels)


def _ignore_warnings() -> Mapping[str, int]:
    """Returns the levels of the loggers that it has silenced."""
    if is_verbose():
        return {}
    # The variable above is for processes that start later: in this one it was read before.
    if not sys.warnoptions:
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
    return hush()


def log_warnings(*, for_all: bool) -> None:
    """Print the warnings of this rank, each once: what is warned of at every window is the same warning. A program that
    has set up logging itself keeps what it has.

    `for_all`: its output is its own, or it is the one that speaks for the others. The others' is the same terminal, and
    they warn of the same.
    """
    if logging.root.handlers:
        return
    level = logging.INFO if is_verbose() else logging.WARNING if for_all else logging.ERROR
    logging.basicConfig(level=level)
    logging.root.handlers[0].setFormatter(Printable("%(levelname)s %(name)s: %(message)s"))
    if not is_verbose():
        logging.root.handlers[0].addFilter(_Once())


class _Once(logging.Filter):
    """Drops what has been logged before, word for word."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.name, record.getMessage()
        if said in self._known:
            return False
        if len(self._known) < _MOST_REMEMBERED:
            self._known.add(said)
        return True
