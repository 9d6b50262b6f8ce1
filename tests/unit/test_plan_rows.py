"""`plan` of a length in epochs: the rows are counted within a bound of time, or estimated, and that is said."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil
import pytest

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.cli import plan_rows
from raytune_fsdp.cli.main import main
from raytune_fsdp.cli.plan_rows import _Seen, _spread
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.data.census import census
from raytune_fsdp.run.prepare import open_as_run
from tests.config_text import dump_config
from tests.rows import make_windows, token_rows
from tests.runs import make_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config of two epochs over 120 rows, in batches of ten samples."""
    made = make_config(tmp_path, train={"max_steps": None, "epochs": 2.0})
    (tmp_path / "my-run.yaml").write_text(dump_config(made))
    return tmp_path / "my-run.yaml"


def telling(monkeypatch: pytest.MonkeyPatch, *news: object, ends: bool = False) -> None:
    """Have a process that counts say only this, and nothing more before the time is up."""

    @contextmanager
    def counting(config: FinetuneConfig) -> Iterator[tuple[Connection, IO[bytes]]]:
        ours, theirs = Pipe(duplex=False)
        with ours, theirs, TemporaryFile() as said:
            for each in news:
                theirs.send(each)
            said.write(b"Traceback\nMemoryError: no more")
            if ends:
                theirs.close()
            yield ours, said

    monkeypatch.setattr(plan_rows, "_counting", counting)
    monkeypatch.setattr(plan_rows, "SECONDS", 0.2)
    monkeypatch.setattr(plan_rows, "_STARTING", 0.1)


