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


def make_finding(state: RepairState, name: str = "forward-pre-hooks") -> Diagnosis:
    return Diagnosis(name, state, symptom=LONG, reason="hooks are looked up", repair="repair()")


def run_doctor(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["doctor", *arguments])
    exit_code: int = options.run(options)
    return exit_code


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the probes of the machine, except in tests with `machine` in their name."""
    if "machine" not in request.node.name:
        monkeypatch.setattr(doctor, "examine_machine", dict)


@pytest.fixture
def set_findings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that megatron-core is installed with these findings. The second list is with repairs in force."""

    def set_both(plain: list[Diagnosis], repaired: list[Diagnosis] | None = None) -> None:
        installed = {**find_installed(), "megatron-core": "0.16.1"}
        monkeypatch.setattr(examination, "find_installed", lambda: installed)
        monkeypatch.setattr(examination, "_megatron_core", lambda: plain)
        monkeypatch.setattr(examination, "_megatron_core_repaired", lambda: repaired)

    return set_both


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        ((RepairState.CLEAR,), 0),
        ((RepairState.CLEAR, RepairState.REPAIRED, RepairState.UNKNOWN), 0),
        ((RepairState.UNKNOWN, RepairState.UNKNOWN), 3),
        ((RepairState.CLEAR, RepairState.AFFECTED, RepairState.REPAIRED), 1),
    ],
)
def test_exit_code(set_findings: Callable[..., None], states: tuple[RepairState, ...], exit_code: int) -> None:
    set_findings([make_finding(state) for state in states])
    assert run_doctor() == exit_code
    assert run_doctor("--json") == exit_code


