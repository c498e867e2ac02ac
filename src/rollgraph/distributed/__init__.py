"""Several processes that work as one.

`world.py` says which process this is, `liveness.py` which ones are alive (on top of `connection.py` and
`lost_ranks.py`), and `attempt.py` joins and leaves them; `refusal.py` keeps `torchrun` from trying in vain.
"""
