"""What the config says of chat templates: a date, variables, a template for each dataset, and reasoning."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytune_fsdp.base.batch import IGNORE, PADDING
from raytune_fsdp.base.errors import ConfigError, DataError, RowError
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import ChatFormat, DataConfig, DatasetConfig
from raytune_fsdp.data.mixture import FIFTH_ORDER, FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.questions import Written, open_tasks
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.templates import KEPT, TemplateChoice
from raytune_fsdp.data.rows.thoughts import behind_thought
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.directory.tokenizer import tokenizer_in
from raytune_fsdp.plan.identity import ABSENT
from raytune_fsdp.run.evaluation.answers import encode_prompt, ends
from raytune_fsdp.run.places import places_in
from raytune_fsdp.run.prepare import set_template
from tests.models import save_checkpoint
from tests.rows import all_samples, demo_tokenizer, make_windows
from tests.runs import make_config
from tests.unit.chat_structures import STRUCTURES
from tests.unit.made_tokenizers import chat, convert, demo, pieces, refusal
from tests.unit.test_chat_structures import tokenizer_for

TALK = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "The model."}]
DATED = "{{ strftime_now('%Y-%m-%d') }}" + str(demo_tokenizer().chat_template)
LOUD = "{{ 'Loud. ' if loud }}" + str(demo_tokenizer().chat_template)


def rows_in(directory: Path, name: str = "chats", messages: Any = TALK, **fields: Any) -> DatasetConfig:
    path = directory / f"{name}.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return DatasetConfig.model_validate({"path": str(path), "format": {"type": "chat"}, **fields})


def template_in(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def texts(windows: Windows) -> list[str]:
    return [demo().decode(sample.input_ids[sample.source_ids != PADDING]) for sample in all_samples(windows)]


def test_a_date_decides_the_data_and_its_default_stands_in_no_identity(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    options: Any = {"cache": tmp_path, "chat_template": template_in(tmp_path, "dated.jinja", DATED), "seq_len": 64}
    usual = make_windows([rows], **options)
    other = make_windows([rows], chat_template_date="2025-03-01", **options)
    assert texts(usual)[0].startswith("2024-07-26") and texts(other)[0].startswith("2025-03-01")
    assert "chat_template_date" not in usual.identity and other.identity["chat_template_date"] == "2025-03-01"
    assert ABSENT["data.chat_template_date"] == DataConfig.model_fields["chat_template_date"].default
    for wrong in ("yesterday", "2025-13-01"):
        with pytest.raises(ValidationError, match=f"'{wrong}' is not a date; write year, month and day, such as 2024"):
            make_windows([rows], chat_template_date=wrong, **options)


def test_variables_and_templates_of_one_mixture(tmp_path: Path) -> None:
    """Each dataset may have its own; what is not said leaves the identity as it was."""
    loud = template_in(tmp_path, "loud.jinja", LOUD)
    plain = rows_in(tmp_path)
    own = rows_in(tmp_path, "own", chat_template=loud, chat_template_kwargs={"loud": True})
    windows = make_windows([plain, own], cache=tmp_path, seq_len=32, packing="none")
    assert sorted(text.startswith("Loud. ") for text in texts(windows)) == [False, True]
    assert windows.identity["datasets.1.chat_template"] == LOUD
    assert windows.identity["datasets.1.chat_template_kwargs"] == {"loud": True}
    alone = make_windows([plain], cache=tmp_path, seq_len=32)
    assert not [key for key in alone.identity if "kwargs" in key or key.startswith("datasets.0.chat_template")]
    both = make_windows(
        [plain, rows_in(tmp_path, "quiet", chat_template_kwargs={})], cache=tmp_path, seq_len=32, packing="none",
        chat_template=loud, chat_template_kwargs={"loud": True},
    )  # fmt: skip
    assert sorted(text.startswith("Loud. ") for text in texts(both)) == [False, True]
    assert both.identity["chat_template_kwargs"] == {"loud": True}
    assert both.fingerprint != windows.fingerprint


def trained_with(directory: Path, data: dict[str, Any]) -> Any:
    """The tokenizer of a run's export, which somebody has loaded again."""
    tokenizer = copy.deepcopy(demo_tokenizer())  # others have the same one
    set_template(make_config(directory, data=data), tokenizer)
    tokenizer.save_pretrained(directory / "export")
    return tokenizer_in(directory / "export", trust_remote_code=False)


def prompt_of(tokenizer: Any) -> str:
    return str(tokenizer.decode(encode_prompt(tokenizer, "What?", positions=200)[0]))


def test_a_model_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    """Also where its export is loaded; and a run that begins with that export has its own settings."""
    rows = {"path": "x"}
    template = template_in(tmp_path, "both.jinja", DATED.replace("%d') }}", "%d') ~ ' ' ~ place }}"))
    data: Any = {
        "train": [rows], "chat_template": template,
        "chat_template_date": "2025-03-01", "chat_template_kwargs": {"place": "a/b"},
    }  # fmt: skip
    export = trained_with(tmp_path, data)
    assert prompt_of(export).startswith("2025-03-01 a/b")
    set_template(make_config(tmp_path, data={"train": [rows]}), export)
    assert prompt_of(export).startswith("2024-07-26 <")
    plain = trained_with(tmp_path, {"train": [rows], "chat_template": template})
    assert KEPT not in plain.init_kwargs and prompt_of(plain) == prompt_of(export)


