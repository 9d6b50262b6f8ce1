"""Import large libraries without looking for garbage in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(*, alone: bool = False) -> Iterator[None]:
    """Collect no garbage while modules are imported.

    torch and transformers bring some hundred thousand objects, which all stay: going through them again and again takes
    up to a third of the time of their import, 11 % of a rank's, which has imported torch before. `alone`: the process
    belongs to no other program, whose garbage might be among what is there now, so that no later collection goes
    through it either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if alone:
            gc.freeze()
        if enabled:
            gc.enable()