def planned(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", "--config", str(file), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_rows_that_can_be_counted_are(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_rows, "SECONDS", 300.0)
    found = planned(file, capsys)
    counted = census(open_as_run(load_config(file))[1], 2.0)
    samples = counted.epochs[0]
    assert (found["samples_per_epoch"], found["steps"]) == (samples, -(-2 * samples // 10))
    seconds = found["counted"].pop("seconds")
    assert found["counted"] == {"rows": 120, "rows_read": 120, "estimated": []} and 0 <= seconds < 300
    assert counted.built == 0, "what was built is the run's"


def test_what_is_estimated_is_marked(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    telling(monkeypatch, ("counting the rows", 1, 4), _Seen(rows=32, samples=8, of_rows=(120,)))
    found = planned(file, capsys)
    assert (found["samples_per_epoch"], found["total_samples"], found["steps"]) == (30, 60, 6)
    length = {"samples_per_epoch", "total_samples", "steps", "schedule_steps", "warmup_steps"}
    assert set(found["counted"]["estimated"]) == {*length, "eval_every", "save_every"}
    assert (found["counted"]["rows"], found["counted"]["rows_read"]) == (120, 32)
    assert main(["plan", "--config", str(file), "--optim.lr", "0.1"]) == 0
    lines = {line[:11].strip(): line[11:] for line in capsys.readouterr().out.splitlines()}
    assert lines["data"] == (
        "about 30 packed samples an epoch: estimated from 32 of 120 rows, read in 0 s; "
        f"`raytune-fsdp data stats --config {file} --optim.lr 0.1` counts all of them"
    )
    assert lines["steps"].startswith("about 6, ")


def test_hours_on_gpus_are_estimated_with_the_steps(tmp_path: Path) -> None:
    found = _Seen(rows=32, samples=8, of_rows=(120,)).estimate(48, 1.0)

    class Same:
        def to_dict(self) -> dict[str, int]:
            return {"steps": 1}

    data = found.as_data(lambda _: Same(), {"on_gpus": {}})  # type: ignore[arg-type,return-value]
    assert data["counted"]["estimated"] == ["on_gpus.hours", "on_gpus.gpu_hours", "on_gpus.price"]


@pytest.mark.parametrize(
    ("news", "ends", "message"),
    [
        ((), False, "0.1 s are too short to count it (starting): `raytune-fsdp data stats --config"),
        ((("rows.jsonl", 1000, 4000),), False, "too short to count it (rows.jsonl: 1,000 of 4,000): `raytune-fsdp"),
        ((DataError("rows.jsonl: it is empty"),), False, "could not be counted here (rows.jsonl: it is empty): give"),
        ((), True, "could not be counted here (the process that counts has ended: MemoryError: no more): give --sam"),
    ],
)
def test_what_cannot_be_counted_here_names_a_way(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    news: tuple[object, ...],
    ends: bool,
    message: str,
) -> None:
    telling(monkeypatch, *news, ends=ends)
    assert main(["plan", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and "set train.max_steps" in error and error.count("\n") == 1


def test_nothing_goes_on_counting_after_the_time(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(plan_rows, "SECONDS", 0.3)
    monkeypatch.setattr(plan_rows, "_STARTING", 0.3)
    began = time.monotonic()
    assert main(["plan", "--config", str(file)]) == 2
    assert 0.3 <= time.monotonic() - began < 60
    assert "0.3 s are too short" in capsys.readouterr().err
    assert {each.pid for each in psutil.Process().children(recursive=True)} == before


class Ends:
    """A config that ends the process which reads it."""

    def __reduce__(self) -> Any:
        return sys.exit, ("the config was read",)


def test_a_file_of_the_working_directory_is_no_module_of_the_process_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fractions.py").write_text("raise SystemExit('code of a stranger')")
    monkeypatch.chdir(tmp_path)
    with plan_rows._counting(Ends()) as (answers, said):  # type: ignore[arg-type]
        with pytest.raises(EOFError):
            answers.recv()
        said.seek(0)
        assert said.read() == b"the config was read\n"


class Prepares:
    """A config that makes the process which reads it prepare a file without end, in a thread, as files are prepared."""

    CODE = """
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from raytune_fsdp.cli import plan_rows
from raytune_fsdp.data.sources.prepared import prepare_file

def make(directory):
    (directory / "half").write_text("")
    while True:
        tell(("rows.jsonl", 1, 2))
        time.sleep(0.01)

def count(config, to):
    global tell
    tell = to
    with ThreadPoolExecutor(1) as threads:
        threads.submit(prepare_file, Path(cache), {"what": "rows"}, make, shown="rows.jsonl").result()

plan_rows._count = count
"""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def __reduce__(self) -> Any:
        return exec, (self.CODE, {"cache": str(self._cache)})


def test_what_was_being_prepared_when_the_time_was_up_is_removed(tmp_path: Path) -> None:
    with plan_rows._counting(Prepares(tmp_path)) as (answers, _):  # type: ignore[arg-type]
        assert answers.recv() == ("rows.jsonl", 1, 2)
        assert len(list(tmp_path.glob("files/*.tmp/half"))) == 1
    assert not list((tmp_path / "files").iterdir())


def test_mistakes_are_found_before_anything_is_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_rows, "_counting", lambda _: pytest.fail("counted"))
    for arguments, message in (
        (["--world-size", "9"], "9 ranks"),
        (["--gpu", "A100-8GB"], "A100-80GB"),
        (["--hours", "2"], "--hours is for a plan on GPUs"),
    ):
        assert main(["plan", "--config", str(file), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_windows_are_built_in_another_order_and_counted_in_their_own(tmp_path: Path) -> None:
    rows = [token_rows(tmp_path, [2 + i % 14 for i in range(60)])]
    alike = census(make_windows(rows, cache=tmp_path / "one"))
    windows, told = make_windows(rows, cache=tmp_path / "two"), []
    order: list[int] = []
    get = windows.get
    windows.get = lambda epoch, k, **more: (order.append(k), get(epoch, k, **more))[1]  # type: ignore[func-returns-value,method-assign]
    counted = census(windows, build=lambda *each: _spread(*each, _Seen(of_rows=(60,)), told.append))
    assert counted == alike
    assert sorted(order) == list(range(windows.count(0))) != order
    seen = [each for each in told if isinstance(each, _Seen)]
    assert (seen[-1].rows, seen[-1].samples) == (60, counted.epochs[0])
    assert [each.rows for each in seen] == sorted({each.rows for each in seen}), "one window after the other"