def test_prompts_are_rendered_as_all_datasets_or_else_as_the_run_says(tmp_path: Path) -> None:
    loud = {"path": "x", "chat_template": template_in(tmp_path, "l.jinja", LOUD), "chat_template_kwargs": {"loud": 1}}
    assert prompt_of(trained_with(tmp_path, {"train": [loud, {**loud, "path": "y"}]})).startswith("Loud. ")
    assert not prompt_of(trained_with(tmp_path, {"train": [loud, {"path": "y"}]})).startswith("Loud. ")
    text: Any = {"path": "y", "format": {"type": "completion"}}
    assert prompt_of(trained_with(tmp_path, {"train": [text, loud]})).startswith("Loud. "), "a text is no chat"
    asked_so = {"path": "y", "format": {"type": "instruction", "prompt": "q", "completion": "a", "style": "chat"}}
    assert not prompt_of(trained_with(tmp_path, {"train": [asked_so, loud]})).startswith("Loud. ")
    assert not prompt_of(trained_with(tmp_path, {"train": [text]})).startswith("Loud. ")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "What?", "answer": "4"}))
    task = {"type": "exact", "path": str(tmp_path / "rows.jsonl"), "max_new_tokens": 1}
    config = make_config(tmp_path, data={"train": [loud]}, eval={"tasks": [task]})
    (asked,) = open_tasks(config, demo_tokenizer(), 5000, positions=100)
    assert isinstance(asked, Written) and demo().decode(asked.prompts[0]).startswith("Loud. ")


def test_chat_and_generate_take_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    place = save_checkpoint(tmp_path / "model", "llama", tokenizer=True, vocab_size=len(demo()))
    own = (place / "chat_template.jinja").read_text()
    (place / "chat_template.jinja").write_text("{{ raise_exception('not loud') if not loud }}" + own)
    asked = ["generate", str(place), "What?", "--max-new-tokens", "2"]
    assert main(asked) == DataError.exit_code and "refuses the prompt 'What?': not loud" in capsys.readouterr().err
    assert main([*asked, "--chat-template-kwargs", '{"loud": true}']) == 0
    for wrong, why in (("loud", "Expecting value"), ("[1]", "valid dictionary"), ('{"tools": 1}', "leave them out")):
        assert main([*asked, "--chat-template-kwargs", wrong]) == ConfigError.exit_code
        assert why in capsys.readouterr().err
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**settings, KEPT: {"chat_template_date": "today"}}))
    assert main(asked) == DataError.exit_code
    assert "raytune_fsdp.chat_template_date in tokenizer_config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "where"),
    [
        ({"chat_template_date": "x" * 5000}, "raytune_fsdp.chat_template_date in "),
        ({"chat_template_kwargs": {"place": "\ud800" * 5000}}, "raytune_fsdp.chat_template_kwargs in "),
        ({"y" * 5000: 1}, "raytune_fsdp.yyy"),
        ({"\u001b]0;\n": 1}, "raytune_fsdp.'\\\\x1b]0;\\\\n' in "),
    ],
)
def test_wrong_settings_in_a_tokenizer_are_said_in_one_short_line(kept: Any, where: str) -> None:
    tokenizer = copy.copy(demo_tokenizer())
    tokenizer.init_kwargs = {**tokenizer.init_kwargs, KEPT: kept}
    with pytest.raises(DataError, match=f"^{where}.*is not what an export writes") as caught:
        TemplateChoice.kept_in(tokenizer)
    assert len(str(caught.value)) < 900 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": []}, "messages: templates get these from the rows; leave them out"),
        ({"tools": None, "add_generation_prompt": True}, "tools, add_generation_prompt: templates get these"),
        ({"x": float("nan")}, "is not what JSON can hold"),
        ({"x": {1, 2}}, "is not what JSON can hold"),
    ],
)
def test_variables_that_no_config_may_set(given: Any, message: str, tmp_path: Path) -> None:
    for where in ({"chat_template_kwargs": given}, {"train": [{"path": "x", "chat_template_kwargs": given}]}):
        with pytest.raises(ValidationError, match=message):
            DataConfig.model_validate({"train": [{"path": "x"}], **where})


def test_template_of_a_dataset_is_a_place_like_that_of_the_run() -> None:
    tree = {"data": {"train": [{"path": "a.jsonl", "chat_template": "/x/y.jinja"}, {"chat_template": "chatml"}]}}
    assert places_in(tree) == {"data.train.path=a.jsonl", "data.train.chat_template=/x/y.jinja"}


