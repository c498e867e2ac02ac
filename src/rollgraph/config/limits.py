"""The largest sizes of a model that are accepted. A file with larger ones is damaged, and building its model would
take forever."""

from __future__ import annotations

LARGEST = {
    "layers": 1024,
    "hidden": 2**20,
    "mlp": 2**22,
    "heads": 2**14,
    "head_dim": 2**14,
    "vocabulary": 2**24,
    "length": 2**31 - 1,
    "rank": 1024,  # of an adapter
}
