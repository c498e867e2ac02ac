"""The sanitizer: finds mistakes that a graph would hide, by checking captures and comparing replays with eager runs.

Reading order: `sanitizer.py` (the observer), `recording.py` (checks at a replay), then `session.py`, `snapshot.py` and
`trace.py`. Nothing else in `graph` knows the sanitizer.
"""

from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.sanitizer import sanitize, sanitize_process_if_enabled

__all__ = ["Finding", "Findings", "sanitize", "sanitize_process_if_enabled"]
