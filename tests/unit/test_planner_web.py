"""The planner as a page: its figures are the planner's, strangers get nothing, and it works in a browser from disk."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from docs.make.planner_page import points_of
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.plan import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.devices import DEVICES
from raytune_fsdp.predict.page import document, grid
from raytune_fsdp.predict.page.document import PlanServer
from raytune_fsdp.predict.page.points import Points, changed, offered, read_choice, start_of
from raytune_fsdp.predict.page.text import as_data
from raytune_fsdp.predict.planned import planned
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.search import sizes
from raytune_fsdp.predict.subject import ModelSpec
from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner.html"
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028&amp;"
SMALL = {
    "run": {"name": "planned", "storage": "runs"},
    "model": {"path": "HuggingFaceTB/SmolLM2-135M"},
    "data": {"seq_len": 1000, "train": [{"path": "rows.jsonl"}]},
    "train": {"global_batch": 8, "micro_batch": 1, "max_steps": 50},
    "method": {"type": "lora", "rank": 8, "alpha": 16},
}


def small() -> FinetuneConfig:
    return FinetuneConfig.model_validate(SMALL)


@pytest.fixture(scope="module")
def server() -> Iterator[PlanServer]:
    config = small()
    start = start_of(config, "L4", 2)
    among = offered(start, 8)
    page = document.live_page(HOSTILE, start, among, price=2.5, notes=[HOSTILE])
    with PlanServer(0, page, Points(config), start, among) as made:
        Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


def ask(server: PlanServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    host, port = server.server_address[:2]
    connection = HTTPConnection(str(host), int(port), timeout=120)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(("query", "gpus"), [("", 2), ("?gpus=1&method=full&micro_batch=2&device=H100", 1)])
def test_a_point_is_what_the_planner_says(server: PlanServer, query: str, gpus: int) -> None:
    status, text = ask(server, f"/point{query}")
    assert status == 200
    point = json.loads(text)["point"]
    config, device = small(), DEVICES["L4"]
    if query:
        values = {**SMALL, "method": {"type": "full"}, "train": {**SMALL["train"], "micro_batch": 2}}  # type: ignore[dict-item]
        config, device = FinetuneConfig.model_validate(values), DEVICES["H100"]
    expected = as_data(planned(config, resolve(config, gpus), Cluster(device=device)))
    assert point == {name: json.loads(json.dumps(expected[name])) for name in point}
    assert point["hours"] > 0 and {"memory", "advice", "storage", "host", "needed_bytes"} <= set(point)


def test_what_cannot_be_had_is_said_on_the_page(server: PlanServer) -> None:
    status, text = ask(server, "/point?gpus=16")
    assert status == 200
    assert "train.global_batch=8" in json.loads(text)["problem"]


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("/point?gpus=3", 400, "gpus=3 is not offered; choose one of 1, 2, 4"),
        ("/point?gpus=2&gpus=4", 400, "gpus: given twice"),
        ("/point?device=__class__", 400, "device=__class__ is not offered"),
        ("/point?architecture=/etc/passwd", 400, "architecture: unknown; known are device"),
        ("/point?seq_len=1e9", 400, "seq_len=1e9"),
        ("/point?%1b[31m=2", 400, "unknown"),
        ("/point?gpus", 400, "this is no query"),
        ("/point?" + "&".join(f"a{n}=1" for n in range(99)), 400, "this is no query"),
        ("/../../etc/passwd", 404, "there are / and /point"),
    ],
)
def test_what_is_not_offered_is_refused_in_a_line(server: PlanServer, path: str, status: int, expected: str) -> None:
    found, text = ask(server, path)
    assert found == status
    assert expected in text and text.count("\n") == 1 and "\x1b" not in text and "<" not in text


def test_other_sites_and_other_methods_get_nothing(server: PlanServer) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/")[0] == ask(server, "/", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example"):
        status, text = ask(server, "/", Host=host)
        assert status == 403 and "<" not in text
    assert ask(server, "/point", Sec_Fetch_Site="cross-site")[0] == 403
    for method in ("POST", "PUT", "OPTIONS", "DELETE"):
        assert ask(server, "/point", method) == (405, "only GET is answered\n")


def test_too_many_at_the_same_time_are_sent_away(server: PlanServer) -> None:
    taken = 0
    while server.room.acquire(blocking=False):
        taken += 1
    try:
        assert ask(server, "/point")[0] == 503
    finally:
        for _ in range(taken):
            server.room.release()


def test_a_choice_changes_what_it_names_and_nothing_else() -> None:
    config = load_config("llama3-8b-full-8xa100")
    start = start_of(config, "H100", 8)
    among = offered(start, 8)
    assert changed(config, start, 8) == config
    assert "strategy" not in changed(small(), start_of(small(), "L4", 1), 8).parallel.model_fields_set
    asked = read_choice([("method", "qlora"), ("strategy", "hybrid_shard"), ("seq_len", "8192")], start, among)
    found = changed(config, asked, 8)
    assert (found.method.type, found.parallel.shard_size, found.data.seq_len) == ("qlora", 8, 8192)
    assert found.train == config.train and found.optim == config.optim
    assert all(getattr(start, name) in values for name, values in among.items())
    kept = changed(small(), read_choice([("method", "qlora")], start_of(small(), "L4", 1), offered(start, 8)), 8)
    assert (kept.method.type, kept.method.rank) == ("qlora", 8)  # type: ignore[union-attr]
    assert sizes(8, 256) == [1, 2, 4, 8, 16, 32, 64, 128, 256] and sizes(6, 256)[:5] == [1, 2, 4, 6, 12]
    with pytest.raises(ConfigError, match="gpus=512 is not offered"):
        read_choice([("gpus", "512")], start, among)


def test_a_stranger_s_text_stays_text(server: PlanServer) -> None:
    text = ask(server, "/")[1]
    assert "<img" not in text and text.count("</script>") == 2 and "&lt;img src=x" in text


def test_the_page_in_the_docs_is_the_current_one_and_asks_for_nothing() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == document.static_page(points_of(PAGE)), "python -m docs.make.planner_page --points-of"
    assert len(text) < 1.5e6
    assert "default-src 'none'" in text and "connect-src" not in text
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    assert not re.search(r"(?:https?:)?//[\w.-]+\.\w", re.sub(r"^\s*//.*|; // .*$", "", outside, flags=re.MULTILINE))
    found = {model: {method: len(of["gpus"]) for method, of in each.items()} for model, each in points_of(PAGE).items()}
    assert found == {each.model: {name: len(gpus) for name, gpus in each.gpus.items()} for each in grid.MODELS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "gpus", "length", "recompute", "device"),
    [
        ("meta-llama/Llama-3.1-8B", "full", 8, 2048, "none", "A100-80GB"),
        ("meta-llama/Llama-3.1-8B", "lora", 1, 8192, "full", "RTX-4090"),
        ("openai/gpt-oss-20b", "full", 16, 32768, "selective", "H200"),
    ],
)
def test_points_inside_of_the_page_are_the_planner_s(
    model: str, method: str, gpus: int, length: int, recompute: str, device: str
) -> None:
    inside = points_of(PAGE)[model][method]
    common, *of_devices = inside["points"][grid.LENGTHS.index(length)][grid.RECOMPUTE.index(recompute)][
        inside["gpus"].index(gpus)
    ]
    config = grid.config_of(model, method, length, recompute, gpus)
    found = predict(ModelSpec.of(config), config, gpus, grid.cluster_of(device))
    # To the byte with the versions that wrote it; others of torch may keep a little more.
    assert common[grid.COMMON.index("needed_bytes")] == pytest.approx(found.needed, rel=1e-3)
    row: dict[str, Any] = dict(zip(grid.OF_DEVICE, of_devices[grid.ON.index(device)], strict=True))
    assert row["fits"] == found.fits and row["bound"] == found.seconds.bound
    assert row["step_seconds"] == pytest.approx(found.seconds.step, rel=1e-3)
    assert row["tokens_per_second_per_gpu"] == pytest.approx(found.tokens_per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--serve",), "--serve needs a device"),
        (("--gpu", "H100", "--port", "80"), "--port is for a page: give --serve, too"),
        (("--no-browser",), "--no-browser is for a page"),
        (("--gpu", "H100", "--serve", "--json"), "--json prints, --serve shows a page"),
        (("--gpu", "H100", "--serve", "--port", "99999"), "--port 99999 must be 0 (any that is free) to 65535"),
        (("--gpu", "H1000", "--serve"), "H100"),
    ],
)
def test_flags_that_do_not_go_together(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "llama2-70b-full-16xa100", "--world-size", "16", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted() -> None:
    command = ["plan", "--config", "llama2-70b-full-16xa100", "--world-size", "16", "--gpu", "H100", "--serve"]
    run = [sys.executable, "-m", "raytune_fsdp.cli.main", *command, "--no-browser"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.fullmatch(r"the plan is at http://127\.0\.0\.1:\d+/\n", first), first
        # Also while it computes.
        host, port = re.findall(r"//([\d.]+):(\d+)", first)[0]
        connection = HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/point")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors and "terminate" not in errors, errors
    connection.close()


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_a_browser_shows_the_page_from_disk(tmp_path: Path, width: int, scheme: str) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(PAGE.as_uri(), width=width, scheme=scheme)
        said = "document.getElementById('verdict').textContent"
        before = browser.value(said)
        assert re.match(r"[\d.]+ GiB of 79\.2 GiB on each of 8 GPUs: (fits|[\d.]+ GiB too much)$", before)
        # By the keyboard: to the slider, and one to the left.
        browser.value("document.getElementById('gpus').focus()")
        browser.press("ArrowLeft")
        after = browser.value(said)
        assert after != before and "4 GPUs" in after
        browser.value("document.querySelector('input[name=method][value=lora]').click()")
        less = browser.value(said)
        assert float(less.split()[0]) < float(after.split()[0])
        browser.value("document.getElementById('price').focus()")
        browser.call("Input.insertText", text="2.5")
        assert "at 2.5 a GPU-hour" in browser.value("document.getElementById('facts').textContent")
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("document.querySelectorAll('#by-device tbody tr').length") == len(grid.ON)
        browser.wait("location.hash.includes('gpus=4') && location.hash.includes('price=2.5')")
        address = browser.value("location.href")
        browser.open("about:blank")
        browser.open(address, width=width)
        assert browser.value(said) == less
        assert {url.partition("#")[0] for url in browser.requests} == {PAGE.as_uri()}
        assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
def test_a_phone_shows_hours_and_price_without_scrolling(tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{PAGE.as_uri()}#price=2.5&gpus=64", width=390)
        for table in ("by-gpus", "by-device"):
            browser.wait(f"!document.getElementById('{table}').textContent.includes('…')")
            place = f"document.querySelector('.scroll:has(#{table})')"
            assert browser.value(f"{place}.scrollWidth") <= browser.value(f"{place}.clientWidth"), table
            heads = f"[...document.querySelectorAll('#{table} th')]"
            shown = browser.value(f"{heads}.filter((each) => each.offsetWidth).map((each) => each.textContent)")
            assert shown[1:] == ["memory", "fits", "hours", "GPU-hours", "price"]
        legend = browser.value("document.getElementById('parts').textContent")
        for part in ("weights", "gradients", "optimizer's state", "gathered from others", "activations"):
            assert part in legend, "also what is not there at the peak"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on PATH")
def test_a_browser_asks_the_server(server: PlanServer, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{server.url}#gpus=1&device=nothing")
        ready = "document.getElementById('answer').getAttribute('aria-busy') === 'false'"
        browser.wait(ready)
        assert browser.value("document.querySelectorAll('img').length") == 0
        point = json.loads(ask(server, "/point?gpus=1")[1])["point"]
        words = browser.value("document.getElementById('verdict').textContent")
        assert words == f"{point['needed_bytes'] / 2**30:,.1f} GiB of {point['memory']['of'] / 2**30:,.1f} GiB: fits"
        browser.wait("!document.getElementById('by-gpus').textContent.includes('…')")
        assert "train.global_batch=8" in browser.value("document.getElementById('by-gpus').textContent")
        assert all(url.startswith(server.url) for url in browser.requests)
        assert browser.complaints == []
