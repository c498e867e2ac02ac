"""One file that shows runs without a server: the page with its scripts, styles and data inside.

Scripts become entries of an import map, as addresses that hold their text. Data is JSON in which `<` is escaped, so
that nothing in a completion can end the element it stands in. The page may load nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgraph.view import answers
from rollgraph.view.catalog import Catalog
from rollgraph.view.run_data import RunData
from rollgraph.view.sample_search import MOST

STATIC = Path(__file__).parent / "static"
POINTS = 600  # of a curve
NEWEST_GROUPS = 200  # of samples
WITH_TOKENS = 400  # samples that are there as a whole; of others, what a list shows
PROMPTS = 50  # that can be followed from their first group on
SHARED_PROMPTS = 20  # that can be compared
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])\./([\w.-]+\.js)\2""")
_SCRIPT = re.compile(r'<script type="module" src="static/([\w.-]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.-]+)">')


def write_export(catalog: Catalog, target: Path, static: Path = STATIC) -> None:
    """Write the page of all runs in the catalog."""
    page = build_page(static, collect(catalog))
    target.write_text(page, encoding="utf-8", errors="backslashreplace")


def collect(catalog: Catalog) -> dict[str, Any]:
    """All answers that the page can ask for, as far as they go into a file."""
    runs = catalog.find()
    for run in runs:
        while run.update() or not run.is_indexed:
            pass
    ids = ",".join(run.id for run in runs)
    compared = answers.answer_compare(catalog, {"ids": ids})
    compared["prompts"] = compared["prompts"][:SHARED_PROMPTS]
    shared = [entry["key"] for entry in compared["prompts"]]
    return {
        "exported": int(time.time()),
        "runs": answers.list_runs(catalog),
        "data": {run.id: collect_run(run, shared) for run in runs},
        "compare": compared,
    }


def collect_run(run: RunData, shared: Sequence[str]) -> dict[str, Any]:
    """With the prompts that are compared with those of other runs."""
    names = answers.answer_names(run, {})
    all_names = answers.BETWEEN_NAMES.join(entry["name"] for entry in names["names"])
    ranges = {axis: {"x": axis, "points": str(POINTS)} for axis in ("step", "time")}
    samples = newest_groups(run)
    prompts = answers.answer_prompts(run, {"limit": str(PROMPTS)})
    followed = dict.fromkeys([*(entry["key"] for entry in prompts["prompts"]), *shared])
    ids = [sample["id"] for group in samples["groups"] for sample in group["samples"]]
    if len(ids) > WITH_TOKENS:
        samples["notes"].append(f"This file holds {WITH_TOKENS} samples as a whole; of others, only their beginning.")
    return {
        "names": names,
        "series": {axis: answers.answer_series(run, {"names": all_names, **given}) for axis, given in ranges.items()},
        "phases": {axis: answers.answer_phases(run, given) for axis, given in ranges.items()},
        "samples": samples,
        "sample": {id: answers.answer_sample(run, id) for id in ids[:WITH_TOKENS]},
        "prompts": prompts,
        "prompt": {key: answers.answer_prompt(run, key, {}) for key in followed},
        "diagnosis": answers.answer_diagnosis(run, {}),
        "machine": answers.answer_machine(run, {}),
    }


def newest_groups(run: RunData) -> dict[str, Any]:
    found = answers.answer_samples(run, {"limit": str(min(NEWEST_GROUPS, MOST))})
    left_out = found["total"] - len(found["groups"])
    if left_out:
        found["notes"].append(f"This file holds the newest {len(found['groups'])} groups; {left_out:,} are left out.")
        found["steps"] = sorted({group["step"] for group in found["groups"]})
    return found


# -- the file ----------------------------------------------------------------------------------------


def build_page(static: Path, data: dict[str, Any]) -> str:
    page = (static / "index.html").read_text(encoding="utf-8")
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(static.glob("*.js"))}
    imports = {f"view/{name}": _address("text/javascript", _bare_imports(text)) for name, text in modules.items()}
    import_map = _escape(json.dumps({"imports": imports}))
    entries = [f'import "view/{name}";' for name in _SCRIPT.findall(page)]
    start = "\n".join(entries)
    page = _STYLE.sub(lambda found: f"<style>{(static / found[1]).read_text(encoding='utf-8')}</style>", page)
    scripts = (
        f'<meta http-equiv="Content-Security-Policy" content="{_policy([import_map, start])}">'
        f'<script type="importmap">{import_map}</script>'
        f'<script type="application/json" id="rollgraph-export">{_escape(answers.to_json(data))}</script>'
        f'<script type="module">{start}</script>'
    )
    return _replace_once(_SCRIPT.sub("", page), "</head>", f"{scripts}</head>")


def _policy(inline: Sequence[str]) -> str:
    """Only these scripts, and the modules that the import map holds."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    allowed = " ".join(f"'sha256-{found}'" for found in hashes)
    return (
        f"default-src 'none'; script-src data: {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _bare_imports(text: str) -> str:
    """A module without an address of its own cannot name others relative to it, so it names entries of the map."""
    return _IMPORT.sub(r"\1\2view/\3\2", text)


def _address(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _escape(text: str) -> str:
    """JSON that cannot end the element it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _replace_once(text: str, old: str, new: str) -> str:
    before, found, after = text.partition(old)
    assert found, f"the page has no {old}"
    return before + new + after
