"""The files that people copy first: what can be known of them without a cloud."""

from __future__ import annotations

import ast
import asyncio
import copy
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import requires as required_by
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import ray
import yaml
from botocore import xform_name
from botocore.validate import ParamValidator
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private.authentication.authentication_constants import (
    TOKEN_AUTH_ENABLED_BUT_NO_TOKEN_FOUND_ERROR_MESSAGE as NO_TOKEN,
)
from ray._private.authentication.authentication_constants import TOKEN_INVALID_ERROR_MESSAGE as WRONG_TOKEN
from ray._private.runtime_env import packaging
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.modules.job.job_supervisor import JobSupervisor
from ray.runtime_env import RuntimeEnv

from raytune_fsdp.config import CheckpointConfig
from raytune_fsdp.config.load import recipes
from raytune_fsdp.config.sections.cluster import SPOT_NOTICE_SECONDS
from raytune_fsdp.launch.notices import STOP_SECONDS
from tests.cluster.network import why_not

ROOT = Path(__file__).parents[2]
CLUSTER, SCHEMAS = ROOT / "cluster", Path(__file__).parent / "schemas"
TOOLS = Path(sys.executable).parent
CLOUDS = ("aws-p4d-a100", "gcp-a2-a100")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def cluster(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())
    return found


def node_types(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, node in cluster(name)["available_node_types"].items():
        yield kind, node["node_config"]


@pytest.mark.parametrize("name", [*CLOUDS, "local"])
def test_ray_takes_the_cluster(name: str) -> None:
    config = prepare_config(cluster(name))
    validate_config(config)
    assert config["available_node_types"]


@pytest.mark.parametrize(
    ("path", "value"), [("bogus", 1), ("available_node_types.a100_80gb.bogus", 1), ("head_node_type", "x")]
)
def test_ray_refuses_what_is_wrong(path: str, value: Any) -> None:
    """So that the test above can fail."""
    config = cluster("aws-p4d-a100")
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(Exception, match=last):  # of several kinds
        validate_config(prepare_config(config))


MODULES = {
    "boto3": "boto3", "botocore": "boto3",
    "cryptography": "cryptography", "google": "google-auth", "google_auth_httplib2": "google-auth-httplib2",
    "googleapiclient": "google-api-python-client", "httplib2": "httplib2",
}  # fmt: skip
"""What the modules of Ray's providers are installed with."""


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_the_gpu_image_has_what_ray_imports_to_make_nodes(cloud: str) -> None:
    files = [Path(ray.__file__).parent / "autoscaler" / "_private" / "util.py"]  # it makes GCP's key pair
    files = [*(files if cloud == "gcp" else []), *(files[0].parent / cloud).rglob("*.py")]
    imported = {
        name.partition(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    needed = {MODULES[name] for name in imported & MODULES.keys()}
    others = imported - MODULES.keys() - sys.stdlib_module_names
    ours = {normal(re.split("[[<>=]", each)[0]) for each in required_by("ray") or []} | {"ray", "yaml"}
    assert {normal(name) for name in others} <= ours, "a new import of Ray's: add it to MODULES and to the extra"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split("[<>=]", each)[0] for each in project["optional-dependencies"][cloud]}
    assert needed and needed == extra
    locked = {normal(line.partition("==")[0]) for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert extra <= locked
    _, gpu = (ROOT / "docker" / "Dockerfile").read_text().split("# ---- gpu ----")
    (extras,) = re.findall(r"docker/install.sh \S+ (\S+)", gpu)
    assert cloud in extras.split(",")


def test_nodes_are_what_ec2_calls_an_instance() -> None:
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape

    def problems(node: Mapping[str, Any]) -> str:
        asked = {"MinCount": 1, "MaxCount": 1, **node}
        if "SubnetIds" in asked:  # Ray tries these one after the other
            asked["SubnetId"] = asked.pop("SubnetIds")[0]
        report: str = ParamValidator().validate(asked, shape).generate_report()
        return report

    for kind, node in node_types("aws-p4d-a100"):
        assert not problems(node), kind
        # What botocore takes as well, and EC2 or Ray does not.
        cards = node.get("NetworkInterfaces", [])
        assert bool(cards) != ("SubnetIds" in node), "Ray takes subnets from one place"
        assert "AssociatePublicIpAddress" not in str(cards), "no node with several cards can have one"
        if node["InstanceType"].startswith("p4d"):
            assert [card["NetworkCardIndex"] for card in cards] == [0, 1, 2, 3]
            assert [card["DeviceIndex"] for card in cards] == [0, 1, 1, 1]
    assert problems({"InstanceTyp": "x"}) and problems({"Placement": {"Group": "x"}})


def commands(page: str, program: str) -> list[list[str]]:
    """The words of each call of a program on a page, with lines that go on put together."""
    text = (ROOT / "docs" / "start" / page).read_text().replace("\\\n", " ")
    found = [
        match.partition(" #")[0] for match in re.findall(rf"(?:^ +|\$\(){program} ([^|&`\n]*)", text, re.MULTILINE)
    ]
    return [re.sub(r"\)$", "", each).replace("'", "").replace('"', "").split() for each in found]


def test_the_pages_commands_are_of_aws() -> None:
    session, seen = botocore.session.get_session(), set()
    for words in commands("aws.md", "aws"):
        service, what, *rest = words
        options = {word[2:] for word in rest if word.startswith("--")} - {"query", "output"}
        seen.add((service, what))
        if what in ("wait", "get-login-password"):  # of the command line alone
            continue
        model = session.get_service_model(service)
        operations = {xform_name(name, "-"): name for name in model.operation_names}
        assert what in operations, words
        known = {xform_name(name, "-") for name in model.operation_model(operations[what]).input_shape.members}
        if what.startswith("authorize-security-group"):
            known |= {"protocol", "source-group"}  # of the command line alone
        assert options <= {*known, "force"}, words
    assert len(seen) > 30 and {what.split("-")[0] for _, what in seen} >= {"delete", "remove", "detach", "release"}


MADE_AND_ENDED = {
    "create": "delete", "allocate-address": "release-address", "add-role-to": "remove-role-from", "attach": "detach",
    "put": "delete",
}  # fmt: skip


def test_what_the_aws_page_makes_it_takes_down() -> None:
    done = [what for _, what, *_ in commands("aws.md", "aws")]
    for what in done:
        for start, end in MADE_AND_ENDED.items():
            if what.startswith(start) and what != "create-route":  # goes with its table
                undone = what.replace(start, end, 1)
                assert undone in done or f"{undone}s" in done, what
    assert "delete-key-pair" in done, "Ray's own"


def test_what_the_google_page_makes_it_takes_down() -> None:
    done = [" ".join(words) for words in commands("gcp.md", "gcloud")]
    for each in done:
        made = re.match(r"(.*?) create ([$\w-]+)", each)
        if made and "default-allow" not in each:
            assert any(other.startswith(f"{made[1]} delete {made[2]}") for other in done), each
        for gone in re.findall(r"default-allow-\w+", each) if " delete " in each else []:
            assert any(f"create {gone}" in other for other in done), gone


def test_the_heads_policy_has_what_ray_calls() -> None:
    policy = json.loads((CLUSTER / "aws-head-policy.json").read_text())
    granted = {
        action
        for statement in policy["Statement"]
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }
    source = (Path(ray.__file__).parent / "autoscaler" / "_private" / "aws" / "node_provider.py").read_text()
    operations = botocore.session.get_session().get_service_model("ec2").operation_names
    words = {*re.findall(r"\b(\w+)\(", source), *re.findall(r"client\.(\w+)", source)}
    called = {name for name in operations if xform_name(name) in words}
    # Stopped nodes are not kept (cache_stopped_nodes); the resource's names for RunInstances and DescribeInstances.
    needed = called - {"StartInstances", "StopInstances"} | {"RunInstances", "DescribeInstances"}
    assert {f"ec2:{name}" for name in needed} | {"iam:PassRole"} == granted
    assert cluster("aws-p4d-a100")["provider"]["cache_stopped_nodes"] is False
    (of_cluster,) = [each for each in policy["Statement"] if "ec2:TerminateInstances" in each["Action"]]
    names = of_cluster["Condition"]["StringEquals"].values()
    assert [*names] == [cluster("aws-p4d-a100")["cluster_name"]]
    profiles = {kind: node["IamInstanceProfile"]["Name"] for kind, node in node_types("aws-p4d-a100")}
    assert profiles.pop("head") == "raytune-fsdp-head" and {*profiles.values()} == {"raytune-fsdp-node"}
    assert any(each["Resource"].endswith("role/raytune-fsdp-node") for each in policy["Statement"])


@pytest.mark.parametrize("name", CLOUDS)
def test_a_node_is_logged_in_and_its_storage_is_the_containers(name: str) -> None:
    config = cluster(name)
    first = config["initialization_commands"]
    registry = config["docker"]["image"].partition("/")[0]
    assert any(registry in each and re.search("docker login|configure-docker", each) for each in first)
    (shared,) = [each.split()[1].partition(":")[0] for each in config["docker"]["run_options"] if "--volume" in each]
    made = f"{shared}/data {shared}/runs {shared}/hf"
    assert first[-1] == f"mountpoint -q {shared} && sudo install -d -o 1000 -g 1000 {made}"
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert image.count("USER 1000\nWORKDIR /home/ray/raytune-fsdp\n") == 2
    assert image.count("&& chown ray:ray /home/ray /home/ray/raytune-fsdp\n") == 2, (
        "COPY may give the directory to root"
    )


def test_drivers_are_new_enough_for_torch() -> None:
    """The compiler's image is of the CUDA that torch has (the Dockerfile asserts it); CUDA 13 needs a driver of 580."""
    assert "FROM nvidia/cuda:13." in (ROOT / "docker" / "Dockerfile").read_text()
    for _, node in node_types("gcp-a2-a100"):
        (driver,) = re.findall(r"nvidia-(\d+)$", node["disks"][0]["initializeParams"]["sourceImage"])
        assert int(driver) >= 580


@pytest.mark.parametrize("name", CLOUDS)
def test_clusters_are_closed(name: str) -> None:
    text, config = (CLUSTER / f"{name}.yaml").read_text(), cluster(name)
    assert config["file_mounts"] == {
        "/home/ray/.ray/auth_token": "~/.ray/auth_token",
        "/home/ray/.hf-token": "~/.cache/huggingface/token",
    }
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    (start,) = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert "--dashboard-host 127.0.0.1" in start
    assert "0.0.0.0/0" not in text and not re.search(
        r"AKIA|BEGIN .*PRIVATE KEY|(?<!get-login-)password(?!-stdin)", text
    )
    for _, node in node_types("aws-p4d-a100"):
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"])


def strict(schema: Any) -> Any:
    """An OpenAPI schema that refuses fields it does not know: Kubernetes drops them in silence."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return found


def test_kuberay_takes_the_job() -> None:
    job = yaml.safe_load((CLUSTER / "kuberay-rayjob.yaml").read_text())
    volume, pod = yaml.safe_load_all((CLUSTER / "kuberay-storage.yaml").read_text())
    schema = strict(json.loads(gzip.decompress((SCHEMAS / "kuberay-1.7.0-rayjob.json.gz").read_bytes())))
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(job["spec"])] == []
    wrong = copy.deepcopy(job["spec"])
    wrong["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert [error.message for error in validator.iter_errors(wrong)]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
    assert all(each["securityContext"] == {"fsGroup": 1000} for each in pods), "the container's user writes the volume"
    assert not any("securityContext" in container for each in pods for container in each["containers"])
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for each in [*pods, pod["spec"]]
        for volume in each["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {volume["metadata"]["name"]} and volume["spec"]["accessModes"] == ["ReadWriteMany"]
    # The pod that data is copied to: a template of the same schema, and no GPU.
    alone = copy.deepcopy(job["spec"])
    alone["rayClusterSpec"]["headGroupSpec"]["template"] = {"spec": pod["spec"]}
    assert [error.message for error in validator.iter_errors(alone)] == []
    assert "nvidia" not in str(pod) and (volume["kind"], pod["kind"]) == ("PersistentVolumeClaim", "Pod")
    page = (ROOT / "docs" / "start" / "kubernetes.md").read_text()
    steps = [
        "apply -f cluster/kuberay-storage.yaml",
        *(f"cp {name}.jsonl {pod['metadata']['name']}:/shared/data/{name}.jsonl" for name in ("train", "eval")),
    ]
    steps += [f"delete pod {pod['metadata']['name']}", "apply -f cluster/kuberay-rayjob.yaml"]
    assert sorted(steps, key=page.index) == steps, "data first, then 16 GPUs"
    for name in ("train", "eval"):
        assert f"--data.{name}.0.path /shared/data/{name}.jsonl" in job["spec"]["entrypoint"]


def test_skypilot_takes_the_task() -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    schemas = json.loads((SCHEMAS / "skypilot-0.14.1-task.json").read_text())
    for what, found, wrong in (("task", task, "num_node"), ("resources", task["resources"], "accelerator")):
        validator = jsonschema.Draft7Validator(schemas[what])
        assert [error.message for error in validator.iter_errors(found)] == []
        assert [error.message for error in validator.iter_errors({**found, wrong: 2})]


def test_skypilot_keeps_its_ray_and_the_run_its_storage() -> None:
    text = (CLUSTER / "skypilot.yaml").read_text()
    task = yaml.safe_load(text)
    assert "ray stop" not in task["run"] and "pkill" not in task["run"], "SkyPilot has a Ray on the same nodes"
    (storage,) = re.findall(r"--run.storage (/\w+)/", task["run"])
    assert storage in task["volumes"] and storage not in task["file_mounts"], (
        "a mounted bucket has no rename and no locks"
    )
    for commands in (text, (ROOT / "docs" / "start" / "skypilot.md").read_text()):
        launches = re.findall(r"sky (?:jobs )?launch [^\n]*cluster/skypilot.yaml", commands)
        assert len(launches) == 2 and all("--secret RAY_AUTH_TOKEN --secret HF_TOKEN" in each for each in launches)
        assert "sky jobs cancel -n llama2-70b" in commands and "sky down raytune-fsdp" in commands


def test_one_version_of_ray() -> None:
    """In the package, the lock file and Kubernetes. Images are installed from the lock file."""
    (pin,) = re.findall(r'"ray\[[^]]*\]==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (locked,) = re.findall(r"^ray==([\d.]+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    job = yaml.safe_load((CLUSTER / "kuberay-rayjob.yaml").read_text())
    assert pin == locked == job["spec"]["rayClusterSpec"]["rayVersion"]


UBUNTU_PYTHON = "3.12.3"
"""What `apt-get install python3.12` brings in Ubuntu 24.04."""


def pythons() -> dict[str, str]:
    """The Python of each stage of the Dockerfile: of its base, or what is copied or installed there."""
    arguments: dict[str, str] = {}
    found: dict[str, str] = {}
    stage = ""
    for line in (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        for name, value in arguments.items():
            line = line.replace(f"${{{name}}}", value)
        words = line.split()
        match words:
            case ["ARG", argument] if not stage:
                arguments |= dict([argument.split("=")])
            case ["FROM", base, "AS", stage]:
                tag = re.fullmatch(r"python:([\d.]+)-.*", base)
                found[stage] = tag[1] if tag else found.get(base, "none")
            case ["COPY", origin, "/usr/local/bin", "/usr/local/bin"]:
                found[stage] = found[origin.removeprefix("--from=")]
            case ["RUN", *installed] if "apt-get" in installed and any(map(re.compile("python3").match, installed)):
                found[stage] = UBUNTU_PYTHON
    return found


def test_every_pod_has_the_python_and_the_ray_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself is asked, as it asks when a node joins."""
    (locked,) = re.findall(r"^ray==([\d.]+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    cluster = yaml.safe_load((CLUSTER / "kuberay-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    of_stage = pythons()

    def joins(head: str, node: str) -> None:
        monkeypatch.setattr(ray_utils, "compute_version_info", lambda: (locked, node))
        metadata = {"ray_version": cluster["rayVersion"], "python_version": head}
        ray_utils.check_version_info(metadata, "this node", python_version_match_level=None)

    def python_of(group: Mapping[str, Any]) -> str:
        (container,) = group["template"]["spec"]["containers"]
        return of_stage[container["image"].rpartition(":")[2]]

    monkeypatch.delenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", raising=False)
    head = python_of(cluster["headGroupSpec"])
    assert {group["groupName"] for group in cluster["workerGroupSpecs"]} == {"a100", "data"}
    for group in cluster["workerGroupSpecs"]:
        joins(head, python_of(group))
    assert {*of_stage.values()} == {head}, "environments are built where the same Python is that runs them"
    with pytest.raises(RuntimeError, match=r"3\.12\.3\b"):
        joins("3.12.12", "3.12.3")


CHECKPOINT = 12 * 68_976_648_192
"""Bytes: the recipe of all these files trains Llama 2 70B, with four bytes of weight and eight of moments a number."""
USUAL = 1.2e9
"""Bytes a second that are written, where the storage is the user's."""


def pod_specs() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The pods of a job, and their environments."""
    cluster = yaml.safe_load((CLUSTER / "kuberay-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        yield spec, {each["name"]: each.get("value", "") for each in spec["containers"][0]["env"]}


def written() -> dict[str, float]:
    """Bytes a second, as the storage of each file writes them, by what its page makes."""
    pages = {name: (ROOT / "docs" / "start" / f"{name}.md").read_text() for name in ("aws", "gcp")}
    (capacity,), (each,) = (
        re.findall(rf"{what}[ =](\d+)", pages["aws"]) for what in ("--storage-capacity", "PerUnitStorageThroughput")
    )
    (tebibytes,) = re.findall(r"--tier ZONAL .*\n.*capacity=(\d+)TB", pages["gcp"])
    # FSx: MB/s for each TiB. Filestore, zonal: 88 MiB/s of writing for each TiB (its page on service tiers).
    found = {"aws-p4d-a100.yaml": int(capacity) / 1000 * int(each) * 1e6}
    found["gcp-a2-a100.yaml"] = int(tebibytes) * 88 * 2**20
    return found | dict.fromkeys(("kuberay-rayjob.yaml", "local.yaml", "slurm.sh", "skypilot.yaml"), USUAL)


def waits() -> dict[str, list[float]]:
    """Seconds that whatever stops a run leaves it, in each file: each is at least as long as the next."""
    found: dict[str, list[float]] = {}
    for name in (*CLOUDS, "local"):
        (value,) = re.findall(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)", (CLUSTER / f"{name}.yaml").read_text())
        found[f"{name}.yaml"] = [float(value)]
    for number, (spec, environment) in enumerate(pod_specs()):
        drain, job = (
            float(environment.get(name, default))
            for name, default in (
                ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S),
                ("RAY_JOB_STOP_WAIT_TIME_S", JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S),
            )
        )
        # Ray itself takes a while to end after it.
        found[f"kuberay-rayjob.yaml, pod {number}"] = [spec.get("terminationGracePeriodSeconds", 30) - 60, drain, job]
    script = (CLUSTER / "slurm.sh").read_text()
    patterns = (r"^#SBATCH --signal=B:USR1@(\d+)$", rf"^export {STOP_SECONDS}=(\d+)$")
    found["slurm.sh"] = [float(*re.findall(each, script, re.MULTILINE)) for each in patterns]
    return found


def test_whatever_stops_a_run_waits_until_it_has_saved() -> None:
    """A stop needs two saves at most: the one that is being written, and the last. Where no file can make somebody wait
    for that, its page says how much can be saved."""
    speeds = written()
    covered = {*speeds, "again.sh", "aws-head-policy.json", "kuberay-storage.yaml", "mlflow"}
    assert {path.name for path in CLUSTER.iterdir()} == covered, "a new file: how long does what stops its runs wait?"
    timeout = 60 * CheckpointConfig().timeout_minutes
    for name, seconds in waits().items():
        save = CHECKPOINT / speeds[name.partition(",")[0]]
        assert save < timeout, f"{name}: a save is given up after {timeout:g} s (checkpoint.timeout_minutes)"
        assert [*seconds, 60 + 2 * save] == sorted([*seconds, 60 + 2 * save], reverse=True), (name, seconds, save)
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["envs"][STOP_SECONDS] == "0", "its pods end at once"
    for cloud, file in (("aws", "aws-p4d-a100.yaml"), ("gcp", "gcp-a2-a100.yaml")):
        most, save = SPOT_NOTICE_SECONDS[cloud] * speeds[file] / 1e9, CHECKPOINT / speeds[file]
        assert SPOT_NOTICE_SECONDS[cloud] < save
        page = " ".join((ROOT / "docs" / "start" / f"{cloud}.md").read_text().split())
        for said in (f"{most:.0f} GB at the most", f"{100 * round(save / 100)} s"):
            assert said in page, (cloud, said)
        assert f"{most:.0f} GB" in (CLUSTER / file).read_text()
    for page in ("start/slurm.md", "operations.md"):
        assert f"`{STOP_SECONDS}`" in (ROOT / "docs" / page).read_text(), page


def test_every_node_finds_the_hub_s_files_on_shared_storage_and_its_token() -> None:
    """In the environment of `ray start`, and nowhere else: no config, no runtime_env."""
    for name in (*CLOUDS, "local"):
        config = cluster(name)
        mount = "~/.hf-token" if name == "local" else "/home/ray/.hf-token"
        assert config["file_mounts"][mount] == "~/.cache/huggingface/token"
        for commands_of in ("head_start_ray_commands", "worker_start_ray_commands"):
            (start,) = [line for line in config[commands_of] if "ray start" in line]
            assert f"HF_TOKEN=$(cat {mount}) ray start" in start
            home = start if name == "local" else " ".join(config["docker"]["run_options"])
            (directory,) = re.findall(r"HF_HOME=(/\w+)/hf", home)
            assert directory == {"aws-p4d-a100": "/fsx"}.get(name, "/shared")
    for _, environment in pod_specs():
        assert environment["HF_HOME"] == "/shared/hf" and "HF_TOKEN" in environment
    (_, pod) = yaml.safe_load_all((CLUSTER / "kuberay-storage.yaml").read_text())
    assert "mkdir -p data runs hf; chown 1000:1000 data runs hf" in pod["spec"]["containers"][0]["command"][-1]
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["envs"]["HF_HOME"].startswith("/shared/") and "/shared" in task["volumes"]
    assert "HF_TOKEN" in task["secrets"]
    script = (CLUSTER / "slurm.sh").read_text()
    assert script.index("export HF_TOKEN") < script.index("ray start") and "export HF_HOME=" in script
    for page in (ROOT / "docs" / "start").glob("*.md"):
        assert not re.search(r"runtime-env-json .*HF_TOKEN", page.read_text()), page.name


APT = """#!/bin/sh
case "$*" in
  apt-get*) echo x >> {tried}; [ $(wc -l < {tried}) -gt 3 ] ;;
  tee*) cat > /dev/null ;;
esac
"""


def test_machines_of_ones_own_find_the_ray_of_the_environment(tmp_path: Path) -> None:
    """SSH runs each command in a shell of its own, whose PATH has no environment."""
    values = yaml.safe_load((ROOT / "cluster" / "local.yaml").read_text())
    programs = tmp_path / "raytune-fsdp-env" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    ray = programs / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    ray.chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "RAY_HEAD_IP": "192.0.2.10"}
    for command in (*values["head_start_ray_commands"], *values["worker_start_ray_commands"]):
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["stop", "start", "stop", "start"]


@pytest.mark.parametrize("name", CLOUDS)
def test_apt_s_lock_at_first_boot_is_waited_for(name: str, tmp_path: Path) -> None:
    """Somebody else has it at the first tries."""
    (line,) = [each for each in cluster(name)["initialization_commands"] if "apt-get" in each]
    for program, text in {"sudo": APT.format(tried=tmp_path / "tried"), "sleep": "", "wget": "", "gpg": ""}.items():
        (tmp_path / program).write_text(text or "#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    needs = {"mount.nfs", "mount.lustre"} & {*line.split()}
    assert needs and not any(map(shutil.which, needs)), "else nothing is installed"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "tried").read_text().split()) == 5, "the update at the fourth try, then the installation"


def test_the_mlflow_server_has_our_mlflow_and_no_password() -> None:
    compose = yaml.safe_load((CLUSTER / "mlflow" / "compose.yaml").read_text())
    server = compose["services"]["mlflow"]
    (version,) = re.findall(r"'mlflow\[auth\]==([\d.]+)'", server["build"]["dockerfile_inline"])
    assert f"mlflow=={version}" in (ROOT / "requirements.lock").read_text().splitlines()
    for service in compose["services"].values():
        for name, value in service["environment"].items():
            if "PASSWORD" in name or "SECRET" in name:
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{name} has to come from .env"
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])


def test_the_mlflow_server_takes_the_proxys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server.security_utils import (
        get_allowed_hosts_from_env,
        get_allowed_origins_from_env,
        is_allowed_host_header,
        should_block_cors_request,
    )

    server = yaml.safe_load((CLUSTER / "mlflow" / "compose.yaml").read_text())["services"]["mlflow"]
    for name in ("MLFLOW_SERVER_ALLOWED_HOSTS", "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"):
        monkeypatch.setenv(name, re.sub(r"\$\{SERVER[^}]*\}", "mlflow.example.com", server["environment"][name]))
    hosts, origins = get_allowed_hosts_from_env(), get_allowed_origins_from_env()
    assert (
        hosts
        and is_allowed_host_header(hosts, "mlflow.example.com")
        and is_allowed_host_header(hosts, "localhost:5000")
    )
    assert not is_allowed_host_header(hosts, "elsewhere.example.com")
    assert not should_block_cors_request("https://mlflow.example.com", "POST", origins)
    assert should_block_cors_request("https://elsewhere.example.com", "POST", origins)


def test_the_mlflow_servers_users_are_not_among_its_artifacts() -> None:
    compose = yaml.safe_load((CLUSTER / "mlflow" / "compose.yaml").read_text())
    server = compose["services"]["mlflow"]
    places = dict(reversed(each.split(":")) for each in server["volumes"])
    script = server["command"][-1]
    (users,) = re.findall(r"sqlite:///(/\w+)/", script)
    (artifacts,) = re.findall(r"--artifacts-destination (/\w+)", script)
    assert (
        users != artifacts and {users, artifacts} <= places.keys() and {*places.values()} <= compose["volumes"].keys()
    )


def test_recipes_named_in_these_files_exist() -> None:
    named = {
        name for path in CLUSTER.rglob("*.*") for name in re.findall(r"--config ([\w-]+)(?![\w./-])", path.read_text())
    } - {"my-run"}
    assert named and named <= recipes().keys()


CLOUD = """
import json, sys
from pathlib import Path

place = Path("{world}")
world = json.loads(place.read_text())

def end(code):
    place.write_text(json.dumps(world))
    sys.exit(code)

def goes_on(job):
    outcome = world["outcomes"].pop(0)
    if outcome in ("head lost", "Ray lost"):
        world["head"], world["jobs"], world["stuck"] = False, {{}}, outcome == "Ray lost"
        end(1)
    of = {{"out of sight": (3, 0), "gone": (99, 0), "unseen": (0, 2)}}
    world["hidden"], world["unseen"] = of.get(outcome, (0, 0))
    world["jobs"][job] = "RUNNING None" if world["hidden"] or world["unseen"] else outcome
    end(outcome != "SUCCEEDED 0")

program, *words = sys.argv[1:]
if program == "python":
    if len(words) == 2:
        assert words == ["-c", "import ray.job_submission"]
        sys.exit(0)
    if world["unseen"]:
        world["unseen"] -= 1
        end(1)
    if world["hidden"] or not world["head"]:
        sys.exit(1)
    print(world["jobs"].get(words[-1], "unknown"))
    sys.exit(0)
world["said"].append(words)
match words:
    case ["job", "list"]:
        world["hidden"] = max(0, world["hidden"] - 1)
        print(world["refuses"], file=sys.stderr)
        end(bool(world["hidden"] or world["refuses"] or not world["head"]))
    case ["exec", _, command]:
        assert "cs_server" in command
        print(world["exec"] or f"found: {{int(world['stuck'])}}\\r")
    case ["up", *_] if world["hidden"]:
        end(1)
    case ["up", *_]:
        world["stuck"] = world["stuck"] and "--no-restart" in words
        world["head"] = world["head"] or (world["cloud"] and not world["stuck"])
        end(not world["cloud"])
    case ["job", "submit", "--submission-id", job, *_] | ["job", "logs", "--follow", job]:
        goes_on(job)
end(0)
"""
STAND_IN = """#!/bin/sh
# The way to the head is there beside the others: it must not write.
[ "$1" = dashboard ] || exec {python} -IS {cloud} {name} "$@"
"""


COMMAND = ["python", "jobs/finetune.py", "--run.name", "a run"]
GENTLE, RESTART = ["up", "--yes", "--no-restart", "the.yaml"], ["up", "--yes", "the.yaml"]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def called(programs: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """What `again.sh` makes of these programs."""
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PAUSE": "0", "TRIES": "4", **settings}
    return subprocess.run(
        [CLUSTER / "again.sh", "the.yaml", *COMMAND], env=environment, capture_output=True, text=True, timeout=60
    )


def again(directory: Path, tries: int = 4, **state: Any) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The same, with stand-ins for a whole cloud; and what became of that."""
    world = {
        "outcomes": [], "jobs": {}, "said": [], "head": False, "stuck": False, "cloud": True, "hidden": 0, "unseen": 0,
        "refuses": "", "exec": "",
    }  # fmt: skip
    place = directory / "world"
    place.write_text(json.dumps(world | state))
    (directory / "cloud.py").write_text(CLOUD.format(world=place))
    for name in ("ray", "python"):
        program(directory / name, STAND_IN.format(python=sys.executable, cloud=directory / "cloud.py", name=name))
    return called(directory, TRIES=str(tries)), json.loads(place.read_text())


@pytest.mark.parametrize(
    ("outcomes", "code", "submitted", "made"),
    [
        pytest.param(["SUCCEEDED 0"], 0, 1, 1, id="done"),
        pytest.param(["FAILED -9", "FAILED 1", "SUCCEEDED 0"], 0, 3, 1, id="driver killed, then failed"),
        pytest.param(["head lost", "SUCCEEDED 0"], 0, 2, 2, id="head lost"),
        pytest.param(["Ray lost", "SUCCEEDED 0"], 0, 2, 2, id="Ray lost on a head that is there"),
        pytest.param(["RUNNING None", "RUNNING None", "SUCCEEDED 0"], 0, 1, 1, id="connection lost"),
        pytest.param(["RUNNING None", "head lost", "FAILED None", "SUCCEEDED 0"], 0, 3, 2, id="one after the other"),
        pytest.param(["FAILED 2"], 2, 1, 1, id="refused"),
        pytest.param(["FAILED -9", "FAILED 3"], 3, 2, 1, id="the same failure again and again"),
        pytest.param(["STOPPED None"], 130, 1, 1, id="stopped"),
        pytest.param(["FAILED 1"] * 4, 1, 4, 1, id="failing"),
        pytest.param([], 1, 0, 4, id="no cloud"),
        pytest.param(["out of sight", "SUCCEEDED 0"], 0, 1, 3, id="the way to the head lost for a while"),
        pytest.param(["unseen", "FAILED 3"], 3, 1, 1, id="its state cannot be had twice"),
        pytest.param(["gone"], 1, 1, 5, id="the way to the head lost for good"),
    ],
)
def test_a_run_whose_driver_or_head_is_lost_is_submitted_again(
    outcomes: list[str], code: int, submitted: int, made: int, tmp_path: Path
) -> None:
    """The loop itself, with a cloud that cannot be had here: `ray` and `python` are stand-ins."""
    done, found = again(tmp_path, outcomes=outcomes, cloud=bool(outcomes))
    assert done.returncode == code, done.stderr
    assert found["outcomes"] == []
    assert ("may go on" in done.stderr) == (outcomes == ["gone"])
    jobs = [words for words in found["said"] if words[:2] == ["job", "submit"]]
    assert [words[4:] for words in jobs] == [["--working-dir", ".", "--", *COMMAND]] * submitted
    assert len({words[3] for words in jobs}) == submitted, "Ray takes an id only once"
    ups = [words for words in found["said"] if words[0] == "up"]
    assert [up for up in ups if up != RESTART] == [GENTLE] * made
    assert ups.count(RESTART) == outcomes.count("Ray lost"), "a restart would end a run that goes on"


@pytest.mark.parametrize(
    ("refuses", "answer", "code", "made", "said"),
    [
        (f"Authentication required: no\n\n{NO_TOKEN}", "", 2, 0, "this shell has no token, or not that of"),
        (f"Authentication failed: no\n\n{WRONG_TOKEN}", "", 2, 0, "this shell has no token, or not that of"),
        ("Version check returned 404.", "", 1, 2, "Ray runs on the head, so it is not started again"),
        ("Failed to connect to Ray", "ssh: timed out", 1, 2, "the head does not say whether its Ray runs"),
    ],
)
def test_a_ray_that_this_shell_cannot_ask_is_not_started_again(
    refuses: str, answer: str, code: int, made: int, said: str, tmp_path: Path
) -> None:
    """That would end all jobs on a head that is well."""
    done, found = again(tmp_path, tries=2, head=True, refuses=refuses, exec=answer)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert code == 2 or f"no answer from http://127.0.0.1:8265: {refuses}" in done.stderr
    assert [words for words in found["said"] if words[0] == "up"] == [GENTLE] * made
    assert not [words for words in found["said"] if words[:2] == ["job", "submit"]]


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403])
def test_a_head_that_refuses_this_shell_is_known_by_what_ray_says(status: int, tmp_path: Path) -> None:
    """Ray's own program; what answers it is not a head."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address, token = (
            f"http://127.0.0.1:{server.server_port}",
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64},
        )
        done = called(TOOLS, RAY_API_SERVER_ADDRESS=address, NO_PROXY="127.0.0.1", **token)
        server.shutdown()
    assert done.returncode == 2 and f"this shell has no token, or not that of {address}" in done.stderr, done.stderr


@pytest.mark.parametrize("runs", [True, False])
def test_a_head_knows_whether_its_ray_runs(runs: bool, tmp_path: Path) -> None:
    """Also where `ray` is in an environment that only its start command names, as in local.yaml."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    (question,) = re.findall(r"ray exec \"\$cluster\" '(.*)'", (CLUSTER / "again.sh").read_text())
    server = tmp_path / "gcs_server"
    shutil.copy("/bin/sleep", server)
    begin = f"{server} 60 & sleep 0.2; " if runs else ""
    call = f"{begin}bash --login -c -i {shlex.quote(f'export A=b && ({question})')}"  # as Ray calls it
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", call], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith(f"found: {0 if runs else 1}\n"), done


