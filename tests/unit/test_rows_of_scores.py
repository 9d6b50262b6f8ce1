"""Rows for a head that scores: one label, at the token that transformers takes, and nothing lost before it."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raytune_fsdp.base.batch import GROUP_COLUMNS, IGNORE, Cursor, Role
from raytune_fsdp.base.errors import ConfigError, DataError, RowError
from raytune_fsdp.cli import main
from raytune_fsdp.cli.step import _lines
from raytune_fsdp.config import DatasetConfig, FinetuneConfig, PreferenceFormat, ScoreFormat
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.data.batches import fill_up, to_batch
from raytune_fsdp.data.census import census, classes_of, groups_of_steps
from raytune_fsdp.data.open import HELD_OUT, open_data
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.scores.scored import cut_scored
from raytune_fsdp.data.rows.scores.scoring import Scoring, pad_token_of
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.step_counts import GROUPS, TERM_TOKENS
from raytune_fsdp.record.report.data import documents_of, preview, stats
from raytune_fsdp.tools.audit.past import PastSample, PastStep
from tests.config_text import dump_config
from tests.rows import all_samples, demo_tokenizer, make_windows
from tests.runs import make_config

PAD, END = 0, 1
"""Tokens of the demo's tokenizer."""


def scoring(*labels: str, outputs: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Scoring:
    head = HeadConfig(type="score", labels=list(labels), outputs=outputs)
    return Scoring.of(head, tokenizer or demo_tokenizer())


def documents(
    rows: list[Any], how: Scoring, tokenizer: PreTrainedTokenizerBase | None = None, **format: Any
) -> list[Document | RowError]:
    kind: Any = PreferenceFormat if format.get("type") == "preference" else ScoreFormat
    policy: Any = format.pop("policy", "keep")
    formatter = Formatter(
        kind.model_validate({"type": "score", **format}), tokenizer=tokenizer or demo_tokenizer(), vocab_size=2000,
        template=None, scoring=how, special_tokens=policy,
    )  # fmt: skip
    return formatter.documents(rows, [f"f:{number}" for number in range(1, len(rows) + 1)])


def sound(found: list[Document | RowError]) -> list[Document]:
    assert all(isinstance(each, Document) for each in found), found
    return [each for each in found if isinstance(each, Document)]


def own_tokens(document: Document) -> list[int]:
    """The tokens of a document, whose only label is the padding behind them."""
    assert document.labels.tolist() == [IGNORE] * (len(document.labels) - 1) + [document.input_ids[-1]]
    return [int(each) for each in document.input_ids[:-1]]


def with_processor(template: str) -> PreTrainedTokenizerFast:
    """The demo's tokenizer, with tokens around every text."""
    backend = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    special = [(each, int(backend.token_to_id(each))) for each in ("<|system|>", "<|endoftext|>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>")


@pytest.mark.parametrize("template", ["$A", "<|system|> $A", "<|system|> $A <|endoftext|>"])
def test_a_text_has_the_tokens_that_transformers_gives_it(template: str) -> None:
    tokenizer = with_processor(template)
    texts = ["One, two.", "x", "A long text\nof two lines ", "Ünïcode – and <|user|> in it", "ends<|endoftext|>"]
    rows = [{"said": text, "stars": number} for number, text in enumerate(texts)]
    how = scoring(tokenizer=tokenizer)
    found = sound(documents(rows, how, tokenizer, text="said", score="stars"))
    for number, (each, text) in enumerate(zip(found, texts, strict=True)):
        assert own_tokens(each) == tokenizer(text)["input_ids"], "and no other end"
        assert each.columns == (Role.SCORED, 1.0, number, 0.0) and not each.others and len(GROUP_COLUMNS) == 4
        assert each.input_ids[-1] == PAD and each.target_tokens == 1


def test_a_conversation_has_the_tokens_of_the_chat_template() -> None:
    asked = [{"role": "user", "content": "Is it?"}]
    answered = [*asked, {"role": "assistant", "content": "It is so."}]
    longer = [{"role": "system", "content": "Be brief."}, *answered, {"role": "user", "content": " Why ? "}]
    rows = [{"talk": each, "good": True} for each in (asked, answered, longer, answered[1:])]
    for each, row in zip(
        sound(documents(rows, scoring("no", "yes"), messages="talk", label="good")), rows, strict=True
    ):
        wanted = demo_tokenizer().apply_chat_template(row["talk"], tokenize=True, return_dict=False)
        assert own_tokens(each) == wanted and each.columns[2] == 1.0
    shared = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "It is so."}]
    (found,) = sound(documents([{"talk": shared, "good": 0}], scoring("no", "yes"), messages="talk", label="good"))
    assert own_tokens(found) == demo_tokenizer().apply_chat_template(answered, tokenize=True, return_dict=False)
    # A text that looks like a turn's end is no turn's end.
    said = [{"role": "user", "content": "Say <|endoftext|> now"}]
    rows = [{"talk": said, "good": 0}]
    kept, escaped = (
        own_tokens(sound(documents(rows, scoring("a", "b"), messages="talk", label="good", policy=policy))[0])
        for policy in ("keep", "escape")
    )
    assert END in kept and END not in escaped
    assert demo_tokenizer().decode(escaped) == demo_tokenizer().decode(kept)


