"""How often to save: the closed form, beside a simulation that draws failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import productive
from raytune_fsdp.cli.main import main
from raytune_fsdp.plan.failures import GPU_HOURS, RECOVERY_SECONDS, STALL_SECONDS, WRITE_SECONDS, Failures, Recovery

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"


def drawn(failures: Failures, interval: float, many: int = 20_000) -> float:
    """The share of a time in which so many failures come, on average; the same ones for every interval."""
    days = many * (failures.apart + failures.recovery) / 86_400
    return productive.share(
        failures.gpus, failures.gpu_hours, interval, failures.stall, failures.recovery, seed=1, days=days
    )


@pytest.mark.parametrize("gpus", [8, *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 512)), 4096])
@pytest.mark.parametrize("hours", [GPU_HOURS, pytest.param(10_000.0, marks=pytest.mark.slow), 500.0])
def test_the_interval_that_is_named_is_the_best_of_the_simulated(gpus: int, hours: float) -> None:
    failures = Failures(gpus=gpus, gpu_hours=hours)
    best = failures.best_interval()
    tried = [best, *(each * best for each in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)), 60.0, 300.0, 1800.0]
    shares = [drawn(failures, each) for each in tried]
    assert shares[0] > 0.995 * max(shares)
    for interval, share in zip(tried, shares, strict=True):
        assert failures.share(interval) == pytest.approx(share, abs=0.01), interval
    assert failures.share(best) > max(failures.share(0.9 * best), failures.share(1.1 * best)) or best == WRITE_SECONDS


def test_what_a_failure_costs_and_what_is_left_is_all_of_the_time() -> None:
    """A day between two failures, a save an hour: half an hour and a bit is trained again."""
    failures = Failures(gpus=24, gpu_hours=24 * 24.0)
    assert failures.apart == 86_400
    again = productive.again(failures, 3600.0)
    assert again == pytest.approx(1800 + WRITE_SECONDS, rel=0.02)
    whole = failures.apart + failures.recovery
    held_up = failures.stall * failures.apart / (3600 + failures.stall)
    assert failures.share(3600.0) * whole + again + failures.recovery + held_up == pytest.approx(whole)


def test_at_its_bounds() -> None:
    assert Failures(gpus=8, stall=0.0).best_interval() == WRITE_SECONDS, "saves that cost nothing: as often as can be"
    free = Failures(gpus=8, stall=0.0, write=0.0)
    assert free.share(0.0) == free.share(1e-300) == free.apart / (free.apart + free.recovery)
    lost = Failures(gpus=10**6, gpu_hours=1.0)
    assert lost.share(60.0) == 0.0 and lost.best_interval() == WRITE_SECONDS
    once = Failures(gpus=1, gpu_hours=1e12)
    assert once.share(once.best_interval()) == pytest.approx(1.0, abs=1e-4)
    one = Recovery()
    assert one.detect + one.start + one.imports + one.load == RECOVERY_SECONDS


def test_the_page_has_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    said = RELIABILITY.read_text()
    rows = list(productive.estimates(GPU_HOURS, STALL_SECONDS))
    assert len(rows) == 2 + 7
    for row in rows:
        assert row in said, row
    for gpus in productive.GPUS:
        for hours in productive.HOURS_BETWEEN:
            found = [productive.share(gpus, hours, each, STALL_SECONDS, RECOVERY_SECONDS, seed=1)
                     for each in productive.INTERVALS]  # fmt: skip
            assert f"| {gpus:,} | {hours:,.0f} | {' | '.join(f'{100 * each:.2f} %' for each in found)} |" in said


def test_the_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--config", "demo", "--train.max_steps", "10", "--train.epochs", "null", "--world-size", "8"]
    words += ["--train.global_batch", "16", "--checkpoint.every", "auto"]
    assert main(words) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failures")]
    assert row == (
        "failures   one in 50,700 GPU hours, here in 264d 1h: checkpoint.every={minutes: 80} loses least, 99.98% of "
        "the time trains steps that stay (auto: 99.97%)"
    )
    assert main([*words, "--gpu-hours-per-failure", "100", "--save-seconds", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["failures"]
    assert found["seconds_between_failures"] == 45_000 and 180 <= found["best_save_every_seconds"] <= 240
    assert found["productive_share"] > found["productive_share_as_configured"] > 0.9
    assert main([*words, "--stall-seconds", "0", "--save-seconds", "1e-6", "--recovery-seconds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"]["productive_share"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong", ["--save-seconds=0", "--stall-seconds=-1", "--recovery-seconds=nan", "--gpu-hours-per-failure=1e308"]
)
def test_what_no_run_has_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "demo", "--world-size", "8", wrong]) == 2
    assert wrong.replace("=", " ").replace("1e308", "1e+308") in capsys.readouterr().err
