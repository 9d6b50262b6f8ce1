"""Windows: pure functions of their inputs, with every row accounted for."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from transformers import AutoTokenizer

from raytune_fsdp.base.batch import PADDING
from raytune_fsdp.base.errors import ConfigError, DataError, RowError
from raytune_fsdp.config import DatasetConfig, TokensFormat
from raytune_fsdp.data import identity as identity_module
from raytune_fsdp.data import windows as windows_module
from raytune_fsdp.data.census import census
from raytune_fsdp.data.packing import OPEN_SAMPLES
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.record.report.data import stats
from tests.rows import all_samples, documents_in, make_windows, token_rows


def ids(windows: Windows, epoch: int = 0) -> list[list[int]]:
    return [[s.id for s in windows.get(epoch, k)[0].samples] for k in range(windows.count(epoch))]


def test_two_datasets_are_mixed_evenly(tmp_path: Path) -> None:
    first = token_rows(tmp_path, [2] * 8, name="first")
    second = token_rows(tmp_path, [2] * 24, name="second", first_id=50)
    windows = make_windows([first, second], cache=tmp_path)
    assert (windows.count(0), windows.rows(0), windows.names) == (4, 32, ("first", "second"))
    for k in range(4):
        window = windows.get(0, k)[0]
        assert [count.rows for count in window.counts.datasets] == [2, 6]
        for sample in window.samples:
            real = sample.source_ids != PADDING
            assert ((sample.input_ids[real] >= 50) == (sample.source_ids[real] == 1)).all()
    assert sorted(documents_in(all_samples(windows))) == [
        *((2 + i, 2) for i in range(8)),
        *((50 + i, 2) for i in range(24)),
    ]


def test_same_inputs_same_windows_in_any_order(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [1 + i % 15 + 1 for i in range(60)])]
    windows = make_windows(rows, cache=tmp_path / "a")
    again = pickle.loads(pickle.dumps(make_windows(rows, cache=tmp_path / "b")))
    backwards = [[s.id for s in again.get(0, k)[0].samples] for k in reversed(range(again.count(0)))]
    assert ids(windows) == backwards[::-1]
    assert windows.fingerprint == again.fingerprint
    assert ids(make_windows(rows, cache=tmp_path, seed=1)) != ids(windows)


def test_memory_is_bounded_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [token_rows(tmp_path, [9] * 60)]
    expected = ids(make_windows(rows, cache=tmp_path / "a"))
    monkeypatch.setattr(windows_module, "_MEMORY_BYTES", 2 * 8 * (16 * 5 + 8))
    windows = make_windows(rows, cache=tmp_path / "b")
    assert ids(windows) == expected == ids(windows)
    assert len(windows._memory) == 2


def test_shuffle_none_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    windows = make_windows([token_rows(tmp_path, [9, 2, 12, 4] * 5)], cache=tmp_path, shuffle="none", packing="none")
    assert [token for token, _ in documents_in(all_samples(windows))] == list(range(2, 22))


def test_shuffle_none_keeps_the_order_of_rows_over_packed_samples(tmp_path: Path) -> None:
    lengths = [60 if i % 3 == 0 else 2 + i % 9 for i in range(1200)]
    windows = make_windows([token_rows(tmp_path, lengths)], cache=tmp_path, shuffle="none", seq_len=64, window=600)
    samples = all_samples(windows)
    rows = [[token - 2 for token, _ in documents_in([sample])] for sample in samples]
    assert sorted(row for sample in rows for row in sample) == list(range(1200))
    assert all(sample == sorted(sample) for sample in rows)
    begins = [sample[0] for sample in rows]
    assert begins == sorted(begins)
    place = {row: number for number, sample in enumerate(rows) for row in sample}
    for window in (range(600), range(600, 1200)):  # no row is far from its neighbours in the file
        newest = np.maximum.accumulate([place[row] for row in window])
        assert max(newest - [place[row] for row in window]) < OPEN_SAMPLES
    many = [number for number, sample in enumerate(rows) if len(sample) > 4]
    assert np.mean(many) == pytest.approx(len(rows) / 2, rel=0.1), "samples of short documents are not first"
    assert windows.identity["order_version"] == 3


def test_a_run_begun_with_the_older_order_keeps_it(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [1 + i % 15 + 1 for i in range(60)])]
    for options in ({"shuffle": "none"}, {"shuffle": "none", "packing": "none"}, {}):
        old = make_windows(rows, cache=tmp_path / "old", order_version=2, **options)
        new = make_windows(rows, cache=tmp_path / "new", **options)
        assert old.identity["order_version"] == 2
        # What the versions do not differ in is the same run, and finds its windows in the cache.
        assert (new.fingerprint == old.fingerprint) == (ids(new) == ids(old)) == (options != {"shuffle": "none"})
    # Written down once: windows of version 2, as every tree before version 3 has built them.
    old = make_windows(rows, cache=tmp_path, order_version=2, shuffle="none")
    assert old.fingerprint == "a78159b152672d46b9d998dfccdadf0d"
    found = np.array([sample.id for sample in all_samples(old)])
    assert xxhash.xxh3_64_hexdigest(found.tobytes()) == "b7f015f515946eb8"
    unknown = make_windows(rows, cache=tmp_path, order_version=99, shuffle="none")
    assert unknown.identity["order_version"] == 3  # and so check_identity refuses it by name


def test_place_in_the_stream_says_nothing_about_length(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(2, 65, size=2000).tolist()
    windows = make_windows([token_rows(tmp_path, lengths)], cache=tmp_path, seq_len=64, window=2000)
    # The longest document of a sample is what a packer that starts with long ones would sort by.
    longest = [int(s.position_ids[s.source_ids == 0].max()) for s in windows.get(0, 0)[0].samples]
    # Over about 1000 samples, 0.1 is three standard deviations; the seed is fixed.
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.1


def counted(windows: Windows) -> dict[str, Any]:
    """The counts of the first dataset, over all windows."""
    total = windows.get(0, 0)[0].counts.datasets[0]
    for k in range(1, windows.count(0)):
        total.add(windows.get(0, k)[0].counts.datasets[0])
    return {
        name: getattr(total, name) for name in ("documents", "tokens", "target_tokens", "dropped", "truncated", "cut")
    }


def test_long_documents(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [16, 37, 3])]

    def windows(policy: str) -> Windows:
        return make_windows(rows, cache=tmp_path, long_documents=policy)

    message = r"rows\.jsonl:2: the row has 37 tokens, more than data\.seq_len=16; raise .* to 37"
    with pytest.raises(DataError, match=message):
        windows("error").get(0, 0)
    assert sorted(documents_in(all_samples(windows("drop")))) == [(2, 16), (4, 3)]
    assert counted(windows("drop")) == {
        "documents": 2, "tokens": 19, "target_tokens": 17, "dropped": {"too_long": 1}, "truncated": 0, "cut": 0,
    }  # fmt: skip
    assert sorted(documents_in(all_samples(windows("truncate")))) == [(2, 16), (3, 16), (4, 3)]
    assert counted(windows("truncate")) == {
        "documents": 3, "tokens": 35, "target_tokens": 32, "dropped": {}, "truncated": 1, "cut": 0,
    }  # fmt: skip
    assert sorted(documents_in(all_samples(windows("split")))) == [(2, 16), (3, 5), (3, 16), (3, 16), (4, 3)]
    assert counted(windows("split")) == {
        "documents": 3, "tokens": 56, "target_tokens": 51, "dropped": {}, "truncated": 0, "cut": 2,
    }  # fmt: skip


def test_concat_cuts_documents_where_a_sample_is_full(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [10, 37, 3])]
    windows = make_windows(rows, cache=tmp_path, packing="concat", shuffle="none")
    samples = all_samples(windows)
    assert documents_in(samples) == [(2, 10), (3, 6), (3, 16), (3, 15), (4, 1), (4, 2)]
    assert samples[0].position_ids.tolist() == [*range(10), *range(6)]
    # The first token of a piece cannot be predicted from what is in its sample.
    assert (samples[1].labels[0], samples[1].labels[1]) == (-100, 3)
    assert counted(windows) == {
        "documents": 3, "tokens": 50, "target_tokens": 44, "dropped": {}, "truncated": 0, "cut": 3,
    }  # fmt: skip


def test_pieces_without_a_token_to_train_on_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    late = {"input_ids": [5] * 40, "labels": [-100] * 38 + [5] * 2}
    early = {"input_ids": [6] * 20, "labels": [6] * 20}
    path.write_text(json.dumps(late) + "\n" + json.dumps(early) + "\n")
    rows = [DatasetConfig(path=str(path), format=TokensFormat(type="tokens"))]
    windows = make_windows(rows, cache=tmp_path, long_documents="split")
    (count,) = census(windows).datasets
    assert (count.cut, count.without_targets) == (3, 2)
    assert "cut apart in rows: 2 pieces have no token that is trained on" in "\n".join(
        stats(census(windows), title="train")
    )
    # A census and a window from before this was counted.
    counted = windows.cache.read_census()
    old = {epoch: text.replace(', "without_targets": 2', "") for epoch, text in counted.items()}
    assert old != counted
    windows.cache.write_census(old)
    (file,) = windows.cache.directory.glob("*.arrow")
    body = file.read_bytes()[:-16].replace(b', "without_targets": 2', b" " * len(b', "without_targets": 2'))
    file.write_bytes(body + xxhash.xxh3_128_digest(body))
    again = census(make_windows(rows, cache=tmp_path, long_documents="split"))
    assert (again.total.without_targets, again.built) == (2, 0)


def test_cut_before_the_answer_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    late = {"input_ids": [5] * 20, "labels": [-100] * 18 + [5] * 2}
    early = {"input_ids": [6] * 20, "labels": [6] * 20}
    path.write_text(json.dumps(late) + "\n" + json.dumps(early) + "\n")
    rows = [DatasetConfig(path=str(path), format=TokensFormat(type="tokens"))]
    assert counted(make_windows(rows, cache=tmp_path, long_documents="truncate")) == {
        "documents": 1, "tokens": 16, "target_tokens": 15, "dropped": {"no_targets_left": 1}, "truncated": 1, "cut": 0,
    }  # fmt: skip


def test_epochs_with_fractional_weights_go_through_all_rows(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [3] * 10, weight=0.5), token_rows(tmp_path, [2] * 6, name="b", first_id=50)]
    windows = make_windows(rows, cache=tmp_path)
    assert not windows.repeats
    seen: Counter[int] = Counter()
    for epoch in range(4):
        assert windows.rows(epoch) == 11
        seen.update(token for token, _ in documents_in(all_samples(windows, epoch)))
    assert seen == {**{2 + i: 2 for i in range(10)}, **{50 + i: 4 for i in range(6)}}
    assert ids(windows, 0) != ids(windows, 1)
    with pytest.raises(ConfigError, match=r"data\.reshuffle=windows with the weights \(0\.5, 1\.0\)"):
        make_windows(rows, cache=tmp_path, reshuffle="windows")


def test_reshuffle_full_draws_new_windows(tmp_path: Path) -> None:
    windows = make_windows([token_rows(tmp_path, [3] * 40)], cache=tmp_path, reshuffle="full")
    first, second = all_samples(windows, 0), all_samples(windows, 1)
    assert sorted(documents_in(first)) == sorted(documents_in(second))
    assert {s.id for s in first}.isdisjoint(s.id for s in second)
    again = make_windows([token_rows(tmp_path, [3] * 40)], cache=tmp_path)
    assert again.repeats and ids(again, 0) == ids(again, 3)


def test_fingerprint_follows_what_decides_the_windows(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [3, 4])]
    other = AutoTokenizer.from_pretrained(TOKENIZER)
    other.add_tokens(["<|new|>"])
    unknown = AutoTokenizer.from_pretrained(TOKENIZER, unk_token="?")  # a template may print any special token
    options: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"tokenizer": other}, {"seq_len": 17}, {"window": 9}, {"packing": "none"},
        {"packing": "concat"}, {"shuffle": "none"}, {"shuffle": "blocks"}, {"long_documents": "drop"},
        {"reshuffle": "full"}, {"vocab_size": 9_999}, {"tokenizer": unknown}, {"chat_template": "chatml"},
    ]  # fmt: skip
    prints = [make_windows(rows, cache=tmp_path, **each).fingerprint for each in options]
    prints.append(make_windows([token_rows(tmp_path, [3, 4], weight=2)], cache=tmp_path).fingerprint)
    read_otherwise = rows[0].model_copy(update={"file_type": "text"})
    prints.append(make_windows([read_otherwise], cache=tmp_path).fingerprint)
    masked = rows[0].model_copy(update={"format": TokensFormat(type="tokens", labels=None, mask="mask")})
    prints.append(make_windows([masked], cache=tmp_path).fingerprint)
    prints.append(make_windows([token_rows(tmp_path, [3, 5])], cache=tmp_path).fingerprint)
    assert len(set(prints)) == len(prints)
    # Decides nothing, see check_skipped.
    skipping = make_windows(rows, cache=tmp_path, bad_rows="skip")
    assert skipping.fingerprint == make_windows(rows, cache=tmp_path).fingerprint


def test_a_version_of_documents_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [token_rows(tmp_path, [3, 4])]
    before = make_windows(rows, cache=tmp_path).fingerprint
    for name in ("DOCUMENT_VERSION", "FORMAT"):
        with monkeypatch.context() as patch:
            patch.setattr(identity_module, name, 99)
            assert make_windows(rows, cache=tmp_path).fingerprint != before


def test_what_was_skipped_before_is_an_error_where_it_has_to_be(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [3, 20, 4])]
    census(make_windows(rows, cache=tmp_path, bad_rows="skip"))
    with pytest.raises(RowError, match=r"rows\.jsonl:2: the row has 20 tokens.*data\.bad_rows=skip"):
        census(make_windows(rows, cache=tmp_path))
    with pytest.raises(RowError, match=r"rows\.jsonl:2"):
        make_windows(rows, cache=tmp_path).get(0, 0)


def test_a_window_that_takes_much_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(windows_module, "_MANY_TOKENS", 50)
    windows = make_windows([token_rows(tmp_path, [10] * 20)], cache=tmp_path)
    for k in range(3):
        windows.get(0, k)
    (record,) = caplog.records
    assert "data.window=8" in record.getMessage() and "data.window=5 needs 0.8 GB" in record.getMessage()


def test_a_cache_that_takes_nothing_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise DataError("the cache is full")

    monkeypatch.setattr(windows_module.WindowCache, "write", full)
    windows = make_windows([token_rows(tmp_path, [10] * 20)], cache=tmp_path)
    for k in range(3):
        windows.get(0, k)
    (record,) = caplog.records
    assert "window 0 was not cached" in record.getMessage() and "the cache is full" in record.getMessage()


def test_fingerprint_ignores_names_and_earlier_calls(tmp_path: Path) -> None:
    a, b = token_rows(tmp_path, [3, 4], name="a"), token_rows(tmp_path, [5], name="b")
    assert make_windows([a, b], cache=tmp_path).fingerprint != make_windows([b, a], cache=tmp_path).fingerprint
    other = AutoTokenizer.from_pretrained(TOKENIZER)
    other(["x", "x x"], padding=True, truncation=True, max_length=5)
    same = make_windows([token_rows(tmp_path, [3, 4], name="c")], cache=tmp_path, tokenizer=other)
    assert same.fingerprint == make_windows([a], cache=tmp_path).fingerprint


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    rows = token_rows(tmp_path, [3, 4])
    with pytest.raises(DataError, match=r"2 datasets are called 'rows' \(.*rows\.jsonl, .*; give each its own name"):
        make_windows([rows, rows], cache=tmp_path)
    with pytest.raises(DataError, match=r"data\.chat_template.*no\.jinja"):
        make_windows([rows], cache=tmp_path, chat_template="no.jinja")
    some = token_rows(tmp_path, [3] * 5, name="some", weight=0)
    with pytest.raises(ValueError, match=r"all are 0, so nothing would be trained on"):
        make_windows([some], cache=tmp_path)
