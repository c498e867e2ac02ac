"""Finding groups of samples: by what the index knows, without reading the file, and by text, within a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.sample_records import mapping, parse_id, sample_id, short, whole
from rollgraph.view.samples_index import FINISHES, KINDS, SamplesIndex, Table

SEARCHED = 64 << 20  # bytes of the file that one search for text reads
STRETCH = 1 << 20  # bytes that are read together for it
GAP = 1 << 14  # bytes between two groups that may be read in vain
MOST_STEPS = 5000  # that are listed
LIMIT = 20  # groups of one answer
MOST = 200
KEPT = 200  # summaries of groups


@dataclass(frozen=True)
class Wanted:
    """Which groups are wanted; None or "" is any."""

    step: int | None = None
    group: int | None = None
    kind: str = ""
    finish: str = ""
    reward_min: float = -math.inf
    reward_max: float = math.inf
    prompt: int | None = None  # the hash of its text
    text: str = ""
    offset: int = 0
    limit: int = LIMIT
    oldest_first: bool = False


def find_groups(index: SamplesIndex, wanted: Wanted) -> dict[str, Any]:
    """A page of groups, newest first, each from its best to its worst sample.

    `stopped` says how far a search came that ended for want of time, and is empty for all others.
    """
    rows = choose(index, wanted)
    if not wanted.oldest_first:
        rows = rows[::-1]
    stopped = ""
    steps = find_steps(index, wanted)
    if wanted.text:
        enough = wanted.offset + wanted.limit
        found, searched = search_text(index, rows, wanted.text, enough)
        total = len(found)
        page = found[wanted.offset :]
        if searched < len(rows) and total < enough:
            stopped = f"The search stopped after {searched:,} of {len(rows):,} groups. Choose a step to narrow it."
    else:
        total = len(rows)
        page = list(rows[wanted.offset : wanted.offset + wanted.limit])
    groups = [summarize(index, row) for row in page]
    return {"total": total, "groups": groups, "steps": steps, "stopped": stopped}


def choose(index: SamplesIndex, wanted: Wanted) -> Table:
    """The groups that fit everything but the text, in the order of the file."""
    groups = index.groups
    fits: NDArray[np.bool_] = np.ones(len(groups), np.bool_)
    if wanted.step is not None:
        fits &= groups["step"] == wanted.step
    if wanted.group is not None:
        fits &= groups["group"] == wanted.group
    if wanted.prompt is not None:
        fits &= groups["prompt"] == np.uint64(wanted.prompt)
    if wanted.kind:
        fits &= groups["kind"] == KINDS.index(wanted.kind)
    if wanted.finish or wanted.reward_min > -math.inf or wanted.reward_max < math.inf:
        fits &= _has_sample(index, groups, wanted)
    found: Table = groups[fits]
    return found


def _has_sample(index: SamplesIndex, groups: Table, wanted: Wanted) -> NDArray[np.bool_]:
    """For each group, whether one of its samples is wanted."""
    samples = index.samples
    fits: NDArray[np.bool_] = np.ones(len(samples), np.bool_)
    if wanted.reward_min > -math.inf or wanted.reward_max < math.inf:
        fits &= (samples["reward"] >= wanted.reward_min) & (samples["reward"] <= wanted.reward_max)
    if wanted.finish == "error":  # in whatever way: of an environment, of a reward function, or given up
        fits &= samples["failed"]
    elif wanted.finish:
        fits &= samples["finish"] == FINISHES.index(wanted.finish)
    before = np.concatenate([[0], np.cumsum(fits)])
    found: NDArray[np.bool_] = before[groups["first"] + groups["count"]] > before[groups["first"]]
    return found


def find_steps(index: SamplesIndex, wanted: Wanted) -> list[int]:
    """The steps that have samples of the wanted kind; not all of them if there are very many."""
    groups = index.groups
    if wanted.kind:
        groups = groups[groups["kind"] == KINDS.index(wanted.kind)]
    steps = np.unique(groups["step"])
    stride = -(-len(steps) // MOST_STEPS) or 1
    return [int(step) for step in steps[::-stride][::-1]]


def search_text(index: SamplesIndex, rows: Table, text: str, enough: int) -> tuple[list[np.void], int]:
    """Groups whose prompt or completions hold the text, in whatever case; and how many groups were looked at.

    Neighbouring groups are read together, and parsed only if the text is somewhere in their bytes.
    """
    budget = index.work.bytes_read + SEARCHED
    found: list[np.void] = []
    searched = 0
    folded = text.casefold()
    spelled = json.dumps(text, ensure_ascii=False)[1:-1].casefold()
    for stretch in neighbours(rows):
        if len(found) >= enough or index.work.bytes_read > budget:
            break
        searched += len(stretch)
        content = index.read_stretch(stretch)
        escaped = not spelled.isascii() and b"\\u" in content  # some tools escape what is not ASCII
        if not escaped and spelled not in content.decode("utf-8", "replace").casefold():
            continue
        found += [row for row in stretch if any(holds_text(record, folded) for record in index.read_group(row))]
    return found, searched


def neighbours(rows: Table) -> Iterator[Table]:
    """The rows in their order, in parts that lie close together in the file."""
    starts = rows["offset"]
    ends = starts + rows["length"]
    first = 0
    for place in range(1, len(rows) + 1):
        if place < len(rows):
            gap = max(int(starts[place] - ends[place - 1]), int(starts[place - 1] - ends[place]))
            span = max(int(ends[place]), int(ends[first])) - min(int(starts[place]), int(starts[first]))
            if gap <= GAP and span <= STRETCH:
                continue
        yield rows[first:place]
        first = place


def holds_text(record: dict[str, Any], folded: str) -> bool:
    texts = [str(record.get("prompt", "")), str(record.get("completion", ""))]
    spans = record.get("spans")
    for span in spans if isinstance(spans, list) else []:
        if isinstance(span, dict):
            texts.append(str(span.get("text", "")))
    return any(folded in text.casefold() for text in texts)


def summarize(index: SamplesIndex, row: np.void) -> dict[str, Any]:
    """What a list shows of a group. It is kept: whenever the run grows, all groups in sight are asked for again."""
    place = (int(row["offset"]), int(row["length"]))
    if place not in index.summaries:
        if len(index.summaries) >= KEPT:
            del index.summaries[next(iter(index.summaries))]  # the oldest
        index.summaries[place] = describe_group(row, index.read_group(row))
    return index.summaries[place]


def describe_group(row: np.void, records: list[dict[str, Any]]) -> dict[str, Any]:
    step, kind, group = int(row["step"]), int(row["kind"]), int(row["group"])
    samples = [short(sample_id(step, kind, group, place), record) for place, record in enumerate(records)]
    samples.sort(key=_reward, reverse=True)
    first = records[0] if records else {}
    return {
        "step": step,
        "group": group,
        "kind": KINDS[kind],
        "prompt": str(first.get("prompt", "")),
        "prompt_key": key_of(int(row["prompt"])),
        "columns": mapping(first.get("columns")),
        "samples": samples,
    }


def _reward(sample: dict[str, Any]) -> float:
    return -math.inf if sample["reward"] is None else float(sample["reward"])


def find_sample(index: SamplesIndex, id: str) -> tuple[dict[str, Any], list[str]] | None:
    """One whole sample; None if there is none of this id."""
    parts = parse_id(id)
    if parts is None:
        return None
    step, kind, group, position = parts
    rows = choose(index, Wanted(step=step, group=group, kind=KINDS[kind]))
    records = index.read_group(rows[-1]) if len(rows) else []
    return whole(id, records[position]) if position < len(records) else None


# -- prompts -----------------------------------------------------------------------------------------


def key_of(prompt: int) -> str:
    return f"{prompt:016x}"


def parse_key(key: str) -> int | None:
    try:
        number = int(key, 16)
    except ValueError:
        return None
    return number if 0 <= number < 2**64 else None


def find_prompts(index: SamplesIndex, text: str, offset: int, limit: int) -> dict[str, Any]:
    """Prompts by how often they were sampled; those that came most often say most about what changed."""
    groups = index.groups
    keys, last, counts = _count_prompts(groups)
    order = np.argsort(-counts, kind="stable")
    found: list[dict[str, Any]] = []
    stopped = ""
    total = len(order)
    if text:
        matching, searched = search_text(index, groups[last[order]], text, offset + limit)
        keep = {int(row["prompt"]) for row in matching}
        order = np.array([place for place in order[:searched] if int(keys[place]) in keep], np.int64)
        if searched < total and len(matching) < offset + limit:
            stopped = f"The search stopped after {searched:,} of {total:,} prompts."
        total = len(order)
    for place in order[offset : offset + limit]:
        records = index.read_group(groups[last[place]])
        prompt = str(records[0].get("prompt", "")) if records else ""
        found.append({"key": key_of(int(keys[place])), "prompt": prompt, "groups": int(counts[place])})
    return {"total": total, "prompts": found, "stopped": stopped}


def _count_prompts(groups: Table) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """The hash of each prompt, its last group, and how many groups it has."""
    keys, first_from_end, counts = np.unique(groups["prompt"][::-1], return_index=True, return_counts=True)
    return keys, len(groups) - 1 - first_from_end, counts


def follow_prompt(index: SamplesIndex, key: int, offset: int, limit: int) -> dict[str, Any]:
    """All groups of one prompt, from the first step on."""
    wanted = Wanted(prompt=key, offset=offset, limit=limit, oldest_first=True)
    answer = find_groups(index, wanted)
    prompt = answer["groups"][0]["prompt"] if answer["groups"] else ""
    return {"key": key_of(key), "prompt": prompt, "total": answer["total"], "groups": answer["groups"]}
