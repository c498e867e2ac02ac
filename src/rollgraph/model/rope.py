"""Rotary position embeddings (RoPE): frequencies, and how a `config.json` describes them. `layers.py` applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor

from rollgraph.model.field_kinds import (
    ABOVE_ONE,
    FLAG,
    NOT_NEGATIVE,
    OPTIONS,
    POSITIVE,
    POSITIVE_OR_NULL,
    REQUIRED,
    ArchitectureError,
    FieldKind,
    take_field,
)

_DEFAULT_THETA = 10_000.0

# The options of each kind of scaling: allowed values and default.
_OPTIONS_OF: dict[str, dict[str, tuple[FieldKind, Any]]] = {
    "default": {},
    "linear": {"factor": (POSITIVE, REQUIRED)},
    "llama3": {
        "factor": (POSITIVE, REQUIRED),
        "low_freq_factor": (POSITIVE, REQUIRED),
        "high_freq_factor": (POSITIVE, REQUIRED),
        "original_max_position_embeddings": (POSITIVE, None),
    },
    "yarn": {
        "factor": (POSITIVE_OR_NULL, REQUIRED),
        "original_max_position_embeddings": (POSITIVE, None),
        "beta_fast": (NOT_NEGATIVE, None),
        "beta_slow": (NOT_NEGATIVE, None),
        "attention_factor": (NOT_NEGATIVE, None),
        "mscale": (NOT_NEGATIVE, None),
        "mscale_all_dim": (NOT_NEGATIVE, None),
        "truncate": (FLAG, True),
    },
}


@dataclass(frozen=True)
class Rope:
    """The base of the frequencies, and how they are scaled for longer contexts."""

    theta: float = _DEFAULT_THETA
    kind: str = "default"  # default, linear, llama3 or yarn
    options: Mapping[str, Any] = field(default_factory=dict)  # by their Hugging Face names

    def frequencies(self, head_dim: int, max_length: int) -> tuple[Tensor, float]:
        """The frequency of each pair of dimensions, [head_dim / 2] on the CPU, and a factor of cosine and sine."""
        plain = 1.0 / self._periods(head_dim)
        if self.kind == "default":
            return plain, 1.0
        original = float(self.options.get("original_max_position_embeddings") or max_length)
        factor = float(self.options["factor"] or max_length / original)
        if self.kind == "linear":
            return plain / factor, 1.0
        if self.kind == "llama3":
            return self._llama3(plain, factor, original), 1.0
        return self._yarn(factor, original, head_dim)

    def _periods(self, head_dim: int) -> Tensor:
        return self.theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)

    def _llama3(self, plain: Tensor, factor: float, original: float) -> Tensor:
        """Slow down the low frequencies, keep the high ones, and blend those in between."""
        low = float(self.options["low_freq_factor"])
        high = float(self.options["high_freq_factor"])
        wavelength = 2 * pi / plain
        unscaled_fraction = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - unscaled_fraction) * plain / factor + unscaled_fraction * plain

    def _yarn(self, factor: float, original: float, head_dim: int) -> tuple[Tensor, float]:
        """The order of operations is that of transformers, so that frequencies are equal bit for bit."""
        low, high = self._yarn_range(original, head_dim)
        ramp = ((torch.arange(head_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
        unscaled_fraction = 1 - ramp
        periods = self._periods(head_dim)
        frequencies = 1.0 / (factor * periods) * (1 - unscaled_fraction) + 1.0 / periods * unscaled_fraction
        scale = self.options.get("attention_factor")
        if scale is None:
            scale = _yarn_scale(factor, self.options.get("mscale"), self.options.get("mscale_all_dim"))
        return frequencies, float(scale)

    def _yarn_range(self, original: float, head_dim: int) -> tuple[float, float]:
        """The dimensions at which blending begins and ends.

        The end can be smaller than the beginning, if the original length is short or `beta_slow` is the larger beta.
        Then low frequencies stay and high ones slow down, as in transformers.
        """

        def dimension(rotations: float) -> float:
            return head_dim * log(original / (rotations * 2 * pi)) / (2 * log(self.theta))

        low = dimension(float(self.options.get("beta_fast") or 32))
        high = dimension(float(self.options.get("beta_slow") or 1))
        if self.options.get("truncate", True):
            low = floor(low)
            high = ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        if low == high:
            high += 0.001  # the ramp divides by their difference
        return low, high


def _yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def read_rope(unread: dict[str, Any]) -> Rope:
    """Remove `rope_parameters` (newer files), or `rope_theta` and `rope_scaling` (older ones), from a config.json.

    As in transformers, `rope_scaling` replaces `rope_parameters` entirely if a file has both.
    """
    newer = take_field(unread, "rope_parameters", OPTIONS, None)
    older = take_field(unread, "rope_scaling", OPTIONS, None)
    outer_theta = take_field(unread, "rope_theta", ABOVE_ONE, None)
    options = dict(older or newer or {})
    theta = float(take_field(options, "rope_theta", ABOVE_ONE, None) or outer_theta or _DEFAULT_THETA)
    old_name = options.pop("type", None)
    kind = options.pop("rope_type", None) or old_name or "default"
    if kind not in list(_OPTIONS_OF):  # a list, because the value may not be hashable
        raise ArchitectureError(f"rope_type={kind!r:.80} is not supported; use default, linear, llama3 or yarn")
    if options.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ArchitectureError("partial_rotary_factor is not supported: the decoder rotates all dimensions")
    if kind in ("llama3", "yarn"):
        length = take_field(unread, "original_max_position_embeddings", POSITIVE, None)
        if length:
            options["original_max_position_embeddings"] = length
    for name, (expected, default) in _OPTIONS_OF[kind].items():
        take_field(dict(options), name, expected, default)  # a copy: this only checks
    if kind == "default":
        return Rope(theta)
    return Rope(theta, kind, options)
