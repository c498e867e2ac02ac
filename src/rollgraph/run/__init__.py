"""A run: its inputs, its parts, its folder, and everything that must survive the process.

In the order of a run: `folder_lock.py`, `resume.py` (how it starts), `hub_pins.py` with `hub_cache.py` (models and
datasets of the Hugging Face Hub), `inputs.py` with `shapes.py`, `demonstrations.py` and `teacher.py`, `setup.py`,
`begin.py` with `warm_start.py` and `reference.py`; in each step `rollouts.py`, `step_log.py`, `saving.py` with
`checkpoints.py` and `progress.py`; and `stop.py`. `memory_plan.py` and `step_floor.py` are for `rollgraph plan`.
"""
