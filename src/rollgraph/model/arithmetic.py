"""The version of the arithmetic on each kind of device, and the size of the parts of a row of logits.

The bits of a run depend on both. Raise the version with every change after which the same run would have other bits,
and name the change in CHANGELOG.md. A checkpoint records the version, and a resume under another one is refused unless
it is allowed.
"""

from __future__ import annotations

# -- versions --------------------------------------------------------------------------------------

ARITHMETIC = {"cpu": 2, "cuda": 1}


# -- parts of a row of logits ----------------------------------------------------------------------
# Kernels and PyTorch share them: the bounds of the parts decide how sums round and which noise draws a token.

PART = 4096  # logits


def part_count(vocabulary: int) -> int:
    """The number of parts of a row. The last one may be shorter."""
    return -(-vocabulary // PART)
