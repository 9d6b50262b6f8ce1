"""`raytune-fsdp plan --gpu`: what it prints, what it refuses, and that every recipe fits the hardware that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.plan import main
from raytune_fsdp.config.load import load_config, recipes
from raytune_fsdp.config.sections.model import ModelConfig
from raytune_fsdp.model.network import build_base, load_architecture
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.alternatives import alternatives, cheapest_fit, micro_batches, with_micro_batch
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.page.text import WIDTH
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec, bundled
from raytune_fsdp.predict.teacher import teacher_pass
from raytune_fsdp.record.jsonl import append_event

_HARDWARE = re.compile(r"Hardware: (\d+) x (\w+)(?: 80 GB)? on (\d+) node")

_LARGE = (
    *("llama3-70b-qlora", "falcon-180b-lora", "gpt-oss-20b-lora", "qwen3-8b-lora", "qwen3.5-9b-lora"),
    *("llama3-8b-reward", "llama3.1-70b-to-8b-distill"),
)
"""Recipes that take the planner four seconds or more each."""

SEVENTY = ("--config", "llama2-70b-full-16xa100", "--gpu", "A100-80GB", "--network", "400Gbps", "--price", "2.5")


def on_hardware() -> list[Any]:
    found = []
    for name, path in recipes().items():
        if match := _HARDWARE.search(path.read_text()):
            device = {"A100": "A100-80GB"}.get(match[2], match[2])
            marks = [pytest.mark.slow] if name in _LARGE else []
            found.append(pytest.param(name, int(match[1]), int(match[3]), device, id=name, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpus", "nodes", "device"), on_hardware())
def test_every_recipe_fits_the_hardware_that_it_names(name: str, gpus: int, nodes: int, device: str) -> None:
    config = load_config(name)
    cluster = Cluster(device=find_device(device), per_node=gpus // nodes, between=50e9)
    found = predict(ModelSpec.of(config), config, gpus, cluster)
    assert found.fits, f"{found.needed / 2**30:.1f} GiB"
    teacher = teacher_pass(
        config, resolve(config, gpus, Census(seq_len=config.data.seq_len, epochs=(50_000,))), cluster
    )
    if teacher is not None:
        text = recipes()[name].read_text()
        assert teacher.fits and teacher.memory is not None and teacher.seconds is not None
        assert f"{teacher.memory / 2**30:.0f} GiB of each GPU, {teacher.token_bytes} bytes a token" in text
        assert f"of 100 million tokens {teacher.seconds / 36 / teacher.tokens * 1e6:.1f} hours" in text
    assert 0.05 < found.mfu < 0.6


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)["on_gpus"]
    return values


@pytest.mark.slow
def test_the_70b_of_the_article_fits_16_gpus_and_is_bound_by_its_network(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *SEVENTY, "--world-size", "16")
    assert found["fits"] and found["bound"] == "communication"
    numbers = 68_976_648_192
    assert found["network"]["parameters"] == numbers
    # 4 bytes of weights and 8 of moments, a sixteenth of each; the norms are split in rows, too.
    between = found["memory"]["between_steps"]
    assert between["weights"] + between["optimizer"] == pytest.approx(12 * numbers / 16, rel=1e-4)
    # Weights in 16 bits twice, gradients in 32 bits once, but for the end whose weights stay gathered.
    assert found["bytes_between"] == pytest.approx(8 * numbers * 15 / 16, rel=0.01)
    assert found["moving_seconds"] == pytest.approx(found["bytes_between"] / (0.8 * 50e9))
    # From the micro-batch that pays on it is as fast as published runs of 70B on A100: 276 to 410 tokens/s and GPU.
    config = with_micro_batch(load_config("llama2-70b-full-16xa100"), 16, found["micro_batch"]["paying"])
    cluster = Cluster(device=find_device("A100-80GB"), between=50e9)
    assert 276 <= predict(ModelSpec.of(config), config, 16, cluster).tokens_per_second <= 410


@pytest.mark.slow
def test_the_page_says_what_to_do_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "llama3-8b-full-8xa100", "--gpu", "A100-40GB", "--world-size", "2", "--samples", "64",
                 "--checkpoint.every", "auto"]  # fmt: skip
    assert main(arguments) == 0
    page = capsys.readouterr().out
    assert "DOES NOT FIT" in page and "the cheapest change: 4 GPUs" in page
    assert "and up to 2 more by the clock where there is room" in " ".join(page.split())
    plan = page.split("\n\n", 1)[1]
    assert all(len(line) <= WIDTH for line in plan.splitlines()), [x for x in plan.splitlines() if len(x) > WIDTH]


@pytest.mark.slow
def test_alternatives_change_no_batch_and_the_best_fit_is_the_least_change() -> None:
    config = load_config("llama3-8b-full-8xa100", ["--train.max_steps", "10", "--train.epochs", "null"])
    subject, cluster = ModelSpec.of(config), Cluster(device=find_device("A100-40GB"))
    found = alternatives(subject, config, 2, cluster)
    batch = config.train.global_batch * config.data.seq_len
    assert {each.prediction.tokens for each in found} == {batch}
    fitting = [each for each in found if each.prediction.fits]
    assert found[: len(fitting)] == fitting
    best = cheapest_fit(found)
    assert best is not None and best.learns_the_same and dict(best.changes) == {"world": 4}


@pytest.mark.slow
def test_a_search_names_the_cheapest_that_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "qwen3-8b-lora", "--samples", "400", "--train.global_batch", "2"]
    arguments += ["--train.micro_batch", "1", "--gpus-per-node", "2", "--search", "L4=0.5,H100=3,T4=0.1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert found == sorted(found, key=lambda each: each["price"])
    assert {each["device"] for each in found} == {"L4", "H100"}, "a T4 has no bf16"
    assert {each["gpus"] for each in found} == {1, 2}
    least = min(each["hours"] for each in found)
    assert main([*arguments, "--hours", f"{least * 1.01}"]) == 0
    page = capsys.readouterr().out
    assert "2 x H100" in page and "L4" not in page.split("GPU-h", 1)[1]


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    config = load_config("qwen3-8b-lora", ["--train.max_steps", "10", "--train.epochs", "null"])
    subject, cluster = ModelSpec.of(config), Cluster(device=find_device("H100"))
    most, _ = micro_batches(subject, config, predict(subject, config, 1, cluster))
    assert most is not None
    assert predict(subject, with_micro_batch(config, 1, most), 1, cluster).fits
    assert not predict(subject, with_micro_batch(config, 1, most + 1), 1, cluster).fits


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--gpu", "A100-81GB"), "A100-80GB"),
        (("--gpu", "H1000"), "H100"),
        (("--gpu", "H100", "--network", "400"), "400Gbps"),
        (("--network", "400Gbps"), "--gpu"),
        (("--gpu", "H100", "--price", "-1"), "--price -1.0 must be 0 or more"),
        (("--gpu", "H100", "--gpus-per-node", "0"), "--gpus-per-node 0 must be at least 1"),
        (("--gpu", "H100", "--architecture", "nowhere"), "give the config.json of a model"),
        (("--gpu", "H100", "--search", "H100"), "give one of the two"),
        (("--search", "H100=cheap"), "as in A100-80GB=1.8"),
        (("--search", "H100,H101"), "H100"),
        (("--hours", "3"), "--search"),
        (("--storage", "1.2GB/s"), "name them, too (--gpu A100-80GB)"),
        (("--gpu", "H100", "--storage", "1.2"), "or bytes as 50GB/s"),
        (("--search", "H100", "--storage", "1.2GB/s"), "--storage is for one kind of GPU"),
        (("--gpu", "H100", "--serve", "--storage", "1.2GB/s"), "--storage prints, --serve shows a page"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["--config", "llama2-70b-full-16xa100", "--world-size", "16", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_says_how_long_saves_and_stops_take_and_what_a_notice_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the speed that is given, or with which the run has saved before."""
    small = ("--config", "demo", "--samples", "64", "--gpu", "L4", "--world-size", "2", "--run.storage", str(tmp_path))
    given = planned(capsys, *small, "--storage", "1MB/s")
    size, found = given["storage"]["checkpoint"], given["stopping"]
    assert (found["bytes_per_second"], found["measured"]) == (1e6, False)
    assert found["save_seconds"] == pytest.approx(size / 1e6)
    assert found["stop_seconds"] == pytest.approx(2 * size / 1e6 + given["step_seconds"]), "one is being written"
    record = tmp_path / load_config("demo").run.name / "events.jsonl"
    record.parent.mkdir()
    for step, seconds, nbytes in ((1, 100.0, size), (2, 200.0, size), (3, 0, size), (4, 1.0, True)):
        append_event(record, "saved", attempt=1, fields={"step": step, "seconds": seconds, "bytes": nbytes})
    append_event(record, "save_failed", attempt=1, fields={"step": 5, "problem": "none"})
    assert main([*small, "--cluster.spot_notice", "aws"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "a save takes 200 s at " in page and "(as this run has saved before), and a stop up to 400 s" in page
    assert f"{120 * size / 200 / 1e9:.3g} GB (aws: 120 s) and {30 * size / 200 / 1e9:.3g} GB (gcp, azure: 30 s)" in page
    assert "cluster.spot_notice=aws: the notice comes 120 s before the end, and a save takes 200 s" in page


@pytest.mark.slow
def test_a_config_json_takes_the_place_of_a_model_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = {**bundled()["HuggingFaceTB/SmolLM2-135M"]["config"], "num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments = ["--config", "qwen3-8b-lora", "--model.path", "nobody/smollm2-7", "--gpu", "L4", "--samples", "8"]
    assert main([*arguments, "--world-size", "1"]) == 2
    assert "--architecture FILE" in capsys.readouterr().err
    found = planned(capsys, *arguments, "--world-size", "1", "--architecture", str(tmp_path))
    assert found["network"]["parameters"] < 60e6
    assert found["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({json.dumps(v["config"]): k for k, v in bundled().items()}.values()))
def test_bundled_architectures_have_as_many_weights_as_their_models(name: str) -> None:
    known = bundled()[name]
    model = ModelConfig.model_validate({"init": "random", "architecture": known["config"], "tokenizer": "none"})
    network = build_base(load_architecture(model, None), model, "bf16")
    assert sum(parameter.numel() for parameter in network.parameters()) == known["parameters"]
