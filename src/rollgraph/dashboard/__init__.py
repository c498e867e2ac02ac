"""What people see of a run: the terminal, metrics in other tools, sample completions."""

from rollgraph.dashboard.sinks import SampleWriter, SinkError, close_sinks, make_sinks, truncate_jsonl
from rollgraph.dashboard.terminal import View, make_view

__all__ = ["SampleWriter", "SinkError", "View", "close_sinks", "make_sinks", "make_view", "truncate_jsonl"]
