"""Rows of `eval.tasks` become questions, or are refused with their place and a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.eval import ChoicesTask, EvalConfig
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.questions import Choices, Written, check_names, open_tasks
from raytune_fsdp.run.checks import check_best, check_early_stop
from raytune_fsdp.run.evaluation.tasks import _judged, metrics_of
from tests.runs import make_config
from tests.unit.made_tokenizers import chat, demo, metaspace

MMLU = {"question": "Is it?", "choices": ["Yes", "No", "7"], "answer": 1, "subject": "law / tax"}


def config_of(directory: Path, rows: list[dict[str, Any]] | str, **task: Any) -> FinetuneConfig:
    file = directory / "rows.jsonl"
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return make_config(directory, eval={"tasks": [{"type": "choices", "path": str(file), **task}]})


def opened(directory: Path, rows: Any, tokenizer: Any = None, **task: Any) -> Any:
    config = config_of(directory, rows, **task)
    (found,) = open_tasks(config, tokenizer or demo(), 2000, positions=100)
    return found


@pytest.mark.parametrize(
    ("answer", "right"),
    [(0, 0), ("b", 1), ("C", 2), ("1", 1), ("Yes", 0), ("7", 2), (2.0, None), ("D", None), (True, None)],
)
def test_the_right_choice_by_letter_index_or_text(tmp_path: Path, answer: Any, right: int | None) -> None:
    rows = [{**MMLU, "answer": answer}]
    if right is not None:
        assert opened(tmp_path, rows).right.tolist() == [right]
        return
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the answer .* is none of the 3 choices; write a letter \(A to C"
    ):
        opened(tmp_path, rows)


DIGITS, LETTERS = ["1", "2", "3", "4"], ["B", "A", "D"]


@pytest.mark.parametrize(
    ("choices", "answers", "right"),
    [
        (DIGITS, ["2", "4"], [1, 3]),  # 4 is no index
        (DIGITS, ["2", "0"], [2, 0]),  # 0 is no text
        (DIGITS, [2, 0], [2, 0]),
        (LETTERS, ["A", "D"], [1, 2]),
        (LETTERS, ["A", "C"], [0, 2]),
        (LETTERS, ["A", "A"], None),
        (DIGITS, ["2"], None),
        (DIGITS, ["2", "0", "4"], None),
        ({"text": DIGITS, "label": list("2341")}, ["2"], [0]),
    ],
)
def test_an_answer_that_is_the_letter_of_one_choice_and_the_text_of_another(
    tmp_path: Path, choices: Any, answers: list[Any], right: list[int] | None
) -> None:
    rows = [{"question": "Which?", "choices": choices, "answer": answer} for answer in answers]
    if right is not None:
        assert opened(tmp_path, rows).right.tolist() == right
        return
    with pytest.raises(DataError, match=r"rows.jsonl:1: the answer '[2A]' is the text of choice 2, and .* labels"):
        opened(tmp_path, rows)


def test_the_shapes_of_arc_and_of_tables(tmp_path: Path) -> None:
    arc = {"question": "Is it?", "choices": {"text": ["Yes", "No"], "label": ["1", "2"]}, "answerKey": "1"}
    found = opened(tmp_path, [arc], answer="answerKey")
    assert found.right.tolist() == [0] and found.subjects == (None,), "its label, not its index"
    table = pa.table({"question": ["Is it?"], "A": ["Yes"], "B": ["No"], "C": [None], "answer": ["B"], "more": [1]})
    pq.write_table(table, tmp_path / "mmlu.parquet")
    task = {"path": str(tmp_path / "mmlu.parquet"), "choices": ["A", "B", "C"]}
    found = opened(tmp_path, [MMLU], **task)
    assert (found.first.tolist(), found.right.tolist(), found.name) == ([0, 2], [1], "mmlu")


def test_a_run_keeps_to_the_questions_of_its_version(tmp_path: Path) -> None:
    """Those of a directory's test split; all of its files where the run was begun before there were splits."""
    for split, many in (("train", 3), ("test", 2)):
        config_of(tmp_path, [MMLU] * many)
        (tmp_path / "mmlu").mkdir(exist_ok=True)
        (tmp_path / "rows.jsonl").rename(tmp_path / "mmlu" / f"{split}.jsonl")
    config = make_config(tmp_path, eval={"tasks": [{"type": "choices", "path": f"{tmp_path}/mmlu"}]})
    for version, many in ((None, 2), (4, 2), (3, 5), (2, 5)):
        (found,) = open_tasks(config, demo(), 2000, positions=100, order=version)
        assert len(found.subjects) == many
    # A new run that asks them is of the version that reads them so, whatever its rows need, and stays of it.
    train, _ = open_data(config, demo(), 2000)
    assert train.order_version == 4
    plain, _ = open_data(make_config(tmp_path), demo(), 2000)
    assert plain.order_version == 2


