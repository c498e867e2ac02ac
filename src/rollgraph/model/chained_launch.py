"""Kernels that start while the kernel before them still runs, which hides what a launch costs.

The kernel before says that the next one may start (`gdc_launch_dependents`). The next one reads what it needs of the
weights, waits for the results of the kernel before (`gdc_wait`), and goes on. CUDA calls it programmatic dependent
launch; it is captured with a graph. After a kernel of a library, which does not say so, it costs time instead.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def can_chain(device: torch.device) -> bool:
    """Whether the device can start kernels early: NVIDIA's can since Hopper."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
