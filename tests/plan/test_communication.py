"""The model of collectives: values by hand, and monotonicity over sizes, numbers of ranks and links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rollgraph.plan.layout import (
    COLLECTIVE_ALGORITHMS,
    INFINIBAND,
    NVLINK,
    CollectiveAlgorithm,
    Link,
    Network,
    RankGroup,
)

SLOW = Network(inside=Link(100.0, 0.5), between=Link(10.0, 2.0))
SIZES = (0.0, 1.0, 4096.0, 1e9)
COUNTS = [
    (ranks, nodes) for ranks in (1, 2, 3, 4, 8, 16, 48, 1024) for nodes in (1, 2, 3, 4, 128) if ranks % nodes == 0
]


def test_a_ring_in_one_node_by_hand() -> None:
    """Three rounds, each with a latency of 0.5 s and a quarter of 800 bytes at 100 bytes per second."""
    assert RankGroup(4, 1, SLOW).all_gather(800) == pytest.approx(3 * (0.5 + 2.0))
    assert RankGroup(4, 1, SLOW).reduce_scatter(800) == pytest.approx(7.5)
    assert RankGroup(4, 1, SLOW).all_reduce(800, "ring") == pytest.approx(15.0)


def test_a_ring_over_nodes_by_hand() -> None:
    """Two nodes of two ranks: three hops, two of them between nodes. Each of the two rings has half of the data."""
    bytes_sent = 800 * 3 / 4 / 2
    assert RankGroup(4, 2, SLOW).all_gather(800) == pytest.approx(2 * 2.0 + 0.5 + bytes_sent / 10)
    # With one rank on each node, all hops are between nodes, and there is one ring.
    assert RankGroup(4, 4, SLOW).all_gather(800) == pytest.approx(3 * 2.0 + 600 / 10)


def test_the_slower_kind_of_link_limits_a_ring() -> None:
    """With eight ranks a node, eight adapters have 400 GB/s together, less than the 450 GB/s of NVLink. With sixteen
    they have 800 GB/s, so NVLink limits, over which a rank sends in fifteen of sixteen rings.
    """
    network = Network(replace(NVLINK, latency=0.0), replace(INFINIBAND, latency=0.0))
    assert RankGroup(16, 2, network).all_gather(16e9) == pytest.approx(15e9 / 400e9)
    assert RankGroup(32, 2, network).all_gather(32e9) == pytest.approx(31e9 * 15 / 16 / 450e9)


def test_a_tree_by_hand() -> None:
    """Eight ranks on two nodes: 100 bytes from the other node, then three times 200 bytes in two rounds."""
    group = RankGroup(8, 2, SLOW)
    gathered = (2.0 + 100 / 10) + (2 * 0.5 + 600 / 100)
    assert group.all_gather(800, "tree") == pytest.approx(gathered)
    assert group.all_reduce(800, "tree") == pytest.approx(2 * gathered)


@pytest.mark.parametrize("algorithm", COLLECTIVE_ALGORITHMS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(algorithm: CollectiveAlgorithm) -> None:
    for (ranks, nodes), size in itertools.product(COUNTS, SIZES):
        group = RankGroup(ranks, nodes)
        both = group.reduce_scatter(size, algorithm) + group.all_gather(size, algorithm)
        assert group.all_reduce(size, algorithm) == both
        assert group.all_reduce(size) <= both


def test_collectives_of_one_rank_take_no_time() -> None:
    group = RankGroup(1, 1, SLOW)
    for algorithm in COLLECTIVE_ALGORITHMS:
        assert group.all_gather(1e12, algorithm) == group.all_reduce(1e12, algorithm) == 0
    assert group.all_reduce(1e12) == 0


@pytest.mark.parametrize("algorithm", COLLECTIVE_ALGORITHMS)
def test_time_grows_with_bytes_latency_and_slower_links(algorithm: CollectiveAlgorithm) -> None:
    for ranks, nodes in COUNTS:
        times = [RankGroup(ranks, nodes).all_reduce(size, algorithm) for size in SIZES]
        assert times == sorted(times)
        for which in ("inside", "between"):
            link = getattr(SLOW, which)
            later = replace(SLOW, **{which: replace(link, latency=2 * link.latency)})
            slower = replace(SLOW, **{which: replace(link, bandwidth=link.bandwidth / 2)})
            for network in (later, slower):
                assert RankGroup(ranks, nodes, network).all_gather(1e6) >= RankGroup(ranks, nodes, SLOW).all_gather(1e6)


@pytest.mark.parametrize("algorithm", COLLECTIVE_ALGORITHMS)
@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_time_grows_with_nodes(algorithm: CollectiveAlgorithm, per_node: int) -> None:
    for size in SIZES:
        times = [RankGroup(per_node * nodes, nodes).all_gather(size, algorithm) for nodes in range(1, 130)]
        assert times == sorted(times)
    inside = [RankGroup(ranks).all_gather(1e6, algorithm) for ranks in range(1, 130)]
    assert inside == sorted(inside)


def test_small_all_reduces_use_the_tree() -> None:
    group = RankGroup(8)
    assert group.all_reduce(1024) == group.all_reduce(1024, "tree") < group.all_reduce(1024, "ring")
    assert group.all_reduce(1e12, "ring") == pytest.approx(group.all_reduce(1e12, "tree"), rel=1e-4)


@pytest.mark.parametrize(("ranks", "nodes"), [(0, 1), (4, 0), (9, 2)])
def test_ranks_that_do_not_spread_over_nodes_are_refused(ranks: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"^{ranks} ranks"):
        RankGroup(ranks, nodes)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (1, -1), (float("inf"), 0), (float("nan"), 0)])
def test_impossible_links_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="a link needs a positive bandwidth"):
        Link(bandwidth, latency)
