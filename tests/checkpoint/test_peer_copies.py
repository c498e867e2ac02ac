"""Copies of a rank's state arrive completely or not at all, and one is complete at any time."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollgraph.checkpoint.peer_choice import Holding, Version
from rollgraph.checkpoint.peer_exchange import PeerCopies, ShardCopy, receive_copy, reusable_copy, send_copy
from rollgraph.checkpoint.write import shard_layout
from rollgraph.parallel.data.bucket_plan import StateFormat
from rollgraph.parallel.optim.state import OptimizerState

RANKS = 3
ABOUT = {"steps": 3, "state": {"data": {"cursor": 5}, "reward": 0.1}}


def filled(state: StateFormat, elements: int = 40_000) -> tuple[OptimizerState, PeerCopies]:
    """Shards with a rank's own copies of them; the first copy is complete."""
    optimizer = OptimizerState([elements, 64], state, "none", "cpu")
    for shard in optimizer.shards:
        for tensor in shard.values():
            tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(tensor.numel()))
    copies = PeerCopies()
    copies.prepare(RANKS)
    copies.own_copies[0].allocate(shard_layout(optimizer.shards), "cpu")
    for source, target in zip(optimizer.shards, copies.own_copies[0].shards, strict=True):
        for name, tensor in source.items():
            target[name].copy_(tensor)
    copies.own_copies[0].mark_complete(1, Version(0, 2), ABOUT)
    return optimizer, copies


def bytes_of(copy: ShardCopy) -> bytes:
    return b"".join(bytes(memory) for memory in copy.memoryviews())


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_copy_arrives_bit_for_bit(state: StateFormat) -> None:
    _, copies = filled(state)
    target = PeerCopies()
    target.prepare(RANKS)
    sender, receiver = socket.socketpair()
    with sender, receiver, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_copy, sender, copies.own_copies[0])
        receive_copy(receiver, target.neighbour_copies[0], "cpu")
        sending.result()
    assert bytes_of(target.neighbour_copies[0]) == bytes_of(copies.own_copies[0])
    assert target.holdings() == [Holding(1, Version(0, 2))]
    assert target.find(1, Version(0, 2)) is target.neighbour_copies[0]
    assert target.neighbour_copies[0].metadata == ABOUT


def test_a_copy_whose_sender_dies_does_not_replace_the_one_before() -> None:
    optimizer, copies = filled("fp32", elements=4_000_000)  # more than a socket holds
    target = PeerCopies()
    target.prepare(RANKS)
    before = target.neighbour_copies[0]
    before.allocate(shard_layout(optimizer.shards), "cpu")
    before.mark_complete(1, Version(0, 1), {})
    content = bytes_of(before)
    broken = reusable_copy(target.neighbour_copies)
    broken.mark_complete(1, Version(0, 0), {})  # its content is dropped when newer content begins to arrive
    sender, receiver = socket.socketpair()
    with sender, receiver, ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as thread_of_sender:
        receiving = thread.submit(receive_copy, receiver, broken, "cpu")
        sending = thread_of_sender.submit(send_copy, sender, copies.own_copies[0])
        while broken.shards == ():  # it has begun to arrive
            time.sleep(0.001)
        sender.shutdown(socket.SHUT_RDWR)
        assert isinstance(sending.exception(), OSError)
        assert isinstance(receiving.exception(), ConnectionError)
    assert target.holdings() == [Holding(1, Version(0, 1))]
    assert bytes_of(before) == content
    assert reusable_copy(target.neighbour_copies) is broken


def test_the_older_copy_is_overwritten() -> None:
    _, copies = filled("fp32")
    assert reusable_copy(copies.own_copies) is copies.own_copies[1]
    copies.own_copies[1].mark_complete(1, Version(0, 3), ABOUT)
    assert reusable_copy(copies.own_copies) is copies.own_copies[0]
    copies.own_copies[0].mark_complete(1, Version(1, 2), ABOUT)  # of a later attempt: newer despite fewer steps
    assert reusable_copy(copies.own_copies) is copies.own_copies[1]
    copies.forget_all_but(Version(0, 3))
    assert reusable_copy(copies.own_copies) is copies.own_copies[0]


def test_memory_is_kept_for_the_same_state_and_replaced_for_another() -> None:
    optimizer, copies = filled("fp32")
    memory = copies.own_copies[0].shards
    copies.own_copies[0].allocate(shard_layout(optimizer.shards), "cpu")
    assert copies.own_copies[0].shards is memory
    assert copies.holdings() == []
    copies.own_copies[0].allocate(shard_layout(OptimizerState([40_000, 64], "int8", "none", "cpu").shards), "cpu")
    assert copies.own_copies[0].shards is not memory


def test_copies_are_dropped_if_the_number_of_ranks_changes() -> None:
    _, copies = filled("fp32")
    copies.prepare(RANKS)
    assert copies.holdings() == [Holding(1, Version(0, 2))]
    copies.prepare(RANKS + 1)
    assert copies.holdings() == []
