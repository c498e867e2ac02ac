"""Several processes that work as one.

`world.py` says which process this is, `liveness.py` which ones are alive, and `launch.py` joins and leaves them.
"""
