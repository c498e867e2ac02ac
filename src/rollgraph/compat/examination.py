"""The examination of `rollgraph doctor`: installed versions, known failures, and remarks on a config's graph keys.

Owns the list of probes, and ensures that none of them can abort the examination; the probes themselves are in
`megatron/`. Imports Megatron only while examining.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

from rollgraph.compat.diagnosis import Diagnosis, RepairState
from rollgraph.compat.graph_keys import Remark, lint_file

FAMILY = {  # module -> the distributions it may come from
    "megatron.core": ("megatron-core",),
    "transformer_engine": ("transformer-engine", "transformer-engine-torch"),
    "megatron.bridge": ("megatron-bridge",),
    "nemo_rl": ("nemo-rl",),
}
Probe = Callable[[], Iterable[Diagnosis]]


@dataclass(frozen=True)
class Examination:
    installed: dict[str, str | None]  # name -> version, or None if it is not installed
    findings: tuple[Diagnosis, ...]
    remarks: tuple[Remark, ...] = ()  # on the config, if there is one

    @property
    def family(self) -> list[str]:
        """The installed packages of the Megatron family."""
        return [names[0] for names in FAMILY.values() if self.installed.get(names[0])]

    @property
    def any_probed(self) -> bool:
        """Whether the probe of at least one failure could run here."""
        return any(finding.state is not RepairState.UNKNOWN for finding in self.findings)

    @property
    def affected(self) -> bool | None:
        """Whether anything is broken; None if no probe could run and the config shows nothing serious."""
        broken = any(finding.state is RepairState.AFFECTED for finding in self.findings)
        if broken or any(remark.is_serious for remark in self.remarks):
            return True
        return False if self.any_probed else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "affected": self.affected,
            "installed": self.installed,
            "findings": [asdict(finding) for finding in self.findings],
            "config": [{**asdict(remark), "serious": remark.is_serious} for remark in self.remarks],
        }


def examine(
    config: str | os.PathLike[str] | None = None, *, repaired: bool = False, probes: Sequence[Probe] | None = None
) -> Examination:
    """Examine this installation and, if there is one, a config.

    With `repaired`, the repairs are applied first, and undone at the end unless they were already in force. A probe
    that raises becomes a finding with the state `cannot tell here`. Raises ConfigError if the config cannot be read or
    has no known key.
    """
    installed = find_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of imported packages would bury the findings
        remarks: list[Remark] = []
        if config is not None:
            remarks = lint_file(config, _known_fields(installed))
        if probes is None:
            probes = _choose_probes(installed, repaired)
        findings: list[Diagnosis] = []
        for probe in probes:
            findings += _run_probe(probe)
    return Examination(installed, tuple(findings), tuple(remarks))


def find_installed() -> dict[str, str | None]:
    """The installed versions of the Megatron family, torch, and the CUDA that torch can use here."""
    versions = {names[0]: _version(module, names) for module, names in FAMILY.items()}
    return {**versions, "torch": _version("torch", ("torch",)), "cuda": _cuda()}


def _version(module: str, distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        return "from source" if importlib.util.find_spec(module) else None
    except Exception:  # the parent package is missing or broken
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
    except Exception:  # a probe reports why
        return None
    return frozenset(field.name for field in fields(TransformerConfig))


def _choose_probes(installed: dict[str, str | None], repaired: bool) -> tuple[Probe, ...]:
    if not installed["megatron-core"]:
        return ()
    return (_megatron_core_repaired,) if repaired else (_megatron_core,)


def _run_probe(probe: Probe) -> list[Diagnosis]:
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

    already_repaired = any(finding.state is RepairState.REPAIRED for finding in megatron.findings())
    try:
        return list(megatron.repair())
    finally:
        if not already_repaired:
            megatron.undo()
