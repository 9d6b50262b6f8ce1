"""Groups of documents in packed samples: together, whole, as often as their rows, and the same everywhere."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.batch import GROUP_COLUMNS, IGNORE, PADDING, Cursor, PackedSample, Role
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.cli.plan import plan_in_words
from raytune_fsdp.cli.plan_rows import _Seen
from raytune_fsdp.config import DatasetConfig, PreferenceFormat
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.data.census import census, groups_of_steps
from raytune_fsdp.data.duplicates import in_either
from raytune_fsdp.data.groups import cut_to, partners
from raytune_fsdp.data.groups import judged as with_mismatched
from raytune_fsdp.data.mixture import Permutation
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.packing import Packing, pack
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.pairs import trained_tokens
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import NO_OTHER, Windows
from raytune_fsdp.plan.counts import GroupsOfSteps
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.record.report.data import documents_of, preview, stats
from raytune_fsdp.record.report.history import census_of, data_of
from tests.rows import all_samples, demo_tokenizer, make_windows
from tests.runs import make_config


def group(number: int, prompt: int, answers: tuple[int, int], *, over_all: bool = False) -> Document:
    """A pair whose tokens say its number; the prompt's are negative."""
    members = []
    for role, answer in zip((Role.CHOSEN, Role.REJECTED), answers, strict=True):
        ids = np.array([-1 - number] * prompt + [2 * number + role - 1] * answer, dtype=np.int32)
        everything = over_all and role is Role.CHOSEN
        labels = ids if everything else np.where(ids < 0, np.int32(IGNORE), ids)
        members.append(Document(ids, labels, (float(role), 1.0, 0.0, float(prompt - 1 if everything else 0))))
    return replace(members[0], others=(members[1],), shared=prompt - 1)


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.tuples(st.integers(1, 9), st.integers(1, 9))), min_size=1, max_size=30
)


@given(GROUPS, st.sampled_from(["best_fit", "none"]), st.booleans(), st.booleans())
def test_a_pair_never_leaves_its_sample(lengths: Any, packing: Packing, in_order: bool, shuffled: bool) -> None:
    documents = [group(number, *each) for number, each in enumerate(lengths)]
    samples = pack(
        documents, sources=[0] * len(documents), seq_len=40, pad_id=0, packing=packing, in_order=in_order,
        reorder=(lambda n: Permutation(n, key=3)) if shuffled else None,
    )  # fmt: skip
    seen = Counter[int]()
    for sample in samples:
        members = documents_of(sample)
        assert sample.columns is not None and len(members) % 2 == 0 and (packing != "none" or len(members) == 2)
        for chosen, rejected in zip(members[::2], members[1::2], strict=True):
            number = -1 - int(sample.input_ids[chosen.start])
            for part, each in zip((chosen, rejected), documents[number].members, strict=True):
                assert sample.input_ids[part].tolist() == each.input_ids.tolist(), "in order, and whole"
                assert sample.position_ids[part].tolist() == list(range(part.stop - part.start))
                assert set(map(tuple, sample.columns[:, part].T.tolist())) == {each.columns}
            seen[number] += 1
    assert seen == Counter(range(len(documents))) and samples.groups.sum() == len(documents)
    # What a loss is told, document by document: chosen, rejected, chosen, rejected ...
    targets = to_batch(samples[:], index=0, after=Cursor()).targets
    assert [each[0] for each in targets.columns] == [1.0, 2.0] * len(documents)


@given(st.tuples(st.integers(1, 9), st.tuples(st.integers(1, 9), st.integers(1, 9))), st.integers(4, 40), st.booleans())
def test_a_pair_that_is_too_long_loses_its_prompt_on_both_sides(shape: Any, length: int, over_all: bool) -> None:
    whole = group(0, *shape, over_all=over_all)
    prompt, answers = shape
    found = cut_to(whole, length)
    if found is None:
        assert sum(answers) + 2 > length, "one token in front of each answer predicts its first"
        return
    gone = len(whole.input_ids) - len(found.input_ids)
    assert found.length <= length and (gone == 0 or found.length >= length - 1), "no more than needed"
    for each, before in zip(found.members, whole.members, strict=True):
        assert each.input_ids.tolist() == before.input_ids.tolist()[gone:]
        answer = each.labels[1:][each.labels[1:] != IGNORE][int(each.columns[3]) :]
        assert answer.tolist() == [each.input_ids[-1]] * answers[int(each.columns[0]) - 1], "all of the answer"


