"""Rewards: functions with TRL's signature, called in this process, in worker processes or on a cluster.

Start reading in `rewards.py`. Nothing is imported here, so that a worker process starts quickly."""
