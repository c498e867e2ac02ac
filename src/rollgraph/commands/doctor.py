"""`rollgraph doctor`: describe this machine for a bug report, and test an installed Megatron for known failures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgraph.log.streams import redirect_stdout_to_stderr

if TYPE_CHECKING:
    from rollgraph.compat.examination import Examination


# -- the machine and its packages ------------------------------------------------------------------

CORE = ("numpy", "numba", "safetensors", "tokenizers", "triton", "transformers")  # results may depend on their versions
VARIABLES = ("ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "OMP_NUM_THREADS")
_EXTRA_REQUIREMENT = re.compile(r"""([\w.-]+).*;\s*extra\s*==\s*['"]([\w-]+)['"]""")
_DEVELOPER_EXTRA = "dev"
_NOT_INSTALLED = "not installed"

Report = dict[str, dict[str, Any]]  # sections of names and values


def examine_machine() -> Report:
    return {
        "system": _describe_system(),
        "packages": {name: _version(name) for name in CORE},
        "extras": _describe_extras(),
        "exactness": _test_exactness(),
    }


def format_report(report: Report) -> list[str]:
    """One line for each value, in columns."""
    lines = []
    for section, values in report.items():
        lines.append(section)
        width = max(map(len, values), default=0)
        lines += [f"  {name:<{width}}  {value}" for name, value in values.items()]
    return lines


def _describe_system() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    values = {
        "rollgraph": sys.modules["rollgraph"].__version__,
        "system": platform.platform(),
        "python": platform.python_version(),
        "pytorch": torch.__version__,
        "cuda": torch.version.cuda or "none: this is PyTorch's CPU build",
        "gpu": "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus) or "none",
        "processor": _processor(),
        "instruction set": f"{torch.backends.cpu.get_cpu_capability()} (PyTorch), {_numba_target()} (Numba)",
        "cores": f"{len(_usable_cores())} usable, {torch.get_num_threads()} threads",
    }
    return values | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _describe_extras() -> dict[str, str]:
    """The packages of each extra with their versions."""
    extras: dict[str, list[str]] = {}
    for requirement in _requirements():
        if (match := _EXTRA_REQUIREMENT.match(requirement)) and match[2] != _DEVELOPER_EXTRA:
            extras.setdefault(match[2], []).append(f"{match[1]} {_version(match[1])}")
    return {name: ", ".join(packages) for name, packages in sorted(extras.items())}


