"""Exports runs as one HTML file that needs no server: the page with its scripts, styles and data inlined.

Scripts become `data:` URLs in an import map. Data is embedded as JSON with `<` escaped, so that no completion can close
its script element. A content security policy forbids the page to load anything else.
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
from rollgraph.view.runs import Catalog, RunData
from rollgraph.view.samples import MAX_PAGE_SIZE

STATIC = Path(__file__).parent / "static"
# Limits on what the file holds.
POINTS = 600  # per curve
NEWEST_GROUPS = 200  # groups of samples
FULL_SAMPLES = 400  # samples with all their texts and token values; the others only have the fields that a list shows
PROMPTS = 50  # prompts with all of their groups
SHARED_PROMPTS = 20  # prompts that can be compared between runs
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])\./([\w.-]+\.js)\2""")
_SCRIPT = re.compile(r'<script type="module" src="static/([\w.-]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.-]+)">')


def write_export(catalog: Catalog, target: Path, static: Path = STATIC) -> None:
    """Write the page with all runs of the catalog."""
    page = build_page(static, collect_answers(catalog))
    target.write_text(page, encoding="utf-8", errors="backslashreplace")


def collect_answers(catalog: Catalog) -> dict[str, Any]:
    """Every answer that the exported page can ask for, within the limits above."""
    runs = catalog.find()
    for run in runs:
        while run.update() or not run.is_indexed:
            pass
    ids = ",".join(run.id for run in runs)
    compared = answers.answer_compare(catalog, {"ids": ids})
    compared["prompts"] = compared["prompts"][:SHARED_PROMPTS]
    shared = [entry["key"] for entry in compared["prompts"]]
    data = {}
    for run in runs:
        with run.opened():
            data[run.id] = collect_run_answers(run, shared)
    return {
        "exported": int(time.time()),
        "runs": answers.list_runs(catalog),
        "data": data,
        "compare": compared,
    }


def collect_run_answers(run: RunData, shared: Sequence[str]) -> dict[str, Any]:
    """The answers about one run. `shared` are the keys of prompts that the page compares with other runs."""
    names = answers.answer_names(run, {})
    all_names = answers.BETWEEN_NAMES.join(entry["name"] for entry in names["names"])
    ranges = {axis: {"x": axis, "points": str(POINTS)} for axis in ("step", "time")}
    samples = newest_groups(run)
    prompts = answers.answer_prompts(run, {"limit": str(PROMPTS)})
    followed = dict.fromkeys([*(entry["key"] for entry in prompts["prompts"]), *shared])
    ids = [sample["id"] for group in samples["groups"] for sample in group["samples"]]
    if len(ids) > FULL_SAMPLES:
        samples["notes"].append(f"This file holds {FULL_SAMPLES} samples in full; of others, only their beginning.")
    return {
        "names": names,
        "series": {axis: answers.answer_series(run, {"names": all_names, **params}) for axis, params in ranges.items()},
        "phases": {axis: answers.answer_phases(run, params) for axis, params in ranges.items()},
        "samples": samples,
        "sample": {id: answers.answer_sample(run, id) for id in ids[:FULL_SAMPLES]},
        "prompts": prompts,
        "prompt": {key: answers.answer_prompt(run, key, {}) for key in followed},
        "diagnosis": answers.answer_diagnosis(run, {}),
        "machine": answers.answer_machine(run, {}),
    }


def newest_groups(run: RunData) -> dict[str, Any]:
    page = answers.answer_samples(run, {"limit": str(min(NEWEST_GROUPS, MAX_PAGE_SIZE))})
    left_out = page["total"] - len(page["groups"])
    if left_out:
        page["notes"].append(f"This file holds the newest {len(page['groups'])} groups; {left_out:,} are left out.")
        page["steps"] = sorted({group["step"] for group in page["groups"]})
    return page


# -- the file ----------------------------------------------------------------------------------------


def build_page(static: Path, data: dict[str, Any]) -> str:
    page = (static / "index.html").read_text(encoding="utf-8")
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(static.glob("*.js"))}
    imports = {f"view/{name}": _data_url("text/javascript", _bare_imports(text)) for name, text in modules.items()}
    import_map = _escape(json.dumps({"imports": imports}))
    entries = [f'import "view/{name}";' for name in _SCRIPT.findall(page)]
    bootstrap = "\n".join(entries)
    page = _STYLE.sub(lambda match: f"<style>{(static / match[1]).read_text(encoding='utf-8')}</style>", page)
    scripts = (
        f'<meta http-equiv="Content-Security-Policy" content="{_content_security_policy([import_map, bootstrap])}">'
        f'<script type="importmap">{import_map}</script>'
        f'<script type="application/json" id="rollgraph-export">{_escape(answers.dump_json(data))}</script>'
        f'<script type="module">{bootstrap}</script>'
    )
    return _replace_once(_SCRIPT.sub("", page), "</head>", f"{scripts}</head>")


def _content_security_policy(inline: Sequence[str]) -> str:
    """Allows these inline scripts and the modules of the import map, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src data: {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _bare_imports(text: str) -> str:
    """Replace relative imports by names in the import map: a module in a `data:` URL has no path to be relative to."""
    return _IMPORT.sub(r"\1\2view/\3\2", text)


def _data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _escape(text: str) -> str:
    """Escape JSON text so that it cannot close the script element around it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _replace_once(text: str, old: str, new: str) -> str:
    before, separator, after = text.partition(old)
    assert separator, f"the page has no {old}"
    return before + new + after
