"""The sanitizer: finds what a graph would get wrong, by checking captures and comparing replays with eager.

Reading order: `sanitizer.py` (the observer), `instrumented_recording.py` (what happens at a replay), then the checks:
`snapshot.py`, `output_poisoning.py`, `unrecorded_hooks.py`, `eager_reference.py` and `divergence.py`.
"""

from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.sanitizer import sanitize, sanitize_process_if_asked

__all__ = ["Finding", "Findings", "sanitize", "sanitize_process_if_asked"]
