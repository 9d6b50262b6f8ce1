"""A sweep on Ray: one for all of its trials, which ends with it, also where its command is killed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytune_fsdp.config.load import load_config
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.launch.ray.forked.process import LOG
from raytune_fsdp.launch.ray.forked.templates import directory_of
from raytune_fsdp.record.jsonl import each_event
from tests.mlflow_server import until
from tests.ray.jobs import Nodes
from tests.ray.test_head import LIMIT, another_head
from tests.running_sweeps import SweepCommand, gone, spec_of

pytestmark = pytest.mark.slow

SECONDS, GONE_SECONDS, FORKS_SECONDS = 600.0, 90.0, 20.0
"""The trials commit, then their Ray ends, then what their workers are forked from: less than the minute after which
that would end by itself."""


def on_ray(directory: Path, storage: str, **changes: Any) -> dict[str, Any]:
    spec = spec_of(directory, storage, **{"space": {"optim.lr": {"grid": [1e-3, 1e-2]}}, **changes})
    spec["base"]["cluster"] |= {"launch": "ray", "workers": 1, "device": "cpu"}
    return spec


def forked_from(directory: Path) -> bool:
    """Whether there are processes that were forked from the one in this directory."""
    found = [each for each in psutil.process_iter(["cmdline"]) if str(directory) in (each.info["cmdline"] or [])]
    with suppress(psutil.Error):  # it has just ended
        return any(each.children() for each in found)
    return False


def test_one_ray_for_all_trials_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    local = SweepCommand(tmp_path, spec_of(tmp_path, "local", space={"optim.lr": {"grid": [1e-3, 1e-2]}}))
    assert local.end() == 0, local.said
    sweep = SweepCommand(tmp_path, on_ray(tmp_path, "ray"))
    sweep.until(lambda: b'"value"' in sweep.log)
    forks = directory_of(sweep.place, "1")
    said = (forks / LOG).read_text()
    assert said.count("ready after") == 1 and "refused" not in said, said
    sweep.until(lambda: forked_from(forks))
    left = sweep.kill()
    assert gone(left, GONE_SECONDS), left
    until(lambda: not forks.exists(), FORKS_SECONDS, "its template is left")
    sweep.start()
    assert sweep.end() == 0, sweep.said
    until(lambda: not forks.exists(), FORKS_SECONDS, "its template is left")
    assert sweep.said.count("Ray for all trials: started on this machine") == 1
    assert sweep.log == local.log and sweep.trajectories() == local.trajectories()


RATES = [1e-3, 1e-2, 3e-4, 3e-3, 1e-4, 3e-5, 2e-3, 2e-2]


def trials_of(sweep: SweepCommand) -> list[psutil.Process]:
    """The commands that train trials now."""
    found = []
    for each in sweep.children():
        with suppress(psutil.Error):  # it has just ended
            found += [each] if "train" in each.cmdline() else []
    return found


def decisions(sweep: SweepCommand) -> int:
    return sweep.log.count(b'"kind": "decision"')


def test_the_first_trial_prepares_the_data_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight trials on 4,000 documents of 30,000 characters. The driver counts them among its checks, before it asks
    for workers: that took the first one 12.8 s, and the others 0.8 to 0.9 s.
    """
    monkeypatch.setenv("RAY_ADDRESS", "local")
    spec = on_ray(tmp_path, "runs", space={"optim.lr": {"grid": RATES}})
    text = CONVERSATIONS.read_text()
    with open(tmp_path / "texts.jsonl", "w") as file:
        for row in range(4000):
            file.write(json.dumps({"text": f"{row} {text[row : row + 30_000]}"}) + "\n")
    spec["base"]["data"] |= {"train": [{"path": str(tmp_path / "texts.jsonl"), "format": {"type": "completion"}}]}
    spec["base"]["data"] |= {"window": 4096, "seq_len": 256, "long_documents": "truncate"}
    spec["base"]["model"]["tokenizer"] = str(TOKENIZER)
    spec["base"]["model"]["architecture"] |= {"vocab_size": 1024, "n_positions": 256}
    sweep = SweepCommand(tmp_path, {**spec, "scheduler": {"type": "none"}, "concurrent": 1})
    assert sweep.end(600) == 0, sweep.said
    found = [event for run in sweep.trajectories() for event in each_event(sweep.place.parent / run / "events.jsonl")]
    first, *others = [each["fields"]["phases"]["checks"] for each in found if each["event"] == "first_step"]
    assert len(others) == 7 and max(others) <= first / 5, (first, others)
    assert sum(each["event"] == "windows_built" for each in found) == 1


