"""Pushing a model: what the hub then has, and what is said when it has nothing."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.model.directory.hub_weights import HUB_SECONDS
from raytune_fsdp.model.export.mark import MARK_FILE
from tests.unit.fake_hub import TOKEN, FakeHub, Repository, fake_hub

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = HUB_SECONDS + 3

# The hub's library reads where the hub is when it is imported, so this is a process of its own.
SCRIPT = """
import json, sys, time
from pathlib import Path
from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.model.directory.hub_push import check_push, push
assert "huggingface_hub" not in sys.modules
import huggingface_hub
for line in sys.stdin:
    what, name, directory, private = json.loads(line)
    started = time.monotonic()
    try:
        if what == "check":
            said = check_push(name) and None  # the token
        else:
            said = push(Path(directory), name, private=private, message="A model")
    except RaytuneError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([said, time.monotonic() - started]), flush=True)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights in two files, which the hub takes as large ones, and the small files around them."""
    directory = tmp_path / "model"
    files = {
        "config.json": b'{"model_type": "llama"}\n',
        "generation_config.json": b"{}\n",
        "README.md": "# Größe\n".encode(),
        "vocab.txt": b"",
        "additional_chat_templates/rag.jinja": b"{{ messages }}",
        "model-00001-of-00002.safetensors": os.urandom(200_000),
        "model-00002-of-00002.safetensors": os.urandom(100_000),
        "model.safetensors.index.json": b"{}",
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@contextmanager
def pushing(url: str, place: Path, **settings: str) -> Iterator[Callable[..., str]]:
    """A process that says for each push and check what it has led to: a URL, None or the error. And soon."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    ours = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "hf"), "NO_PROXY": "127.0.0.1"}
    with (
        open(place / "errors", "a+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**kept, **ours, **settings}, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        ) as process,
    ):  # fmt: skip
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def say(*asked: Any) -> str:
            print(json.dumps(asked, default=str), file=stdin, flush=True)
            answer = stdout.readline() if select.select([stdout], [], [], 60)[0] else ""
            assert answer, Path(errors.name).read_text()
            said: str
            said, seconds = json.loads(answer)
            assert seconds < LIMIT_SECONDS, f"{seconds:.1f} s for: {said}"
            assert "\n" not in str(said) and "hf_" not in str(said).replace(str(place), "")
            return said

        try:
            yield say
            stdin.close()
            assert process.wait(60) == 0, Path(errors.name).read_text()
        finally:
            process.kill()


def say(url: str, place: Path, *asked: tuple[Any, ...], **settings: str) -> list[str]:
    """All in one process."""
    with pushing(url, place, **settings) as says:
        return [says(*each) for each in asked]


Push = Callable[..., str]


@pytest.fixture
def push(hub: FakeHub, tmp_path: Path) -> Iterator[Push]:
    """Without Xet, whose storage is another server with a protocol of its own."""
    with pushing(hub.url, tmp_path, HF_HUB_DISABLE_XET="1") as says:
        yield lambda model, name, private=False: says("push", name, model, private)


def test_the_hub_has_the_model_and_nothing_else(hub: FakeHub, model: Path, push: Push) -> None:
    here = content(model)
    (model / ".cache" / "huggingface").mkdir(parents=True)
    for name in (".cache/huggingface/config.json.metadata", "notes.txt", "evil.py", "model.gguf", ".netrc", MARK_FILE):
        (model / name).write_text("not the model's")
    (model / "model-00003-of-00003.safetensors").symlink_to(model / "notes.txt")
    url = push(model, "my-model", private=True)
    there = hub.repositories["someone/my-model"]
    assert url == f"{hub.url}/someone/my-model/commit/{1:040x}"
    assert {name: file for name, file in there.files.items() if name != ".gitattributes"} == here
    assert there.large == {name for name in here if name.endswith(".safetensors")}
    assert [commit["message"] for commit in there.commits] == ["A model"]
    assert there.visibility == "private"
    assert push(model, "someone/my-model") == url
    assert len(there.commits) == 1, "nothing new was committed"


def test_a_smaller_model_replaces_a_larger_one(hub: FakeHub, model: Path, push: Push) -> None:
    notes, nested = b"written on the hub", "gguf/other.safetensors"
    push(model, "someone/my-model")
    there = hub.repositories["someone/my-model"]
    assert there.visibility is None, "what the account has it"
    there.files |= {"NOTES.md": notes, nested: b"put there by hand"}
    for file in model.glob("model*"):
        file.unlink()
    (model / "model.safetensors").write_bytes(b"weights")
    push(model, "someone/my-model", private=True)
    assert set(there.files) == {*content(model), ".gitattributes", "NOTES.md", nested}
    assert there.files["model.safetensors"] == b"weights" and there.files["NOTES.md"] == notes
    assert len(there.commits) == 2
    assert there.commits[1]["done"] == {
        "lfsFile model.safetensors",
        "deletedFile model-00001-of-00002.safetensors",
        "deletedFile model-00002-of-00002.safetensors",
        "deletedFile model.safetensors.index.json",
    }
    assert there.visibility is None, "one that is there keeps its visibility"
    # An adapter in place of a model, and a model again: a loader looks at which config there is.
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "config.json").rename(model / "adapter_config.json")
    (model / "generation_config.json").unlink()
    push(model, "someone/my-model")
    assert set(there.files) == {*content(model), ".gitattributes", "NOTES.md", nested}
    (model / "adapter_model.safetensors").rename(model / "model.safetensors")
    (model / "adapter_config.json").rename(model / "config.json")
    push(model, "someone/my-model")
    assert set(there.files) == {*content(model), ".gitattributes", "NOTES.md", nested}


