"""Plans a run before anything is allocated: memory by phase, time of a step, and the layout of its ranks.

`report.py` makes the plan that `rollgraph plan` shows. `chosen_memory.py` applies one to a run."""
