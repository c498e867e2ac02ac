"""A small model with everything that sharding has to handle, alone and on three simulated ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import Room, RoomCollectives

RATE = 0.05


DECAY = 0.1


class Net(nn.Module):
    """Has tied, frozen and plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))  # type: ignore[no-any-return]


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def microbatch(step: int, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(13, (2, 5), generator=generator)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())


ALONE = World(0, 1, "cpu")


def simulated(rank: int, room: Room, bucket_bytes: int = 400) -> tuple[Net, ShardedModel, ShardedAdamW]:
    """One of three ranks in this process, see `lockstep.py`."""
    model = Net()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (index + 1))
    collectives = RoomCollectives(room, rank)
    sharded = ShardedModel(model, World(rank, 3, "cpu"), bucket_bytes=bucket_bytes, collectives=collectives)
    return model, sharded, ShardedAdamW(sharded, RATE, weight_decay=DECAY)


def one_step(model: Net, sharded: ShardedModel, optimizer: ShardedAdamW, number: int) -> None:
    loss(model, microbatch(number, sharded.world.rank, 0)).backward()
    sharded.gradients.finish()
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