def test_runs_of_before_and_new_ones_of_a_template_whose_ends_are_found_now(tmp_path: Path) -> None:
    """A new run has version 5 of the order, and only where its template needs it; an older one keeps its masks."""
    unended = template_in(
        tmp_path, "unended.jinja", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    rows = rows_in(tmp_path)
    new, old = (
        make_windows([rows], cache=tmp_path, seq_len=32, chat_template=unended, order_version=order)
        for order in (None, FOURTH_ORDER)
    )
    assert (new.order_version, old.order_version) == (FIFTH_ORDER, FOURTH_ORDER)
    assert texts(new) == ["<|user|>What?<|assistant|>The model.<|user|>"]
    assert texts(old) == ["<|user|>What?<|assistant|>The model."]
    assert make_windows([rows], cache=tmp_path, seq_len=32).order_version == OLDEST_ORDER


COUNTING = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|endoftext|>' }}{%- endfor -%}"
    "{{ ('<|assistant|>' if messages | length < 9 else '<|user|>') if add_generation_prompt }}"
)


def test_template_that_is_not_alike_is_rendered_turn_by_turn(tmp_path: Path) -> None:
    """Its generation prompt changes after eight messages, though its turns look the same: a row of data shows it."""
    rows = rows_in(tmp_path, messages=TALK * 8)
    template = template_in(tmp_path, "counting.jinja", COUNTING)
    windows = make_windows([rows], cache=tmp_path, seq_len=256, chat_template=template, bad_rows="skip")
    made = Formatter(ChatFormat(), tokenizer=demo_tokenizer(), vocab_size=5000, template=COUNTING)
    (quick,) = made.documents([{"messages": TALK * 8}], ["row"])
    made.render_by_turn()
    (exact,) = made.documents([{"messages": TALK * 8}], ["row"])
    assert not isinstance(quick, RowError) and isinstance(exact, RowError), "only known from the data"
    assert windows.get(0, 0)[0].counts.datasets[0].dropped == {"template": 1}, "as if each turn were rendered"


QWEN = STRUCTURES["qwen 3"]
THOUGHT = {"role": "assistant", "content": "It is.", "reasoning_content": "Hm, so."}


def of_qwen(messages: Any, reasoning: Any) -> Document | RowError:
    tokenizer = tokenizer_for("qwen 3", "byte-level")
    made = Formatter(
        ChatFormat(reasoning=reasoning), tokenizer=tokenizer, vocab_size=5000, template=TemplateChoice(text=QWEN.bare())
    )
    return made.documents([{"messages": messages}], ["f.jsonl:7"])[0]


def trained(document: Document | RowError) -> list[str]:
    assert isinstance(document, Document), document
    return [text for text, flag in pieces(document, tokenizer_for("qwen 3", "byte-level")) if flag]


def test_reasoning_is_kept_or_dropped() -> None:
    user = {"role": "user", "content": "Is it?"}
    said = "<think>\nHm, so.\n</think>\n\nIt is.<|im_end|>"
    assert trained(of_qwen([user, THOUGHT, user, THOUGHT], "template")) == ["It is.<|im_end|>", said]
    assert trained(of_qwen([user, THOUGHT], "keep")) == [said]
    error = of_qwen([user, THOUGHT, user, THOUGHT], "keep")
    assert isinstance(error, RowError) and error.reason == "template"
    assert "leaves out the reasoning_content of messages[1]" in str(error)
    assert "format.reasoning to template or drop" in str(error)
    assert trained(of_qwen([user, THOUGHT, user, THOUGHT], "drop")) == ["It is.<|im_end|>"] * 2
    inline = {"role": "assistant", "content": " <think>\nHm.\n</think>\n\nIt is."}
    assert trained(of_qwen([user, inline], "drop")) == ["It is.<|im_end|>"]
    only = {"role": "assistant", "content": "<think>Hm.</think>"}
    empty = refusal({"messages": [user, only]}, ChatFormat(reasoning="drop"), demo())
    assert empty.reason == "empty"
    kept = convert(
        {"messages": [user, {**inline, "content": "It is."}]}, ChatFormat(reasoning="drop"), chat(), QWEN.bare()
    )
    assert (kept.labels != IGNORE).any()


def test_an_answer_ends_with_the_token_that_begins_the_next_message() -> None:
    """Where nothing else ends a turn, as in GLM's templates."""
    tokenizer = tokenizer_for("glm 4", "byte-level")
    tokenizer.chat_template = STRUCTURES["glm 4"].bare()
    try:
        assert ends(tokenizer)["eos_token_id"] == [tokenizer.convert_tokens_to_ids("<|user|>")]
    finally:
        tokenizer.chat_template = None


def test_a_row_that_repeats_the_word_for_a_thought_keeps_nobody_waiting() -> None:
    """A pattern without bounds takes 0.5 s for 20,000 characters, and four times as long for twice as many."""
    began = time.process_time()
    text = "<" + "think" * 40_000 + ">"
    for start in (0, len(text)):  # as what a turn begins with, and as what its prompt ends with
        assert behind_thought(text + "Yes.", 0, start, len(text), text) == start
    assert time.process_time() - began < 0.2
