"""The region of a terminal: what is on the screen after every write, with real processes on real terminals."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from raytune_fsdp.cli.region import Region, View, broken, clean, cut_to, width_of
from raytune_fsdp.cli.screen import _END
from raytune_fsdp.record.screen_messages import Looks, message, read_message
from tests.terminal import Terminal, on_terminal

STEP = {
    "title": "run  step 5/10", "done": 5, "total": 10, "left": 90.0,
    "fields": ["loss 1.8437", "lr 1.00e-04", "12.3k tok/s", "mfu 41.2%", "mem 61.20 GiB", "data wait 1%", "grad 0.164"],
}  # fmt: skip


def drawn(*draws: tuple[list[str], list[str]], columns: int = 40, rows: int = 8) -> tuple[Terminal, list[str]]:
    terminal, region, written = Terminal(columns, rows), Region(), []
    for above, lines in draws:
        written.append(region.draw(above, lines, columns))
        terminal.feed(written[-1].encode())
    return terminal, written


def test_only_what_has_changed_is_written() -> None:
    terminal, written = drawn(([], ["a 1", "b 1", "c"]), ([], ["a 2", "b 1", "c"]), ([], ["a 2", "b 1", "c"]))
    assert terminal.shown == ["a 2", "b 1", "c"] and terminal.cursor == (2, 1)
    assert "b" not in written[1] and written[2] == "" and terminal.clears == 1


def test_lines_stay_above_the_region_and_scroll() -> None:
    draws = [([f"line {each}"] if each % 2 else [], [f"now {each}", "region"]) for each in range(30)]
    terminal, _ = drawn(*draws, ([], []))
    assert terminal.lines == [f"line {each}" for each in range(1, 30, 2)]


def test_a_line_that_is_longer_than_the_terminal_leaves_nothing_of_the_region() -> None:
    terminal, _ = drawn(([], ["x" * 30, "y" * 30]), (["long " * 13 + "end"], ["new", "region"]), ([], []))
    assert "".join(terminal.lines).replace(" ", "") == "long" * 13 + "end"


@pytest.mark.parametrize("colour", ["", "\033[33m"])
def test_lines_of_a_run_are_broken_between_words(colour: str) -> None:
    text = f"{colour}     memory of each worker: 312.4 MiB at the most (predicted), 280.1 MiB all the time; a step " + (
        "takes about 0.21 s, the 1,810 steps about 6m 20s"
    )
    lines = broken(text, 80)
    assert all(len(line) <= 80 + len(colour) for line in lines) and len(lines) == 2
    assert " ".join(lines).split() == text.split()
    assert broken(text, 300) == [text]
    assert broken("x" * 200, 80) == ["x" * 200], "nor what others print"
    assert broken("     " + "x" * 200, 80) == ["     " + "x" * 200], "nor a path"
    assert broken(f"     {'x' * 90} then {'y ' * 40}", 80)[0] == "     " + "x" * 90, "and what follows one is broken"


def test_a_line_is_broken_by_its_columns_and_in_no_time() -> None:
    text = "     " + " ".join(["模型数据"] * 13_000)
    began = time.process_time()
    lines = broken(text, 40)
    assert time.process_time() - began < 5, "a second at most; measured anew for each piece, it took minutes"
    assert max(map(width_of, lines)) == 40 and " ".join(lines).split() == text.split()


def test_a_narrower_terminal_breaks_lines_and_they_are_removed_all_the_same() -> None:
    region, terminal = Region(), Terminal(30, 8)
    region.draw(["first"], ["x" * 50, "short"], 60)
    terminal.feed(("first\r\n" + "x" * 50 + "\r\nshort").encode())  # as a terminal shows it that was 60 columns wide
    terminal.feed(region.draw([], ["new"], 30).encode())
    assert terminal.shown == ["first", "new"]


@pytest.mark.parametrize("columns", [20, 40, 80, 160, 300])
def test_a_view_fits_any_width_and_shows_more_in_more(columns: int) -> None:
    view = View()
    view.take(STEP)
    view.take({"work": "counting rows of train.jsonl", "done": 1, "total": 3})
    lines = view.lines(columns, 24)
    terminal, _ = drawn(([], lines), columns=columns)
    assert len(terminal.shown) == len(lines) and all(len(line) <= columns - 3 for line in terminal.shown)
    assert ("grad" in lines[1]) == (columns > 80) and ("lr" in lines[1]) == (columns > 20)
    assert "50%  1m 30s left" in lines[0] and ("run  step 5/10" in lines[0]) == (columns > 20)
    assert ("data wait 1%" in lines[1]) == ("[█████████" in lines[0]) == (columns >= 80) and "1 of 3" in lines[2]
    assert columns < 80 or len(lines[0]) == columns - 3, "the bar takes what is left"


def test_work_that_is_done_is_not_shown() -> None:
    view = View()
    view.take({"work": "a", "done": 1, "total": 2})
    view.take({"work": "b", "done": 1, "total": 2})
    view.take({"work": "a", "done": 2, "total": 2})
    (line,) = view.lines(80, 24)
    assert line.startswith("b  [") and view.lines(80, 1) == []
    view.take({})
    assert view.lines(80, 24) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"title": 5, "done": "x", "total": -1, "fields": 7},
        {"title": "t", "fields": [{}, None]},
        {"title": "\x1b[31mred", "left": float("nan")},
        {"work": [], "title": "t"},
    ],
)
def test_any_message_can_be_shown(bad: dict[str, object]) -> None:
    view = View()
    view.take(bad)
    drawn(([], view.lines(80, 24)))  # what moves the cursor fails in the terminal


def test_lines_from_elsewhere_cannot_move_the_cursor() -> None:
    assert clean("10%\r20%\r30%\r") == "30%"
    assert clean("\x1b[2J\x1b[1;1Ha\x1b]0;title\x07b\x07\x1b7") == "ab"
    assert clean("\x1b[1mbold") == "\x1b[1mbold\x1b[0m" and clean("a\tb") == "a       b"
    assert width_of("模型") == 4 and cut_to("模型x", 3) == "模"


def test_messages_are_told_from_lines() -> None:
    assert read_message(message(title="é\n", done=1)) == {"title": "é\n", "done": 1}
    for line in ("step 1", "\x1e", "\x1e[1]", _END, "\x1e" + "[" * 100_000):
        assert read_message(line) is None


PROGRAM = """
import os, subprocess, sys, time
from raytune_fsdp.cli.progress import show_progress
from raytune_fsdp.record.screen_messages import Looks, tell
with show_progress() as progress:
    looks = Looks.of(sys.stdout)
    for each in range({steps}):
        tell(title=f"run  step {{each}}", done=each, total={steps}, left=9.0, fields=["loss 1.5", "lr 0.1"])
        if each % 10 == 0:
            print("line", each, looks, flush=True)
            print("warned", each, file=sys.stderr)
            os.write(2, f"raw {{each}}\\n".encode())
            subprocess.run(["echo", f"child {{each}}"])
        time.sleep({pause})
    while {go!r} and not os.path.exists({go!r}):
        time.sleep(0.05)
    {last}
