"""Run the parity tests on the same backends as the tests of the graph runtime."""

from tests.graph.conftest import backend, device  # noqa: F401
