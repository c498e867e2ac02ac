"""The samples page: records as the page shows them, filtering groups by the index, and text search within a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgraph.types import ENVIRONMENT
from rollgraph.view.index import KINDS, MAX_NUMBER, Group, SamplesIndex, finite_or_nan, is_failed_sample

# -- records ---------------------------------------------------------------------------------------

PREVIEW_CHARACTERS = 400
PER_TOKEN = ("logprob", "advantage", "ratio", "entropy", "kl")
NOT_WRITTEN = "This run did not write values of single tokens."
ROLES = {"turn": "policy", "reply": "environment"}


def sample_id(group: Group, position: int) -> str:
    """The id of a sample in addresses, for example "12.train.3.0". It stays valid until the run repeats the step."""
    return f"{group.step}.{group.kind}.{group.number}.{position}"


def parse_id(id: str) -> tuple[int, str, int, int] | None:
    """Step, kind, group and position; None if no sample can have this id."""
    parts = id.split(".")
    try:
        step, number, position = int(parts[0]), int(parts[2]), int(parts[3])
    except (ValueError, IndexError):
        return None
    if len(parts) != 4 or parts[1] not in KINDS or max(abs(step), abs(number)) > MAX_NUMBER or position < 0:
        return None
    return step, parts[1], number, position


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


def token_count(record: Mapping[str, Any]) -> int:
    value = record.get("tokens")
    return min(value, 2**31 - 1) if isinstance(value, int) and value >= 0 else 0


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
    prompt: str | None = None  # hash of its text
    text: str = ""  # in the prompt or a completion, case-insensitive
    offset: int = 0
    limit: int = PAGE_SIZE
    oldest_first: bool = False


def find_groups(index: SamplesIndex, query: SampleQuery) -> dict[str, Any]:
    """A page of matching groups, newest first, with the samples of each from best to worst.

    `stopped` is a sentence for the user if a text search ran out of its budget, otherwise empty.
    """
    where, values = build_condition(query)
    order = "start" if query.oldest_first else "start DESC"
    total = index.count_groups(where, values)
    stopped = ""
    if query.text:
        limit = query.offset + query.limit
        matching, searched = search_text(index, index.groups(where, values, order), query.text, limit)
        page = matching[query.offset :]
        if searched < total and len(matching) < limit:
            stopped = f"The search stopped after {searched:,} of {total:,} groups. Choose a step to narrow it."
        total = len(matching)
    else:
        page = list(index.groups(where, values, order, query.limit, query.offset))
    groups = [summarize_group(index, group) for group in page]
    return {"total": total, "groups": groups, "steps": list_steps(index, query), "stopped": stopped}


def build_condition(query: SampleQuery) -> tuple[str, list[Any]]:
    """Every filter except the text, as an SQL condition on the table `groups`, and its values."""
    filters: dict[str, Any] = {}
    if query.step is not None:
        filters["step = ?"] = query.step
    if query.group is not None:
        filters["number = ?"] = query.group
    if query.prompt is not None:
        filters["prompt = ?"] = query.prompt
    if query.kind:
        filters["kind = ?"] = query.kind
    sample_filters: dict[str, Any] = {}
    if query.reward_min > -math.inf or query.reward_max < math.inf:
        sample_filters = {"reward >= ?": query.reward_min, "reward <= ?": query.reward_max}
    if query.finish == "error":  # any failure: of the environment or a reward function, or an aborted rollout
        sample_filters["failed = ?"] = True
    elif query.finish:
        sample_filters["finish = ?"] = query.finish
    conditions = list(filters)
    if sample_filters:
        of_group = "samples.start >= groups.start AND samples.start < groups.end"
        conditions.append(f"EXISTS (SELECT 1 FROM samples WHERE {' AND '.join([of_group, *sample_filters])})")
    return " AND ".join(conditions) or "TRUE", [*filters.values(), *sample_filters.values()]


def list_steps(index: SamplesIndex, query: SampleQuery) -> list[int]:
    """The steps that have samples of the query's kind, thinned out if there are very many."""
    steps = index.steps(query.kind)
    stride = -(-len(steps) // MAX_LISTED_STEPS) or 1
    return steps[::-stride][::-1]


def search_text(index: SamplesIndex, groups: Iterable[Group], text: str, limit: int) -> tuple[list[Group], int]:
    """The groups whose prompt or completions contain the text, case-insensitive, and how many groups were searched.

    Groups that are close in the file are read together, and parsed only if their bytes contain the text.
    """
    budget = index.counters.bytes_read + SEARCH_BYTES
    matching: list[Group] = []
    searched = 0
    folded = text.casefold()
    encoded = json.dumps(text, ensure_ascii=False)[1:-1].casefold()
    for nearby in split_by_distance(groups):
        if len(matching) >= limit or index.counters.bytes_read > budget:
            break
        searched += len(nearby)
        content = index.read_span(nearby)
        escaped = not encoded.isascii() and b"\\u" in content  # some tools escape non-ASCII characters
        if not escaped and encoded not in content.decode("utf-8", "replace").casefold():
            continue
        matching += [group for group in nearby if any(holds_text(record, folded) for record in index.read_group(group))]
    return matching, searched


def split_by_distance(groups: Iterable[Group]) -> Iterator[list[Group]]:
    """Split groups, in their order, into lists of groups that are close together in the file."""
    nearby: list[Group] = []
    for group in groups:
        if nearby:
            first, last = nearby[0], nearby[-1]
            gap = max(group.start - last.end, last.start - group.end)
            span = max(group.end, first.end) - min(group.start, first.start)
            if gap > MAX_GAP or span > SPAN_BYTES:
                yield nearby
                nearby = []
        nearby.append(group)
    if nearby:
        yield nearby


def holds_text(record: dict[str, Any], folded: str) -> bool:
    texts = [str(record.get("prompt", "")), str(record.get("completion", ""))]
    spans = record.get("spans")
    for span in spans if isinstance(spans, list) else []:
        if isinstance(span, dict):
            texts.append(str(span.get("text", "")))
    return any(folded in text.casefold() for text in texts)


def summarize_group(index: SamplesIndex, group: Group) -> dict[str, Any]:
    """The fields of a group that a list shows, cached: the page requests all visible groups when the run grows."""
    key = (index.progress.replacements, group.start, group.end)
    if key not in index.summaries:
        if len(index.summaries) >= CACHED_SUMMARIES:
            del index.summaries[next(iter(index.summaries))]  # the oldest
        index.summaries[key] = build_summary(group, index.read_group(group))
    return index.summaries[key]


def build_summary(group: Group, records: list[dict[str, Any]]) -> dict[str, Any]:
    samples = []
    for position, record in enumerate(records):
        samples.append(summarize_sample(sample_id(group, position), record))
    samples.sort(key=_reward, reverse=True)
    first = records[0] if records else {}
    return {
        "step": group.step,
        "group": group.number,
        "kind": group.kind,
        "prompt": str(first.get("prompt", "")),
        "prompt_key": group.prompt,
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
    *key, position = parts
    group = next(index.groups("step = ? AND kind = ? AND number = ?", key), None)
    records = index.read_group(group) if group else []
    return describe_sample(id, records[position]) if position < len(records) else None


# -- prompts -----------------------------------------------------------------------------------------


def read_prompt(index: SamplesIndex, group: Group) -> str:
    records = index.read_group(group)
    return str(records[0].get("prompt", "")) if records else ""


def find_prompts(index: SamplesIndex, text: str, offset: int, limit: int) -> dict[str, Any]:
    """Prompts, most often sampled first: these show best how the policy has changed."""
    counts = {}
    groups = []  # the last of each prompt
    for count, group in index.prompts():
        counts[group.prompt] = count
        groups.append(group)
    stopped = ""
    if text:
        total = len(groups)
        groups, searched = search_text(index, groups, text, offset + limit)
        if searched < total and len(groups) < offset + limit:
            stopped = f"The search stopped after {searched:,} of {total:,} prompts."
    prompts = []
    for group in groups[offset : offset + limit]:
        prompts.append({"key": group.prompt, "prompt": read_prompt(index, group), "groups": counts[group.prompt]})
    return {"total": len(groups), "prompts": prompts, "stopped": stopped}


def follow_prompt(index: SamplesIndex, prompt: str, offset: int, limit: int) -> dict[str, Any]:
    """A page of the groups of one prompt, oldest first."""
    answer = find_groups(index, SampleQuery(prompt=prompt, offset=offset, limit=limit, oldest_first=True))
    text = answer["groups"][0]["prompt"] if answer["groups"] else ""
    return {"key": prompt, "prompt": text, "total": answer["total"], "groups": answer["groups"]}
