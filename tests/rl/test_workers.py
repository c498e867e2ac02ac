"""Calls in other processes: which calls are lost with their process, and effects of a call on the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgraph.rl.rewards.calls import run_for
from rollgraph.rl.rewards.pool import WorkerPool
from rollgraph.rl.rewards.process import Failure
from tests.processes import wait_until_gone

PROGRAM = """
import os
from pathlib import Path

def make(folder):
    starts = Path(folder) / "starts"
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    if (Path(folder) / "broken").exists():
        os._exit(7)
    return square

def square(number):
    if number < 0:
        os._exit(5)
    return number * number
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    (tmp_path / "program.py").write_text(PROGRAM)
    made = WorkerPool(1, f"{tmp_path / 'program.py'}:make", (str(tmp_path),), timeout=20.0)
    yield made
    made.close()


def kill_before_it_begins(pool: WorkerPool) -> None:
    """Make the process that gets the next call die before it begins the call."""
    pid = pool._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()


def replace_worker(pool: WorkerPool) -> None:
    """Let the next call start a new process."""
    supervisor = pool._workers[0]._process
    assert supervisor is not None
    os.kill(pool._workers[0].pid, signal.SIGKILL)
    supervisor.wait()


def test_a_call_that_had_not_begun_goes_to_a_new_process(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run([(3,)]) == [9]
    kill_before_it_begins(pool)
    assert pool.run([(4,), (5,)]) == [16, 25]
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_call_that_killed_its_process_is_not_repeated(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run([(-1,), (2,)]) == [Failure("died", "ended with exit code 5"), 4]
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_call_is_repeated_only_once(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    kill_before_it_begins(pool)
    assert pool.run([(4,)]) == [Failure("died", "ended with exit code 7")]
    assert (tmp_path / "starts").read_text() == "xx"
    (tmp_path / "broken").unlink()
    assert pool.run([(4,)]) == [16]


# Effects that outlast a call.

CALLS = """
import multiprocessing, os, signal, socket, stat, struct, subprocess, sys, time
from pathlib import Path

class Panic(BaseException):
    pass

def make(folder):
    folder = Path(folder)

    def call(name, *arguments):
        return globals()[name](folder, *arguments)

    return call

def square(folder, number):
    return number * number

def fork(folder, number):
    os.fork()
    return number

def fork_and_raise(folder):
    if os.fork() == 0:
        raise RuntimeError("in the child")
    return 1

def write_to_sockets(data):
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                os.write(int(name), data)
        except OSError:
            pass

def write(folder, data):
    write_to_sockets(data)
    time.sleep(1000)

def flood(folder):
    while True:
        write_to_sockets(b'["result", -1, 0]\\n' * 1000)

def repeat(folder, text, count):
    return text * count

def hang(folder):
    (folder / "hangs").touch()
    subprocess.run(["sleep", "1000"])

def panic(folder):
    raise Panic("at the disco")

def unshowable(folder):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError
    raise Odd

def leave_children(folder, end):
    sleep = ["sleep", "1000"]
    own_session = subprocess.Popen(sleep, start_new_session=True, env={"PATH": os.environ["PATH"]})
    script = "setsid sleep 1000 & echo $! > daemon; exit 0"
    subprocess.run(["sh", "-c", script], check=True, cwd=folder, start_new_session=True)
    pids = [own_session.pid, int((folder / "daemon").read_text())]
    (folder / "pids").write_text(" ".join(map(str, pids)))
    if end == "exit":
        os._exit(3)
    return pids

def needs_a_child(folder):
    (folder / "asked").open("a").write("x")
    if (folder / "asked").read_text() == "xx":
        return 1.0
    child = subprocess.Popen(["sleep", "1000"])
    (folder / "group").write_text(str(os.getpgid(0)))
    (folder / "group").rename(folder / "group of the worker")
    return 0.0 if child.wait() == -signal.SIGTERM else None

def end_children(folder):
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    forked.start()
    forked.terminate()
    forked.join()
    return [program.wait(), forked.exitcode]

def descriptors(folder):
    program = "import os; print([n for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)])"
    found = subprocess.run([sys.executable, "-c", program], close_fds=False, capture_output=True, text=True).stdout
    return sorted(int(name) for name in eval(found) if int(name) > 2)

def speak(folder):
    print("said by a call")
    os.system("echo said by a program")
    return 1
"""


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[WorkerPool]:
    (tmp_path / "calls.py").write_text(CALLS)
    made = WorkerPool(1, f"{tmp_path / 'calls.py'}:make", (str(tmp_path),), timeout=30.0)
    yield made
    made.close()


def test_a_call_that_forks_answers_once(calls: WorkerPool) -> None:
    wanted = [("fork", 7), ("square", 2), ("square", 3), ("fork", 5), ("square", 4)]
    for _ in range(3):
        assert calls.run(wanted) == [7, 4, 9, 5, 16]
    assert calls.run([("fork_and_raise",), ("square", 6)]) == [1, 36]


@pytest.mark.slow
def test_garbage_on_the_connection_does_not_outlast_the_timeout(calls: WorkerPool) -> None:
    broken = Failure("died", "something other than an answer was written to the worker's connection")
    for data in (b"\0\0\1\0", b"hello", b"call" + (2**63).to_bytes(8), b"[{}]\n", b"[" + b"]" * 5000 + b"\n"):
        assert calls.run([("write", data), ("square", 3)]) == [broken, 9]
    half = b'["result", '  # the beginning of a message
    assert calls.run([("write", half)], [1.0]) == [Failure("timeout", "no result after 1.0 s")]
    assert calls.run([("square", 3)]) == [9]


def test_arguments_and_results_are_larger_than_the_buffers_of_a_connection(calls: WorkerPool) -> None:
    text = "\N{SNOWMAN}\n" * 1_000_000
    assert calls.run([("repeat", text, 2), ("square", 3)]) == [text * 2, 9]


def test_a_worker_that_does_not_read_its_call_times_out(calls: WorkerPool) -> None:
    worker = calls._workers[0].pid
    os.kill(worker, signal.SIGSTOP)
    late = Failure("timeout", "no result after 1.0 s")
    assert calls.run([("repeat", "x" * 10_000_000, 1), ("square", 3)], [1.0, 30.0]) == [late, 9]
    wait_until_gone([worker])


def test_answers_to_other_calls_do_not_put_off_the_timeout(calls: WorkerPool) -> None:
    late = Failure("timeout", "no result after 1.0 s")
    assert calls.run([("flood",), ("square", 3)], [1.0, 30.0]) == [late, 9]


def test_an_answer_that_came_while_this_process_was_stopped_counts() -> None:
    """After Ctrl-Z and `fg`, say: when it goes on, the answer is there and the time is over."""

    async def read_late() -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)

            def stop() -> None:
                theirs.sendall(b"x")
                time.sleep(0.1)

            asyncio.get_running_loop().call_soon(stop)
            reading = await run_for(reader.readexactly(1), 0.01)
            writer.close()
            return reading.result()

    assert asyncio.run(read_late()) == b"x"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_costs_the_worker_of_a_running_call(calls: WorkerPool, tmp_path: Path) -> None:
    def interrupt() -> None:
        limit = time.monotonic() + 60
        while not (tmp_path / "hangs").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    worker = calls._workers[0].pid
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        calls.run([("hang",), ("square", 2)])
    thread.join()
    assert calls.run([("square", 3)]) == [9]
    wait_until_gone([worker])


@pytest.mark.parametrize("end", ["exit", "close"])
def test_processes_started_by_a_call_do_not_outlive_the_worker(calls: WorkerPool, tmp_path: Path, end: str) -> None:
    (found,) = calls.run([("leave_children", end)])
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if end == "close":
        assert found == started
        calls.close()
    else:
        assert found == Failure("died", "ended with exit code 3")
    assert len(started) == 2
    wait_until_gone(started)


def test_a_signal_to_all_processes_of_a_job_loses_no_result(calls: WorkerPool, tmp_path: Path) -> None:
    """The worker survives the signal, but programs that the call started do not, so the call is repeated."""

    def stop_all() -> None:
        limit = time.monotonic() + 60
        while not (tmp_path / "group of the worker").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        os.killpg(int((tmp_path / "group of the worker").read_text()), signal.SIGTERM)

    pid = calls._workers[0].pid
    thread = threading.Thread(target=stop_all)
    thread.start()
    assert calls.run([("needs_a_child",)]) == [1.0]
    thread.join()
    supervisor = calls._workers[0]._process
    assert supervisor is not None
    for process in (pid, supervisor.pid):
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGINT)
    assert calls.run([("square", 3)]) == [9]
    assert calls._workers[0].pid == pid


def test_a_worker_ended_by_a_stop_signal_is_replaced_and_its_call_repeated(calls: WorkerPool, tmp_path: Path) -> None:
    """A library may have removed our handler."""
    (tmp_path / "calls.py").write_text(
        CALLS + "\ndef give_up(folder):\n"
        "    if (folder / 'gave up').exists():\n        return 1\n"
        "    (folder / 'gave up').touch()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    replace_worker(calls)
    assert calls.run([("give_up",)]) == [1]


def test_programs_started_by_a_call_can_be_ended_and_get_no_connection(calls: WorkerPool) -> None:
    assert calls.run([("end_children",)]) == [[-signal.SIGTERM, -signal.SIGTERM]]
    (open_ones,) = calls.run([("descriptors",)])
    assert open_ones == []


def test_every_kind_of_exception_is_a_failure_of_its_call(calls: WorkerPool) -> None:
    panic, odd, fine = calls.run([("panic",), ("unshowable",), ("square", 2)])
    assert panic.kind == odd.kind == "raised"
    assert panic.message.startswith("Panic: at the disco (")
    assert odd.message.startswith("Odd: (it cannot be shown) (")
    assert fine == 4


def test_calls_print_to_standard_error(calls: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    replace_worker(calls)  # the next one has the file descriptors of this test
    assert calls.run([("speak",)]) == [1]
    calls.close()
    found = capfd.readouterr()
    assert "said" not in found.out
    assert "said by a call\n" in found.err
    assert "said by a program\n" in found.err


def test_modules_in_the_working_directory_do_not_shadow_the_standard_library(tmp_path: Path) -> None:
    """They belong to the user: a reward may be in one of them, and import others."""
    for name in ("json", "types", "pickle", "socket", "inspect", "copy"):
        (tmp_path / f"{name}.py").write_text(f"open('hijacked by {name}', 'w')\nraise ImportError('not that one')\n")
    (tmp_path / "mine.py").write_text("import helpers\ndef f(completions, **columns):\n    return helpers.score()\n")
    (tmp_path / "helpers.py").write_text("def score():\n    return [3.0]\n")
    program = """
import os, sys
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout
sys.path.insert(0, os.getcwd())
for name in ("mine:f", "mine.py:f"):
    with RewardFunctions([name], workers=1) as rewards:
        rollout = Rollout(Prompt(0, (), ""), [], [], [], "x")
        rewards.score([rollout])
        print(rollout.reward, dict(rewards.messages))
"""
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout == "3.0 {}\n3.0 {}\n", found.stderr
    assert not list(tmp_path.glob("hijacked*"))
