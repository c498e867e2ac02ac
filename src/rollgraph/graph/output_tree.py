"""The structure of a callable's output, so that a replay can rebuild it from its static tensors.

Owns what may surround the tensors of an output: a replay returns constants unchanged, so constants that
vary from run to run are refused. Knows nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from rollgraph.graph.errors import CaptureError
from rollgraph.graph.surface import TensorSpec, same_constant

_REPLAYABLE = (type(None), bool, int, float, str)


class OutputTree:
    """An output taken apart into tensors, constants and the containers around them."""

    def __init__(self, output: Any) -> None:
        leaves, self._tree = pytree.tree_flatten(output)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # One entry for each leaf: None stands for a tensor, (value,) for a constant, which may itself be None.
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self.is_tensor = isinstance(output, Tensor)
        self._is_tuple = type(output) is tuple and all(isinstance(leaf, Tensor) for leaf in output)
        self.differentiable: list[int] = []  # indexes of the tensors that require grad
        self.non_differentiable: list[int] = []
        for index, tensor in enumerate(self.tensors):
            if tensor.requires_grad:
                self.differentiable.append(index)
            else:
                self.non_differentiable.append(index)
        self.specs = [TensorSpec.of(tensor) for tensor in self.tensors]

    def refuse_objects(self, graph: str) -> None:
        """Raise CaptureError for a leaf that is neither a tensor nor a plain constant."""
        for constant in self._constants:
            if constant is not None and not isinstance(constant[0], _REPLAYABLE):
                raise CaptureError(
                    f"{graph} returns a {type(constant[0]).__name__}, which every replay would return unchanged: "
                    "return tensors, or containers of tensors"
                )

    def refuse_change(self, last: OutputTree, graph: str) -> None:
        """Raise CaptureError if the structure or a constant differs from the run before.

        A replay returns both unchanged, so they have to be the same in every run.
        """
        now = [constant is None for constant in self._constants]
        before = [constant is None for constant in last._constants]
        if self._tree != last._tree or now != before:
            raise CaptureError(f"the structure of what {graph} returns changes from call to call: keep it the same")
        for constant, previous in zip(self._constants, last._constants, strict=True):
            if constant is None or previous is None or same_constant(constant[0], previous[0]):
                continue
            raise CaptureError(
                f"{graph} returns {previous[0]!r} in one call and {constant[0]!r} in the next, which a replay would "
                "not follow: return it as a tensor, or compute it outside"
            )

    def without_tensors(self) -> OutputTree:
        """Drop the tensors, and with them the autograd graph behind them."""
        self.tensors = []
        return self

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """An output of this structure that holds `tensors`."""
        if self.is_tensor:
            return tensors[0]
        if self._is_tuple:
            return tuple(tensors)
        supply = iter(tensors)
        leaves = [next(supply) if constant is None else constant[0] for constant in self._constants]
        return pytree.tree_unflatten(leaves, self._tree)
