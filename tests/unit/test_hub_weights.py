"""Weights of hub models: what is known of them before they are fetched, and how they come."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from raytune_fsdp.base.errors import ModelError, TransientError
from raytune_fsdp.model.directory.bounds import _TOKENIZER_FILES
from raytune_fsdp.model.directory.files import _SMALL_FILES, find_weights
from raytune_fsdp.model.directory.hub_weights import TensorHeader, _parsed
from raytune_fsdp.model.directory.tensorfile import DTYPES
from raytune_fsdp.model.weights.source import FileWeights
from tests.models import save_checkpoint
from tests.runs import make_config
from tests.unit.fake_hub import TOKEN, FakeHub, Repository, fake_hub

ROOT = Path(__file__).parents[2]
NAME = "someone/model"
COMMIT = f"{1:040x}"

# The hub's library reads where the hub and its cache are when it is imported: this process forks one for each machine.
SCRIPT = """
import contextlib, json, os, sys
from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.model.directory.files import cached, find_weights, known_weights, locate
from raytune_fsdp.model.directory.hub_download import Download, why_not
from raytune_fsdp.model.directory.hub_weights import HubWeights
with contextlib.suppress(ImportError):  # what that library imports, in one of its versions
    import httpx2, tqdm, truststore, yaml
assert "huggingface_hub" not in sys.modules

def known(name, stem):
    files = known_weights(name, None, field="model.path", name=stem)
    headers = files.headers or {}
    return [files.file_of, {key: each.shape for key, each in headers.items()}, {k: e.dtype for k, e in headers.items()}]

def fetch(name, commit, sizes):
    hub = HubWeights(repository=name, commit=commit, field="model.path", sizes=sizes)
    download = Download(hub)
    while not download.done():
        pass
    return [str(hub.directory), download.came]

