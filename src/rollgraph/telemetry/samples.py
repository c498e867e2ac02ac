"""Sample completions for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollgraph.telemetry.jsonl import Note, open_to_append, tell, truncate_jsonl
from rollgraph.types import Rollout


class SampleWriter:
    """Writes some rollouts of every `every`-th step to `samples.jsonl`, one JSON object each."""

    def __init__(
        self, folder: Path, every: int, most: int = 64, resume_at: int | None = None, note: Note = tell
    ) -> None:
        self._path = folder / "samples.jsonl"
        self._every = every
        self._most = most
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_jsonl(self._path, resume_at - 1, note)

    def write(self, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> bool:
        """Whether anything was written for this step. `advantages` has one number per rollout."""
        if len(rollouts) != len(advantages):
            raise ValueError(f"{len(rollouts)} rollouts with {len(advantages)} advantages")
        if self._every == 0 or step % self._every:
            return False
        with open_to_append(self._path) as file:
            for rollout, advantage in list(zip(rollouts, advantages, strict=True))[: self._most]:
                row = {
                    "step": step,
                    "prompt": rollout.prompt.text,
                    "completion": rollout.text,
                    "reward": rollout.reward,
                    "rewards": rollout.rewards,
                    "advantage": advantage,
                    "finish_reason": rollout.finish_reason,
                    "tokens": len(rollout.tokens),
                    "prompt_id": rollout.prompt.id,
                }
                if rollout.extra:
                    row["extra"] = rollout.extra
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return True