def texts_of(found: Choices, tokenizer: Any) -> list[tuple[str, str]]:
    """Each document as text, and of it what is measured."""
    texts = []
    for sample in found.samples:
        for source in sorted(set(sample.source_ids.tolist()) - {-1}):
            own = sample.source_ids == source
            ids, labels = sample.input_ids[own], sample.labels[own]
            texts.append((int(source), tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE])))
    return [(whole, measured) for _, whole, measured in sorted(texts)]


def test_choices_come_after_their_question_and_are_measured_alone(tmp_path: Path) -> None:
    found = opened(tmp_path, [MMLU, {**MMLU, "subject": None}])
    messages = [{"role": "user", "content": "Is it?"}]
    prompt = demo().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert texts_of(found, demo()) == [(prompt + choice, choice) for choice in MMLU["choices"]] * 2
    assert found.characters.tolist() == [3, 2, 1] * 2 and found.subjects == ("law_tax", None)
    assert metrics_of(found) == [
        "eval/rows/accuracy", "eval/rows/accuracy_normalised", "eval/rows/law_tax/accuracy",
        "eval/rows/law_tax/accuracy_normalised",
    ]  # fmt: skip
    plain = opened(tmp_path, [MMLU], style="plain", system="Think.")
    assert texts_of(plain, demo())[0] == ("Think.\n\nQuestion: Is it?\nAnswer: Yes", " Yes")
    words = metaspace("always")
    assert texts_of(opened(tmp_path, [MMLU], words), words)[0][1].strip() == "Yes", "it has no chat template"


def test_shots_come_before_every_question_and_are_not_measured(tmp_path: Path) -> None:
    rows = [MMLU, {**MMLU, "question": "And this?"}]
    assert texts_of(opened(tmp_path, rows, style="plain", shots=1), demo())[0] == (
        "Question: Is it?\nAnswer: No\n\nQuestion: And this?\nAnswer: Yes", " Yes",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"eval.tasks.0.shots=2: .*rows.jsonl has no more rows than that"):
        opened(tmp_path, rows, shots=2)


def test_written_answers(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "2 + 2 = 4\n#### 4", "subject": "sums"}
    found = opened(tmp_path, [row, {**row, "answer": 1200}], type="exact", max_new_tokens=7)
    assert isinstance(found, Written) and found.right == ("4", "1200") and not found.plain
    prompt = demo().apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_dict=False
    )
    assert found.prompts[0].tolist() == prompt and found.prompts[0].dtype == np.int32
    assert metrics_of(found) == ["eval/rows/exact_match", "eval/rows/sums/exact_match"]
    plain = opened(tmp_path, [row], chat(), type="exact", max_new_tokens=7)
    assert chat().decode(plain.prompts[0]) == "Question: How many?\nAnswer:" and plain.plain
    boxed = opened(tmp_path, [{**row, "answer": r"so \boxed{x}"}], type="exact", find="boxed", max_new_tokens=7)
    assert boxed.right == ("x",)


