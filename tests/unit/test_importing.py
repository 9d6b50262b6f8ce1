"""Large libraries are imported without collections, and a process is afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from raytune_fsdp.launch.importing import importing


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_meanwhile() -> None:
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()  # the outer one is not over
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_program_that_collects_by_itself_stays_so() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_only_in_a_process_of_our_own_is_nothing_of_it_ever_collected() -> None:
    before = gc.get_freeze_count()
    with importing():
        pass
    assert gc.get_freeze_count() == before
    with importing(alone=True):
        pass
    assert gc.get_freeze_count() > before
