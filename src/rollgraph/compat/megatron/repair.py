"""A repair: a known failure, the probe that reproduces it, and the patches that fix it. Owns their lifecycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollgraph.compat.diagnosis import Diagnosis, RepairState
from rollgraph.compat.megatron.patch import CannotRepair, Installed, Patch, find_replaced, install, uninstall

ADVICE = "rollgraph.compat.megatron.repair()"


@dataclass(frozen=True)
class Verdict:
    """The result of a probe; `note` says which part fails, or why the probe could not run."""

    state: RepairState
    note: str = ""


def verdict_on(failures: list[str]) -> Verdict:
    """Affected if anything failed, with all failures in the note."""
    if failures:
        return Verdict(RepairState.AFFECTED, "; ".join(failures))
    return Verdict(RepairState.CLEAR)


@dataclass
class Repair:
    name: str
    symptom: str
    reason: str
    try_it: Callable[[], Verdict]  # runs the real code on small objects, and leaves the process unchanged
    plan: Callable[[], list[Patch]]  # changes nothing; raises CannotRepair if something that it needs is missing
    clean: Callable[[], None] = lambda: None  # removes what the patches left on the user's objects, after `undo`
    installed: list[Installed] = field(default_factory=list)

    @property
    def in_force(self) -> bool:
        return bool(self.installed) and all(entry.stands() for entry in self.installed)

    def probe(self) -> Verdict:
        try:
            return self.try_it()
        except Exception as error:  # the internals that it uses have moved
            return Verdict(RepairState.UNKNOWN, f"the probe does not run here: {type(error).__name__}: {error}")

    def apply(self) -> None:
        """Install the patches; raises CannotRepair, and changes nothing, if that does not fix the failure."""
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
        """Apply the repair only if the probe fails; code that works, or that cannot be tried, is left alone."""
        found = self.find()
        if found.state is not RepairState.AFFECTED:
            return found
        try:
            self.apply()
        except CannotRepair as error:
            return Diagnosis(found.name, found.state, found.symptom, found.reason, f"cannot repair: {error}")
        return self.describe(RepairState.REPAIRED)

    def describe(self, state: RepairState, note: str = "") -> Diagnosis:
        reason = self.reason
        if state is RepairState.AFFECTED:
            if note:
                reason = f"{reason} Here: {note}."
            advice = ADVICE
        elif state is RepairState.REPAIRED:
            advice = "in force; rollgraph.compat.megatron.undo() reverts it"
        else:
            reason = note or reason
            advice = "nothing to do"
            if state is RepairState.UNKNOWN:
                advice = "cannot repair: what cannot be tried is left alone"
        return Diagnosis(self.name, state, self.symptom, reason, advice)
