"""Which blocks of the paged cache are taken, by how many, and which hold content that the next sequence can use.

Owns the free list, the reference counts and the map from content to blocks. Decides only: it touches no tensor
and knows nothing of rows, steps or requests. The scheduler says what a block is going to hold; the engine writes it.

    >>> manager = BlockManager(blocks=8, block_size=4)
    >>> table = manager.allocate(2)
    >>> manager.register(table, (10, 11, 12, 13, 14, 15))  # one full block, and a tail of two tokens
    >>> manager.match((10, 11, 12, 13, 14, 15))  # share block 1, copy block 2
    ([1], 2)
    >>> manager.match((10, 11, 12, 13, 14, 99))  # share block 1, compute the rest
    ([1], None)
    >>> manager.release(table)
    >>> manager.match((10, 11, 12, 13, 14, 15))  # what is freed is forgotten
    ([], None)
"""

from __future__ import annotations

# Idle rows write to block 0, so it is never given out. As a parent it means that nothing comes before.
ROOT = 0

# What a block holds: its tokens, and the block before it. Keys and values depend on the whole prefix, and the number
# of a live block stands for that: whoever holds a block holds all that come before it, so no number in a live key has
# been freed and given to other content. This is exact, and as cheap for the last block of a prefix as for the first.
Content = tuple[int, tuple[int, ...]]


class BlockManager:
    """Blocks 1 to `blocks - 1`, of `block_size` token places each. A table lists the blocks of a sequence in order."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} places: needs block 0, another one, and a place in each")
        self.block_size = block_size
        self.capacity = blocks - 1  # how many can be given out in all
        self._free = list(range(blocks - 1, 0, -1))  # a stack: the lowest number first
        self._counts = [0] * blocks
        self._content: dict[int, Content] = {}
        self._holders: dict[Content, dict[int, None]] = {}  # the blocks with this content, the oldest first

    @property
    def free(self) -> int:
        """How many blocks can be given out now."""
        return len(self._free)

    def count(self, block: int) -> int:
        """How many tables list a block."""
        return self._counts[block]

    def needed(self, positions: int) -> int:
        """How many blocks so many positions take."""
        return -(-positions // self.block_size)

    def allocate(self, number: int) -> list[int]:
        """Blocks for one table alone, content unknown."""
        if number > len(self._free):
            raise RuntimeError(f"{number} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(number)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more table lists these blocks."""
        for block in blocks:
            if not self._counts[block]:
                raise RuntimeError(f"block {block} is free: there is nothing to share")
            self._counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """A table lists these blocks no longer. What no table lists is free, and its content forgotten."""
        for block in blocks:
            if not self._counts[block]:
                raise RuntimeError(f"block {block} is free already")
            self._counts[block] -= 1
            if not self._counts[block]:
                self._forget(block)
                self._free.append(block)

    def match(self, prefix: tuple[int, ...]) -> tuple[list[int], int | None]:
        """The full blocks at the beginning of a prefix that are there to share, and a block to copy its tail from.

        The tail, which is what the prefix leaves over after full blocks, is found only whole and under all of them:
        its block goes on to be written by the sequence that has it, so it can be copied but not shared.
        """
        shared: list[int] = []
        for start in range(0, len(prefix), self.block_size):
            tokens = prefix[start : start + self.block_size]
            holders = self._holders.get((shared[-1] if shared else ROOT, tokens))
            if not holders:
                break
            # The oldest: a block that this very step fills by a copy cannot be the source of another copy.
            block = next(iter(holders))
            if len(tokens) < self.block_size:
                return shared, block
            shared.append(block)
        return shared, None

    def register(self, table: list[int], prefix: tuple[int, ...], start: int = 0) -> None:
        """The blocks of a table hold this prefix; up to position `start` that is known already."""
        size = self.block_size
        for index in range(start // size, self.needed(len(prefix))):
            parent = table[index - 1] if index else ROOT
            content = parent, prefix[index * size : (index + 1) * size]
            self._forget(table[index])  # fewer tokens, if an earlier chunk ended within the block
            self._content[table[index]] = content
            self._holders.setdefault(content, {})[table[index]] = None

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            holders = self._holders[content]
            del holders[block]
            if not holders:
                del self._holders[content]
