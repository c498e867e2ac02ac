"""A plain replicated model that runs a script of transitions and records the results that ranks must reproduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.policy.state_machine_model import (
    DECAY,
    INPUTS,
    RANKS,
    RATE,
    Tree,
    loss_of,
    random_weights,
)
from tests.policy.state_machine_script import Script


class Plain:
    """One copy of everything. It runs the script in the simplest way."""

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
        self.snapshot: list[Tensor] = []
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
        # Gradients that are still in param.grad, because no hook has moved them.
        self.unmoved: list[dict[int, Tensor]] = [{} for _ in range(RANKS)]
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
        trainable = [i for i, p in enumerate(self.tree.trained) if p.requires_grad]
        for rank in range(RANKS):
            loss = loss_of(self.model(INPUTS[(number + rank) % len(INPUTS)]))
            gradients = torch.autograd.grad(loss, [self.tree.trained[i] for i in trainable], allow_unused=True)
            unmoved = self.unmoved[rank]
            for index, gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    unmoved[index] = unmoved[index] + gradient if index in unmoved else gradient
                    if active:
                        self.buffers[rank][index] += unmoved.pop(index)

    def do_finish(self, failure: Any) -> None:
        for rank, unmoved in enumerate(self.unmoved):
            for index, gradient in unmoved.items():
                self.buffers[rank][index] += gradient
            unmoved.clear()
        self.sums = []
        for first, *rest in zip(*self.buffers, strict=True):
            total = first.clone()
            for gradient in rest:
                total += gradient
            self.sums.append(total / RANKS)

    def do_step(self, failure: Any) -> None:
        self.step()

    def do_drop(self, *arguments: Any) -> None:
        self.drop()

    do_finish_and_drop = do_late = do_failing_pass = do_failing_rank = do_drop

    def do_zero(self) -> None:
        unmoved = self.unmoved
        self.drop()
        self.unmoved = unmoved

    def do_load(self, how: str, number: int, for_good: bool) -> None:
        values = random_weights(number, self.tree.all)
        if how == "state_dict":
            in_tree = {id(p) for p in self.model.parameters()}
            values = [v if id(p) in in_tree else p.detach() for v, p in zip(values, self.tree.all, strict=True)]
        self.show([v.clone() for v in values])
        if for_good:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.tree.trained, strict=True):
                    master.copy_(parameter)

    def do_snapshot(self) -> None:
        self.snapshot = self.values()

    def do_restore(self) -> None:
        self.show(self.snapshot)

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

    def do_change(self, what: str, name: str, source: str) -> None:
        self.tree.change(what, name, source)

    def do_tidy(self) -> None:
        self.tree.tidy()
