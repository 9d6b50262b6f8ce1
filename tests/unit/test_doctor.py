"""`raytune-fsdp doctor` without Ray: it finds what is planted, hangs on nothing, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.shared_storage import put_token
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict.host import kept_at_once
from raytune_fsdp.tools.doctor import checkup, cluster, deadline, machines, network, node, services, storage, writing
from raytune_fsdp.tools.doctor import checkup as at_start
from raytune_fsdp.tools.doctor import machines as kernels
from raytune_fsdp.tools.doctor.finding import Finding, page, refused
from tests.config_text import dump_config
from tests.runs import LLAMA, make_config

ROOT = Path(__file__).parents[2]
REQUIRED = machines.own_requirements()


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return node.look()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine is slow at is waited for."""
    monkeypatch.setattr(deadline, "SECONDS", 100.0)
    monkeypatch.setattr(deadline, "HANGS_SECONDS", 100.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports torch or Ray is named, and not waited for."""
    monkeypatch.setattr(deadline, "SECONDS", 0.0)
    monkeypatch.setattr(deadline, "_LEAST_SECONDS", 2.0)


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = [each for each in findings if each.check == check and each.status != "ok"]
    return found


def everything(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)

        do_POST = do_PUT = do_HEAD = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def says(status: int, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(asked: BaseHTTPRequestHandler) -> None:
        asked.send_response(status)
        asked.send_header("Content-Length", str(len(body)))
        asked.end_headers()
        asked.wfile.write(body)

    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


PATIENT = """
import sys
from raytune_fsdp.cli.main import main
from raytune_fsdp.tools.doctor import deadline
deadline.SECONDS = deadline.HANGS_SECONDS = 100.0
sys.exit(main())
"""


def command(
    config: FinetuneConfig, directory: Path, *, before: str = "", patient: bool = False, **environment: str
) -> tuple[int, Any, float]:
    """`raytune-fsdp doctor` as a user calls it: exit code, its JSON, its seconds. `patient`: it waits for what only a
    busy machine is slow at, the imports of six seconds."""
    file = directory / "config.yaml"
    file.write_text(dump_config(config))
    program = f"-c {shlex.quote(PATIENT)}" if patient else "-m raytune_fsdp.cli.main"
    line = f"{before} exec {sys.executable} {program} doctor --json --config {file}"
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=150,
        env={**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), time.monotonic() - began


def of(found: Any, check: str) -> dict[str, str]:
    (only,) = [each for each in found["findings"] if each["check"] == check and each["status"] != "ok"]
    assert only["fix"]
    result: dict[str, str] = only
    return result


@pytest.mark.slow
def test_a_healthy_machine_passes_and_stays_as_it_was(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking={"console": False, "mlflow": {"enabled": True}})
    (tmp_path / "config.yaml").touch()
    before = everything(tmp_path)
    code, found, _ = command(config, tmp_path, patient=True)
    wrong = {each["check"] for each in found["findings"] if each["status"] != "ok"}
    assert code == 0 and wrong <= {"storage"}, found  # which may be slow here
    assert {each["check"] for each in found["findings"]} >= {
        "versions", "GPUs", "limits", "attention", "resources", "config", "run", "model", "storage", "room", "MLflow",
    }  # fmt: skip
    (room,) = [each["found"] for each in found["findings"] if each["check"] == "room"]
    assert "a checkpoint takes " in room, "threads that import the same must not keep its size from being known"
    assert everything(tmp_path) == before


@pytest.mark.usefixtures("hasty")
def test_without_a_config_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    facts = checkup.Checkup(None).findings()
    assert {"versions", "limits", "attention"} <= {each.check for each in facts}
    assert main(["doctor", "--network"]) == 2
    assert "--network measures between the workers of a run: add --config FILE" in capsys.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"storage": "/proc/runs"})
    found = only(checkup.Checkup(config).findings(), "storage")
    assert "cannot write to /proc/runs/run" in found.found and "set run.storage" in found.fix


def test_checkpoints_elsewhere_are_measured_there(tmp_path: Path) -> None:
    config = make_config(tmp_path, checkpoint={"storage": str(tmp_path / "elsewhere"), "every": 5})
    found = [each.found for each in written(config, 10**15)]
    assert "run.storage" in found[0] and "checkpoints go elsewhere" in found[1]
    assert "checkpoint.storage" in found[2] and "3 more checkpoints come" in found[3]
    assert not (tmp_path / "elsewhere").exists()


def sizes(config: FinetuneConfig, checkpoint: int | None) -> storage.CheckpointSizes:
    return storage.CheckpointSizes(checkpoint, storage.more_of(config))


def written(config: FinetuneConfig, checkpoint: int | None) -> list[Finding]:
    token = put_token(RunDir.of(config).path, "a test")
    try:
        return storage.judge_writing(
            config, storage.measure(config, token, deadline.Asked()), sizes(config, checkpoint)
        )
    finally:
        storage.clean(token, RunDir.of(config))
        assert not Path(config.run.storage).exists()


def test_a_node_whose_mount_hangs_says_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = put_token(tmp_path / "run", "a test")
    seen = node.look(False, writing.as_text(token))
    assert seen["storage"][0] is None and seen["storage"][1] > 0
    token.remove(refused=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(writing, "from_node", lambda *_, **__: time.sleep(60))
    monkeypatch.setattr(node, "_STORAGE_SECONDS", 0.2)
    facts = node.look(False, writing.as_text(token))
    assert facts["python"] == seen["python"] and facts["storage"][0].startswith(node.NO_ANSWER)
    found: list[Finding] = []
    cluster._storage(found.append, {"id": facts["storage"]}, {"id": "a"}, 30)
    assert [(each.status, each.check) for each in found] == [("problem", "shared")] and "umount" in found[0].fix


def test_slow_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: time.sleep(os.fstat(handle).st_size / 4e6))
    began = time.monotonic()
    found = only(written(make_config(tmp_path), None), "storage")
    assert found.status == "problem" and re.search(r"writes [34] MB/s", found.found) and "faster storage" in found.fix
    assert time.monotonic() - began < 5


def test_too_little_room_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    monkeypatch.setattr(storage, "write_speed", lambda *_: 1e9)
    config = make_config(tmp_path, checkpoint={"keep_last": 2, "every": 5})
    assert only(written(config, 2 * 10**9), "room").status == "problem"
    found = only(written(config, 4 * 10**8), "room")  # two are kept, and the third is written before one goes
    assert found.status == "warning" and "3 more checkpoints come" in found.found
    assert all(each.status == "ok" for each in written(config, 3 * 10**8))
    assert all(each.status == "ok" for each in written(config, None))


@pytest.mark.parametrize(
    "chosen", [{}, {"every": 5}, {"every": 1, "keep_last": None}, {"every": 5, "keep_last": 2, "keep_every": 10}]
)
def test_room_is_asked_for_as_many_checkpoints_as_a_start_asks_for(tmp_path: Path, chosen: dict[str, Any]) -> None:
    config = make_config(tmp_path, checkpoint=chosen)
    many = sum(kept_at_once(config.checkpoint, resolve(config, 1)).values())
    assert storage.judge_room(many * 10**9, sizes(config, 10**9)).status == "ok"
    found = storage.judge_room(many * 10**9 - 1, sizes(config, 10**9))
    assert found.status == ("problem" if many == 1 else "warning"), found
    assert f" {many} more checkpoint{'s' * (many > 1)} come{'s' * (many == 1)} before one goes" in found.found


def test_room_for_a_run_of_a_length_that_is_not_known(tmp_path: Path) -> None:
    """One is certain; and a byte that is lacking is seen."""
    config = make_config(tmp_path, train={"max_steps": None, "epochs": 2}, checkpoint={"every": 5})
    found = storage.judge_room(10**9, sizes(config, 10**9))
    assert found.status == "ok" and "known once the data is counted" in found.found
    found = storage.judge_room(2 * 10**9 - 1, sizes(config, 2 * 10**9))
    assert found.status == "problem" and "1,999,999,999 bytes free; a checkpoint takes 2,000,000,000" in found.found


def test_what_another_doctor_writes_is_left_alone(tmp_path: Path) -> None:
    place = RunDir.of(make_config(tmp_path))
    token, other = put_token(place.path, "a test"), put_token(place.path, "another")
    end = "1" * 32
    own, newer, old, users = (
        place.path / name
        for name in (
            f"{writing.own_prefix(token)}{end}", f"{writing.own_prefix(other)}{end}", f".doctor-{end}-{end}",
            ".doctor-appointments.txt",
        )
    )  # fmt: skip
    for each in (own, newer, old, users):
        each.touch()
        os.utime(each, (time.time() - 7200 * (each in (old, users)),) * 2)
    storage.clean(token, place)
    assert not own.exists() and not old.exists() and newer.exists()
    storage.clean(other, place)
    assert [*place.path.iterdir()] == [users], "a name of nobody's pattern"


def test_how_large_a_checkpoint_is(tmp_path: Path) -> None:
    from raytune_fsdp.model.network import build_network, count_parameters, load_architecture

    config = make_config(tmp_path, LLAMA, parallel={"precision": "bf16"})
    numbers = count_parameters(build_network(load_architecture(config.model, None), config)).total
    assert services.checkpoint_bytes(config) == 12 * numbers  # fp32 weights and two moments


def test_checkpoints_that_take_too_long() -> None:
    assert storage.judge_speed("x", 5e8, 10**12, 30).status == "problem"
    assert storage.judge_speed("x", 5e8, 10**11, 30).status == "ok"
    assert storage.judge_speed("x", 5e7, None, 30).status == "warning"


@pytest.mark.slow
def test_the_lock_of_a_process_that_is_gone_and_of_one_that_lives(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    lock = {"host": "node-a", "pid": 7, "since": "2026-01-01T00:00:00+00:00", "boot": "another", "token": "t"}
    place.lock.write_text(json.dumps(lock))
    found = only(storage.check_lock(config), "run")
    assert found.status == "warning" and "process 7 on node-a" in found.found, found
    assert place.lock.exists()

    def beat() -> None:
        for count in range(40):
            place.beat.write_text(f"t {count}")
            time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()
    found = only(storage.check_lock(config), "run")
    assert found.status == "problem" and "another command works on" in found.found and "run.name" in found.fix


def mlflow_at(directory: Path, uri: str) -> list[Finding]:
    config = make_config(directory, tracking={"console": False, "mlflow": {"enabled": True, "uri": uri}})
    return services.check_mlflow(config)


@pytest.fixture
def mlflow_env(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_an_mlflow_server_that_is_down_or_is_none(tmp_path: Path, mlflow_env: None) -> None:
    down = only(mlflow_at(tmp_path, f"http://127.0.0.1:{free_port()}"), "MLflow")
    assert "does not answer" in down.found and down.fix.startswith("start it"), down
    with answering(says(200, b"<html>Welcome to nginx!</html>")) as address:
        other = only(mlflow_at(tmp_path, address), "MLflow")
        assert "set tracking.mlflow.uri to an MLflow server" in other.fix, other
    with answering(says(401, b"who are you?")) as address:
        assert "MLFLOW_TRACKING_USERNAME" in only(mlflow_at(tmp_path, address), "MLflow").fix
    with answering(says(200, b'{"experiments": [{"experiment_id": "0", "name": "Default"}]}')) as address:
        assert [each.status for each in mlflow_at(tmp_path, address)] == ["ok"]


@pytest.mark.slow
def test_an_mlflow_server_that_says_nothing_costs_seconds(tmp_path: Path) -> None:
    with answering(lambda _: time.sleep(60)) as address:
        tracking = {"console": False, "mlflow": {"enabled": True, "uri": address}}
        code, found, seconds = command(make_config(tmp_path, tracking=tracking), tmp_path)
    assert code == 2 and "has not answered for 8 s" in of(found, "MLflow")["found"]
    assert seconds < 20


def test_an_mlflow_database_is_looked_at_and_not_made(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking={"mlflow": {"enabled": True}})
    assert services.check_mlflow(config)[0].status == "ok" and not Path(config.run.storage).exists()
    Path(config.run.storage).mkdir()
    (Path(config.run.storage) / "mlflow.db").write_text("something else")
    assert "is not an SQLite database" in only(services.check_mlflow(config), "MLflow").found


def write_model(directory: Path, *, lacking: bool) -> Path:
    """A model in two files, the second of which may not have arrived."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA))
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for key, name in names.items():
        if not (lacking and key == "b"):
            save_file({key: torch.zeros(2)}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


def with_model(directory: Path, path: str) -> FinetuneConfig:
    tokenizer = make_config(directory).model.tokenizer
    return FinetuneConfig.model_validate(
        make_config(directory).model_dump() | {"model": {"path": path, "tokenizer": tokenizer}}
    )


def test_a_model_that_lacks_a_file(tmp_path: Path) -> None:
    whole = with_model(tmp_path, str(write_model(tmp_path / "whole", lacking=False)))
    assert "2 files of weights" in services.check_model(whole)[0].found
    found = only(services.check_model(with_model(tmp_path, str(write_model(tmp_path / "m", lacking=True)))), "model")
    assert "model-00002-of-00002.safetensors" in found.found and found.fix == "download the model again"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    found = only(services.check_model(with_model(tmp_path, str(tmp_path / "adapter"))), "model")
    assert "is an adapter" in found.found and found.fix.startswith("set method.type=lora, method.adapter=")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "incomplete", "complete"])
