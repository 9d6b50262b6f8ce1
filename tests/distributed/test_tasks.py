"""Evaluations on 1, 2 and 3 ranks give what a plain loop over the same questions and rows gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_evaluations, read_events
from tests.models import save_checkpoint
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank, write_tokens
from tests.unit.made_tokenizers import demo

WORDS = "the sun a moon three rivers green stones under light every morning two birds sing and one of them".split()  # noqa: SIM905
QUESTIONS = 20
LONGEST = 6
FILES = ("one", "two", "both")


def make_model(directory: Path) -> Path:
    path = save_checkpoint(directory / "model", "llama", tokenizer=True, vocab_size=len(demo()))
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(3)
    for weight in model.parameters():
        if weight.dim() > 1:
            # With weights as small as they begin, every answer is the same token over and over.
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(path)
    return path


def make_questions(directory: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, most + 1))))

    rows = []
    for number in range(QUESTIONS):
        choices = list(dict.fromkeys(words(5) for _ in range(4)))[: 3 + number % 2]
        rows.append({
            "question": f"What is {words(8)}?", "choices": choices, "answer": int(rng.integers(len(choices))),
            "subject": ("high school physics", "law")[number % 3 == 0],
        })  # fmt: skip
    (directory / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


class Reference:
    """One model in one process, which is asked one thing after the other."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        found: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return found

    @torch.no_grad()
    def log_probability(self, ids: list[int], first: int) -> float:
        """Of the tokens from `first` on."""
        logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logits[place - 1, ids[place]]) for place in range(first, len(ids)))

    def accuracies(self, rows: list[dict[str, Any]]) -> tuple[float, float]:
        right = normalised = 0
        for row in rows:
            prompt = self.prompt(row["question"])
            scores = [
                self.log_probability(prompt + self.tokenizer(each, add_special_tokens=False)["input_ids"], len(prompt))
                for each in row["choices"]
            ]
            per_character = [score / len(each) for score, each in zip(scores, row["choices"], strict=True)]
            right += max(range(len(scores)), key=lambda i: scores[i]) == row["answer"]
            normalised += max(range(len(scores)), key=lambda i: per_character[i]) == row["answer"]
        return right / len(rows), normalised / len(rows)

    def answer(self, question: str) -> str:
        ids = torch.tensor([self.prompt(question)])
        eos = self.tokenizer.eos_token_id
        output = self.model.generate(ids, max_new_tokens=LONGEST, do_sample=False, eos_token_id=eos, pad_token_id=eos)
        text: str = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    def loss(self, file: Path) -> tuple[float, int]:
        """The sum over the targets of a file of tokens, and how many there are."""
        total, targets = 0.0, 0
        for line in file.read_text().splitlines():
            row = json.loads(line)
            logits = self.model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            for place, label in enumerate(row["labels"]):
                if place and label != -100:
                    total, targets = total - float(logits[place - 1, label].detach()), targets + 1
        return total, targets


def write_answers(directory: Path, reference: Reference, rows: list[dict[str, Any]]) -> float:
    """A file with the same questions, to some of which the model knows the answer; returns their share."""
    known = 0
    with (directory / "written.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            words = re.findall("[a-z]+", reference.answer(row["question"]))
            knows = number % 3 > 0 and bool(words)
            known += knows
            file.write(
                json.dumps({"question": row["question"], "answer": words[-1] if knows else "nobody knows"}) + "\n"
            )
    return known / len(rows)


def config_of(directory: Path, **evaluation: Any) -> FinetuneConfig:
    make_config(directory)  # writes the tokens to train on
    model = {"path": str(directory / "model"), "init": "pretrained", "architecture": None, "tokenizer": None}
    return make_config(
        directory, model=model,
        train={"max_steps": 1, "global_batch": 6}, eval={"at_start": True, "max_new_tokens": 3, **evaluation},
        data={
            "train": [{"path": str(directory / "tokens.jsonl"), "format": {"type": "tokens"}}], "seq_len": 96,
            "window": 32,
            "eval": [
                {"path": str(directory / f"{name}.jsonl"), "format": {"type": "tokens"}} for name in FILES
            ],
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A directory with all files, and what a run there must measure before its first step."""
    directory = tmp_path_factory.mktemp("tasks")
    reference = Reference(make_model(directory))
    rows = make_questions(directory)
    write_tokens(directory / "one.jsonl", rows=9, seed=6)
    write_tokens(directory / "two.jsonl", rows=14, seed=7)
    (directory / "both.jsonl").write_text((directory / "one.jsonl").read_text() + (directory / "two.jsonl").read_text())
    expected = {}
    for subject, some in (
        ("", rows),
        ("high_school_physics/", [row for row in rows if row["subject"] != "law"]),
        ("law/", [row for row in rows if row["subject"] == "law"]),
    ):
        accuracy, normalised = reference.accuracies(some)
        expected |= {f"eval/mmlu/{subject}accuracy": accuracy, f"eval/mmlu/{subject}accuracy_normalised": normalised}
    expected["eval/written/exact_match"] = write_answers(directory, reference, rows)
    sums = {name: reference.loss(directory / f"{name}.jsonl") for name in FILES}
    expected |= {f"eval/{name}/loss": total / targets for name, (total, targets) in sums.items()}
    accuracy, normalised = (expected[f"eval/mmlu/{kind}"] for kind in ("accuracy", "accuracy_normalised"))
    assert 0 < accuracy != normalised, "the numbers can be told apart"
    assert expected["eval/written/exact_match"] > 0.3
    weighted = sum(expected[f"eval/{name}/loss"] * sums[name][1] for name in ("one", "two"))
    assert weighted == pytest.approx(sums["both"][0], rel=1e-12)
    return directory, expected


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3))])
def test_what_is_measured_is_what_a_plain_loop_measures(made: tuple[Path, dict[str, float]], world: int) -> None:
    directory, expected = made
    conversation = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}
    config = config_of(
        directory,
        tasks=[
            {"type": "choices", "name": "mmlu", "path": str(directory / "choices.jsonl")},
            {
                "type": "exact", "path": str(directory / "written.jsonl"), "find": "regex", "regex": "([a-z]+)",
                "max_new_tokens": LONGEST, "batch": 3,
            },
        ],
        prompts=["Who?", conversation],
    )  # fmt: skip
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": f"world{world}"})})
    resident_ranks(train_rank, world, config.model_dump(), None)
    run = Path(config.run.storage) / config.run.name
    found = read_evaluations(run / "metrics.jsonl", 1)[0]
    assert {
        key for key in found if not key.endswith(("one/accuracy", "two/accuracy", "both/accuracy"))
    } == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-10), key
    answered = [event["fields"] for event in read_events(run / "events.jsonl") if event["event"] == "answered"]
    assert [each["step"] for each in answered] == [0, 0, 1, 1]
    assert "messages" not in answered[0] and answered[1]["messages"] == conversation["messages"]