def machine(settings, asked, answers):
    os.environ.update(settings)
    os.dup2(os.open(answers, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    for what, *arguments in asked:
        try:
            does = {"known": known, "fetch": fetch, "why": why, "cached": here, "base": base, "slow": slow}
            found = does[what](*arguments)
        except RaytuneError as error:
            found = f"{type(error).__name__}: {error}"
        print("=", json.dumps(found), flush=True)

def why(name, commit, sizes):
    found = why_not(HubWeights(repository=name, commit=commit, field="model.path", sizes=sizes))
    return None if found is None else f"{type(found).__name__}: {found}"

def base(name, commit):
    return sorted(find_weights(locate(name, commit, field="the base", weights=True)).sizes())

def slow(name, values):
    import hashlib, time
    import torch.distributed as dist
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.model.directory import hub_download
    from raytune_fsdp.run import fetching
    from raytune_fsdp.run.starting_weights import AdapterFiles

    class Slow:
        def __init__(self):
            self._digest = hashlib.sha256()
        def update(self, piece):
            time.sleep(0.25)
            self._digest.update(piece)
        def hexdigest(self):
            return self._digest.hexdigest()

    class Hashlib:
        sha256 = Slow
        def file_digest(self, file, kind):
            time.sleep(5)
            return hashlib.file_digest(file, kind)

    hub_download.hashlib, hub_download._BLOCK_BYTES = Hashlib(), 8_000
    fetching._SILENT_SECONDS = 1.2
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    files = known_weights(name, None, field="method.adapter")
    config = FinetuneConfig.model_validate(values)
    _, adapter = fetching.brought(config, None, AdapterFiles(files=files, key_of={}), lambda line: None)
    return adapter.files.hub.lacking()

def here(name):
    return str(cached(name, None))

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        try:
            machine(*json.loads(line))
        finally:
            os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files of 50 to 300 kB."""
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, "llama", max_shard_size="300KB", hidden_size=96, intermediate_size=384)
    assert len(sizes_of(directory)) == 5
    return directory


def sizes_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}


class Machines:
    """Processes with a cache of their own each, one after the other."""

    def __init__(self, place: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        self._place = place
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=kept, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, hub: FakeHub, home: Path, *asked: tuple[Any, ...], **settings: str) -> int:
        """The process id of one that answers this."""
        ours = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        line = json.dumps([{**ours, "HF_HUB_DISABLE_XET": "1", **settings}, asked, str(self._place)])
        self._place.unlink(missing_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def end(self) -> list[Any]:
        """What it has answered, at its end."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ended\n"
        said = self._place.read_text()
        assert TOKEN not in said
        return [json.loads(line[2:]) for line in said.splitlines() if line.startswith("= ")]

    def ask(self, hub: FakeHub, home: Path, *asked: tuple[Any, ...], **settings: str) -> list[Any]:
        self.start(hub, home, *asked, **settings)
        found = self.end()
        assert len(found) == len(asked), self._place.read_text()
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    found = Machines(tmp_path_factory.mktemp("answers") / "said.txt")
    yield found
    found.close()


def sent(hub: FakeHub, to: str | None = None) -> dict[str, list[tuple[int, int]]]:
    """What was sent of each weight file, in the order in which it was asked for, to one machine or to all."""
    found: dict[str, list[tuple[int, int]]] = {}
    for each in hub.sent:
        if each.file.endswith(".safetensors") and to in (None, each.to):
            found.setdefault(Path(each.file).name, []).append((each.start, each.stop))
    return found


def test_names_shapes_and_types_are_known_from_headers(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    many = tmp_path / "many"
    many.mkdir()
    save_file(
        {f"a.rather.long.name.{i}": torch.zeros(3, 5, dtype=torch.bfloat16) for i in range(900)},
        many / "adapter_model.safetensors",
    )
    (many / "adapter_config.json").write_text("{}")
    hub.add(NAME, model)
    hub.add("someone/many", many)
    asked = [("known", NAME, "model"), ("known", "someone/many", "adapter_model")]
    found = machines.ask(hub, tmp_path / "hf", *asked)
    for (file_of, shapes, types), files in zip(
        found, (find_weights(model), find_weights(many, "adapter_model")), strict=True
    ):
        weights = FileWeights(files, {key: key for key in files.file_of})
        assert file_of == files.file_of
        assert shapes == {key: list(shape) for key, shape in weights.shapes().items()}
        assert {key: DTYPES[name] for key, name in types.items()} == {
            key: weights.read(key, 0, 0).dtype for key in file_of
        }
    ranges = sent(hub)
    assert ranges.keys() == {*sizes_of(model), "adapter_model.safetensors"}
    assert {name: ranges[name] for name in sizes_of(model)} == dict.fromkeys(sizes_of(model), [(0, 16384)])
    assert len(ranges["adapter_model.safetensors"]) == 2, "the header is longer than what is read at first"
    large = set(sizes_of(model).values())
    assert not large & {path.stat().st_size for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    hub.down = 503
    again = machines.ask(hub, tmp_path / "hf", *asked)
    assert again == found, "what was read once is known while the hub is away"


def test_the_directory_of_a_model_is_found_in_the_cache_without_its_weights(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    """And without files that no run reads."""
    hub.add(NAME, model).files["README.md"] = b"# A model"
    before, _, after = machines.ask(hub, tmp_path / "hf", ("cached", NAME), ("known", NAME, "model"), ("cached", NAME))
    assert before == "None" and after == str(tmp_path / "hf" / "hub" / "models--someone--model" / "snapshots" / COMMIT)


@pytest.mark.parametrize("name", _TOKENIZER_FILES)
def test_whatever_a_tokenizer_is_read_from_is_fetched(name: str) -> None:
    name = name.replace("*", "qwen")
    assert [*filter_repo_objects([name], allow_patterns=_SMALL_FILES)] == [name]


@pytest.mark.slow
def test_exports_ask_for_no_more_weights_than_ranks_have_fetched(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    """Many repositories have the weights once more, in a file that no index names."""
    whole = save_checkpoint(tmp_path / "whole", "llama")
    for name, place in ((NAME, model), ("someone/whole", whole)):
        there = hub.add(name, place)
        there.files["consolidated.safetensors"] = bytes(5000)
        there.large.add("consolidated.safetensors")
        asked, home = ("base", name, COMMIT), tmp_path / place.name
        machines.ask(hub, home, ("known", name, "model"), ("fetch", name, COMMIT, sizes_of(place)))
        hub.sent.clear()
        assert machines.ask(hub, home, asked) == [sorted(sizes_of(place))]
        assert not sent(hub), "they are here"
        hub.down = 503
        assert machines.ask(hub, home, asked) == [sorted(sizes_of(place))]
        hub.down = 0
        assert machines.ask(hub, tmp_path / "other", asked) == [sorted(sizes_of(place))]
        assert sent(hub).keys() == sizes_of(place).keys()


def test_headers_are_read_through_what_sends_files_whole(hub: FakeHub, machines: Machines, tmp_path: Path) -> None:
    """A header longer than what is read at first; of the numbers behind it no more comes than has to."""
    tensors = {f"a.rather.long.name.{i}": torch.zeros(3, 5) for i in range(900)} | {"large": torch.zeros(4_000_000)}
    save_file(tensors, tmp_path / "model.safetensors")
    hub.add(NAME, tmp_path).sends_whole = True
    ((file_of, shapes, _),) = machines.ask(hub, tmp_path / "hf", ("known", NAME, "model"))
    assert file_of.keys() == shapes.keys() == tensors.keys()
    size = sizes_of(tmp_path)["model.safetensors"]
    assert [start for start, _ in sent(hub)["model.safetensors"]] == [0, 0]
    assert all(stop < size for _, stop in sent(hub)["model.safetensors"])


@pytest.mark.slow
def test_a_file_whose_name_is_a_pattern_is_fetched(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    """By us, and where the hub's library fetches it."""
    name = "sub[1].safetensors"
    there = hub.add(NAME, model)
    there.files[name] = there.files[min(sizes_of(model))]
    for large in (set(), {name}):
        there.large |= large
        ((directory, _),) = machines.ask(
            hub, tmp_path / f"hf-{len(large)}", ("fetch", NAME, COMMIT, {name: len(there.files[name])})
        )
        assert (Path(directory) / name).read_bytes() == there.files[name]


def test_a_file_on_the_hub_that_is_not_whole_is_refused(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    there = hub.add(NAME, model)
    name = sorted(there.large)[1]
    there.files[name] = there.files[name][:-1000]
    del hub.add("someone/half", model).files[name]
    broken, half = machines.ask(hub, tmp_path / "hf", ("known", NAME, "model"), ("known", "someone/half", "model"))
    assert f"ModelError: model.path={NAME}: its {name} is not a complete safetensors file" in broken
    assert f"ModelError: model.path=someone/half lacks 1 of its weight files ({name})" in half


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "Expecting"),
        (b'{"a": 1}', "does not say where 'a' is"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}', "the place of 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', "the place of 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "gives 'a' another size than place"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}', "its header is of a file of"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', None),
    ],
)
def test_a_header_is_believed_only_if_it_is_that_of_the_file(header: bytes, rule: str | None) -> None:
    size = 8 + len(header) + 8
    if rule is None:
        assert _parsed(header, size) == {"a": TensorHeader("F32", (2,))}
        return
    with pytest.raises(ValueError, match=rule):
        _parsed(header, size)


def test_each_file_comes_once_and_a_broken_connection_goes_on(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    hub.add(NAME, model)
    hub.breaks_after = 150_000
    sizes = sizes_of(model)
    ((directory, came),) = machines.ask(hub, tmp_path / "hf", ("fetch", NAME, COMMIT, sizes))
    assert came == sum(sizes.values())
    for name, size in sizes.items():
        assert (Path(directory) / name).read_bytes() == (model / name).read_bytes()
        assert sent(hub)[name] == [(at, min(at + 150_000, size)) for at in range(0, size, 150_000)]
    hub.sent.clear()
    (_, headers, _), _ = machines.ask(hub, tmp_path / "hf", ("known", NAME, "model"), ("fetch", NAME, COMMIT, sizes))
    assert not headers, "the files are here"
    assert not sent(hub), "what is here is not asked for again"


def blobs_in(home: Path) -> dict[str, int]:
    """The bytes that are there of each file, by the hash of its content."""
    found = {}
    for path in (home / "hub" / "models--someone--model" / "blobs").glob("*"):
        with suppress(FileNotFoundError):  # renamed meanwhile
            found[path.name.removesuffix(".incomplete")] = path.stat().st_size
    return found


def test_another_start_goes_on_where_a_killed_one_was(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    repository, sizes, home = hub.add(NAME, model), sizes_of(model), tmp_path / "hf"
    repository.seconds_per_piece = 1.0
    process = machines.start(hub, home, ("fetch", NAME, COMMIT, sizes))
    deadline = time.monotonic() + 60
    while not any(blobs_in(home).values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    assert machines.end() == []
    there = blobs_in(home)
    assert 0 < sum(there.values()) < sum(sizes.values())
    repository.seconds_per_piece = 0.0
    again = {"HF_HUB_USER_AGENT_ORIGIN": "again"}
    ((directory, _),) = machines.ask(hub, home, ("fetch", NAME, COMMIT, sizes), **again)
    for name, size in sizes.items():
        assert (Path(directory) / name).read_bytes() == (model / name).read_bytes()
        kept = there.get((Path(directory) / name).resolve().name, 0)
        assert sent(hub, "again").get(name, []) == ([] if kept == size else [(kept, size)])
    assert not list(home.rglob("*.incomplete"))


def test_what_a_crash_has_left_damaged_is_fetched_again_at_once(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    there, sizes, home = hub.add(NAME, model), sizes_of(model), tmp_path / "hf"
    name = min(sizes)
    partial_of(there, name, home).write_bytes(bytes(100_000))
    ((directory, came),) = machines.ask(hub, home, ("fetch", NAME, COMMIT, sizes))
    assert (Path(directory) / name).read_bytes() == there.files[name]
    assert sent(hub)[name] == [(100_000, sizes[name]), (0, sizes[name])] and came == sum(sizes.values())


def test_what_comes_damaged_is_said_and_fetched_again_by_another_start(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    there, sizes, home = hub.add(NAME, model), sizes_of(model), tmp_path / "hf"
    name = min(sizes)
    there.lists[name] = "0" * 64
    (damaged,) = machines.ask(hub, home, ("fetch", NAME, COMMIT, {name: sizes[name]}))
    assert "TransientError" in damaged and "what came of it is not what the hub has" in damaged
    assert sent(hub)[name] == [(0, sizes[name])] and not list(home.rglob("*.incomplete"))
    del there.lists[name]
    ((directory, _),) = machines.ask(hub, home, ("fetch", NAME, COMMIT, {name: sizes[name]}))
    assert (Path(directory) / name).read_bytes() == there.files[name]


def partial_of(there: Repository, name: str, home: Path) -> Path:
    """Where a part of a file is kept."""
    blobs = home / "hub" / "models--someone--model" / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    return blobs / f"{hashlib.sha256(there.files[name]).hexdigest()}.incomplete"


def test_what_a_mirror_lists_or_sends_stays_within_the_cache_and_its_size(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    """A SHA-256 that is a path, a link that somebody has left in a shared cache, and an answer longer than the file."""
    there, sizes, home = hub.add(NAME, model), sizes_of(model), tmp_path / "hf"
    name, victim = min(sizes), tmp_path / "victim.incomplete"
    victim.write_text("precious")
    digests = (str(tmp_path / "victim"), "../" * 5 + "victim", "A" * 64, "0" * 63)
    there.lists |= zip(sizes, digests, strict=False)
    asked = [("fetch", NAME, COMMIT, {each: sizes[each]}) for each in there.lists]
    for each, refused in zip(there.lists, machines.ask(hub, home, *asked), strict=True):
        assert f"lists '{there.lists[each][:40]}" in refused and "HF_ENDPOINT" in refused and each in refused
    assert len(there.lists) == len(digests)
    there.lists.clear()
    fetch = ("fetch", NAME, COMMIT, {name: sizes[name]})
    partial_of(there, name, home).symlink_to(victim)
    there.sends_more = bytes(64 << 20)
    ((directory, came),) = machines.ask(hub, home, fetch)
    assert (Path(directory) / name).read_bytes() == there.files[name] and came == len(there.files[name])
    assert sent(hub)[name][-1][1] < 48 << 20, "the rest was not asked for"
    assert victim.read_text() == "precious" and not list(home.rglob("*.incomplete"))


@pytest.mark.slow
def test_hashing_is_no_silence(hub: FakeHub, machines: Machines, tmp_path: Path) -> None:
    """Of a file that takes longer to hash than all ranks would wait without a byte."""
    hub.add(NAME, save_checkpoint(tmp_path / "model", "llama"))
    size = sizes_of(tmp_path / "model")["model.safetensors"]
    assert size / 8_000 * 0.25 > 2.5
    values = make_config(tmp_path, cluster={"start_hang_minutes": 0.04}).model_dump()
    assert machines.ask(hub, tmp_path / "hf", ("slow", NAME, values)) == [[]]


@pytest.mark.slow
def test_refusals_name_the_machine_and_its_cache_before_anything_is_fetched(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    hub.add(NAME, model)
    sizes, home = sizes_of(model), tmp_path / "hf"
    larger = {**sizes, min(sizes): 10**15}
    full, beforehand, fits = machines.ask(
        hub, home, ("fetch", NAME, COMMIT, larger), ("why", NAME, COMMIT, larger), ("why", NAME, COMMIT, sizes)
    )
    full, beforehand = (re.sub(r"room for [\d.,]+ GB", "room for some", each) for each in (full, beforehand))
    assert full == beforehand and fits is None  # but for what other tests have written meanwhile
    assert f"ModelError: model.path={NAME}: its weights need 1,000,000.0 GB more on " in full
    assert f"HF_HOME={home} has room for some" in full
    (offline,) = machines.ask(hub, home, ("fetch", NAME, COMMIT, sizes), HF_HUB_OFFLINE="1")
    assert "ModelError" in offline and "HF_HUB_OFFLINE is set on " in offline and f"HF_HOME={home}" in offline
    (stranger,) = machines.ask(hub, home, ("fetch", NAME, COMMIT, sizes), HF_TOKEN="hf_anotherToken")
    assert "ModelError" in stranger and "check the name, or set HF_TOKEN" in stranger and "hf_another" not in stranger
    assert not hub.sent
    for file in home.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


def test_a_hub_that_is_down_for_a_moment_is_not_taken_for_a_refusal(
    hub: FakeHub, model: Path, machines: Machines, tmp_path: Path
) -> None:
    """Exit code 1, after which the run is tried again; 2 ends `cluster/again.sh` for good."""
    hub.add(NAME, model)
    asked = ("why", NAME, COMMIT, sizes_of(model))
    hub.down = 503
    (away,) = machines.ask(hub, tmp_path / "hf", asked)
    hub.down = 0
    (stranger,) = machines.ask(hub, tmp_path / "hf", asked, HF_TOKEN="hf_anotherToken")
    assert "TransientError: " in away and "the hub cannot be reached" in away
    assert "ModelError: " in stranger and "check the name, or set HF_TOKEN" in stranger


def test_nodes_whose_reasons_pass_are_no_wrong_request() -> None:
    pytest.importorskip("ray")
    from raytune_fsdp.launch.ray.nodes.hub_reach import refusal

    away, full = TransientError("the hub cannot be reached"), ModelError("no room")
    assert (refusal({"a": away}).exit_code, refusal({"a": full}).exit_code) == (1, 2)
    both = refusal({"a": away, "b": away, "c": away})
    assert both.exit_code == 1 and str(both) == (
        "no node that could hold a rank can have the weights: a: the hub cannot be reached (and 2 more nodes are no "
        "better off)"
    )
    mixed = refusal({"a": away, "b": full})
    assert mixed.exit_code == 2 and "weights: b: no room (and 1 more node is no better off)" in str(mixed)
