"""The responses of the dashboard's API, as JSON-serializable dictionaries.

Each has `notes`: sentences about missing or damaged data, which the page shows above its content. The server sends one
response per request; an exported file holds every response that its page can ask for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rollgraph.view.charts import (
    DEFAULT_POINTS,
    MAX_POINTS,
    STEP_SECONDS,
    AxisRange,
    describe_metrics,
    find_phases,
    find_series,
)
from rollgraph.view.findings import diagnose
from rollgraph.view.index import FINISHES, KINDS
from rollgraph.view.machine import build_machine_report
from rollgraph.view.runs import Catalog, RunData
from rollgraph.view.samples import (
    MAX_PAGE_SIZE,
    PAGE_SIZE,
    SampleQuery,
    find_groups,
    find_prompts,
    find_sample,
    follow_prompt,
    read_prompt,
)

# -- comparing runs --------------------------------------------------------------------------------

MAX_PROMPTS = 100
MAX_WAIT_SECONDS = 2.0  # for a sample that is not in the index yet; other requests for this run wait, too


def compare(runs: Sequence[RunData]) -> dict[str, Any]:
    """The config keys whose values differ between runs (null where a run lacks the key), and what runs share."""
    flat_configs = [flatten(run.files.config.value) for run in runs]
    keys = sorted(set().union(*flat_configs)) if flat_configs else []
    differing = []
    for key in keys:
        values = [config.get(key) for config in flat_configs]
        if any(value != values[0] for value in values):
            differing.append({"key": key, "values": {run.id: value for run, value in zip(runs, values, strict=True)}})
    names = [set(run.metrics.names) for run in runs]
    return {
        "runs": [run.summary() for run in runs],
        "config": differing,
        "equal_keys": len(keys) - len(differing),
        "names": sorted(set.intersection(*names)) if names else [],
        "prompts": shared_prompts(runs),
    }


def shared_prompts(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Prompts with samples in every run, the newest of the first run first."""
    if not runs:
        return []
    shared = set.intersection(*({group.prompt for _, group in run.samples.prompts()} for run in runs))
    last_groups = [group for _, group in runs[0].samples.prompts() if group.prompt in shared]
    last_groups.sort(key=lambda group: group.start, reverse=True)
    prompts = []
    for group in last_groups[:MAX_PROMPTS]:
        prompts.append({"key": group.prompt, "prompt": read_prompt(runs[0].samples, group)})
    return prompts


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a config by dotted key, in the spelling of `rollgraph train`'s overrides."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# -- answers ---------------------------------------------------------------------------------------

Answer = dict[str, Any]
QueryParams = Mapping[str, str]
BETWEEN_NAMES = "\n"  # separates names of metrics, which may contain commas and spaces


