"""What people see of a run: the terminal, metrics, and sample completions."""

from rollgraph.telemetry.jsonl import truncate_jsonl
from rollgraph.telemetry.samples import SampleWriter
from rollgraph.telemetry.sinks import SinkError, check_sinks, close_sinks, make_sinks
from rollgraph.telemetry.terminal import make_view
from rollgraph.telemetry.view import View

__all__ = [
    "SampleWriter",
    "SinkError",
    "View",
    "check_sinks",
    "close_sinks",
    "make_sinks",
    "make_view",
    "truncate_jsonl",
]