@pytest.mark.slow
def test_names_and_tokens(hub: FakeHub, model: Path) -> None:
    names = ["my-model", "someone/my-model", "", "a/b/c", "../out", "my model", "my--model", "x" * 97, "a\nb"]
    fine, fine_too, *bad = say(hub.url, model.parent, *(("check", name, "", False) for name in names))
    assert fine is None and fine_too is None
    for line, name in zip(bad, names[2:], strict=True):
        shown = name.replace("\n", " ")
        assert line.startswith(f"ModelError: export.push={shown}: not a name the hub allows; it must be owner/name")
    both = [(what, "my-model", model, False) for what in ("check", "push")]
    for settings, words in (
        ({"HF_TOKEN": ""}, "needs a token with write access: set HF_TOKEN, or run `hf auth login`"),
        ({"HF_TOKEN": f"“{TOKEN}”"}, "a character that no token has (a quote? a space?): correct HF_TOKEN"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be pushed: unset it"),
    ):
        for line in say(hub.url, model.parent, *both, **settings):
            assert line.startswith("ModelError: export.push=my-model: ") and line.endswith(words)
    assert hub.seen == []


@pytest.mark.slow
def test_a_hub_that_refuses(hub: FakeHub, model: Path, push: Push) -> None:
    stranger = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_anotherToken"}
    (line,) = say(hub.url, model.parent, ("push", "my-model", model, False), **stranger)
    assert line.startswith("ModelError: export.push=my-model: the hub does not know the token (HTTP 401: ")
    assert line.endswith("set HF_TOKEN to a valid one")
    # Both ways to store large files: what Xet is refused, it calls a failed connection.
    hub.repositories["others/their-model"] = Repository(visibility=None)
    asked = [("push", f"others/{name}", model, False) for name in ("new-model", "their-model")]
    for disabled in "01":
        for line, name in zip(say(hub.url, model.parent, *asked, HF_HUB_DISABLE_XET=disabled), asked, strict=True):
            assert line.startswith(f"ModelError: export.push={name[1]}: the token may not write there (")
            assert "403" in line and line.endswith("write to, and a token with write access")
    (model / "README.md").write_text("---\nlicense: mine\n---\n")
    line = push(model, "my-model")
    assert line.startswith(f"ModelError: export.push=my-model: the hub does not accept the files in {model} (")
    assert "README.md. - license is not one" in line
    (line,) = say(hub.url, model.parent, ("push", "my-model", model / "none", False))
    assert line.startswith("ModelError: export.push=my-model: ") and "is not a directory" in line
    assert not any(repository.commits for repository in hub.repositories.values())


@pytest.mark.slow
def test_a_hub_that_is_not_there(hub: FakeHub, model: Path, push: Push) -> None:
    hub.down = 503
    again = f"; the model is in {model}: push it again later"
    line = push(model, "my-model")
    assert line == f"TransientError: export.push=my-model: the hub fails (HTTP 503: down for repairs){again}"
    assert not hub.repositories
    hub.down, hub.storage_refuses = 0, True
    line = push(model, "my-model")
    assert line == f"TransientError: export.push=my-model: the hub fails (HTTP 403: Forbidden){again}"
    assert not hub.repositories["someone/my-model"].commits
    ask = ("push", "my-model", model, False)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for url, words in ((silent, f"no answer within {HUB_SECONDS} s"), ("http://127.0.0.1:9", "refused")):
            (line,) = say(url, model.parent, ask)
            assert line.startswith("TransientError: export.push=my-model: the hub cannot be reached (")
            assert words in line and line.endswith(again)
