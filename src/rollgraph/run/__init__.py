"""A run from its inputs to its last line: setup, steps, saving and outcome.

Before the first step: `setup.py` builds the parts, `begin.py` starts or resumes, `reference.py` owns the reference
policy. In each step: `rollouts.py`, `step_log.py`, and `saving.py` with `progress.py`. At the end: `outcome.py`.
`model_source.py` opens models, adapters, checkpoints and runs for other commands.
"""
