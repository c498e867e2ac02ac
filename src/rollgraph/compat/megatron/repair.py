"""A repair: a known failure, the probe that shows it here, and the patches that end it. Owns their lifecycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollgraph.compat.diagnosis import Diagnosis, RepairState
from rollgraph.compat.megatron.patch import CannotRepair, Installed, Patch, find_replaced, install, uninstall

ADVICE = "rollgraph.compat.megatron.repair()"


@dataclass(frozen=True)
class Verdict:
    """What a probe saw; `note` says which part fails, or why it could not be tried."""

    state: RepairState
    note: str = ""


@dataclass
class Repair:
    name: str
    symptom: str
    reason: str
    try_it: Callable[[], Verdict]  # runs the real code on small objects and leaves the process as it was
    plan: Callable[[], list[Patch]]  # raises CannotRepair where something it needs is not there; changes nothing
    clean: Callable[[], None] = lambda: None  # after the patches are gone: what they left on the user's objects
    installed: list[Installed] = field(default_factory=list)

    @property
    def in_force(self) -> bool:
        return bool(self.installed) and all(entry.stands() for entry in self.installed)

    def probe(self) -> Verdict:
        try:
            return self.try_it()
        except Exception as error:  # a probe on internals that moved
            return Verdict(RepairState.UNKNOWN, f"the probe does not run here: {type(error).__name__}: {error}")

    def apply(self) -> None:
        """Raises CannotRepair, with nothing changed, where it cannot."""
        if self.in_force:
            return
        if self.installed:
            raise CannotRepair(find_replaced(self.installed))
        try:
            self.installed = install(self.plan())
        except CannotRepair:
            raise
        except Exception as error:
            raise CannotRepair(f"{type(error).__name__}: {error}") from error
        try:
            after = self.probe()
            if after.state is not RepairState.CLEAR:
                raise CannotRepair(f"the failure is still there with the repair: {after.note}")
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        if self.installed:
            uninstall(self.installed)
            self.installed = []
            self.clean()

    def find(self) -> Diagnosis:
        if self.in_force:
            return self.describe(RepairState.REPAIRED)
        verdict = self.probe()
        return self.describe(verdict.state, verdict.note)

    def mend(self) -> Diagnosis:
        """Applied only where the probe fails: what is healthy, or cannot be tried, stays untouched."""
        found = self.find()
        if found.state is not RepairState.AFFECTED:
            return found
        try:
            self.apply()
        except CannotRepair as error:
            return Diagnosis(found.name, found.state, found.symptom, found.reason, f"cannot repair: {error}")
        return self.describe(RepairState.REPAIRED)

    def describe(self, state: RepairState, note: str = "") -> Diagnosis:
        if state is RepairState.AFFECTED:
            return Diagnosis(
                self.name, state, self.symptom, f"{self.reason} Here: {note}." if note else self.reason, ADVICE
            )
        if state is RepairState.REPAIRED:
            return Diagnosis(self.name, state, self.symptom, self.reason, "in force; rollgraph.compat.megatron.undo()")
        advice = "nothing to do" if state is RepairState.CLEAR else "cannot repair: what cannot be tried is left alone"
        return Diagnosis(self.name, state, self.symptom, note or self.reason, advice)
