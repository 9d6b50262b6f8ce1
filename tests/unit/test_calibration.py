"""What a machine was measured to do: its file, and what is planned by it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.plan import main
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import Calibration, Surface, device_of, read_calibration, write_calibration
from raytune_fsdp.predict.links import network_of
from raytune_fsdp.predict.prediction import PROCESS, Cluster, predict
from raytune_fsdp.predict.speed import rates_of
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.work import Operation
from tests.runs import LLAMA, make_config

FLAT = Surface(((64.0, 64.0, 1e9),))

MADE = Calibration(
    device="EPYC", kind="cpu", memory=8 * 2**30, ranks=2, threads=1,
    products={"2": Surface(((8, 8, 4e9), (8, 128, 4e9), (128, 128, 16e9))), "4": FLAT},
    attention={f"{width} {way}": FLAT for width in "24" for way in ("forward", "backward")},
    elementwise=Surface(((1e3, 1e3, 1e9), (1e9, 1e9, 1e9))),
    per_operation=1e-5, per_collective=1e-3, gathering=2e9, reducing=1e9,
    reached={"2": 0.5, "4": 0.8}, torch="2.13.0", date="2026-11-25",
)  # fmt: skip


def test_rates_between_measured_sizes() -> None:
    surface = Surface(((8, 8, 1.0), (8, 32, 4.0), (32, 32, 16.0), (8, 512, 4.0), (512, 512, 64.0)))
    assert surface.at(8, 32) == 4 and surface.at(32, 32) == pytest.approx(16)
    assert surface.at(16, 32) == pytest.approx(8)  # half way, by logarithms
    assert surface.at(64, 512) == pytest.approx(4 * 16 ** (1 / 2))
    assert surface.at(8, 16) == pytest.approx(2)
    assert surface.at(1, 1) == 1 and surface.at(10**6, 10**6) == pytest.approx(64)  # nothing is made up beyond them
    assert surface.at(0, 0) == 1  # of an operation whose sides are not known


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    write_calibration(MADE, path)
    assert read_calibration(path) == MADE
    later = replace(MADE, date="2026-11-26")
    write_calibration(later, path)  # the older one is replaced
    assert read_calibration(path) == later
    path.write_text("notes")
    with pytest.raises(ConfigError, match="is not what `raytune-fsdp plan --calibrate` writes"):
        write_calibration(MADE, path)
    assert path.read_text() == "notes"


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            values = values[int(name) if isinstance(values, list) else name]
        values[int(last) if isinstance(values, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda values: values.pop("torch"), "it has the keys"),
        (_set("more", 1), "it has the keys"),
        (_set("format", 2), "this version reads only format 1"),
        (_set("kind", "tpu"), "it has kind 'tpu'"),
        (_set("device", "a\x1b[2J"), "it has device"),
        (_set("ranks", 0), "it has ranks 0"),
        (_set("ranks", 2.5), "it has ranks 2.5"),
        (_set("memory", True), "it has memory True"),
        (_set("per_operation", -1.0), "it has per_operation -1.0"),
        (_set("gathering", 0.0), "it has gathering 0.0"),
        (_set("per_collective", "1"), "it has per_collective '1'"),
        (_set("products", {"2": [[1, 1, 1]]}), "it has products"),
        (_set("products.2", []), r"it has products \[\]"),
        (_set("products.2.0", [1, 2]), r"it has \[1, 2\] in products"),
        (_set("attention.2 forward.0.2", 0), "it has attention 0"),
        (_set("elementwise.0.1", 1e308), "it has elementwise 1e"),
        (_set("elementwise", [[1, 1, 1]] * 2000), "it has elementwise"),
        (_set("reached.4", 0), "it has reached of 4 0"),
    ],
)
def test_a_forged_file_is_refused(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    path = tmp_path / "here.json"
    write_calibration(MADE, path)
    values = copy.deepcopy(json.loads(path.read_text()))
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=says):
        read_calibration(path)


def test_the_time_of_operations_by_what_was_measured() -> None:
    rates = rates_of(device_of(MADE), compiled=True, tf32=True, itemsize=2)
    assert rates.reached == 0.5 and not rates.hides
    operations = [
        Operation("products", 32e9, 0, 2, (32, 128)),  # 8e9 a second: half way between 4 and 16
        Operation("attention backward", 1e9, 0, 4, (64, 64)),
        Operation("rest", 0.0, 500_000_000, 4),  # no graph is made on a CPU
        Operation("collective", 0.0, 0, 0),  # is no work of the cores
    ]
    assert rates.seconds(operations) == pytest.approx(4 + 1 + 0.5 + 3 * 1e-5)
    on_gpu = replace(MADE, kind="cuda")
    gpu = rates_of(device_of(on_gpu), compiled=True, tf32=True, itemsize=2)
    assert gpu.hides
    # Launches are behind the device, or the device behind them.
    assert gpu.seconds(operations[:1]) == pytest.approx(4)
    assert gpu.seconds([Operation("rest", 0.0, 1, 4)] * 100) == pytest.approx(100 * 1e-5 / 5)
    assert gpu.seconds(operations[2:]) == pytest.approx(0.35 * 0.5)  # fused
    assert gpu.uncompiled().seconds(operations[2:]) == pytest.approx(0.5)
    network = network_of(device_of(MADE), 2, None)
    assert (network.inside, network.reducing, network.per_collective, network.share) == (2e9, 1e9, 1e-3, 1.0)


def _config(directory: Path) -> Any:
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 10}
    return make_config(directory, {**LLAMA, "num_hidden_layers": 3}, parallel={"precision": "fp32"}, train=train)


@pytest.mark.slow
def test_a_step_is_the_sum_of_its_operations_and_of_what_moves(tmp_path: Path) -> None:
    config = _config(tmp_path)
    subject = ModelSpec.of(config)
    fast = replace(MADE, gathering=1e20, reducing=1e20, per_collective=1e-12)
    slow = replace(MADE, gathering=1e6, reducing=1e6, per_collective=1e-12)
    often = replace(fast, per_collective=1.0)
    found = {
        name: predict(subject, config, resolve(config, 2), Cluster(device=device_of(each), per_node=2))
        for name, each in (("fast", fast), ("slow", slow), ("often", often))
    }
    seconds = {name: each.seconds for name, each in found.items()}
    assert seconds["fast"].step == pytest.approx(seconds["fast"].compute + seconds["fast"].update)
    traffic = found["slow"].traffic
    assert traffic is not None
    assert seconds["slow"].step - seconds["fast"].step == pytest.approx(traffic.bytes / 1e6, rel=1e-6)
    # Three blocks and what is before and after them: gathered, for backward again, but for the end, and reduced; and
    # what ranks tell each other in a step.
    assert found["fast"].plan.division.full_rounds == 1
    assert round(seconds["often"].step - seconds["fast"].step) == 5 + 4 + 5 + 2
    fast_twice = replace(fast, reached={"2": 1.0, "4": 1.6})
    again = predict(subject, config, resolve(config, 2), Cluster(device=device_of(fast_twice), per_node=2))
    assert again.seconds.step == pytest.approx(seconds["fast"].step / 2)
    assert found["fast"].assumed == {"process and libraries": PROCESS}
    low, high = again.interval
    assert low == pytest.approx(again.seconds.step / 1.25) and high == pytest.approx(again.seconds.step / 0.75)


@pytest.mark.slow
def test_plans_on_a_measured_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "here.json", tmp_path / "run.yaml"
    write_calibration(MADE, file)
    config = _config(tmp_path)
    run.write_text(json.dumps(config.model_dump(exclude_unset=True, mode="json")))
    plan = ["--config", str(run), "--gpu", str(file)]
    assert main([*plan, "--world-size", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["on_gpus"]
    assert data["device"] == "EPYC" and data["memory"]["of"] == 4 * 2**30  # two ranks share it
    assert main([*plan, "--world-size", "2"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "kernels of EPYC, measured by 2 ranks at a time on 2026-11-25" in page
    assert "of which real steps there reach 80%" in page and "(by the same cores)" in page
    write_calibration(replace(MADE, ranks=1, gathering=0.0, reducing=0.0, per_collective=0.0), file)
    assert main([*plan, "--world-size", "1"]) == 0
    capsys.readouterr()
    assert main([*plan, "--world-size", "2"]) == 2
    assert "was measured by one rank alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{}/x.txt"], "its name must end in .json"),
        (["{}/none/x.json"], "there is no directory"),
        (["{}/x.json", "--gpu", "H100"], "measures this machine and plans nothing"),
        (["{}/x.json", "--train.max_steps", "3"], "measures this machine and plans nothing"),
        (["{}/x.json", "--world-size", "0"], "--world-size 0 must be at least 1"),
    ],
)
def test_what_cannot_be_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["--calibrate", *(each.format(tmp_path) for each in arguments)]) == 2
    assert says in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks at a time. What it says of real steps is compared by benchmarks/planned_time.py, on a quiet machine."""
    file = tmp_path / "here.json"
    assert main(["--calibrate", str(file), "--world-size", "2"]) == 0
    said, found = capsys.readouterr(), read_calibration(file)
    assert found.ranks == 2 and found.kind == "cpu" and f"plan with --gpu {file}" in said.out
    assert 1e8 < found.peak < 1e13 and 1e-7 < found.per_operation < 1e-3 and 1e7 < found.gathering < 1e12
    assert all(0.05 < share < 5 for share in found.reached.values())
    assert found.products["4"].at(8, 1024) < found.products["4"].at(256, 1024)  # thin products are slow
