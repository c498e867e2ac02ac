"""The model of the state machine test, and the changes to its module tree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RANKS = 3
RATE = 0.01
DECAY = 0.1
SHAPE = (12, 16)
BLOCKS = [f"block{i}" for i in range(5)]
SLOTS = ["reference", "previous"]
INPUTS = [torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(11)]


class Injected(Exception):
    """A failure in user code."""


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
    """A model and the changes to its module tree, for the plain model and for each rank."""

    def __init__(self, seed: int) -> None:
        self.model = Net()
        with torch.no_grad():
            for parameter, value in zip(
                self.model.parameters(), random_weights(seed, [*self.model.parameters()]), strict=True
            ):
                parameter.copy_(value)
        self.originals = {name: (block.weight, block.bias) for name, block in self.model.blocks.items()}
        self.all = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.trained = [parameter for parameter in self.all if parameter.requires_grad]
        self.away: dict[str, nn.Module] = {}
        self.seen: set[nn.Module] = set(self.model.modules())

    def inner(self, name: str) -> Block:
        block = self.model.blocks[name]
        return block.inner if isinstance(block, Wrapper) else block  # type: ignore[return-value]

    def put(self, name: str, module: nn.Module) -> None:
        self.model.blocks[name] = module
        self.seen |= set(module.modules())

    def change(self, what: str, name: str, source: str) -> None:
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
            self.inner(name).weight = self.inner(source).weight
        elif what == "untie":
            self.inner(name).weight = self.originals[name][0]
        elif what == "add":
            self.put("plain", nn.Tanh())
        elif what == "freeze":
            self.originals[name][0].requires_grad_(False)
        elif what == "unfreeze":
            self.originals[name][0].requires_grad_(True)
        else:
            raise AssertionError(what)

    def tidy(self) -> None:
        """Undo all changes, except for the order of blocks."""
        for name in sorted(self.away):
            self.put(name, self.away.pop(name))
        for name, (weight, bias) in self.originals.items():
            weight.requires_grad_(True)
            block = self.inner(name)
            block.weight, block.bias = weight, bias
            self.put(name, block)


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def random_weights(number: int, parameters: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(p.shape, generator=generator) for p in parameters]
