"""The command line around the config: commands, exit codes, what is printed, and that nothing heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

import raytune_fsdp
from raytune_fsdp.base.errors import ConfigError, Interrupted, TrainingError, UserError
from raytune_fsdp.base.hushed import VERBOSE
from raytune_fsdp.cli import common, main, train
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.quiet import ignoring_warnings, quiet, quieting

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--run.name",
    "x",
    "--model.path",
    "m",
    "--data.train.0.path",
    "a",
    "--train.global_batch",
    "4",
    "--train.max_steps",
    "1",
]

ARITHMETIC = [
    [*FLAGS, *wrong]
    for wrong in (
        ["--cluster.workers", "5"],
        ["--cluster.workers", "5", "--cluster.launch", "local"],
        ["--cluster.workers", "4", "--parallel.strategy", "hybrid_shard", "--parallel.shard_size", "3"],
        ["--model.attention", "flex_attention", "--cluster.device", "cpu"],
        ["--optim.warmup_steps", "2"],
        ["--checkpoint.keep_best", "2"],
        ["--export.every", "3", "--train.max_steps", "10", "--checkpoint.every", "2"],
    )
]
"""Requests that contradict themselves, so that nothing need be imported to refuse them."""


@pytest.fixture
def waits() -> list[Any]:
    """How long `finetune` was asked to wait."""
    return []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, waits: list[Any]) -> list[Any]:
    """The configs that `finetune` was called with."""
    configs: list[Any] = []
    api = types.ModuleType("raytune_fsdp.launch.finetune")
    api.finetune = lambda config, progress, **how: configs.append(config) or waits.append(how)  # type: ignore[attr-defined]
    api.WAIT_FOR_TRACKING = 30.0  # type: ignore[attr-defined]
    monkeypatch.setattr("raytune_fsdp.launch.torchrun.is_rank0", lambda: False)
    monkeypatch.setitem(sys.modules, "raytune_fsdp.launch.finetune", api)
    return configs


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_train_hands_the_config_to_finetune(started: list[Any]) -> None:
    assert main.main(["train", *FLAGS]) == 0
    assert started[0].run.name == "x"


def test_how_long_to_wait_for_mlflow_is_a_flag_of_train_not_of_the_config(
    started: list[Any], waits: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", *FLAGS]) == main.main(["train", *FLAGS, "--wait-for-tracking", "0.5"]) == 0
    told = {"force": False, "trust_places": False}
    assert waits == [{"wait_for_tracking": 30.0, **told}, {"wait_for_tracking": 0.5, **told}]
    assert main.main(["train", *FLAGS, "--wait-for-tracking=-1"]) == 2
    assert main.main(["train", *FLAGS, "--wait-for-tracking", "nan"]) == 2
    assert len(started) == 2
    assert main.main(["train", *FLAGS, "--force"]) == 0 and waits[-1]["force"] is True
    assert errors(capsys)[0].startswith("error: --wait-for-tracking -1 must be 0 or more seconds")


def test_train_reads_a_file(started: list[Any]) -> None:
    recipe = ROOT / "jobs/recipes/llama3-8b-full-8xa100.yaml"
    assert main.main(["train", f"--config={recipe}", "--run.name", "other"]) == 0
    assert (started[0].run.name, started[0].data.seq_len) == ("other", 4096)


def test_ray_does_not_colour_what_is_no_terminal(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    assert main.main(["train", *FLAGS]) == 0  # pytest's streams are none
    assert os.environ["RAY_COLOR_PREFIX"] == "0"
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    assert main.main(["train", *FLAGS]) == 0
    assert os.environ["RAY_COLOR_PREFIX"] == "1", "the user's own choice"


def test_the_default_config_is_used_where_none_is_given(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("run: {name: from-file}\n")
    assert train.main(FLAGS[2:], default_config=tmp_path / "demo.yaml") == 0
    assert started[0].run.name == "from-file"


def test_a_wrong_config_is_exit_code_2_and_a_line_for_each_problem(
    started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", *FLAGS, "--optim.lr=0", "--optim.ep=1"]) == 2
    lines = errors(capsys)
    assert lines[0].startswith("error: optim.ep=1: unknown field; nearest: optim.eps"), (
        "a typo may be why others are wrong"
    )
    assert lines[1].startswith("error: optim.lr=0: must be number > 0")
    assert len(lines) == 2 and started == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("why"), 2), (UserError("why"), 2), (TrainingError("why"), 1), (Interrupted("why"), 130)],
)
def test_errors_for_users_are_a_line_and_their_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert common.exit_code(work) == code
    assert errors(capsys) == ["error: why"]


def test_control_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise KeyboardInterrupt

    assert common.exit_code(work) == 130
    assert errors(capsys) == ["error: interrupted"]


def test_our_own_bugs_keep_their_traceback() -> None:
    def work() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        common.exit_code(work)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "unknown command trian; nearest: train; `raytune-fsdp --help` lists"),
        (["--verbose"], "unknown argument --verbose; `raytune-fsdp --help` lists the commands"),
        (["train", "--cofig", "x"], "unknown argument --cofig; nearest: --config"),
        (["train", "job.yaml"], "unexpected argument job.yaml; a config file is given with --config job.yaml"),
        (["train", "--config"], "argument --config: expected one argument"),
        (["train", "--config", "nope.yaml"], "config file nope.yaml: no such file"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: {expected}")


def test_a_command_without_overrides_names_the_nearest_flag() -> None:
    parser = common.Parser("x", "")
    parser.add_argument("--prompt")
    with pytest.raises(ConfigError, match="unknown argument --promt; nearest: --prompt"):
        parser.parse(["--promt", "hi"])


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([flag]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in main.COMMANDS)


def test_help_of_train_is_a_page_and_lists_the_fields_of_a_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def helped(*words: str) -> str:
        with pytest.raises(SystemExit) as done:
            main.main(["train", *(words if words and words[0].startswith("--") else ("--help", *words))])
        assert done.value.code == 0
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    page = helped()
    assert "--config FILE" in page and len(page.splitlines()) <= 46 and max(map(len, page.splitlines())) <= 80
    assert all(f"  {section} " in page for section in FinetuneConfig.model_fields)
    decay = "--optim.schedule.decay  number > 0, <= 1"
    assert "--data.train.N.path" in helped("data.train.0") and "--optim.lr" in helped("--help=optim")
    for section in ("all", "optim", "optim.schedule", "optim.schedule.decay"):
        text = helped(section)
        assert decay in text and "(default: 0.1)" in text and ("--optim.lr " in text) == (section in ("all", "optim"))
        assert ("--train.epochs" in text) == ("--config FILE" in text) == (section == "all")
    assert main.main(["train", "--help", "optm"]) == 2
    assert "--help optm: no such section or field of the config; nearest: optim" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["eval", "--help"], ["eval", "--help", "runs/x"], ["step", "--help=all"]])
def test_help_of_a_command_about_a_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main.main(words)
    assert done.value.code == 0 and capsys.readouterr().out.startswith(f"usage: raytune-fsdp {words[0]} ")


def test_without_a_command_the_usage_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: raytune-fsdp COMMAND")


def test_every_command_has_its_file() -> None:
    assert [name for name in main.COMMANDS if find_spec(f"raytune_fsdp.cli.{name}") is None] == []


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_command_s_file_is_a_program_too(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m raytune_fsdp.cli.NAME` has always worked, and must not end without a word."""
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as done:
        run_path(str(Path(main.__file__).with_name(f"{name}.py")), run_name="__main__")
    assert done.value.code == 0 and capsys.readouterr().out.startswith(f"usage: raytune-fsdp {name} ")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"raytune-fsdp {raytune_fsdp.__version__}\n"


