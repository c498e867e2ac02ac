from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

import rollgraph
from rollgraph.commands import doctor
from rollgraph.commands import doctor as command
from rollgraph.compat import examination
from rollgraph.compat.diagnosis import Diagnosis, RepairState
from rollgraph.compat.examination import examine, find_installed
from rollgraph.compat.megatron.repair import Patch
from tests.forked import run_command

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(examination.__file__).parents[2])}
LONG = "AssertionError: handles is not empty " + "and so on " * 20


def finding(state: RepairState, name: str = "forward-pre-hooks") -> Diagnosis:
    return Diagnosis(name, state, symptom=LONG, reason="hooks are looked up", repair="repair()")


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["doctor", *arguments])
    exit_code: int = options.run(options)
    return exit_code


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe nothing, except in tests of what is said of the machine."""
    if "machine" not in request.node.name:
        monkeypatch.setattr(doctor, "examine_machine", dict)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that megatron-core is installed and has these findings; the second list is with repairs."""

    def set_findings(plain: list[Diagnosis], repaired: list[Diagnosis] | None = None) -> None:
        installed = {**find_installed(), "megatron-core": "0.16.1"}
        monkeypatch.setattr(examination, "find_installed", lambda: installed)
        monkeypatch.setattr(examination, "_megatron_core", lambda: plain)
        monkeypatch.setattr(examination, "_megatron_core_repaired", lambda: repaired)

    return set_findings


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        ((RepairState.CLEAR,), 0),
        ((RepairState.CLEAR, RepairState.REPAIRED, RepairState.UNKNOWN), 0),
        ((RepairState.UNKNOWN, RepairState.UNKNOWN), 3),
        ((RepairState.CLEAR, RepairState.AFFECTED, RepairState.REPAIRED), 1),
    ],
)
def test_exit_code(found: Callable[..., None], states: tuple[RepairState, ...], exit_code: int) -> None:
    found([finding(state) for state in states])
    assert call() == exit_code
    assert call("--json") == exit_code


