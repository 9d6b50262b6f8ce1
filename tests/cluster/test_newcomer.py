"""First hours of three people in empty directories, with a built wheel and what the docs say alone.

One has chats and follows docs/start/local.md, then docs/serving.md; one comes with a file of axolotl; one opens the
notebook.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_notebook import NOTEBOOK, PLAY
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
    checkout = "'../raytune_fsdp[all]' -c ../raytune_fsdp/requirements.lock"
    lines = [line.replace(checkout, f"'{wheel}[all]' -c {ROOT}/requirements.lock") for line in found]
    assert lines != found
    lines = [line.replace("ray start --head", "ray start --head --num-cpus 4") for line in lines]
    serving = commands((ROOT / "docs" / "serving.md").read_text())
    of_this_run = r"raytune-fsdp|python -c .*'my-model'"
    own = [line.replace("runs/my-run", "runs/first") for line in serving if re.match(of_this_run, line)]
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


AXOLOTL = """
base_model: ./runs/base/export
chat_template: tokenizer_default
datasets:
  - path: mine.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
output_dir: ./outputs/mine
sequence_len: 64
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 60
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.003
warmup_ratio: 0.1
bf16: false
fp16: false
gradient_checkpointing: true
logging_steps: 1
saves_per_epoch: 1
"""
SHAREGPT = """
{"conversations": [{"from": "human", "value": "Who keeps the keys?"}, {"from": "gpt", "value": "Ada keeps the keys."}]}
{"conversations": [{"from": "human", "value": "Who has the map?"}, {"from": "gpt", "value": "Grace has the map."}]}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of the wheel, in an environment of its own."""
    place = tmp_path_factory.mktemp("installed")
    (place / "source").mkdir()
    wheel = built(place / "source")
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    install = [place / "venv" / "bin" / "pip", "install", "--quiet", f"{wheel}[all]", "-c", ROOT / "requirements.lock"]
    subprocess.run(install, check=True, capture_output=True)
    return place / "venv" / "bin"


def test_a_file_of_axolotl_leads_to_an_answer(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL.lstrip())
    (tmp_path / "mine.jsonl").write_text(SHAREGPT.lstrip())
    # What stands for a model from the hub, and then what docs/start/coming-from.md says.
    model = "train --config demo --run.name base --train.epochs 2 --cluster.launch local --cluster.workers 1"
    followed = [
        "convert run.yaml --gpus 1 --out mine.yaml",
        "data preview --config mine.yaml",
        "plan --config mine.yaml",
    ]
    for line in (model, *followed, "train --config mine.yaml"):
        played(installed, line, tmp_path)
    assert "Ada keeps the keys." in played(installed, "generate outputs/mine 'Who keeps the keys?'", tmp_path)


def test_the_notebook_ends_with_an_answer(installed: Path, tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(
        [installed / "python", "-c", PLAY, NOTEBOOK.name], cwd=tmp_path, env={**bare(installed), "MPLBACKEND": "agg"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("Ada has the keys.")


def played(installed: Path, line: str, place: Path) -> str:
    """Run a command of ours, which must not fail, and return what it printed."""
    done = subprocess.run(
        [installed / "raytune-fsdp", *shlex.split(line)], cwd=place, env=bare(installed),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def bare(installed: Path) -> dict[str, str]:
    """The environment of somebody who has only that installation."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    return {**found, "PATH": f"{installed}:/usr/bin:/bin"}
