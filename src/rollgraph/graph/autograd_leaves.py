"""The leaves of an autograd graph that is recorded: how to find them, and how a recording gets its own.

Owns the stand-ins for a module's parameters during a recording, and what happens to the gradients and
hooks of leaves inside a recorded backward. Knows nothing of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

_LARGE = 2**20  # bytes of a gradient; smaller ones are copied all in one launch, which is worth the memory


@contextmanager
def aliased_parameters(
    module: nn.Module | None, aliases: dict[Tensor, Tensor], shared: Container[Tensor] = ()
) -> Iterator[None]:
    """Replace a module's trainable parameters by new leaves over the same memory.

    A parameter that belongs to an autograd graph of the user's is tied to the stream of that graph, which a capture
    in another stream cannot use. A parameter that is `shared`, because the module also reaches it otherwise (through
    a list or a closure), is not replaced.
    """
    modules = list(module.modules()) if module is not None else []
    places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for child in modules:
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in shared:
                places.append((child._parameters, name, parameter))
    # An LSTM keeps a second list of its parameters, which it rebuilds when they change.
    lists = [(m, m._flat_weights, m._flat_weight_refs) for m in modules if isinstance(m, nn.RNNBase)]
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
            rnn._flat_weights = weights
            rnn._flat_weight_refs = references


def _alias(parameter: nn.Parameter) -> Tensor:
    """A new leaf with the class, attributes and version counter of the parameter: only `is` can tell them apart."""
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
    """Remove the tensor hooks of the leaves inside."""
    found: list[tuple[Any, dict[Any, Any]]] = []
    for leaf in leaves:
        hooks = leaf._backward_hooks
        if hooks:
            found.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in found:
            hooks.update(saved)


@contextmanager
def moving_out(leaves: Sequence[Tensor], buffers: Sequence[Tensor | None], users: Sequence[Tensor]) -> Iterator[None]:
    """Copy large gradients of our own leaves to their buffers as they are made: they must not pile up in the pool.

    Leaves that are among `users` are the program's own and get no hook.
    """

    def into(buffer: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: buffer.copy_(gradient)

    of_users = set(map(id, users))
    handles = []
    for leaf, buffer in zip(leaves, buffers, strict=False):
        if buffer is not None and buffer.nbytes >= _LARGE and id(leaf) not in of_users:
            handles.append(leaf.register_hook(into(buffer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of the autograd graph behind the outputs."""
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
    """Every leaf that the outputs depend on, according to the autograd graph."""
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def leaves_under(node: Any) -> list[Tensor]:
    """The leaves that an autograd node gives gradients to."""
    return [parent.variable for parent, _ in node.next_functions if hasattr(parent, "variable")]
