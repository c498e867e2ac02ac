"""Translates NeMo-RL's GRPO configs into rollgraph's keys."""

from rollgraph.compat.nemo.ledger import LedgerLine, Status
from rollgraph.compat.nemo.translation import Translation, import_nemo

__all__ = ["LedgerLine", "Status", "Translation", "import_nemo"]
