"""The device that a command runs on."""

from __future__ import annotations


def choose_device(wanted: str | None) -> str:
    """The device of `--device`, or a GPU if there is one. Raises a ValueError if it does not exist."""
    import torch

    count = torch.cuda.device_count()
    if not wanted:
        return "cuda" if count else "cpu"
    kind, _, index = wanted.partition(":")
    if kind not in ("cuda", "cpu") or (":" in wanted and not index.isdecimal()):
        raise ValueError(f"--device {wanted}: expected cuda or cpu")
    if kind == "cuda" and not count:
        raise ValueError(f"--device {wanted}: no CUDA device is available; use --device cpu")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {wanted}: there are only {count} CUDA devices")
    return wanted
