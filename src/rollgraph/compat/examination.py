"""`rollgraph doctor`'s examination: what is installed, which known failures it has, and what is wrong with a config.

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
from rollgraph.compat.graph_lint import lint_file
from rollgraph.compat.graph_remarks import Remark

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
    remarks: tuple[Remark, ...] = ()  # on the config, if one was given

    @property
    def family(self) -> list[str]:
        """The installed packages of the Megatron family."""
        return [names[0] for names in FAMILY.values() if self.installed.get(names[0])]

    @property
    def tried(self) -> bool:
        """Whether at least one failure could be tried here."""
        return any(finding.state is not RepairState.UNKNOWN for finding in self.findings)

    @property
    def affected(self) -> bool | None:
        """Whether something is wrong; None if nothing is known to be, but nothing could be tried either."""
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
    """Examine this installation and, if given, a config.

    With `repaired`, the repairs are applied first, and undone at the end unless they were in force before. A probe
    that raises becomes a finding with the state `cannot tell here`. A config that cannot be read, or that has no known
    key, raises ConfigError.
    """
    installed = find_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of imported packages; the findings say what matters
        remarks: list[Remark] = []
        if config is not None:
            remarks = lint_file(config, _known_fields(installed))
        if probes is None:
            probes = _choose_probes(installed, repaired)
        findings: list[Diagnosis] = []
        for probe in probes:
            findings += _run(probe)
    return Examination(installed, tuple(findings), tuple(remarks))


def find_installed() -> dict[str, str | None]:
    """The versions of the family, of torch, and of the CUDA that torch can use here."""
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