def test_a_pair_is_scored_at_the_end_of_both_sides() -> None:
    asked, given = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}
    other = {**given, "content": "It is not, and never was."}
    row = {"chosen": [asked, given], "rejected": [asked, other], "w": 2, "gap": 0.5}
    (first,) = sound(documents([row], scoring(), type="preference", weight="w", margin="gap"))
    for each, turns in zip(first.members, (row["chosen"], row["rejected"]), strict=True):
        assert own_tokens(each) == demo_tokenizer().apply_chat_template(turns, tokenize=True, return_dict=False)
    assert [each.columns for each in first.members] == [(1.0, 2.0, 0.5, 0.0), (2.0, 2.0, 0.5, 0.0)]
    same = np.argmin(first.input_ids[:8] == first.others[0].input_ids[:8])
    assert 0 < first.shared == same - 1, "all they begin with, but for one token"
    # Texts get an end, once; the answer may become one token with the prompt's end.
    rows = [{"prompt": "Is it", "chosen": "s so?", "rejected": "s not<|endoftext|>"}]
    (plain,) = sound(documents(rows, scoring(), type="preference", style="plain"))
    texts = ["Is its so?<|endoftext|>", "Is its not<|endoftext|>"]
    assert [own_tokens(each) for each in plain.members] == [demo_tokenizer()(text)["input_ids"] for text in texts]
    # What is trained on does not matter; whether they differ does.
    muted = {"chosen": [asked, {**given, "train": False}], "rejected": [asked, other]}
    equal = {"prompt": "Q", "chosen": "yes", "rejected": "yes"}
    one, wrong = documents([muted, equal], scoring(), type="preference")
    assert isinstance(one, Document) and isinstance(wrong, RowError) and wrong.reason == "equal_answers"
    assert re.fullmatch(
        r"f:2: chosen and rejected are the same \d+ token\(s\), so neither is to be preferred; .*", str(wrong)
    )


LABELS = ("bad", "good", "so-so")


@pytest.mark.parametrize(
    ("labels", "given", "found"),
    [
        (LABELS, "good", 1), (LABELS, 2, 2), (LABELS, 0.0, 0), (LABELS, "2", 2), (LABELS, "1.0", 1),
        (LABELS, Decimal(1), 1),
        (("no", "yes"), True, 1), (("no", "yes"), False, 0), (("1", "2"), "1", 0), (("false", "true"), True, 1),
        (("0", "1"), 1, 1),
    ],
)  # fmt: skip
def test_a_class_is_a_name_or_a_number(labels: tuple[str, ...], given: Any, found: int) -> None:
    (each,) = sound(documents([{"t": "A text", "l": given}], scoring(*labels), text="t", label="l"))
    assert each.columns == (Role.SCORED, 1.0, found, 0.0)


