"""Samples for people to read: whole groups, so that the rollouts of a prompt can be compared."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rollgraph.telemetry.jsonl import Note, open_to_append, tell, truncate_jsonl
from rollgraph.telemetry.token_values import SampleDetails, TokenTexts, describe_tokens
from rollgraph.types import Rollout

NOTHING_MORE = SampleDetails()


class SampleWriter:
    """Writes some groups of every `every`-th step, and of every validation, to `samples.jsonl`: a line per rollout.

    The groups of a step are drawn by the seed and the step, so a resumed run writes what an undisturbed one does.
    Those of a validation are always the same, so that people see the answers to a prompt change. `weights` are those of
    the reward functions. With `texts`, completions of up to `longest` tokens have a value for each token.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        groups: int,
        seed: int = 0,
        weights: Mapping[str, float] | None = None,
        texts: TokenTexts | None = None,
        longest: int = 0,
        resume_at: int | None = None,
        note: Note = tell,
    ) -> None:
        self._path = folder / "samples.jsonl"
        self._every = every
        self._groups = groups
        self._seed = seed
        self._weights = weights or {}
        self._texts = texts
        self._longest = longest
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_jsonl(self._path, resume_at - 1, note)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        dropped: Sequence[Rollout] = (),
        details: Mapping[int, SampleDetails] | None = None,
    ) -> bool:
        """Whether anything was written for this step.

        `advantages` has one number per rollout. `dropped` were sampled in this step and are not trained on; their
        groups have other numbers. `details` are by place among the rollouts and then the dropped ones.
        """
        if len(rollouts) != len(advantages):
            raise ValueError(f"{len(rollouts)} rollouts with {len(advantages)} advantages")
        known = details or {}
        everything = [*rollouts, *dropped]
        chosen = choose_groups(everything, self._groups, every=self._every, seed=self._seed, step=step)
        rows = []
        for place, rollout in enumerate(everything):
            if rollout.group in chosen:
                kept = place < len(rollouts)
                row = {"step": step, "split": "train" if kept else "dropped"}
                row |= self._describe(rollout, known.get(place, NOTHING_MORE))
                rows.append(row | {"advantage": advantages[place] if kept else None})
        return self._append(rows)

    def write_validation(self, step: int, rollouts: Sequence[Rollout]) -> bool:
        """Whether anything was written for the validation after this step."""
        if self._every == 0:
            return False
        chosen = _draw(rollouts, self._groups, f"{self._seed}/validation")
        rows = []
        for rollout in rollouts:
            if rollout.group in chosen:
                described = self._describe(rollout, NOTHING_MORE)
                rows.append({"step": step, "split": "validation", **described, "advantage": None})
        return self._append(rows)

    def _describe(self, rollout: Rollout, details: SampleDetails) -> dict[str, Any]:
        weighted = {name: self._weights.get(name, 1.0) * value for name, value in rollout.rewards.items()}
        described = {
            "group": rollout.group,
            "prompt_id": rollout.prompt.id,
            "prompt": rollout.prompt.text,
            "columns": dict(rollout.prompt.columns),
            "completion": rollout.text,
            "reward": rollout.reward,
            "rewards": rollout.rewards,
            "weighted_rewards": weighted,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.tokens),
            "spans": [span._asdict() for span in rollout.spans] or find_spans(rollout.sampled),
        }
        if rollout.extra:
            described["extra"] = rollout.extra
        if rollout.failures:
            described["failures"] = rollout.failures
        if details.left_out:
            described["left_out"] = details.left_out
        if self._texts is not None and self._longest:
            described["token_values"] = describe_tokens(rollout, self._texts, self._longest, details)
        return described

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        if not rows:
            return False
        with open_to_append(self._path) as file:
            for row in rows:
                # A column of a Parquet file can be a date or a decimal number.
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return True


def choose_groups(rollouts: Sequence[Rollout], count: int, *, every: int, seed: int, step: int) -> set[int]:
    """The groups of a step that are written; none at most steps. Every rank chooses the same."""
    if every == 0 or step % every:
        return set()
    return _draw(rollouts, count, f"{seed}/{step}")


def _draw(rollouts: Sequence[Rollout], count: int, seed: str) -> set[int]:
    groups = sorted({rollout.group for rollout in rollouts})
    return set(random.Random(seed).sample(groups, min(count, len(groups))))


def find_spans(sampled: Sequence[bool]) -> list[dict[str, Any]]:
    """The turns of the policy and the replies of an environment, as ranges of tokens.

    >>> find_spans([True, True, False])
    [{'start': 0, 'end': 2, 'kind': 'turn'}, {'start': 2, 'end': 3, 'kind': 'reply'}]
    """
    spans: list[dict[str, Any]] = []
    start = 0
    for is_sampled, tokens in groupby(sampled):
        end = start + len(list(tokens))
        spans.append({"start": start, "end": end, "kind": "turn" if is_sampled else "reply"})
        start = end
    return spans
