"""The block manager: which blocks of a pool are free, how many tables hold each, which keep their content."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from gptlite.cache.prefix import PrefixIndex


class BlockPool:
    """Counts who holds which block of a pool; it knows numbers of blocks, not what is in them.

    A block is used (some table holds it), unused, or idle: no table holds it, but its content may serve a later
    prompt, and it is given away only when no unused block is left, the one that was let go first before the others.

    Args:
        n_blocks: of the pool, at least 1.
        block_size: tokens of a block; only for the index of contents.
    Raises: ValueError when a number is below 1.
    """

    def __init__(self, n_blocks: int, block_size: int = 16) -> None:
        for name, value in (("n_blocks", n_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.references = [0] * n_blocks  # tables that hold each block
        self.index: PrefixIndex[int] = PrefixIndex(block_size)
        self.evicted = 0  # idle blocks given away so far
        self._unused = list(range(n_blocks))  # a heap: the lowest number is given first
        self._idle: dict[int, None] = {}  # in the order in which they were let go
        self._keys: dict[int, bytes] = {}  # of the blocks whose content is in the index

    @property
    def free(self) -> int:
        """Blocks that can be taken: unused and idle."""
        return len(self._unused) + len(self._idle)

    @property
    def idle(self) -> list[int]:
        """Blocks that no table holds and that keep their content, the next to go first."""
        return list(self._idle)

    def take(self, n: int) -> list[int]:
        """n blocks, held once each. Raises: ValueError when fewer are free."""
        if n > self.free:
            raise ValueError(f"{n} blocks are needed, {self.free} of {len(self.references)} are free")
        blocks = []
        for _ in range(n):
            if self._unused:
                block = heapq.heappop(self._unused)
            else:
                block = next(iter(self._idle))
                del self._idle[block]
                self.forget(block)
                self.evicted += 1
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A table lets go of its blocks; the last ones become free first, since the first serve more prompts."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._unused, block)

    def remember(self, block: int, key: bytes, parent: bytes, tokens: bytes) -> bool:
        """Puts a used block's content into the index, unless another block holds the same already.

        Returns: False when the key stands for something else, a collision; what follows must stay out then.
        """
        if block not in self._keys and self.index.insert(key, parent, tokens, block):
            self._keys[block] = key
        return self.index.find(key, parent, tokens) is not None

    def forget(self, block: int) -> None:
        """Takes a block's content out of the index, because it is about to change."""
        key = self._keys.pop(block, None)
        if key is not None:
            self.index.remove(key)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks the books against the tables that hold blocks. Raises: AssertionError that says what is wrong."""
        entries = Counter(block for table in tables for block in table)
        for block, count in enumerate(self.references):
            assert count == entries[block], f"block {block} has {count} references and {entries[block]} table entries"
        used = {block for block, count in enumerate(self.references) if count}
        parts = [*used, *self._unused, *self._idle]
        assert sorted(parts) == list(range(len(self.references))), "a block is lost or counted twice"
        assert set(self._idle) <= set(self._keys), "an idle block keeps nothing"
        assert not set(self._unused) & set(self._keys), "an unused block is in the index"
