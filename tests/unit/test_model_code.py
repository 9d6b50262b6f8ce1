"""Python code that comes with a model runs for those who ask for it by a flag, and never because of an answer."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from raytune_fsdp.base.errors import ModelError, ResumeError
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.cli import data, export, generate, train
from raytune_fsdp.launch.finetune import finetune
from raytune_fsdp.model.directory.tokenizer import tokenizer_in
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.reference.find import other_model
from raytune_fsdp.run.reference.network import decided_by
from raytune_fsdp.run.resume import Resumed, code_of, code_of_model
from tests.models import save_checkpoint
from tests.runs import make_config
from tests.unit.test_bad_input import flags
from tests.unit.test_reference import model_of

ROOT = Path(__file__).parents[2]
OLDER = ROOT / "tests" / "fixtures" / "aae7294" / "runs" / "steps"

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from .parts import Part

class Config(LlamaConfig):
    model_type = "evil"

class Model(LlamaForCausalLM):
    config_class = Config

class Words(PreTrainedTokenizerFast):
    pass
"""


NETWORK = """
from transformers import LlamaForCausalLM
from .evil import Config

class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code leaves when it runs. Standard input would say yes to it."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [each for each in sys.modules if each.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # where another test had its cache
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\na prompt\n"))
    return tmp_path / "the-code-ran"


def _infect(model: Path, marker: Path) -> Path:
    """Make config and weights need code that lies beside them."""
    (model / "evil.py").write_text(CODE.format(marker=str(marker)))
    (model / "parts.py").write_text("class Part: pass\n")
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto_map}))
    return model


def _infect_tokenizer(model: Path, marker: Path) -> Path:
    (model / "evil.py").write_text(CODE.format(marker=str(marker)))
    (model / "parts.py").write_text("class Part: pass\n")
    words = json.loads((model / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["evil.Words", "evil.Words"]}
    (model / "tokenizer_config.json").write_text(json.dumps({**words, "tokenizer_class": "Evil", "auto_map": auto_map}))
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # Of a type that transformers has no tokenizer for; else it takes that instead of one that needs code.
    return save_checkpoint(tmp_path / "stranger", "llama", tokenizer=True, vocab_size=1024)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLDER, tmp_path / "run"))


def _command(name: str, place: Path, tmp_path: Path) -> int:
    if name == "generate":
        return generate.main([str(place), "--max-new-tokens", "1"])
    if name == "export":
        return export.main([str(place), str(tmp_path / "out")])
    fields = flags(tmp_path, model__path=place)
    return train.main(fields) if name == "train" else data.main(["stats", *fields])


@pytest.mark.parametrize("infect", [_infect, _infect_tokenizer], ids=["config", "tokenizer"])
@pytest.mark.parametrize("command", ["generate", "train", "data"])
def test_no_reader_of_a_model_directory_runs_its_code(
    command: str,
    infect: Callable[[Path, Path], Path],
    model: Path,
    marker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    infect(model, marker)
    assert _command(command, model, tmp_path) == 2
    assert not marker.exists()
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert "needs Python code that comes with it" in output.err
    assert ("add --trust-remote-code" if command == "generate" else "model.trust_remote_code=true") in output.err


@pytest.mark.parametrize("infect", [_infect, _infect_tokenizer], ids=["config", "tokenizer"])
@pytest.mark.parametrize("command", ["generate", "export"])
def test_no_reader_of_a_run_runs_its_code(
    command: str,
    infect: Callable[[Path, Path], Path],
    run: Path,
    marker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither does what its config.yaml says count as the consent of whoever reads it now."""
    infect(run / "model", marker)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    assert "trust_remote_code: true" in (run / "config.yaml").read_text()
    assert _command(command, run, tmp_path) == 2
    assert not marker.exists() and not (tmp_path / "out").exists()
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1 and "--trust-remote-code" in output.err


def test_those_who_trust_the_code_say_so_by_a_flag(
    run: Path, model: Path, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _infect(model, marker)
    assert generate.main([str(model), "hello", "--max-new-tokens", "1", "--trust-remote-code"]) in (0, 2)
    assert marker.exists()
    marker.unlink()
    _infect(run / "model", marker)
    assert export.main([str(run), str(tmp_path / "out"), "--trust-remote-code"]) == 0
    assert not marker.exists(), "an export copies code, and does not run it"
    exported = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"evil.py", "parts.py", "model.safetensors"} <= exported, "also what the named file imports"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]["AutoConfig"] == "evil.Config"


