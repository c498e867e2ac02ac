"""The equalities run on the same backends as the tests of the runtime."""

from tests.graph.conftest import _small_census, backend, device  # noqa: F401
