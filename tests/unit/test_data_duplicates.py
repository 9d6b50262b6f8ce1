"""Rows that are equal once they are tokens: found, counted, held out together, and left out where the config says."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config import DataConfig, DatasetConfig
from raytune_fsdp.data import duplicates
from raytune_fsdp.data.duplicates import RowReader, groups_of, left_out_of
from raytune_fsdp.data.mixture import FIFTH_ORDER, ORDER_VERSION
from raytune_fsdp.data.open import open_data, open_evals
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.windows import Windows
from tests.rows import VOCABULARY, all_samples, demo_tokenizer, documents_in
from tests.runs import make_config
from tests.unit.made_tokenizers import adding

TOKENS = {"type": "tokens", "labels": None}
TRIMS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] | trim }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)


def write(path: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """Row i is the token i, twice; or what is given."""
    given = [{"input_ids": [row, row]} if isinstance(row, int) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return {"path": str(path), "format": TOKENS}


def opened(directory: Path, version: int | None = None, **data: Any) -> tuple[Windows, dict[str, Windows]]:
    config = make_config(directory, data={"seq_len": 8, "window": 32, **data})
    return open_data(config, demo_tokenizer(), VOCABULARY, order_version=version)


def rows_of(windows: Windows) -> Counter[int]:
    # Two documents of one row may stand next to each other.
    return Counter(token for token, many in documents_in(all_samples(windows)) for _ in range(many // 2))


def groups(cache: Path, data: DataConfig) -> tuple[list[list[int]], list[list[bytes | None]]]:
    """Of each dataset the groups of its rows, and what the tokens of every row say."""
    readers = [
        RowReader.of(each, open_source(each, cache=cache, in_place=False), data, demo_tokenizer(), VOCABULARY)
        for each in data.train
    ]
    tokens = [reader.token_keys(range(len(reader.source))) for reader in readers]
    return [own.tolist() for own in groups_of(readers, cache)], tokens


def check(found: list[list[int]], tokens: list[list[bytes | None]]) -> int:
    """That rows are in one group if and only if their tokens and masks are equal. Returns the rows in groups."""
    flat = [(group, key) for own, keys in zip(found, tokens, strict=True) for group, key in zip(own, keys, strict=True)]
    many = Counter(key for _, key in flat if key is not None)
    assert {key for group, key in flat if group >= 0} == {key for key, count in many.items() if count > 1}
    assert all((group >= 0) == (key is not None and many[key] > 1) for group, key in flat)
    assert len({group for group, _ in flat if group >= 0}) == len({pair for pair in flat if pair[0] >= 0})
    return sum(group >= 0 for group, _ in flat)


def said(question: str, answer: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def test_conversations_are_equal_by_their_tokens_and_masks_whatever_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "trims.jinja").write_text(TRIMS)
    rng = random.Random(5)
    rows: list[dict[str, Any]] = []
    for n in range(40):
        question, answer = f"What is {n % 20}?", f"It is {n % 10}."
        row = said(question + " " * rng.randrange(3), rng.choice(["", "\n"]) + answer, id=n)
        if rng.random() < 0.3:
            row["messages"] = [dict(reversed(message.items())) for message in row["messages"]]
        if rng.random() < 0.2:
            row["messages"] += [
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "No.", "train": False},
            ]
        rows.append(row)
    rows += [
        said("Whoisit?", "Ada."),
        said("Who is it?", "Ada."),
        said("Who is it", "?Ada."),
        {"messages": []},
        {"messages": []},
    ]
    write(tmp_path / "a.jsonl", rows)
    sharegpt = [
        {"turns": [{"from": "human", "value": row["messages"][0]["content"]}, {"from": "gpt", "value": "It is 3."}]}
        for row in rows[:9]
    ]
    pq.write_table(pa.Table.from_pylist(sharegpt), tmp_path / "b.parquet")
    asked = [{"q": f"What is {n}?", "a": f"It is {n}."} for n in range(5)]
    write(tmp_path / "c.jsonl", asked)
    data = DataConfig.model_validate({
        "chat_template": str(tmp_path / "trims.jinja"),
        "train": [
            {"path": str(tmp_path / "a.jsonl")},
            {"path": str(tmp_path / "b.parquet"), "format": {"type": "chat", "messages": "turns"}},
            {
                "path": str(tmp_path / "c.jsonl"),
                "format": {"type": "instruction", "style": "chat", "prompt": "q", "input": None, "completion": "a"},
            },
        ],
    })  # fmt: skip
    assert check(*groups(tmp_path / "cache", data)) > 30


@pytest.mark.parametrize("kind", ["completion", "template", "tokens"])
def test_texts_and_tokens_are_equal_by_their_tokens_and_masks(tmp_path: Path, kind: str) -> None:
    end = demo_tokenizer().eos_token
    rows: dict[str, list[dict[str, Any]]] = {
        "completion": [
            {"text": text} for text in ("one two", "one two" + end, "onetwo", "one  two", "one two", "ONE two")
        ],
        "template": [
            {"q": "one ", "a": "two"}, {"a": "two", "q": "one "}, {"q": "one", "a": " two"}, {"q": "", "a": "one two"},
        ],
        "tokens": [
            {"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [5, 6]},
            {"labels": [5, 6], "input_ids": [5, 6]}, {"input_ids": [5, 6, 6]}, {"input_ids": []}, {"input_ids": []},
        ],
    }  # fmt: skip
    write(tmp_path / "rows.jsonl", rows[kind])
    form = {"type": kind, **({"prompt": "{q}", "completion": "{a}"} if kind == "template" else {})}
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / "rows.jsonl"), "format": form}]})
    assert check(*groups(tmp_path / "cache", data)) == {"completion": 3, "template": 2, "tokens": 2}[kind]


def test_texts_with_what_the_tokenizer_adds_are_equal_to_those_without(tmp_path: Path) -> None:
    tokenizer = adding("<s> $A <|endoftext|>")
    texts = ["one", "<s>one", "one<|endoftext|>", "<s>one<|endoftext|>", "<s><s>one", "two", "<s> one"]
    write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    data = DataConfig.model_validate(
        {"train": [{"path": str(tmp_path / "rows.jsonl"), "format": {"type": "completion"}}]}
    )
    source = open_source(data.train[0], cache=tmp_path / "cache", in_place=False)
    for order, equal in ((ORDER_VERSION, 4), (FIFTH_ORDER, 0)):
        reader = RowReader.of(data.train[0], source, data, tokenizer, len(tokenizer), order)
        (own,) = groups_of([reader], tmp_path / "cache")
        assert check([own.tolist()], [reader.token_keys(range(len(texts)))]) == equal


@pytest.mark.parametrize("kind", ["words", "characters", "bytes"])
def test_texts_of_which_a_tokenizer_makes_the_same_are_equal(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: n
        for n, token in enumerate(["<unk>", "</s>", "one", "two", *"abentwo ▁", *(f"<0x{n:02X}>" for n in range(256))])
    }
    made = {
        "words": Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        "characters": Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>")),
        "bytes": Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)),
    }[kind]
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    texts = ["one two", "One  Two", "ｏne two", "onetwo", "one ☃", "one ☀", "one cat", "one dog", "one dog"]
    write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    data = DataConfig.model_validate(
        {"train": [{"path": str(tmp_path / "rows.jsonl"), "format": {"type": "completion"}}]}
    )
    source = open_source(data.train[0], cache=tmp_path / "cache", in_place=False)
    reader = RowReader.of(data.train[0], source, data, tokenizer, len(tokenizer))
    (own,) = groups_of([reader], tmp_path / "cache")
    assert (
        check([own.tolist()], [reader.token_keys(range(len(texts)))]) == {"words": 8, "characters": 8, "bytes": 6}[kind]
    )


def test_rows_of_an_evaluation_that_are_trained_on_are_counted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fifty of fifty, in another order, which no hash of a file shows."""
    a, b = write(tmp_path / "a.jsonl", range(100, 300)), write(tmp_path / "b.jsonl", [7, *range(130, 140)])
    e = write(tmp_path / "e.jsonl", [*range(149, 99, -1)])
    train, _ = opened(tmp_path, train=[a, b], eval=[e])
    (record,) = caplog.records
    assert "data.eval e: 50 of its 50 row(s) are also trained on (60 row(s) of data.train" in record.getMessage()
    assert "are equal to them: 50 of a, 10 of b)" in record.getMessage()
    assert "data.drop_eval_duplicates=true takes them out" in record.getMessage()
    assert len(rows_of(train)) == 201 and left_out_of(train.names, train.sources) == {}
    caplog.clear()
    train, evals = opened(tmp_path, train=[a, b], eval=[e], drop_eval_duplicates=True)
    assert not caplog.records
    assert rows_of(train) == Counter({7: 1, **dict.fromkeys(range(150, 300), 1)})
    assert left_out_of(train.names, train.sources) == {"a": (200, 150), "b": (11, 1)}
    assert len(rows_of(evals["e"])) == 50
    opened(tmp_path, train=[{**a, "weight": 0}, write(tmp_path / "c.jsonl", [7, 8])], eval=[e])
    assert not caplog.records, "what has no weight is not trained on"