def test_such_code_belongs_to_the_run(model: Path, marker: Path, tmp_path: Path) -> None:
    """It is trained, exported with its code, and not continued with other code; a run from before that rule is.

    Its network has a file of its own, as most have: transformers saves only that of the config.
    """
    _infect(model, marker)
    (model / "network.py").write_text(NETWORK)
    config_file = json.loads((model / "config.json").read_text())
    config_file["auto_map"]["AutoModelForCausalLM"] = "network.Model"
    (model / "config.json").write_text(json.dumps(config_file))
    chosen = {
        "init": "pretrained",
        "architecture": None,
        "tokenizer": None,
        "path": str(model),
        "trust_remote_code": True,
    }
    config = make_config(
        tmp_path, model=chosen, parallel={"precision": "fp32"}, train={"global_batch": 4, "max_steps": 2},
        export={"at_end": True},
    )  # fmt: skip
    result = finetune(config)
    assert marker.exists() and result.export is not None
    assert {"evil.py", "network.py", "parts.py"} <= {path.name for path in result.export.iterdir()}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        result.export, trust_remote_code=True, output_loading_info=True
    )
    assert type(loaded).__name__ == "Model" and not any(report.values())
    assert generate.main([str(result.run_dir), "hello", "--max-new-tokens", "1", "--trust-remote-code"]) == 0
    prepared, standing = prepare(config, 1)
    names = [key for key in prepared.identity if key.startswith("model.code.")]
    assert names == ["model.code.evil.py", "model.code.network.py", "model.code.parts.py"]
    older = Resumed(checkpoint=standing.checkpoint, state=RunState(identity={"run.seed": 3}), damaged={})
    assert code_of_model(config, model, older) == {} != code_of_model(config, model, replace(older, checkpoint=None))
    (model / "parts.py").write_text("class Part: changed = True\n")
    with pytest.raises(ResumeError, match=r"model\.code\.parts\.py: was '\w+', is '\w+'"):
        prepare(config, 1)


def test_code_of_another_model_belongs_to_what_it_says(
    model: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a teacher or a reference are named by it. A model without code has the key that it had."""
    monkeypatch.setattr("raytune_fsdp.run.reference.network._content", lambda *_, **__: {})
    found, tokenizer = [], tokenizer_in(model, trust_remote_code=False)
    config = make_config(tmp_path, model={"trust_remote_code": True})
    shutil.copy(model / "config.json", tmp_path / "plain.json")
    for what in ("plain", "infected", "changed"):
        if what == "infected":
            _infect(model, marker)
        elif what == "changed":
            (model / "parts.py").write_text("class Part: changed = True\n")
        other = other_model(config, "teacher.model", str(model), tokenizer)
        same = replace(other, hf_config=found[0][0].hf_config) if found else other
        found.append((other, decided_by(same, {}, other.origin, None, alone=True)))
    assert marker.exists() and [*found[1][0].code] == ["model.code.evil.py", "model.code.parts.py"]
    keys = [key for _, key in found]
    assert "more" not in keys[0] and keys[1]["more"] != keys[2]["more"]
    assert all({name: key[name] for name in key if name != "more"} == keys[0] for key in keys)
    silent = make_config(tmp_path, model={"trust_remote_code": False})
    (model / "config.json").write_text((tmp_path / "plain.json").read_text())
    assert other_model(silent, "teacher.model", str(model), tokenizer).code == {}


def test_what_the_run_starts_from_names_its_code_once(tmp_path: Path) -> None:
    code = {"model.code.evil.py": "1", "model.network_file": "2", "model.network_modules.mine": "3"}
    assert code_of({**code, "model.network": "mine:build", "model.init": "pretrained", "run.seed": 1}) == code
    start = replace(model_of(tmp_path), code=code)
    assert "more" not in decided_by(start, code, None, None, alone=True)
    bare = decided_by(replace(start, is_start=False), code, None, None, alone=True)
    assert bare["more"] == {"code": code} and "more" not in decided_by(
        replace(start, is_start=False, code={}), code, None, None, alone=True
    )


def test_code_in_the_cache_of_the_hub_is_found_through_its_links(tmp_path: Path) -> None:
    """Its snapshots are links; one to any other file is refused."""
    config = make_config(tmp_path, model={"trust_remote_code": True})
    files = {
        "config.json": json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}), "evil.py": "from .parts import Part\n",
        "parts.py": "class Part: pass\n",
    }  # fmt: skip
    plain, snapshot, blobs = tmp_path / "plain", tmp_path / "cache/snapshots/main", tmp_path / "cache/blobs"
    for place in (plain, snapshot, blobs):
        place.mkdir(parents=True)
    for number, (name, text) in enumerate(files.items()):
        (plain / name).write_text(text)
        (blobs / f"{number:040x}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    begun = Resumed(state=RunState(identity={}), damaged={})
    found = code_of_model(config, snapshot, begun)
    assert found.keys() == {"model.code.evil.py", "model.code.parts.py"}
    assert found == code_of_model(config, plain, begun)
    (plain / "parts.py").unlink()
    (plain / "parts.py").symlink_to(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text("key = 1\n")
    with pytest.raises(ModelError, match=r"parts\.py is a link to .*, a file of another name"):
        code_of_model(config, plain, begun)


def test_every_call_says_whether_code_may_run() -> None:
    """transformers asks on standard input where `trust_remote_code` is not given."""
    silent = []
    for file in sorted((ROOT / "raytune_fsdp").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if ".from_" not in text:
            continue
        tree = ast.parse(text)
        said = {
            call.func
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and any(
                each.arg == "trust_remote_code" or (each.arg is None and ast.unparse(each.value) == "kwargs")
                for each in call.keywords
            )
        }
        silent += [
            f"{file.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in ("from_pretrained", "from_config")
            and ast.unparse(node.value).startswith("Auto")
            and node not in said
        ]
    assert not silent, "these leave it to transformers"


def test_a_command_ends_no_process_for_threads_that_it_has_not_started(
    model: Path, marker: Path, tmp_path: Path
) -> None:
    """As the storage's of another run, in a program that calls both."""
    over = threading.Event()
    other = threading.Thread(target=over.wait, name="storage_0")
    other.start()
    try:
        assert _command("train", _infect(model, marker), tmp_path) == 2
    finally:
        over.set()
        other.join()
