"""The progress display in a terminal, and as plain lines."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import rollgraph
from rollgraph.log.live_display import LiveDisplay, ProgressPanel, make_display, sparkline
from rollgraph.log.progress import PlainDisplay, ProgressDisplay

VALUES = {
    "reward": 0.4123,
    "policy/kl": 0.00312,
    "speed/tokens_per_second": 12345.6,
    "speed/memory_gib": 31.24,
    "policy/entropy": 1.0,
}
SECONDS = {"generate": 4.1, "train": 1.9}


def record(width: int = 90, height: int = 30) -> Console:
    return Console(force_terminal=True, width=width, height=height, record=True, file=io.StringIO(), color_system=None)


def picture(view: ProgressPanel, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(view.render(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_some(view: ProgressDisplay, steps: int = 3) -> None:
    for step in range(steps):
        view.phase("generate", 512, 512)
        view.phase("train", 8, 8)
        view.step(step, {**VALUES, "reward": 0.1 * step}, SECONDS)


def test_a_closed_pager_does_not_end_a_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        view = make_display("plain", 10, stream)
        for text in ("one", "two"):
            view.note(text)


def test_plain_prints_one_line_per_step() -> None:
    with make_display("plain", 100, stream := io.StringIO()) as view:
        run_some(view, 2)
        view.step(2, {"reward": 0.3, "validation/reward": 0.25}, {})
    assert stream.getvalue().splitlines() == [
        "[  1/100]  reward 0  KL 0.00312  12,346 tokens/s  31.2 GiB  6.0s: generate 4.1, train 1.9  9m 54s left",
        "[  2/100]  reward 0.1  KL 0.00312  12,346 tokens/s  31.2 GiB  6.0s: generate 4.1, train 1.9  9m 48s left",
        "[  3/100]  reward 0.3  validation/reward 0.25  6m 28s left",
    ]


def test_samples_that_fit_are_shown_and_the_last_lines_come_last() -> None:
    samples = ["1+1= → 3 (0)", "long " * 20, "2+2= → 4 (1)"]
    last = ["reward: 0.1, then 0.9", f"next: rollgraph samples {'x' * 100}"]
    with make_display("plain", 3, stream := io.StringIO()) as view:
        view.samples(samples)
        view.show_last_lines(last)
    assert stream.getvalue().splitlines() == ["samples: 1+1= → 3 (0)", *last]

    with LiveDisplay(3, console := record()) as live:
        run_some(live)
        live.samples(samples)
        live.show_last_lines(last)
    lines = console.export_text().splitlines()
    assert lines[-2:] == last  # a command that is longer than the terminal has no line break inside
    assert "1+1= → 3 (0)" in lines[-4]
    assert "long" not in console.export_text()


def test_plain_prints_few_lines_for_set_up_and_long_steps() -> None:
    now = [0.0]
    view = PlainDisplay(100, stream := io.StringIO(), lambda: now[0])
    view.phase("read data", 0, 0)
    now[0] = 2.0
    for piece in range(240):  # 0.125 s each, which adds up without rounding
        view.phase("load model", piece * 2**28, 240 * 2**28, in_bytes=True)
        now[0] += 0.125
    view.phase("capture for training", 0, 2, "train 4096")
    now[0] += 70
    view.phase("capture for training", 1, 2, "train 2048")
    view.end_phase()
    view.end_phase()  # there is none
    view.phase("generate", 1, 8)
    now[0] += 31
    view.phase("generate", 2, 8)
    view.phase("generate", 3, 8)
    view.step(0, {"reward": 0.5}, {"generate": 2.0})
    view.phase("validate", 1, 2)
    now[0] += 31
    view.phase("validate", 2, 2)
    assert stream.getvalue().splitlines() == [
        "read data",
        "read data: done in 2.0s",
        "load model: 0%, 0.0 of 60.0 GiB",
        "load model: 17%, 10.0 of 60.0 GiB, 2.0 GiB/s, 25s left",
        "load model: 33%, 20.0 of 60.0 GiB, 2.0 GiB/s, 20s left",
        "load model: 50%, 30.0 of 60.0 GiB, 2.0 GiB/s, 15s left",
        "load model: 67%, 40.0 of 60.0 GiB, 2.0 GiB/s, 10s left",
        "load model: 83%, 50.0 of 60.0 GiB, 2.0 GiB/s, 5s left",
        "load model: done in 30s",
        "capture for training: 0/2 (train 4096)",
        "capture for training: 1/2 (train 2048), 1m 10s left",
        "capture for training: done in 1m 10s",
        "generate: 2/8",
        "[  1/100]  reward 0.5  2.0s: generate 2.0  3m 18s left",
        "[  2/100]  validate: 2/2",
    ]


@pytest.mark.parametrize("progress", ["auto", "live", "plain"])
def test_there_are_no_control_codes_without_a_terminal(progress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with make_display(progress, 3, stream := io.StringIO()) as view:  # type: ignore[arg-type]
        view.note("\x1b[31mred\x1b[0m [bold]as it is[/bold]\r")
        run_some(view)
    assert len(stream.getvalue().splitlines()) == 4
    assert all(character.isprintable() or character == "\n" for character in stream.getvalue())
    assert "[bold]as it is[/bold]" in stream.getvalue()


def test_plain_replaces_characters_that_the_stream_cannot_encode() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    make_display("plain", 3, stream).note("naïve → done")
    assert raw.getvalue() == b"na?ve ? done\n"


def test_progress_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display("none", 3) as view:
        view.note("nothing")
        run_some(view)
    assert capsys.readouterr() == ("", "")


def test_the_panel_shows_phases_metrics_and_the_last_validation() -> None:
    view = LiveDisplay(100, record())
    run_some(view)
    view.step(3, {**VALUES, "validation/reward": 0.51, "validation/pass@4": 0.7}, SECONDS)
    view.step(4, VALUES, SECONDS)
    view.phase("generate", 213, 512)
    view.phase("save", 1, 2)
    lines = [line.strip("│ \n") for line in picture(view, 90).splitlines()]
    rows = {line.split()[0]: line for line in lines if line}
    assert re.search(r"[━╸] +5/100 +9m 30s left$", rows["steps"])
    assert re.search(r"[━╸] +213/512 +4\.1s +68%$", rows["generate"])
    assert re.search(r"^train +1\.9s +32%$", rows["train"])  # from the last step; this step has not reached it yet
    assert re.search(r"[━╸] +1/2 +0s left$", rows["save"])
    assert "reward 0.412   KL 0.00312   12,346 tokens/s   31.2 GiB" in lines
    assert "reward ▁▃▄██" in lines
    assert "validation at 4:   reward 0.51   pass@4 0.7" in lines


def test_the_panel_names_the_phase_before_the_first_step() -> None:
    """A capture is no step, and the samples of a warm start are not those of the first step."""
    now = [0.0]
    view = ProgressPanel(100, lambda: now[0])
    assert "starting" in picture(view, 80)
    view.phase("capture for training", 0, 3, "train 4096")
    now[0] = 10.0
    view.phase("capture for training", 1, 3, "train 2048")
    shown = picture(view, 80)
    assert re.search(r"capture for training +[━╸]+ *[━╸]* +1/3 +20s left", shown)
    assert "before the first step: capture for training (train 2048)" in shown
    assert not any(name in shown for name in ("generate", "score", "under way"))
    view.phase("warm start", 3, 100)
    view.phase("generate", 2, 2)
    shown = picture(view, 80)
    assert "capture" not in shown
    assert "generate" in shown
    assert "before the first step: warm start" in shown
    view.end_phase()
    assert not any(name in picture(view, 80) for name in ("warm start", "generate"))
    view.phase("generate", 1, 2)
    shown = picture(view, 80)
    assert "the first step is under way" in shown
    assert all(name in shown for name in ("generate", "reward", "score", "train"))


def test_a_phase_outside_of_steps_leaves_no_row() -> None:
    """Everything must fit into 24 lines, however many phases there were."""
    view = LiveDisplay(100, record(80, 24))
    for number in range(15):
        view.phase(f"capture {number}", 0, 2)
        assert picture(view, 80).count("│ capture ") == 1
    view.end_phase()
    run_some(view)
    view.step(3, {**VALUES, "validation/reward": 0.51}, SECONDS)
    view.phase("validate", 1, 2)
    assert re.search(r"validate +[━╸]", picture(view, 80))
    view.end_phase()
    shown = picture(view, 80)
    assert "capture" not in shown
    assert "validate" not in shown
    assert "validation at 4" in shown
    assert len(shown.splitlines()) < 24


def test_only_phases_with_progress_have_a_bar() -> None:
    view = LiveDisplay(100, Console(force_terminal=True, width=90, file=io.StringIO()))

    def rows() -> dict[str, bool]:
        console = Console(force_terminal=True, color_system="truecolor", width=90, file=io.StringIO())
        console.print(view.render(90))
        assert isinstance(console.file, io.StringIO)
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in console.file.getvalue().splitlines()]
        return {line.split()[0]: "━" in line for line in lines if line[:1].islower()}

    view.phase("generate", 1, 2)
    assert {name: rows()[name] for name in ("steps", "generate", "reward", "score", "train")} == {
        "steps": True,
        "generate": True,
        "reward": False,
        "score": False,
        "train": False,
    }
    view.step(0, VALUES, SECONDS)
    view.phase("generate", 1, 2)
    assert "score" not in rows()  # it took no time
    assert "train" in rows()


@pytest.mark.parametrize("width", [100, 60, 40, 20, 8])
def test_the_panel_fits_into_narrow_terminals(width: int) -> None:
    view = LiveDisplay(100, record(width))
    run_some(view, 300)
    view.step(300, {**VALUES, "validation/reward": 0.51}, SECONDS)
    shown = picture(view, width)
    assert {len(line) for line in shown.splitlines()} == {width}
    if width >= 40:
        assert "12,346 tokens/s" in shown
        assert "generate ━" in shown


def test_live_output_leaves_the_cursor_visible_after_an_exception() -> None:
    console = record(height=5)  # shorter than the picture

    def break_inside() -> None:
        with LiveDisplay(3, console) as view:
            run_some(view)
            view.note("a [note] that stays")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_inside()
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert written.count("\x1b[?25l") == 1
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "a [note] that stays" in written
    assert "[dim]" not in written  # the picture is also drawn with the note, which has no markup
    before = len(written)
    console.print("the terminal is ours again")
    assert console.file.getvalue()[before:] == "the terminal is ours again\n"


def read_all(terminal: int) -> bytes:
    """Read until the other side is closed, which Linux reports as an error."""
    seen = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            seen += data
    os.close(terminal)
    return seen


def test_a_terminal_gets_the_live_display_and_a_pipe_gets_lines() -> None:
    code = (
        "from rollgraph.log import make_display\n"
        "with make_display('auto', 2) as view:\n"
        "    view.phase('generate', 1, 2); view.step(0, {'reward': 0.5}, {'generate': 1.0}); print('printed')\n"
    )
    source = Path(rollgraph.__file__).parents[1]
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", "COLUMNS": "60", "LINES": "30"}
    piped = subprocess.check_output([sys.executable, "-c", code], cwd=source, env=environment, text=True)
    assert piped == "[1/2]  reward 0.5  1.0s: generate 1.0  1s left\nprinted\n"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=source, env=environment, stdout=theirs)
    os.close(theirs)
    seen = read_all(ours).decode()
    assert process.wait() == 0
    assert "╭─ rollgraph" in re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert "\x1b[?25h" in seen
    assert "printed" in seen


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(make_display("auto", 1, stream), LiveDisplay)
        assert isinstance(make_display("plain", 1, stream), PlainDisplay)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_display("live", 1, stream), PlainDisplay)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0, 3.0], "▁█▄"),
        ([0.0, float("nan"), 1.0, float("inf")], "▁ █ "),
        ([float("nan")], " "),
    ],
)
def test_a_sparkline_has_one_bar_per_value(values: list[float], line: str) -> None:
    assert sparkline(values) == line
