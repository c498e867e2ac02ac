"""One simulated rank that runs a script through hooks, buckets, slots and phases."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.parallel.data.collectives import CommunicationError
from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.data.together import StepAborted
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PhaseError, Phases, SlotError, WeightSlots
from tests.parallel.lockstep import Room, RoomCollectives
from tests.policy.state_machine_model import (
    DECAY,
    INPUTS,
    RANKS,
    RATE,
    Block,
    Injected,
    Tree,
    loss_of,
    random_weights,
)
from tests.policy.state_machine_script import Script


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
        self.phases = Phases(partial(self.sharded.paused, gather=True), self.sharded.gradients.drop)
        self.contexts: list[AbstractContextManager[None]] = []
        self.snapshot: Any = None
        self.uneven = False  # whether ranks have completed different gathers
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
        self.sharded.gradients.join_abort()
        if self.uneven:
            self.sharded.gather()
            self.uneven = False
        self.collectives.fail_at(*failure)

    def call_with_failure(self, call: Callable[[], Any], failure: tuple[Any, int] | None) -> Any:
        """Call it, and call it again if an injected failure of a collective stopped it."""
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
        for name, parameter, value in zip(self.tree.names, self.tree.all, self.expected[self.at], strict=True):
            assert torch.equal(parameter, value), f"{name} differs by {(parameter - value).abs().max()}"

    def stale(self) -> bool:
        return any(self.sharded.gathers.managed[p].stale for p in self.model.parameters())

    def do_forward(self, number: int, active: bool) -> None:
        refused = not active and self.stale()
        with torch.no_grad():
            if refused:
                with pytest.raises(StaleWeights):
                    self.model(self.input(number))
                return
            output = self.model(self.input(number))
        assert torch.equal(output, self.expected[self.at][self.rank]), "the output differs"

    def do_backward(self, number: int, active: bool) -> None:
        if not active:
            self.sharded.gather()
        loss_of(self.model(self.input(number))).backward()

    def do_finish(self, failure: Any) -> None:
        self.call_with_failure(self.sharded.gradients.finish, failure)

    def do_finish_twice(self) -> None:
        with pytest.raises(RuntimeError, match="are finished"):
            self.sharded.gradients.finish()

    def do_finish_and_drop(self, failure: Any) -> None:
        self.break_collective(failure)
        try:
            self.sharded.gradients.finish()
        except CommunicationError:
            self.done["a collective that failed"] += 1
        self.collectives.fail_no_more()
        self.sharded.gradients.drop()

    def do_step(self, failure: Any) -> None:
        before = self.optimizer.steps

        def once() -> None:
            if self.optimizer.steps == before:
                self.optimizer.step()

        self.call_with_failure(once, failure)
        assert self.optimizer.steps == before + 1

    def do_refused_step(self) -> None:
        with pytest.raises(RuntimeError, match=r"gradients.finish\(\) first|the weights in the model are"):
            self.optimizer.step()

    def do_late(self, number: int) -> None:
        try:
            self.do_backward(number, False)
        except RuntimeError as error:
            if "no_sync()" not in str(error):
                raise
            self.done["a gradient that came late"] += 1
        self.sharded.gradients.drop()

    def do_drop(self) -> None:
        self.sharded.gradients.drop()

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
        self.sharded.gradients.drop()

    def do_failing_rank(self, where: str, rank: int, number: int) -> None:
        self.uneven = True
        if rank != self.rank:
            loss_of(self.model(self.input(number))).backward()
            with pytest.raises(StepAborted, match=rf"rank {rank} aborted the step \(Injected"):
                self.sharded.gradients.finish()
            return
        try:
            if where == "before":
                self.sharded.gather()  # the step has started
                raise Injected("before anything")
            loss_of(self.model(self.input(number), fail=where)).backward()
        except Injected:
            self.sharded.gradients.drop()

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
        if self.sharded.gathers.stale() is not None:
            with pytest.raises(StaleWeights):
                self.sharded.flat.snapshot()
            self.sharded.gather()
        self.snapshot = self.sharded.flat.snapshot()

    def do_restore(self) -> None:
        self.sharded.flat.restore(self.snapshot)

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
            return self.sharded.gradients.no_sync()
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

    def do_change(self, what: str, name: str, source: str) -> None:
        self.tree.change(what, name, source)

    def do_tidy(self) -> None:
        self.tree.tidy()

    def do_stranger(self) -> None:
        self.tree.put("stranger", Block())
        with pytest.raises(RuntimeError, match=r"stranger.weight, .* requires grad but did not"):
            self.sharded.gradients.finish()
        del self.model.blocks["stranger"]

    def do_moved(self, way: str, number: int, how: str) -> None:
        parameter = self.tree.all[number % len(self.tree.all)]
        storage = parameter.data
        parameter.data = storage.clone() if how == "data" else storage.double()
        weights = dict(zip(self.tree.names, random_weights(number, self.tree.all), strict=True))
        ways = {
            "finish": self.sharded.gradients.finish,
            "save": lambda: self.weights.save("moved"),
            "load": lambda: self.sharded.flat.load(weights),
        }
        with pytest.raises(RuntimeError, match="left its flat buffer"):
            ways[way]()
        parameter.data = storage

    def do_copy(self) -> None:
        self.sharded.gather()
        twin = copy.deepcopy(self.model)
        for original, parameter in zip(self.model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(original, parameter)
        assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())
        loss_of(twin(self.input(0))).backward()
