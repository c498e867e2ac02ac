"""The answers of the API, as JSON can hold them. Each has `notes`: what people should know about what they see.

The server gives one at a time, and an exported file holds all that its page can ask for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rollgraph.view.catalog import Catalog
from rollgraph.view.comparison import compare
from rollgraph.view.diagnosis import diagnose
from rollgraph.view.machine import describe_machine
from rollgraph.view.metric_names import describe_metrics
from rollgraph.view.run_data import RunData
from rollgraph.view.sample_search import (
    LIMIT,
    MOST,
    Wanted,
    find_groups,
    find_prompts,
    find_sample,
    follow_prompt,
    parse_key,
)
from rollgraph.view.samples_index import FINISHES, KINDS
from rollgraph.view.series import MOST_POINTS, POINTS, SECONDS, Range, find_phases, find_series

Answer = dict[str, Any]
Parameters = Mapping[str, str]
BETWEEN_NAMES = "\n"  # of metrics: a reward function may log under a name with a comma or a space


class WrongRequest(ValueError):
    """A parameter has a value that it cannot have."""

    def __init__(self, parameter: str, expected: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: expected {expected}")


class NotThere(LookupError):
    """What is asked for does not exist, or no longer."""


def list_runs(catalog: Catalog) -> Answer:
    runs = []
    for run in catalog.find():
        with run.opened():
            runs.append(run.summary())
    notes = list(catalog.notes)
    if not runs:
        notes.append("No run was found in the folders that were named.")
    return {"runs": runs, "notes": notes}


def answer_names(run: RunData, given: Parameters) -> Answer:
    return {"names": describe_metrics(run.metrics.names), "notes": run.notes()}


def answer_series(run: RunData, given: Parameters) -> Answer:
    names = [name for name in given.get("names", "").split(BETWEEN_NAMES) if name]
    known = set(run.metrics.names)
    unknown = [name for name in names if name not in known]
    notes = run.notes()
    if unknown:
        notes.append(f"This run has no {', '.join(unknown)}.")
    shown = read_range_of(given)
    if shown.axis == "time" and SECONDS not in known:
        notes.append("This run did not write how long its steps took, so there is no axis of time.")
    found = find_series(run.metrics, [name for name in names if name in known], shown)
    return {"series": found, "notes": notes}


def answer_phases(run: RunData, given: Parameters) -> Answer:
    return {**find_phases(run.metrics, read_range_of(given)), "notes": run.notes()}


def answer_samples(run: RunData, given: Parameters) -> Answer:
    return {**find_groups(run.samples, read_wanted(given)), "notes": run.notes()}


def answer_sample(run: RunData, id: str) -> Answer:
    found = find_sample(run.samples, id)
    if found is None:
        raise NotThere(f"there is no sample {id!r} in {run.name}")
    sample, notes = found
    return {**sample, "notes": notes}


def answer_prompts(run: RunData, given: Parameters) -> Answer:
    page = read_wanted(given)
    return {**find_prompts(run.samples, page.text, page.offset, page.limit), "notes": run.notes()}


def answer_prompt(run: RunData, key: str, given: Parameters) -> Answer:
    number = parse_key(key)
    page = read_wanted({"limit": str(MOST), **given})
    if number is None:
        raise NotThere(f"there is no prompt {key!r} in {run.name}")
    found = follow_prompt(run.samples, number, page.offset, page.limit)
    if not found["total"]:
        raise NotThere(f"there is no prompt {key!r} in {run.name}")
    return {**found, "notes": run.notes()}


def answer_diagnosis(run: RunData, given: Parameters) -> Answer:
    return {"findings": diagnose(run), "notes": run.notes()}


def answer_machine(run: RunData, given: Parameters) -> Answer:
    found, notes = describe_machine(run)
    return {**found, "notes": run.notes() + notes}


def answer_compare(catalog: Catalog, given: Parameters) -> Answer:
    ids = [id for id in given.get("ids", "").split(",") if id]
    runs = [catalog.get(id) for id in dict.fromkeys(ids)]
    notes = []
    with ExitStack() as opened:
        for run in sorted(runs, key=lambda run: run.id):  # in one order, so that no two requests wait for each other
            opened.enter_context(run.opened())
            notes += [f"{run.name}: {note}" for note in run.notes()]
        return {**compare(runs), "notes": notes}


def to_json(answer: Answer) -> str:
    """As text. What a completion or a reward function wrote need not be a number that JSON can hold."""
    try:
        return json.dumps(answer, ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        finite = _without_infinities(answer)
        return json.dumps(finite, ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":"))


def _without_infinities(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_infinities(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- parameters ------------------------------------------------------------------------------------


def read_range_of(given: Parameters) -> Range:
    axis = given.get("x", "step") or "step"
    if axis not in ("step", "time"):
        raise WrongRequest("x", "step or time")
    points = _whole(given, "points", POINTS)
    return Range(
        axis=axis,
        start=_number(given, "from", -math.inf),
        end=_number(given, "to", math.inf),
        points=max(1, min(points or POINTS, MOST_POINTS)),
    )


def read_wanted(given: Parameters) -> Wanted:
    kind = given.get("kind", "")
    if kind and kind not in KINDS:
        raise WrongRequest("kind", " or ".join(KINDS))
    finish = given.get("finish", "")
    if finish not in FINISHES:
        raise WrongRequest("finish", ", ".join(FINISHES[:-1]))
    wanted = Wanted(
        step=_whole(given, "step", None),
        group=_whole(given, "group", None),
        kind=kind,
        finish=finish,
        reward_min=_number(given, "reward_min", -math.inf),
        reward_max=_number(given, "reward_max", math.inf),
        text=given.get("q", ""),
        oldest_first=given.get("order") == "oldest",
    )
    offset = max(0, _whole(given, "offset", 0) or 0)
    limit = max(1, min(_whole(given, "limit", LIMIT) or LIMIT, MOST))
    return replace(wanted, offset=offset, limit=limit)


def _whole(given: Parameters, name: str, otherwise: int | None) -> int | None:
    text = given.get(name, "")
    if not text:
        return otherwise
    try:
        number = int(text)
    except ValueError:
        raise WrongRequest(name, "a whole number") from None
    if abs(number) >= 2**62:
        raise WrongRequest(name, "a smaller number")
    return number


def _number(given: Parameters, name: str, otherwise: float) -> float:
    text = given.get(name, "")
    if not text:
        return otherwise
    try:
        number = float(text)
    except ValueError:
        raise WrongRequest(name, "a number") from None
    if math.isnan(number):
        raise WrongRequest(name, "a number")
    return number
