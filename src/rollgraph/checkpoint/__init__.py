"""Sharded checkpoints: written atomically, and loaded with any number of ranks.

`format.py` has the manifest, `write.py` and `load.py` write and read checkpoints, `keep.py` manages the checkpoints of
a run, `start.py` decides how a run starts, and `changes.py` compares its configuration with the checkpoint's. With
`checkpoint.peers`, ranks also keep copies of each other's state in memory: `peer_choice.py` and `peer_exchange.py`."""