def test_a_hub_that_cannot_be_reached(tmp_path: Path, kind: str) -> None:
    """What the cache has decides."""
    commit = "0" * 40
    cache = tmp_path / "hf" / "hub" / "models--someone--model"
    if kind != "none":
        write_model(cache / "snapshots" / commit, lacking=kind == "incomplete")
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(commit)
    environment = {
        "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
    }  # fmt: skip
    code, found, _ = command(with_model(tmp_path, "someone/model"), tmp_path, patient=True, **environment)
    if kind == "complete":
        assert code == 0, found
        return
    said = of(found, "model")
    assert code == 2 and "the hub cannot be reached" in said["found"] and "hf download someone/model" in said["fix"]
    assert ("not complete in the local cache" in said["found"]) == (kind == "incomplete")


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_attention_that_is_not_installed(tmp_path: Path) -> None:
    asked = {"attention": "flash_attention_2"}
    config = make_config(tmp_path, model=asked)
    found = only(checkup.Checkup(config).findings(), "attention")
    assert "flash-attn is not installed" in found.found and "model.attention=auto" in found.fix
    (found,) = kernels.check_kernels("flash_attention_2", device="cpu", elsewhere=True)
    assert found.status == "ok", "on the head of a cluster"


def test_attention_on_nodes_with_gpus() -> None:
    there = {"torch": "2.13.0", "flash-attn": "2.8.0"}
    assert "flash-attn, then torch's varlen_attn" in kernels.check_packages("auto", there, "node a").found
    assert kernels.check_packages("flash_attention_2", there, "node a").status == "ok"
    found = kernels.check_packages("flash_attention_4", there, "node a")
    assert found.status == "problem" and "pip install flash-attn-4 there" in found.fix


