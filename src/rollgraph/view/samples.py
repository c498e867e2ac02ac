"""The samples page: records as the page shows them, filtering groups by the index, and text search within a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgraph.types import ENVIRONMENT
from rollgraph.view.index import finite_or_nan
from rollgraph.view.indexes import FINISHES, KINDS, SamplesIndex, Table, is_failed_sample, token_count

# -- records ---------------------------------------------------------------------------------------

PREVIEW_CHARACTERS = 400
PER_TOKEN = ("logprob", "advantage", "ratio", "entropy", "kl")
NOT_WRITTEN = "This run did not write values of single tokens."
ROLES = {"turn": "policy", "reply": "environment"}


def sample_id(step: int, kind: int, group: int, position: int) -> str:
    """The id of a sample in addresses, for example "12.train.3.0". It stays valid until the run repeats the step."""
    return f"{step}.{KINDS[kind]}.{group}.{position}"


def parse_id(id: str) -> tuple[int, int, int, int] | None:
    parts = id.split(".")
    try:
        step, kind, group, position = int(parts[0]), KINDS.index(parts[1]), int(parts[2]), int(parts[3])
    except (ValueError, IndexError):
        return None
    return (step, kind, group, position) if len(parts) == 4 and position >= 0 else None


def summarize_sample(id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a sample that a list of groups shows."""
    text = str(record.get("completion", ""))
    finish = str(record.get("finish_reason", ""))
    return {
        "id": id,
        "reward": finite_or_none(record.get("reward")),
        "rewards": finite_values(record.get("rewards")),
        "weighted_rewards": finite_values(record.get("weighted_rewards")),
        "advantage": finite_or_none(record.get("advantage")),
        "tokens": token_count(record),
        "length": len(text),
        "finish": finish,
        "truncated": finish == "length",
        "failed": is_failed_sample(record),
        "reasons": explain_problems(record),
        "text_preview": text[:PREVIEW_CHARACTERS],
    }


def explain_problems(record: Mapping[str, Any]) -> list[str]:
    """Sentences that say why a sample was cut off, left out of training, or failed."""
    problems = []
    finish = record.get("finish_reason")
    if finish == "length":
        problems.append("The completion was cut off at a limit of tokens.")
    if finish == "abort":
        problems.append("The completion was aborted before its end.")
    failures = record.get("failures")
    if isinstance(failures, Mapping):
        for label, message in failures.items():
            who = "The environment" if label == ENVIRONMENT else f"The reward {label}"
            problems.append(f"{who} failed: {message}.")
    elif finish == "error":
        problems.append("The environment failed.")
    if left_out := record.get("left_out"):
        problems.append(f"It was not trained on: {left_out}.")
    elif record.get("split") == "dropped":
        problems.append("Its group was sampled but not trained on: the algorithm did not keep it.")
    return problems


