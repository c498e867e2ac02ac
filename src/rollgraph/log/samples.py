"""Samples for people to read: whole groups with values per token, in samples.jsonl and in a terminal."""

from __future__ import annotations

import json
import math
import random
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from rollgraph.files import reporting_full_disk
from rollgraph.log.metrics import Notify, open_to_append, truncate_jsonl
from rollgraph.log.progress import format_number
from rollgraph.log.streams import note_to_stderr
from rollgraph.types import Rollout

# -- values per token ------------------------------------------------------------------------------

TokenTexts = Callable[[Sequence[int]], list[str]]  # the text of each token; joined, they are the text of all tokens
DIGITS = 5  # significant digits, which is more than a colour can show

NO_REFERENCE = "the reference policy did not score this sample; it does with algorithm.kl_coef"
NOT_TRAINED = "this sample was not trained on"


@dataclass(frozen=True)
class SampleDetails:
    """Facts about a rollout that training computes. Each sequence has one value per token of the rollout."""

    advantages: Sequence[float] | None = None
    updated_logprobs: Sequence[float] | None = None  # under the policy after the update of the step
    entropies: Sequence[float] | None = None  # of the same policy
    left_out: str = ""  # why the rollout is not trained on; empty if it is


@dataclass(frozen=True)
class TokenColumns:
    """Values per token by name, and for each missing column the reason."""

    values: dict[str, list[float | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, column: Sequence[float] | None, sampled: Sequence[bool], reason: str) -> None:
        """Add a column. Tokens that the policy did not sample have no value."""
        if column is None:
            self.missing[name] = reason
        else:
            self.values[name] = [_rounded(value) if on else None for value, on in zip(column, sampled, strict=True)]


def describe_token_columns(
    rollout: Rollout, texts: TokenTexts, token_value_limit: int, details: SampleDetails
) -> dict[str, Any]:
    """The values per token of a rollout, ready for JSON.

    `kl` is log(policy / reference), the contribution of the token to the KL. `ratio` is the token's probability after
    the update of the step, divided by its probability before. `entropy` is the policy's after the update.
    """
    if len(rollout.tokens) > token_value_limit:
        return {"absent": {"text": f"it has more than {token_value_limit} tokens, the limit of log.token_values"}}
    columns = TokenColumns()
    logprobs = rollout.logprobs
    columns.add("logprob", logprobs, rollout.sampled, "")
    columns.add("advantage", details.advantages, rollout.sampled, NOT_TRAINED)
    ratio = None
    if details.updated_logprobs is not None:
        ratio = [_exp(new - old) for new, old in zip(details.updated_logprobs, logprobs, strict=True)]
    columns.add("ratio", ratio, rollout.sampled, NOT_TRAINED)
    kl = None
    if rollout.reference_logprobs is not None:
        kl = [policy - reference for policy, reference in zip(logprobs, rollout.reference_logprobs, strict=True)]
    columns.add("kl", kl, rollout.sampled, NO_REFERENCE)
    columns.add("entropy", details.entropies, rollout.sampled, NOT_TRAINED)
    return {"text": texts(rollout.tokens), **columns.values, "absent": columns.missing}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


# -- choosing and writing groups -------------------------------------------------------------------

NO_DETAILS = SampleDetails()


class SampleWriter:
    """Writes some groups of every `every`-th step and of every validation to `samples.jsonl`, one line per rollout.

    The groups of a step are drawn with the seed and the step, so a resumed run writes the same as an uninterrupted one.
    The groups of a validation are always the same, so that people see how the answers to a prompt change. `groups` is
    the number of groups written per step, and `reward_weights` has the weight of each reward function. With `texts`,
    completions of up to `token_value_limit` tokens get values per token. A run that resumes at step `resume_at` first
    removes the rows of that step and later ones.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        groups: int,
        seed: int = 0,
        reward_weights: Mapping[str, float] | None = None,
        texts: TokenTexts | None = None,
        token_value_limit: int = 0,
        resume_at: int | None = None,
        note: Notify = note_to_stderr,
    ) -> None:
        self._path = folder / "samples.jsonl"
        self._every = every
        self._groups = groups
        self._seed = seed
        self._reward_weights = reward_weights or {}
        self._texts = texts
        self._token_value_limit = token_value_limit
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_jsonl(self._path, resume_at - 1, note)  # keeps the rows up to that step

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        dropped: Sequence[Rollout] = (),
        details: Mapping[int, SampleDetails] | None = None,
    ) -> list[dict[str, Any]]:
        """Write some groups of this step, and return their rows.

        `advantages` has one number per rollout. `dropped` rollouts were sampled, too, but are not trained on; their
        groups have other numbers. The keys of `details` are indices into `[*rollouts, *dropped]`.
        """
        if len(rollouts) != len(advantages):
            raise ValueError(f"{len(rollouts)} rollouts with {len(advantages)} advantages")
        details = details or {}
        all_rollouts = [*rollouts, *dropped]
        groups = choose_groups(all_rollouts, self._groups, every=self._every, seed=self._seed, step=step)
        rows = []
        for index, rollout in enumerate(all_rollouts):
            if rollout.group in groups:
                is_trained_on = index < len(rollouts)
                row = {"step": step, "split": "train" if is_trained_on else "dropped"}
                row |= self._describe(rollout, details.get(index, NO_DETAILS))
                rows.append(row | {"advantage": advantages[index] if is_trained_on else None})
        return self._append(rows)

    def write_validation(self, step: int, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        """Write some groups of the validation after this step, and return their rows."""
        if self._every == 0:
            return []
        groups = _draw_groups(rollouts, self._groups, f"{self._seed}/validation")
        rows = []
        for rollout in rollouts:
            if rollout.group in groups:
                row = self._describe(rollout, NO_DETAILS)
                rows.append({"step": step, "split": "validation", **row, "advantage": None})
        return self._append(rows)

    def _describe(self, rollout: Rollout, details: SampleDetails) -> dict[str, Any]:
        """A row of samples.jsonl, without the step, the split and the advantage."""
        weighted = {name: self._reward_weights.get(name, 1.0) * value for name, value in rollout.rewards.items()}
        row = {
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
            row["extra"] = rollout.extra
        if rollout.failures:
            row["failures"] = rollout.failures
        if details.left_out:
            row["left_out"] = details.left_out
        if self._texts is not None and self._token_value_limit:
            row["token_values"] = describe_token_columns(rollout, self._texts, self._token_value_limit, details)
        return row

    def _append(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if rows:
            # A column of a Parquet file can be a date or a decimal number.
            lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
            with reporting_full_disk(self._path, sum(map(len, lines))), open_to_append(self._path) as file:
                file.writelines(lines)
        return rows


def choose_groups(rollouts: Sequence[Rollout], count: int, *, every: int, seed: int, step: int) -> set[int]:
    """The groups of a step to write, none at most steps. Every rank chooses the same groups."""
    if every == 0 or step % every:
        return set()
    return _draw_groups(rollouts, count, f"{seed}/{step}")


def _draw_groups(rollouts: Sequence[Rollout], count: int, seed: str) -> set[int]:
    groups = sorted({rollout.group for rollout in rollouts})
    return set(random.Random(seed).sample(groups, min(count, len(groups))))


def find_spans(sampled: Sequence[bool]) -> list[dict[str, Any]]:
    """The policy's turns and the environment's replies, as ranges of tokens.

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


# -- samples as text -------------------------------------------------------------------------------
# Each sample is a row of samples.jsonl.

WIDTH = 80  # columns of a formatted sample
INDENT = 12  # columns for the names in a formatted sample
LONGEST_PROMPT, LONGEST_COMPLETION = 24, 40  # columns, in a sample on one line
_SECOND_COLUMN = "\0"  # placeholder after a wide character, while we count columns
Row = Mapping[str, Any]


def first_of_each_group(rows: Iterable[Row]) -> list[Row]:
    """The first sample of each group."""
    first: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        first.setdefault((row.get("split"), row.get("group")), row)
    return list(first.values())


def format_one_line(row: Row) -> str:
    r"""One sample in a few words.

    >>> format_one_line({"prompt": "Add 93 and\n56:", "completion": "149", "reward": 1.0})
    'Add 93 and 56: → 149 (1)'
    """
    prompt = _shorten(row["prompt"], LONGEST_PROMPT)
    completion = _shorten(row["completion"], LONGEST_COMPLETION)
    return f"{prompt} → {completion} ({format_number(row['reward'])})"


def format_sample(row: Row) -> list[str]:
    """A sample with its texts and rewards, in lines of at most `WIDTH` columns."""
    lines = [f"── reward {format_number(row['reward'])} ".ljust(WIDTH, "─")]
    texts = {"prompt": row["prompt"], "completion": row["completion"], **row.get("columns", {})}
    parts = row.get("rewards", {})
    if len(parts) > 1:
        texts["rewards"] = ", ".join(f"{name} {format_number(value)}" for name, value in parts.items())
    tokens = row.get("tokens")
    texts["ended by"] = f"{row.get('finish_reason')}, after {tokens} {'token' if tokens == 1 else 'tokens'}"
    for name, text in texts.items():
        lines += _text_lines(name, str(text))
    return [line.rstrip() for line in lines]


def _text_lines(name: str, text: str) -> list[str]:
    """A name followed by its text, with all lines of the text aligned."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        wrapped = textwrap.wrap(_pad_wide_characters(line), WIDTH - INDENT, replace_whitespace=False)
        lines += [part.replace(_SECOND_COLUMN, "") for part in wrapped] or [""]
    head = _shorten(name, INDENT - 1).ljust(INDENT)
    return [(head if index == 0 else " " * INDENT) + line for index, line in enumerate(lines)]


def _shorten(text: str, longest: int) -> str:
    line = " ".join(_pad_wide_characters(text).split())
    shown = line if len(line) <= longest else line[: longest - 1] + "…"
    return shown.replace(_SECOND_COLUMN, "")


def _pad_wide_characters(text: str) -> str:
    """The text with one character per terminal column, and none that moves the cursor."""
    characters = (character if character.isprintable() else " " for character in text)
    return "".join(one + _SECOND_COLUMN if east_asian_width(one) in "WF" else one for one in characters)