def test_versions_that_do_not_go_together(here: dict[str, Any]) -> None:
    assert machines.check_versions(here, REQUIRED)[0].status == "ok"
    packages = {**here["packages"], "transformers": "4.57.0", "peft": "0.9.0"}
    transformers, peft = machines.check_versions({**here, "packages": packages}, REQUIRED)
    assert "transformers 4.57.0" in transformers.found and transformers.status == "problem"
    assert transformers.fix.startswith("pip install 'transformers") and ">=5.17" in transformers.fix
    assert peft.status == "warning" and "peft 0.9.0" in peft.found
    del packages["torch"]
    assert "torch is not installed" in machines.check_versions({**here, "packages": packages}, REQUIRED)[0].found


def test_nodes_that_are_not_like_this_machine(here: dict[str, Any]) -> None:
    assert machines.check_same({"a": here}, here)[0].status == "ok"
    torch = {**here, "packages": {**here["packages"], "torch": "2.11.0+cu130"}}
    code = {**here, "own": (here["own"][0], "0" * 10)}
    none = {**here, "own": None}
    python = {**here, "python": "3.9.2"}
    extra = {**here, "packages": {**here["packages"], "flash-attn": "2.8.0"}}
    found = machines.check_same({"t": torch, "c": code, "n": none, "p": python, "e": extra}, here)
    assert [each.status for each in found] == ["problem"] * 4 + ["warning"]
    assert f"torch 2.11.0+cu130 (here {here['packages']['torch']})" in found[0].found
    assert f"torch=={here['packages']['torch']}" in found[0].fix
    assert "with other code" in found[1].found and "the same commit" in found[1].fix
    assert "raytune_fsdp is not there" in found[2].found
    assert f"Python 3.9.2 (here {here['python']})" in found[3].found
    assert "pip uninstall flash-attn" in found[4].fix


