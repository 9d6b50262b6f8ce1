"""Checkpoints in an object store that throttles: a real S3 protocol, three of ten requests refused."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("boto3")
pytest.importorskip("moto")

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from raytune_fsdp.checkpoint.catalogue import committed, newest
from raytune_fsdp.checkpoint.location import storage_at
from tests.checkpoints import tensors_in
from tests.distributed.test_branching import begin
from tests.ranks import resident_ranks, run_ranks
from tests.runs import GPT2, make_config, trajectory

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class Throttling:
    """An application that refuses some requests, as S3 does when it is busy."""

    def __init__(self, app: Any, share: float) -> None:
        self._app = app
        self._share = share
        self._chance = random.Random(1)
        self._lock = threading.Lock()
        self.refused = self.asked = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            refuse = self._chance.random() < self._share
            self.asked += 1
            self.refused += refuse
        if not refuse:
            found: Iterable[bytes] = self._app(environ, start_response)
            return found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))])
        return [SLOW_DOWN]


@pytest.fixture(scope="module")
def busy() -> Iterator[Throttling]:
    app = Throttling(DomainDispatcherApplication(create_backend_app), 0.0)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
    app._share = 0.3
    yield app
    server.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


# Most of the time is spent waiting for a store that refuses.
pytestmark = pytest.mark.slow

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 12}


def test_save_kill_resume_and_prune(busy: Throttling, tmp_path: Path) -> None:
    whole = trajectory(make_config(tmp_path, GPT2, train=TRAIN), 2)
    storage = {"storage": "s3://bucket/some where", "every": 3, "keep_last": 2, "asynchronous": False}
    config = make_config(tmp_path, GPT2, run={"name": "remote"}, train=TRAIN, checkpoint=storage)
    root = "s3://bucket/some where/remote/checkpoints"
    assert trajectory(config, 2, stop_after=7)[-1]["step"] == 7
    assert [found.step for found in committed(root)] == [6, 7]
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(train_and_die_while_saving, 2, config.model_dump())
    assert [found.step for found in committed(root)] == [6, 7]
    left = set(storage_at(root).sizes(""))
    assert any("step-00000009" in path for path in left), "what was being written is there, and is no checkpoint"
    assert trajectory(config, 2) == whole
    assert [found.step for found in committed(root)] == [9, 12]
    left = set(storage_at(root).sizes(""))
    assert {path.split("/")[0] for path in left} == {found.name for found in committed(root)}
    assert busy.refused > 0.2 * busy.asked
    from raytune_fsdp.cli.export import main as export

    for number, source in enumerate((Path(config.run.storage) / "remote", committed(root)[-1].path)):
        assert export([str(source), str(tmp_path / f"export-{number}"), "--dtype", "trained"]) == 0
        exported = safetensors.torch.load_file(tmp_path / f"export-{number}" / "model.safetensors")
        stored = tensors_in(committed(root)[-1])
        assert exported and all(torch.equal(tensor, stored[f"model.{name}"]) for name, tensor in exported.items())
    assert not (Path(config.run.storage) / "remote" / "checkpoints").exists()
    # Another run begins with it.
    model = {"init": "pretrained", "architecture": None, "tokenizer": None, "path": committed(root)[-1].path}
    branch = make_config(tmp_path, run={"name": "branch"}, model=model, train={**TRAIN, "max_steps": 1})
    wanted = {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}
    for _, weights, step in resident_ranks(begin, 2, branch.model_dump()):
        assert step == 1 and all((weights[name] == tensor.numpy()).all() for name, tensor in wanted.items())


def test_a_fork_of_a_run_in_a_store(busy: Throttling, tmp_path: Path) -> None:
    """Its parent goes on meanwhile, and prunes what is not pinned."""
    storage = {"storage": "s3://bucket/forks", "every": 2, "keep_last": 2, "asynchronous": False}
    whole = trajectory(make_config(tmp_path, GPT2, train=TRAIN), 1)
    base = make_config(tmp_path, GPT2, run={"name": "base"}, train=TRAIN, checkpoint=storage)
    trajectory(base, 1, stop_after=4)
    fork = {"name": "fork", "fork": {"run": "base", "step": 2}}
    config = make_config(tmp_path, GPT2, run=fork, train=TRAIN, checkpoint=storage)
    trajectory(config, 1, stop_after=4)
    trajectory(base, 1)
    assert [found.step for found in committed("s3://bucket/forks/base/checkpoints")] == [2, 10, 12]
    assert trajectory(config, 1) == whole[2:]
    root = "s3://bucket/forks/fork/checkpoints"
    first, last = committed(root)
    assert not storage_at(root).remove(first.name, lambda: True) and committed(root) == [first, last]
    assert storage_at(root).remove(first.name) and committed(root) == [last]


def train_and_die_while_saving(values: dict[str, Any]) -> None:
    """Rank 1 is killed when its file is with the store."""
    import signal

    import torch
    import torch.distributed as dist

    from raytune_fsdp.checkpoint import save_in_flight
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.worker import work
    from tests.runs import prepare_on_rank0

    write = save_in_flight.write_pieces

    def write_and_die(*arguments: Any, **more: Any) -> Any:
        found = write(*arguments, **more)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    save_in_flight.write_pieces = write_and_die
    config = FinetuneConfig.model_validate(values)
    work(config, *prepare_on_rank0(config), torch.device("cpu"), lambda: None)


def test_small_pieces_are_asked_for_together(busy: Throttling) -> None:
    """A hundred reads of one file, some of them across the borders of what was asked for."""
    busy._share = 0.0
    content = random.Random(2).randbytes(9 << 20)
    storage = storage_at("s3://bucket/pieces")
    draft = storage.draft("step-00000001.a1", 1)
    with draft.create("file") as sink:
        sink.write(memoryview(content))
    asked = busy.asked
    chance = random.Random(3)
    offsets = sorted(chance.randrange(len(content) - 60_000) for _ in range(100))
    with storage.open("step-00000001.a1", "file") as source:
        for offset in [*offsets, *offsets[:3]]:
            size = chance.choice([1, 4, 60_000])
            target = bytearray(size)
            source.read_into(offset, memoryview(target))
            assert target == content[offset : offset + size]
        whole = bytearray(len(content))
        source.read_into(0, memoryview(whole))
        assert whole == content
        for offset, size in ((len(content) - 3, 4), (len(content) + 1, 1), (1, len(content))):
            with pytest.raises(OSError):
                source.read_into(offset, memoryview(bytearray(size)))
    busy._share = 0.3
    assert busy.asked - asked < 40, "not a request a piece"


def test_damage_is_set_aside(busy: Throttling, tmp_path: Path) -> None:
    storage = {"storage": "s3://bucket/damaged", "every": 2, "keep_last": None, "asynchronous": False}
    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 4}, checkpoint=storage)
    whole = trajectory(config, 1)
    root = "s3://bucket/damaged/run/checkpoints"
    old, new = committed(root)
    client = boto3.client("s3", region_name="us-east-1", config=boto3.session.Config(retries={"max_attempts": 20}))
    (key,) = [
        each["Key"]
        for each in client.list_objects_v2(Bucket="bucket", Prefix=f"damaged/run/checkpoints/{new.name}")["Contents"]
        if each["Key"].endswith(".distcp")
    ]
    content = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket="bucket", Key=key, Body=bytes(content))
    assert newest(root, hashes=True)[0] == old
    assert newest(root, hashes=False)[0] == new
    assert trajectory(config, 1) == whole
    assert [found.step for found in committed(root)] == [2, 4]
    assert storage_at(root).has_damaged()
    assert tensors_in(committed(root)[-1])