def test_every_field_is_printed_on_one_line(
    set_findings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_findings([make_finding(RepairState.AFFECTED)])
    run_doctor()
    lines = capsys.readouterr().out.splitlines()
    assert "AFFECTED  forward-pre-hooks" in lines
    assert f"  symptom  {LONG.strip()}" in lines  # in one line, so that grep finds the error text
    assert "  reason   hooks are looked up" in lines
    assert "  repair   repair()" in lines
    assert lines[-1].startswith("1 affected; call rollgraph.compat.megatron.repair()")


def test_a_terminal_shows_the_same_text_wrapped(
    set_findings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich.console

    class Terminal(rich.console.Console):
        def __init__(self, **options: object) -> None:
            super().__init__(force_terminal=True, width=60, record=True, **options)  # type: ignore[arg-type]
            consoles.append(self)

    consoles: list[rich.console.Console] = []
    monkeypatch.setattr(rich.console, "Console", Terminal)
    set_findings([make_finding(RepairState.AFFECTED)])
    run_doctor()
    text = consoles[0].export_text()
    assert max(map(len, text.splitlines())) <= 60
    assert "".join(LONG.split()) in "".join(text.split())


def test_json_has_findings_and_remarks(
    set_findings: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "their.yaml"
    path.write_text("cuda_graph_scope: attn\n")
    set_findings([make_finding(RepairState.CLEAR)])
    assert run_doctor("--json", "--config", str(path)) == 1  # mistakes in the config count
    report = json.loads(capsys.readouterr().out)
    assert report["affected"] is True
    assert report["installed"]["megatron-core"] == "0.16.1"
    assert report["findings"][0]["state"] == "not affected"
    kinds = {remark["kind"]: remark["serious"] for remark in report["config"]}
    assert kinds["contradictory"] is True
    assert {remark["place"] for remark in report["config"]} == {f"{path}:1"}


def test_deprecated_keys_alone_are_not_a_failure(
    set_findings: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "their.yaml"
    path.write_text("enable_cuda_graph: true\n")
    set_findings([make_finding(RepairState.CLEAR)])
    assert run_doctor("--config", str(path)) == 0
    out = capsys.readouterr().out
    assert f"{path}:1: enable_cuda_graph: deprecated" in out
    assert "write cuda_graph_impl: local" in out


def test_an_unreadable_config_is_refused(set_findings: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    set_findings([])
    assert run_doctor("--config", "nowhere.yaml") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere.yaml: cannot be read: No such file or directory" in captured.err


@pytest.mark.parametrize("text", ["", "steps: 3\nmodel: {path: x}\npolicy: null\n"])
def test_a_config_without_known_keys_is_refused(
    set_findings: Callable[..., None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    set_findings([make_finding(RepairState.AFFECTED)])
    assert run_doctor("--config", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path}: no known setting in this file: expected a config of NeMo")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("text", ["policy: {model_name: x}\n", "rng: {te_rng_tracker: true}\n"])
def test_a_config_without_mistakes_has_no_remarks(
    set_findings: Callable[..., None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "their.yaml"
    path.write_text(text)
    set_findings([make_finding(RepairState.CLEAR)])
    assert run_doctor("--config", str(path)) == 0
    assert "config: no remarks" in capsys.readouterr().out


def test_without_the_megatron_family_nothing_is_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = dict.fromkeys(find_installed()) | {"torch": "2.11"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert run_doctor() == 0
    assert "Nothing of the Megatron family is installed here" in capsys.readouterr().out
    assert examine().findings == ()  # no probe runs
    assert run_doctor("--json") == 0
    assert json.loads(capsys.readouterr().out)["affected"] is None


def test_the_machine_is_described_without_megatron(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    installed = dict.fromkeys(find_installed()) | {"torch": "2.11"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert run_doctor("--json") == 0
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
    assert run_doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["agree", "True"] for line in lines)
    assert lines[-1].startswith("Nothing of the Megatron family is installed here")


def test_the_machine_report_names_the_packages_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["numpy", 'starlette>=1; extra == "view"', "none-such ; extra == 'view'", 'ruff; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(doctor, "_version", {"starlette": "1.2", "none-such": "not installed"}.get)
    assert doctor._describe_extras() == {"view": "starlette 1.2, none-such not installed"}


def test_the_machine_report_has_the_error_of_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("rollgraph.policy.agreement.check_agreement", broken)
    probed = doctor._test_exactness()
    assert probed["agree"] is None
    assert probed["failed"] == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize("name", ["nemo-rl", "transformer-engine", "megatron-bridge"])
def test_relatives_without_megatron_core_are_not_reported_healthy(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in NeMo-RL, whose workers have their own environment: the probes would have to run there."""
    installed = dict.fromkeys(find_installed()) | {name: "1.0"}
    monkeypatch.setattr(examination, "find_installed", lambda: installed)
    assert run_doctor() == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("nothing could be tried here; megatron-core is not installed here: run this with the Python")
    assert run_doctor("--json") == 3
    assert json.loads(capsys.readouterr().out)["affected"] is None
    path = tmp_path / "their.yaml"
    path.write_text("cuda_graph_scope: attn\n")
    assert run_doctor("--config", str(path), "--json") == 1  # a config is checked without an installation
    assert json.loads(capsys.readouterr().out)["affected"] is True


@pytest.mark.slow
@pytest.mark.parametrize("file", ["megatron/__init__.py", "megatron/core/__init__.py"])
def test_a_broken_installation_is_reported(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("print('noise')\nraise RuntimeError('libcuda is too old')\n")
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    (tmp_path / "megatron_core-0.16.1.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.16.1\n")
    completed = run_command(tmp_path, tmp_path, "doctor", "--json")
    report = json.loads(completed.stdout[completed.stdout.index("{") :])  # the noise comes from the package above
    assert completed.returncode == 3, completed.stderr  # no probe could run
    assert report["installed"]["megatron-core"] == "0.16.1"
    assert report["affected"] is None
    assert {item["state"] for item in report["findings"]} == {"cannot tell here"}
    for item in report["findings"]:
        assert "libcuda is too old" in item["reason"]
        assert item["repair"].startswith("cannot repair: ")


def test_a_raising_probe_does_not_end_the_examination() -> None:
    def broken_probe() -> list[Diagnosis]:
        raise RuntimeError("no such attribute")

    report = examine(probes=(broken_probe, lambda: [make_finding(RepairState.CLEAR)]))
    assert [item.state for item in report.findings] == [RepairState.UNKNOWN, RepairState.CLEAR]
    assert report.findings[0].name == "broken-probe"
    assert "RuntimeError: no such attribute" in report.findings[0].reason
    assert not report.affected


def test_the_option_repaired_shows_findings_with_repairs(
    set_findings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_findings([make_finding(RepairState.AFFECTED)], [make_finding(RepairState.REPAIRED)])
    assert run_doctor("--repaired") == 0
    out = capsys.readouterr().out
    assert "REPAIRED  forward-pre-hooks" in out
    assert out.splitlines()[-1] == "1 repaired"


def test_a_failed_repair_has_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    from rollgraph.compat.megatron import findings, repair, undo
    from rollgraph.compat.megatron.repair import CannotRepair
    from rollgraph.compat.megatron.tokenizer import TOKENIZER

    def make_patches() -> list[Patch]:
        raise CannotRepair("the module has no such name")

    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "make_patches", make_patches)
        assert run_doctor("--repaired") == 1
    assert "  repair   cannot repair: the module has no such name" in capsys.readouterr().out.splitlines()
    assert all(item.state is not RepairState.REPAIRED for item in findings())
    repair()
    try:
        assert run_doctor("--repaired") == 0
        assert any(item.state is RepairState.REPAIRED for item in findings())  # in force before, so it stays
    finally:
        undo()


def test_versions_of_installed_packages() -> None:
    installed = find_installed()
    assert installed["torch"] == metadata.version("torch")  # unlike torch.__version__, without the local version
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
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert completed.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_real_package_is_affected_and_repaired(capsys: pytest.CaptureFixture[str]) -> None:
    """First in a separate process, whose standard output must be only JSON, whatever imports print."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "rollgraph", "doctor", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert completed.returncode == 1, completed.stderr
    assert run_doctor("--json", "--repaired") == 0
    reports = [json.loads(completed.stdout), json.loads(capsys.readouterr().out)]
    before, after = ({item["name"]: item["state"] for item in report["findings"]} for report in reports)
    assert before.keys() == after.keys()
    assert "repaired" not in before.values()
    affected = {name for name, state in before.items() if state == "affected"}
    assert affected
    assert {after[name] for name in affected} == {"repaired"}
