"""Ctrl-C in every part of a run: progress is saved, or its loss is reported."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.cli import main
from rollgraph.config import to_yaml
from rollgraph.log import ProgressDisplay
from rollgraph.log.progress import PlainDisplay
from rollgraph.parallel.ranks.failures import ExitCode, RankLost, StoppedInSetup
from rollgraph.parallel.ranks.stop import (
    StopRequest,
    StopSignals,
    ignore_terminations_at_exit,
    restore_termination_handlers,
)
from rollgraph.parallel.ranks.world import World
from rollgraph.train import train
from tests.checkpoint.test_checkpoints import Run
from tests.parallel.test_liveness import connected, loss_of, vanish
from tests.test_kills import begin, finish
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

LOOP = sys.modules[train.__module__]
QUICK = ["checkpoint.every=100", "data.validation=null", "graph.impl=none", "log.progress=plain"]


pytestmark = pytest.mark.usefixtures("ctrl_c")


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def press_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, presses: dict[int, int]) -> None:
    """Press Ctrl-C before certain calls: `presses` maps the number of a call to the number of presses."""
    calls, original = [0], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        press(presses.get(calls[0], 0))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def test_the_first_ctrl_c_lets_the_step_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    press_in(monkeypatch, LOOP, "collect_rollouts", {2: 1})
    with pytest.raises(KeyboardInterrupt):
        train(config_of(folder, *QUICK), ONE)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "Ctrl-C: the run will save and end after this step; press again to end it at once" in capfd.readouterr().err
    assert saved_steps(folder) == ["step_00000001"]


@pytest.mark.parametrize("times", [1, 2])
def test_an_update_and_its_record_are_atomic(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], times: int
) -> None:
    """Ctrl-C arrives when the weights are updated but the step is not recorded yet."""
    press_in(monkeypatch, LOOP, "check_can_learn", {2: times})
    with pytest.raises(KeyboardInterrupt):
        train(config_of(folder, *QUICK), ONE)
    assert saved_steps(folder) == ["step_00000001"]
    output = capfd.readouterr()
    assert "is lost" not in output.out
    assert ("Ctrl-C: the run will end after this update" in output.err) == (times == 2)


def test_a_third_ctrl_c_in_an_update_reports_the_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    press_in(monkeypatch, LOOP, "check_can_learn", {2: 3})
    with pytest.raises(KeyboardInterrupt):
        train(config_of(folder, *QUICK), ONE)
    assert saved_steps(folder) == []
    assert "step 1 ended between its updates: progress since the last checkpoint is lost" in capsys.readouterr().out


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_while_waiting_for_a_slow_disk_saves_or_reports_the_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    """Ctrl-C arrives while the second save waits for the first, and with `again` also while that error is handled."""
    press_in(monkeypatch, Checkpoints, "finish_save", {3: 2, 4: int(again)})
    with pytest.raises(KeyboardInterrupt):
        train(config_of(folder, *QUICK, "checkpoint.every=1"), ONE)
    out = capsys.readouterr().out
    if again:
        assert saved_steps(folder) == ["step_00000000"]
        assert "interrupted while saving: progress since the last checkpoint is lost" in out
    else:
        assert saved_steps(folder) == ["step_00000000", "step_00000001"]
        assert "saved after 2 of 4 steps" in out


def test_an_interrupted_wait_can_be_repeated(tmp_path: Path) -> None:
    run, gate = Run(tmp_path / "run"), threading.Event()
    assert run.checkpoints._writer is not None
    run.checkpoints._writer.submit(gate.wait, 60)  # simulates a slow disk
    run.save()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        wait_after(timer.start, run.checkpoints.wait)
    timer.join()
    threading.Timer(0.2, gate.set).start()
    run.checkpoints.wait()
    assert [saved.step for saved in run.checkpoints.complete()] == [0]
    run.checkpoints.close()


def test_a_slow_disk_is_not_waited_for_once_a_rank_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.checkpoint.keep._PAUSE", 0.01)
    monkeypatch.setattr("rollgraph.checkpoint.keep._GRACE_SECONDS", 0.05)
    run, gate = Run(tmp_path / "run"), threading.Event()
    assert run.checkpoints._writer is not None
    run.checkpoints._writer.submit(gate.wait, 300)  # simulates a disk that hangs
    run.save()
    with connected(2) as ranks:
        run.sharded.collectives.liveness = ranks[0]
        vanish(ranks[1])
        for wait in (run.checkpoints.finish_save, run.checkpoints.close):
            with pytest.raises(RankLost, match="rank 1 on node-1"):
                wait()
    gate.set()


def wait_after(start: Callable[[], None], wait: Callable[[], None]) -> None:
    start()
    wait()


def test_ctrl_c_before_the_first_step_ends_at_once() -> None:
    stop = StopSignals(ONE)
    with pytest.raises(KeyboardInterrupt), stop:
        press()
    assert not stop.requested


def test_a_closed_terminal_does_not_stop_a_run_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (
            restore_termination_handlers(),
            ignore_terminations_at_exit(ONE),
            StopSignals(ONE) as stop,
            stop.in_steps(),
        ):
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("phase", "number", "code", "line"),
    [
        (
            "read data",
            signal.SIGTERM,
            143,
            "stopped before the first step, as SIGTERM asked; saved checkpoints are whole",
        ),
        ("load model", signal.SIGHUP, 143, "stopped before the first step, as SIGHUP asked"),
        ("load model", signal.SIGINT, 130, "interrupted; saved checkpoints are whole"),
        ("autotune matmuls", signal.SIGTERM, 143, "stopped before the first step, as SIGTERM asked"),
        ("validate", signal.SIGTERM, 143, "stopped before the first step, as SIGTERM asked"),
    ],
)
def test_a_signal_during_set_up_acts_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], phase: str, number: int,
    code: int, line: str,
) -> None:  # fmt: skip
    """The signal comes twice, because `torchrun` forwards it. The folder keeps nothing that a later run would see."""
    show = PlainDisplay.phase

    def signal_in_phase(self: PlainDisplay, name: str, *progress: Any) -> None:
        show(self, name, *progress)
        if name == phase and number != signal.SIGINT:
            with pytest.raises(StoppedInSetup) as raised:
                signal.raise_signal(number)
            signal.raise_signal(number)
            raise raised.value
        if name == phase:
            signal.raise_signal(number)

    monkeypatch.setattr(PlainDisplay, "phase", signal_in_phase)
    file = folder / "run.yaml"
    file.write_text(to_yaml(config_of(folder, *QUICK, f"data.validation={folder / 'held_out.jsonl'}")))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train", str(file)]) == code
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith(phase)
    assert line in output.err
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list((folder / "run").rglob("step_*"))
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("stopped_ranks", [{0, 1, 2}, {1}, {0}])
def test_ranks_stopped_during_set_up_do_not_wait_for_each_other(folder: Path, stopped_ranks: set[int]) -> None:
    """Even if only one of them was stopped. The timeout is an hour, so a rank that waits would be noticed."""
    rewards = folder / "rewards.py"
    code = (
        f"import os, signal\nif int(os.environ['RANK']) in {stopped_ranks}:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    rewards.write_text(code + rewards.read_text())
    attempt = begin(folder, folder / "stopped", timeout=3600)
    try:
        finish(attempt, ExitCode.TERMINATED)
    finally:
        attempt.end()
    for log in attempt.logs:
        assert "stopped before the first step" in log.read_text()
    assert not (folder / "stopped" / "metrics.jsonl").exists()


def test_sigterm_ends_a_step_at_once_if_a_rank_is_lost() -> None:
    """No other rank will finish the step. A second signal does not disturb the clean-up."""
    with connected(2) as ranks:
        vanish(ranks[1])
        loss_of(ranks[0])
        world = World(0, 2, "cpu", liveness=ranks[0])
        with StopSignals(world) as stop, stop.in_steps():
            with pytest.raises(RankLost, match="rank 1 on node-1"):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)


def test_a_loss_that_becomes_known_after_sigterm_is_still_named() -> None:
    """`torchrun` may find out first, and stop the others in a step. Their collectives then raise the loss."""
    with connected(2) as ranks:

        def lose_a_rank_in_a_step() -> None:
            with StopSignals(World(0, 2, "cpu", liveness=ranks[0])) as stop, stop.in_steps():
                signal.raise_signal(signal.SIGTERM)
                vanish(ranks[1])
                loss_of(ranks[0])
                ranks[0].check()

        with pytest.raises(RankLost, match="rank 1 on node-1"):
            lose_a_rank_in_a_step()


@pytest.mark.parametrize("setup_follows", [False, True])
def test_sigterm_after_the_steps_leaves_a_finished_run_alone(setup_follows: bool) -> None:
    """After the steps of a warm start, however, there is more to come."""
    reached_the_end = False
    with suppress(StoppedInSetup), StopSignals(ONE) as stop:
        with stop.in_steps(setup_follows=setup_follows):
            pass
        signal.raise_signal(signal.SIGTERM)
        reached_the_end = True
    assert stop.requested
    assert reached_the_end != setup_follows


def test_a_stopped_set_up_names_the_lost_rank_that_caused_it() -> None:
    """`torchrun` stops the other ranks if it finds out first."""
    with connected(2) as ranks:
        vanish(ranks[1])
        stop = StopSignals(World(0, 2, "cpu", liveness=ranks[0]))
        with pytest.raises(StoppedInSetup, match="as SIGTERM asked: rank 1 on node-1") as raised, stop:
            signal.raise_signal(signal.SIGTERM)
    assert raised.value.cause.endswith("disappeared without notice")


def test_sigterm_shortens_the_wait_for_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.parallel.ranks.liveness._STOPPING_SECONDS", 0.0)
    with connected(2) as ranks:
        world = World(0, 2, "cpu", liveness=ranks[0])
        with StopSignals(world) as stop, stop.in_steps():
            signal.raise_signal(signal.SIGTERM)
        assert loss_of(ranks[0])[0] == 1  # with the usual patience, it would have ten minutes more


def test_a_run_in_another_thread_is_stopped_by_its_request(folder: Path) -> None:
    """Only the main thread gets signals. The run shows its progress in the view of its caller."""
    stop, phases, notes = StopRequest(), set(), []

    class Watching(ProgressDisplay):
        def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
            phases.add(name)

        def note(self, text: str) -> None:
            notes.append(text)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            stop.request("the test")

    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(
            train, config_of(folder, *QUICK), ONE, stop=stop, view=Watching(), on_step=on_step
        ).result()
        assert run is not None
        assert run.progress.finished_steps == 2
        assert saved_steps(folder) == ["step_00000001"]
        assert {"read data", "load model", "generate", "train"} <= phases
        assert "asked to stop: saved after 2 of 4 steps" in notes
        with pytest.raises(StoppedInSetup, match="as the test asked"):
            threads.submit(train, config_of(folder, *QUICK, f"output={folder / 'other'}"), ONE, stop=stop).result()


def test_a_signal_that_torchrun_forwards_counts_once() -> None:
    stop = StopSignals(World(1, 2, "cpu"))
    with ExitStack() as stack:
        stack.enter_context(stop)
        with stop.in_steps():
            press(2)
        stack.pop_all()  # no exception: the step continued
    with pytest.raises(KeyboardInterrupt):
        stop.__exit__(None, None)
    assert stop.requested


def test_a_foreign_ctrl_c_handler_is_kept() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with StopSignals(ONE) as stop, stop.in_steps():
            press()
        assert not stop.requested
        assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_with_foreign_handlers_are_left_alone() -> None:
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: heard.append(got)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with StopSignals(ONE) as stop:
            for number in before:
                signal.raise_signal(number)
        assert heard == list(before)
        assert not stop.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
