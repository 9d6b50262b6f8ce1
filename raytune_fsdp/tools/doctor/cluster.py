"""Check the Ray cluster of a run: its token, its nodes, its resources against the plan. Runs in another process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.cluster import ClusterConfig
from raytune_fsdp.tools.doctor import node
from raytune_fsdp.tools.doctor.deadline import Deadline
from raytune_fsdp.tools.doctor.finding import Finding, many, not_checked, ok, problem, refused, warning
from raytune_fsdp.tools.doctor.machines import (
    check_bf16,
    check_clocks,
    check_gpus,
    check_limits,
    check_packages,
    check_same,
)
from raytune_fsdp.tools.doctor.own_process import Question, Send

if TYPE_CHECKING:
    from raytune_fsdp.launch.ray.resources import Node, Request
    from raytune_fsdp.launch.shared_storage import Token

_END_SECONDS, _LOOK_SECONDS = 1.0, 1.5
"""Kept from the time left: for the end, and for a node to begin to look and to hand over what it found."""
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 15.0
"""The least and the most time for all nodes together."""
_NETWORK_SECONDS = 90.0
_TOKEN_SECONDS = 8.0
_HUNG = (
    "look whether the head lives (ray status there) and whether a firewall is between; RAY_ADDRESS=local makes a run "
    "start a Ray of its own"
)
ALONE = "run `ray status`, which asks the head alone, and look at the load of its machine and of this one"
_MOUNT_FIX = (
    "run `timeout 5 ls` on run.storage there: if it does not end, the mount hangs and has to be mounted again (umount "
    "-l, mount)"
)
_STORAGE_ALONE = "write to run.storage there (dd if=/dev/zero of=... bs=4M count=1 conv=fsync), or run doctor again"
_NODE_ALONE = "look at its load (uptime there) and at `ray list tasks`; run doctor again when it is less busy"
_SHARED_FIX = (
    "mount the same storage under the same path, writable, on all nodes, and set run.storage to it; or keep all ranks "
    "on one node (cluster.placement=strict_pack)"
)
_NODE_FIX = (
    "look at `ray list nodes`, and at the raylet's log in /tmp/ray/session_latest/logs there; restart Ray on it (ray "
    "stop, ray start), or remove it"
)
_JOIN_FIX = (
    "see whether it lives (on the head: ray status) and start it (ray start --head), or set RAY_ADDRESS to "
    "the HOST:PORT of another; with RAY_ADDRESS=local a Ray is started for the run"
)
_TOKEN_FIX = (
    "restart it with a token: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; "
    "print(secrets.token_hex(32))') before `ray start`, on every node and where jobs are started"
)


def check_cluster(
    send: Send,
    config: FinetuneConfig | None,
    token: Token | None,
    network: bool,
    nominal: float | None,
    deadline: Deadline,
) -> None:
    """Send findings about the cluster that a run would join, if there is one."""
    from raytune_fsdp.launch.ray.nodes.checked import connected, find_cluster

    cluster, here = config.cluster if config else ClusterConfig(), node.look(try_torch=False)
    send(Question("Ray", "the head of the Ray cluster that a run would join", _HUNG))
    try:
        address = find_cluster()
    except RaytuneError as error:
        send(_not_joined(error))
        return
    send(Question("Ray"))  # it has answered: if the rest takes long, it is slow, but does not hang
    if address is None:
        _without(send, config, here, network)
        return
    try:
        # It starts a process, which takes as long as connecting: do both at once.
        asking = in_thread(partial(_token, address, min(_TOKEN_SECONDS, deadline.left())), "token")
        with connected(address, cluster) as about:
            send(ok("Ray", about))
            _look_at(send, config, here, token, deadline)
            send(asking.result())
            if network and config is not None:
                _measure(send, config, nominal)
            send(None)  # before the connection is closed, which takes a while
    except RaytuneError as error:
        send(_not_joined(error))


def _not_joined(error: RaytuneError) -> Finding:
    found, says_what, fix = str(error).partition(": set ")  # an error about a token
    if says_what:
        return problem("Ray", found, f"set {fix}")
    return problem("Ray", str(error).partition(". It was named by")[0], _JOIN_FIX)


def _without(send: Send, config: FinetuneConfig | None, here: Mapping[str, Any], network: bool) -> None:
    """Check this machine: no Ray runs, and none is started here, as a run would do."""
    send(
        ok(
            "Ray",
            "none runs here and RAY_ADDRESS names none, so only this machine is checked; a run starts its own here",
        )
    )
    if config is not None:
        from raytune_fsdp.launch.ray.nodes.checked import this_machine

        asked = _plan(send, config, [this_machine(config.cluster, len(here["gpus"]))], growing=False)
        if asked is not None and asked.device == "cuda":
            send(check_bf16(here, "this machine", config.parallel.precision))
    if network:
        send(
            warning(
                "network", "not measured: there is no cluster",
                "start it (ray start), or set RAY_ADDRESS to the head's HOST:PORT",
            )
        )  # fmt: skip


def _token(address: str, seconds: float) -> Finding:
    from raytune_fsdp.launch.ray.nodes.checked import asks_for_a_token

    asks = asks_for_a_token(address, seconds)
    if asks:
        return ok("token", f"the cluster at {address} refuses everybody without a token (RAY_AUTH_MODE=token)")
    if asks is None:
        return warning(
            "token",
            f"whether the cluster at {address} asks for a token could not be found out",
            "run doctor again; the head may be busy",
        )
    return problem(
        "token", f"the cluster at {address} takes jobs from everyone who reaches it: RAY_AUTH_MODE is off", _TOKEN_FIX
    )


def _look_at(
    send: Send, config: FinetuneConfig | None, here: Mapping[str, Any], token: Token | None, deadline: Deadline
) -> None:
    from raytune_fsdp.launch.ray.nodes.checked import ask_each
    from raytune_fsdp.launch.ray.resources import answering, may_grow, nodes, room
    from raytune_fsdp.tools.doctor.writing import as_text

    there = nodes()
    called = [each.name for each in there]
    # Nodes that share a name, as on one machine, also get the beginning of their id.
    names = {each.id: each.name if called.count(each.name) == 1 else f"{each.name} ({each.id[:6]})" for each in there}
    live = answering(there)
    asks = _plan(send, config, there, growing=may_grow()) if config is not None else None
    asked = time.time()
    token_text = None if token is None else as_text(token)
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, deadline.left() - _END_SECONDS))
    look = max(_LEAST_SECONDS, seconds - _LOOK_SECONDS)
    answers = ask_each(live, node.look, True, token_text, look, seconds=seconds, by_value=node)
    gone = {each.id: ConnectionError("its raylet takes no connection") for each in there if each not in live}
    lost = gone | {id: answer for id, answer in answers.items() if isinstance(answer, Exception)}
    for id, error in lost.items():
        send(_lost(names[id], error, seconds))
    if len(lost) < len(there):
        facts = {names[id]: each for id, each in answers.items() if id not in lost}
        found = check_same(facts, here)
        limits = [finding for name, each in facts.items() for finding in check_limits(each, f"node {name}")]
        found += limits or [ok("limits", f"/dev/shm and open files are enough on {many(len(facts), 'node')}")]
        now = time.time()
        found += check_clocks({name: _offset(each["clock"], asked, now) for name, each in facts.items()})
        send(found)
    for each in there:
        if each.id not in lost:
            on_gpus = asks is not None and asks.device == "cuda" and room(asks, [each]) > 0
            _of_gpus(send, config, answers[each.id], f"node {names[each.id]}", on_gpus=on_gpus)
    if config is not None and token is not None:
        stored = {id: each["storage"] for id, each in answers.items() if id not in lost}
        _storage(send, stored, names, config.checkpoint.timeout_minutes)


def _lost(name: str, error: Exception, seconds: float) -> Finding:
    """Report a node that did not answer."""
    from raytune_fsdp.launch.ray.nodes.checked import LateError

    if not isinstance(error, LateError):
        return problem("nodes", f"node {name} does not answer ({in_one_line(error)})", _NODE_FIX)
    why = "it takes connections, and processes start slowly there: it is busy, or its imports are slow"
    return not_checked("nodes", seconds, why, _NODE_ALONE, part=f"node {name}: ")


def _of_gpus(send: Send, config: FinetuneConfig | None, facts: Mapping[str, Any], where: str, *, on_gpus: bool) -> None:
    if not (on_gpus or facts["gpus"] or facts["smi"]):
        return  # a node of CPUs alone, as many clusters have
    found = check_gpus(facts, where, device="cuda" if on_gpus else None)
    if on_gpus and config is not None:
        found += check_bf16(facts, where, config.parallel.precision)
        found.append(check_packages(config.model.attention, facts["packages"], where))
    send(found)


def _offset(clock: tuple[float, float], asked: float, now: float) -> float:
    """Return by how many seconds a clock is off at least: a right one is between the question and the answer."""
    began, ended = clock
    return began - asked if began < asked else max(0.0, ended - now)


def _plan(send: Send, config: FinetuneConfig, there: Sequence[Node], *, growing: bool) -> Request | None:
    """Check the run's resources against the cluster's, as its start does, and against what is free now."""
    from raytune_fsdp.launch.ray.nodes.checked import check_not_in_a_copy
    from raytune_fsdp.launch.ray.resources import check_resources, gpus_of, request, room, shortage
    from raytune_fsdp.plan.plan import sizes_of
    from raytune_fsdp.plan.run_dir import RunDir
    from raytune_fsdp.run.checks import check_device, idle_gpus

    try:
        check_not_in_a_copy(config, RunDir.of(config).path)
        asked = request(config.cluster, there, growing=growing)
        fewest = replace(asked, workers=sizes_of(config, asked.workers)[0])
        check_resources(fewest, there, growing=growing)
        check_device(config, asked.device)
        if idle := idle_gpus(config.cluster, asked.device, fewest.workers, gpus_of(config.cluster, there)):
            send(warning("resources", *idle))
    except RaytuneError as error:
        send(refused("resources", error))
        return None
    free = room(fewest, [replace(each, total=each.free) for each in there])
    on = "GPUs" if asked.device == "cuda" else "CPUs"
    if free < fewest.workers and not growing:
        send(
            warning(
                "resources",
                f"the run has to wait: {shortage(fewest, there)}",
                f"wait for the other jobs (ray list jobs), or set cluster.workers={free}"
                if free
                else "wait for the other jobs (ray list jobs), or end them",
            )
        )
    else:
        send(
            ok(
                "resources",
                f"{many(fewest.workers, 'worker')} on {on}, room for {room(asked, there)}, free now for {free}"
                + (", and it may grow" if growing else ""),
            )
        )
    return fewest


def _storage(send: Send, answers: Mapping[str, Any], names: Mapping[str, str], timeout_minutes: float) -> None:
    """Check that every node sees what was written here, and writes there. All were asked at once, as ranks write."""
    from raytune_fsdp.tools.doctor.storage import judge_speed

    speeds = {}
    for id, (why, speed) in answers.items():
        if why is None:
            speeds[names[id]] = speed
        elif why.startswith(node.NOT_CHECKED):
            send(warning("shared", f"node {names[id]}: {why}", _STORAGE_ALONE))
        else:
            fix = _MOUNT_FIX if why.startswith(node.NO_ANSWER) else _SHARED_FIX
            send(problem("shared", f"node {names[id]}: {why.partition('. All nodes must')[0]}", fix))
    if speeds:
        slowest = min(speeds, key=lambda name: speeds[name])
        seeing = "all nodes see" if len(speeds) == len(answers) else f"{len(speeds)} of {len(answers)} nodes see"
        where = f"{seeing} run.storage; of them at once the slowest, {slowest},"
        send(replace(judge_speed(where, speeds[slowest], None, timeout_minutes), check="shared"))


def _measure(send: Send, config: FinetuneConfig, nominal: float | None) -> None:
    from raytune_fsdp.launch.ray.nodes.checked import LateError, on_ranks
    from raytune_fsdp.launch.ray.resources import may_grow, nodes, request
    from raytune_fsdp.tools.doctor.network import judge, measure, preload

    asked = request(config.cluster, nodes(), growing=may_grow())
    if asked.workers < 2:
        send(ok("network", "one rank: nothing crosses a network"))
        return
    try:
        ranks = on_ranks(config, asked, measure, first=preload, wait=20.0, seconds=_NETWORK_SECONDS)
        send(judge(ranks, nominal))
    except LateError as error:
        send(warning("network", str(error), _NODE_ALONE))
    except RaytuneError as error:
        send(refused("network", error))
