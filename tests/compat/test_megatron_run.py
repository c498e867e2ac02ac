"""`python -m rollgraph.compat run …` runs a script as the main program, with a repaired Megatron."""

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


def run_compat(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "rollgraph.compat", *arguments, paths=[SOURCE])


def run_python(folder: Path, *arguments: str, paths: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "neighbour.py").write_text("HERE = 'found'\n")
    return tmp_path


@pytest.mark.slow
def test_a_script_runs_with_repairs(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    completed = run_compat(folder, "run", "scripts/train.py", "--lr", "1", "-m", "fail")
    assert completed.stdout == "__main__ ['--lr', '1', '-m', 'fail'] found MegatronLegacyTokenizer\n"
    assert completed.returncode == 7
    lines = [line for line in completed.stderr.splitlines() if line.startswith("rollgraph: ")]
    assert "rollgraph: forward-pre-hooks: repaired" in lines
    assert len(lines) == 6


def test_a_module_runs_with_repairs(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    completed = run_command(folder / "scripts", folder, "run", "-m", "train", "--lr", "1", program=main)
    assert (completed.stdout, completed.returncode) == ("__main__ ['--lr', '1'] found MegatronLegacyTokenizer\n", 0)


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
def test_child_processes_of_a_script_are_repaired(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    (folder / "scripts" / "train.py").write_text(PARENT)
    completed = run_compat(folder / "scripts", "run", "train.py", "spawned")
    assert (completed.stdout, completed.returncode) == ("['spawned'] True\n['plain'] True\n", 0), completed.stderr
    lines = [line for line in completed.stderr.splitlines() if line.startswith("rollgraph: repaired in process ")]
    assert len(lines) == 2
    assert all(line.endswith("capture-failure, legacy-tokenizer") for line in lines)


# The import hook, in processes with its folder on PYTHONPATH


def test_the_command_path_prints_the_folder(tmp_path: Path) -> None:
    completed = run_compat(tmp_path, "path")
    assert (completed.stdout, completed.returncode) == (f"{FOLDER}\n", 0)
    assert (Path(FOLDER) / "sitecustomize.py").exists()


def test_a_process_without_megatron_imports_nothing(tmp_path: Path) -> None:
    code = """
import sys
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "numpy"}))
finders = list(sys.meta_path)
import rollgraph.compat.import_hook
rollgraph.compat.import_hook.install()
print(sys.meta_path == finders)
"""
    completed = run_python(tmp_path, "-c", code, paths=[FOLDER, SOURCE])
    assert (completed.stdout, completed.stderr) == ("[]\nTrue\n", "")


def test_a_later_sitecustomize_on_the_path_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = __file__\n")
    code = "import sitecustomize; print(customized == sitecustomize.__file__, customized)"
    completed = run_python(tmp_path, "-c", code, paths=[FOLDER, tmp_path])
    assert (completed.stdout, completed.stderr) == (f"True {tmp_path / 'sitecustomize.py'}\n", "")


def make_megatron(folder: Path) -> None:
    """Write a fake megatron package, for an environment without rollgraph's dependencies."""
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("HERE = True\n")


def test_a_process_without_torch_warns_once_and_continues(tmp_path: Path) -> None:
    make_megatron(tmp_path)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch in this environment')\n")
    code = "import importlib, megatron.core as m; print(m.HERE); import megatron.core"
    completed = run_python(tmp_path, "-c", code, paths=[FOLDER, tmp_path])
    assert (completed.stdout, completed.returncode) == ("True\n", 0)
    assert len(completed.stderr.splitlines()) == 1
    assert completed.stderr.startswith("rollgraph: megatron-core is not repaired in process ")
    assert completed.stderr.endswith("ModuleNotFoundError: no torch in this environment\n")


@pytest.mark.slow
def test_importing_megatron_repairs_but_find_spec_does_not(tmp_path: Path) -> None:
    """The process could not import rollgraph by itself."""
    pytest.importorskip("megatron.core", reason=REASON)
    (tmp_path / "rollgraph").mkdir()  # an unrelated folder of that name
    code = """
import importlib.util, sys
assert importlib.util.find_spec("megatron.core").loader.get_source("megatron.core")
print("torch" in sys.modules)
import megatron.core
from rollgraph.compat.megatron import findings, repair
print({str(finding.state) for finding in repair()} == {str(finding.state) for finding in findings()}
      == {"repaired", "not affected"}, sys.modules["megatron.core"].__spec__.loader.__class__.__name__)
"""
    completed = run_python(tmp_path, "-c", code, paths=[FOLDER])
    assert (completed.stdout, completed.returncode) == ("False\nTrue SourceFileLoader\n", 0), completed.stderr
    assert completed.stderr.count("rollgraph: ") == 1


@pytest.mark.slow
def test_calling_repair_after_the_hook_reports_all_repairs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason=REASON)
    code = "from rollgraph.compat.megatron import repair; print([str(finding.state) for finding in repair()])"
    completed = run_python(tmp_path, "-c", code, paths=[FOLDER, SOURCE])
    assert completed.stdout == "['repaired', 'repaired', 'repaired', 'repaired', 'not affected', 'repaired']\n"


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
def test_a_script_runs_as_if_python_had_started_it(tmp_path: Path, target: list[str], options: list[str]) -> None:
    """A script, a module and a package run as if Python had started them. Nothing is repaired here."""
    package = tmp_path / "folder"
    package.mkdir()
    for file in (package / "facts.py", package / "__main__.py", tmp_path / "facts.py"):
        file.write_text(SELF_AWARE)
    code = "import sys; from rollgraph.compat.__main__ import run_target; run_target(sys.argv[1:], False)"
    if target[0] == "-m":
        code = "import sys; from rollgraph.compat.__main__ import run_target; run_target(sys.argv[2:], True)"
    paths = os.pathsep.join([str(SOURCE), str(tmp_path)])
    runs = [
        subprocess.run(
            [sys.executable, *options, *command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, timeout=900,
        )
        for command in (target, ["-c", code, *target])
    ]  # fmt: skip
    theirs, ours = ((completed.stdout, completed.stderr, completed.returncode) for completed in runs)
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
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    completed = run_compat(tmp_path, *arguments)
    assert completed.returncode == 2
    assert completed.stderr.startswith(message)


@pytest.mark.parametrize("name", ["absent", "absent.part"])
def test_a_missing_module_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """SystemExit with a text prints the text without a traceback; the exit code is 1."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as raised:
        run_target([name], as_module=True)
    (line,) = raised.value.code.splitlines()
    assert line.startswith(f"there is no module {name}")


def test_without_megatron_the_install_command_is_shown(folder: Path) -> None:
    """An empty megatron package simulates an environment without megatron-core."""
    (folder / "megatron").mkdir()
    (folder / "megatron" / "__init__.py").write_text("")
    completed = run_command(folder, folder, "run", "scripts/train.py", program=main)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == "megatron-core is not installed: pip install 'rollgraph[megatron]'\n"
