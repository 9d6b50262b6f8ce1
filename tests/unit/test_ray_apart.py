"""What Ray prints into the driver's output is in a file, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread

import pytest

from raytune_fsdp.launch.ray.apart import FILE, RAYS_THREAD, apart_from_ray


def prints(text: str, name: str) -> None:
    thread = Thread(target=lambda: print(text, flush=True), name=name)
    thread.start()
    thread.join()


def test_what_ray_prints_is_in_a_file_that_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    with apart_from_ray(logs):
        assert not logs.exists()
        prints("ours", "another")
        prints("(raylet) a worker died, \x1b[33mHF_TOKEN=hf_" + "a" * 34, RAYS_THREAD)
        prints("(raylet) and its stack", RAYS_THREAD)
        print("ours, too")
        assert sys.stdout.isatty() is False
    print("afterwards")
    said = capsys.readouterr().out.splitlines()
    assert said == ["ours", f"what Ray says of it is in {logs / FILE}", "ours, too", "afterwards"]
    kept = (logs / FILE).read_text()
    assert "a worker died" in kept and "and its stack" in kept
    assert "hf_aaaa" not in kept and "\x1b" not in kept
    assert (logs / FILE).stat().st_mode & 0o007 == 0
