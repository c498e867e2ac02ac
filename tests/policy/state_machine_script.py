"""Scripts of transitions, drawn from a seed by a small model of which transitions are allowed."""

from __future__ import annotations

import random
from typing import Any

from rollgraph.policy.phases import PHASES, READ_PHASES
from tests.policy.state_machine_model import (
    BLOCKS,
    INPUTS,
    RANKS,
    SLOTS,
)

Transition = tuple[Any, ...]


class Script:
    """Transitions drawn from a seed, with just enough state to know which are allowed and what each should do."""

    def __init__(self, seed: int, length: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.hooks_on = True
        self.gradients = "empty"  # then "open", "synced", "finished"
        self.open: list[tuple[str, Any, bool]] = []  # contexts: kind, argument, whether hooks were on at entry
        self.slots: set[str] = set()
        self.has_snapshot = self.has_checkpoint = False
        self.away: set[str] = set()
        self.tied: set[str] = set()
        self.frozen: set[str] = set()
        self.wrapped: set[str] = set()
        self.transitions: list[Transition] = []
        choices = [getattr(self, name) for name in dir(self) if name.startswith("draw_")]
        weights = [getattr(choice, "weight", 1) for choice in choices]
        while len(self.transitions) < length:
            (choice,) = self.random.choices(choices, weights)
            drawn = choice()
            if drawn is not None:
                self.transitions.append(drawn)
        while self.open:
            self.transitions.append(self.draw_leave() or ("look",))
        self.transitions.append(("look",))

    def has(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _, _ in self.open)

    @property
    def phase(self) -> str | None:
        return next((argument for kind, argument, _ in self.open if kind == "phase"), None)

    @property
    def lent(self) -> str | None:
        return next((argument for kind, argument, _ in self.open if kind == "use"), None)

    @property
    def active(self) -> bool:
        """Whether hooks run now."""
        reading = self.has("phase") and self.phase in READ_PHASES
        return self.hooks_on and not reading and not self.has("paused", "hooks_paused")

    def failure(self) -> tuple[str, int] | None:
        """Sometimes a collective that fails on all ranks: in which call, and after how many others."""
        if self.random.random() < 0.85:
            return None
        return self.random.choice(["start", "wait"]), self.random.randrange(4)

    # Work

    def draw_look(self) -> Transition:
        return ("look",)

    def draw_forward(self) -> Transition:
        return ("forward", self.random.randrange(len(INPUTS)), self.active)

    def draw_backward(self) -> Transition | None:
        if self.gradients not in ("empty", "open"):
            return None
        self.gradients = "synced" if self.active and not self.has("no_sync") else "open"
        return ("backward", self.random.randrange(len(INPUTS)), self.active)

    draw_backward.weight = 4  # type: ignore[attr-defined]

    def draw_finish(self) -> Transition | None:
        if self.gradients == "finished":
            return ("finish_twice",)
        failure = self.failure()
        if failure is not None and failure[0] == "wait":  # a lost result cannot be waited for again
            self.gradients = "empty"
            return ("finish_and_drop", failure)
        self.gradients = "finished"
        return ("finish", failure)

    draw_finish.weight = 3  # type: ignore[attr-defined]

    def draw_step(self) -> Transition:
        if self.lent or self.gradients in ("open", "synced"):
            return ("refused_step",)
        self.gradients = "empty"
        return ("step", self.failure())

    draw_step.weight = 4  # type: ignore[attr-defined]

    def draw_late(self) -> Transition | None:
        if self.gradients not in ("synced", "finished"):
            return None
        self.gradients = "empty"
        return ("late", self.random.randrange(len(INPUTS)))

    def draw_drop(self) -> Transition:
        self.gradients = "empty"
        return ("drop",)

    def draw_zero(self) -> Transition:
        self.gradients = "empty" if self.gradients == "finished" else self.gradients
        return ("zero",)

    def draw_gather(self) -> Transition:
        return ("gather", self.failure())

    def draw_prefetch(self) -> Transition:
        return ("prefetch", self.random.randrange(1000))

    # Failures

    def draw_failing_pass(self) -> Transition:
        where = self.random.choice(["forward", "backward"])
        self.gradients = "empty"
        return ("failing_pass", where, self.random.randrange(len(INPUTS)))

    def draw_failing_rank(self) -> Transition | None:
        if not self.active or self.gradients not in ("empty", "open"):
            return None
        self.gradients = "empty"
        where = self.random.choice(["before", "forward", "backward"])
        return ("failing_rank", where, self.random.randrange(RANKS), self.random.randrange(len(INPUTS)))

    # Weights

    def draw_load(self) -> Transition:
        how = self.random.choice(["flat", "state_dict"])
        return ("load", how, self.random.randrange(10**6), self.random.random() < 0.5 and not self.lent)

    def draw_snapshot(self) -> Transition:
        self.has_snapshot = True
        return ("snapshot",)

    def draw_restore(self) -> Transition | None:
        return ("restore",) if self.has_snapshot else None

    def draw_save(self) -> Transition:
        name = self.random.choice(SLOTS)
        if self.lent:
            return ("refused_save", name)
        self.slots.add(name)
        return ("save", name)

    def draw_checkpoint(self) -> Transition | None:
        usual = not (self.away or self.tied or self.frozen or self.wrapped or self.lent)
        if not usual:
            return None
        if self.has_checkpoint and self.random.random() < 0.5:
            return ("checkpoint_load",)
        self.has_checkpoint = True
        return ("checkpoint_save",)

    # Contexts

    def draw_enter(self) -> Transition | None:
        if len(self.open) > 5:
            return None
        kind = self.random.choice(["no_sync", "paused", "hooks_paused", "use", "use", "phase", "phase"])
        argument: Any = None
        if kind == "paused":
            argument = self.random.random() < 0.5
        elif kind == "use":
            argument = self.random.choice([*SLOTS, "policy"])
            absent = argument not in self.slots and argument != "policy"
            # Using the policy inside another slot is refused like using a third slot there.
            if (self.lent or "policy") != argument and (absent or self.lent):
                return ("refused_use", argument)
            if argument == "policy":
                kind = "use_policy"
        elif kind == "phase":
            argument = self.random.choice(PHASES)
            if self.phase not in (None, argument):
                return ("refused_phase", argument)
        self.open.append((kind, argument, self.hooks_on))
        return ("enter", kind, argument, self.failure())

    draw_enter.weight = 3  # type: ignore[attr-defined]

    def draw_leave(self) -> Transition | None:
        if not self.open:
            return None
        kind, argument, self.hooks_on_at_entry = self.open.pop()
        if kind in ("paused", "hooks_paused"):
            self.hooks_on = self.hooks_on_at_entry
        outermost = not self.has("phase")
        if kind == "phase" and argument in READ_PHASES and outermost:
            self.hooks_on = self.hooks_on_at_entry
        fails = self.random.random() < 0.3
        drops = fails and kind == "phase" and argument == "train"
        if drops:
            self.gradients = "empty"
        return ("leave", fails, drops)

    draw_leave.weight = 3  # type: ignore[attr-defined]

    def draw_switch(self) -> Transition:
        self.hooks_on = self.random.random() < 0.7
        return ("switch", self.hooks_on)

    # The tree

    def draw_change(self) -> Transition | None:
        what = self.random.choice(
            ["remove", "return", "replace", "wrap", "tie", "untie", "add", "freeze", "unfreeze", "return", "untie"]
        )
        in_tree = [name for name in BLOCKS if name not in self.away]
        name, source = self.random.choice(BLOCKS), self.random.choice(in_tree)
        if (name in self.away) != (what == "return"):
            return None
        if what == "remove" and len(in_tree) < 2:
            return None
        if what == "tie" and name == source:
            return None
        if what == "tie":
            self.tied.add(name)
        elif what == "untie":
            self.tied.discard(name)
        elif what == "remove":
            self.away.add(name)
        elif what == "return":
            self.away.discard(name)
        elif what == "freeze":
            self.frozen.add(name)
        elif what == "unfreeze":
            self.frozen.discard(name)
        elif what == "wrap":
            self.wrapped.add(name)
        elif what == "replace":
            self.wrapped.discard(name)
        return ("change", what, name, source)

    draw_change.weight = 4  # type: ignore[attr-defined]

    def draw_tidy(self) -> Transition:
        for names in (self.away, self.tied, self.frozen, self.wrapped):
            names.clear()
        return ("tidy",)

    def draw_stranger(self) -> Transition | None:
        return None if self.gradients == "finished" else ("stranger",)

    def draw_moved(self) -> Transition:
        way = self.random.choice(["load", "save", "finish"])
        if (way == "finish" and self.gradients == "finished") or (way == "save" and self.lent):
            way = "load"
        return ("moved", way, self.random.randrange(1000), self.random.choice(["data", "to"]))

    def draw_copy(self) -> Transition | None:
        return ("copy",) if self.random.random() < 0.2 else None
