"""Repairs for megatron-core: one call before the model is built, and no edit of the code that uses it.

`findings` says what is broken in this process, `repair` repairs it, `undo` takes that back. `repeatable_train` and
`reference_weights` are for training loops of one's own. Importing this imports nothing of megatron.
"""

from rollgraph.compat.megatron.graph_settings import graph_overrides
from rollgraph.compat.megatron.patch import CannotRepair
from rollgraph.compat.megatron.reference_weights import reference_weights
from rollgraph.compat.megatron.registry import findings, repair, undo
from rollgraph.compat.megatron.repeatable_train import repeatable_train

__all__ = ["CannotRepair", "findings", "graph_overrides", "reference_weights", "repair", "repeatable_train", "undo"]
