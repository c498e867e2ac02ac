"""How large a model may be: beyond these sizes a file is damaged, and building its model would take for ever."""

from __future__ import annotations

LARGEST = {
    "layers": 1024,
    "hidden": 2**20,
    "mlp": 2**22,
    "heads": 2**14,
    "head_dim": 2**14,
    "vocabulary": 2**24,
    "length": 2**31 - 1,
}
