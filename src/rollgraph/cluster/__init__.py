"""Runs on a Ray cluster that replace lost ranks.

`lifecycle.py` decides, `driver.py` carries the decisions out and shows progress, and `ray_transport.py` talks to the
workers: Ray actors that run `rank_worker.py`.
"""
