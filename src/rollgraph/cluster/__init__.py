"""Runs on a cluster whose lost ranks are replaced.

`launch.py` starts one. `lifecycle.py` decides, `driver.py` carries out what it decides and shows what happens, and
`ray_transport.py` does that with actors of Ray, each of which is a `rank_worker.py`. `reward_pool.py` has rewards
computed on a cluster, for a run that may be on it or not.
"""