def test_prints_every_part_on_whole_lines(found: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found([finding(RepairState.AFFECTED)])
    call()
    lines = capsys.readouterr().out.splitlines()
    assert "AFFECTED  forward-pre-hooks" in lines
    assert f"  symptom  {LONG.strip()}" in lines  # what is piped can be searched for the error text
    assert "  reason   hooks are looked up" in lines
    assert "  repair   repair()" in lines
    assert lines[-1].startswith("1 affected; call rollgraph.compat.megatron.repair()")


def test_a_terminal_shows_the_same(found: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    class Terminal(rich.console.Console):
        def __init__(self, **options: object) -> None:
            super().__init__(force_terminal=True, width=60, record=True, **options)  # type: ignore[arg-type]
            made.append(self)

    made: list[rich.console.Console] = []
    monkeypatch.setattr(rich.console, "Console", Terminal)
    found([finding(RepairState.AFFECTED)])
    call()
    text = made[0].export_text()
    assert max(map(len, text.splitlines())) <= 60
    assert "".join(LONG.split()) in "".join(text.split())


def test_json(found: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "their.yaml"
    path.write_text("cuda_graph_scope: attn\n")
    found([finding(RepairState.CLEAR)])
    assert call("--json", "--config", str(path)) == 1  # what is wrong with the config counts
    report = json.loads(capsys.readouterr().out)
    assert report["affected"] is True
    assert report["installed"]["megatron-core"] == "0.16.1"
    assert report["findings"][0]["state"] == "not affected"
    kinds = {remark["kind"]: remark["serious"] for remark in report["config"]}
    assert kinds["contradictory"] is True
    assert {remark["place"] for remark in report["config"]} == {f"{path}:1"}


def test_deprecated_keys_alone_are_not_a_failure(
    found: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "their.yaml"
    path.write_text("enable_cuda_graph: true\n")
    found([finding(RepairState.CLEAR)])
    assert call("--config", str(path)) == 0
    out = capsys.readouterr().out
    assert f"{path}:1: enable_cuda_graph: deprecated" in out
    assert "write cuda_graph_impl: local" in out


def test_a_config_that_cannot_be_read(found: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found([])
    assert call("--config", "nowhere.yaml") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere.yaml: cannot be read: No such file or directory" in captured.err


@pytest.mark.parametrize("text", ["", "steps: 3\nmodel: {path: x}\npolicy: null\n"])
def test_a_config_without_known_keys(
    found: Callable[..., None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    found([finding(RepairState.AFFECTED)])
    assert call("--config", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path}: no known setting in this file: expected a config of NeMo")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("text", ["policy: {model_name: x}\n", "rng: {te_rng_tracker: true}\n"])
def test_a_config_without_mistakes(
    found: Callable[..., None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "their.yaml"
    path.write_text(text)
    found([finding(RepairState.CLEAR)])
    assert call("--config", str(path)) == 0
    assert "config: no remarks" in capsys.readouterr().out


def test_nothing_of_the_family(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed = dict.fromkeys(find_installed()) | {"torch": "2.11"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert call() == 0
    assert "Nothing of the Megatron family is installed here" in capsys.readouterr().out
    assert examine().findings == ()  # no probe is even tried
    assert call("--json") == 0
    assert json.loads(capsys.readouterr().out)["affected"] is None


def test_the_machine_is_described_without_megatron(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    installed = dict.fromkeys(find_installed()) | {"torch": "2.11"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert call("--json") == 0
    report = json.loads(capsys.readouterr().out)
    system = report["system"]
    assert system["rollgraph"] == rollgraph.__version__
    assert system["python"] == platform.python_version()
    assert system["pytorch"] == torch.__version__
    assert system["instruction set"].startswith(torch.backends.cpu.get_cpu_capability())
    assert system["OMP_NUM_THREADS"] == "1"
    assert {"system", "cuda", "gpu", "processor", "cores"} <= system.keys()
    assert report["packages"]["numpy"] == metadata.version("numpy")
    assert report["exactness"]["agree"] is True
    assert call() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["agree", "True"] for line in lines)
    assert lines[-1].startswith("Nothing of the Megatron family is installed here")


def test_the_machine_report_names_the_packages_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["numpy", 'starlette>=1; extra == "view"', "none-such ; extra == 'view'", 'ruff; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(doctor, "_version", {"starlette": "1.2", "none-such": "not installed"}.get)
    assert doctor._describe_extras() == {"view": "starlette 1.2, none-such not installed"}


def test_the_machine_report_tells_what_broke_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("rollgraph.policy.agreement.check_agreement", broken)
    probed = doctor._test_exactness()
    assert probed["agree"] is None
    assert probed["failed"] == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize("name", ["nemo-rl", "transformer-engine", "megatron-bridge"])
def test_without_megatron_core_the_family_is_not_reported_healthy(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in NeMo-RL, whose workers have their own environment: there is something to try, but not here."""
    installed = dict.fromkeys(find_installed()) | {name: "1.0"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert call() == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("nothing could be tried here; megatron-core is not installed here: run this with the Python")
    assert call("--json") == 3
    assert json.loads(capsys.readouterr().out)["affected"] is None
    path = tmp_path / "their.yaml"
    path.write_text("cuda_graph_scope: attn\n")
    assert call("--config", str(path), "--json") == 1  # a config needs no installation to be wrong
    assert json.loads(capsys.readouterr().out)["affected"] is True


@pytest.mark.slow
@pytest.mark.parametrize("file", ["megatron/__init__.py", "megatron/core/__init__.py"])
def test_an_installation_that_is_broken(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("print('noise')\nraise RuntimeError('libcuda is of yesterday')\n")
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    (tmp_path / "megatron_core-0.16.1.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.16.1\n")
    ran = run_command(tmp_path, tmp_path, "doctor", "--json")
    report = json.loads(ran.stdout[ran.stdout.index("{") :])  # the noise is from the stand-in above, not the command
    assert ran.returncode == 3, ran.stderr  # nothing could be tried
    assert report["installed"]["megatron-core"] == "0.16.1"
    assert report["affected"] is None
    assert {item["state"] for item in report["findings"]} == {"cannot tell here"}
    for item in report["findings"]:
        assert "libcuda is of yesterday" in item["reason"]
        assert item["repair"].startswith("cannot repair: ")


def test_a_probe_that_raises_does_not_abort_the_examination() -> None:
    def broken_probe() -> list[Diagnosis]:
        raise RuntimeError("no such attribute")

    report = examine(probes=(broken_probe, lambda: [finding(RepairState.CLEAR)]))
    assert [item.state for item in report.findings] == [RepairState.UNKNOWN, RepairState.CLEAR]
    assert report.findings[0].name == "broken-probe"
    assert "RuntimeError: no such attribute" in report.findings[0].reason
    assert not report.affected


def test_repaired_shows_the_other_findings(found: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found([finding(RepairState.AFFECTED)], [finding(RepairState.REPAIRED)])
    assert call("--repaired") == 0
    out = capsys.readouterr().out
    assert "REPAIRED  forward-pre-hooks" in out
    assert out.splitlines()[-1] == "1 repaired"


def test_what_cannot_be_repaired_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    from rollgraph.compat.megatron import findings, repair, undo
    from rollgraph.compat.megatron.repair import CannotRepair
    from rollgraph.compat.megatron.tokenizer import TOKENIZER

    def make_patches() -> list[Patch]:
        raise CannotRepair("the module has no such name")

    with monkeypatch.context() as moved:
        moved.setattr(TOKENIZER, "make_patches", make_patches)
        assert call("--repaired") == 1
    assert "  repair   cannot repair: the module has no such name" in capsys.readouterr().out.splitlines()
    assert all(item.state is not RepairState.REPAIRED for item in findings())
    repair()
    try:
        assert call("--repaired") == 0
        assert any(item.state is RepairState.REPAIRED for item in findings())  # it was in force before
    finally:
        undo()


def test_what_is_installed() -> None:
    installed = find_installed()
    assert installed["torch"] == metadata.version("torch")  # without the local part that torch.__version__ may have
    assert (installed["cuda"] is not None) == torch.cuda.is_available()
    assert examination._version("json", ("no-such-distribution",)) == "from source"
    assert examination._version("no_such.module", ("no-such-distribution",)) is None


def test_help_imports_nothing_heavy() -> None:
    code = """if True:
        import sys
        from rollgraph.cli import main
        try:
            main(["doctor", "--help"])
        except SystemExit:
            print([name for name in ("torch", "yaml", "rich", "megatron") if name in sys.modules])
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_real_package_is_affected_and_repaired(capsys: pytest.CaptureFixture[str]) -> None:
    """First in a separate process: standard output has nothing but JSON, whatever is imported."""
    pytest.importorskip("megatron.core")
    words = [sys.executable, "-m", "rollgraph", "doctor", "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert ran.returncode == 1, ran.stderr
    assert call("--json", "--repaired") == 0
    reports = [json.loads(ran.stdout), json.loads(capsys.readouterr().out)]
    before, after = ({item["name"]: item["state"] for item in report["findings"]} for report in reports)
    assert before.keys() == after.keys()
    assert "repaired" not in before.values()
    affected = {name for name, state in before.items() if state == "affected"}
    assert affected
    assert {after[name] for name in affected} == {"repaired"}
