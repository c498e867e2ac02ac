"""A run: its inputs, its parts, its folder, and everything that must survive the process.

In the order of a run: `folder_lock.py`, `resume.py` (how it starts), `hub_pins.py` with `hub_cache.py` (models and
datasets of the Hugging Face Hub), `inputs.py` with `shapes.py`, `demonstrations.py` and `teacher.py`, `setup.py`,
`begin.py` with `warm_start.py` and `reference.py`; in each step `rollouts.py`, `step_log.py`, `saving.py` with
`checkpoints.py` and `progress.py`; and `stop.py`. Before anything is allocated, `chosen_memory.py` asks
`memory_choice.py`, which knows the plans of `memory_plan.py` and the estimates of `step_time.py`; `plan.py` is for
`rollgraph plan`.
"""
