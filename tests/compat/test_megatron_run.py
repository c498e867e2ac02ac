"""`python -m rollgraph.compat run …`: the script sees a repaired package, and is itself the main program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollgraph.compat.__main__ import main, run_target
from rollgraph.compat.import_hook import FOLDER
from tests.compat.megatron_world import REASON
from tests.forked import run_command

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = """
import sys
import neighbour
from megatron.core.datasets.megatron_tokenizer import MegatronTokenizer
print(__name__, sys.argv[1:], neighbour.HERE, MegatronTokenizer.__name__)
if "fail" in sys.argv:
    sys.exit(7)
"""


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "rollgraph.compat", *arguments, paths=[SOURCE])


def python(folder: Path, *arguments: str, paths: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "scripts"
    inside.mkdir()
    (inside / "train.py").write_text(SCRIPT)
    (inside / "neighbour.py").write_text("HERE = 'found'\n")
    return tmp_path


@pytest.mark.slow
def test_a_script_runs_repaired(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    done = start(folder, "run", "scripts/train.py", "--lr", "1", "-m", "fail")
    assert done.stdout == "__main__ ['--lr', '1', '-m', 'fail'] found MegatronLegacyTokenizer\n"
    assert done.returncode == 7
    lines = [line for line in done.stderr.splitlines() if line.startswith("rollgraph: ")]
    assert "rollgraph: forward-pre-hooks: repaired" in lines
    assert len(lines) == 6


def test_a_module_runs_repaired(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    done = run_command(folder / "scripts", folder, "run", "-m", "train", "--lr", "1", program=main)
    assert (done.stdout, done.returncode) == ("__main__ ['--lr', '1'] found MegatronLegacyTokenizer\n", 0)


PARENT = """
import multiprocessing, subprocess, sys
def ask():
    from megatron.core.datasets import megatron_tokenizer
    print(sys.argv[1:], hasattr(megatron_tokenizer, "MegatronTokenizer"), flush=True)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=ask)
    child.start()
    child.join()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import train; train.ask()", "plain"], check=True)
"""


@pytest.mark.slow  # four processes that import Megatron
def test_processes_that_a_script_starts_are_repaired_too(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    (folder / "scripts" / "train.py").write_text(PARENT)
    done = start(folder / "scripts", "run", "train.py", "spawned")
    assert (done.stdout, done.returncode) == ("['spawned'] True\n['plain'] True\n", 0), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("rollgraph: repaired in process ")]
    assert len(lines) == 2
    assert all(line.endswith("capture-failure, legacy-tokenizer") for line in lines)


# The import hook, in processes that have its folder on their PYTHONPATH


def test_the_folder_can_be_asked_for(tmp_path: Path) -> None:
    done = start(tmp_path, "path")
    assert (done.stdout, done.returncode) == (f"{FOLDER}\n", 0)
    assert (Path(FOLDER) / "sitecustomize.py").exists()


def test_a_process_without_megatron_pays_for_no_import(tmp_path: Path) -> None:
    code = """
import sys
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "numpy"}))
finders = list(sys.meta_path)
import rollgraph.compat.import_hook
rollgraph.compat.import_hook.install()
print(sys.meta_path == finders)
"""
    done = python(tmp_path, "-c", code, paths=[FOLDER, SOURCE])
    assert (done.stdout, done.stderr) == ("[]\nTrue\n", "")


def test_a_sitecustomize_that_comes_later_on_the_path_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = __file__\n")
    code = "import sitecustomize; print(customized == sitecustomize.__file__, customized)"
    done = python(tmp_path, "-c", code, paths=[FOLDER, tmp_path])
    assert (done.stdout, done.stderr) == (f"True {tmp_path / 'sitecustomize.py'}\n", "")


def make_megatron(folder: Path) -> None:
    """A package of that name, for an environment that lacks all of rollgraph's dependencies."""
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("HERE = True\n")


def test_a_process_that_cannot_be_repaired_says_so_once_and_goes_on(tmp_path: Path) -> None:
    make_megatron(tmp_path)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch in this environment')\n")
    code = "import importlib, megatron.core as m; print(m.HERE); import megatron.core"
    done = python(tmp_path, "-c", code, paths=[FOLDER, tmp_path])
    assert (done.stdout, done.returncode) == ("True\n", 0)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rollgraph: megatron-core is not repaired in process ")
    assert done.stderr.endswith("ModuleNotFoundError: no torch in this environment\n")


