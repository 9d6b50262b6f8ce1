"""What a person reads when the config is wrong: field, value, rule, way out, and where it came from."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.sections.tracking import WandbConfig

YAML = """\
run: {name: base}
model:
  path: some/model
data:
  train:
    - path: a.jsonl
      format: {type: chat}
train:
  global_batch: 10
  max_steps: 10
"""


def problems(tmp_path: Path, *flags: str, text: str = YAML) -> list[str]:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "job.yaml", flags)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_value_against_its_rule_names_the_flag(tmp_path: Path) -> None:
    assert problems(tmp_path, "--train.log_every=0") == [
        "train.log_every=0: must be integer >= 1 (from flag --train.log_every)"
    ]
    assert problems(tmp_path, "--run.digest_every=0") == [
        "run.digest_every=0: must be integer >= 1, or null (from flag --run.digest_every)"
    ]


def test_a_value_against_its_rule_names_the_line(tmp_path: Path) -> None:
    assert problems(tmp_path, text=YAML.replace("10\n  max", "-2\n  max")) == [
        "train.global_batch=-2: must be integer >= 1, <= 2**24 (from job.yaml line 9)"
    ]


def test_a_rule_over_two_fields_names_both_places(tmp_path: Path) -> None:
    assert problems(tmp_path, "--train.micro_batch", "4") == [
        "train.global_batch=10 is not a multiple of train.micro_batch=4; nearest valid: 8 or 12 "
        "(from job.yaml line 9 and flag --train.micro_batch)"
    ]


def test_a_rule_about_a_section_without_a_field(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, text=YAML.replace("path: some/model", "init: random"))
    assert line.startswith("model: needs model.path (a directory or a hub name)") and line.endswith(
        "(from job.yaml line 3)"
    )


def test_a_mistyped_choice_names_all_and_the_nearest(tmp_path: Path) -> None:
    assert problems(tmp_path, "--data.packing", "bestfit") == [
        "data.packing=bestfit: must be one of best_fit, concat, none; nearest: best_fit (from flag --data.packing)"
    ]


def test_a_mistyped_type(tmp_path: Path) -> None:
    assert problems(tmp_path, "--optim.schedule.type", "cosin") == [
        "optim.schedule.type=cosin: must be one of constant, linear, cosine, wsd, polynomial, inverse_sqrt, one_cycle; "
        "nearest: cosine (from flag --optim.schedule.type)"
    ]


def test_a_name_that_could_leave_its_directory(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "--run.name", "../x")
    assert line.startswith("run.name=../x: must be 1 to 128 letters, digits") and line.endswith(
        "(from flag --run.name)"
    )


def test_a_union_of_scalars_is_one_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, "--cluster.workers", "many") == [
        "cluster.workers=many: must be integer >= 1, map of min and max, or auto (from flag --cluster.workers)"
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--cluster.workers.min", "2"), ["cluster.workers.max: required, integer >= 1; set it"]),
        (
            ("--cluster.workers.min", "4", "--cluster.workers.max", "2"),
            ["cluster.workers: min=4 is more than max=2: lower"],
        ),
        (("--cluster.workers.min", "0", "--cluster.workers.max", "2"), ["cluster.workers.min=0: must be"]),
        (
            ("--cluster.workers", "{min: 1, most: 2}"),
            ["cluster.workers.most=2: unknown field; nearest", "cluster.workers.max: required"],
        ),
    ],
)
def test_a_number_of_workers_that_may_change(tmp_path: Path, flags: tuple[str, ...], expected: list[str]) -> None:
    """The file says `workers: 4`, which such a flag replaces."""
    found = problems(tmp_path, *flags, text=f"{YAML}cluster:\n  workers: 4\n")
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start), found


def test_a_mistyped_flag_names_the_nearest_field_and_all_of_a_small_section(tmp_path: Path) -> None:
    every = ", ".join(WandbConfig.model_fields)
    assert problems(tmp_path, "--tracking.wandb.projekt", "x") == [
        f"tracking.wandb.projekt=x: unknown field; nearest: tracking.wandb.project; tracking.wandb has {every} (from "
        "flag --tracking.wandb.projekt)"
    ]
    assert problems(tmp_path, "--train.max_step", "3") == [
        "train.max_step=3: unknown field; nearest: train.max_steps; `raytune-fsdp train --help train` lists all (from "
        "flag --train.max_step)"
    ]


def test_a_mistyped_key_of_the_file_names_its_line(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, text=YAML.replace("max_steps: 10", "max_steps: 10\n  microbatch: 2"))
    assert line.startswith("train.microbatch=2: unknown field; nearest: train.micro_batch; `raytune-fsdp train --help")
    assert line.endswith("(from job.yaml line 11)")


def test_a_mistyped_section_names_the_nearest_and_all(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "--optm.lr", "3")
    assert line.startswith("optm: unknown section; nearest: optim; sections: run, model, data,")
    assert line.endswith("(from flag --optm.lr)")


def test_a_field_without_its_section(tmp_path: Path) -> None:
    assert problems(tmp_path, "--lr", "3")[0].startswith("lr=3: unknown section; nearest: optim.lr; sections: run,")


def test_a_field_in_the_wrong_section(tmp_path: Path) -> None:
    assert "nearest: data.seq_len" in problems(tmp_path, "--train.seq_len", "3")[0]


def test_dashes_in_a_name(tmp_path: Path) -> None:
    assert "data.seq-len=3: unknown field; nearest: data.seq_len;" in problems(tmp_path, "--data.seq-len", "3")[0]


def test_a_field_of_another_type_names_that_type(tmp_path: Path) -> None:
    assert problems(tmp_path, "--optim.schedule.decay", "0.2") == [
        "optim.schedule.decay=0.2: unknown field with type cosine; nearest: optim.schedule.decay with type wsd; "
        "optim.schedule has type, floor (from flag --optim.schedule.decay)"
    ]


def test_an_unknown_switch(tmp_path: Path) -> None:
    assert "nearest: tracking.console" in problems(tmp_path, "--tracking.consol")[0]


def test_a_field_deep_in_a_list_is_named_by_its_index(tmp_path: Path) -> None:
    assert problems(tmp_path, "--data.train.0.format.mesages", "x")[0].startswith(
        "data.train.0.format.mesages=x: unknown field with type chat; nearest: data.train.0.format.messages;"
    )


def test_everything_required_is_listed_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["run.name", "model", "data.train", "train.global_batch"]
    assert "set it in the YAML file or with --train.global_batch" in lines[-1]


def test_a_list_that_must_not_be_empty(tmp_path: Path) -> None:
    assert problems(tmp_path, "--data.train", "[]") == [
        "data.train=[]: must be list of maps (at least 1) (from flag --data.train)"
    ]


def test_a_value_where_a_section_belongs(tmp_path: Path) -> None:
    assert problems(tmp_path, "--tracking", "on")[0].startswith(
        "tracking=on: must be a map with fields console, console_every, documents, mlflow, "
    )


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_numbers_that_are_not_finite(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, f"--optim.lr={text}")[0].endswith("must be number > 0 (from flag --optim.lr)")


def test_long_values_are_cut(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "--optim.lr", "x" * 500)
    assert len(line) < 150 and "xxx..." in line


def test_all_problems_at_once_each_in_its_line(tmp_path: Path) -> None:
    lines = problems(
        tmp_path, "--optim.lr=0", "--train.epoch=3", "--run.seed", "--data.train.9.path=x", "--eval.every=no"
    )
    starts = ["--run.seed: needs", "--data.train.9.path:", "optim.lr=0:", "train.epoch=3:", "eval.every=no:"]
    assert len(lines) == 5
    assert all(any(line.startswith(start) for line in lines) for start in starts)


def test_a_file_of_thousands_of_mistyped_keys_is_answered_at_once(tmp_path: Path) -> None:
    """Each would be compared with all fields; the first hundred are."""
    keys = "".join(f"  max_step{number}: 1\n" for number in range(3000))
    start = time.process_time()
    found = problems(tmp_path, text=YAML + keys)
    assert time.process_time() - start < 5
    assert len(found) == 101 and "nearest: train.max_steps" in found[0]
    assert found[-1] == "and 2900 more problems like these"