print("end")
"""


def program(steps: int, pause: float = 0.0, last: str = "pass", go: Path | None = None) -> list[str]:
    """One that tells of steps, and waits at the end until there is a file."""
    return [sys.executable, "-c", PROGRAM.format(steps=steps, pause=pause, last=last, go=str(go or ""))]


def test_whoever_prints_prints_above_the_region() -> None:
    with on_terminal(program(40, pause=0.02)) as session:
        assert session.end() == 0
    expected = []
    for each in range(0, 40, 10):
        expected += [f"line {each} Looks(live=True, colours=True)", f"warned {each}", f"raw {each}", f"child {each}"]
    assert session.screen.lines == [*expected, "end"]


@pytest.mark.slow
def test_the_region_does_not_flicker() -> None:
    """After each write all of it is there, once, at the end; and there are ten writes a second at most."""
    with on_terminal(program(150, pause=0.01), columns=60, rows=10) as session:
        assert session.end() == 0
    frames = [frame for frame in session.frames if any("step" in line for line in frame)]
    assert len(frames) > 5
    for frame in frames:
        places = [row for row, line in enumerate(frame) if line.startswith("run  step")]
        assert places == [len(frame) - 2] and frame[-1] == "loss 1.5  lr 0.1", frame
    shown = zip(session.arrived, session.frames, strict=True)
    times = [at for (at, _), frame in shown if any("step" in line for line in frame)]
    assert (len(times) - 1) / (times[-1] - times[0]) < 12


STALLED = """
import os, sys, time
from pathlib import Path
from raytune_fsdp.cli.progress import show_progress
from raytune_fsdp.record.screen_messages import tell
done, go = map(Path, sys.argv[1:])
with show_progress() as progress:
    tell(title="run", done=1, total=2)
    for number in range({lines}):
        print(f"line {{number:5}}", "x" * 100)
    sys.stdout.flush()
    while {lines} == 0 and not go.exists():
        time.sleep(0.05)
    tell(title="run", done=2, total=2)
    progress("counting", 1, 2)
    done.touch()