def test_turns_of_the_prompt_may_be_cut_and_turns_of_an_answer_never() -> None:
    """With `loss: assistant`, where the prompt has targets, too, and answers begin alike."""

    def read(prompt: int, **answers: list[dict[str, Any]]) -> Document:
        turns = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}"} for at in range(prompt)]
        format = PreferenceFormat(type="preference", loss="assistant")
        formatter = Formatter(format, tokenizer=demo_tokenizer(), vocab_size=2000, template=None)
        (found,) = formatter.documents([{"prompt": turns, **answers}], ["f:7"])
        assert isinstance(found, Document), found
        return found

    def said(*words: str) -> list[dict[str, Any]]:
        return [{"role": ("assistant", "user")[at % 2], "content": each} for at, each in enumerate(words)]

    alike, chosen = ("the answer is yes", "Why?"), "the answer is yes"
    for whole, turns in (
        (read(3, chosen=said(*alike, "So."), rejected=said(*alike, "No.")), 1),
        (read(1, chosen=said(chosen), rejected=said("the answer is no")), 0),
        (read(1, chosen=said(*alike, "So."), rejected=said(*alike, "So.", "Go", "on")), 0),
    ):
        kept = [found for length in range(whole.length) if (found := cut_to(whole, length)) is not None]
        assert kept, "it can be cut"
        for found in kept:
            for each, before in zip(found.members, whole.members, strict=True):
                own, all_of_it = (
                    demo_tokenizer().decode(trained_tokens(side)).split("<|endoftext|>") for side in (each, before)
                )
                assert own[-len(all_of_it) + turns :] == all_of_it[turns:], "every turn of the answer is whole"
    # A prompt's targets are not enough: both sides need one.
    muted = read(3, chosen=said("a"), rejected=[{**said("b")[0], "train": False}])
    for length in range(muted.length):
        found = cut_to(muted, length)
        assert found is None or all(each.target_tokens for each in found.members)


def test_a_mismatched_answer_loses_its_end_before_anything_is_cut() -> None:
    whole = group(0, 4, (5, 30))
    other = replace(whole.others[0], columns=(float(Role.MISMATCHED), 1.0, 0.0, 0.0))
    fits = with_mismatched(replace(whole, others=()), other, 20)
    assert fits.length == 20, "all of the prompt, and 7 tokens of the other answer"
    assert [each.input_ids.tolist() for each in fits.members] == [[-1] * 4 + [0] * 5, [-1] * 4 + [1] * 7]
    least = with_mismatched(replace(whole, others=()), other, 12)
    assert least.length == 14 and least.others[0].target_tokens == 1
    found = cut_to(least, 12)
    assert found is not None and [len(each.input_ids) for each in found.members] == [8, 4], "then the prompt"
    assert cut_to(least, 8) is not None and cut_to(least, 7) is None, "of its own answer nothing"


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_no_row_is_too_long_because_of_the_answer_of_another(tmp_path: Path, policy: str) -> None:
    rows = [*judged(3), {"prompt": "Q 3:", "completion": " 3" * 20, "label": 0}]
    options: Any = {"cache": tmp_path, "shuffle": "none", "packing": "none", "long_documents": policy}
    dataset = write(tmp_path, rows, type="binary")
    whole = sorted(own for own, _ in pairs_in(all_samples(make_windows([dataset], seq_len=200, **options))))
    longest = max(len(demo_tokenizer()(own)["input_ids"]) for own in whole)
    windows = make_windows([dataset], seq_len=longest + 8, **options)
    found = pairs_in(all_samples(windows))
    assert sorted(own for own, _ in found) == whole and len(found) == 4
    assert all(own.startswith("Q ") and other.startswith(own[:4]) for own, other in found), "with their prompts"
    counted = windows.get(0, 0)[0].counts.datasets[0]
    assert (counted.dropped, counted.truncated) == ({}, 0)


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=20), st.integers(0, 2**64 - 1))
def test_nobody_is_mismatched_with_an_answer_of_its_own(answers: list[bytes], key: int) -> None:
    found = partners(answers, key=key)
    assert (found is None) == (len(set(answers)) < 2)
    for own, other in enumerate(found or []):
        assert answers[own] != answers[other]
    different = [bytes([number]) for number in range(len(answers))]
    if len(answers) > 1:
        assert sorted(partners(different, key=key) or []) == list(range(len(answers))), "every answer once"


def write(directory: Path, rows: list[dict[str, Any]], **format: Any) -> DatasetConfig:
    directory.mkdir(exist_ok=True)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig.model_validate({"path": str(path), "format": {"style": "plain", **format}})