@pytest.mark.slow
def test_looking_for_megatron_does_not_repair_but_importing_does(tmp_path: Path) -> None:
    """In a process that could not import rollgraph on its own."""
    pytest.importorskip("megatron.core", reason=REASON)
    (tmp_path / "rollgraph").mkdir()  # some other folder
    code = """
import importlib.util, sys
assert importlib.util.find_spec("megatron.core").loader.get_source("megatron.core")
print("torch" in sys.modules)
import megatron.core
from rollgraph.compat.megatron import findings, repair
print({str(finding.state) for finding in repair()} == {str(finding.state) for finding in findings()}
      == {"repaired", "not affected"}, sys.modules["megatron.core"].__spec__.loader.__class__.__name__)
"""
    done = python(tmp_path, "-c", code, paths=[FOLDER])
    assert (done.stdout, done.returncode) == ("False\nTrue SourceFileLoader\n", 0), done.stderr
    assert done.stderr.count("rollgraph: ") == 1


@pytest.mark.slow
def test_repair_by_hand_reports_correctly_beside_the_hook(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    code = "from rollgraph.compat.megatron import repair; print([str(found.state) for found in repair()])"
    done = python(tmp_path, "-c", code, paths=[FOLDER, SOURCE])
    assert done.stdout == "['repaired', 'repaired', 'repaired', 'repaired', 'not affected', 'repaired']\n"


SELF_AWARE = """
import atexit, pickle, sys, threading, time
class Here: pass
def check(where):
    print(where, __name__, pickle.loads(pickle.dumps(Here())).__class__ is Here)
def annotated(x: undefined if len(sys.argv) > 9 else int): ...
print(__file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0], annotated.__annotations__, __doc__)
atexit.register(check, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), check("in a thread"))).start()
if "raise" in sys.argv:
    raise SystemExit("with a message")
"""


@pytest.mark.parametrize("options", [[], ["-P"]], ids=["", "safe path"])
@pytest.mark.parametrize("target", [["folder/facts.py", "raise"], ["-m", "facts", "1"], ["-m", "folder", "1"]])
def test_a_script_cannot_tell_the_difference(tmp_path: Path, target: list[str], options: list[str]) -> None:
    """A script, a module and a package run as if Python had started them; nothing is repaired here."""
    inside = tmp_path / "folder"
    inside.mkdir()
    for file in (inside / "facts.py", inside / "__main__.py", tmp_path / "facts.py"):
        file.write_text(SELF_AWARE)
    code = "import sys; from rollgraph.compat.__main__ import run_target; run_target(sys.argv[1:], False)"
    if target[0] == "-m":
        code = "import sys; from rollgraph.compat.__main__ import run_target; run_target(sys.argv[2:], True)"
    paths = os.pathsep.join([str(SOURCE), str(tmp_path)])
    seen = [
        subprocess.run(
            [sys.executable, *options, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, timeout=900,
        )
        for words in (target, ["-c", code, *target])
    ]  # fmt: skip
    theirs, ours = ((done.stdout, done.stderr, done.returncode) for done in seen)
    assert ours == theirs
    assert "at exit __main__ True" in theirs[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m rollgraph.compat run"),
        (["run"], "usage: python -m rollgraph.compat run"),
        (["run", "-m"], "usage: python -m rollgraph.compat run"),
        (["walk", "script.py"], "usage: python -m rollgraph.compat run"),
        (["run", "absent.py"], "there is no script absent.py"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = start(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)


@pytest.mark.parametrize("name", ["absent", "absent.part"])
def test_a_missing_module_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Python prints the text that it exits with, without a traceback, and its exit code is 1."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as found:
        run_target([name], as_module=True)
    (line,) = found.value.code.splitlines()
    assert line.startswith(f"there is no module {name}")


def test_without_megatron_the_install_command_is_shown(folder: Path) -> None:
    """An empty package of that name simulates an environment without megatron-core."""
    (folder / "megatron").mkdir()
    (folder / "megatron" / "__init__.py").write_text("")
    done = run_command(folder, folder, "run", "scripts/train.py", program=main)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megatron-core is not installed: pip install 'rollgraph[megatron]'\n"
