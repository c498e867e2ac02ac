"""Several processes that work as one.

`world.py` says which process this is, `liveness.py` which ones are alive (on top of `connection.py` and
`lost_ranks.py`), and `launch.py` joins and leaves them.
"""
