"""A run directory from elsewhere chooses no places: its user does, by training it or by `--trust-places`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.errors import ConfigError, RaytuneError
from raytune_fsdp.base.mark import chosen_in, made_with, with_mark
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.sections.reference import TeacherConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.places import check_beginning, check_places, mark_of, places_in
from raytune_fsdp.tools.dry_run.two_steps import dry_run
from tests.forgeries import with_hashes
from tests.hostile_runs import OLDER, OPENERS, READERS, change, check_all, without_places
from tests.ranks import resident_ranks
from tests.runs import make_config, train_rank


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has never trained anything."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    get_temp_dir()  # of the server of ranks: its socket's name must be short
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "home"


@pytest.fixture
def run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that somebody else has trained, which names no place outside of it."""
    shutil.copytree(OLDER, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    run = tmp_path / "project" / "runs" / "steps"
    without_places(run)
    return run


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """An address, and what was asked there."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}", asked
    found.shutdown()
    found.server_close()


def said(capfd: pytest.CaptureFixture[str], command: str, *arguments: object) -> tuple[int, str]:
    code = importlib.import_module(f"raytune_fsdp.cli.{command}").main([*map(str, arguments)])
    err = capfd.readouterr().err
    assert all(char.isprintable() or char in "\n\t" for char in err), err
    return code, err


def with_run(arguments: tuple[object, ...], run: Path) -> list[str]:
    return [str(each).replace("RUN", str(run)) for each in arguments]


@pytest.mark.parametrize(("each", "many"), [(2, 45), pytest.param(None, 130, marks=pytest.mark.slow)])
def test_a_place_that_a_strangers_config_names_is_listed_and_not_touched(
    tmp_path: Path, each: int | None, many: int
) -> None:
    """By every command that goes by it: in one line, at once, and nothing is opened, made or asked there. `each`: by so
    many commands each place."""
    assert check_all("places", tmp_path, each=each) > many


@pytest.mark.parametrize("how", ["with the shape of a secret", "export", "checkpoints/step-00000004.a1", "link"])
def test_no_spelling_of_a_place_or_of_the_run_hides_it(
    run: Path, tmp_path: Path, server: tuple[str, list[str]], capfd: pytest.CaptureFixture[str], how: str
) -> None:
    place = f"{server[0]}/rows.jsonl"
    if how == "with the shape of a secret":
        place = f"{server[0]}/hf_{'a' * 24}.jsonl"
    elif how == "link":
        (tmp_path / "private").mkdir()
        shutil.copy(run / "texts.jsonl", tmp_path / "private" / "rows.jsonl")
        (run / "x").symlink_to(tmp_path / "private")
        place = str(run / "x" / "rows.jsonl")
    change(run, ("data", "train", 0, "path"), to=place)
    if how not in ("with the shape of a secret", "link"):
        inner = tmp_path / "outer" / how
        shutil.copytree(run, inner)
        (tmp_path / "outer" / "plan.json").write_text("{}")
        run = inner
    code, line = said(capfd, "step", run, 1)
    assert code == 2 and "data.train.path=" in line and "--trust-places" in line, line
    assert "a" * 24 not in line and server[1] == []


@pytest.mark.parametrize("where", ["directory", "url"])
def test_checkpoints_elsewhere_are_not_looked_for(
    run: Path, tmp_path: Path, server: tuple[str, list[str]], capfd: pytest.CaptureFixture[str], where: str
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "there")
    place = str(tmp_path / "there") if where == "directory" else f"{server[0]}/checkpoints"
    (run / "checkpoints_at").write_text(place)
    for command, *arguments in (*READERS[:3], *OPENERS):
        code, line = said(capfd, str(command), *with_run(tuple(arguments), run))
        assert code == 2 and line.count("\n") == 1 and f"checkpoints_at={place}" in line, (command, line)
    code, line = said(capfd, "diff", run, run.parent / "epochs")
    assert server[1] == [] and code in (0, 1), line
    if where == "directory":
        code, _ = said(capfd, "checkpoint", "verify", run, "--trust-places")
        assert code == 0


@pytest.mark.parametrize(
    "command", [*OPENERS[:4], ("eval", "RUN"), ("export", "RUN/checkpoints/step-00000006.a1", "out")]
)
def test_the_base_that_a_strangers_checkpoint_names_is_not_opened(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: tuple[object, ...]
) -> None:
    state = run / "checkpoints" / "step-00000006.a1" / "state.json"
    values = json.loads(state.read_text())
    base = {"path": str(tmp_path / "base"), "revision": None, "files": {}, "added": {}}
    state.write_text(json.dumps({**values, "base": base}))
    with_hashes(state.parent)
    name, *arguments = command
    code, line = said(capfd, str(name), *with_run(tuple(arguments), run))
    assert code == 2 and f"base={tmp_path / 'base'}" in line and line.count("\n") == 1, line


@pytest.mark.parametrize("command", [("export", "RUN", "out"), ("average", "RUN", "out", "--last", "2")])
def test_the_model_that_a_strangers_recipe_names_is_not_read(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: tuple[object, ...]
) -> None:
    """An export of a model that also sees takes from there what was not trained."""
    config, recipe = run / "model" / "config.json", run / "model" / "recipe.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "text_config": {}}))
    values = json.loads(recipe.read_text())
    values["config"]["model"] |= {"path": str(tmp_path / "private"), "init": "pretrained", "revision": None}
    recipe.write_text(json.dumps(values))
    name, *arguments = command
    code, line = said(capfd, str(name), *with_run(tuple(arguments), run))
    assert code == 2 and f"base={tmp_path / 'private'}" in line and line.count("\n") == 1, line
    values["config"]["model"]["path"] = "owner/name"
    recipe.write_text(json.dumps({**values, "model_on_hub": True}))
    assert "--trust-places" not in said(capfd, str(name), *with_run(tuple(arguments), run))[1], "it is the hub's"


def of_adapters(run: Path, base: Path) -> Path:
    """A checkpoint of the run that says that it is beside this base."""
    state = run / "checkpoints" / "step-00000006.a1" / "state.json"
    values = json.loads(state.read_text())
    beside = {"path": str(base), "revision": None, "files": {}, "added": {}}
    state.write_text(json.dumps({**values, "base": beside}))
    with_hashes(state.parent)
    return state.parent


@pytest.mark.parametrize("how", [(), ("--dry-run",)])
def test_training_from_a_strangers_checkpoint_does_not_open_the_base_that_it_names(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    checkpoint = of_adapters(run, tmp_path / "private")
    train = (
        "--config", run / "config.yaml", "--run.name", "mine", "--model.path", checkpoint, *how,
        "--model.architecture", "null", "--model.init", "pretrained", "--model.tokenizer", run / "model",
    )  # fmt: skip
    code, line = said(capfd, "train", *train)
    assert code == 2 and line.count("\n") == 1, line
    assert f"{checkpoint} names places" in line and f"base={tmp_path / 'private'}" in line and "--trust-places" in line
    code, line = said(capfd, "train", *train, "--trust-places")
    assert code == 2 and f"{tmp_path / 'private'}: there is no such directory" in line, "it goes there now"


@pytest.mark.parametrize("field", ["reference", "teacher"])
def test_a_model_that_a_run_compares_with_does_not_lead_to_the_base_that_it_names(
    run: Path, tmp_path: Path, field: str
) -> None:
    """A run that has checkpoints of its own reads it, too."""
    checkpoint = str(of_adapters(run, tmp_path / "private"))
    mine = load_config(run / "config.yaml")
    mine = mine.model_copy(update={"run": mine.run.model_copy(update={"name": "mine"})})
    compared = mine.reference.model_copy(update={"model": checkpoint}), TeacherConfig(model=checkpoint)
    config = mine.model_copy(update={field: compared[field == "teacher"]})
    for begins in (False, True):
        with pytest.raises(ConfigError, match=f"{checkpoint} names places .*base={tmp_path / 'private'}"):
            check_beginning(config, trusted=False, begins=begins)
    check_beginning(mine, trusted=False)
    mark = RunDir.of(config).model_files / "places.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(with_mark(b"", mark_of(config) or {}))
    check_beginning(config, trusted=False)


def began_with(run: Path, path: Path) -> None:
    """Let a run say that it began with a model that also sees."""
    config, recipe = run / "model" / "config.json", run / "model" / "recipe.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "text_config": {}}))
    values = json.loads(recipe.read_text())
    values["config"]["model"] |= {"path": str(path), "init": "pretrained", "revision": None}
    recipe.write_text(json.dumps(values))


def test_what_one_has_trusted_to_begin_with_is_ones_choice_in_later_exports(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = of_adapters(run, tmp_path / "private")
    mine = shutil.copytree(run.parent / "epochs", run.parent / "mine")
    began_with(mine, checkpoint)
    change(mine, ("model",), to={"path": str(checkpoint)})
    config = load_config(mine / "config.yaml")
    for begins, code in ((False, 2), (True, 0)):
        (mine / "model" / "places.json").write_text(with_mark(b"", mark_of(config, begins=begins) or {}))
        with nullcontext() if code == 0 else pytest.raises(ConfigError, match=f"base={tmp_path / 'private'}"):
            check_places(mine, trusted=False, exports=True)
            as_mine = config.model_copy(update={"run": config.run.model_copy(update={"name": "mine"})})
            check_beginning(as_mine, trusted=False)
    with pytest.raises(RaytuneError) as caught:  # it is tried in another directory, which has no mark
        dry_run(as_mine)
    assert "names places" not in str(caught.value) and str(tmp_path / "private") in str(caught.value)


def test_runs_that_say_they_began_with_each_other_end(run: Path) -> None:
    first, second = run, shutil.copytree(run, run.parent / "second")
    for one, other in ((first, second), (second, first)):
        began_with(one, other / "checkpoints" / "step-00000006.a1")
    with pytest.raises(ConfigError, match=r"base=.*/second/checkpoints/step-00000006\.a1"):
        check_places(first, trusted=False, exports=True)
    began_with(first, first / "checkpoints" / "step-00000006.a1")
    check_places(first, trusted=False, exports=True)


def test_what_is_on_the_hub_or_in_the_run_is_no_place(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(run, ("model", "path"), to=None)
    change(run, ("data", "chat_template"), to="chatml")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["eval"] = [{"hub": "owner/name"}, {"path": "hf://datasets/owner/name/test.jsonl"}]
    assert places_in(tree) == {"data.train.path=runs/steps/texts.jsonl"}
    assert said(capfd, "step", run, 1) == (0, "")


def test_a_strangers_tree_of_anything_names_nothing() -> None:
    for tree in (None, [], 7, {"data": []}, {"data": {"train": {"path": "/x"}}}, {"model": {"path": ["/x"]}}):
        assert places_in(tree) == set()


def test_the_commands_own_arguments_and_config_choose(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = shutil.copy(run / "texts.jsonl", tmp_path / "rows.jsonl")
    change(run, ("data", "train", 0, "path"), to="http://127.0.0.1:9/rows.jsonl")
    assert said(capfd, "step", run, 1)[0] == 2
    assert said(capfd, "step", run, 1, "--data.train.0.path", rows) == (0, "")
    # A config that is wrong by itself, and that an argument mends, names its places all the same.
    change(run, ("cluster", "device"), to="bogus")
    code, line = said(capfd, "step", run, 1, "--cluster.device", "cpu")
    assert code == 2 and "data.train.path=http://127.0.0.1:9/rows.jsonl" in line, line
    change(run, ("cluster", "device"), to="cpu")
    mine = tmp_path / "mine.yaml"
    shutil.copy(run / "config.yaml", mine)
    mine.write_text(mine.read_text().replace("http://127.0.0.1:9/rows.jsonl", str(rows)))
    assert said(capfd, "step", run, 1, "--config", mine) == (0, "")


def test_the_flag_goes_where_the_run_leads(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "texts.jsonl", tmp_path / "rows.jsonl")
    change(run, ("data", "train", 0, "path"), to=str(tmp_path / "rows.jsonl"))
    assert said(capfd, "step", run, 1)[0] == 2
    assert said(capfd, "step", run, 1, "--trust-places") == (0, "")
    assert said(capfd, "data", "preview", "--config", run / "config.yaml", "--trust-places")[0] in (0, 2)


@pytest.mark.parametrize("command", [("plan",), ("data", "stats"), ("data", "preview")], ids=" ".join)
def test_commands_that_read_rows_of_a_runs_own_config_run_none_of_its_code(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    config = run / "config.yaml"
    change(run, ("train",), to={"epochs": 1, "global_batch": 4})
    change(run, ("data", "train", 0, "path"), to="http://127.0.0.1:9/rows.jsonl")
    code, line = said(capfd, *command, "--config", config)
    assert code == 2 and "data.train.path=http://127.0.0.1:9/rows.jsonl" in line, line
    change(run, ("data", "train", 0, "path"), to=str(run / "texts.jsonl"))
    change(run, ("data", "train", 0, "format"), to={"type": "python", "function": "theirs:read"})
    (tmp_path / "theirs.py").write_text("open('ran', 'w')\ndef read(row): return row\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, line = said(capfd, *command, "--config", config)
    assert code == 2 and "names code" in line and "theirs:read" in line, line
    if command == ("plan",):  # nor where it reads no rows
        change(run, ("train",), to={"max_steps": 2, "global_batch": 4})
        assert said(capfd, *command, "--config", config, "--units") == (2, line)
    assert not Path("ran").exists()


def test_the_cache_of_a_run_is_beside_it_wherever_its_config_says_it_was(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`run.storage` of a stranger's config is a directory of somebody else's machine, or of this one."""
    change(run, ("run", "storage"), to=str(tmp_path / "there"))
    change(run, ("data", "eval"), to=[{"path": "runs/steps/texts.jsonl", "format": {"type": "completion"}}])
    shutil.rmtree(run.parent / "cache")
    assert said(capfd, "eval", run, "--cluster.device", "cpu") == (0, "")
    assert not (tmp_path / "there").exists() and (run.parent / "cache").is_dir()


# ---- marks ----


def train_as(user: Path, values: dict[str, Any]) -> bool:
    """Train as the user with this config directory: ranks come from a process that was there before."""
    os.environ["XDG_CONFIG_HOME"] = str(user)
    return train_rank(values)


def test_ones_own_run_needs_no_flag_after_training_and_an_unpacked_archive_does(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Data, checkpoints and tokenizer outside of the run: eval, step, preview and export work as the README has it; for
    another user they do not, and for that one they do after `train`."""
    config = make_config(
        tmp_path,
        data={"eval": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}]},
        checkpoint={"storage": str(tmp_path / "scratch")},
        train={"max_steps": 2},
        optim={"schedule": {"type": "constant"}},
    )
    resident_ranks(train_as, 1, home / ".config", config.model_dump())
    run = tmp_path / "runs" / "run"
    checkpoint = tmp_path / "scratch" / "run" / "checkpoints" / "step-00000002.a1"
    commands = (
        ("eval", run), ("step", run, 1), ("data", "preview", "--config", run / "config.yaml"),
        ("checkpoint", "list", run), ("export", run, tmp_path / "out"), ("export", checkpoint, tmp_path / "o"),
    )  # fmt: skip
    for command, *arguments in commands:
        assert said(capfd, str(command), *arguments)[0] == 0, command

    moved = shutil.copytree(run, tmp_path / "elsewhere" / "renamed")
    assert said(capfd, "step", moved, 1)[0] == 0, "it is still one's own"

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    (tmp_path / "another-machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "another-machine"))
    shutil.make_archive(str(tmp_path / "run"), "tar", run.parent, "run")
    shutil.unpack_archive(tmp_path / "run.tar", tmp_path / "unpacked")
    unpacked = tmp_path / "unpacked" / "run"
    for command, *arguments in (("eval", unpacked), ("step", unpacked, 1), ("checkpoint", "list", unpacked)):
        code, line = said(capfd, str(command), *arguments)
        assert code == 2 and "checkpoints_at=" in line, command
        assert said(capfd, str(command), *arguments, "--trust-places")[0] == 0, command
    assert said(capfd, "eval", run)[0] == 2
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 3})})
    resident_ranks(train_as, 1, tmp_path / "another", longer.model_dump())
    assert said(capfd, "eval", run)[0] == 0, "training is a choice, too"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    assert said(capfd, "eval", run)[0] == 0, "and takes nothing from the other user"


def marked(run: Path, config_file: Path) -> None:
    mark = mark_of(load_config(config_file))
    assert mark is not None
    (run / "model" / "places.json").write_text(with_mark(b"", mark))


def test_a_mark_holds_for_its_list_alone(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    shutil.copy(run / "texts.jsonl", rows)
    change(run, ("data", "train", 0, "path"), to=str(rows))
    marked(run, run / "config.yaml")
    assert said(capfd, "step", run, 1) == (0, "")
    change(run, ("data", "cache", "path"), to=str(tmp_path / "there"))
    code, line = said(capfd, "step", run, 1)
    assert code == 2 and f"data.cache.path={tmp_path / 'there'}" in line and "data.train.path" not in line
    file = run / "model" / "places.json"
    values = json.loads(file.read_text())
    values["marks"][0]["places"].append(f"data.cache.path={tmp_path / 'there'}")
    file.write_text(json.dumps(values))
    code, line = said(capfd, "step", run, 1)
    assert code == 2 and "data.train.path" in line, "a list that was changed has no mark"
    # A place of data is none to write a cache to.
    change(run, ("data", "cache", "path"), to=str(rows))
    marked_list = chosen_in(with_mark(b"", mark_of(load_config(run / "config.yaml")) or {}).encode())
    assert f"data.cache.path={rows}" in marked_list and f"checkpoint.storage={rows}" not in marked_list


BROKEN = {
    "nothing": b"", "not json": b"{", "a list": b"[]", "no marks": b"{}", "marks in a map": b'{"marks": {}}',
    "a mark of numbers": b'{"marks": [{"by": 1, "places": [1], "mac": 2}]}', "not text": b"\xff",
    "deep": b"[" * 100_000, "large": b" " * (2 << 20), "a mark without a hash": b'{"marks": [{"places": ["base=/x"]}]}',
    "a hash that is no ascii": '{"marks": [{"places": [], "mac": "ä"}]}'.encode(),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_mark_is_no_mark(home: Path, what: str) -> None:
    made = made_with(["base=/x"])
    assert made is not None and chosen_in(with_mark(BROKEN[what], made).encode()) == {"base=/x"}
    assert chosen_in(BROKEN[what]) == set()


def test_each_user_has_a_mark_of_their_own(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b""
    for user in range(20):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / f"user-{user}"))
        mark = made_with([f"base=/{user}"])
        assert mark is not None
        content = with_mark(content, mark).encode()
    assert chosen_in(content) == {"base=/19"} and len(json.loads(content)["marks"]) == 16
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user-10"))
    assert chosen_in(content) == {"base=/10"}


def test_the_key_is_the_users_alone_and_made_once(home: Path) -> None:
    before = os.umask(0)
    try:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(made_with(["base=/x"]))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.umask(before)
    assert len(found) == 8 and len({json.dumps(mark) for mark in found}) == 1
    directory = home / ".config" / "raytune_fsdp"
    assert [path.name for path in directory.iterdir()] == ["mark.key"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "mark.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("case", ["no home", "a home that is a file", "root"])
def test_users_in_containers_have_a_key_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    (tmp_path / "file").touch()
    at = {"no home": "/proc/nowhere", "a home that is a file": str(tmp_path / "file"), "root": str(tmp_path / "root")}
    monkeypatch.setenv("HOME", at[case])
    mark = made_with(["base=/x"])
    assert mark is not None and chosen_in(with_mark(b"", mark).encode()) == {"base=/x"}
    assert (tmp_path / "root" / ".config" / "raytune_fsdp" / "mark.key").exists() == (case == "root")


def test_among_temporary_files_nobody_elses_key_is_taken(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make a directory there, and put a key of theirs into it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    theirs = tmp_path / "temporary" / f"raytune_fsdp-{os.geteuid()}"
    made = made_with(["base=/x"])
    assert made is not None
    content = with_mark(b"", made).encode()
    assert chosen_in(content) == {"base=/x"}
    theirs.chmod(0o777)
    assert chosen_in(content) == set() and made_with(["base=/x"]) is None
    theirs.rename(tmp_path / "hidden")
    theirs.symlink_to(tmp_path / "hidden")
    assert chosen_in(content) == set()


def test_a_refusal_is_one_line_whatever_is_named(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"path": f"/x{number}\x1b[31m\n\u202e{'y' * 500}"} for number in range(50)]
    change(run, ("data", "eval"), to=rows)
    code, line = said(capfd, "step", run, 1)
    assert code == 2 and line.count("\n") == 1 and line.rstrip("\n").isprintable() and len(line) < 5000
    assert "40 more" in line


def test_nothing_is_asked_of_paths_that_are_no_run(home: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to(tmp_path)
    for source in (tmp_path, tmp_path / "nothing", "owner/name", "s3://bucket/model/file.json.gz/x"):
        if "://" not in str(source):
            check_places(source, trusted=False)
