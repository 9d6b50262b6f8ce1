"""When ranks give a silent hub up, and what they leave in its cache. One rank, and a hub of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from raytune_fsdp.base.errors import TransientError
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.model.directory.hub_weights import HubWeights
from raytune_fsdp.run import fetching
from raytune_fsdp.run.fetching import silent_seconds
from tests.runs import make_config
from tests.unit.fake_hub import TOKEN, FakeHub, fake_hub

NAME = "someone/model"
FILE = "model.safetensors"
BYTES = 3 << 16


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        for name, value in {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / FILE).write_bytes(bytes(BYTES))
        running.add(NAME, tmp_path / "model")
        with alone(torch.device("cpu")):
            yield running


def weights() -> WeightFiles:
    found = HubWeights(repository=NAME, commit=f"{1:040x}", field="model.path", sizes={FILE: BYTES})
    return WeightFiles(directory=found.directory, file_of={"weight": FILE}, hub=found, headers={})


def test_ranks_give_a_silent_hub_up_long_before_they_are_taken_for_a_hang() -> None:
    """Ray Train takes seconds to bring their error, which says what is wrong and counts as what may pass."""
    for minutes in (0.5, 2.0, 10.0, 60.0):
        limit = 60 * minutes
        assert silent_seconds(ClusterConfig(start_hang_minutes=minutes)) <= limit / 2
    assert silent_seconds(ClusterConfig(start_hang_minutes=600)) == 600, "ten minutes are enough"


def test_what_a_silent_hub_ends_with_may_pass(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[NAME].seconds_per_piece = 3.0
    with pytest.raises(TransientError, match=r"no byte has come from the hub for 1 s; what has come is kept"):
        fetching._brought(weights(), make_config(tmp_path, cluster={"start_hang_minutes": 2 / 60}), print)


def test_the_next_start_removes_what_a_killed_rank_has_left(hub: FakeHub, tmp_path: Path) -> None:
    """Of its own run at once. What others have left may be in use: after an hour."""
    config, other = make_config(tmp_path), make_config(tmp_path, run={"name": "other"})
    place = Path(constants.HF_HUB_CACHE) / ".locks"
    for each in (config, other):
        killed = os.fork()
        if killed == 0:
            try:
                fetching.on_all_ranks = lambda work: (work(), os.kill(os.getpid(), signal.SIGKILL))  # type: ignore
                fetching._owners(each)
            finally:
                os._exit(1)
        assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    left = sorted(place.iterdir())
    assert len(left) == 2
    directory = weights().directory
    directory.mkdir(parents=True)
    (directory / FILE).write_bytes(bytes(BYTES))
    fetching._brought(weights(), config, print)
    (theirs,) = place.iterdir()
    os.utime(theirs, (0, 0))
    fetching._brought(weights(), config, print)
    assert not list(place.iterdir())