def test_the_first_of_equal_rows_is_kept_over_all_datasets(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [5, 6, 5, 7, 8])
    b = write(tmp_path / "b.jsonl", [9, 7, 9, 10])
    train, _ = opened(tmp_path, train=[a, b], drop_duplicates=True)
    assert rows_of(train) == Counter([5, 6, 7, 8, 9, 10])
    assert [row["input_ids"][0] for row in train.sources[0].rows(range(4))] == [5, 6, 7, 8]  # type: ignore[index]
    assert [row["input_ids"][0] for row in train.sources[1].rows(range(2))] == [9, 10]  # type: ignore[index]
    assert left_out_of(train.names, train.sources) == {"a": (5, 4), "b": (4, 2)}
    # Together: a row that is measured is not the one that is kept.
    e = write(tmp_path / "e.jsonl", [7])
    both, _ = opened(tmp_path, train=[a, b], eval=[e], drop_duplicates=True, drop_eval_duplicates=True)
    assert rows_of(both) == Counter([5, 6, 8, 9, 10])
    # Weights and shares are of what is left.
    weighted, _ = opened(tmp_path, train=[{**a, "share": 0.75}, {**b, "share": 0.25}], drop_duplicates=True)
    assert weighted.weights == (6 * 0.75 / 4, 6 * 0.25 / 2)
    tripled, _ = opened(tmp_path, train=[{**a, "weight": 3}, b], drop_duplicates=True)
    assert rows_of(tripled)[5] == 3 and rows_of(tripled)[9] == 1
    # The same file once more.
    twice = {**a, "name": "twice"}
    with pytest.raises(
        DataError, match=r"drop_duplicates=true: none of the 5 row.*'twice' is left.*train\.1\.weight=0"
    ):
        opened(tmp_path, train=[a, twice], drop_duplicates=True)
    ignored, _ = opened(tmp_path, train=[a, {**twice, "weight": 0}], drop_duplicates=True)
    assert rows_of(ignored) == Counter([5, 6, 7, 8])


