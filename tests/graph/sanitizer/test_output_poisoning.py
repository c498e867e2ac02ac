"""Outputs under the sanitizer: when they are poisoned, and which reads of them are reported."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture, sanitize


def test_replaying_a_graph_poisons_the_outputs_of_graphs_captured_later() -> None:
    """On a GPU, the first graph's temporaries share memory with the second graph's output."""
    pool = GraphPool()
    with sanitize() as findings:
        first = capture(lambda x: (x * 2).sum(), (torch.ones(2),), pool=pool)
        second = capture(lambda x: x * 3, (torch.ones(2),), pool=pool)
        kept = second(torch.ones(2))
        first(torch.ones(2))
        assert torch.isnan(kept).all()
    assert [f.kind for f in findings] == ["stale-output"]


def test_resetting_a_graph_poisons_its_outputs() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        kept = graph(torch.ones(2))
        graph.reset()
        _ = kept + 1
    assert [f.kind for f in findings] == ["stale-output"]


def test_outputs_are_not_kept_alive() -> None:
    with sanitize():
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        kept = weakref.ref(graph(torch.ones(2)).untyped_storage())
        for _ in range(2):
            graph(torch.ones(2))
        gc.collect()
        assert kept() is None


def test_state_that_a_function_returns_is_not_copied() -> None:
    state = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        return state.add_(x)

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2),))
        graph(torch.ones(2)).zero_()
        graph(torch.ones(2))
    assert torch.equal(state, torch.ones(2))
    assert not len(findings), findings


def test_operations_that_read_no_value_of_a_poisoned_output_are_clean() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        old = graph(torch.ones(2))
        graph(torch.ones(2))
        torch.zeros_like(old)
        old.new_empty(3)
        torch.add(torch.ones(2), 1, out=old)
        old.copy_(torch.ones(2))
        _ = old + 1  # valid again: the program has overwritten it
    assert not len(findings), findings


def test_a_stale_read_is_reported_once() -> None:
    with sanitize() as findings:
        graph, next_graph = (capture(lambda x: x * 2, (torch.ones(1),)) for _ in range(2))
        old = graph(torch.ones(1))
        graph(torch.ones(1))
        old.item()
        next_graph(old)
    assert [finding.kind for finding in findings] == ["stale-output"] * 2
    assert len({finding.where.line for finding in findings}) == 2


def test_an_output_saved_by_autograd_is_reported_when_its_backward_fails() -> None:
    weight, seen = torch.ones(2, requires_grad=True), []

    def program() -> None:
        with sanitize() as findings:
            seen.append(findings)
            graph = capture(lambda x: x * 2, (torch.ones(2),))
            loss = (graph(torch.ones(2)) * weight).sum()
            graph(torch.ones(2))
            loss.backward()

    with pytest.raises(RuntimeError, match="inplace"):
        program()
    assert [finding.kind for finding in seen[0]] == ["stale-output"]


def test_a_backward_that_fails_for_another_reason_is_not_reported() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen = []

    def program() -> None:
        with sanitize() as findings:
            seen.append(findings)
            graph = capture(lambda x: x * 2, (torch.ones(2),))
            kept = graph(torch.ones(2))
            graph(torch.ones(2))
            loss = (weight * weight).sum()
            loss.backward()
            loss.backward()
            del kept

    with pytest.raises(RuntimeError, match="second time"):
        program()
    assert not len(seen[0]), seen[0]
