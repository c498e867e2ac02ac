"""The leaves of a recorded autograd graph: which there are, and how a recording gets leaves of its own.

Owns the stand-ins for a module's parameters while it is recorded, and what happens to gradients and
hooks of leaves inside a recorded backward. Knows nothing of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

_LARGE = 2**20  # bytes of a gradient: below, one launch for all of them is cheaper than memory


@contextmanager
def aliased_parameters(
    module: nn.Module | None, aliases: dict[Tensor, Tensor], shared: Container[Tensor] = ()
) -> Iterator[None]:
    """Put leaves over the same memory in the places of a module's trainable parameters.

    A parameter that an autograd graph of the user's holds is tied to the stream of that graph, which a capture in
    another stream cannot touch. These leaves are new. A parameter that is `shared`, because the module also reaches
    it by another way (a list, a closure), stays what it is.
    """
    places = [
        (child._parameters, name, parameter)
        for child in (module.modules() if module is not None else ())
        for name, parameter in child._parameters.items()
        if parameter is not None and parameter.requires_grad and parameter not in shared
    ]
    # An LSTM keeps a second list of its parameters, which it makes anew when they change.
    lists = [
        (m, m._flat_weights, m._flat_weight_refs)
        for m in (module.modules() if module is not None else ())
        if isinstance(m, nn.RNNBase)
    ]
    for parameters, name, parameter in places:
        if parameter not in aliases:
            aliases[parameter] = _alias(parameter)
        parameters[name] = cast(nn.Parameter, aliases[parameter])
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
        for rnn, weights, references in lists:
            rnn._flat_weights, rnn._flat_weight_refs = weights, references


def _alias(parameter: nn.Parameter) -> Tensor:
    """A new leaf that a forward cannot tell from the parameter, except with `is`: its class, attributes, version."""
    kind = type(parameter)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper around other tensors
        alias = parameter.data.requires_grad_()
        alias._is_param = True
        return alias
    alias = Tensor._make_subclass(kind, parameter, True)
    alias.__dict__ = parameter.__dict__
    return alias


@contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    found = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in found:
            hooks.update(saved)


@contextmanager
def moving_out(leaves: Sequence[Tensor], buffers: Sequence[Tensor | None], users: Sequence[Tensor]) -> Iterator[None]:
    """Move large gradients of our own leaves to their buffers as they are made: no two of them wait in the pool."""

    def into(buffer: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: buffer.copy_(gradient)

    kept = set(map(id, users))
    handles = [
        leaf.register_hook(into(buffer))
        for leaf, buffer in zip(leaves, buffers, strict=False)
        if buffer is not None and buffer.nbytes >= _LARGE and id(leaf) not in kept
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of the autograd graph of the outputs."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def leaves_behind(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every leaf that the outputs depend on, read off the autograd graph."""
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def leaves_under(node: Any) -> list[Tensor]:
    """The leaves that an autograd node gives gradients to."""
    return [parent.variable for parent, _ in node.next_functions if hasattr(parent, "variable")]
