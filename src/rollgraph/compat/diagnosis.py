"""A diagnosis: one known failure, and whether this installation has it. Owns the four states."""

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
    """The state of one known failure in this process.

    For example `Diagnosis("forward-pre-hooks", RepairState.AFFECTED, symptom="AssertionError: ...", reason="hooks are
    looked up through the module tree ...", repair="rollgraph.compat.megatron.repair()")`.
    """

    name: str  # kebab-case and stable: --json prints it, and docs/megatron.md lists failures under it
    state: RepairState
    symptom: str  # what the user sees, with the exact error text
    reason: str  # why it happens; for UNKNOWN, why the probe could not run
    repair: str  # what to do about it

    @property
    def summary(self) -> str:
        """One line for a log, after a repair was attempted."""
        if self.state is RepairState.AFFECTED:  # the repair failed
            return f"{self.name}: {self.state}; {self.repair}"
        if self.state is RepairState.UNKNOWN:
            return f"{self.name}: {self.state}: {self.reason}"
        return f"{self.name}: {self.state}"
