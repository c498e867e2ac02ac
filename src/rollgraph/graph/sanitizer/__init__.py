"""The sanitizer: watches captures and replays, and compares each replay with the eager program."""

from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.session import sanitize, sanitize_process_if_asked

__all__ = ["Finding", "Findings", "sanitize", "sanitize_process_if_asked"]