def test_public_names() -> None:
    assert set(raytune_fsdp.__all__) <= set(dir(raytune_fsdp))
    assert raytune_fsdp.FinetuneConfig.__name__ == "FinetuneConfig"
    with pytest.raises(AttributeError, match="no attribute 'fintune'"):
        _ = raytune_fsdp.fintune  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        "import raytune_fsdp",
        "from raytune_fsdp.config import FinetuneConfig; from raytune_fsdp import RaytuneError",
        "import raytune_fsdp.config.load, docs.make.configuration",
        "from raytune_fsdp.cli.main import main; assert main(['train', '--optim.lr', '0']) == 2",
        f"from raytune_fsdp.cli.main import main\nfor wrong in {ARITHMETIC!r}: assert main(['train', *wrong]) == 2",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    check = "import sys; print([m for m in ('torch', 'ray', 'mlflow', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_advice_of_libraries_is_not_shown_and_a_user_s_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")  # so that they are as before afterwards
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet()
        warnings.warn_explicit("old", FutureWarning, "a.py", 1, module="transformers.modeling_utils")
        warnings.warn_explicit("mine", FutureWarning, "b.py", 1, module="users.code")
    assert [str(each.message) for each in shown] == ["mine"]


def test_verbose_shows_the_advice_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERBOSE, "1")
    monkeypatch.setattr(sys, "warnoptions", [])
    assert "TRANSFORMERS_VERBOSITY" not in quieting() and "MLFLOW_DISABLE_TELEMETRY" in quieting()
    with warnings.catch_warnings(record=True) as shown, ignoring_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit("old", FutureWarning, "a.py", 1, module="transformers.modeling_utils")
    assert [str(each.message) for each in shown] == ["old"]


WARNING = """
import logging
from raytune_fsdp.launch.quiet import log_warnings
log_warnings(for_all={for_all})
for window in range(3):
    logging.getLogger("raytune_fsdp.data").warning("the cache is %s", "full")
logging.getLogger("raytune_fsdp.data").warning("the cache is %s", "gone")
logging.getLogger("other").error("broken")
"""


@pytest.mark.parametrize(
    ("for_all", "verbose", "expected"),
    [
        (True, "", ["the cache is full", "the cache is gone", "broken"]),
        (False, "", ["broken"]),
        (False, "1", [*["the cache is full"] * 3, "the cache is gone", "broken"]),
    ],
)
def test_a_warning_is_said_once_and_by_one_rank(for_all: bool, verbose: str, expected: list[str]) -> None:
    command = [sys.executable, "-c", WARNING.format(for_all=for_all)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, VERBOSE: verbose})
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == expected


def test_the_job_runs_from_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(ROOT / "jobs/finetune.py"), "--optim.lr=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
