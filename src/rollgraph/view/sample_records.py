"""Samples as the page shows them: a line of a group, or all of one completion with its turns and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollgraph.types import ENVIRONMENT
from rollgraph.view.growing_lines import finite
from rollgraph.view.samples_index import KINDS, has_failed, length_of

PREVIEW = 400  # characters
PER_TOKEN = ("logprob", "advantage", "ratio", "entropy", "kl")
NOT_WRITTEN = "This run did not write values of single tokens."
ROLES = {"turn": "policy", "reply": "environment"}


def sample_id(step: int, kind: int, group: int, position: int) -> str:
    """The address of a sample, the same for as long as the run does not take the step again."""
    return f"{step}.{KINDS[kind]}.{group}.{position}"


def parse_id(id: str) -> tuple[int, int, int, int] | None:
    parts = id.split(".")
    try:
        step, kind, group, position = int(parts[0]), KINDS.index(parts[1]), int(parts[2]), int(parts[3])
    except (ValueError, IndexError):
        return None
    return (step, kind, group, position) if len(parts) == 4 and position >= 0 else None


def short(id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a sample beside the others of its group."""
    text = str(record.get("completion", ""))
    finish = str(record.get("finish_reason", ""))
    return {
        "id": id,
        "reward": number(record.get("reward")),
        "rewards": numbers(record.get("rewards")),
        "weighted_rewards": numbers(record.get("weighted_rewards")),
        "advantage": number(record.get("advantage")),
        "tokens": length_of(record),
        "length": len(text),
        "finish": finish,
        "truncated": finish == "length",
        "failed": has_failed(record),
        "reasons": reasons(record),
        "text_preview": text[:PREVIEW],
    }


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Why a sample is not what it could have been: cut off, left out or failed."""
    found = []
    finish = record.get("finish_reason")
    if finish == "length":
        found.append("The completion was cut off at a limit of tokens.")
    if finish == "abort":
        found.append("The completion was given up before its end.")
    failures = record.get("failures")
    if isinstance(failures, Mapping):
        for label, message in failures.items():
            who = "The environment" if label == ENVIRONMENT else f"The reward {label}"
            found.append(f"{who} failed: {message}.")
    elif finish == "error":
        found.append("The environment failed.")
    if left_out := record.get("left_out"):
        found.append(f"It was not trained on: {left_out}.")
    elif record.get("split") == "dropped":
        found.append("Its group was sampled but not trained on: the algorithm did not keep it.")
    return found


def whole(id: str, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Everything about one sample, and notes on what is missing."""
    tokens, notes = token_values(record)
    turns: list[dict[str, Any]] = [
        {"role": "prompt", "text": str(record.get("prompt", "")), "tokens": None, "reward": None}
    ]
    spans = record.get("spans")
    spans = [span for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    completion = str(record.get("completion", ""))
    for span in spans or [{"kind": "turn"}]:
        inside = None
        if tokens is not None:
            inside = tokens[_index(span.get("start"), 0) : _index(span.get("end"), len(tokens))]
        text = span.get("text")
        if text is None:
            text = completion if len(spans) <= 1 else _joined(inside)
        turns.append(
            {
                "role": ROLES.get(str(span.get("kind")), "policy"),
                "text": str(text),
                "tokens": inside,
                "reward": number(span.get("reward")),
            }
        )
    sample = {
        **short(id, record),
        "step": record.get("step"),
        "group": record.get("group"),
        "kind": record.get("split"),
        "prompt": str(record.get("prompt", "")),
        "columns": mapping(record.get("columns")),
        "completion": completion,
        "turns": turns,
        "extra": mapping(record.get("extra")),
    }
    return sample, notes


def token_values(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """One entry for each token of the completion; None if the run wrote none."""
    values = record.get("token_values")
    texts = values.get("text") if isinstance(values, Mapping) else None
    absent = values.get("absent") if isinstance(values, Mapping) else None
    why = absent if isinstance(absent, Mapping) else {}
    if not isinstance(values, Mapping) or not isinstance(texts, list):
        return None, [f"No values of single tokens: {why['text']}." if "text" in why else NOT_WRITTEN]
    columns: dict[str, Sequence[Any]] = {}
    notes = []
    for name in PER_TOKEN:
        column = values.get(name)
        if isinstance(column, list) and len(column) == len(texts):
            columns[name] = column
        else:
            columns[name] = [None] * len(texts)
            notes.append(f"No {name} of single tokens: {why.get(name, 'this run did not write it')}.")
    tokens = []
    for index, text in enumerate(texts):
        tokens.append({"text": str(text), **{name: number(column[index]) for name, column in columns.items()}})
    return tokens, notes


def number(value: Any) -> float | None:
    """A finite number, which JSON can hold, or None."""
    found = finite(value)
    return None if math.isnan(found) else found


def numbers(values: Any) -> dict[str, float | None]:
    return {str(name): number(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _index(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value >= 0 else otherwise


def _joined(tokens: list[dict[str, Any]] | None) -> str:
    return "".join(token["text"] for token in tokens or [])
