"""Pictures of the pages that people see: a report, a comparison, the runs of a storage, the planner, and MLflow.

    python -m tests.screenshots                        # all of them, into docs/images
    python -m tests.screenshots --storage DIR report   # of the runs that an earlier call has trained there

Trains the demo three times without Ray: `first` is stopped once and goes on, `second` has a lower learning rate, and
`third` is stopped at half. Needs Chromium; what is looked at without eyes is in tests/unit/test_report_looks.py.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser import CHROMIUM, Browser
from tests.mlflow_server import Server

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = ("report", "comparison", "runs", "planner", "mlflow")
WIDTHS = (1400, 390)
MOST = {1400: 1500, 390: 1800}
"""Pixels of height that are kept."""
FIELDS = {
    "cluster.launch": "local", "cluster.workers": "1", "train.epochs": "6", "eval.every": "6", "checkpoint.every": "12",
    "eval.at_start": "true", "run.exact": "true", "run.digest_every": "12",
    "tracking.mlflow.enabled": "false",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="*", choices=[[], *PAGES], help="(default: all)")
    parser.add_argument("--storage", type=Path, help="where the runs are, or will be (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=IMAGES)
    found = parser.parse_args()
    assert CHROMIUM, "no Chromium is on PATH"
    with tempfile.TemporaryDirectory() as scratch:
        storage = found.storage or Path(scratch, "runs")
        for name, flags, ends in (
            ("first", {}, (20, None)),
            ("second", {"optim.lr": "3e-4"}, (None,)),
            ("third", {}, (24,)),
        ):
            if not (storage / name / "metrics.jsonl").exists():
                for end in ends:
                    train(storage, name, flags, stop_after=end)
        for page in found.page or PAGES:
            with address(page, storage, Path(scratch)) as (url, ready), Browser(Path(scratch, "profile")) as browser:
                for width in WIDTHS:
                    for scheme in ("light", "dark"):
                        browser.open(url, width=width, scheme=scheme)
                        browser.wait(ready, 120)
                        time.sleep(1 if page == "mlflow" else 0.2)  # it draws on after its text is there
                        picture = found.out / f"{page}-{width}-{scheme}.png"
                        browser.picture(picture, most=MOST[width])
                        make_small(picture)
                        print(picture, flush=True)


def train(storage: Path, name: str, flags: dict[str, str], *, stop_after: int | None) -> None:
    """Train a run; to its end, or until this many steps are on record."""
    fields = {**FIELDS, **flags, "run.name": name, "run.storage": str(storage)}
    command = [
        sys.executable,
        str(ROOT / "jobs" / "finetune.py"),
        *(f"--{key}={value}" for key, value in fields.items()),
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    metrics = storage / name / "metrics.jsonl"
    while stop_after is not None and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b'{"kind": "step"') >= stop_after:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.2)
    process.wait()


@contextmanager
def address(page: str, storage: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """Give the address of a page, and what is true in it once it shows everything."""
    drawn, out = "document.documentElement.className === 'js'", scratch / f"{page}.html"
    command = [sys.executable, "-m", "raytune_fsdp.cli.main"]
    runs = [str(storage / name) for name in ("first", "second")]
    if page == "mlflow":
        server = Server(scratch / "mlflow")
        try:
            yield mlflow_run(server.uri, storage), "document.body.innerText.includes('train')"
        finally:
            server.kill()
        return
    if page == "planner":
        yield (ROOT / "docs" / "planner.html").as_uri(), "!document.querySelector('[aria-busy=true]')"
        return
    words = {"report": ["report", runs[0]], "comparison": ["report", *runs], "runs": ["runs", str(storage), "--html"]}
    subprocess.run([*command, *words[page], "--out", str(out)], check=True, cwd=ROOT)
    yield out.as_uri(), drawn


def mlflow_run(uri: str, storage: Path) -> str:
    """Send a run to a server, as the same command does that trained it, and return the address of its page there."""
    config = (storage / "first" / "config.yaml").read_text()
    copy = storage / "first" / "mlflow_run_id"
    copy.unlink(missing_ok=True)
    (storage / "first" / "report" / "index.html").unlink(missing_ok=True)
    place = storage.parent / "with-mlflow.yaml"
    place.write_text(config)
    words = ["--config", str(place), f"--tracking.mlflow.uri={uri}", "--tracking.mlflow.enabled=true"]
    subprocess.run([sys.executable, str(ROOT / "jobs" / "finetune.py"), *words], check=True, cwd=ROOT)
    import mlflow

    mlflow.set_tracking_uri(uri)
    found = mlflow.MlflowClient().get_run(copy.read_text().strip())
    return f"{uri}/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}"


def make_small(picture: Path) -> None:
    """Keep 64 colours: a page has few, and the pictures are in the repository."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
