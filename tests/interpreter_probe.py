"""A kernel with the features of Triton's interpreter that ours need: loops and branches on loaded numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(values, count, result):  # type: ignore[no-untyped-def]
    total = 0.0
    for index in range(tl.load(count)):
        total += tl.load(values + index)
    if tl.load(count) > 2:
        total += 1.0
    tl.store(result, total)


if __name__ == "__main__":
    result = torch.zeros(1)
    _sum[(1,)](torch.ones(4), torch.tensor([3], dtype=torch.int32), result)
    assert result.item() == 4.0