_NONE = r"is none of the classes \('bad', 'good', 'so-so', or their numbers 0 to 2\)"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"l": "god"}, rf"l='god' {_NONE}; nearest: 'good'; correct or remove the row, or name the class in model"),
        ({"l": 3}, f"l=3 {_NONE};"), ({"l": -1}, f"l=-1 {_NONE};"), ({"l": 1.5}, f"l=1.5 {_NONE};"),
        ({"l": True}, f"l=True {_NONE};"), ({"l": float("nan")}, f"l=nan {_NONE};"), ({"l": 10**400}, "l=10+… is none"),
        ({"l": float("inf")}, f"l=inf {_NONE};"),
        ({"l": Decimal("sNaN")}, r"is none of the classes"), ({"l": Decimal("1e999999999")}, "is none of the classes"),
        ({"l": "9" * 5000}, f"l='9+… {_NONE};"), ({"l": "-1"}, _NONE), ({"l": "٣"}, _NONE),
        ({"l": ""}, f"l='' {_NONE};"),
        ({"l": ["good"]}, rf"l=\['good'\] {_NONE};"), ({"l": {"good": 1}}, _NONE), ({"l": None}, "column 'l' is null;"),
        ({"t": "", "l": 1}, "t='' is empty;"), ({"t": " \n", "l": 1}, "t=' .n' is empty;"),
        ({"t": None, "l": 1}, "column 't' is null"),
        ({"t": 7, "l": 1}, "t=7 is not text but int;"), ({"t": ["a"], "l": 1}, "is not text but list"),
        ({"t": "half \ud800", "l": 1}, "has half a surrogate pair"),
        ({"l": 1, "w": -1}, "w=-1 is less than 0, and a row's weight"),
        ({"l": 1, "w": "2"}, "w='2' is text, not a number; format.weight .* as JSON Lines"),
        ({"l": 1, "w": float("inf")}, "no finite number"),
        ({"t": "ends<|pad|>", "l": 1}, r"its last token is '<\|pad\|>', which texts are padded .*; set model.head"),
    ],
)  # fmt: skip
def test_a_row_without_a_text_or_a_class_is_an_error_of_one_line(row: dict[str, Any], said: str) -> None:
    (found,) = documents([{"t": "A text", "w": 1, **row}], scoring(*LABELS), text="t", label="l", weight="w")
    assert isinstance(found, RowError) and "\n" not in str(found) and len(str(found)) < 400
    assert str(found).startswith("f:1: ") and re.search(said, str(found)), str(found)


@pytest.mark.parametrize("missing", ["t", "l", "w"])
def test_a_missing_column_is_named(missing: str) -> None:
    row = {key: value for key, value in {"t": "A text", "l": 1, "w": 1}.items() if key != missing}
    (found,) = documents([row], scoring(*LABELS), text="t", label="l", weight="w")
    assert isinstance(found, RowError) and found.reason == "missing_column"
    field = {"t": "text", "l": "label", "w": "weight"}[missing]
    assert f"has no column {missing!r}, it has 't'" in str(found).replace("has 'l', 'w'", "has 't'")
    assert f"format.{field}" in str(found) and "set the dataset's format to" not in str(found)


@pytest.mark.parametrize(
    "messages", [[], "[]", [1], [{"role": "judge", "content": "x"}], [{"role": "user", "content": ""}], 5]
)
def test_a_conversation_that_is_none_is_an_error(messages: Any) -> None:
    (found,) = documents([{"m": messages, "l": 1}], scoring(*LABELS), messages="m", label="l")
    assert isinstance(found, RowError) and str(found).startswith("f:1: m") and "\n" not in str(found)


def test_a_number_that_is_also_another_class_name_is_not_guessed() -> None:
    stars = scoring("1", "2", "3", "4", "5")
    wrong, right, beyond = documents([{"t": "a", "l": each} for each in (1, "1", 5)], stars, text="t", label="l")
    assert isinstance(wrong, RowError) and wrong.reason == "wrong_class"
    assert "l=1 is the number of the class '2', and the name of that with the number 0: write names as texts" in str(
        wrong
    )
    assert isinstance(right, Document) and right.columns[2] == 0.0
    for said in ("1.0", 1.0, "0", 0):  # as pandas writes it; a star less than there are
        (other,) = documents([{"t": "a", "l": said}], stars, text="t", label="l")
        assert isinstance(other, RowError) and "is the number of the class" in str(other), said
    assert isinstance(beyond, RowError) and "l=5 is none of the classes" in str(beyond)
    (bool_,) = documents([{"t": "a", "l": True}], scoring("true", "false"), text="t", label="l")
    assert isinstance(bool_, RowError) and "the number of the class 'false'" in str(bool_)


@pytest.mark.parametrize(
    ("given", "found"), [(1, 1.0), (-2.5, -2.5), ("0.5", 0.5), (" 3 ", 3.0), (True, 1.0), (0, 0.0)]
)
def test_a_score_is_a_number(given: Any, found: float) -> None:
    (each,) = sound(documents([{"t": "A text", "s": given, "w": 0.5}], scoring(), text="t", score="s", weight="w"))
    assert each.columns == (Role.SCORED, 0.5, found, 0.0)


