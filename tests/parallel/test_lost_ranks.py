"""Verdicts: which rank is lost, from the state of each peer."""

from __future__ import annotations

from rollgraph.parallel.ranks.failures import LossReport, Peer, find_silent, report_silent, report_stragglers


def test_the_first_rank_that_exceeds_the_limit_is_silent() -> None:
    heard = {1: 9.0, 2: 4.0, 3: 1.0}
    peers = {rank: Peer(last_heard=when, connected=True) for rank, when in heard.items()}
    assert find_silent(peers, now=10.0, heartbeat_timeout=5.0, join_timeout=100.0) == 2
    assert find_silent(peers, now=10.0, heartbeat_timeout=20.0, join_timeout=0.0) is None


def test_a_rank_that_has_not_joined_yet_has_more_time() -> None:
    peers = {1: Peer(last_heard=0.0)}
    assert find_silent(peers, now=50.0, heartbeat_timeout=5.0, join_timeout=100.0) is None
    assert find_silent(peers, now=101.0, heartbeat_timeout=5.0, join_timeout=100.0) == 1
    assert report_silent(1, peers[1], 101.0, 100.0).text == "rank 1 did not join within 100 s"


def test_a_rank_that_left_may_be_silent() -> None:
    assert (
        find_silent(
            {1: Peer(last_heard=0.0, connected=True, has_left=True)}, 100.0, heartbeat_timeout=5.0, join_timeout=5.0
        )
        is None
    )


def test_a_silent_rank_is_reported_for_no_longer_than_the_timeout() -> None:
    report = report_silent(2, Peer(0.0, phase="save", node="node-b", connected=True), now=7.5, timeout=5.0)
    text = "rank 2 on node-b (save; last operation: startup) has sent no heartbeat for 5 s"
    assert report == LossReport(2, text, "node-b", "save")


def test_the_ranks_that_are_furthest_behind_are_named() -> None:
    reached = {0: (5, "e"), 1: (3, "c"), 2: (4, "d"), 3: (3, "c")}
    peers = {rank: Peer(0.0, *operation, "train", f"node-{rank}") for rank, operation in reached.items()}
    stragglers = "rank 1 on node-1 (train; last operation: c), rank 3 on node-3 (train; last operation: c)"
    text = f"{stragglers} did not reach e within 20 s"
    assert report_stragglers(peers, 5, "e", 20.0) == LossReport(1, text, "node-1", "train")


def test_no_rank_is_named_if_all_have_started_the_operation() -> None:
    peers = {0: Peer(0.0, 5, "e"), 1: Peer(0.0, 5, "e")}
    assert report_stragglers(peers, 5, "e", 20.0).rank is None
