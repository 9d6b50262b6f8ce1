"""What a model is given when it is asked: the tokens that its chat template gives, and no others."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError, DataError, ModelError
from raytune_fsdp.checkpoint import model_files
from raytune_fsdp.checkpoint.model_files import load_for_inference
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.eval import EvalConfig
from raytune_fsdp.data.questions import Questions, open_tasks
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.launch.examine import Measured, examine
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.plan.plan import ALONE
from raytune_fsdp.run.evaluation import answers, tasks
from raytune_fsdp.run.evaluation.answers import Talk, asked, check_prompts, encode_prompt, ends, with_ends
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from tests.models import build, save_checkpoint
from tests.runs import make_config
from tests.unit.made_tokenizers import adding, chat, demo

CPU = torch.device("cpu")


class Parrot:
    """A model that gives the answers it is made with, and keeps what it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: list[str], positions: int = 4096) -> None:
        self.tokenizer, self.answers, self.given = tokenizer, answers, []  # type: ignore[var-annotated]
        text = SimpleNamespace(max_position_embeddings=positions, vocab_size=len(tokenizer))
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def generate(self, input_ids: torch.Tensor, streamer: Any, max_new_tokens: int, **_: Any) -> torch.Tensor:
        self.given.append(input_ids[0].tolist())
        said = self.tokenizer(self.answers[len(self.given) - 1], add_special_tokens=False)["input_ids"]
        streamer.put(input_ids)
        for token in said:
            streamer.put(torch.tensor([token]))
            if self.tokenizer.decode([token]).endswith("!"):
                raise KeyboardInterrupt
        streamer.end()
        return torch.cat([input_ids, torch.tensor([said])], 1)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(chat())
    tokenizer.chat_template = load_template(template)
    return tokenizer


def talk_with(model: Parrot, **settings: Any) -> Talk:
    made: Any = model
    return Talk(made, model.tokenizer, CPU, **{"max_new_tokens": 50, **settings})


def said(talk: Talk, text: str) -> tuple[str, list[str]]:
    """What is shown of the answer to a text, and the notes."""
    shown: list[str] = []
    notes: list[str] = []
    talk.ask(text, show=shown.append, note=notes.append)
    return "".join(shown), notes


@pytest.mark.parametrize("template", ["chatml", "llama-2", "llama-3", "openassistant"])
def test_three_turns_with_a_system_prompt_are_the_tokens_of_the_chat_template(template: str) -> None:
    tokenizer = tokenizer_with(template)
    model = Parrot(tokenizer, ["A  girl.\n\nTwo lines, é", " In London.", "Yes"])
    talk = talk_with(model, system="You are brief.")
    messages = [{"role": "system", "content": "You are brief."}]
    for question, answer in zip(["Who was Ada?", "Where?", "Is it?"], model.answers, strict=True):
        messages.append({"role": "user", "content": question})
        shown, notes = said(talk, question)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert model.given[-1] == expected
        assert shown == answer and not notes
        messages.append({"role": "assistant", "content": answer.strip()})
    assert talk.messages == messages


def test_two_turns_in_the_form_of_open_assistant() -> None:
    tokenizer = tokenizer_with("openassistant")
    model = Parrot(tokenizer, ["Shards.", "Yes."])
    talk = talk_with(model, system="You help.")
    said(talk, "What does FSDP shard?")
    said(talk, "All of them?")
    assert tokenizer.decode(model.given[1]) == (
        "<|system|>You help.<|endoftext|><|prompter|>What does FSDP shard?<|endoftext|>"
        "<|assistant|>Shards.<|endoftext|><|prompter|>All of them?<|endoftext|><|assistant|>"
    )


def test_an_answer_that_is_broken_off_is_kept_as_far_as_it_was_shown() -> None:
    model = Parrot(tokenizer_with("chatml"), ["Stop there! And more.", "Yes."])
    talk = talk_with(model)
    assert said(talk, "Go on")[0] == "Stop there!"
    assert talk.turns[-1] == {"role": "assistant", "content": "Stop there!"}
    said(talk, "Really?")
    assert "Stop there!" in model.tokenizer.decode(model.given[1]) and "And more" not in str(talk.turns)


def test_the_oldest_turns_are_forgotten_when_the_model_is_full() -> None:
    model = Parrot(tokenizer_with("chatml"), ["Yes."] * 9, positions=120)
    talk = talk_with(model, system="Be brief.")
    notes = [said(talk, f"Is {n} the number of it?")[1] for n in range(4)]
    assert notes[0] == [] and notes[-1] == [
        "the conversation is longer than the model can read: forgot its first 2 message(s)"
    ]
    given = model.tokenizer.decode(model.given[-1])
    assert "Be brief." in given and "Is 3 the" in given and "Is 0 the" not in given
    assert max(map(len, model.given)) + 50 <= 120
    before = talk.messages
    with pytest.raises(DataError, match="fewer than the 120 positions"):
        said(talk, "long " * 200)
    assert talk.messages == before