def test_equal_rows_are_held_out_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*range(100, 400), *range(100, 160), *[9] * 40]
    a, b = write(tmp_path / "a.jsonl", rows[:250]), write(tmp_path / "b.jsonl", rows[250:])
    for wanted, many in (({"fraction": 0.1}, 40), ({"rows": 60}, 60)):
        caplog.clear()
        train, evals = opened(tmp_path, train=[a, b], eval=wanted)
        trained, measured = rows_of(train), rows_of(evals["held_out"])
        assert not trained.keys() & measured.keys() and trained + measured == Counter(rows)
        assert measured.total() == many and train.order_version == evals["held_out"].order_version == 4
        assert not caplog.records
        # Whatever the files are called, and in which order they come.
        moved = [write(tmp_path / "0.jsonl", rows[250:]), write(tmp_path / "1.jsonl", rows[:250])]
        assert rows_of(opened(tmp_path, train=moved, eval=wanted)[1]["held_out"]) == measured
        # A run that was begun before holds out what it did, and says what that means.
        old, old_evals = opened(tmp_path, 2, train=[a, b], eval=wanted)
        assert rows_of(old).keys() & rows_of(old_evals["held_out"]).keys() and old.order_version == 2
        assert "data.eval held_out: " in caplog.text and "are also trained on" in caplog.text
        config = make_config(tmp_path, data={"seq_len": 8, "window": 32, "train": [a, b], "eval": wanted})
        again = open_evals(config, demo_tokenizer(), VOCABULARY, order_version=2)
        assert rows_of(again["held_out"]) == rows_of(old_evals["held_out"])
        assert old.identity["datasets.0.held_out"] == f"{many} rows"


def test_a_run_whose_held_out_rows_have_no_equal_ones_is_the_run_that_it_was(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [*range(100, 300)])
    train, evals = opened(tmp_path, train=[a], eval={"rows": 10})
    old, old_evals = opened(tmp_path, 2, train=[a], eval={"rows": 10})
    assert train.fingerprint == old.fingerprint and train.order_version == 2
    assert evals["held_out"].fingerprint == old_evals["held_out"].fingerprint
    # Also where rows are equal, if they are all held out, or none is.
    out = next(iter(rows_of(evals["held_out"])))
    kept = next(row for row in range(100, 300) if row not in rows_of(evals["held_out"]))
    for extra in (kept, out):
        b = write(tmp_path / "b.jsonl", [*range(100, 300), extra])
        version = opened(tmp_path, train=[b], eval={"rows": 10})[0].order_version
        divided = set(rows_of(opened(tmp_path, 2, train=[b], eval={"rows": 10})[1]["held_out"])) & set(
            rows_of(opened(tmp_path, 2, train=[b], eval={"rows": 10})[0])
        )
        assert version == (4 if divided else 2)
    dropping = {"drop_duplicates": True, "drop_eval_duplicates": True}
    same, _ = opened(tmp_path, train=[a], eval={"rows": 10}, **dropping)
    assert same.fingerprint == train.fingerprint, "nothing is dropped, so it is the same run"