def judged(many: int, **more: Any) -> list[dict[str, Any]]:
    """Row i asks `Q i:` and answers `i`."""
    return [{"prompt": f"Q {i}:", "completion": f" {i}", "label": i % 2, **more} for i in range(many)]


def pairs_in(samples: list[PackedSample]) -> list[tuple[str, str]]:
    """The texts of each group's two documents."""
    found = []
    for sample in samples:
        texts = [demo_tokenizer().decode(sample.input_ids[part]) for part in documents_of(sample)]
        found += list(zip(texts[::2], texts[1::2], strict=True))
    return found


def mismatched_in(windows: Windows, epoch: int = 0) -> dict[int, int]:
    """For each row the number of the row whose answer its mismatched document has."""
    found = {}
    for own, other in pairs_in(all_samples(windows, epoch)):
        prompt, _, answer = other.removesuffix("<|endoftext|>").partition(":")
        assert own == f"{prompt}:{prompt[1:]}<|endoftext|>", "the same prompt"
        found[int(prompt[2:])] = int(answer)
    return found


def test_mismatched_answers_are_a_function_of_seed_epoch_and_window(tmp_path: Path) -> None:
    dataset = write(tmp_path, judged(30), type="binary")
    windows = make_windows([dataset], cache=tmp_path / "a", seq_len=60, reshuffle="full")
    found = mismatched_in(windows)
    assert sorted(found) == list(range(30)) and all(own != other for own, other in found.items())
    sources = [windows.origins(0, k) for k in range(windows.count(0))]
    shown = [each.where for window in sources for sample in window for each in sample][:2]
    row = int(shown[0].rpartition(":")[2]) - 1
    assert shown[1] == f"{shown[0]}, with the answer of {tmp_path / 'rows.jsonl'}:{found[row] + 1}"
    # Each window is a circle of its own rows.
    for window in sources:
        rows = {int(each.where.rpartition(":")[2]) - 1 for sample in window for each in sample[::2]}
        assert {found[row] for row in rows} == rows
    # The same in another process, and of the cache; others in another epoch, and with another seed.
    elsewhere = pickle.loads(pickle.dumps(make_windows([dataset], cache=tmp_path / "b", seq_len=60, reshuffle="full")))
    assert mismatched_in(elsewhere) == found
    again = make_windows([dataset], cache=tmp_path / "a", seq_len=60, reshuffle="full")
    assert mismatched_in(again) == found and not again.get(0, 0)[1]
    assert mismatched_in(windows, 1) != found
    assert mismatched_in(make_windows([dataset], cache=tmp_path / "a", seq_len=60, reshuffle="full", seed=6)) != found
    repeated = make_windows([dataset], cache=tmp_path / "a", seq_len=60)
    assert mismatched_in(repeated, 3) == mismatched_in(repeated) == found


def test_a_row_that_is_alone_in_its_window_gets_an_answer_from_the_rest_of_its_data(tmp_path: Path) -> None:
    dataset = write(tmp_path, judged(9), type="binary")
    found = mismatched_in(make_windows([dataset], cache=tmp_path, seq_len=60, shuffle="none"))
    assert found[8] == 0 and sorted(found) == list(range(9))
    same = write(tmp_path / "same", judged(5, completion=" x"), type="binary")
    counted = make_windows([same], cache=tmp_path, seq_len=60).get(0, 0)[0].counts.datasets[0]
    assert counted.dropped == {NO_OTHER: 5} and counted.groups == 0


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_what_is_too_long_is_the_sum_of_both(tmp_path: Path, policy: str) -> None:
    rows = [
        {"prompt": "one two three four five six", "chosen": " yes", "rejected": " no"},
        {"prompt": "one", "chosen": " yes" * 30, "rejected": " no"},
        {"prompt": "one", "chosen": " yes", "rejected": " no"},
    ]
    dataset = write(tmp_path, rows, type="preference")
    lengths = [
        [part.stop - part.start for part in documents_of(sample)]
        for sample in all_samples(make_windows([dataset], cache=tmp_path, seq_len=99, packing="none", shuffle="none"))
    ]
    seq_len = sum(lengths[0]) - 1
    options: Any = {"seq_len": seq_len, "shuffle": "none", "long_documents": policy, "packing": "none"}
    windows = make_windows([dataset], cache=tmp_path, **options)
    if policy == "error":
        with pytest.raises(RowError) as caught:
            windows.get(0, 0)
        one, other = lengths[0]
        assert f"has {one} and {other} tokens (its chosen and rejected side" in str(caught.value)
        assert f"raise data.seq_len to {one + other}, or set data.long_documents to truncate or drop" in str(
            caught.value
        )
        return
    (count,) = windows.get(0, 0)[0].counts.datasets
    kept = pairs_in(all_samples(windows))
    assert kept[-1] == ("one yes<|endoftext|>", "one no<|endoftext|>")
    if policy == "drop":
        assert (count.dropped, count.truncated, count.groups) == ({"too_long": 2}, 0, 1)
    else:
        # The second row's answers alone are too long, and are not cut.
        assert (count.dropped, count.truncated, count.groups, len(kept)) == ({"no_targets_left": 1}, 1, 2, 2)
        for text, answer in zip(kept[0], (" yes", " no"), strict=True):
            prompt, _, rest = text.partition(answer)
            assert rows[0]["prompt"].endswith(prompt) and prompt and rest == "<|endoftext|>"