@pytest.mark.parametrize("given", [float("nan"), float("-inf"), "inf", "nan", 1e39, 10**400, "good", "", [1], {}, None])
def test_a_score_that_is_no_number_is_an_error(given: Any) -> None:
    (each,) = documents([{"t": "A text", "s": given}], scoring(), text="t", score="s")
    assert isinstance(each, RowError) and "\n" not in str(each)
    assert re.match(r"f:1: (s=|column 's' is null)", str(each)) and "format.score tells it to the loss" in str(each)


# The token of padding.


def tokenizer_of(special: str, **named: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words, after special tokens, in the order of their ids."""
    tokens = special.split()
    words = {word: number for number, word in enumerate([*tokens, "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(each, special=True) for each in tokens])
    template = named.pop("template", None)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = template
    return made


LLAMA_3 = "<|begin|> <|end|> <|eot|> <|reserved|> <|right_pad_id|>"


@pytest.mark.parametrize(
    ("special", "named", "chosen"),
    [
        ("<unk> <s> </s> <pad>", {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}, "<pad>"),
        ("<x> <|im_end|> <|endoftext|>", {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, "<|endoftext|>"),
        (LLAMA_3, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}, "<|right_pad_id|>"),
        # Padding that ends texts: the tokenizer's end, or what the template writes.
        (LLAMA_3, {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}, "<|right_pad_id|>"),
        ("<|begin|> <|end|> <|eot|> <|other|>", {"pad_token": "<|eot|>", "eos_token": "<|end|>",
         "bos_token": "<|begin|>", "template": "{{ messages[0]['content'] }}<|eot|>"}, "<|other|>"),
        ("<unk> <s> </s>", {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}, "<unk>"),
        ("<s> </s>", {"eos_token": "</s>", "bos_token": "<s>"}, "<s>"),
        ("<e>", {"eos_token": "<e>", "bos_token": "<e>", "unk_token": "<e>"}, None),
        ("<e>", {"eos_token": "<e>", "pad_token": "<e>"}, None),
    ],
)  # fmt: skip
def test_padding_is_a_token_with_which_no_text_ends(special: str, named: dict[str, Any], chosen: str | None) -> None:
    tokenizer = tokenizer_of(special, **named)
    if chosen is None:
        with pytest.raises(
            ConfigError, match=r"no special token with which no text ends.*set model\.head\.pad_token to.*\('<e>'\)"
        ):
            pad_token_of(HeadConfig(type="score"), tokenizer)
    else:
        found = pad_token_of(HeadConfig(type="score"), tokenizer)
        assert tokenizer.convert_ids_to_tokens(found) == chosen
        tokenizer.pad_token = chosen  # as an export has it
        assert pad_token_of(HeadConfig(type="score"), tokenizer) == found, "an export chooses the same"


def test_padding_may_be_named() -> None:
    tokenizer = tokenizer_of("<e>", eos_token="<e>")
    assert pad_token_of(HeadConfig(type="score", pad_token="b"), tokenizer) == 2
    assert pad_token_of(HeadConfig(type="score", pad_token="<e>"), tokenizer) == 0, "who names it knows the rows"
    for wrong in ("a b", "c", ""):
        with pytest.raises(ConfigError, match="is not one token of the tokenizer.*name one of its tokens"):
            pad_token_of(HeadConfig(type="score", pad_token=wrong), tokenizer)
    # The demo's tokens are of bytes: a word's name in the vocabulary is not the word.
    assert (
        pad_token_of(HeadConfig(type="score", pad_token=" the"), demo_tokenizer())
        == demo_tokenizer()(" the")["input_ids"][0]
    )
    added = with_processor("$A <|endoftext|>")
    added.eos_token, added.pad_token = "<|user|>", None
    assert pad_token_of(HeadConfig(type="score"), added) == PAD, "by its name, and not the end that is added"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(2, 14))
def test_a_document_that_is_cut_still_ends_with_a_token_of_its_own(ids: list[int], length: int) -> None:
    ids = [*ids, 2]
    whole = np.array([*ids, PAD], dtype=np.int32)
    labels = np.where(np.arange(len(whole)) < len(ids), np.int32(IGNORE), np.int32(PAD))
    found = cut_scored(Document(whole, labels, (float(Role.SCORED), 1.0, 0.0, 0.0)), length)
    kept = ids[: length - 1]
    while kept and kept[-1] == PAD:
        kept.pop()
    assert (found is None) == (not kept), "padding alone is scored nowhere"
    if found is not None:
        assert own_tokens(found) == kept and found.columns == (Role.SCORED, 1.0, 0.0, 0.0)


# Windows, batches, counts.


def write(directory: Path, rows: list[dict[str, Any]], **format: Any) -> DatasetConfig:
    directory.mkdir(exist_ok=True)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig.model_validate({"path": str(path), "format": format})


def scored_rows(many: int) -> list[dict[str, Any]]:
    return [{"text": "word " * (1 + i % 7) + f"number {i}", "label": LABELS[i % 2], "w": 1 + i} for i in range(many)]


AS_SCORE = {"type": "score", "text": "text", "label": "label", "weight": "w"}
AS_PAIRS = {"type": "preference", "style": "plain"}


def places_by_the_book(windows: Windows) -> None:
    """Each document's target is at the token that transformers scores: the rightmost that is not padding."""
    for sample in all_samples(windows):
        targets = to_batch([sample], index=0, after=Cursor()).targets
        parts = documents_of(sample)
        assert len(targets.columns) == len(parts) and set(targets.by_document) == {1}
        for part, place, told in zip(parts, targets.places.tolist(), targets.columns, strict=True):
            ids = sample.input_ids[part]
            assert place == part.start + int((np.arange(len(ids)) * (ids != PAD)).argmax())
            assert sample.columns is not None and told == tuple(sample.columns[:, part.start])


def test_packed_documents_are_scored_where_transformers_scores_them(tmp_path: Path) -> None:
    windows = make_windows(
        [write(tmp_path, scored_rows(40), **AS_SCORE)], cache=tmp_path, seq_len=60, scoring=scoring(*LABELS)
    )
    assert windows.kind == "score" and windows.columns == GROUP_COLUMNS
    places_by_the_book(windows)
    samples = all_samples(windows)
    seen = [
        sample.columns[:3, part.start]
        for sample in samples
        if sample.columns is not None
        for part in documents_of(sample)
    ]
    assert sorted(int(weight) - 1 for _, weight, _ in seen) == list(range(40)), "each row once"
    assert all((role, value) == (Role.SCORED, (weight - 1) % 2) for role, weight, value in seen)
    # In another process, and of the cache, the same.
    elsewhere = pickle.loads(pickle.dumps(windows))
    assert [each.id for each in all_samples(elsewhere)] == [each.id for each in samples]
    again = make_windows([windows._datasets[0]], cache=tmp_path, seq_len=60, scoring=scoring(*LABELS))
    assert not again.get(0, 0)[1] and again.fingerprint == windows.fingerprint
    # What a step counts.
    division = Division(global_batch=2, micro_batch=2, total_samples=len(samples), data_ranks=1)
    batch = to_batch(samples[:2], index=0, after=Cursor())
    counts = fill_up(1, [batch], division, windows, windows_built=0).counts
    assert counts[GROUPS] == batch.target_tokens == sum(len(documents_of(each)) for each in samples[:2])
    assert counts[TERM_TOKENS] == 0


def test_rows_of_files_and_functions_of_all_kinds_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"Text, {i}", "label": i % 3, "score": i / 4} for i in range(6)]
    lines = "".join(f'"{row["text"]}",{row["label"]},{row["score"]}\n' for row in rows)
    (tmp_path / "rows.csv").write_text("text,label,score\n" + lines)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "own_rows.py").write_text("def read(row):\n    return {'t': row['text'], 'l': row['label']}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"type": "python", "function": "own_rows:read", "then": {"type": "score", "text": "t", "label": "l"}}

    def read(name: str, how: Scoring, **format: Any) -> list[Any]:
        dataset = DatasetConfig.model_validate({"path": str(tmp_path / name), "format": {"type": "score", **format}})
        windows = make_windows([dataset], cache=tmp_path, seq_len=40, scoring=how)
        return [(each.id, each.columns.tolist() if each.columns is not None else None) for each in all_samples(windows)]

    files = ("rows.csv", "rows.jsonl", "rows.parquet")
    for how, field in ((scoring(*LABELS), "label"), (scoring(), "score")):
        first, *others = (read(name, how, text="text", **{field: field}) for name in files)
        assert first and all(each == first for each in others)
    assert read("rows.jsonl", scoring(*LABELS), **own) == read("rows.csv", scoring(*LABELS), text="text", label="label")


def test_pairs_stay_together_and_are_scored_at_their_ends(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {i}:", "chosen": " yes" * (1 + i % 5), "rejected": " no" * (1 + i % 3)} for i in range(30)
    ]
    windows = make_windows([write(tmp_path, rows, **AS_PAIRS)], cache=tmp_path, seq_len=60, scoring=scoring())
    places_by_the_book(windows)
    questions = Counter[str]()
    for sample in all_samples(windows):
        parts = documents_of(sample)
        assert sample.columns is not None and [sample.columns[0, part.start] for part in parts] == [1, 2] * (
            len(parts) // 2
        )
        texts = [demo_tokenizer().decode(sample.input_ids[part]) for part in parts]
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            question = chosen.partition(":")[0]
            assert rejected.startswith(question + ":") and chosen.endswith(" yes<|endoftext|><|pad|>")
            questions[question] += 1
    assert questions == Counter({f"Question {i}": 1 for i in range(30)})
    counted = census(windows).total
    assert (counted.groups, counted.documents, counted.target_tokens) == (30, 60, 60)


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_a_text_that_is_too_long_loses_its_end_and_is_still_scored(tmp_path: Path, policy: str) -> None:
    rows = [{"text": "one two three four five six seven eight nine", "label": 0}, {"text": "one", "label": 1},
            {"text": "<|pad|>" * 30 + "one", "label": 1}]  # fmt: skip
    options: Any = {"cache": tmp_path, "shuffle": "none", "packing": "none", "long_documents": policy, "seq_len": 10}
    windows = make_windows([write(tmp_path, rows, **{**AS_SCORE, "weight": None})], scoring=scoring(*LABELS), **options)
    if policy == "error":
        with pytest.raises(RowError, match=r"has \d+ tokens, more than data.seq_len=10; raise .* to truncate or drop;"):
            windows.get(0, 0)
        return
    (count,) = windows.get(0, 0)[0].counts.datasets
    texts = [demo_tokenizer().decode(sample.input_ids[documents_of(sample)[0]]) for sample in all_samples(windows)]
    if policy == "drop":
        assert (count.dropped, texts) == ({"too_long": 2}, ["one<|pad|>"])
    else:
        assert (count.dropped, count.truncated, texts[1]) == ({"no_targets_left": 1}, 1, "one<|pad|>")
        whole = demo_tokenizer()(rows[0]["text"])["input_ids"]
        assert texts[0] == demo_tokenizer().decode([*whole[:9], PAD]), "a head that scores its beginning"
        places_by_the_book(windows)


def test_a_pair_that_is_too_long_loses_what_both_begin_with(tmp_path: Path) -> None:
    row = {"prompt": "one two three four five six seven", "chosen": " eight", "rejected": " eight nine"}
    dataset = write(tmp_path, [row], **AS_PAIRS)
    options: Any = {"cache": tmp_path, "packing": "none", "long_documents": "truncate", "scoring": scoring()}
    (whole,) = all_samples(make_windows([dataset], seq_len=99, **options))
    length = sum(part.stop - part.start for part in documents_of(whole))
    kept = 0
    for seq_len in range(4, length, 3):
        windows = make_windows([dataset], seq_len=seq_len, **options)
        for sample in all_samples(windows):
            texts = [demo_tokenizer().decode(sample.input_ids[part]) for part in documents_of(sample)]
            for text, answer in zip(texts, (" eight", " eight nine"), strict=True):
                assert (row["prompt"] + answer + "<|endoftext|><|pad|>").endswith(text) and text != "<|pad|>"
            assert texts[0] != texts[1]
            places_by_the_book(windows)
            kept += 1
    assert kept > 2


def test_texts_with_a_class_under_another_format_are_pointed_out(tmp_path: Path) -> None:
    windows = make_windows([write(tmp_path, scored_rows(2), type="chat")], cache=tmp_path)
    with pytest.raises(
        DataError, match="no column 'messages'.*{type: score, text: text, label: label}, for train.objective"
    ):
        windows.get(0, 0)
    dataset = write(tmp_path, scored_rows(2), **{**AS_SCORE, "weight": None})
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace('"w"', '"weight"'))
    assert [each.read_by for each in make_windows([dataset], cache=tmp_path, scoring=scoring(*LABELS)).unread] == [
        "format.weight"
    ]