print("end")
"""


def test_a_terminal_that_takes_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    """As behind a network that is away: it says that it is ready, and takes less than there is to write."""
    done = tmp_path / "done"
    with on_terminal([sys.executable, "-c", STALLED.format(lines=5000), str(done), str(done)]) as session:
        deadline = time.monotonic() + 60
        while not done.exists():
            assert time.monotonic() < deadline, "who prints waits for the terminal"
            time.sleep(0.05)
        assert session.end() == 0
    assert session.screen.lines[-1] == "end" and "line  4999 xxx" in session.screen.text


def test_a_region_that_is_killed_ends_nothing(tmp_path: Path) -> None:
    done, go = tmp_path / "done", tmp_path / "go"
    with on_terminal([sys.executable, "-c", STALLED.format(lines=0), str(done), str(go)]) as session:
        session.shows("run")
        region = [
            each for each in psutil.Process(session.process.pid).children(recursive=True)
            if "raytune_fsdp.cli.screen" in each.cmdline()
        ]  # fmt: skip
        region[0].kill()
        while region[0].status() != psutil.STATUS_ZOMBIE:  # its parent has not asked for it
            time.sleep(0.05)
        go.touch()
        assert session.end() == 0
    assert done.exists() and "end" in session.screen.text


@pytest.mark.slow
def test_another_size_of_the_terminal_is_seen(tmp_path: Path) -> None:
    with on_terminal(program(3, go=tmp_path / "go"), columns=100, rows=12) as session:
        session.shows("loss 1.5")
        session.resize(40, 12)
        session.shows("run  step 2   67%")
        (tmp_path / "go").touch()
        assert session.end() == 0


@pytest.mark.parametrize(
    ("last", "code"), [("1 / 0", 1), pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.slow)]
)
def test_whatever_ends_the_program_leaves_lines_only(tmp_path: Path, last: str, code: int) -> None:
    with on_terminal(program(3, last=last, go=tmp_path / "go")) as session:
        session.shows("loss 1.5")
        (tmp_path / "go").touch()
        assert session.end() == code
    assert "child 0" in session.screen.text and "step" not in session.screen.text
    assert session.screen.cursor[1] == 0


@pytest.mark.parametrize(
    "last",
    [
        "os.kill(os.getpid(), 9)",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("os._exit(4)", "import ctypes; ctypes.string_at(0)")),
    ],
)
def test_a_program_that_is_killed_loses_no_line(tmp_path: Path, last: str) -> None:
    words = f"print('last words', flush=True); import faulthandler; faulthandler.enable(); {last}"
    with on_terminal(program(3, last=words, go=tmp_path / "go")) as session:
        session.shows("loss 1.5")
        (tmp_path / "go").touch()
        assert session.end() in (137, 4, 139)
    assert "last words" in session.screen.text and "child 0" in session.screen.text
    assert ("Segmentation fault" in session.screen.text) == ("ctypes" in last)


def test_ctrl_c_leaves_lines_only() -> None:
    with on_terminal(program(1000, pause=0.1)) as session:
        session.shows("loss 1.5")
        session.press(b"\x03")
        assert session.end() != 0
    assert "loss 1.5" not in session.screen.text and "KeyboardInterrupt" in session.screen.text
    assert session.screen.lines.count("^C") == 1 and session.screen.cursor[1] == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "dumb"},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"CI": "true"}, {"RANK": "0", "WORLD_SIZE": "1"})),
    ],
)
def test_a_terminal_that_cannot_show_it_gets_plain_lines(environment: dict[str, str]) -> None:
    with on_terminal(program(20), **environment) as session:
        assert session.end() == 0
    assert all(b"\x1b" not in piece for _, piece in session.arrived)
    assert "step" not in session.screen.text and "line 10 Looks(live=False" in session.screen.text


@pytest.mark.slow
def test_no_color_is_respected_in_the_region() -> None:
    with on_terminal(program(20, pause=0.01), NO_COLOR="1") as session:
        assert session.end() == 0
    assert "Looks(live=True, colours=False)" in session.screen.text
    assert b"\x1b[1m" not in b"".join(piece for _, piece in session.arrived)


def test_training_does_not_wait_for_a_stopped_terminal(tmp_path: Path) -> None:
    """Ctrl-S stops the output: without a process between them, the program would wait for Ctrl-Q."""
    done = tmp_path / "done"
    with on_terminal(program(1000, last=f"open({str(done)!r}, 'w'); time.sleep(0.5)")) as session:
        session.shows("loss 1.5")
        session.press(b"\x13")
        while not done.exists():  # nothing arrives from a stopped terminal
            assert session.process.poll() is None
            time.sleep(0.05)
        session.press(b"\x11")
        assert session.end() == 0
    assert session.screen.lines[-1] == "end"


def test_looks_of_streams_that_are_no_terminals() -> None:
    import io

    assert Looks.of(io.StringIO()) == Looks(live=False, colours=False)