def test_counts_say_documents_and_groups(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q {i}:", "chosen": " yes" * (1 + i % 5), "rejected": " no"} for i in range(40)]
    windows = make_windows([write(tmp_path, rows, type="preference")], cache=tmp_path, seq_len=60, window=16)
    assert windows.columns == GROUP_COLUMNS and windows.kind == "preference"
    counted = census(windows)
    samples = all_samples(windows)
    total = counted.total
    assert (total.rows, total.documents, total.groups, total.cut, total.without_targets) == (40, 80, 40, 0, 0)
    assert total.tokens == sum(int((sample.source_ids != PADDING).sum()) for sample in samples)
    assert total.target_tokens == sum(int((sample.labels != IGNORE).sum()) for sample in samples)
    assert sum(total.lengths.values()) == 40, "of what must fit: the sums"
    # Pairs a step, in the order of the run.
    stream = Stream(windows, seed=7)
    order = [each.sample for k in range(windows.count(0)) for each in stream.section(Cursor(), k)]
    of_samples = [len(documents_of(sample)) // 2 for sample in order]
    steps = [sum(of_samples[at : at + 4]) for at in range(0, len(order) - len(order) % 4, 4)]
    found = groups_of_steps(windows, 7, 4)
    assert found is not None and (found.least, found.most) == (min(steps), max(steps))
    assert len(order) % 4 and found.mean == pytest.approx(np.mean(steps)), "of the same steps"
    lines = list(stats(counted, title="train", groups=found, kind=windows.kind))
    assert f"40 pairs, each of two documents that stay together, {found.words}" in lines
    assert found.words == f"{found.mean:.1f} a step, {min(steps)} to {max(steps)}"
    # The run's own record of its data.
    (tmp_path / "data.json").write_text(data_of(counted))
    assert census_of(tmp_path / "data.json").total == total


def test_a_plan_says_how_many_pairs_a_step_has(tmp_path: Path) -> None:
    dataset = write(tmp_path, judged(4), type="binary").model_dump(mode="json")
    config = make_config(tmp_path, data={"train": [dataset], "eval": []}, train={"objective": {"type": "kto"}})
    seen = _Seen(rows=4, samples=2, groups=4, of_rows=(40,)).estimate(48, 1.0, config.train.global_batch)
    many = config.train.global_batch * 2
    for counted, said in (
        (seen, f"about {many:.1f} a step"),
        (replace(seen, read=40, groups=GroupsOfSteps(mean=many, least=3, most=30)), f"{many:.1f} a step, 3 to 30"),
    ):
        plan = plan_in_words(config, resolve(config, 1, counted.census), tmp_path, counted)
        assert f"\nanswers    {said}\n" in plan
        fields = counted.as_data(lambda census: resolve(config, 1, census), {})
        assert counted.groups is not None and fields["groups_of_steps"] == asdict(counted.groups)


def test_people_see_which_document_is_which(tmp_path: Path) -> None:
    rows = [{"prompt": "Q:", "chosen": " yes", "rejected": " no", "w": 2, "gap": 0.5}]
    dataset = write(tmp_path, rows, type="preference", weight="w", margin="gap")
    windows = make_windows([dataset], cache=tmp_path, seq_len=60, over_all=True)
    (sample,) = all_samples(windows)
    shown = list(
        preview(sample, demo_tokenizer(), windows.names, title="sample 1", colours=False, columns=windows.columns)
    )
    about = "chosen, weight 2, margin 0.5, its first 1 targets are not the answer's"
    assert shown[1] == f"  -- document 1, {about}, rows: 6 tokens, 5 trained"
    assert shown[3].startswith("  -- document 2, rejected, weight 2, margin 0.5, rows: ") and "« no<|endof" in shown[4]


def test_more_targets_make_other_windows_and_nothing_else_does(tmp_path: Path) -> None:
    dataset = write(tmp_path, judged(3, chosen=" yes", rejected=" no"), type="preference")
    some, all_of_them = (
        make_windows([dataset], cache=tmp_path, seq_len=60, over_all=over_all) for over_all in (False, True)
    )
    assert "over_all" not in some.identity and all_of_them.identity["over_all"] is True
    assert some.fingerprint != all_of_them.fingerprint
    assert (
        all_of_them.get(0, 0)[0].counts.datasets[0].target_tokens > some.get(0, 0)[0].counts.datasets[0].target_tokens
    )
    again = make_windows([dataset], cache=tmp_path, seq_len=60, over_all=True)
    window, built = again.get(0, 0)
    assert not built and np.array_equal(window.samples.columns, all_of_them.get(0, 0)[0].samples.columns)  # type: ignore[arg-type]
    # It says something about pairs only.
    others = write(tmp_path / "judged", judged(3), type="binary")
    assert "over_all" not in make_windows([others], cache=tmp_path, over_all=True).identity


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), min_size=1, max_size=20), st.integers(0, 20))
def test_rows_of_a_prompt_and_equal_rows_are_together(rows: list[tuple[int, int]], cut: int) -> None:
    one, other = (np.split(np.array(each, dtype=np.int64), [min(cut, len(rows))]) for each in zip(*rows, strict=True))
    found = np.concatenate(in_either(one, other))
    near = [
        [a == b or any(x == y >= 0 for x, y in zip(rows[a], rows[b], strict=True)) for b in range(len(rows))]
        for a in range(len(rows))
    ]
    reached = np.linalg.matrix_power(np.array(near, dtype=float), len(rows)) > 0
    assert np.array_equal(found[:, None] == found[None, :], reached)


