"""Which blocks of the paged cache are in use, by how many sequences, and which hold a prefix that others can share.

Owns the free list, the reference counts and the map from content to blocks. It only decides: it touches no tensor and
knows nothing of rows, steps or requests. The scheduler says what a block will hold; the engine writes it.

    >>> manager = BlockManager(blocks=8, block_size=4)
    >>> table = manager.allocate(2)
    >>> manager.register(table, (10, 11, 12, 13, 14, 15))  # one full block and a tail of two tokens
    >>> manager.match((10, 11, 12, 13, 14, 15))  # share block 1, copy block 2
    ([1], 2)
    >>> manager.match((10, 11, 12, 13, 14, 99))  # share block 1, compute the rest
    ([1], None)
    >>> manager.release(table)
    >>> manager.match((10, 11, 12, 13, 14, 15))  # freed content is forgotten
    ([], None)
"""

from __future__ import annotations

# Idle rows write to block 0, so it is never allocated. As a parent, it means that the block is the first of a prefix.
ROOT = 0

# What a block holds: its parent (the block before it) and its tokens. Keys and values depend on the whole prefix, and
# the number of a live parent stands for that prefix: a sequence that holds a block also holds every block before it, so
# no number in a live key can have been freed and reused for other content. The comparison is therefore exact, and
# equally cheap for the first and the last block of a prefix.
Content = tuple[int, tuple[int, ...]]


class BlockManager:
    """Manages blocks 1 to `blocks - 1`, each with room for `block_size` tokens.

    A block table lists the blocks of one sequence in order.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(
                f"{blocks} blocks of {block_size} tokens: a cache needs at least 2 blocks of at least 1 token"
            )
        self.block_size = block_size
        self.capacity = blocks - 1  # blocks that can be allocated in all
        self._free = list(range(blocks - 1, 0, -1))  # a stack: the lowest number comes out first
        self._counts = [0] * blocks
        self._content: dict[int, Content] = {}
        self._holders: dict[Content, dict[int, None]] = {}  # the blocks with this content, oldest first

    @property
    def free(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._free)

    def count(self, block: int) -> int:
        """How many tables list this block."""
        return self._counts[block]

    def needed(self, positions: int) -> int:
        """How many blocks this many positions take."""
        return -(-positions // self.block_size)

    def allocate(self, number: int) -> list[int]:
        """Take free blocks for one table. Their content is unknown."""
        if number > len(self._free):
            raise RuntimeError(f"cannot allocate {number} blocks: only {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(number)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Count one more table that lists these blocks."""
        for block in blocks:
            if not self._counts[block]:
                raise RuntimeError(f"cannot share block {block}: it is free")
            self._counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Count one table fewer. A block that no table lists becomes free, and its content is forgotten."""
        for block in blocks:
            if not self._counts[block]:
                raise RuntimeError(f"cannot release block {block}: it is already free")
            self._counts[block] -= 1
            if not self._counts[block]:
                self._forget(block)
                self._free.append(block)

    def match(self, prefix: tuple[int, ...]) -> tuple[list[int], int | None]:
        """Find the full blocks that hold the beginning of a prefix, and a block from which its tail can be copied.

        The tail is what remains of the prefix after the full blocks. It is found only if all of it is in one block and
        all full blocks before it match. The sequence that owns this block will write to it again, so the block can be
        copied but not shared.
        """
        shared: list[int] = []
        parent = ROOT
        for start in range(0, len(prefix), self.block_size):
            tokens = prefix[start : start + self.block_size]
            holders = self._holders.get((parent, tokens))
            if not holders:
                break
            # Take the oldest: a block that is itself filled by a copy in this step cannot be the source of another.
            block = next(iter(holders))
            if len(tokens) < self.block_size:
                return shared, block
            shared.append(block)
            parent = block
        return shared, None

    def register(self, table: list[int], prefix: tuple[int, ...], start: int = 0) -> None:
        """Record that the blocks of a table hold this prefix. Up to position `start` this is already known."""
        size = self.block_size
        for index in range(start // size, self.needed(len(prefix))):
            block = table[index]
            parent = table[index - 1] if index else ROOT
            content = parent, prefix[index * size : (index + 1) * size]
            self._forget(block)  # it was known by fewer tokens if an earlier chunk ended within it
            self._content[block] = content
            self._holders.setdefault(content, {})[block] = None

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            holders = self._holders[content]
            del holders[block]
            if not holders:
                del self._holders[content]
