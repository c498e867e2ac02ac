"""Verdicts: which rank is lost, given what is known about each one."""

from __future__ import annotations

from rollgraph.distributed.lost_ranks import LossReport, Peer, find_silent, report_silent, report_stragglers


def test_the_first_rank_that_exceeds_the_limit_is_silent() -> None:
    peers = {1: Peer(last_heard=9.0), 2: Peer(last_heard=4.0), 3: Peer(last_heard=1.0)}
    assert find_silent(peers, now=10.0, limit=5.0) == 2
    assert find_silent(peers, now=10.0, limit=20.0) is None


def test_a_rank_that_said_goodbye_may_be_silent() -> None:
    assert find_silent({1: Peer(last_heard=0.0, left=True)}, now=100.0, limit=5.0) is None


def test_a_silent_rank_is_reported_for_no_longer_than_the_timeout() -> None:
    report = report_silent(2, Peer(last_heard=0.0), now=7.5, timeout=5.0)
    assert report == LossReport(2, "rank 2 (last operation: startup) has sent no heartbeat for 5 s")


def test_the_ranks_that_are_furthest_behind_are_named() -> None:
    peers = {0: Peer(0.0, 5, "e"), 1: Peer(0.0, 3, "c"), 2: Peer(0.0, 4, "d"), 3: Peer(0.0, 3, "c")}
    text = "rank 1 (last operation: c), rank 3 (last operation: c) did not reach e within 20 s"
    assert report_stragglers(peers, 5, "e", 20.0) == LossReport(1, text)


def test_no_rank_is_named_if_all_have_started_the_operation() -> None:
    peers = {0: Peer(0.0, 5, "e"), 1: Peer(0.0, 5, "e")}
    assert report_stragglers(peers, 5, "e", 20.0).rank is None