@pytest.mark.parametrize("wanted", [{"fraction": 0.25}, {"rows": 9}])
def test_all_pairs_of_a_prompt_are_held_out_or_none(tmp_path: Path, wanted: dict[str, Any]) -> None:
    rows = [{"prompt": f"Q {i // 3}:", "chosen": f" yes {i}", "rejected": " no"} for i in range(36)]
    rows.append(rows[0])
    # The same prompt, in another form.
    message = [{"role": "user", "content": "Q 1:"}, {"role": "assistant", "content": "yes"}]
    rows.append({"chosen": message, "rejected": [message[0], {**message[1], "content": "no"}]})  # type: ignore[dict-item]
    dataset = write(tmp_path, rows, type="preference").model_dump(mode="json")
    dataset["format"]["style"] = "chat"
    config = make_config(
        tmp_path, train={"objective": {"type": "orpo"}},
        data={"train": [dataset], "eval": wanted, "seq_len": 80, "drop_duplicates": True},
    )  # fmt: skip
    train, evals = open_data(config, demo_tokenizer(), 1024)
    assert train.identity["over_all"] is True, "ORPO's cross-entropy is over all"
    trained, measured = (
        Counter(text.partition("<|assistant|>")[0] for text, _ in pairs_in(all_samples(each)))
        for each in (train, evals["held_out"])
    )
    assert not trained.keys() & measured.keys() and len(trained) + len(measured) == 12
    assert 7 <= measured.total() <= 10 and trained.total() + measured.total() in (37, 38), "an equal row less"


def test_pairs_under_another_format_are_pointed_out(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "yes"}]
    pair = {"chosen": turns, "rejected": [turns[0], {**turns[1], "content": "no"}], "margin": 2.0}

    def opened(name: str, row: dict[str, Any], kind: str) -> Windows:
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        dataset = DatasetConfig.model_validate({"path": str(tmp_path / name), "format": {"type": kind}})
        return make_windows([dataset], cache=tmp_path, seq_len=60)

    both = opened("both.jsonl", {"messages": turns, **pair}, "chat")
    assert [(each.column, each.read_by) for each in both.unread] == [
        ("chosen", "format.type=preference"), ("rejected", "format.type=preference"),
    ]  # fmt: skip
    assert [(each.column, each.read_by) for each in opened("pair.jsonl", pair, "preference").unread] == [
        ("margin", "format.margin")
    ]
    with pytest.raises(DataError, match="has no column 'messages'.*set the dataset's format to {type: preference}"):
        opened("pair.jsonl", pair, "chat").get(0, 0)
