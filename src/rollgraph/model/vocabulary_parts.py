"""The parts of a row of logits: each is added up on its own, and a token is drawn from one of them.

Kernels and PyTorch share them, because where the parts begin decides how sums round and which noise draws a token.
"""

from __future__ import annotations

PART = 4096  # logits


def part_count(vocabulary: int) -> int:
    """How many parts a row has. The last one may be shorter."""
    return -(-vocabulary // PART)