def test_the_hash_of_the_code_is_that_of_this_tree(here: dict[str, Any]) -> None:
    from raytune_fsdp import __version__

    assert here["own"][0] == __version__ and len(here["own"][1]) == 10


@pytest.mark.slow
def test_too_little_shared_memory_and_too_few_files(tmp_path: Path, here: dict[str, Any]) -> None:
    assert machines.check_limits(here, "here") == []
    docker = machines.check_limits({**here, "shm": 64 << 20, "open_files": (1024, 4096)}, "here")
    assert [each.status for each in docker] == ["problem"] and "64 MiB" in docker[0].found
    assert "--shm-size=8g" in docker[0].fix
    code, found, _ = command(make_config(tmp_path), tmp_path, before="ulimit -n 512 &&")
    said = of(found, "limits")
    assert code == 2 and "may open 512 files" in said["found"] and "ulimit -Hn 65536" in said["fix"]


def test_a_start_warns_of_what_is_wrong_here_and_waits_for_nothing(
    here: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the command that starts a run, before it is refused for its own mistakes."""
    go_on = threading.Event()

    def look(try_torch: bool = True) -> dict[str, Any]:
        assert not try_torch and go_on.wait(30)
        return {**here, "shm": 64 << 20}

    monkeypatch.setattr(at_start.node, "look", look)
    monkeypatch.setattr("raytune_fsdp.launch.finetune.finetune", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--config", "demo"])
    go_on.set()
    deadline = time.monotonic() + 10
    while "/dev/shm has 64 MiB" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "/dev/shm has 64 MiB" in caplog.text and "to mend it: start the container with --shm-size=8g" in caplog.text


def test_clocks(here: dict[str, Any]) -> None:
    asked, now = 1000.0, 1003.0
    right = cluster._offset((1001.0, 1002.5), asked, now)
    ahead = cluster._offset((1401.0, 1402.0), asked, now)
    behind = cluster._offset((990.0, 991.0), asked, now)
    assert (right, ahead, behind) == (0.0, 399.0, -10.0)
    assert machines.check_clocks({"a": right})[0].status == "ok"
    found = machines.check_clocks({"a": right, "b": ahead, "c": behind})
    assert [each.status for each in found] == ["problem", "warning"]
    assert "node b: its clock is 399 s ahead" in found[0].found and "10 s behind" in found[1].found


SMI = """#!/bin/sh
echo "Tesla T4, 15360, 550.54.15, 7.5"
"""


def test_gpus_without_bf16_and_a_torch_that_cannot_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = node.look()
    assert facts["gpus"] == [{"name": "Tesla T4", "mib": "15360", "driver": "550.54.15", "capability": "7.5"}]
    (found,) = machines.check_bf16(facts, "here", "bf16")
    assert "Tesla T4 has no bf16" in found.found and "parallel.precision=fp16" in found.fix
    assert not machines.check_bf16(facts, "here", "fp16")
    (found,) = machines.check_gpus(facts, "here", device="cuda")  # torch is for CPUs here
    assert "1 x Tesla T4 (15 GiB), driver 550.54.15, but torch cannot use them" in found.found
    seen = {**facts, "torch": {"count": 1, "cuda": "13.0", "nccl": "2.28.3"}}
    (found,) = machines.check_gpus(seen, "here", device="cuda")
    assert found.status == "ok" and "torch for CUDA 13.0, NCCL 2.28.3" in found.found


def test_a_gpu_of_which_the_driver_does_not_say_everything() -> None:
    """One that shares the host's memory has no size of its own."""
    gpu = {"name": "NVIDIA GB10", "mib": "[N/A]", "driver": "580.95.05", "capability": "[N/A]"}
    facts = {"gpus": [gpu], "smi": None, "torch": {"count": 1, "cuda": "13.0", "nccl": "2.28.3"}}
    (found,) = machines.check_gpus(facts, "here", device="cuda")
    assert found.status == "ok" and "1 x NVIDIA GB10 (size not known), driver 580.95.05" in found.found
    assert not machines.check_bf16(facts, "here", "bf16") and not machines.check_bf16(facts, "here", "fp8")


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(node, "_nvidia_is_there", lambda: True)
    (found,) = machines.check_gpus(node.look(), "here", device=None)
    assert found.status == "problem" and "Driver/library version mismatch" in found.found
    monkeypatch.setattr(node, "_nvidia_is_there", lambda: False)  # the image of a machine of CPUs has the driver
    assert machines.check_gpus(node.look(), "here", device=None)[0].status == "ok"
    assert machines.check_gpus(node.look(), "here", device="cuda")[0].status == "problem"


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_no_gpu_where_one_is_asked_for(tmp_path: Path) -> None:
    findings = checkup.Checkup(make_config(tmp_path, cluster={"device": "cuda"})).findings()
    assert only(findings, "GPUs").status == only(findings, "resources").status == "problem"
    assert "cluster.device=cpu" in only(findings, "resources").fix


def test_an_object_store_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "someone")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    denied = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with answering(says(403, denied)) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        found = only(storage.check_object_store("s3://bucket/place"), "store")
    assert "refuses" in found.found and "AWS_ACCESS_KEY_ID" in found.fix
    (good,) = storage.check_object_store("memory://place")
    assert good.status == "ok"
    import fsspec

    assert not fsspec.filesystem("memory").find("/place")


