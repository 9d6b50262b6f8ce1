"""Windows: pure functions of their inputs, counted once, with every row accounted for."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raytune_fsdp.config import DataConfig, DatasetConfig, TokensFormat
from raytune_fsdp.data import windows as windows_module
from raytune_fsdp.data.windows import Windows, census
from raytune_fsdp.demo import CONVERSATIONS, HELDOUT, TOKENIZER
from raytune_fsdp.errors import DataError
from raytune_fsdp.types import PADDING

TOKENS = TokensFormat(type="tokens", labels=None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def dataset(directory: Path, lengths: list[int], *, name: str = "rows", first_id: int = 2) -> DatasetConfig:
    """Row i is `lengths[i]` times the token `first_id + i`, so that a document is known by any of its tokens."""
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [first_id + i] * n}) + "\n" for i, n in enumerate(lengths)))
    return DatasetConfig(path=str(path), format=TOKENS)


def make(
    datasets: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, **options: Any
) -> Windows:
    data = DataConfig(train=datasets, **{"seq_len": 16, "window": 8, **options})
    return Windows(datasets, data, seed=seed, tokenizer=tokenizer, vocab_size=10_000)


def documents_in(windows: Windows) -> list[tuple[int, int]]:
    """(token, length) of each document of all windows, in order."""
    found = []
    for k in range(len(windows)):
        for sample in windows.build(k).samples:
            real = sample.input_ids[sample.source_ids != PADDING]
            tokens, counts = np.unique(real, return_counts=True)
            found += list(zip(tokens.tolist(), counts.tolist(), strict=True))
    return found


def ids(windows: Windows) -> list[list[int]]:
    return [[sample.id for sample in windows.build(k).samples] for k in range(len(windows))]


def test_two_datasets_are_one_index_space(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = dataset(tmp_path, [3, 5, 7], name="first")
    second = dataset(tmp_path, [2] * 20, name="second", first_id=50)
    windows = make([first, second], tokenizer)
    assert (len(windows), windows.rows, windows.names) == (3, 23, ("first", "second"))
    assert sorted(documents_in(windows)) == [(2, 3), (3, 5), (4, 7), *((50 + i, 2) for i in range(20))]
    for k in range(3):
        for sample in windows.build(k).samples:
            real = sample.source_ids != PADDING
            assert ((sample.input_ids[real] >= 50) == (sample.source_ids[real] == 1)).all()


def test_same_inputs_same_windows_in_any_order(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [1 + i % 15 + 1 for i in range(60)])]
    windows, again = make(rows, tokenizer), pickle.loads(pickle.dumps(make(rows, tokenizer)))
    backwards = [[sample.id for sample in again.build(k).samples] for k in reversed(range(len(again)))]
    assert ids(windows) == backwards[::-1]
    assert windows.fingerprint == again.fingerprint
    assert ids(make(rows, tokenizer, seed=1)) != ids(windows)


def test_memory_is_bounded_and_changes_nothing(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dataset(tmp_path, [9] * 60)]
    expected = ids(make(rows, tokenizer))
    monkeypatch.setattr(windows_module, "_CACHE_BYTES", 2 * 8 * 16 * 16)
    windows = make(rows, tokenizer)
    assert ids(windows) == expected == ids(windows)
    assert len(windows._cache) == 2


def test_shuffle_none_keeps_the_order_of_the_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [9, 2, 12, 4] * 5)]
    windows = make(rows, tokenizer, shuffle="none", packing="none")
    assert [token for token, _ in documents_in(windows)] == list(range(2, 22))


def test_place_in_the_stream_says_nothing_about_length(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 65, size=2000).tolist()
    windows = make([dataset(tmp_path, lengths)], tokenizer, seq_len=64, window=2000)
    # The longest document of a sample is what a packer that starts with long ones would sort by.
    longest = [int(sample.position_ids[sample.source_ids == 0].max()) for sample in windows.build(0).samples]
    # Over about 1000 samples, 0.1 is three standard deviations; the seed is fixed.
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.1


def test_long_documents(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [16, 17, 3])]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the row has 17 tokens, data\.seq_len=16; raise .* to 17"):
        census(make(rows, tokenizer))
    dropped = make(rows, tokenizer, long_documents="drop")
    assert sorted(documents_in(dropped)) == [(2, 16), (4, 3)]
    assert census(dropped).dropped == {"too_long": 1}
    cut = make(rows, tokenizer, long_documents="truncate")
    assert sorted(documents_in(cut)) == [(2, 16), (3, 16), (4, 3)]
    assert (census(cut).truncated, census(cut).dropped) == (1, {})


def test_cut_before_the_answer_is_dropped(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.jsonl"
    late = {"input_ids": [5] * 20, "labels": [-100] * 18 + [5] * 2}
    early = {"input_ids": [6] * 20, "labels": [6] * 20}
    path.write_text(json.dumps(late) + "\n" + json.dumps(early) + "\n")
    rows = [DatasetConfig(path=str(path), format=TokensFormat(type="tokens"))]
    counted = census(make(rows, tokenizer, long_documents="truncate"))
    assert (counted.documents, counted.truncated, counted.dropped) == (1, 1, {"no_target_tokens": 1})


def test_census_counts_what_was_packed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [2 + i % 14 for i in range(30)]
    seen: list[tuple[int, int]] = []
    counted = census(make([dataset(tmp_path, lengths)], tokenizer), lambda done, total: seen.append((done, total)))
    assert (counted.rows, counted.documents, counted.windows) == (30, 30, 4)
    assert (counted.tokens, counted.target_tokens) == (sum(lengths), sum(lengths) - 30)
    assert 0.8 < counted.efficiency <= 1.0
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_demo_data_in_numbers(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [DatasetConfig(path=str(CONVERSATIONS)), DatasetConfig(path=str(HELDOUT))]
    windows = make(rows, tokenizer, seq_len=128, window=4096)
    counted = census(windows)
    assert windows.names == ("conversations", "heldout")
    assert counted.documents == counted.rows >= 172
    assert counted.efficiency > 0.95
    assert Counter(windows.build(0).documents) == Counter((counted.rows - 16, 16))


def test_fingerprint_follows_what_decides_the_windows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [3, 4])]
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    other = AutoTokenizer.from_pretrained(TOKENIZER)
    other.add_tokens(["<|new|>"])
    prints = [
        make(rows, tokenizer).fingerprint,
        make(rows, tokenizer, seed=1).fingerprint,
        make(rows, other).fingerprint,
        make(rows, tokenizer, seq_len=17).fingerprint,
        make(rows, tokenizer, window=9).fingerprint,
        make(rows, tokenizer, packing="none").fingerprint,
        make(rows, tokenizer, shuffle="none").fingerprint,
        make(rows, tokenizer, long_documents="drop").fingerprint,
        make(rows, tokenizer, chat_template=str(template)).fingerprint,
        make([dataset(tmp_path, [3, 5])], tokenizer).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_fingerprint_follows_the_order_of_the_datasets(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [3, 4], name="a"), dataset(tmp_path, [5], name="b")]
    assert make(rows, tokenizer).fingerprint != make(rows[::-1], tokenizer).fingerprint


def test_fingerprint_ignores_names_and_earlier_calls(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = make([dataset(tmp_path, [3, 4], name="a")], tokenizer).fingerprint
    other = AutoTokenizer.from_pretrained(TOKENIZER)
    other(["x", "x x"], padding=True, truncation=True, max_length=5)
    assert make([dataset(tmp_path, [3, 4], name="b")], other).fingerprint == first


def test_what_cannot_be_opened(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = dataset(tmp_path, [3, 4])
    with pytest.raises(DataError, match=r"2 datasets are called 'rows' \(.*rows\.jsonl, .*; give each its own name"):
        make([rows, rows], tokenizer)
    with pytest.raises(DataError, match=r"data\.chat_template='no\.jinja' cannot be read"):
        make([rows], tokenizer, chat_template="no.jinja")


def test_dataset_of_which_nothing_is_left(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [dataset(tmp_path, [3, 4], name="good"), dataset(tmp_path, [20], name="long")]
    with pytest.raises(
        DataError, match=r"dataset 'long' \(.*\): none of its 1 rows is left.*too_long.*data\.seq_len=16"
    ):
        census(make(rows, tokenizer, long_documents="drop"))