def test_a_python_without_ray_is_refused(tmp_path: Path) -> None:
    """It could not see how a run goes."""
    program(tmp_path / "python", "#!/bin/sh\nexit 1\n")
    program(tmp_path / "ray", f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    done = called(tmp_path)
    assert done.returncode == 2 and "the python of this shell has no Ray" in done.stderr
    assert not (tmp_path / "asked").exists()


TUNNELS = """#!/bin/sh
# The first way leads to a head that is gone; while its ssh is there nobody else gets the port, and the second fails.
cd {place}
lives() {{ grep -q sleep /proc/$1/cmdline; }} # a dead one that nobody has asked for is still there, without words
case "$1" in
  dashboard)
    echo x >> ways
    [ $(wc -l < ways) = 2 ] && exit 1
    sleep 300 &
    echo $! >> ssh
    wait ;;
  exec) echo "found: 1" ;;
  up) echo "$*" >> ups ;;
  job) [ "$2" = list ] || exit 0
    [ -e ssh ] && [ $(wc -l < ssh) = 2 ] && ! lives $(head -n 1 ssh) && lives $(tail -n 1 ssh) ;;
esac
"""


def test_a_way_to_the_head_is_dug_until_it_is_there_and_leaves_nothing(tmp_path: Path) -> None:
    program(tmp_path / "python", '#!/bin/sh\n[ $# = 2 ] || echo "SUCCEEDED 0"\n')
    program(tmp_path / "ray", TUNNELS.format(place=tmp_path))
    program(tmp_path / "sleep", '#!/bin/sh\n[ "$1" = 300 ] || set -- 0.1\nexec /bin/sleep "$1"\n')
    done = called(tmp_path, TRIES="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ups").read_text().splitlines() == [" ".join(GENTLE), " ".join(RESTART)]
    assert len((tmp_path / "ways").read_text().split()) == 3
    for each in (tmp_path / "ssh").read_text().split():
        words = Path("/proc", each, "cmdline")
        assert not words.exists() or "sleep" not in words.read_text()


def test_a_wheel_brings_its_dependencies_and_what_the_page_says_instead_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(packaging, "exec_cmd_stream_to_logger", lambda command, _: ran.append(command) or (0, ""))
    asyncio.run(packaging.install_wheel_package("our.whl", str(tmp_path)))
    assert ran == [["pip", "install", "our.whl", f"--target={tmp_path}"]], "else the page may say otherwise"
    page = (ROOT / "docs" / "operations.md").read_text()
    environments = [json.loads(each) for each in re.findall(r"""[`'](\{"(?:py_modules|pip)": .*\})['`]""", page)]
    assert [[*each] for each in environments] == [["py_modules"], ["pip"]]
    for each in environments:
        RuntimeEnv(**each)  # Ray's own validation
    assert (ROOT / environments[0]["py_modules"][0]).is_dir()
    assert environments[1]["pip"]["pip_install_options"] == ["--no-deps"]


@pytest.mark.parametrize(
    "path",
    ["cluster/slurm.sh", "cluster/again.sh", "docker/install.sh", "benchmarks/gpu/fetch.sh", "benchmarks/gpu/there.sh"],
)
def test_shellcheck_has_nothing_to_say(path: str) -> None:
    done = subprocess.run([TOOLS / "shellcheck", path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck_has_nothing_to_say_of_skypilots_script() -> None:
    script = "#!/bin/bash\n" + yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())["run"]
    done = subprocess.run([TOOLS / "shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [TOOLS / "hadolint", "docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_efa_is_installed_in_the_last_stage() -> None:
    """Its libraries are in /usr/lib, too, which a copy of /opt/amazon would leave behind."""
    build, last = (ROOT / "docker" / "Dockerfile").read_text().split("# ---- gpu ----")[1].split(" AS gpu\n")
    assert "efa_installer.sh" in last and "efa_installer.sh" not in build and "/opt/amazon /opt/amazon" not in last
    assert "ldd" in last and "'not found'" in last


def test_slurm_gives_ray_all_of_a_node_s_cpus() -> None:
    """Since Slurm 22.05 srun does not inherit sbatch's --cpus-per-task, and sites that bind tasks give one core."""
    script = (CLUSTER / "slurm.sh").read_text()
    (started,) = re.findall(r"exec srun (.+?) --nodelist", script)
    assert '--cpus-per-task="$SLURM_CPUS_ON_NODE"' in started and '--num-cpus "$SLURM_CPUS_ON_NODE"' in script


def test_slurms_environment_is_not_in_the_checkout() -> None:
    """`git clone` in the home directory makes ~/raytune-fsdp."""
    (prefix,) = re.findall(r"docker/install.sh ~/(\S+) all", (ROOT / "docs" / "start" / "slurm.md").read_text())
    assert prefix != "raytune-fsdp" and f"$HOME/{prefix}}}/bin/activate" in (CLUSTER / "slurm.sh").read_text()


def test_a_relative_prefix_is_the_callers(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / "env" / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/log\n')
        (tmp_path / "env" / "bin" / name).chmod(0o755)
    done = subprocess.run([ROOT / "docker" / "install.sh", "env", "all,aws"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("requirements.lock .[all,aws]")
    assert not (ROOT / "env").exists()
