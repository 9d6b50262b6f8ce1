"""Packing: every document once and whole, close together, and none sees another."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.batch import IGNORE, PADDING
from raytune_fsdp.data.packing import best_fit, pack
from raytune_fsdp.data.rows.formats import Document

LENGTHS = st.lists(st.integers(1, 50), max_size=80)


def document(*ids: int, trained: bool = True) -> Document:
    array = np.array(ids, dtype=np.int32)
    return Document(array, array if trained else np.full_like(array, IGNORE))


@given(lengths=LENGTHS)
def test_every_document_in_one_bin_that_holds_it(lengths: list[int]) -> None:
    bins = best_fit(lengths, 50)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 50 for members in bins)


@given(lengths=LENGTHS)
def test_same_choice_as_the_slow_definition(lengths: list[int]) -> None:
    space: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in space if left >= length]
        if fitting:
            space.remove(min(fitting))
        space.append((min(fitting) if fitting else 50) - length)
    bins = best_fit(lengths, 50)
    assert sorted(50 - sum(lengths[i] for i in members) for members in bins) == sorted(space)


def test_by_hand() -> None:
    assert best_fit([3, 7, 5, 2, 5], 10) == [[0, 1], [2, 4], [3]]
    assert best_fit([4, 4, 4], 8) == [[0, 1], [2]]
    assert best_fit([], 8) == []


def test_a_window_of_documents_is_nearly_full() -> None:
    generator = random.Random(0)
    lengths = [min(2048, max(8, int(generator.lognormvariate(5.3, 0.9)))) for _ in range(4096)]
    bins = best_fit(lengths, 2048)
    assert sum(lengths) / (len(bins) * 2048) > 0.995


def test_arrays_of_a_packed_sample() -> None:
    (sample,) = pack([document(11, 12, 13), document(21, 22)], sources=[0, 1], seq_len=8, pad_id=9, packing="best_fit")
    assert sample.input_ids.tolist() == [11, 12, 13, 21, 22, 9, 9, 9]
    assert sample.labels.tolist() == [IGNORE, 12, 13, IGNORE, 22, IGNORE, IGNORE, IGNORE]
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert sample.source_ids.tolist() == [0, 0, 0, 1, 1, PADDING, PADDING, PADDING]
    arrays = (sample.input_ids, sample.labels, sample.position_ids, sample.source_ids)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_golden_sample_id() -> None:
    # Ids are in checkpoints and metrics: two versions that give different ones cannot be compared.
    (sample,) = pack([document(11, 12, 13)], sources=[0], seq_len=4, pad_id=0, packing="none")
    assert sample.id == 781292757657975698


def test_id_depends_on_each_array() -> None:
    def sample_id(d: Document, source: int = 0) -> int:
        return pack([d], sources=[source], seq_len=4, pad_id=0, packing="none")[0].id

    whole = document(1, 2, 3)
    ids = {
        sample_id(whole),
        sample_id(whole, 1),
        sample_id(document(1, 2, 3, trained=False)),
        sample_id(document(1, 2, 4)),
    }
    split = pack([document(1, 2), document(3, 3)], sources=[0, 0], seq_len=4, pad_id=0, packing="best_fit")
    joined = pack([document(1, 2, 3, 3)], sources=[0], seq_len=4, pad_id=0, packing="best_fit")
    assert len(ids | {split[0].id, joined[0].id}) == 6


@given(lengths=LENGTHS)
def test_no_document_reaches_into_another(lengths: list[int]) -> None:
    documents = [document(*range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate(lengths)]
    samples = pack(documents, sources=list(range(len(documents))), seq_len=50, pad_id=0, packing="best_fit")
    seen = []
    for sample in samples:
        starts = np.flatnonzero((sample.position_ids == 0) & (sample.source_ids != PADDING))
        assert (sample.labels[starts] == IGNORE).all()
        trained = sample.labels != IGNORE
        assert (sample.labels[trained] == sample.input_ids[trained]).all()
        # A target and the token it is predicted from are of one document.
        assert (sample.source_ids[1:] == sample.source_ids[:-1])[trained[1:]].all()
        for start in starts:
            source = int(sample.source_ids[start])
            tokens = sample.input_ids[sample.source_ids == source]
            assert tokens.tolist() == documents[source].input_ids.tolist()
            positions = sample.position_ids[sample.source_ids == source]
            assert positions.tolist() == list(range(len(tokens)))
            seen.append(source)
    assert sorted(seen) == list(range(len(documents)))


def test_without_packing_each_document_has_its_own_sample() -> None:
    samples = pack([document(1, 2), document(3, 4)], sources=[0, 0], seq_len=4, pad_id=0, packing="none")
    assert [sample.input_ids.tolist() for sample in samples] == [[1, 2, 0, 0], [3, 4, 0, 0]]
