"""The YAML file: how it is read, what is refused, and that a dump reads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.text import dump, parse, spelled
from tests.config_text import dump_config

YAML = """
run: {name: 2024}
model:
  path: no
data:
  train:
    - path: 1e5
train: {global_batch: 8, epochs: 1}
"""


def load(tmp_path: Path, text: str) -> FinetuneConfig:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, [])


def problem(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_text_fields_keep_their_spelling(tmp_path: Path) -> None:
    config = load(tmp_path, YAML)
    assert (config.run.name, config.model.path, config.data.train[0].path) == ("2024", "no", "1e5")


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, YAML + "optim: {lr: 5e-5, eps: 1E-6}\n")
    assert (config.optim.lr, config.optim.eps) == (5e-5, 1e-6)


def test_numbers_in_free_form_maps_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, YAML.replace("path: no", "path: x\n  overrides: {a: 1e-3, b: 010, c: '1e-3', d: no, 1: x}"))
    assert config.model.overrides == {"a": 1e-3, "b": 10, "c": "1e-3", "d": False, "1": "x"}


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, YAML + "optim:\n  # lr: 1\n").optim.lr == 5e-5


def test_anchors_and_merges(tmp_path: Path) -> None:
    config = load(tmp_path, YAML + "optim: {schedule: &s {type: wsd, decay: 0.5, floor: 0.1}}\n")
    text = YAML.replace("path: no", "path: x\n  overrides: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}")
    assert config.optim.schedule.type == "wsd"
    assert load(tmp_path, text).model.overrides["b"] == {"x": 1, "y": 3}


def test_a_repeated_key_names_both_lines(tmp_path: Path) -> None:
    assert problem(tmp_path, "run:\n  name: a\n  seed: 1\n  name: b\n") == (
        "config file job.yaml: line 4: 'name' is written twice in the same map (first in line 2)"
    )


@pytest.mark.parametrize(("text", "kind"), [("- a\n", "a list"), ("hello\n", "a single value"), ("# none\n", "empty")])
def test_a_file_that_is_no_map(tmp_path: Path, text: str, kind: str) -> None:
    assert problem(tmp_path, text).startswith(
        f"config file job.yaml: is {kind}, must be a map of sections (run, model,"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*nope\.yaml: no such file"):
        load_config(tmp_path / "nope.yaml", [])


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, [])


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "bad.yaml", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: a\n", "line"),
        ("run: [a: b: c]\n", "line 1"),
        ("run: !!python/object/apply:os.system [ls]\n", "line 1: could not determine a constructor"),
        ("run: &a {name: *a}\n", "line 1: found unconstructable recursive node"),
        ("? [a]\n: b\n", "line 1: a key must be a word"),
        ("run: {seed: !!int x}\n", "line 1: 'x': invalid literal"),
        ("a: 1\n---\nb: 2\n", "line 2"),
    ],
)
def test_broken_yaml_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    assert problem(tmp_path, text).startswith("config file job.yaml: ") and expected in problem(tmp_path, text)


def test_a_dump_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, YAML + "optim: {lr: 5e-5, schedule: {type: wsd, decay: 0.3}}\n")
    assert load(tmp_path, dump_config(config)) == config


def test_a_dump_holds_defaults(tmp_path: Path) -> None:
    assert "seq_len: 2048" in dump_config(load(tmp_path, YAML))


TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "null",
        "~",
        "1e5",
        "5e-5",
        "010",
        "1_0",
        "0o7",
        "yes",
        ".inf",
        "<<",
        "=",
        "1:30",
        "2024-01-01",
        "- a",
        "a: b",
        "\x85",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(tree=TREES)
@settings(max_examples=80, deadline=None)
def test_any_tree_survives_yaml(tree: object) -> None:
    assert spelled(parse(dump(tree))[0]) == tree


@given(
    overrides=st.dictionaries(TEXT, TREES, max_size=3),
    path=TEXT.filter(str.strip),
    prompts=st.lists(TEXT, max_size=3),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(0, 2**63 - 1),
    tokenizer=st.none() | TEXT.filter(str.strip),
    workers=st.just("auto") | st.integers(1, 10**6),
    schedule=st.sampled_from([{"type": "constant"}, {"type": "linear", "floor": 0.1}, {"type": "wsd", "decay": 1e-3}]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_config_survives_a_dump(tmp_path: Path, **drawn: object) -> None:
    config = FinetuneConfig.model_validate(
        {
            "run": {"name": "1e5", "seed": drawn["seed"]},
            "model": {"path": drawn["path"], "overrides": drawn["overrides"], "tokenizer": drawn["tokenizer"]},
            "data": {"train": [{"path": drawn["path"]}]},
            "optim": {"lr": drawn["lr"], "schedule": drawn["schedule"]},
            "train": {"global_batch": 1, "max_steps": 1},
            "eval": {"prompts": drawn["prompts"]},
            "cluster": {"workers": drawn["workers"]},
        }
    )
    assert load(tmp_path, dump_config(config)) == config
