"""What Ray has to do under each of the private names that launch/ray/private.py and private_train.py take from it."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import time
from pathlib import Path
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray._private.node
import ray._raylet
import ray.train.v2._internal.constants as settings_of_train
from ray._common.usage import usage_constants
from ray.cluster_utils import Cluster
from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller.state import (
    ErroredState,
    FinishedState,
    RunningState,
    ShuttingDownState,
)
from ray.train.v2.api.exceptions import ControllerError
from ray.util import placement_group, placement_group_table, remove_placement_group

from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.ray import private, private_train
from raytune_fsdp.launch.ray.apart import RAYS_THREAD
from raytune_fsdp.launch.ray.driver import RAY_TRAIN
from raytune_fsdp.launch.ray.failures import ControllerWatch
from raytune_fsdp.launch.ray.session import LIMITS, QUICK, connect
from tests.ray.conftest import CPUS
from tests.ray.test_resources import run_alone


def until(condition: Any, seconds: float = 20) -> Any:
    """What the condition is once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within its time"
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(("named", "found"), [("10.0.0.7:6379", "10.0.0.7:6379"), ("local", None)])
def test_ray_address_names_the_cluster(monkeypatch: pytest.MonkeyPatch, named: str, found: str | None) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert private.address_of_cluster() == found


def test_a_bad_address_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ValueError, match="head"):
        private.address_of_cluster()


@pytest.mark.parametrize(("address", "parts"), [("head:6379", ("head", 6379)), ("[::1]:6379", ("::1", 6379))])
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert private.host_and_port(address) == parts


def test_the_settings_of_ray_still_have_these_names() -> None:
    """Ray ignores a variable that it does not know, without a word."""
    python = inspect.getsource(ray._private.node) + inspect.getsource(usage_constants)
    compiled = Path(ray._raylet.__file__).read_bytes()  # where they have no prefix
    unknown = [n for n in (*QUICK, *LIMITS) if n not in python and n.removeprefix("RAY_").encode() not in compiled]
    assert not unknown
    of_train = {value for name, value in vars(settings_of_train).items() if name.endswith("_ENV_VAR")}
    assert of_train | {RAY_CHDIR_TO_TRIAL_DIR} >= RAY_TRAIN.keys()


def test_a_machine_has_as_many_cpus_as_ray_may_use() -> None:
    assert private.cpus_of_machine() == len(os.sched_getaffinity(0))
    assert isinstance(private.gpus_of_machine(), int)


def test_the_errors_of_a_start_and_of_a_look_at_the_ranks() -> None:
    """failures.py tells them from others, and takes the rank's own error out of one of them."""
    cause = ray.exceptions.ActorDiedError()
    assert private_train.WorkerHealthCheckFailedError("rank 1", cause).health_check_failure is cause
    assert "4" in str(private_train.WorkerGroupStartupTimeoutError(4))
    kinds = [getattr(private_train, name) for name in private_train.__all__ if name.endswith("Error")]
    assert len(kinds) == 4 and not any(issubclass(one, two) for one in kinds for two in kinds if one is not two)


