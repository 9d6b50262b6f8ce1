"""The census: exact counts, nothing done twice, nothing half done."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.config import DatasetConfig
from raytune_fsdp.data.census import census
from raytune_fsdp.demo import CONVERSATIONS, HELDOUT
from raytune_fsdp.plan.counts import Census
from tests.ranks import run_ranks
from tests.rows import make_windows, token_rows


def test_counts_what_was_packed(tmp_path: Path) -> None:
    lengths = [2 + i % 14 for i in range(30)]
    seen: list[tuple[str, int, int]] = []
    windows = make_windows([token_rows(tmp_path, lengths)], cache=tmp_path)
    counted = census(windows, progress=lambda *each: seen.append(each))
    total = counted.total
    assert (total.rows, total.documents, counted.windows, counted.built) == (30, 30, 4, 4)
    assert (total.tokens, total.target_tokens) == (sum(lengths), sum(lengths) - 30)
    assert sum(total.lengths.values()) == 30 and total.lengths[4] == 3  # 2 tokens: 4 * log2(2)
    assert 0.8 < counted.efficiency <= 1.0
    assert seen == [("counting the data", n, 4) for n in (1, 2, 3, 4)]


def test_is_not_done_twice(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [5] * 30)]
    first = census(make_windows(rows, cache=tmp_path))
    calls: list[int] = []
    again = census(make_windows(rows, cache=tmp_path), progress=lambda *_: calls.append(1))
    assert again == Census(**{**_fields(first), "built": 0}) and not calls


def test_damaged_counts_are_counted_again(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [5] * 30)]
    windows = make_windows(rows, cache=tmp_path)
    counted = census(windows)
    path = windows.cache.directory / "census.json"
    whole = path.read_text()
    for damaged in (
        whole.replace("[30]", "[99]"),
        whole.replace(r"\"epochs\": [", r"\"epochs\": [9"),
        "{}",
        "[1]",
        whole[:-9],
    ):
        path.write_text(damaged)
        again = census(make_windows(rows, cache=tmp_path))
        assert (again.epochs, again.total, again.built) == (counted.epochs, counted.total, 0)


def count_and_die(directory: str) -> None:
    """A census that is killed after its third window, and in the middle of writing the fourth."""
    import os
    import signal

    from raytune_fsdp.data import cache

    written = iter(range(1, 10))

    class Dying(type(Path())):  # type: ignore[misc]
        def replace(self, target: Path) -> Path:
            if str(target).endswith(".arrow") and next(written) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return Path(super().replace(target))

    cache.Path = Dying  # type: ignore[misc]
    census(make_windows([token_rows(Path(directory), [5] * 30)], cache=Dying(directory)))


def test_one_that_was_killed_goes_on_from_its_windows(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 died"):
        run_ranks(count_and_die, 1, str(tmp_path))
    assert len(list(tmp_path.rglob("*.arrow"))) == 3 and len(list(tmp_path.rglob("*.arrow.*.tmp"))) == 1
    windows = make_windows([token_rows(tmp_path, [5] * 30)], cache=tmp_path)
    counted = census(windows)
    assert (counted.windows, counted.built) == (4, 1)


def test_epochs_that_differ_are_all_counted(tmp_path: Path) -> None:
    windows = make_windows([token_rows(tmp_path, [9] * 10, weight=0.25)], cache=tmp_path)
    counted = census(windows, 2.5)
    assert counted.epochs == (3, 2, 3)  # of 10 rows 2.5 an epoch, one a sample
    assert counted.total.documents == 8
    assert counted.samples_in(Fraction("2.5")) == 3 + 2 + 2
    assert census(windows, 1).epochs == (3,)
    assert census(windows, 4).built == 1


def test_more_epochs_than_can_be_counted_are_refused(tmp_path: Path) -> None:
    windows = make_windows([token_rows(tmp_path, [5] * 30)], cache=tmp_path, reshuffle="full")
    with pytest.raises(
        ConfigError, match=r"train\.epochs=1e\+09: every epoch has other windows .*: set train\.max_steps"
    ):
        census(windows, 1e9)


def test_epochs_that_are_alike_are_counted_once(tmp_path: Path) -> None:
    counted = census(make_windows([token_rows(tmp_path, [9] * 10)], cache=tmp_path), 2.5)
    assert counted.epochs == (10,) and counted.samples_in(Fraction("2.5")) == 25


def test_demo_data_in_numbers(tmp_path: Path) -> None:
    rows = [DatasetConfig(path=str(CONVERSATIONS)), DatasetConfig(path=str(HELDOUT))]
    counted = census(make_windows(rows, cache=tmp_path, seq_len=128, window=4096))
    assert counted.names == ("conversations", "heldout")
    assert [count.rows for count in counted.datasets] == [181, 16]
    assert counted.total.documents == 197 and counted.efficiency > 0.95


def test_dataset_of_which_nothing_is_left(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [3, 4], name="good"), token_rows(tmp_path, [20], name="long")]
    with pytest.raises(
        DataError, match=r"dataset 'long' \(.*\): none of its 1 rows can be used \(1 too_long\).*seq_len=16"
    ):
        census(make_windows(rows, cache=tmp_path, long_documents="drop"))


def _fields(counted: Census) -> dict[str, object]:
    return {name: getattr(counted, name) for name in counted.__dataclass_fields__}
