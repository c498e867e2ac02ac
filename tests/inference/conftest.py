"""Engines run on the tape (CPU) and, on a machine with a GPU, on CUDA graphs."""

from __future__ import annotations

import pytest

from rollgraph.inference import Engine
from rollgraph.model import Decoder
from tests.inference.tiny_engine import make_engine, make_model


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(device: str) -> Decoder:
    return make_model(device)


@pytest.fixture(scope="module")
def engine(model: Decoder) -> Engine:
    return make_engine(model)


@pytest.fixture(autouse=True)
def _engine_ends_idle(request: pytest.FixtureRequest) -> object:
    """After every test, all blocks and rows are free again, and nothing was captured again or run eagerly."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        blocks = engine._scheduler.blocks
        assert blocks.free == blocks.capacity
        assert not engine._scheduler.has_work
        assert all(graph.record.captures == 1 and not graph.record.eager_runs for graph in engine.pool.graphs)