def test_the_keys_of_rows_are_read_once_and_by_several_processes_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [said(f"What is {n % 300}?", "It is.") for n in range(1200)]
    write(tmp_path / "a.jsonl", rows)
    data = DataConfig.model_validate({"chat_template": "chatml", "train": [{"path": str(tmp_path / "a.jsonl")}]})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    def found(cache: Path) -> tuple[list[int], list[str]]:
        source = open_source(data.train[0], cache=tmp_path / "files", in_place=False)
        reader = RowReader.of(data.train[0], source, data, demo_tokenizer(), VOCABULARY)
        shown: list[str] = []
        (own,) = groups_of([reader], cache, lambda what, _done, _total: shown.append(what))
        return own.tolist(), [what for what in shown if what.startswith("comparing the rows of ")]

    alone, shown = found(tmp_path / "one")
    assert len(set(alone)) == 300 and len(shown) == 2
    assert found(tmp_path / "one") == (alone, []), "kept in the cache"
    (tmp_path / "xxhash.py").write_text("raise SystemExit('code of a stranger in the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(duplicates, "_ROWS_A_PROCESS", 500)
    together, shown = found(tmp_path / "two")
    assert together == alone and shown
    kept = [
        {p.name: p.read_bytes() for p in (tmp_path / each).glob("files/*/*") if p.name != "meta.json"}
        for each in ("one", "two")
    ]
    assert kept[0] == kept[1] and kept[0].keys() == {"loose", "exact"}


@pytest.mark.slow
def test_what_a_process_that_reads_keys_cannot_read_is_said_as_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", [*[said("Who?", "Ada.")] * 1100, said("x" * 3000, "Ada.")])
    data = DataConfig.model_validate({"chat_template": "chatml", "train": [{"path": str(tmp_path / "a.jsonl")}]})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(duplicates, "_ROWS_A_PROCESS", 500)
    source = open_source(data.train[0], cache=tmp_path / "files", in_place=False, max_row_bytes=2000)
    reader = RowReader.of(data.train[0], source, data, demo_tokenizer(), VOCABULARY)
    with pytest.raises(DataError, match=r"a\.jsonl:1101: the row has 3,\d+ bytes, more than data\.max_row_bytes=2000"):
        groups_of([reader], tmp_path / "cache")
    assert not [each for each in (tmp_path / "cache/files").iterdir() if not each.name.endswith(".tmp")]


def test_rows_fetched_from_a_store_whenever_needed_are_compared_only_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import fsspec

    table = pa.table({"input_ids": [[n, n] for n in range(100, 140)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    memory = fsspec.filesystem("memory")
    memory.pipe("/compared/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    far = {"path": "memory://compared/rows.parquet", "format": TOKENS}
    e = write(tmp_path / "e.jsonl", [100, 101, 5])
    try:
        train, _ = opened(tmp_path, train=[far], eval=[e], shuffle="blocks")
        (record,) = caplog.records
        assert "not compared with the evaluations" in record.getMessage() and train.rows(0) == 40
        for fields in ({"shuffle": "blocks", "drop_eval_duplicates": True}, {"drop_eval_duplicates": True}):
            assert opened(tmp_path, train=[far], eval=[e], **fields)[0].rows(0) == 38
    finally:
        memory.rm("/compared", recursive=True)


def test_dropped_rows_are_any_rows(tmp_path: Path) -> None:
    """Of what is chosen, held out and dropped, in this order."""
    rng = np.random.default_rng(3)
    rows = rng.integers(100, 180, 400).tolist()
    a = {**write(tmp_path / "a.jsonl", rows), "rows": {"first": 300}}
    train, evals = opened(tmp_path, train=[a], eval={"rows": 50}, drop_duplicates=True, shuffle="none")
    measured = rows_of(evals["held_out"])
    left = list(dict.fromkeys(row for row in rows[:300] if row not in measured))
    assert sorted(rows_of(train).elements()) == sorted(left)
    assert [row["input_ids"][0] for row in train.sources[0].rows(range(len(left)))] == left  # type: ignore[index]
    assert sum(train.sources[0].blocks) == len(left)
    assert train.identity["datasets.0.rows"] == "first 300" and "equal rows" in train.identity["datasets.0.without"]


def test_a_dataset_of_the_config_names_where_its_rows_are() -> None:
    assert not DataConfig(train=[DatasetConfig(path="a")]).eval_decides_training
    assert DataConfig(train=[DatasetConfig(path="a")], drop_eval_duplicates=True).eval_decides_training
