"""`--section.field value`: what every kind of value and path means."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ChatFormat, FinetuneConfig
from raytune_fsdp.config.load import ROOT, load_config
from raytune_fsdp.config.schema import describe
from raytune_fsdp.config.sections.method import LoraMethod

YAML = """
run: {name: base}
model: {path: some/model, overrides: {a: 1, b: {c: 2}}}
data:
  train:
    - path: a.jsonl
      format: {type: chat, messages: turns}
optim:
  schedule: {type: cosine, floor: 0.25}
train: {global_batch: 8, max_steps: 10}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.yaml"
    file.write_text(YAML)
    return file


def problem(base: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(base, flags)
    return str(caught.value)


@pytest.mark.parametrize("flags", [("--train.max_steps", "7"), ("--train.max_steps=7",)])
def test_value_after_a_space_or_an_equals_sign(base: Path, flags: tuple[str, ...]) -> None:
    assert load_config(base, flags).train.max_steps == 7


def test_an_override_of_one_field_leaves_the_others(base: Path) -> None:
    config = load_config(base, ["--train.max_steps", "7"])
    assert (config.run.name, config.train.global_batch, config.optim.schedule.type) == ("base", 8, "cosine")


def test_without_a_file_the_flags_are_the_config() -> None:
    flags = [
        "--run.name",
        "x",
        "--model.path",
        "m",
        "--data.train.0.path",
        "a",
        "--train.global_batch",
        "4",
        "--train.epochs",
        "1.5",
    ]
    assert load_config(None, flags).train.epochs == 1.5


@pytest.mark.parametrize("text", ["5e-5", "5E-5", "0.00005", "5.0e-05", "+5e-5"])
def test_numbers_in_any_notation(base: Path, text: str) -> None:
    assert load_config(base, ["--optim.lr", text]).optim.lr == 5e-5


@pytest.mark.parametrize("text", ["1000", "1_000", "1e3", "0x3e8", "01000"])
def test_whole_numbers_in_any_notation(base: Path, text: str) -> None:
    assert load_config(base, ["--train.max_steps", text]).train.max_steps == 1000


def test_null_is_nothing(base: Path) -> None:
    assert load_config(base, ["--optim.max_grad_norm", "null"]).optim.max_grad_norm is None


def test_null_in_an_optional_text_field(base: Path) -> None:
    assert load_config(base, ["--model.tokenizer", "x", "--model.tokenizer", "null"]).model.tokenizer is None


@pytest.mark.parametrize("text", ["2024", "true", "no", "1e5", "010", "1_0", "0x10", "2024-01-01", "12.50"])
def test_text_fields_keep_what_looks_like_something_else(base: Path, text: str) -> None:
    assert load_config(base, ["--run.name", text]).run.name == text


@pytest.mark.parametrize("text", ["a: b", "a #b", "{x}", "[INST]", "*a", "&a", "!a", "@a", "%a", "- a", "a,b", " a "])
def test_text_fields_take_characters_that_mean_something_in_yaml(base: Path, text: str) -> None:
    assert load_config(base, [f"--model.path={text}"]).model.path == text


@pytest.mark.parametrize("text", ['"null"', "'null'"])
def test_quotes_make_null_a_word(base: Path, text: str) -> None:
    assert load_config(base, ["--model.path", text]).model.path == "null"


def test_a_choice_that_looks_like_nothing_is_a_choice(base: Path) -> None:
    assert load_config(base, ["--data.packing", "none"]).data.packing == "none"


def test_a_number_or_a_word(base: Path) -> None:
    assert load_config(base, ["--cluster.workers", "2"]).cluster.workers == 2
    assert load_config(base, ["--cluster.workers", "auto"]).cluster.workers == "auto"


@pytest.mark.parametrize(
    "text", ["{attention_dropout: 0.1}", '{"attention_dropout": 0.1}', "{attention_dropout: 1e-1}"]
)
def test_map_in_yaml_or_json(base: Path, text: str) -> None:
    assert load_config(base, ["--model.overrides", text]).model.overrides == {"attention_dropout": 0.1}


def test_list_of_maps_replaces_the_list(base: Path) -> None:
    config = load_config(base, ["--data.train", '[{"path": "x"}, {"path": 2024}]'])
    assert [dataset.path for dataset in config.data.train] == ["x", "2024"]


def test_list_of_text(base: Path) -> None:
    assert load_config(base, ["--eval.prompts", "[hello, 1e3, no]"]).eval.prompts == ["hello", "1e3", "no"]


@pytest.mark.parametrize("text", ["[q_proj, v_proj]", '["v_proj", "q_proj"]'])
def test_a_list_where_text_may_stand_too_is_a_list(base: Path, text: str) -> None:
    method = load_config(base, ["--method.type", "lora", "--method.target_modules", text]).method
    assert isinstance(method, LoraMethod) and method.target_modules == ["q_proj", "v_proj"]
    flags = ["--method.type", "ia3", f"--method.target_modules={text}", "--method.feedforward_modules", "[]"]
    assert load_config(base, flags).method.model_dump()["target_modules"] == ["q_proj", "v_proj"]
    flags = ["--eval.tasks.0.path", "x", "--eval.tasks.0.type", "choices", "--eval.tasks.0.choices", "[A, 2, no]"]
    assert load_config(base, flags).eval.tasks[0].model_dump()["choices"] == ["A", "2", "no"]


@pytest.mark.parametrize("text", [r"[^.]+\..*[qv]_proj", r".*\.[qv]_proj", r"[ab]_proj|.*[qv]"])
def test_an_expression_that_begins_like_a_list_is_text(base: Path, text: str) -> None:
    method = load_config(base, ["--method.type", "lora", "--method.target_modules", text]).method
    assert isinstance(method, LoraMethod) and method.target_modules == text


def test_list_item_by_index_keeps_its_other_fields(base: Path) -> None:
    dataset = load_config(base, ["--data.train.0.path", "b.jsonl"]).data.train[0]
    assert (dataset.path, dataset.format) == ("b.jsonl", ChatFormat(messages="turns"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_index_after_the_last_appends_in_any_order(base: Path, order: tuple[int, int]) -> None:
    flags = [["--data.train.1.path", "one"], ["--data.train.2.path", "two"]]
    config = load_config(base, flags[order[0]] + flags[order[1]])
    assert [dataset.path for dataset in config.data.train] == ["a.jsonl", "one", "two"]


def test_ten_items_are_in_the_order_of_numbers(base: Path) -> None:
    flags = [word for i in reversed(range(12)) for word in (f"--eval.prompts.{i}", f"p{i}")]
    assert load_config(base, flags).eval.prompts == [f"p{i}" for i in range(12)]


def test_an_index_too_far_names_the_length(base: Path) -> None:
    assert problem(base, "--data.train.3.path", "x") == (
        "--data.train.3.path: data.train has 1 item; --data.train.1 appends the next one"
    )


def test_a_list_wants_an_index(base: Path) -> None:
    assert "data.train is a list; name an item by its index, as in --data.train.0" in problem(
        base, "--data.train.path=x"
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_another_type_replaces_its_section_and_keeps_flags_in_any_order(base: Path, reverse: bool) -> None:
    flags = ["--optim.schedule.type=wsd", "--optim.schedule.decay=0.5"]
    schedule = load_config(base, flags[::-1] if reverse else flags).optim.schedule
    assert schedule.model_dump() == {"type": "wsd", "decay": 0.5, "floor": 0.0}


def test_the_same_type_keeps_what_the_file_says(base: Path) -> None:
    assert load_config(base, ["--optim.schedule.type", "cosine"]).optim.schedule.model_dump()["floor"] == 0.25


def test_another_type_then_the_first_again_keeps_what_the_file_says(base: Path) -> None:
    flags = ["--optim.schedule.type=wsd", "--optim.schedule.type=cosine"]
    assert load_config(base, flags).optim.schedule.model_dump()["floor"] == 0.25


def test_another_type_inside_a_list_item(base: Path) -> None:
    dataset = load_config(base, ["--data.train.0.format.type", "completion"]).data.train[0]
    assert (dataset.path, dataset.format.model_dump()) == (
        "a.jsonl",
        {"type": "completion", "text": "text", "ignore": []},
    )


def test_a_dataset_that_is_elsewhere_is_there_alone(tmp_path: Path) -> None:
    """Every recipe names a file."""
    file = tmp_path / "hub.yaml"
    file.write_text(YAML.replace("path: a.jsonl", "hub: x/y\n      subset: s\n      split: test\n      revision: main"))
    in_files = load_config(file, ["--data.train.0.path=b.jsonl"]).data.train[0]
    assert (in_files.path, in_files.hub, in_files.subset, in_files.split, in_files.revision) == ("b.jsonl", *4 * [None])
    assert in_files.format == ChatFormat(messages="turns")


def test_a_dataset_that_flags_put_in_two_places_is_refused(base: Path) -> None:
    (dataset,) = load_config(base, ["--data.train.0.split=test", "--data.train.0.hub=x/y"]).data.train
    assert (dataset.path, dataset.hub, dataset.split) == (None, "x/y", "test")
    both = problem(base, "--data.train.0.hub=x/y", "--data.train.0.path=b.jsonl")
    assert "path='b.jsonl' and hub='x/y': set exactly one of the two" in both
    assert load_config(base, ["--data.train.0.hub=null"]).data.train[0].path == "a.jsonl"


def test_a_field_of_a_union_that_the_file_does_not_name_belongs_to_the_default_type(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(YAML.replace("schedule: {type: cosine, floor: 0.25}", "schedule: {floor: 0.5}"))
    assert load_config(file, []).optim.schedule.model_dump() == {"type": "cosine", "floor": 0.5}


def test_a_section_as_a_whole_is_replaced(base: Path) -> None:
    config = load_config(base, ["--optim.schedule", "{type: linear}"])
    assert config.optim.schedule.model_dump() == {"type": "linear", "floor": 0.0}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_flag_for_a_section_never_wipes_out_one_for_its_field(base: Path, reverse: bool) -> None:
    flags = ["--optim={lr: 1e-3}", "--optim.eps=1e-6"]
    optim = load_config(base, flags[::-1] if reverse else flags).optim
    assert (optim.lr, optim.eps) == (1e-3, 1e-6)


def test_free_form_maps_take_any_key_and_keep_the_others(base: Path) -> None:
    config = load_config(base, ["--model.overrides.b.d", "0.1", "--model.overrides.new.x-y", "hi"])
    assert config.model.overrides == {"a": 1, "b": {"c": 2, "d": 0.1}, "new": {"x-y": "hi"}}


def test_free_form_map_that_was_null(base: Path) -> None:
    flags = ["--model.path=null", "--model.init=random", "--model.architecture.model_type=gpt2"]
    assert load_config(base, flags).model.architecture == {"model_type": "gpt2"}


@pytest.mark.parametrize(("flags", "value"), [(["--parallel.compile"], True), (["--no-tracking.console"], False)])
def test_switches_stand_alone(base: Path, flags: list[str], value: bool) -> None:
    config = load_config(base, [*flags, "--run.seed", "3"])
    assert (config.parallel.compile if value else config.tracking.console) is value
    assert config.run.seed == 3


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("no", False), ("True", True)])
def test_switches_take_a_value(base: Path, text: str, value: bool) -> None:
    assert load_config(base, ["--tracking.console", text]).tracking.console is value


def test_no_takes_no_value(base: Path) -> None:
    assert "--no-tracking.console takes no value" in problem(base, "--no-tracking.console=true")


def test_of_a_flag_given_twice_the_last_counts(base: Path) -> None:
    assert (
        load_config(base, ["--train.max_steps=5", "--no-tracking.console", "--train.max_steps=6"]).train.max_steps == 6
    )
    assert load_config(base, ["--no-tracking.console", "--tracking.console"]).tracking.console is True


@pytest.mark.parametrize("following", [[], ["--train.max_steps", "3"]])
def test_a_missing_value(base: Path, following: list[str]) -> None:
    assert problem(base, "--run.seed", *following) == "--run.seed: needs a value (--run.seed VALUE or --run.seed=VALUE)"


def test_negative_numbers_are_values(base: Path) -> None:
    assert problem(base, "--run.seed", "-1").startswith("run.seed=-1: must be integer >= 0")


def test_a_word_that_is_no_flag(base: Path) -> None:
    assert "run.seed=3: not an override; overrides look like --run.seed=3" in problem(base, "run.seed=3")


def test_a_map_that_does_not_parse_names_the_flag(base: Path) -> None:
    assert "--model.overrides={a: neither JSON nor YAML" in problem(base, "--model.overrides", "{a")


def test_a_field_below_a_value(base: Path) -> None:
    assert "run.name is 'base', which has no fields" in problem(base, "--run.name.first", "x")


@pytest.mark.parametrize("text", ["true", "1.5", "abc", "[1]", '""'])
def test_no_number_is_made_of_something_else(base: Path, text: str) -> None:
    assert problem(base, "--train.micro_batch", text).startswith("train.micro_batch=")


def test_the_caller_s_arguments_are_left_alone(base: Path) -> None:
    flags: Any = ["--run.seed", "1"]
    assert isinstance(load_config(base, flags), FinetuneConfig) and flags == ["--run.seed", "1"]


PATHS = [field.path.replace("N", "0") for field in describe(ROOT)] + [
    "run",
    "data",
    "optim.schedule",
    "data.train.0",
    "x.y",
]
WORDS = st.sampled_from(
    [
        "null",
        "1",
        "-1",
        "x",
        "true",
        "{}",
        "[]",
        "[[]]",
        "{a: b}",
        "[{}]",
        "{type: wsd}",
        "wsd",
        "",
        "'",
        "{",
        "0.5",
        "[1, {a: 2}]",
    ]
)
FLAGS = st.lists(st.tuples(st.sampled_from(PATHS) | st.text(max_size=6), st.none() | WORDS), max_size=5)


@given(flags=FLAGS)
@settings(max_examples=20, deadline=None)
def test_whatever_is_typed_is_a_config_or_a_config_error(flags: list[tuple[str, str | None]]) -> None:
    with suppress(ConfigError):
        load_config(None, [f"--{path}" if text is None else f"--{path}={text}" for path, text in flags])