def test_the_token_that_ends_a_turn_ends_an_answer() -> None:
    tokenizer = tokenizer_with("llama-3")
    assert ends(tokenizer)["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|eot_id|>"])
    assert ends(tokenizer_with("openassistant"))["eos_token_id"] == [tokenizer.eos_token_id]
    assert ends(chat())["eos_token_id"] == [tokenizer.eos_token_id], "no template"


def test_an_exported_model_ends_its_answers_where_it_was_trained_to() -> None:
    """Servers know only its generation config, and a base model's makers name no token of a chat template."""
    tokenizer = tokenizer_with("llama-3")
    end, turn, mark = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|eot_id|>", "<|im_end|>"])

    def made(by: Any, *, other: bool = False) -> GenerationConfig:
        makers = GenerationConfig(top_p=0.6, bos_token_id=9, pad_token_id=8)
        makers.eos_token_id = by
        return with_ends(makers, tokenizer, other=other)

    for makers, ends_now in (
        (None, [end, turn]), (turn, [turn, end]), ([mark, end], [mark, end, turn]), ([["odd"], "x", True], [end, turn]),
    ):  # fmt: skip
        found = made(makers)
        assert found.eos_token_id == ends_now and (found.top_p, found.bos_token_id, found.pad_token_id) == (0.6, 9, 8)
        assert with_ends(found, tokenizer, other=False).eos_token_id == ends_now
    strangers = made([mark, 300], other=True)
    assert strangers.eos_token_id == [mark, end, turn], "300 is a word of this tokenizer"
    assert (strangers.bos_token_id, strangers.pad_token_id) == (tokenizer.bos_token_id, tokenizer.pad_token_id)
    assert with_ends(strangers, chat(), other=True).eos_token_id == [mark, end, turn]
    assert with_ends(GenerationConfig(), chat(), other=True).eos_token_id == end, "one token is a number"


def test_a_text_to_go_on_from_has_no_end() -> None:
    """Some tokenizers add their end token behind each text."""
    tokenizer = adding("<s> $A <|endoftext|>")
    for text in ("What?", "<s>What?"):
        assert tokenizer.decode(encode_prompt(tokenizer, text, positions=100)[0]) == "<s>What?"


CONVERSATION = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it?"}]}


def config_of(directory: Any, *prompts: Any) -> FinetuneConfig:
    return make_config(directory, eval={"prompts": list(prompts)})


def test_prompts_of_a_config_are_texts_or_conversations(tmp_path: Any) -> None:
    text, conversation = config_of(tmp_path, "Is it?", CONVERSATION).eval.prompts
    assert asked(text) == {"prompt": "Is it?"}
    assert asked(conversation) == {"prompt": "Is it?", **CONVERSATION}
    tokenizer = tokenizer_with("chatml")
    given = encode_prompt(tokenizer, CONVERSATION["messages"], positions=100)[0].tolist()
    assert given == tokenizer.apply_chat_template(
        CONVERSATION["messages"], add_generation_prompt=True, return_dict=False
    )  # fmt: skip
    check_prompts(config_of(tmp_path, "Is it?", CONVERSATION), tokenizer, 100)
    with pytest.raises(DataError, match=r"eval.prompts.1: .*'Is it\?' is a conversation.* no chat template"):
        check_prompts(config_of(tmp_path, "Is it?", CONVERSATION), chat(), 100)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the last message has the role"),
        ([{"role": "bot", "content": "a"}], "role"),
        ([], "messages"),
    ],
)
def test_conversations_that_nobody_can_answer_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig.model_validate({"prompts": [{"messages": messages}]})


def test_chat_through_a_pipe(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=len(demo()))
    capsys.readouterr()
    lines = "Who?\n\n/system Be brief.\nWhere?\n/nothing\n/reset\nWho?\n/exit\nnever asked\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(tmp_path / "model"), "--max-new-tokens", "4"]) == 0
    found = capsys.readouterr()
    notes = [line for line in found.err.splitlines() if line.startswith("(")]
    assert len(notes) == 1 and notes[0].startswith("(there is no /nothing; /reset forgets what was said, /system TEXT")
    assert found.out.count("\n") >= 3 and not found.out.startswith("> ")


def test_chat_needs_a_chat_template(tmp_path: Any, capsys: Any) -> None:
    save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=len(demo()))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert main(["chat", str(tmp_path / "model")]) == ConfigError.exit_code
    assert "has no chat template" in capsys.readouterr().err


def asked_of(directory: Path, **sampling: Any) -> str:
    """As `generate` does it."""
    model, tokenizer = load_for_inference(directory, CPU)
    return answers.answer(model, tokenizer, "Hi!", max_new_tokens=4, device=CPU, **sampling)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=1100)


