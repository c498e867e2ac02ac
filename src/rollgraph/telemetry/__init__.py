"""What people see of a run: the terminal, metrics in other tools, sample completions."""

from rollgraph.telemetry.sinks import SampleWriter, SinkError, check_sinks, close_sinks, make_sinks, truncate_jsonl
from rollgraph.telemetry.terminal import View, make_view

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
