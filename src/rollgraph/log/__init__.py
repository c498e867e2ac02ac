"""Output of a run: the progress display, metrics, and sample completions."""

from rollgraph.log.live_display import make_display
from rollgraph.log.metrics import SinkError, check_sinks, close_sinks, make_sinks, truncate_jsonl
from rollgraph.log.progress import ProgressDisplay
from rollgraph.log.samples import SampleWriter

__all__ = [
    "ProgressDisplay",
    "SampleWriter",
    "SinkError",
    "check_sinks",
    "close_sinks",
    "make_display",
    "make_sinks",
    "truncate_jsonl",
]
