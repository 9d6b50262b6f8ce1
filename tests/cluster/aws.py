"""Ray's AWS code on cluster/aws-p4d-a100.yaml, against moto's imitation of EC2: prints what became of it as JSON.

    python -m tests.cluster.aws

In a process of its own, because both settle what they need from the environment when they are imported.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "cluster" / "aws-p4d-a100.yaml"


def main() -> None:
    home = tempfile.mkdtemp()
    Path(home, ".ssh").mkdir()
    os.environ |= {
        "HOME": home,
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = tried()
    finally:
        server.stop()
    print(json.dumps(found))


def tried() -> dict[str, Any]:
    import boto3
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    ec2 = boto3.client("ec2", "us-east-1")
    gaps = {}
    try:
        ec2.create_placement_group(GroupName="raytune-fsdp", Strategy="cluster")
    except Exception as error:
        gaps["create_placement_group"] = type(error).__name__
    iam = boto3.client("iam", "us-east-1")
    for name in ("raytune-fsdp-head", "raytune-fsdp-node"):
        iam.create_instance_profile(InstanceProfileName=name)
    config = prepare_config(edited(ec2))
    validate_config(config)
    config = AWSNodeProvider.fillout_available_node_types_resources(config)
    config = bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    made = {}
    for kind, node in config["available_node_types"].items():
        tags = {
            "ray-node-kind": "head" if kind == "head" else "worker",
            "ray-user-node-type": kind,
            "ray-node-name": kind,
        }
        asked = copy.deepcopy(node["node_config"]) | (config["head_node"] if kind == "head" else {})  # as `ray up` does
        (name,) = provider.create_node(asked, tags, 1)
        (instance,) = ec2.describe_instances(InstanceIds=[name])["Reservations"][0]["Instances"]
        made[kind] = {
            "type": instance["InstanceType"],
            "lifecycle": instance.get("InstanceLifecycle"),
            "cards": len({card["Attachment"]["DeviceIndex"] for card in instance["NetworkInterfaces"]}),
            "resources": node["resources"],
            "placement": node["node_config"].get("Placement"),
            "profile": instance["IamInstanceProfile"]["Arn"].rpartition("/")[2],
        }
    running = provider.non_terminated_nodes({})
    provider.terminate_nodes(running)
    return {
        "made": made, "running": len(running), "left": len(provider.non_terminated_nodes({})), "gaps": gaps,
        "roles": [role["RoleName"] for role in iam.list_roles()["Roles"]],
        "keys": [key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]],
    }  # fmt: skip


def edited(ec2: Any) -> dict[str, Any]:
    """The file with what a user fills in."""
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    zone = {"Name": "availability-zone", "Values": [config["provider"]["availability_zone"]]}
    subnet = ec2.describe_subnets(Filters=[zone])["Subnets"][0]["SubnetId"]
    group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    for kind in config["available_node_types"].values():
        node = copy.deepcopy(kind["node_config"])  # the file's nodes share their parts
        node["ImageId"] = image
        if "SubnetIds" in node:
            node |= {"SubnetIds": [subnet], "SecurityGroupIds": [group]}
        for card in node.get("NetworkInterfaces", []):
            card |= {"SubnetId": subnet, "Groups": [group]}
        kind["node_config"] = node
    return config


if __name__ == "__main__":
    main()