class BadRequest(ValueError):
    """A query parameter has an invalid value (HTTP 400)."""

    def __init__(self, parameter: str, expected: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: expected {expected}")


class NotFound(LookupError):
    """There is no such sample, prompt or answer, or no longer (HTTP 404)."""


def list_runs(catalog: Catalog) -> Answer:
    runs = []
    for run in catalog.find():
        with run.opened():
            runs.append(run.summary())
    notes = list(catalog.notes)
    if not runs:
        notes.append("No run was found in the folders that were named.")
    return {"runs": runs, "notes": notes}


def answer_names(run: RunData, params: QueryParams) -> Answer:
    return {"names": describe_metrics(run.metrics.names), "notes": run.notes()}


def answer_series(run: RunData, params: QueryParams) -> Answer:
    names = [name for name in params.get("names", "").split(BETWEEN_NAMES) if name]
    known = set(run.metrics.names)
    unknown = [name for name in names if name not in known]
    notes = run.notes()
    if unknown:
        notes.append(f"This run has no {', '.join(unknown)}.")
    axis_range = parse_axis_range(params)
    if axis_range.axis == "time" and STEP_SECONDS not in known:
        notes.append("This run did not write how long its steps took, so there is no axis of time.")
    series = find_series(run.metrics, [name for name in names if name in known], axis_range)
    return {"series": series, "notes": notes}


def answer_phases(run: RunData, params: QueryParams) -> Answer:
    return {**find_phases(run.metrics, parse_axis_range(params)), "notes": run.notes()}


def answer_samples(run: RunData, params: QueryParams) -> Answer:
    return {**find_groups(run.samples, read_sample_query(params)), "notes": run.notes()}


def answer_sample(run: RunData, id: str) -> Answer:
    sample_and_notes = find_sample(run.samples, id)
    if sample_and_notes is None and not run.is_indexed:  # a file that was rewritten is indexed again, in portions
        run.catch_up(MAX_WAIT_SECONDS)
        sample_and_notes = find_sample(run.samples, id)
    if sample_and_notes is None:
        raise NotFound(f"there is no sample {id!r} in {run.name}")
    sample, notes = sample_and_notes
    return {**sample, "notes": notes}


def answer_prompts(run: RunData, params: QueryParams) -> Answer:
    query = read_sample_query(params)
    return {**find_prompts(run.samples, query.text, query.offset, query.limit), "notes": run.notes()}


def answer_prompt(run: RunData, key: str, params: QueryParams) -> Answer:
    query = read_sample_query({"limit": str(MAX_PAGE_SIZE), **params})
    history = follow_prompt(run.samples, key, query.offset, query.limit) if key.isascii() else None
    if history is None or not history["total"]:
        raise NotFound(f"there is no prompt {key!r} in {run.name}")
    return {**history, "notes": run.notes()}


def answer_diagnosis(run: RunData, params: QueryParams) -> Answer:
    return {"findings": diagnose(run), "notes": run.notes()}


def answer_machine(run: RunData, params: QueryParams) -> Answer:
    machine, notes = build_machine_report(run)
    return {**machine, "notes": run.notes() + notes}


def answer_compare(catalog: Catalog, params: QueryParams) -> Answer:
    ids = [id for id in params.get("ids", "").split(",") if id]
    runs = [catalog.get(id) for id in dict.fromkeys(ids)]
    notes = []
    with ExitStack() as stack:
        for run in sorted(runs, key=lambda run: run.id):  # one lock order for all requests, so that none deadlock
            stack.enter_context(run.opened())
            notes += [f"{run.name}: {note}" for note in run.notes()]
        return {**compare(runs), "notes": notes}


def dump_json(answer: Answer) -> str:
    """The answer as JSON text. NaN and infinities, for example from a reward function's extra values, become null."""
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


def parse_axis_range(params: QueryParams) -> AxisRange:
    axis = params.get("x", "step") or "step"
    if axis not in ("step", "time"):
        raise BadRequest("x", "step or time")
    points = _read_int(params, "points", DEFAULT_POINTS)
    return AxisRange(
        axis=axis,
        start=_read_float(params, "from", -math.inf),
        end=_read_float(params, "to", math.inf),
        points=max(1, min(points or DEFAULT_POINTS, MAX_POINTS)),
    )


def read_sample_query(params: QueryParams) -> SampleQuery:
    kind = params.get("kind", "")
    if kind and kind not in KINDS:
        raise BadRequest("kind", " or ".join(KINDS))
    finish = params.get("finish", "")
    if finish not in FINISHES:
        raise BadRequest("finish", ", ".join(FINISHES[:-1]))
    query = SampleQuery(
        step=_read_int(params, "step", None),
        group=_read_int(params, "group", None),
        kind=kind,
        finish=finish,
        reward_min=_read_float(params, "reward_min", -math.inf),
        reward_max=_read_float(params, "reward_max", math.inf),
        text=params.get("q", ""),
        oldest_first=params.get("order") == "oldest",
    )
    offset = max(0, _read_int(params, "offset", 0) or 0)
    limit = max(1, min(_read_int(params, "limit", PAGE_SIZE) or PAGE_SIZE, MAX_PAGE_SIZE))
    return replace(query, offset=offset, limit=limit)


def _read_int(params: QueryParams, name: str, default: int | None) -> int | None:
    text = params.get(name, "")
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        raise BadRequest(name, "a whole number") from None
    if abs(number) >= 2**62:
        raise BadRequest(name, "a smaller number")
    return number


def _read_float(params: QueryParams, name: str, default: float) -> float:
    text = params.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        raise BadRequest(name, "a number") from None
    if math.isnan(number):
        raise BadRequest(name, "a number")
    return number
