"""The ranks that divide each layer with this one: as its model sees them, and as the shards of its parameters do."""

from __future__ import annotations

from rollgraph.distributed.world import World
from rollgraph.model import Decoder
from rollgraph.model.division import model_pieces
from rollgraph.model.tensor_group import TensorGroup
from rollgraph.sharding import Collectives
from rollgraph.sharding.rank_grid import make_grid
from rollgraph.sharding.tensor_peers import TensorPeers


class LayerDivision:
    """Makes the process groups of all ranks, of which each `tensor_parallel` that follow one another divide layers.

    `data` are the ranks that divide the data with this one. `group` is for the model; None: it has whole layers.
    """

    def __init__(self, world: World, tensor_parallel: int) -> None:
        grid = make_grid(world, tensor_parallel)
        self.data = grid.data
        self.group: TensorGroup | None = None
        self._world = grid.tensor
        if grid.tensor is not None:
            self._collectives = Collectives(grid.tensor)
            exchange = self._collectives
            self.group = TensorGroup(grid.tensor.rank, grid.tensor.size, exchange.gather_inside, exchange.spread_inside)

    def peers(self, model: Decoder) -> TensorPeers | None:
        """What a worker of this model is given."""
        if self._world is None:
            return None
        return TensorPeers(self._world, self._collectives, model_pieces(model))
