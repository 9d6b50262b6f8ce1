"""A driver that was stopped wakes up in a run that another command has taken over, whatever clocks and listings say."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from raytune_fsdp.record.jsonl import read_events, read_metrics, read_trajectory
from tests.checkpoints import checkpoints
from tests.ray.jobs import Command, config_of, events
from tests.runs import trajectory

pytestmark = pytest.mark.slow

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 200}
SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    Dl_info caller;
    if (id != CLOCK_REALTIME || !dladdr(__builtin_return_address(0), &caller) || !caller.dli_fname) return code;
    const char *file = strrchr(caller.dli_fname, '/'), *by = getenv("CLOCK_SHIFT");
    file = file ? file + 1 : caller.dli_fname;
    if (by && (!strncmp(file, "python", 6) || !strncmp(file, "libpython", 9))) at->tv_sec += atol(by);
    return code;
}
"""
"""Shifts the time of day for what is written in Python. Ray's own waits are for times of day, and would not end."""


def shifted(directory: Path, seconds: int) -> dict[str, str]:
    """What makes a process, and all that it starts, read another time of day."""
    library = directory / "shift.so"
    if not library.exists():
        (directory / "shift.c").write_text(SHIFT)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(directory / "shift.c"), "-ldl"], check=True
        )  # fmt: skip
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(seconds)}


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is needed to shift the clock")
@pytest.mark.timeout(1200)
def test_a_driver_that_was_stopped(tmp_path: Path) -> None:
    whole = trajectory(config_of(tmp_path, run={"name": "whole"}, train=TRAIN), 2)
    config = config_of(
        tmp_path, train=TRAIN, cluster={"launch": "ray", "workers": 2, "device": "cpu"},
        tracking={"console": True, "mlflow": {"enabled": False}},
    )  # fmt: skip
    first = Command(config, tmp_path, **shifted(tmp_path, -3600))
    (first.faults / "pace").write_text("0.2")
    first.until(lambda: first.steps() >= 10)
    said_by_first = first.output.rename(tmp_path / "first.txt")

    began = time.monotonic()
    code, said = Command(config, tmp_path, **shifted(tmp_path, 3600)).end()
    print(f"refused after {time.monotonic() - began:.1f} s")
    assert code == 2 and f"another command works on {first.run_dir}: process {first.process.pid} on " in said
    assert time.monotonic() - began < 20

    first.process.send_signal(signal.SIGSTOP)  # its ranks go on, as long as they believe that the run is theirs
    began = time.monotonic()
    second = Command(config, tmp_path, LISTING_LATE="5", **shifted(tmp_path, 3600))
    resource.prlimit(second.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    second.until(lambda: bool(events(second.run_dir, "ranks_joined")[1:]))
    print(f"taken over, and all ranks there, after {time.monotonic() - began:.1f} s")
    second.until(lambda: len(events(second.run_dir, "first_step")) == 2)
    first.process.send_signal(signal.SIGCONT)
    woken = time.monotonic()
    assert first.process.wait(60) == 1
    print(f"the first one has ended {time.monotonic() - woken:.1f} s after it woke up")
    (error,) = [line for line in said_by_first.read_text().splitlines() if line.startswith("error: ")]
    assert "another one has taken the run over" in error and "this command writes nothing more" in error
    (second.faults / "pace").unlink()
    code, said = second.end()
    assert code == 0, said
    assert read_trajectory(second.run_dir / "metrics.jsonl") == whole
    (resumed,) = [line["fields"]["resumed_from"] for line in events(second.run_dir, "attempt_started")[1:]]
    lines = [line for line in read_metrics(second.run_dir / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["attempt"] for line in lines] == [1] * resumed + [2] * (len(lines) - resumed)
    attempts = [line["attempt"] for line in read_events(second.run_dir / "events.jsonl")]
    assert attempts == sorted(attempts), "a word of the first one after the second one began"
    assert [found.attempt for found in checkpoints(second.run_dir)] == [2] * len(checkpoints(second.run_dir))
