"""Somebody follows docs/start/local.md in an empty directory, with what it says alone; then docs/serving.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_wheel import built

ROOT = Path(__file__).parents[2]

ALONE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
OWN_RAY = "mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray"
"""Where `ray start` writes down its address. Left there by a test that fails, it would be found by all others."""
SAID_AGAIN = """
tries=0
while ! said=$({} 2>&1); do
    case $said in *"No available agent"*) sleep 5 ;; *) echo "$said"; exit 1 ;; esac
    [ $((tries += 1)) -lt 24 ]
done
echo "$said"
"""
"""What the page tells people to do while Ray is still starting, which takes a busy machine longer than Ray waits."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # minutes: all packages are installed anew


def commands(page: str) -> list[str]:
    """Its indented lines, in their order."""
    return re.findall(r"^    (\S.*)$", page, re.MULTILINE)


def test_the_page_leads_to_a_model(tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    page = (ROOT / "docs" / "start" / "local.md").read_text()
    (rows,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = commands(page)
    assert 5 <= len(found) <= 10
    place = tmp_path / "empty"
    place.mkdir()
    (place / "mine.jsonl").write_text(rows)
    (tmp_path / "source").mkdir()
    wheel = built(tmp_path / "source")
    # The index does not have the package yet: the wheel that will be there, and the versions of the lock.
    lines = [line.replace("'raytune-fsdp[all]'", f"'{wheel}[all]' -c {ROOT}/requirements.lock") for line in found]
    assert lines != found
    serving = commands((ROOT / "docs" / "serving.md").read_text())
    own = [line.replace("runs/my-run", "runs/first") for line in serving if re.match("raytune-fsdp|python -c", line)]
    assert len(own) == 4
    lines = [SAID_AGAIN.format(line) if line.startswith("ray job submit") else line for line in [*lines, *own]]
    assert sum("No available agent" in line for line in lines) == 1
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    environment["PATH"] = f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"
    began = time.monotonic()
    # Processes of its own, as `ray stop` ends every Ray that it can see, and files.
    done = subprocess.run(
        [*ALONE, "bash", "-ec", "\n".join([OWN_RAY, *lines])],
        cwd=place, env=environment, capture_output=True, text=True, timeout=1400,
    )  # fmt: skip
    print(f"\n{len(found)} commands in {time.monotonic() - began:.0f} s")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Ada keeps the keys" in done.stdout, "seen in the preview"
    assert re.search(r"Job '\w+' succeeded", done.stdout)
    assert re.search(r"^eval/heldout/loss [\d.]+$", done.stdout, re.MULTILINE)
    assert done.stdout.count("eval/heldout/perplexity ") == 2, "of the run, and of what is served"
    assert "'role': 'assistant'" in done.stdout, "transformers' own pipeline answers"
