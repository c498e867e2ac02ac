"""Random walks over the operations on sharded parameters, with failures in user code, on a single rank and in
collectives. Three simulated ranks follow them and must equal a plain model with plain AdamW, bit for bit.

ROLLGRAPH_TRANSITIONS and ROLLGRAPH_SEED choose the transitions of the slow test and the first seed.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.parallel.data.collectives import CommunicationError
from rollgraph.parallel.data.together import StepAborted
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import WeightSlots
from tests.parallel.lockstep import Room, run_ranks
from tests.parallel.small_net import DECAY, RATE, loss, microbatch, same, values
from tests.parallel.test_ring import LAYERS, Rank, build

RANKS = 3
LENGTH = 60  # transitions of one walk
FIRST_SEED = int(os.environ.get("ROLLGRAPH_SEED", "0"))
Transition = tuple[Any, ...]


class Injected(Exception):
    """A failure in user code."""


def fail(*_: Any) -> None:
    raise Injected("made to fail")


def draw_walk(seed: int) -> list[Transition]:
    """Transitions that are allowed in this order."""
    chance = random.Random(seed)
    walk: list[Transition] = [("keep", -1), ("save", -1)]
    passes = 0
    for number in range(LENGTH):
        kinds = ["pass", "pass", "pass", "eval", "look", "fail", "fail_all", "collective"]
        if passes:
            kinds += ["step", "step", "step", "drop"]
        else:
            kinds += ["keep", "use", "load", "snapshot", "save", "reload"]
        kind = chance.choice(kinds)
        direction = chance.choice(["forward", "backward"])
        layer = chance.randrange(LAYERS)
        if kind == "fail":
            walk.append((kind, number, direction, layer, chance.randrange(RANKS)))
        elif kind == "fail_all":
            walk.append((kind, number, direction, layer))
        elif kind == "collective":
            walk.append((kind, number, chance.choice(["start", "wait"]), chance.randrange(12)))
        else:
            walk.append((kind, number))
        if kind == "pass":
            passes += 1
        elif kind in ("step", "drop", "fail", "fail_all", "collective"):
            passes = 0
    return [*walk, ("look", 0)]


class Plain:
    """One process. Each method returns the result that every rank must reproduce."""

    def __init__(self) -> None:
        self.model = build()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.trained if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in self.trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=torch.tensor(RATE), fused=True, capturable=True)
        self.drop()

    def follow(self, transition: Transition) -> Any:
        kind, *arguments = transition
        if kind in ("fail", "fail_all", "collective"):
            return self.drop()
        return getattr(self, kind)(*arguments)

    def drop(self, *_: int) -> None:
        self.sums = [torch.zeros_like(p) for p in self.trained]

    def _pass(self, number: int) -> None:
        for rank in range(RANKS):
            gradients = torch.autograd.grad(loss(self.model, microbatch(number, rank, 0)), self.trained)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.add_(gradient)

    def __getattr__(self, name: str) -> Any:
        return {"pass": self._pass}[name]

    def step(self, number: int) -> None:
        for parameter, total in zip(self.trained, self.sums, strict=True):
            parameter.grad = total.div_(RANKS)
        self.optimizer.step()
        self.drop()

    def eval(self, number: int) -> list[Tensor]:
        with torch.no_grad():
            return [loss(self.model, microbatch(number, rank, 0)) for rank in range(RANKS)]

    def look(self, number: int) -> dict[str, Tensor]:
        return values(self.model)

    def keep(self, number: int) -> None:
        self.slot = values(self.model)

    def use(self, number: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        kept = values(self.model)
        self._write(self.slot)
        result = self.slot, self.eval(number)
        self._write(kept)
        return result

    def load(self, number: int) -> None:
        self._write(weights_of(number))

    def snapshot(self, number: int) -> None:
        """Ranks take a snapshot, overwrite the weights and restore them, which changes nothing."""

    def save(self, number: int) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def reload(self, number: int) -> None:
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def _write(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])


def weights_of(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(p.shape, generator=generator) / 4 for name, p in build().named_parameters()}


class Walker(Rank):
    """A rank that follows a walk."""

    def __init__(self, rank: int, room: Room, folder: Path, seed: int) -> None:
        chance = random.Random(seed)
        options = {"slots": chance.choice([1, 2, 2, 3]), "overlap_gather": chance.random() < 0.8}
        options["overlap_reduce"] = chance.random() < 0.8
        super().__init__(World(rank, RANKS, "cpu"), room, **options)
        self.slots = WeightSlots(self.sharded, verify=True)
        self.folder = folder
        self.done: Counter[str] = Counter()

    def follow(self, walk: list[Transition], expected: list[Any]) -> Counter[str]:
        for index, (transition, outcome) in enumerate(zip(walk, expected, strict=True)):
            kind, *arguments = transition
            try:
                getattr(self, f"do_{kind}")(outcome, *arguments)
            except BaseException as error:
                error.add_note(f"rank {self.rank}, transition {index} {transition} of {walk[:index]}")
                raise
            self.done[kind] += 1
        self.close()
        return self.done

    def do_pass(self, outcome: None, number: int) -> None:
        self.loss(number).backward()

    def do_step(self, outcome: None, number: int) -> None:
        self.sharded.gradients.finish()
        self.optimizer.step()

    def do_drop(self, outcome: None, number: int) -> None:
        self.sharded.gradients.drop()

    def do_eval(self, outcome: list[Tensor], number: int) -> None:
        with torch.no_grad():
            assert torch.equal(self.loss(number), outcome[self.rank])

    def do_look(self, outcome: dict[str, Tensor], number: int) -> None:
        assert same(self.values(), outcome)

    def fail_in(self, number: int, direction: str, layer: int, fails: bool) -> Exception | None:
        """Run a step that fails in a layer of this rank or of another one, and return the exception."""
        handle = None
        try:
            if fails and direction == "forward":
                handle = self.layers[layer].register_forward_hook(fail)
            value = self.loss(number)
            if fails and direction == "backward":
                handle = self.layers[layer][0].weight.register_hook(fail)
            value.backward()
            self.sharded.gradients.finish()
        except (Injected, StepAborted) as error:
            self.sharded.gradients.drop()
            return error
        finally:
            if handle is not None:
                handle.remove()
        return None

    def do_fail(self, outcome: None, number: int, direction: str, layer: int, rank: int) -> None:
        """Other ranks may notice it in any wait, or at the end."""
        raised = self.fail_in(number, direction, layer, rank == self.rank)
        if rank == self.rank:
            assert isinstance(raised, Injected)
        else:
            assert isinstance(raised, StepAborted)
            assert f"rank {rank} aborted the step (Injected" in str(raised)
            self.done["aborted by another rank"] += 1

    def do_fail_all(self, outcome: None, number: int, direction: str, layer: int) -> None:
        """Each rank fails in a different layer. The first to fail may interrupt the others."""
        assert self.fail_in(number, direction, (layer + self.rank) % LAYERS, True) is not None

    def do_collective(self, outcome: None, number: int, moment: Any, after: int) -> None:
        """The same collective fails on all ranks, or none does because the step has fewer."""
        self.sharded.gradients.join_abort()
        self.collectives.fail_at(moment, after)
        try:
            self.loss(number).backward()
            self.sharded.gradients.finish()
        except CommunicationError:
            self.done["a collective that failed"] += 1
        self.collectives.fail_no_more()
        self.sharded.gradients.drop()

    @property
    def collectives(self) -> Any:
        return self.sharded.collectives

    def do_keep(self, outcome: None, number: int) -> None:
        self.slots.save("reference")

    def do_use(self, outcome: tuple[dict[str, Tensor], list[Tensor]], number: int) -> None:
        before = self.values()
        with suppress(Injected), self.slots.use("reference"):
            assert same(self.values(), outcome[0])
            self.do_eval(outcome[1], number)
            fail()
        assert same(self.values(), before)

    def do_load(self, outcome: None, number: int) -> None:
        self.sharded.flat.load(weights_of(number))
        self.optimizer.read_shards()

    def do_snapshot(self, outcome: None, number: int) -> None:
        kept = self.sharded.flat.snapshot()
        self.sharded.flat.load(weights_of(number))
        self.sharded.flat.restore(kept)

    def do_save(self, outcome: None, number: int) -> None:
        self.saved = self.folder / f"{number}"
        save(self.saved, self.sharded, self.optimizer)

    def do_reload(self, outcome: None, number: int) -> None:
        load(self.saved, self.sharded, self.optimizer)


def walk_through(seed: int, folder: Path) -> Counter[str]:
    walk = draw_walk(seed)
    plain = Plain()
    expected = [plain.follow(transition) for transition in walk]
    folder.mkdir()
    counts = run_ranks(RANKS, lambda rank, room: Walker(rank, room, folder, seed).follow(walk, expected))
    return sum(counts, Counter())


@pytest.mark.parametrize(
    "transitions", [240, pytest.param(int(os.environ.get("ROLLGRAPH_TRANSITIONS", "3000")), marks=pytest.mark.slow)]
)
def test_random_walks(transitions: int, tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + transitions // LENGTH):
        done += walk_through(seed, tmp_path / str(seed))
    expected = {"pass", "step", "drop", "eval", "look", "fail", "fail_all", "collective", "keep", "use", "load"}
    expected |= {"snapshot", "save", "reload", "aborted by another rank", "a collective that failed"}
    assert not expected - done.keys()
