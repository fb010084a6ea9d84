"""The host's side of a paged cache: which blocks hold which tokens of which sequence, and who shares them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from gptlite.cache.blocks import BlockPool
from gptlite.cache.prefix import block_chain
from gptlite.cache.tracked import TrackedCache

if TYPE_CHECKING:
    from gptlite.model import GPTlite


@dataclass
class Row:
    """What the cache knows of a sequence, beside its positions.

    Args:
        table: its blocks, in the order of its tokens.
        text: its tokens, as far as the cache was told them.
        salt: what else must agree for another to share its blocks.
        keys: of its full blocks, as far as they are hashed.
        before: how many tokens it had before its last step.
        written: how many of its tokens surely have their keys and values in the pool.
    """

    table: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    salt: str = ""
    keys: list[bytes] = field(default_factory=list)
    before: int = 0
    written: int = 0


class BlockTables(TrackedCache):
    """Keeps a block table per sequence; what lies in the blocks is `PagedCache`'s.

    Args:
        model: read for the shape of each layer.
        n_blocks: blocks of the pool.
        block_size: tokens of a block.
        prefix_caching: keep full blocks for later prompts that begin alike, until their room is needed.
    Raises: ValueError when a number is below 1.
    """

    def __init__(self, model: GPTlite, n_blocks: int, block_size: int = 16, prefix_caching: bool = False) -> None:
        super().__init__(model)
        self.pool = BlockPool(n_blocks, block_size)
        self.n_blocks, self.block_size, self.prefix_caching = n_blocks, block_size, prefix_caching
        self.longest = n_blocks * block_size
        self._rows: dict[Hashable, Row] = {}
        self._stored = False  # whether the last step's keys and values came down to the last layer
        self._writers: list[tuple[int, Hashable]] = []  # blocks that the last step writes, and for which sequence

    @property
    def free_blocks(self) -> int:
        """Blocks that a step can take; those that only keep content for a later prompt are among them."""
        return self.pool.free

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that so many tokens of a sequence take."""
        return -(-n_tokens // self.block_size)

    def table(self, sequence: Hashable) -> list[int]:
        """The sequence's blocks, in the order of its tokens. Raises: ValueError when it is not held."""
        self._held(sequence)
        return list(self._rows[sequence].table)

    def check(self) -> None:
        """Checks the cache's own books. Raises: AssertionError that says what is wrong."""
        self.pool.check([row.table for row in self._rows.values()])
        assert self._rows.keys() == self.positions.keys(), "a sequence has no row, or a row no sequence"
        for key, row in self._rows.items():
            n = len(self.positions[key])
            assert len(row.table) == self.blocks_for(n), f"sequence {key!r} has {n} tokens in {len(row.table)} blocks"
        blocks = [block for block, _ in set(self._writers)]
        assert len(blocks) == len(set(blocks)), "two sequences write into one block in a step"

    def _missing(self, new: Mapping[Hashable, int]) -> int:
        """Blocks that a step must take: for tokens that have no room, and for copies of shared blocks it writes."""
        missing, sharers = 0, dict[int, int]()
        for key, n_new in new.items():
            n, table = len(self.positions.get(key, ())), self._rows.get(key, Row()).table
            missing += self.blocks_for(n + n_new) - len(table)
            if n_new and n % self.block_size:
                left = sharers.setdefault(table[-1], self.pool.references[table[-1]])  # tables that hold it
                missing += left > 1  # the last one that shares it writes in place
                sharers[table[-1]] -= 1
        return missing

    def fits(self, new: Mapping[Hashable, int]) -> bool:
        return self._missing(new) <= self.pool.free

    def _extend(self, key: Hashable, n_new: int, fresh: Iterator[int], copies: dict[int, int]) -> list[int]:
        """Gives a sequence room for its new tokens, and a last block that is its own; returns their slots."""
        row, n = self._rows[key], len(self.positions[key])
        if n_new and n % self.block_size:
            last = row.table[-1]
            if self.pool.references[last] > 1:
                row.table[-1] = next(fresh)
                copies[row.table[-1]] = last
                self.pool.release([last])
            else:
                self.pool.forget(last)
        row.table += [next(fresh) for _ in range(self.blocks_for(n + n_new) - len(row.table))]
        slots = [row.table[i // self.block_size] * self.block_size + i % self.block_size for i in range(n, n + n_new)]
        self._writers += [(block, key) for block in row.table[n // self.block_size :]]
        return slots

    def _settle(self, sequences: Iterable[Hashable]) -> None:
        """Takes the last step's tokens as final, and puts blocks that are full of written ones into the index."""
        for key in sequences:
            self._rows[key].written = self._written(key)
            if self.prefix_caching:
                self._remember(self._rows[key], self.positions[key])

    def _written(self, key: Hashable) -> int:
        """How many of a sequence's tokens have their keys and values in the pool, if the last step's count."""
        row = self._rows[key]
        whole = key in self._real and self._stored and row.written == row.before
        return len(self.positions[key]) if whole else row.written

    def _remember(self, row: Row, positions: list[int]) -> None:
        """Puts a sequence's blocks that are full of written tokens into the index, as far as they are not there."""
        size, hash_block = self.block_size, self.pool.index.hash_block
        begin, end = len(row.keys) * size, min(row.written, len(row.text))
        parent = row.keys[-1] if row.keys else b""
        for key, before, tokens in block_chain(row.text[begin:end], size, row.salt, parent, hash_block):
            # only a text at its own positions, that nothing was taken out of, is of use to another
            if positions[begin : begin + size] != list(range(begin, begin + size)):
                return
            if not self.pool.remember(row.table[begin // size], key, before, tokens):
                return
            row.keys.append(key)
            begin += size

    def match(self, tokens: Tensor, salt: str = "") -> int:
        return len(self.pool.index.match(tokens, salt)) * self.block_size

    def begin(self, sequence: Hashable, tokens: Tensor, salt: str = "") -> int:
        self._absent(sequence)
        if not self.prefix_caching:
            return 0
        blocks = self.pool.index.match(tokens, salt)
        n = max(0, min(len(blocks) * self.block_size, len(tokens) - 1))  # the last is read for its logits
        blocks = blocks[: self.blocks_for(n)]
        chain = block_chain(tokens[:n], self.block_size, salt, hash_block=self.pool.index.hash_block)
        self.pool.share(blocks)
        self.positions[sequence] = list(range(n))
        self._rows[sequence] = Row(blocks, tokens[:n].tolist(), salt, [key for key, _, _ in chain], n, n)
        return n

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        positions = self._held(sequence)
        self._absent(new)
        row = self._rows[sequence]
        self.pool.share(row.table)
        self.positions[new] = list(positions)
        self._rows[new] = replace(
            row,
            table=list(row.table),
            text=list(row.text),
            keys=list(row.keys),
            before=len(positions),
            written=self._written(sequence),
        )

    def free(self, sequence: Hashable) -> None:
        self._held(sequence)
        self._settle([sequence])
        self.pool.release(self._rows.pop(sequence).table)
        del self.positions[sequence]
        self._real.pop(sequence, None)
        self._writers = [(block, key) for block, key in self._writers if key != sequence]