def test_people_see_classes_and_scores(tmp_path: Path) -> None:
    dataset = write(tmp_path, scored_rows(5), **AS_SCORE)
    windows = make_windows([dataset], cache=tmp_path, seq_len=60, shuffle="none", scoring=scoring(*LABELS))

    def shown(windows: Windows) -> list[str]:
        about: Any = {"title": "sample 1", "columns": windows.columns, "scoring": windows.scoring}
        return list(preview(all_samples(windows)[0], demo_tokenizer(), windows.names, colours=False, **about))

    lines = shown(windows)
    assert lines[1].startswith("  -- document 1, class 'bad', rows: ") and lines[1].endswith(" tokens, 1 trained")
    assert lines[2] == "  word number 0«<|pad|>»" and "document 2, class 'good', weight 2, rows" in lines[3]
    origins = windows.origins(0, 0)[0]
    past = PastStep(
        step=1, line=None, windows=windows, tokenizer=demo_tokenizer(),
        samples=[PastSample(sample=all_samples(windows)[0], at=Cursor(), origins=origins)],
    )  # fmt: skip
    of_step = list(_lines(past, None, "", text=True))
    assert of_step[2].endswith(f"{tmp_path / 'rows.jsonl'}:1, class 'bad': 7 tokens, 1 trained")
    assert of_step[3] == "  word number 0«<|pad|>»"
    assert classes_of(windows) == {"bad": 3, "good": 2, "so-so": 0}
    counted, steps = census(windows), groups_of_steps(windows, 7, 1)
    said = list(stats(counted, title="train", groups=steps, kind=windows.kind))
    assert steps is not None and f"5 scored documents, {steps.words}" in said
    assert "scored documents by length in tokens" in said
    numbers = write(tmp_path / "numbers", [{"t": "a", "s": -0.5}], type="score", text="t", score="s")
    of_numbers = make_windows([numbers], cache=tmp_path, scoring=scoring())
    assert ", score -0.5, rows: " in shown(of_numbers)[1] and classes_of(of_numbers) == {}


