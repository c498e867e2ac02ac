"""Repairs for megatron-core: one call before the model is built, without edits to the code that uses it.

`findings` reports what is broken in this process, `repair` repairs it, and `undo` reverts that. `repeatable_train` and
`reference_weights` are context managers for your own training loop. Importing this package does not import megatron.
"""

from rollgraph.compat.megatron.graph_settings import graph_overrides
from rollgraph.compat.megatron.patch import CannotRepair
from rollgraph.compat.megatron.reference_weights import reference_weights
from rollgraph.compat.megatron.registry import findings, repair, undo
from rollgraph.compat.megatron.repeatable_train import repeatable_train

__all__ = ["CannotRepair", "findings", "graph_overrides", "reference_weights", "repair", "repeatable_train", "undo"]