@pytest.mark.slow
def test_an_object_store_that_says_nothing_costs_seconds(tmp_path: Path) -> None:
    """Also at the end of the process, where pyarrow would wait for it."""
    config = make_config(tmp_path, checkpoint={"storage": "s3://bucket/place"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        code, found, seconds = command(config, tmp_path, **environment)
    assert code == 2 and "AWS_ENDPOINT_URL" in of(found, "store")["fix"] and seconds < 20


def test_a_network_that_is_slower_than_promised() -> None:
    assert network.parse_speed("400Gbps") == 4e11 and network.parse_speed("50 GB/s") == 4e11
    with pytest.raises(ConfigError, match="400Gbps"):
        network.parse_speed("fast")
    ranks = [
        {"node": each, "backend": "nccl", "speeds": {"all-reduce": 3.3e11, "all-gather": speed}}
        for each, speed in (("a", 3.3e11), ("b", 4e10))
    ]
    reduce, gather = network.judge(ranks, 4e11)
    assert reduce.status == "ok" and "82% of 400.0 Gbit/s" in reduce.found  # 80 to 85 % is what a good one gives
    assert gather.status == "problem" and "10% of 400.0 Gbit/s" in gather.found and "NCCL_DEBUG" in gather.fix
    assert {each.status for each in network.judge(ranks, None)} == {"ok"}
    assert network.judge(ranks[:1] * 2, 4e11)[-1].status == "warning"


def test_messages_of_refusals_are_cut_before_the_way_out() -> None:
    found = refused("x", ConfigError("run.a=1: it is wrong (really; wrong); set it to 2"))
    assert (found.found, found.fix) == ("run.a=1: it is wrong (really; wrong)", "set it to 2")
    found = refused("x", ConfigError("run.storage=/a: it is not. Mount it: set run.storage, or not (a; b)"))
    assert found.fix == "Mount it: set run.storage, or not (a; b)"


def test_the_page_fits_and_shows_no_secret() -> None:
    long = Finding("storage", "problem", "word " * 60 + "http://me:secret@host/x", "fix " * 40)
    text = page([long, Finding("x", "ok", "fine")], "doctor")
    assert max(map(len, text.splitlines())) <= 100 and "secret" not in text
    assert text.splitlines()[-1] == "1 problem, 0 warnings, 1 ok"