def test_what_decides_documents_decides_fingerprints(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs", [{"prompt": "Q", "chosen": " yes", "rejected": " no"}], **AS_PAIRS)
    classes = write(tmp_path, scored_rows(3), **AS_SCORE)
    other_pad = Scoring.of(HeadConfig(type="score", pad_token="<|system|>"), demo_tokenizer())
    plain = make_windows([pairs], cache=tmp_path, seq_len=60)
    assert "head" not in plain.identity, "without a head nothing is new"
    found = [
        plain,
        make_windows([pairs], cache=tmp_path, seq_len=60, scoring=scoring()),
        make_windows([pairs], cache=tmp_path, seq_len=60, scoring=other_pad),
        *(
            make_windows([classes], cache=tmp_path, scoring=scoring(*labels))
            for labels in (LABELS, LABELS[::-1], LABELS[:2])
        ),
        make_windows([classes], cache=tmp_path, scoring=scoring(outputs=4)),
    ]  # fmt: skip
    assert len({each.fingerprint for each in found}) == len(found)
    assert found[2].identity["head"] == {"pad_token": 2, "labels": [], "outputs": 1}
    assert json.dumps(found[3].identity) and not any(key.endswith(".turns") for key in found[3].identity)
    # A chat template that has no ends of turns to train on: nobody minds.
    talk = write(
        tmp_path / "talk", [{"m": [{"role": "user", "content": "Hi"}], "l": 0}], type="score", messages="m", label="l"
    )
    chats = make_windows([talk], cache=tmp_path, scoring=scoring(*LABELS), chat_template=str(_bare(tmp_path)))
    (sample,) = all_samples(chats)
    assert demo_tokenizer().decode(sample.input_ids[documents_of(sample)[0]]) == "Hi<|pad|>"
    assert not any(key.endswith(".turns") for key in chats.identity)


def _bare(directory: Path) -> Path:
    (directory / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory / "bare.jinja"


# Runs.


def head_run(
    directory: Path, dataset: dict[str, Any], objective: str, labels: list[str], **sections: Any
) -> FinetuneConfig:
    own = make_config(directory).model
    model = {
        "architecture": {**(own.architecture or {}), "vocab_size": 1024},
        "init": "random",
        "tokenizer": str(TOKENIZER),
    }
    data = {"train": [dataset], "seq_len": 60, **sections.pop("data", {})}
    head = {"type": "score", "labels": labels}
    train = {"objective": {"type": objective}}
    return make_config(directory, model={**model, "head": head}, data=data, train=train, **sections)


def texts_of(windows: Windows) -> Counter[tuple[str, float]]:
    found = Counter[tuple[str, float]]()
    for sample in all_samples(windows):
        for part in documents_of(sample):
            assert sample.columns is not None
            found[demo_tokenizer().decode(sample.input_ids[part][:-1]), float(sample.columns[2, part.start])] += 1
    return found


def test_rows_with_the_same_text_are_held_out_together_and_only_equal_ones_are_duplicates(tmp_path: Path) -> None:
    rows = [{"text": f"Text {i // 3}", "label": i % 3} for i in range(36)]
    rows += [rows[0], {"text": "text 0", "label": 0}, {"text": "Text 0 ", "label": 0}]
    dataset = write(tmp_path, rows, type="score", text="text", label="label").model_dump(mode="json")
    data = {"eval": {"rows": 9}, "drop_duplicates": True}
    train, evals = open_data(
        head_run(tmp_path, dataset, "classification", [*LABELS], data=data), demo_tokenizer(), 1024
    )
    trained, measured = texts_of(train), texts_of(evals[HELD_OUT])
    assert not {text for text, _ in trained} & {text for text, _ in measured}
    assert set(trained.values()) == set(measured.values()) == {1} and len(trained) + len(measured) == 38
    assert evals[HELD_OUT].kind == "score" and evals[HELD_OUT].scoring == train.scoring
    places_by_the_book(evals[HELD_OUT])


def test_a_run_opens_shows_and_counts_its_scored_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write(tmp_path, [*scored_rows(9), {"text": "x", "label": "fine", "w": 1}], **AS_SCORE).model_dump(
        mode="json"
    )
    path = tmp_path / "config.yaml"
    data = {"eval": [{**dataset, "name": "measured"}], "bad_rows": "skip"}
    path.write_text(dump_config(head_run(tmp_path, dataset, "classification", [*LABELS], data=data)))
    assert main.main(["data", "stats", "--config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("classes: bad 5, good 4, so-so 0\n") == 2 and "dropped from rows: 1 wrong_class" in shown
    assert "9 scored documents, " in shown and "label='fine' is none of the classes" in shown
    assert main.main(["data", "preview", "--config", str(path), "--eval", "measured", "--samples", "1"]) == 0
    assert "document 1, class '" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ("reward", {"data": {"eval": [{"format": {"type": "chat"}}]}}, "data.eval.0.format.type=chat .*not measure"),
        ("classification", {"data": {"eval": [{"format": {"type": "score", "text": "t", "score": "s"}}]}},
         "data.eval.0.format names no label"),
        ("regression", {"data": {"eval": [{"format": {"type": "preference"}}]}}, "data.eval.0.format.type=preference"),
        ("regression", {}, "data.train.0.format names no score with train.objective.type=regression"),
        ("reward", {}, "data.train.0.format.type=score with train.objective.type=reward, which is of preference rows"),
        ("classification", {"data": {"packing": "concat"}}, "packing=concat .*: a document that is scored stays whole"),
        ("classification", {"data": {"long_documents": "split"}}, "split .*: a document that is scored stays whole"),
        ("classification", {"eval": {"prompts": ["Hi"]}}, "eval.prompts with train.objective.type=classification"),
        ("classification", {"eval": {"tasks": [{"type": "choices", "path": "q.jsonl"}]}}, "eval.tasks with .*no token"),
        ("classification", {"train": {"label_smoothing": 0.1}}, "leave label_smoothing out$"),
    ],
)  # fmt: skip
def test_what_a_head_does_not_go_with_is_refused(
    tmp_path: Path, objective: str, changes: dict[str, Any], said: str
) -> None:
    dataset = {"path": "rows.jsonl", "format": {**AS_SCORE}}
    if objective == "regression" and changes:
        dataset["format"] = {"type": "score", "text": "text", "score": "s"}
    if objective == "reward" and changes:
        dataset["format"] = {"type": "preference"}
    values = head_run(
        tmp_path, {"path": "rows.jsonl", "format": AS_SCORE}, "classification", [*LABELS]
    ).model_dump(mode="json", exclude_unset=True)  # fmt: skip
    values["train"]["objective"] = {"type": objective}
    values["data"]["train"] = [dataset]
    if objective != "classification":
        values["model"]["head"] = {"type": "score"}
    for section, fields in changes.items():
        values.setdefault(section, {}).update(fields)
    for number, each in enumerate(values["data"].get("eval", [])):
        each["path"] = f"eval{number}.jsonl"
    with pytest.raises(ValidationError) as caught:
        FinetuneConfig.model_validate(values)
    assert re.search(said, caught.value.errors()[0]["msg"]), caught.value