def _requirements() -> list[str]:
    try:
        return metadata.requires("rollgraph") or []
    except metadata.PackageNotFoundError:  # rollgraph is not installed, but runs from its sources
        return []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def _processor() -> str:
    """The name of the CPU, if the system reports it."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _numba_target() -> str:
    """The CPU that Numba compiles for. Results of attention on a CPU depend on it."""
    from llvmlite import binding  # type: ignore[import-untyped, unused-ignore]

    return os.environ.get("NUMBA_CPU_NAME") or str(binding.get_host_cpu_name())


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _test_exactness() -> dict[str, Any]:
    """Whether generation and training of a small model agree here, bit for bit. `agree` is None if the test failed."""
    import torch

    from rollgraph.commands.arguments import choose_device
    from rollgraph.model import Decoder
    from rollgraph.model.architecture import Architecture
    from rollgraph.policy.agreement import check_agreement
    from rollgraph.policy.microbatch import Limits

    device = choose_device(None)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    result: dict[str, Any] = {"device": device, "dtype": str(dtype).removeprefix("torch."), "agree": None}
    try:
        small = Architecture("llama", vocabulary=256, hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16,
                             max_length=64)  # fmt: skip
        model = Decoder(small, checkpointing=True)
        model.reset_parameters(std=0.05)
        report = check_agreement(model.to(device, dtype), Limits(max_length=48, rows=4, token_buckets=(192,)))
    except Exception as error:  # a failure belongs in the bug report
        return result | {"failed": f"{type(error).__name__}: {error}"}
    differs = sorted({difference.operation for difference in report.differences})
    return result | {"agree": report.agrees} | ({"differs": ", ".join(differs)} if differs else {})


# -- the command -----------------------------------------------------------------------------------

UNAFFECTED, AFFECTED, BROKEN, UNTRIED = 0, 1, 2, 3
ELSEWHERE = (
    "megatron-core is not installed here: run this with the Python of the environment that trains; NeMo-RL's Megatron "
    "workers have their own, in the folder NEMO_RL_VENV_DIR"
)
COLOURS = {"affected": "red", "not affected": "green", "repaired": "green", "cannot tell here": "yellow"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="describe this machine for a bug report, and test an installed Megatron or NeMo-RL for known failures",
        description="Print the facts that a bug report needs: system, versions, GPU, instruction set, and whether "
        "generation and training of a small model agree bit for bit on this machine. Also test an installed Megatron, "
        "Megatron-Bridge or NeMo-RL for known failures of CUDA graphs and overlap. With --config or --repaired, do "
        f"only the latter. Exit code: {UNAFFECTED} if nothing is affected or installed; {AFFECTED} if "
        f"something is affected and not repaired; {BROKEN} if the config cannot be read, or has no known key; "
        f"{UNTRIED} if nothing could be tested here, for example because megatron-core is in another environment.",
    )
    parser.add_argument("--config", metavar="YAML", help="check the graph keys of a NeMo-RL or Megatron config")
    parser.add_argument("--repaired", action="store_true", help="test with rollgraph's repairs applied")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rollgraph.compat.examination import examine
    from rollgraph.config import ConfigError

    machine: Report = {}
    try:
        with redirect_stdout_to_stderr():
            if options.config is None and not options.repaired:
                machine = examine_machine()
            examination = examine(options.config, repaired=options.repaired)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BROKEN
    if options.json:
        print(json.dumps({**machine, **examination.to_dict()}, indent=2))
    else:
        for line in format_report(machine):
            print(line)
        print_examination(examination, has_config=options.config is not None, repaired=options.repaired)
    if examination.affected:
        return AFFECTED
    return UNTRIED if examination.family and not examination.any_probed else UNAFFECTED


def print_examination(examination: Examination, *, has_config: bool = False, repaired: bool = False) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not examination.family and not has_config:
        _print(console, "Nothing of the Megatron family is installed here, so there is nothing to examine.")
        return
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in examination.installed.items())
    _print(console, f"installed: {versions}")
    for finding in examination.findings:
        _print(console, "")
        _print(console, f"{finding.state.upper()}  {finding.name}", COLOURS[finding.state])
        for label in ("symptom", "reason", "repair"):
            _row(console, label, getattr(finding, label))
    if has_config:
        _print(console, "")
        _print(console, f"config: {count_remarks(len(examination.remarks))}")
    for remark in examination.remarks:
        _print(console, f"{remark.place}: {remark.key}: {remark.kind}", "red" if remark.is_serious else "yellow")
        _row(console, "reason", remark.text)
        _row(console, "repair", remark.advice)
    _print(console, "")
    colour = {True: "red", False: "green", None: "yellow"}[examination.affected]
    _print(console, summary(examination, repaired=repaired), f"{colour} bold")


def count_remarks(count: int) -> str:
    if count == 0:
        return "no remarks"
    return "1 remark" if count == 1 else f"{count} remarks"


def summary(examination: Examination, *, repaired: bool = False) -> str:
    """The last line: the number of findings by state, and what to do next."""
    states = [finding.state.value for finding in examination.findings]
    parts = []
    counts = [f"{states.count(state)} {state}" for state in COLOURS if state in states]
    if counts:
        parts.append(", ".join(counts))
    if examination.remarks:
        serious = sum(remark.is_serious for remark in examination.remarks)
        parts.append(f"{count_remarks(len(examination.remarks))} on the config, {serious} serious")
    if "affected" in states and not repaired:
        parts.append("call rollgraph.compat.megatron.repair() before the model is built; --repaired shows the result")
    if not examination.any_probed:
        parts.append("nothing could be tried here")
    if examination.family and not examination.installed["megatron-core"]:
        parts.append(ELSEWHERE)
    return "; ".join(parts) or "nothing is affected"


def _print(console: Any, text: str, style: str = "") -> None:
    """Print text, wrapped in a terminal and unwrapped to a pipe or a file."""
    console.print(text, style=style or None, markup=False, soft_wrap=not console.is_terminal)


def _row(console: Any, label: str, text: str) -> None:
    if not console.is_terminal:
        _print(console, f"  {label:<8} {' '.join(text.split())}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=9)
    table.add_column()
    table.add_row(Text(f"  {label}", style="dim"), Text(text))
    console.print(table)
