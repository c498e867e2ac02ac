"""The state around a graph: its binding to the program's memory, and the rollback after a capture.

`transaction.py` and `undo_log.py` restore the process after a capture. `names.py`, `slots.py` and `binding.py` find the
objects that a graph was captured with, and check before each replay that they are still in place."""
