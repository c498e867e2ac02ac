"""A finding: one known failure, and whether this installation has it. Owns the four states and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RepairState(StrEnum):
    AFFECTED = "affected"
    CLEAR = "not affected"
    REPAIRED = "repaired"
    UNKNOWN = "cannot tell here"


@dataclass(frozen=True)
class Diagnosis:
    """One known failure as it stands here.

    For example `Diagnosis("forward-pre-hooks", RepairState.AFFECTED, symptom="AssertionError: ...", reason="hooks are
    looked up through the module tree ...", repair="rollgraph.compat.megatron.repair()")`.
    """

    name: str  # kebab-case, stable: what --json prints and docs/megatron.md is searched by
    state: RepairState
    symptom: str  # what people see, with the exact error text
    reason: str  # why it happens; with UNKNOWN, why it could not be tried
    repair: str  # what to do about it

    @property
    def summary(self) -> str:
        """One line, after an attempt to repair it."""
        if self.state is RepairState.AFFECTED:  # and could not be repaired
            return f"{self.name}: {self.state}; {self.repair}"
        if self.state is RepairState.UNKNOWN:
            return f"{self.name}: {self.state}: {self.reason}"
        return f"{self.name}: {self.state}"