@pytest.mark.timeout(1800)
def test_a_rank_a_trial_a_driver_and_a_node_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight trials by rungs on two nodes of two CPUs: winner, log, trajectories are those of an undisturbed sweep."""
    space = {"optim.lr": {"grid": RATES}}
    whole_spec = spec_of(tmp_path, "whole", space=space)
    whole_spec["base"]["cluster"] |= {"workers": 2}
    whole = SweepCommand(tmp_path, whole_spec)
    assert whole.end(600) == 0, whole.said
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "pace").write_text("0.2")
    (faults / "forward-1-6").touch()
    with Nodes(tmp_path, head_cpus=0) as nodes:
        for name in ("n1", "n2"):
            nodes.add(name, cpus=2, gpus=0)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        spec = spec_of(tmp_path, "killed", space=space)
        spec["base"]["cluster"] |= {"launch": "ray", "workers": 2, "device": "cpu"}
        sweep = SweepCommand(tmp_path, spec)
        sweep.until(lambda: not (faults / "forward-1-6").exists(), SECONDS)
        sweep.until(lambda: len(sweep.trajectories()) > 3 and bool(trials_of(sweep)), SECONDS)
        trials_of(sweep)[0].kill()
        (faults / "pace").unlink()
        sweep.until(lambda: decisions(sweep) >= 1, SECONDS)
        assert gone(sweep.kill(), GONE_SECONDS)
        sweep.start()
        sweep.until(lambda: len(trials_of(sweep)) > 1, SECONDS)
        nodes.kill("n1")
        nodes.add("n3", cpus=2, gpus=0)
        assert sweep.end(SECONDS) == 0, sweep.said
        left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if str(sweep.place) in str(each.info)]
        assert not left
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
    best = [load_config(each.place / "best.yaml") for each in (whole, sweep)]
    assert best[0].run.name == best[1].run.name
    assert [
        event
        for event in each_event(sweep.place.parent / "rates-000" / "events.jsonl")
        if event["event"] == "attempt_failed"
    ]


@pytest.mark.timeout(1200)
def test_a_sweep_goes_on_when_the_head_has_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that begin while it is away fail, for which none is to blame; they are tried again."""
    space = {"optim.lr": {"grid": RATES[:2]}}
    whole = SweepCommand(tmp_path, spec_of(tmp_path, "whole", space=space))
    assert whole.end() == 0, whole.said
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(LIMIT)}
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "pace").write_text("1.0")
    with Nodes(tmp_path, head_cpus=2, **kept, **limit) as nodes:
        for name, value in {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled", **limit}.items():
            monkeypatch.setenv(name, value)
        spec = spec_of(tmp_path, "killed", space=space)
        spec["base"]["cluster"] |= {"launch": "ray", "workers": 1, "device": "cpu"}
        sweep = SweepCommand(tmp_path, spec)
        sweep.until(lambda: any(map(len, sweep.trajectories().values())), SECONDS)
        since = time.monotonic()
        with another_head(tmp_path, nodes, LIMIT / 3):
            sweep.until(lambda: time.monotonic() - since > LIMIT, SECONDS)
            (faults / "pace").unlink()
            assert sweep.end(SECONDS) == 0, sweep.said
    assert sweep.log == whole.log and sweep.trajectories() == whole.trajectories()
