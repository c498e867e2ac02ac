"""An examination: what of the family is installed, which known failures it has, and what is wrong with a config.

Owns which probes there are and that none of them can end the examination; the probes are in `megatron/`. Theirs is
imported only while examining.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

from rollgraph.compat.finding import Diagnosis, RepairState
from rollgraph.compat.graph_lint import Remark, lint_file

FAMILY = {  # module: the distributions it may come from
    "megatron.core": ("megatron-core",),
    "transformer_engine": ("transformer-engine", "transformer-engine-torch"),
    "megatron.bridge": ("megatron-bridge",),
    "nemo_rl": ("nemo-rl",),
}
Probe = Callable[[], Iterable[Diagnosis]]


@dataclass(frozen=True)
class Examination:
    installed: dict[str, str | None]  # name: version, None where it is not there
    findings: tuple[Diagnosis, ...]
    remarks: tuple[Remark, ...] = ()  # of the config, if one was given

    @property
    def family(self) -> list[str]:
        """What of the family is installed."""
        return [names[0] for names in FAMILY.values() if self.installed.get(names[0])]

    @property
    def tried(self) -> bool:
        """Whether one failure at least could be tried here."""
        return any(finding.state is not RepairState.UNKNOWN for finding in self.findings)

    @property
    def affected(self) -> bool | None:
        """None where nothing is known to be wrong because nothing could be tried."""
        broken = any(finding.state is RepairState.AFFECTED for finding in self.findings)
        if broken or any(remark.serious for remark in self.remarks):
            return True
        return False if self.tried else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "affected": self.affected,
            "installed": self.installed,
            "findings": [asdict(finding) for finding in self.findings],
            "config": [{**asdict(remark), "serious": remark.serious} for remark in self.remarks],
        }


def examine(
    config: str | os.PathLike[str] | None = None, *, repaired: bool = False, probes: Sequence[Probe] | None = None
) -> Examination:
    """Look at this installation; with `repaired`, after the repairs, which are taken back at the end if
    they were not in force before.

    A probe that raises is a finding that cannot be told here. A config that cannot be read,
    or in which nothing is known, raises ConfigError.
    """
    installed = find_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their imports; a finding says what matters
        remarks = () if config is None else tuple(lint_file(config, _known_fields(installed)))
        if probes is None:
            probes = (_megatron_core_repaired if repaired else _megatron_core,) if installed["megatron-core"] else ()
        findings = tuple(finding for probe in probes for finding in _run(probe))
    return Examination(installed, findings, remarks)


def find_installed() -> dict[str, str | None]:
    """Versions of the family, of torch, and of the CUDA that torch can use here."""
    found = {names[0]: _version(module, names) for module, names in FAMILY.items()}
    return {**found, "torch": _version("torch", ("torch",)), "cuda": _cuda()}


def _version(module: str, distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        return "from source" if importlib.util.find_spec(module) else None
    except Exception:  # its parent is not there, or is broken
        return None


def _cuda() -> str | None:
    try:
        import torch

        return torch.version.cuda if torch.cuda.is_available() else None
    except Exception:
        return None


def _known_fields(installed: dict[str, str | None]) -> frozenset[str] | None:
    if not installed["megatron-core"]:
        return None
    try:
        from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            TransformerConfig,
        )
    except Exception:  # a probe says why
        return None
    return frozenset(field.name for field in fields(TransformerConfig))


def _run(probe: Probe) -> list[Diagnosis]:
    try:
        return list(probe())
    except Exception as error:
        name = getattr(probe, "__name__", "probe").strip("_").replace("_", "-")
        reason = f"the probe itself failed: {type(error).__name__}: {error}"
        return [Diagnosis(name, RepairState.UNKNOWN, "not known", reason, "please report it, with these versions")]


def _megatron_core() -> list[Diagnosis]:
    from rollgraph.compat import megatron

    return list(megatron.findings())


def _megatron_core_repaired() -> list[Diagnosis]:
    from rollgraph.compat import megatron

    already = any(finding.state is RepairState.REPAIRED for finding in megatron.findings())
    try:
        return list(megatron.repair())
    finally:
        if not already:
            megatron.undo()
