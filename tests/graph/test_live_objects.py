"""Captures find every live object without searching all objects each time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rollgraph.graph import capture
from rollgraph.graph.state.transaction import _MAX_IDLE_COLLECTIONS, LiveObjects, ProgramObjects, _live_objects

WALKS: list[Any] = []  # the generation of each call of gc.get_objects, while _recording is on
_recording = [False]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "gc.get_objects" and _recording[0]:
        WALKS.append(arguments[0])


@pytest.fixture
def full_walks() -> Iterator[list[Any]]:
    """Every search over all objects of the process, as the interpreter's audit events report it."""
    if not hasattr(sys, "_rollgraph_audited"):
        sys.addaudithook(_audit)  # for good: an audit hook cannot be removed
        sys._rollgraph_audited = True  # type: ignore[attr-defined]
    WALKS.clear()
    _recording[0] = True
    yield WALKS
    _recording[0] = False


def holds(objects: list[Any], target: Any) -> bool:
    return any(item is target for item in objects)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this collector has no generations")
def test_many_captures_search_all_objects_once(full_walks: list[Any]) -> None:
    gc.unfreeze()  # with the objects of PyTorch alone, there are many
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.no_grad():
        graphs = [capture(lambda x: model(x), (x,)) for _ in range(10)]
    assert len(graphs) == 10
    assert len([generation for generation in full_walks if generation == -1]) <= 1


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this collector has no generations")
def test_a_search_that_finds_thousands_of_tensors_is_not_repeated(full_walks: list[Any]) -> None:
    """Although recording so many tensors triggers garbage collections itself."""
    gc.unfreeze()
    _live_objects._stop_tracking()
    tensors = [torch.empty(0) for _ in range(20_000)]
    objects = LiveObjects()
    gc.collect()
    for _ in range(3):
        assert len(objects.find()) >= len(tensors)
    objects._stop_tracking()
    assert full_walks.count(-1) == 1


@pytest.mark.parametrize("collect", [None, 0, 1, 2])
def test_objects_created_after_a_capture_are_found_by_the_next(collect: int | None) -> None:
    ProgramObjects()
    model = nn.Linear(2, 2)
    leaf = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters())
    if collect is not None:
        for _ in range(3):  # into the oldest generation
            gc.collect(collect)
    program = ProgramObjects()
    assert holds(program.modules, model)
    assert holds(program.leaves, leaf)
    assert holds(program.leaves, model.weight)
    assert holds(program.optimizers, optimizer)


def test_a_tensor_that_becomes_trainable_later_is_found() -> None:
    tensor = torch.zeros(3)
    assert not holds(ProgramObjects().leaves, tensor)
    tensor.requires_grad_()
    assert holds(ProgramObjects().leaves, tensor)


def test_an_object_of_a_class_defined_later_is_found() -> None:
    ProgramObjects()

    class New(nn.Module):
        pass

    module = New()
    assert holds(ProgramObjects().modules, module)


def test_an_object_frozen_and_thawed_is_found() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    gc.freeze()
    ProgramObjects()
    gc.unfreeze()
    assert holds(ProgramObjects().leaves, leaf)


def test_an_object_frozen_and_thawed_between_two_captures_is_found() -> None:
    gc.unfreeze()
    ProgramObjects()
    leaf = torch.zeros(3, requires_grad=True)
    gc.freeze()
    gc.unfreeze()
    assert holds(ProgramObjects().leaves, leaf)


def test_callbacks_cleared_by_other_code_are_noticed() -> None:
    ProgramObjects()
    before = list(gc.callbacks)
    gc.callbacks.clear()
    try:
        leaf = torch.zeros(3, requires_grad=True)
        gc.collect()
        assert holds(ProgramObjects().leaves, leaf)
    finally:
        gc.callbacks[:] = before


def test_dead_objects_are_neither_kept_alive_nor_returned() -> None:
    module = nn.Linear(2, 2)
    count = len(ProgramObjects().modules)
    del module
    gc.collect()
    assert len(ProgramObjects().modules) == count - 1


def test_the_collector_is_left_alone_once_captures_are_over() -> None:
    ProgramObjects()
    for _ in range(_MAX_IDLE_COLLECTIONS + 2):
        gc.collect(1)
    assert not any("LiveObjects" in repr(callback) for callback in gc.callbacks)
    leaf = torch.zeros(3, requires_grad=True)
    assert holds(ProgramObjects().leaves, leaf)