@pytest.mark.parametrize(
    ("rows", "task", "message"),
    [
        ([{**MMLU, "choices": ["Yes"]}], {}, r":1: choices=\['Yes'\] is no list of two or more texts"),
        ([MMLU, {**MMLU, "question": " "}], {}, r":2: question=' ' is no text"),
        (
            [{"question": "?", "A": "a", "B": "", "C": "c", "answer": "C"}], {"choices": ["A", "B", "C", "D"]},
            r":1: B is empty and a later one of A, B, C, D is not, so the letters",
        ),
        ([{"choices": ["a", "b"], "answer": 1}], {}, r":1: the row has no 'question' \(it has choices, answer\)"),
        ("{", {}, r"rows.jsonl:1"),
        ([{**MMLU, "choices": ["Yes", "long " * 60]}], {}, r":1: the question and its choice .* data.seq_len=48"),
        ([{"question": "?", "answer": "four"}], {"type": "exact"}, r":1: the answer 'four' has no number.*set eval"),
        (
            [{"question": "?", "answer": "4"}], {"type": "exact", "max_new_tokens": 99},
            r":1: the question has \d+ tokens, and eval.tasks.0.max_new_tokens=99 more do not fit into the 100",
        ),
        (
            [{"question": "?", "answer": "a" * 60 + "!"}], {"type": "exact", "find": "regex", "regex": "((?:a|aa)+)$"},
            r"eval.tasks.0.regex=.*takes more than a second for the answer of .*:1",
        ),
        ([{**MMLU, "subject": f"s{number}"} for number in range(201)], {}, r":201 has the 201th subject.* to null"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(tmp_path: Path, rows: Any, task: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(tmp_path, rows, **({"max_new_tokens": 7} | task if task.get("type") == "exact" else task))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"find": "regex"}, "set both"),
        ({"regex": "(.*)"}, "set both"),
        ({"find": "regex", "regex": "("}, "is not a regular expression"),
        ({"find": "regex", "regex": ".*"}, "has 0 groups; it must have one"),
    ],
)
def test_expressions_that_find_nothing_are_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig.model_validate({"tasks": [{"type": "exact", "path": "a.jsonl", **task}]})


def test_names_are_told_apart_and_metrics_of_tasks_decide(tmp_path: Path) -> None:
    found = opened(tmp_path, [MMLU])
    with pytest.raises(DataError, match=r"eval.tasks.0: .* is called 'rows', too: set eval.tasks.0.name"):
        check_names([found], ["rows"])
    with pytest.raises(DataError, match=r"eval.tasks.1:"):
        check_names([found, found], [])
    config = config_of(tmp_path, [MMLU])
    assert isinstance(config.eval.tasks[0], ChoicesTask) and config.eval.tasks[0].split is None
    every = {"tasks": config.model_dump()["eval"]["tasks"], "every": 5}
    best = {"keep_best": 1, "best": "eval/rows/accuracy"}
    plan: Any = type("Plan", (), {"save_every": 5, "eval_every": 5})
    check_best(make_config(tmp_path, eval=every, checkpoint=best), plan, metrics_of(found))
    with pytest.raises(ConfigError, match="set checkpoint.best to one of eval/rows/accuracy"):
        check_best(make_config(tmp_path, eval=every, checkpoint={"keep_best": 1}), plan, metrics_of(found))
    check_early_stop(make_config(tmp_path, eval={**every, "early_stop": {"metric": best["best"]}}), metrics_of(found))
    with pytest.raises(ConfigError, match="set eval.early_stop.metric to one of eval/rows/accuracy"):
        check_early_stop(make_config(tmp_path, eval={**every, "early_stop": {}}), metrics_of(found))


def test_answers_are_judged_by_their_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "?", "answer": answer} for answer in ("4", "5", "6")]
    answers = {0: "It is 4.0\n\nQuestion: and 7?", 1: "Five", 2: "6 and 7"}
    plain = opened(tmp_path, rows, chat(), type="exact", max_new_tokens=7)
    assert _judged(plain, answers) == {"eval/rows/exact_match": pytest.approx(1 / 3)}
    assert _judged(opened(tmp_path, rows, type="exact", max_new_tokens=7), answers) == {"eval/rows/exact_match": 0.0}
    slow = {"type": "exact", "find": "regex", "regex": "((?:a|aa)+)$", "max_new_tokens": 7}
    assert _judged(opened(tmp_path, rows, **slow), {**answers, 1: "a" * 60 + "!"}) == {}
    assert "takes more than a second for an answer, so this evaluation has no eval/rows/exact_match" in caplog.text
