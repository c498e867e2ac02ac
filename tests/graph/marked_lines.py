"""Lines of a test file that are marked with a comment, to compare with the lines that errors name."""

from __future__ import annotations

from pathlib import Path


def line_of(marker: str, file: str) -> str:
    """`file:line` of the line that ends in the comment `# here: marker`."""
    lines = Path(file).read_text().split("\n")
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# here: {marker}")]
    return f"{file}:{number}"
