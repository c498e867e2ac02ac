"""A remark about one CUDA-graph key of a config. Owns the kinds of remarks and which of them are serious."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LintKind(StrEnum):
    CONTRADICTORY = "contradictory"
    CAPTURES_NOTHING = "captures nothing"
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"
    NO_EFFECT = "no effect"


SERIOUS = (LintKind.CONTRADICTORY, LintKind.CAPTURES_NOTHING)  # the run fails, or does not do what the file says


@dataclass(frozen=True)
class Remark:
    """For example `Remark(LintKind.DEPRECATED, "a.yaml:7", "policy.megatron_cfg.enable_cuda_graph", "...", "...")`."""

    kind: LintKind
    place: str  # file:line
    key: str
    text: str
    advice: str

    @property
    def serious(self) -> bool:
        return self.kind in SERIOUS