def describe_sample(id: str, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All fields of one sample, and notes about token values that are missing."""
    tokens, notes = token_values(record)
    turns: list[dict[str, Any]] = [
        {"role": "prompt", "text": str(record.get("prompt", "")), "tokens": None, "reward": None}
    ]
    spans = record.get("spans")
    spans = [span for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    completion = str(record.get("completion", ""))
    for span in spans or [{"kind": "turn"}]:
        turn_tokens = None
        if tokens is not None:
            turn_tokens = tokens[_index_or(span.get("start"), 0) : _index_or(span.get("end"), len(tokens))]
        text = span.get("text")
        if text is None:
            text = completion if len(spans) <= 1 else _join_texts(turn_tokens)
        turns.append(
            {
                "role": ROLES.get(str(span.get("kind")), "policy"),
                "text": str(text),
                "tokens": turn_tokens,
                "reward": finite_or_none(span.get("reward")),
            }
        )
    sample = {
        **summarize_sample(id, record),
        "step": record.get("step"),
        "group": record.get("group"),
        "kind": record.get("split"),
        "prompt": str(record.get("prompt", "")),
        "columns": mapping_or_none(record.get("columns")),
        "completion": completion,
        "turns": turns,
        "extra": mapping_or_none(record.get("extra")),
    }
    return sample, notes


def token_values(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """One dictionary per token of the completion, and notes about missing columns; None without token values."""
    values = record.get("token_values")
    texts = values.get("text") if isinstance(values, Mapping) else None
    raw_reasons = values.get("absent") if isinstance(values, Mapping) else None
    reasons = raw_reasons if isinstance(raw_reasons, Mapping) else {}
    if not isinstance(values, Mapping) or not isinstance(texts, list):
        return None, [f"No values of single tokens: {reasons['text']}." if "text" in reasons else NOT_WRITTEN]
    columns: dict[str, Sequence[Any]] = {}
    notes = []
    for name in PER_TOKEN:
        column = values.get(name)
        if isinstance(column, list) and len(column) == len(texts):
            columns[name] = column
        else:
            columns[name] = [None] * len(texts)
            notes.append(f"No {name} of single tokens: {reasons.get(name, 'this run did not write it')}.")
    tokens = []
    for index, text in enumerate(texts):
        tokens.append({"text": str(text), **{name: finite_or_none(column[index]) for name, column in columns.items()}})
    return tokens, notes


def finite_or_none(value: Any) -> float | None:
    """The value if it is a finite number, as JSON requires; otherwise None."""
    number = finite_or_nan(value)
    return None if math.isnan(number) else number


def finite_values(values: Any) -> dict[str, float | None]:
    return {str(name): finite_or_none(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def mapping_or_none(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _index_or(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _join_texts(tokens: list[dict[str, Any]] | None) -> str:
    return "".join(token["text"] for token in tokens or [])


# -- search ----------------------------------------------------------------------------------------

SEARCH_BYTES = 64 << 20  # most bytes that one text search reads
SPAN_BYTES = 1 << 20  # most bytes of one read of a search
MAX_GAP = 1 << 14  # most bytes between two groups of one read
MAX_LISTED_STEPS = 5000
PAGE_SIZE = 20  # groups per answer, if the request does not say
MAX_PAGE_SIZE = 200
CACHED_SUMMARIES = 200  # groups


@dataclass(frozen=True)
class SampleQuery:
    """Filters for groups and the page to return; None or "" matches anything. A group matches if one sample does."""

    step: int | None = None
    group: int | None = None
    kind: str = ""
    finish: str = ""
    reward_min: float = -math.inf
    reward_max: float = math.inf
    prompt: int | None = None  # hash of the prompt's text
    text: str = ""  # in the prompt or a completion, case-insensitive
    offset: int = 0
    limit: int = PAGE_SIZE
    oldest_first: bool = False


def find_groups(index: SamplesIndex, query: SampleQuery) -> dict[str, Any]:
    """A page of matching groups, newest first, with the samples of each from best to worst.

    `stopped` is a sentence for the user if a text search ran out of its budget, otherwise empty.
    """
    rows = select_groups(index, query)
    if not query.oldest_first:
        rows = rows[::-1]
    stopped = ""
    steps = list_steps(index, query)
    if query.text:
        limit = query.offset + query.limit
        matching, searched = search_text(index, rows, query.text, limit)
        total = len(matching)
        page = matching[query.offset :]
        if searched < len(rows) and total < limit:
            stopped = f"The search stopped after {searched:,} of {len(rows):,} groups. Choose a step to narrow it."
    else:
        total = len(rows)
        page = list(rows[query.offset : query.offset + query.limit])
    groups = [summarize_group(index, row) for row in page]
    return {"total": total, "groups": groups, "steps": steps, "stopped": stopped}


def select_groups(index: SamplesIndex, query: SampleQuery) -> Table:
    """The groups that match every filter except the text, in the order of the file."""
    groups = index.groups
    mask: NDArray[np.bool_] = np.ones(len(groups), np.bool_)
    if query.step is not None:
        mask &= groups["step"] == query.step
    if query.group is not None:
        mask &= groups["group"] == query.group
    if query.prompt is not None:
        mask &= groups["prompt"] == np.uint64(query.prompt)
    if query.kind:
        mask &= groups["kind"] == KINDS.index(query.kind)
    if query.finish or query.reward_min > -math.inf or query.reward_max < math.inf:
        mask &= _has_matching_sample(index, groups, query)
    selected: Table = groups[mask]
    return selected


def _has_matching_sample(index: SamplesIndex, groups: Table, query: SampleQuery) -> NDArray[np.bool_]:
    """For each group, whether one of its samples matches the filters on rewards and finish reasons."""
    samples = index.samples
    mask: NDArray[np.bool_] = np.ones(len(samples), np.bool_)
    if query.reward_min > -math.inf or query.reward_max < math.inf:
        mask &= (samples["reward"] >= query.reward_min) & (samples["reward"] <= query.reward_max)
    if query.finish == "error":  # any failure: of the environment or a reward function, or an aborted rollout
        mask &= samples["failed"]
    elif query.finish:
        mask &= samples["finish"] == FINISHES.index(query.finish)
    matches_before = np.concatenate([[0], np.cumsum(mask)])
    has_match: NDArray[np.bool_] = matches_before[groups["first"] + groups["count"]] > matches_before[groups["first"]]
    return has_match


def list_steps(index: SamplesIndex, query: SampleQuery) -> list[int]:
    """The steps that have samples of the query's kind, thinned out if there are very many."""
    groups = index.groups
    if query.kind:
        groups = groups[groups["kind"] == KINDS.index(query.kind)]
    steps = np.unique(groups["step"])
    stride = -(-len(steps) // MAX_LISTED_STEPS) or 1
    return [int(step) for step in steps[::-stride][::-1]]


def search_text(index: SamplesIndex, rows: Table, text: str, limit: int) -> tuple[list[np.void], int]:
    """The groups whose prompt or completions contain the text, case-insensitive, and how many groups were searched.

    Groups that are close in the file are read together, and parsed only if their bytes contain the text.
    """
    budget = index.counters.bytes_read + SEARCH_BYTES
    matching: list[np.void] = []
    searched = 0
    folded = text.casefold()
    encoded = json.dumps(text, ensure_ascii=False)[1:-1].casefold()
    for nearby in split_by_distance(rows):
        if len(matching) >= limit or index.counters.bytes_read > budget:
            break
        searched += len(nearby)
        content = index.read_span(nearby)
        escaped = not encoded.isascii() and b"\\u" in content  # some tools escape non-ASCII characters
        if not escaped and encoded not in content.decode("utf-8", "replace").casefold():
            continue
        matching += [row for row in nearby if any(holds_text(record, folded) for record in index.read_group(row))]
    return matching, searched


def split_by_distance(rows: Table) -> Iterator[Table]:
    """Split the rows, in their order, into runs of groups that are close together in the file."""
    starts = rows["offset"]
    ends = starts + rows["length"]
    first = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows):
            # The rows may be in the order of the file or in reverse: one of the two differences is negative.
            gap = max(int(starts[end] - ends[end - 1]), int(starts[end - 1] - ends[end]))
            span = max(int(ends[end]), int(ends[first])) - min(int(starts[end]), int(starts[first]))
            if gap <= MAX_GAP and span <= SPAN_BYTES:
                continue
        yield rows[first:end]
        first = end


def holds_text(record: dict[str, Any], folded: str) -> bool:
    texts = [str(record.get("prompt", "")), str(record.get("completion", ""))]
    spans = record.get("spans")
    for span in spans if isinstance(spans, list) else []:
        if isinstance(span, dict):
            texts.append(str(span.get("text", "")))
    return any(folded in text.casefold() for text in texts)


def summarize_group(index: SamplesIndex, row: np.void) -> dict[str, Any]:
    """The fields of a group that a list shows, cached: the page requests all visible groups when the run grows."""
    location = (int(row["offset"]), int(row["length"]))
    if location not in index.summaries:
        if len(index.summaries) >= CACHED_SUMMARIES:
            del index.summaries[next(iter(index.summaries))]  # the oldest
        index.summaries[location] = build_summary(row, index.read_group(row))
    return index.summaries[location]


def build_summary(row: np.void, records: list[dict[str, Any]]) -> dict[str, Any]:
    step, kind, group = int(row["step"]), int(row["kind"]), int(row["group"])
    samples = [
        summarize_sample(sample_id(step, kind, group, position), record) for position, record in enumerate(records)
    ]
    samples.sort(key=_reward, reverse=True)
    first = records[0] if records else {}
    return {
        "step": step,
        "group": group,
        "kind": KINDS[kind],
        "prompt": str(first.get("prompt", "")),
        "prompt_key": prompt_key(int(row["prompt"])),
        "columns": mapping_or_none(first.get("columns")),
        "samples": samples,
    }


def _reward(sample: dict[str, Any]) -> float:
    return -math.inf if sample["reward"] is None else float(sample["reward"])


def find_sample(index: SamplesIndex, id: str) -> tuple[dict[str, Any], list[str]] | None:
    """All fields of one sample, and notes; None if there is no sample with this id."""
    parts = parse_id(id)
    if parts is None:
        return None
    step, kind, group, position = parts
    rows = select_groups(index, SampleQuery(step=step, group=group, kind=KINDS[kind]))
    records = index.read_group(rows[-1]) if len(rows) else []
    return describe_sample(id, records[position]) if position < len(records) else None


# -- prompts -----------------------------------------------------------------------------------------


def prompt_key(prompt: int) -> str:
    return f"{prompt:016x}"


def parse_prompt_key(key: str) -> int | None:
    try:
        prompt_hash = int(key, 16)
    except ValueError:
        return None
    return prompt_hash if 0 <= prompt_hash < 2**64 else None


def find_prompts(index: SamplesIndex, text: str, offset: int, limit: int) -> dict[str, Any]:
    """Prompts, most often sampled first: these show best how the policy has changed."""
    groups = index.groups
    hashes, last_groups, counts = _count_prompts(groups)
    order = np.argsort(-counts, kind="stable")
    prompts: list[dict[str, Any]] = []
    stopped = ""
    total = len(order)
    if text:
        matching, searched = search_text(index, groups[last_groups[order]], text, offset + limit)
        matching_hashes = {int(row["prompt"]) for row in matching}
        order = np.array([number for number in order[:searched] if int(hashes[number]) in matching_hashes], np.int64)
        if searched < total and len(matching) < offset + limit:
            stopped = f"The search stopped after {searched:,} of {total:,} prompts."
        total = len(order)
    for number in order[offset : offset + limit]:
        records = index.read_group(groups[last_groups[number]])
        prompt = str(records[0].get("prompt", "")) if records else ""
        prompts.append({"key": prompt_key(int(hashes[number])), "prompt": prompt, "groups": int(counts[number])})
    return {"total": total, "prompts": prompts, "stopped": stopped}


def _count_prompts(groups: Table) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """The hash of each prompt, the row of its last group, and its number of groups."""
    hashes, first_from_end, counts = np.unique(groups["prompt"][::-1], return_index=True, return_counts=True)
    return hashes, len(groups) - 1 - first_from_end, counts


def follow_prompt(index: SamplesIndex, prompt_hash: int, offset: int, limit: int) -> dict[str, Any]:
    """A page of the groups of one prompt, oldest first."""
    query = SampleQuery(prompt=prompt_hash, offset=offset, limit=limit, oldest_first=True)
    answer = find_groups(index, query)
    prompt = answer["groups"][0]["prompt"] if answer["groups"] else ""
    return {"key": prompt_key(prompt_hash), "prompt": prompt, "total": answer["total"], "groups": answer["groups"]}
