"""The equalities run on the same backends as the tests of the runtime."""

from tests.graph.conftest import backend, device  # noqa: F401
