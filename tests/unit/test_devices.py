"""The table of devices, the names that people and torch call them by, and speeds as people write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.predict.devices import DEVICES, GIB, find_device, link_speed, most_memory
from raytune_fsdp.step.flops import PEAK_FLOPS, peak_flops

TERA_OF = {
    "A100": 312, "A800": 312, "A10": 125, "A10G": 70, "A30": 165, "A40": 150, "B200": 2250, "B300": 2250,
    "GB200": 2500, "GB300": 2500, "GH200": 989, "H20": 148, "H100": 989, "H100-NVL": 835, "H100-PCIe": 756,
    "H200": 989, "H200-NVL": 835, "H800": 989, "L4": 121, "L20": 119.5, "L40": 181, "L40S": 362, "MI210": 181,
    "MI250X": 191.5, "MI300X": 1307, "MI325X": 1307, "MI350X": 2307, "MI355X": 2516, "RTX-3080": 59.5,
    "RTX-3090": 71, "RTX-3090-Ti": 80, "RTX-4080": 97.5, "RTX-4090": 165, "RTX-5080": 112.6, "RTX-5090": 209.5,
    "RTX-5000-Ada": 261, "RTX-6000-Ada": 364, "RTX-A5000": 111, "RTX-A6000": 155, "RTX-PRO-6000": 504, "T4": 65,
    "V100": 125,
}  # fmt: skip


def test_every_device_has_the_peak_of_its_kind() -> None:
    assert len(DEVICES) >= 36
    kinds = set()
    for name, device in DEVICES.items():
        kind = name if name in TERA_OF else name.split("-")[0]
        kinds.add(kind)
        assert device.name == name
        assert (device.peak, peak_flops(name)) == (TERA_OF[kind] * 1e12,) * 2, name
    assert kinds == set(TERA_OF)


def test_every_peak_belongs_to_a_device_that_a_plan_knows() -> None:
    known = {peak_part for peak_part in PEAK_FLOPS if any(peak_part == _part_of(name) for name in DEVICES)}
    assert known == set(PEAK_FLOPS)


def _part_of(name: str) -> str:
    spaced = name.replace("-", " ")
    return next(part for part in PEAK_FLOPS if spaced.startswith(part))


def test_the_numbers_of_devices_are_of_the_right_size() -> None:
    """A slip by a factor of 1000, of 8, or a missing number would show here."""
    for device in DEVICES.values():
        assert 0.9 * device.sold_gb * 1e9 < device.memory <= device.sold_gb * GIB, device
        assert 0.3e12 <= device.bandwidth <= 8e12, device
        assert 15e9 < device.link_bandwidth <= 900e9 and device.link_bandwidth < device.bandwidth, device
        assert 0.5 < device.matmul < 0.9, device
        # Operations a byte: an H20 has the fewest (30), an RTX 5000 Ada the most (367).
        assert 29 < device.peak * device.matmul / device.bandwidth < 370, device


def test_fractions_are_the_published_ones_and_others_say_whom_they_are_like() -> None:
    published = {
        "A100-80GB": 0.869, "A100-PCIe-80GB": 0.811, "H100": 0.803, "B200": 0.776, "B300": 0.786, "GB200": 0.729,
        "GH200-144GB": 0.838,
    }  # fmt: skip
    for name, fraction in published.items():
        assert DEVICES[name].matmul == pytest.approx(fraction, abs=0.0006)
        assert DEVICES[name].matmul_basis.startswith("measured by stas00/ml-engineering")
    # The table divides by 1300 and 2300; what it measured is kept, not its fraction.
    assert DEVICES["MI300X"].matmul * DEVICES["MI300X"].peak == pytest.approx(668.4e12)
    assert DEVICES["MI355X"].matmul * DEVICES["MI355X"].peak == pytest.approx(1565e12)
    assert DEVICES["H200"].matmul_basis == "assumed, like H100" and DEVICES["H200"].matmul == DEVICES["H100"].matmul
    assert DEVICES["L40S"].matmul_basis == "assumed, like A100-PCIe-80GB"


def test_only_cards_before_ampere_have_no_bf16() -> None:
    assert {name.split("-")[0] for name, device in DEVICES.items() if not device.bf16} == {"V100", "T4"}


def test_memory_says_what_it_rests_on() -> None:
    assert (DEVICES["H200"].memory, DEVICES["H200"].memory_basis) == (139.80 * GIB, "reported")
    assert DEVICES["H800"].memory_basis == "reported for its size"
    assert (DEVICES["MI355X"].memory, DEVICES["MI355X"].memory_basis) == (288e9, "nominal")


def test_a_run_is_not_refused_for_the_smallest_of_those_that_ray_calls_the_same() -> None:
    assert most_memory(DEVICES["H100"]) == int(DEVICES["H100-96GB"].memory) > int(DEVICES["H100-NVL"].memory)
    assert most_memory(DEVICES["L40"]) == int(DEVICES["L40"].memory) != most_memory(DEVICES["L4"])


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_found_by_its_name_however_it_is_written(name: str) -> None:
    for written in (name, name.lower(), name.replace("-", " "), f"NVIDIA {name}", f" {name.upper()} "):
        assert find_device(written).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("H100PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("h100 sxm5", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("B200-192GB", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("a6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("3090ti", "RTX-3090-Ti"),
        ("AMD Instinct MI300X", "MI300X"),
        ("A100 80 GB", "A100-80GB"),
    ],
)
def test_the_names_that_torch_and_people_use_are_found(written: str, name: str) -> None:
    assert find_device(written).name == name


@pytest.mark.parametrize(
    ("written", "names"),
    [("A100", ["A100-40GB", "A100-80GB"]), ("V100", ["V100-16GB", "V100-32GB"]), ("GH200", ["GH200-96GB"])],
)
def test_a_name_of_two_sizes_is_refused_with_both(written: str, names: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{written!r} comes in 2 sizes: write") as refused:
        find_device(written)
    assert all(name in str(refused.value) for name in names)


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("H100S", "H100"),
        ("MI300", "MI300X"),
        ("RTX 4090 Laptop GPU", "RTX-4090"),  # another chip
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100-80GB"),  # a part of one
        ("H100 40GB", "H100"),
        ("Quadro RTX 6000", "RTX-6000-Ada"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest(written: str, near: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_device(written)
    assert str(refused.value).startswith(f"the device {written!r} is not known; the nearest are ")
    assert near in str(refused.value).split(". To list all: ")[0]


def test_what_is_like_nothing_is_refused_with_a_command_that_lists_all() -> None:
    for nothing in ("", "cpu", "%%%", "9" * 5000 + "GB"):
        with pytest.raises(ConfigError, match="is not known") as refused:
            find_device(nothing)
    command = str(refused.value).split("To list all: ")[1]
    code = command.removeprefix('python -c "').removesuffix('"')
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == list(DEVICES)


def test_devices_need_no_torch() -> None:
    code = "import sys, raytune_fsdp.predict.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_speeds_are_read_in_bits_and_bytes() -> None:
    assert link_speed("400Gbps") == link_speed("50GB/s") == link_speed(" 50.0 GB/s ") == 50e9
    assert link_speed("3200 Gbps") == 400e9
    assert link_speed("0.8Gbps") == pytest.approx(0.1e9)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("400", "no unit"),
        ("400GBps", "the unit 'GBps'"),  # bits or bytes?
        ("400gbps", "the unit 'gbps'"),
        ("50GiB/s", "the unit 'GiB/s'"),
        ("3.2Tbps", "the unit 'Tbps'"),
        ("fast", "no number"),
        ("", "no number"),
        ("-5Gbps", "no number"),
        ("nanGbps", "no number"),
        ("0Gbps", "none that a link has"),
        ("0.0 GB/s", "none that a link has"),
        ("9" * 400 + "Gbps", "none that a link has"),
    ],
)
def test_other_speeds_are_refused_with_what_to_write(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        link_speed(text)
    assert "400Gbps" in str(refused.value) and "50GB/s" in str(refused.value)
