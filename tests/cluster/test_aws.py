"""`ray up` on AWS, as far as an imitation of EC2 goes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow  # Ray asks for every instance type there is
def test_ray_makes_lists_and_removes_every_kind_of_node() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.aws"], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])  # both write there, too
    made = found["made"]
    assert {kind: node["type"] for kind, node in made.items()} == {
        "head": "m6i.4xlarge", "a100_80gb": "p4de.24xlarge", "a100_80gb_spot": "p4de.24xlarge",
        "a100_40gb": "p4d.24xlarge", "cpu": "m6i.8xlarge",
    }  # fmt: skip
    assert {kind: node["lifecycle"] for kind, node in made.items() if node["lifecycle"]} == {"a100_80gb_spot": "spot"}
    for kind, node in made.items():
        gpus = kind.startswith("a100")
        # moto keeps one card for each device index. test_files.py counts those that are asked for.
        assert node["cards"] == (2 if gpus else 1)
        assert node["resources"]["CPU"] == {"head": 0, "cpu": 32}.get(kind, 96)
        assert node["resources"].get("GPU") == (8 if gpus else None)
        assert (node["placement"] or {}).get("GroupName") == ("raytune-fsdp" if gpus else None)
        assert node["profile"] == ("raytune-fsdp-head" if kind == "head" else "raytune-fsdp-node")
    assert found["roles"] == [], "Ray's own has all of EC2 and S3"
    assert found["keys"] == ["ray-autoscaler_us-east-1"], "docs/start/aws.md deletes it"
    assert found["running"] == len(made) and found["left"] == 0
    # What moto does not have: it answers with nothing that botocore can read.
    assert found["gaps"] == {"create_placement_group": "ResponseParserError"}
