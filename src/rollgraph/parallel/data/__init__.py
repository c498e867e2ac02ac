"""Sharded data parallelism: flat buffers, hooks, and communication that overlaps with computation.

Start reading at `sharded_model.py`."""
