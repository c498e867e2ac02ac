"""Write `config/migration.tsv` from the migration pages. Error messages use it to answer names of other frameworks.

    python tools/migration_table.py

Each name in a table with the header `| FRAMEWORK | rollgraph | |` becomes a line. A name without dots that follows a
name with dots is a key of the same section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "rollgraph" / "config" / "migration.tsv"
PAGES = ("migrating_trl.md", "migrating_verl.md", "migrating_nemo_rl.md", "migrating.md")
TABLES = re.compile(r"^\| (.+) \| rollgraph \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def make_table() -> str:
    return "".join("\t".join(row) + "\n" for page in PAGES for row in rows_of(page))


def rows_of(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (framework, name, our keys, remark) for each name on a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for framework, lines in TABLES.findall(text):
        for line in lines.splitlines():
            theirs, ours, remark = line.strip("|").split("|")
            keys = " ".join(QUOTED.findall(ours))
            plain = LINK.sub(r"\1", remark).replace("`", "").strip()
            section = ""
            for name in QUOTED.findall(theirs):
                section = name.rpartition(".")[0] or section
                yield framework, ".".join(filter(None, (section, name.rpartition(".")[2]))), keys, plain


if __name__ == "__main__":
    TABLE.write_text(make_table(), encoding="utf-8")
