"""Any order of calls, changes and failures on three ranks gives the bits of a plain model, and leaks no hook.

A script of transitions is drawn from a seed, by a small model of what is allowed when. A plain replicated model, with
plain AdamW and sums in the order of ranks, runs it first. Then three simulated ranks run it through hooks, buckets,
slots and phases, and must agree with the plain model bit for bit.

    ROLLGRAPH_TRANSITIONS=20000 ROLLGRAPH_SEED=7 python -m pytest tests/policy/test_state_machine.py

chooses how many transitions to run and which. A failure reports its seed and the transitions that led to it.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.policy import PhaseError, Phases, SlotError, WeightSlots
from rollgraph.policy.phases import PHASES, READING
from rollgraph.sharding import CommunicationError, ShardedAdamW, ShardedModel, StaleWeights, StepAborted, load, save
from tests.sharding.lockstep import Room, RoomCollectives, run_ranks

RANKS, EPISODE = 3, 250  # transitions between two fresh models
RATE, DECAY = 0.01, 0.1
SHAPE = (12, 16)
BLOCKS = [f"block{i}" for i in range(5)]
SLOTS = ["reference", "previous"]
INPUTS = [torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(11)]


class Injected(Exception):
    """A failure in user code."""


# -- the model -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Uses only elementwise operations and sums over a fixed shape, so the bits do not depend on addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))
        self.bias = nn.Parameter(torch.zeros(SHAPE[1:]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight + self.bias)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(SHAPE))
        self.blocks = nn.ModuleDict({name: Block() for name in BLOCKS})
        self.ice = Block().requires_grad_(False)

    def forward(self, x: Tensor, fail: str = "") -> Tensor:
        x = x * self.scale  # so that the gradient of scale comes last
        if fail == "backward":
            x.register_hook(_raise)
        for block in self.blocks.values():
            x = block(x)
        if fail == "forward":
            raise Injected("in a forward")
        return self.ice(x)  # type: ignore[no-any-return]


def _raise(gradient: Tensor) -> None:
    raise Injected("in a backward")


class Tree:
    """A model and the changes of its module tree, for the plain model and for each rank."""

    def __init__(self, seed: int) -> None:
        self.model = Net()
        with torch.no_grad():
            for parameter, value in zip(
                self.model.parameters(), random_weights(seed, [*self.model.parameters()]), strict=True
            ):
                parameter.copy_(value)
        self.own = {name: (block.weight, block.bias) for name, block in self.model.blocks.items()}
        self.all = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.trained = [parameter for parameter in self.all if parameter.requires_grad]
        self.away: dict[str, nn.Module] = {}
        self.seen: set[nn.Module] = set(self.model.modules())

    def inner(self, name: str) -> Block:
        found = self.model.blocks[name]
        return found.inner if isinstance(found, Wrapper) else found  # type: ignore[return-value]

    def put(self, name: str, module: nn.Module) -> None:
        self.model.blocks[name] = module
        self.seen |= set(module.modules())

    def change(self, what: str, name: str, other: str) -> None:
        blocks = self.model.blocks
        if what == "remove":
            self.away[name] = blocks[name]
            del blocks[name]
        elif what == "return":
            self.put(name, self.away.pop(name))
        elif what == "replace":
            twin, old = Block(), self.inner(name)
            twin.weight, twin.bias = old.weight, old.bias
            self.put(name, twin)
        elif what == "wrap":
            self.put(name, Wrapper(self.inner(name)))
        elif what == "tie":
            self.inner(name).weight = self.inner(other).weight
        elif what == "untie":
            self.inner(name).weight = self.own[name][0]
        elif what == "add":
            self.put("plain", nn.Tanh())
        elif what == "freeze":
            self.own[name][0].requires_grad_(False)
        elif what == "unfreeze":
            self.own[name][0].requires_grad_(True)
        else:
            raise AssertionError(what)

    def tidy(self) -> None:
        """Undo all changes, except for the order of blocks."""
        for name in sorted(self.away):
            self.put(name, self.away.pop(name))
        for name, (weight, bias) in self.own.items():
            weight.requires_grad_(True)
            block = self.inner(name)
            block.weight, block.bias = weight, bias
            self.put(name, block)


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def random_weights(number: int, parameters: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(p.shape, generator=generator) for p in parameters]


# -- the script ------------------------------------------------------------------------------------

Transition = tuple[Any, ...]


class Script:
    """Transitions drawn from a seed, with as much state as is needed to know what each of them should do."""

    def __init__(self, seed: int, length: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.hooks_on = True
        self.gradients = "empty"  # then "open", "synced", "finished"
        self.open: list[tuple[str, Any, bool]] = []  # contexts: kind, argument, whether hooks were on at entry
        self.slots: set[str] = set()
        self.kept = self.saved = False
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
        reading = self.has("phase") and self.phase in READING
        return self.hooks_on and not reading and not self.has("paused", "hooks_paused")

    def failure(self) -> tuple[str, int] | None:
        """Sometimes a collective fails, on all ranks."""
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
        self.kept = True
        return ("snapshot",)

    def draw_restore(self) -> Transition | None:
        return ("restore",) if self.kept else None

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
        if self.saved and self.random.random() < 0.5:
            return ("checkpoint_load",)
        self.saved = True
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
        kind, argument, self.hooks_on_found = self.open.pop()
        if kind in ("paused", "hooks_paused"):
            self.hooks_on = self.hooks_on_found
        outermost = not self.has("phase")
        if kind == "phase" and argument in READING and outermost:
            self.hooks_on = self.hooks_on_found
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
        here = [name for name in BLOCKS if name not in self.away]
        name, other = self.random.choice(BLOCKS), self.random.choice(here)
        if (name in self.away) != (what == "return"):
            return None
        if what == "remove" and len(here) < 2:
            return None
        if what == "tie" and name == other:
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
        return ("change", what, name, other)

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


# -- the plain model -------------------------------------------------------------------------------


class Plain:
    """One copy of everything, which runs the script in the simplest way and records what the ranks should find."""

    def __init__(self, seed: int) -> None:
        self.tree = Tree(seed)
        self.model = self.tree.model
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.tree.trained]
        groups = [
            {"params": [p for p in self.masters if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in self.masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=torch.tensor(RATE), fused=True, capturable=True)
        self.drop()
        self.step()  # creates all optimizer state; the weights are restored below
        with torch.no_grad():
            for master, parameter in zip(self.masters, Tree(seed).trained, strict=True):
                master.copy_(parameter)
                for tensor in self.adamw.state[master].values():
                    tensor.zero_()
        self.show_masters()
        self.slots: dict[str, list[Tensor]] = {}
        self.kept: list[Tensor] = []
        self.checkpoint: Any = None
        self.entered: list[tuple[str, Any]] = []
        self.expected: list[Any] = []

    def follow(self, script: Script) -> list[Any]:
        for name, *arguments in script.transitions:
            self.expected.append(None)
            getattr(self, f"do_{name}", self.nothing)(*arguments)
        return self.expected

    def nothing(self, *arguments: Any) -> None:
        pass

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.tree.all]

    @torch.no_grad()
    def show(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.tree.all, values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def show_masters(self) -> None:
        for parameter, master in zip(self.tree.trained, self.masters, strict=True):
            parameter.copy_(master)

    def drop(self) -> None:
        self.buffers = [[torch.zeros_like(p) for p in self.tree.trained] for _ in range(RANKS)]
        self.left: list[dict[int, Tensor]] = [
            {} for _ in range(RANKS)
        ]  # gradients in param.grad, which no hook has moved
        self.sums: list[Tensor] | None = None

    def step(self) -> None:
        for index, master in enumerate(self.masters):
            master.grad = torch.zeros_like(master) if self.sums is None else self.sums[index]
        self.adamw.step()
        self.show_masters()
        self.drop()

    def do_look(self) -> None:
        self.expected[-1] = self.values()

    def do_forward(self, number: int, active: bool) -> None:
        with torch.no_grad():
            self.expected[-1] = [self.model(INPUTS[(number + r) % len(INPUTS)]) for r in range(RANKS)]

    def do_backward(self, number: int, active: bool) -> None:
        wanted = [i for i, p in enumerate(self.tree.trained) if p.requires_grad]
        for rank in range(RANKS):
            loss = loss_of(self.model(INPUTS[(number + rank) % len(INPUTS)]))
            found = torch.autograd.grad(loss, [self.tree.trained[i] for i in wanted], allow_unused=True)
            left = self.left[rank]
            for index, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    left[index] = left[index] + gradient if index in left else gradient
                    if active:
                        self.buffers[rank][index] += left.pop(index)

    def do_finish(self, failure: Any) -> None:
        for rank, left in enumerate(self.left):
            for index, gradient in left.items():
                self.buffers[rank][index] += gradient
            left.clear()
        self.sums = []
        for first, *others in zip(*self.buffers, strict=True):
            total = first.clone()
            for other in others:
                total += other
            self.sums.append(total / RANKS)

    def do_step(self, failure: Any) -> None:
        self.step()

    def do_drop(self, *arguments: Any) -> None:
        self.drop()

    do_finish_and_drop = do_late = do_failing_pass = do_failing_rank = do_drop

    def do_zero(self) -> None:
        left = self.left
        self.drop()
        self.left = left

    def do_load(self, how: str, number: int, for_good: bool) -> None:
        values = random_weights(number, self.tree.all)
        if how == "state_dict":
            here = {id(p) for p in self.model.parameters()}
            values = [v if id(p) in here else p.detach() for v, p in zip(values, self.tree.all, strict=True)]
        self.show([v.clone() for v in values])
        if for_good:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.tree.trained, strict=True):
                    master.copy_(parameter)

    def do_snapshot(self) -> None:
        self.kept = self.values()

    def do_restore(self) -> None:
        self.show(self.kept)

    def do_save(self, name: str) -> None:
        self.slots[name] = self.values()

    def do_checkpoint_save(self) -> None:
        state = [{k: t.clone() for k, t in self.adamw.state[m].items()} for m in self.masters]
        ice = [p.detach().clone() for p in self.model.ice.parameters()]
        self.checkpoint = ([m.detach().clone() for m in self.masters], state, ice)

    @torch.no_grad()
    def do_checkpoint_load(self) -> None:
        masters, state, ice = self.checkpoint
        for master, value, moments in zip(self.masters, masters, state, strict=True):
            master.copy_(value)
            for name, tensor in self.adamw.state[master].items():
                tensor.copy_(moments[name])
        for parameter, value in zip(self.model.ice.parameters(), ice, strict=True):
            parameter.copy_(value)
        self.show_masters()

    def exchange(self, name: str) -> None:
        values = self.values()
        self.show(self.slots[name])
        self.slots[name] = values

    def uses(self, name: str) -> bool:
        return any(entry == ("use", name) for entry in self.entered)

    def do_enter(self, kind: str, argument: Any, failure: Any) -> None:
        if kind == "use" and not self.uses(argument):
            self.exchange(argument)
        self.entered.append((kind, argument))

    def do_leave(self, fails: bool, drops: bool) -> None:
        kind, argument = self.entered.pop()
        if kind == "use" and not self.uses(argument):
            self.exchange(argument)
        if drops:
            self.drop()

    def do_change(self, what: str, name: str, other: str) -> None:
        self.tree.change(what, name, other)

    def do_tidy(self) -> None:
        self.tree.tidy()


# -- a rank ----------------------------------------------------------------------------------------


class Rank:
    """One of the three ranks, with everything that rollgraph puts around a model."""

    def __init__(self, script: Script, expected: list[Any], rank: int, room: Room, folder: Path) -> None:
        self.script, self.expected, self.rank, self.folder = script, expected, rank, folder
        self.tree = Tree(script.seed)
        self.model = self.tree.model
        self.collectives = RoomCollectives(room, rank)
        choose = random.Random(script.seed)
        self.sharded = ShardedModel(
            self.model,
            World(rank, RANKS, "cpu"),
            bucket_bytes=choose.choice([64, 1600, 10**6]),
            overlap_gather=choose.random() < 0.8,
            overlap_reduce=choose.random() < 0.8,
            collectives=self.collectives,
        )
        self.optimizer = ShardedAdamW(self.sharded, RATE, weight_decay=DECAY)
        self.weights = WeightSlots(self.sharded, verify=choose.random() < 0.2)
        self.phases = Phases(self.sharded)
        self.contexts: list[AbstractContextManager[None]] = []
        self.kept: Any = None
        self.uneven = False  # ranks have completed different gathers
        self.done: Counter[str] = Counter()
        self.at = 0

    def follow(self) -> Counter[str]:
        for at, (name, *arguments) in enumerate(self.script.transitions):
            self.at = at
            try:
                getattr(self, f"do_{name}")(*arguments)
                self.check_hooks()
            except BaseException as error:
                error.add_note(self.where())
                raise
            self.done[name] += 1
        self.close()
        return self.done

    def where(self) -> str:
        last = self.script.transitions[max(0, self.at - 25) : self.at + 1]
        lines = [f"  {number} {transition}" for number, transition in enumerate(last, self.at + 1 - len(last))]
        return "\n".join([f"rank {self.rank}, seed {self.script.seed}, the last transitions:", *lines])

    def input(self, number: int) -> Tensor:
        return INPUTS[(number + self.rank) % len(INPUTS)]

    def break_collective(self, failure: tuple[Any, int]) -> None:
        """Make the same collective fail on all ranks, which therefore must be at the same point."""
        self.sharded._gradients.join_abort()
        if self.uneven:
            self.sharded.gather()
            self.uneven = False
        self.collectives.fail_at(*failure)

    def call_with_failure(self, call: Callable[[], Any], failure: tuple[Any, int] | None) -> Any:
        """Call it, and once more if a collective was made to fail in it."""
        if failure is None:
            return call()
        self.break_collective(failure)
        try:
            return call()
        except CommunicationError:
            self.done["a collective that failed"] += 1
            return call()
        finally:
            self.collectives.fail_no_more()

    def close(self) -> None:
        self.sharded.close()
        for module in self.tree.seen:
            hooks = (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
            assert not any(hooks), f"a hook is left on {module}"
        assert not any(p._post_accumulate_grad_hooks for p in self.tree.all)

    def check_hooks(self) -> None:
        """No module and no parameter has a hook twice."""
        for module in self.tree.seen:
            assert len(module._forward_pre_hooks) <= 2 + (module is self.model), module
        for parameter in self.tree.all:
            assert len(parameter._post_accumulate_grad_hooks or ()) <= 1

    # Work

    def do_look(self) -> None:
        self.sharded.gather()
        for name, found, value in zip(self.tree.names, self.tree.all, self.expected[self.at], strict=True):
            assert torch.equal(found, value), f"{name} differs by {(found - value).abs().max()}"

    def stale(self) -> bool:
        return any(self.sharded._gathers.bucket_of[p].stale for p in self.model.parameters())

    def do_forward(self, number: int, active: bool) -> None:
        refused = not active and self.stale()
        with torch.no_grad():
            if refused:
                with pytest.raises(StaleWeights):
                    self.model(self.input(number))
                return
            found = self.model(self.input(number))
        assert torch.equal(found, self.expected[self.at][self.rank]), "the output differs"

    def do_backward(self, number: int, active: bool) -> None:
        if not active:
            self.sharded.gather()
        loss_of(self.model(self.input(number))).backward()

    def do_finish(self, failure: Any) -> None:
        self.call_with_failure(self.sharded.finish_gradients, failure)

    def do_finish_twice(self) -> None:
        with pytest.raises(RuntimeError, match="are finished"):
            self.sharded.finish_gradients()

    def do_finish_and_drop(self, failure: Any) -> None:
        self.break_collective(failure)
        try:
            self.sharded.finish_gradients()
        except CommunicationError:
            self.done["a collective that failed"] += 1
        self.collectives.fail_no_more()
        self.sharded.drop_gradients()

    def do_step(self, failure: Any) -> None:
        before = self.optimizer.steps

        def once() -> None:
            if self.optimizer.steps == before:
                self.optimizer.step()

        self.call_with_failure(once, failure)
        assert self.optimizer.steps == before + 1

    def do_refused_step(self) -> None:
        with pytest.raises(RuntimeError, match=r"finish_gradients\(\) first|the weights in the model are"):
            self.optimizer.step()

    def do_late(self, number: int) -> None:
        try:
            self.do_backward(number, False)
        except RuntimeError as error:
            if "no_sync()" not in str(error):
                raise
            self.done["a gradient that came late"] += 1
        self.sharded.drop_gradients()

    def do_drop(self) -> None:
        self.sharded.drop_gradients()

    def do_zero(self) -> None:
        self.sharded.flat.zero_gradients()

    def do_gather(self, failure: Any) -> None:
        self.call_with_failure(self.sharded.gather, failure)

    def do_prefetch(self, number: int) -> None:
        self.sharded.ensure_gathered([self.tree.trained[number % len(self.tree.trained)]])

    # Failures

    def do_failing_pass(self, where: str, number: int) -> None:
        with pytest.raises((Injected, StaleWeights, RuntimeError), match=r"in a |gather|no_sync"):
            loss_of(self.model(self.input(number), fail=where)).backward()
        self.sharded.drop_gradients()

    def do_failing_rank(self, where: str, rank: int, number: int) -> None:
        self.uneven = True
        if rank != self.rank:
            loss_of(self.model(self.input(number))).backward()
            with pytest.raises(StepAborted, match=rf"rank {rank} aborted the step \(Injected"):
                self.sharded.finish_gradients()
            return
        try:
            if where == "before":
                self.sharded.gather()  # the step has started
                raise Injected("before anything")
            loss_of(self.model(self.input(number), fail=where)).backward()
        except Injected:
            self.sharded.drop_gradients()

    # Weights

    def do_load(self, how: str, number: int, for_good: bool) -> None:
        values = dict(zip(self.tree.all, random_weights(number, self.tree.all), strict=True))
        if how == "flat":
            self.sharded.flat.load({n: values[p] for n, p in zip(self.tree.names, self.tree.all, strict=True)})
        else:
            named = self.model.named_parameters(remove_duplicate=False)
            self.model.load_state_dict({name: values[parameter] for name, parameter in named})
        if for_good:
            self.optimizer.read_shards()

    def do_snapshot(self) -> None:
        if self.sharded.stale() is not None:
            with pytest.raises(StaleWeights):
                self.sharded.flat.snapshot()
            self.sharded.gather()
        self.kept = self.sharded.flat.snapshot()

    def do_restore(self) -> None:
        self.sharded.flat.restore(self.kept)

    def do_save(self, name: str) -> None:
        self.weights.save(name)

    def do_refused_save(self, name: str) -> None:
        with pytest.raises(SlotError):
            self.weights.save(name)

    def do_checkpoint_save(self) -> None:
        self.saved_at = self.at
        save(self.folder / f"{self.script.seed}-{self.at}", self.sharded, self.optimizer)

    def do_checkpoint_load(self) -> None:
        load(self.folder / f"{self.script.seed}-{self.saved_at}", self.sharded, self.optimizer)

    # Contexts

    def context(self, kind: str, argument: Any) -> AbstractContextManager[None]:
        if kind == "no_sync":
            return self.sharded.no_sync()
        if kind == "paused":
            return self.sharded.paused(gather=argument)
        if kind == "hooks_paused":
            return self.sharded.hooks.paused()
        if kind == "phase":
            return self.phases.enter(argument)
        return self.weights.use(argument)

    def do_enter(self, kind: str, argument: Any, failure: Any) -> None:
        def enter() -> AbstractContextManager[None]:
            context = self.context(kind, argument)
            context.__enter__()
            return context

        self.contexts.append(self.call_with_failure(enter, failure))

    def do_leave(self, fails: bool, drops: bool) -> None:
        context = self.contexts.pop()
        if not fails:
            context.__exit__(None, None, None)
            return
        stack = ExitStack()
        stack.push(context)
        with pytest.raises(Injected), stack:
            raise Injected("in a body")

    def do_refused_use(self, name: str) -> None:
        with pytest.raises(SlotError):
            self.weights.use(name).__enter__()

    def do_refused_phase(self, phase: str) -> None:
        with pytest.raises(PhaseError):
            self.phases.enter(phase).__enter__()

    def do_switch(self, on: bool) -> None:
        if on:
            self.sharded.hooks.enable()
        else:
            self.sharded.hooks.disable()

    # The tree

    def do_change(self, what: str, name: str, other: str) -> None:
        self.tree.change(what, name, other)

    def do_tidy(self) -> None:
        self.tree.tidy()

    def do_stranger(self) -> None:
        self.tree.put("stranger", Block())
        with pytest.raises(RuntimeError, match=r"stranger.weight, .* requires grad but did not"):
            self.sharded.finish_gradients()
        del self.model.blocks["stranger"]

    def do_moved(self, way: str, number: int, how: str) -> None:
        parameter = self.tree.all[number % len(self.tree.all)]
        place = parameter.data
        parameter.data = place.clone() if how == "data" else place.double()
        weights = dict(zip(self.tree.names, random_weights(number, self.tree.all), strict=True))
        ways = {
            "finish": self.sharded.finish_gradients,
            "save": lambda: self.weights.save("moved"),
            "load": lambda: self.sharded.flat.load(weights),
        }
        with pytest.raises(RuntimeError, match="left its flat buffer"):
            ways[way]()
        parameter.data = place

    def do_copy(self) -> None:
        self.sharded.gather()
        twin = copy.deepcopy(self.model)
        for original, parameter in zip(self.model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(original, parameter)
        assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())
        loss_of(twin(self.input(0))).backward()


# -- tests -----------------------------------------------------------------------------------------


def follow_as_rank(rank: int, room: Room, script: Script, expected: list[Any], folder: Path) -> Counter[str]:
    return Rank(script, expected, rank, room, folder).follow()


def run_machine(transitions: int, seed: int, folder: Path) -> Counter[str]:
    """Run scripts until there were at least so many transitions."""
    done: Counter[str] = Counter()
    while done["transitions"] < transitions:
        script = Script(seed, EPISODE)
        work = partial(follow_as_rank, script=script, expected=Plain(seed).follow(script), folder=folder)
        done.update(run_ranks(RANKS, work)[0])
        done["transitions"] += len(script.transitions)
        seed += 1
    return done


DEFAULT = 2_500
SEED = int(os.environ.get("ROLLGRAPH_SEED", 0))


def wanted(default: int) -> int:
    return int(os.environ.get("ROLLGRAPH_TRANSITIONS", default))


def test_any_order_of_transitions_gives_the_bits_of_a_plain_model(tmp_path: Path) -> None:
    done = run_machine(wanted(DEFAULT), SEED, tmp_path)
    if done["transitions"] >= DEFAULT:
        kinds = {name.removeprefix("do_") for name in dir(Rank) if name.startswith("do_")}
        kinds |= {"a collective that failed", "a gradient that came late"}
        assert not kinds - set(done), f"never drawn: {kinds - set(done)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_transitions(tmp_path: Path) -> None:
    run_machine(wanted(100_000), SEED + 10_000, tmp_path)