def test_a_generation_config_with_strings_to_stop_at_is_followed(small: Path) -> None:
    (small / "generation_config.json").write_text(json.dumps({"stop_strings": ["zzz"], "eos_token_id": 2}))
    asked_of(small)


def questions(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[FinetuneConfig, list[Questions]]:
    rows = directory / "questions.jsonl"
    rows.write_text(json.dumps({"question": "How many?", "answer": "4"}) + "\n")
    config = make_config(
        directory, eval={"prompts": ["Hi!"], "tasks": [{"type": "exact", "path": str(rows), "max_new_tokens": 12}]}
    )
    return config, open_tasks(config, tokenizer, 1100, positions=128)


def measured_of(small: Path, directory: Path) -> Measured:
    """What `eval` measures of a directory: here the texts themselves, in the place of the share of right ones."""
    model, tokenizer = load_for_inference(small, CPU)
    config, tasks = questions(directory, tokenizer)
    exam = Evaluation(tasks=tasks, prompts=config.eval.prompts, max_new_tokens=12)
    return examine(config, model, tokenizer, exam, CPU)


def test_what_its_makers_let_it_write_changes_no_measurement(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's ranks know nothing of that, so a base and what was made of it would not compare."""
    monkeypatch.setattr(tasks, "_judged", lambda task, answers: answers)
    (small / "generation_config.json").unlink(missing_ok=True)
    plain = measured_of(small, tmp_path)
    makers = {"repetition_penalty": 50.0, "suppress_tokens": list(range(500)), "num_beams": 2, "stop_strings": ["e"]}
    (small / "generation_config.json").write_text(json.dumps(makers))
    assert measured_of(small, tmp_path) == plain
    model, tokenizer = load_for_inference(small, CPU)
    assert model.generation_config.num_beams == 2, "generate and chat follow it"
    with alone(CPU):  # as where a network's own config has such settings
        _, asked = questions(tmp_path, tokenizer)
        said = tasks.measure_tasks(
            model, tokenizer, asked, micro_batch=1, layout=ALONE, device=CPU, attention="sdpa"
        )  # fmt: skip
        assert said != plain[0]
        model.generation_config.suppress_tokens = "many"
        with pytest.raises(ModelError, match="cannot answer as its configs say"):
            tasks.measure_tasks(model, tokenizer, asked, micro_batch=1, layout=ALONE, device=CPU, attention="sdpa")


def test_a_checkpoint_writes_as_its_export_does(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of lm-evaluation-harness also take what the model's makers have set."""
    monkeypatch.setattr(model_files, "find_checkpoint", lambda path: None)
    monkeypatch.setattr(model_files, "model_files", lambda checkpoint: small)
    monkeypatch.setattr(model_files, "load_checkpoint", lambda *_, **__: build("llama"))
    for text, penalty in (('{"repetition_penalty": 1.05}', 1.05), ("none", 1.0), (None, 1.0)):
        (small / "generation_config.json").unlink(missing_ok=True)
        if text is not None:
            (small / "generation_config.json").write_text(text)
        assert (load_for_inference(tmp_path, CPU)[0].generation_config.repetition_penalty or 1.0) == penalty


def test_what_a_stranger_s_model_cannot_answer_is_said_in_words(small: Path) -> None:
    weights = load_file(small / "model.safetensors")
    for said, line in (
        ({"stop_strings": ["x"] * 100_000}, "has stop_strings=.*, which are not up to 64 short texts"),
        ({"num_beams": 100_000}, "has num_beams=100000, more than the 256"),
        ({"suppress_tokens": "many"}, "cannot answer as its configs say .*generation_config.json"),
    ):
        (small / "generation_config.json").write_text(json.dumps(said))
        with pytest.raises(ModelError, match=line):
            asked_of(small)
    (small / "generation_config.json").write_text("{}")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head * float("nan")
    save_file(weights, small / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="computes NaN or infinity for the next token"):
        asked_of(small, temperature=1.0)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=64)
    with pytest.raises(DataError, match=r"a token with the id \d+, and the model has only 64"):
        asked_of(model)


def test_chat_templates_that_are_none_are_refused(small: Path) -> None:
    config = json.loads((small / "tokenizer_config.json").read_text())
    for file in small.glob("*.jinja"):
        file.unlink()
    for template in ({}, 7, [], {"default": 7}, [{"name": "a", "template": 7}]):
        (small / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        with pytest.raises(ModelError, match="chat_template"):
            asked_of(small)
    (small / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": {"other": "x"}}))
    with pytest.raises(DataError, match="none of them is the default"):
        asked_of(small)


def test_a_negative_number_of_layers_is_refused(small: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "num_hidden_layers": -1}))
    with pytest.raises(ModelError, match="has num_hidden_layers=-1"):
        asked_of(small)