@ray.remote(num_cpus=1)
class Maker:
    """An actor, as Ray Train's controller is one."""

    def make(self) -> tuple[str, str]:
        self.group = placement_group([{"CPU": 1}])
        ray.get(self.group.ready())
        return ray.get_runtime_context().get_actor_id(), self.group.id.hex()

    def cluster(self) -> str:
        return private.own_cluster()

    def helpers(self) -> tuple[int, int]:
        """How many a controller's process has before its callbacks have started, and afterwards."""
        self.callback = PlacementGroupCleanerCallback()
        before = len(private_train.helpers_of_controller())
        self.callback.after_controller_start(SimpleNamespace(run_id="run"))
        (helper,) = private_train.helpers_of_controller()
        ray.kill(helper)
        return before, 1

    def pid(self) -> int:
        return os.getpid()

    def sleeps(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid


def test_on_the_ray_of_these_tests(cluster: None) -> None:
    address = ray.get_runtime_context().gcs_address
    private.check_token(address)  # this Ray asks for none
    own = private.own_cluster()
    assert len(own) > 20 and private.cluster_at(address) == own
    private.forget_token()
    assert private.dead_processes() == []
    assert RAYS_THREAD in [thread.name for thread in enumerate_threads()], "what it prints is kept from the screen"
    assert private.leaving_nodes() == {} and private.declared_sizes() == []
    (node,) = ray.nodes()
    assert set(private.reported_kinds()) <= {private.kind_of_node_by_hand(node["NodeID"])}

    def free() -> float:
        return private.free_by_node()[node["NodeID"]].get("CPU", 0)

    until(lambda: free() == CPUS)  # what the tests before this one had is given back in a while
    assert ray.available_resources()["CPU"] == CPUS
    maker = Maker.remote()
    mine = placement_group([{"CPU": 10**6}])  # for which there is no room
    try:
        actor, name = ray.get(maker.make.remote())
        until(lambda: free() == CPUS - 2)
        made = until(lambda: private.placement_groups()[-2:])
        assert {(group.id, group.state) for group in made} == {(name, "CREATED"), (mine.id.hex(), "PENDING")}
        of_maker = next(group for group in made if group.id == name)
        assert [group.maker == actor for group in made] == [group.id == name for group in made]
        remove_placement_group(of_maker.handle())
        until(lambda: name not in [group.id for group in private.placement_groups()])
        assert placement_group_table()[name]["state"] == "REMOVED"  # Ray itself goes on to list it
        assert ray.get(maker.helpers.remote()) == (0, 1)
    finally:  # what is left of it would keep its CPUs from all tests after this one
        remove_placement_group(mine)
        for group in private.placement_groups():
            remove_placement_group(group.handle())
        ray.kill(maker)


def test_ray_says_why_an_actor_is_dead(cluster: None) -> None:
    actor = Maker.options(num_cpus=0).remote()
    assert private.why_dead(actor, 60) is None
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    found = private.why_dead(actor, 20)
    assert isinstance(found, ray.exceptions.RayActorError) and "owner has died" not in str(found)


@ray.remote(num_cpus=0)
class Owner:
    """An actor that owns another one, as Ray Train's controller owns its ranks."""

    def owned(self) -> Any:
        self.actor = Maker.options(num_cpus=0).remote()
        ray.get(self.actor.pid.remote())
        return self.actor


def test_ray_says_that_an_actor_has_ended_with_its_owner(cluster: None) -> None:
    owner = Owner.remote()
    actor = ray.get(owner.owned.remote())
    ray.kill(owner)
    found = until(lambda: private.why_dead(actor, 20))
    assert "owner has died" in str(found)


def test_the_controller_calls_its_callbacks() -> None:
    """With the arguments that ours take; what they do there, tests/ray/test_run.py shows."""
    ours = (private_train.ControllerCallback.after_controller_start, ControllerWatch.after_controller_start)
    assert [list(inspect.signature(each).parameters) for each in ours] == [["self", "train_run_context"]] * 2
    name = "after_controller_state_update"
    ours = (getattr(private_train.ControllerCallback, name), getattr(ControllerWatch, name))
    states = ["self", "previous_state", "current_state"]
    assert [list(inspect.signature(each).parameters) for each in ours] == [states] * 2


def test_a_controller_that_ends_its_ranks_says_with_which_error() -> None:
    error = ControllerError(RuntimeError("no"))
    assert private_train.is_ending(ShuttingDownState(FinishedState())) and not private_train.is_ending(RunningState())
    assert private_train.error_of(ShuttingDownState(ErroredState(error))) is error
    assert private_train.error_of(ShuttingDownState(FinishedState())) is private_train.error_of(RunningState()) is None


def with_a_process_that_sees_no_end() -> list[str]:
    """In a process of its own: a Ray for one run, a process of which its raylet does not know."""
    session = connect(ClusterConfig(), 1, None)
    maker = Maker.remote()
    child = psutil.Process(ray.get(maker.sleeps.remote()))
    (worker,) = [each for each in private.workers() if each.pid == child.ppid()]
    worker.suspend()  # it would end what it has begun
    session.close()
    return [each.name() for each in (worker, child) if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_no_process_outlives_the_ray_of_a_run() -> None:
    assert run_alone(with_a_process_that_sees_no_end) == []


def on_two_nodes() -> dict[str, Any]:
    """In a process of its own: a node that drains, and a Ray that loses a process."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    busy = Maker.options(label_selector={"ray.io/node-id": node.node_id}).remote()  # else it would end at once
    ray.get(busy.helpers.remote())
    ends_at = time.time() + 60
    private.drain(cluster.address, node.node_id, "spot", ends_at)
    leaving = until(private.leaving_nodes)
    clusters = [private.own_cluster(), ray.get(busy.cluster.remote())]
    ray.shutdown()
    cluster.shutdown()

    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    processes = psutil.Process().children(recursive=True)
    (raylet,) = [each for each in processes if each.name() == "raylet"]
    raylet.kill()
    dead = until(private.dead_processes)
    clusters.append(private.cluster_at(ray.get_runtime_context().gcs_address))
    private.kill_processes()
    _, alive = psutil.wait_procs(processes, 10)
    servers = [each.name() for each in alive if each.name() in ("gcs_server", "raylet")]
    ray.shutdown()
    return {
        "leaving": leaving,
        "node": node.node_id,
        "ends_at": ends_at,
        "dead": dead,
        "alive": servers,
        "clusters": clusters,
    }


@pytest.mark.slow
def test_a_node_that_drains_and_a_ray_that_loses_a_process() -> None:
    found = run_alone(on_two_nodes)
    assert found["leaving"] == {found["node"]: int(found["ends_at"] * 1000)}
    assert found["dead"] == ["raylet"]
    assert found["alive"] == []
    joined, of_its_actor, another = found["clusters"]
    assert joined == of_its_actor != another
