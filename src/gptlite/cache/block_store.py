"""A store of full blocks by their hash chain: reference counts, the least recently used block goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from gptlite.cache.prefix import Hit, PrefixIndex, PrefixStore, State, block_key, check_state
from gptlite.config import check_counts

if TYPE_CHECKING:
    from gptlite.cache.offload import Tier


@dataclass
class Block:
    """A block of a store: what names it, its keys and values, and how many hits hold it."""

    key: bytes
    parent: bytes
    tokens: bytes
    state: State
    refs: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return sum(part.nbytes for part in self.state.values())


class BlockStore(PrefixStore):
    """Full blocks by their hash chain; the least recently used one that nobody holds makes room for a new one.

    A chain is given back from its end, so a block is always older than its parent: what is evicted is never a block
    that another one in the store follows.

    Args:
        capacity: blocks.
        block_size: tokens of a block.
        below: where evicted blocks go, and are fetched from again: a tier of `gptlite.cache.offload`.
        hash_block: as in `PrefixIndex`.
    Raises: ValueError when a count is not a whole number of at least 1.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int = 16,
        below: Tier | None = None,
        hash_block: Callable[[bytes, bytes], bytes] = block_key,
    ) -> None:
        super().__init__()
        check_counts(capacity=capacity, block_size=block_size)
        self.capacity, self.below = capacity, below
        self.index: PrefixIndex[Block] = PrefixIndex(block_size, hash_block)
        self._idle: OrderedDict[bytes, Block] = OrderedDict()  # held by nobody, the least recently used first

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.index.block_size

    def __len__(self) -> int:
        return len(self.index)

    def match(self, tokens: Sequence[int] | Tensor, salt: str = "") -> int:
        n_blocks = len(self.index.match(tokens, salt))
        if self.below is not None:
            for key, *_ in islice(self.index.chain(tokens, salt), n_blocks, None):
                if key not in self.index and key not in self.below:
                    break
                n_blocks += 1
        return n_blocks * self.block_size

    def acquire(self, tokens: Sequence[int] | Tensor, salt: str = "") -> Hit:
        hit = Hit()
        for key, parent, block_tokens in self.index.chain(tokens, salt):
            found = self.index.find(key, parent, block_tokens) or self._fetch(key, parent, block_tokens)
            if found is None:
                break
            self._hold(found)
            hit.held.append(found)
            hit.parts.append(found.state)
        hit.n_tokens = len(hit.parts) * self.block_size
        self.counts.update(asked=len(tokens), hit=hit.n_tokens)
        return hit

    def release(self, hit: Hit) -> None:
        for block in reversed(hit.held):  # from the end, so that a parent is younger than its child
            block.refs -= 1
            # one that found no room when it was fetched from below was never entered
            entered = self.index.find(block.key, block.parent, block.tokens) is block
            if block.refs == 0 and entered:
                self._idle[block.key] = block
        hit.held = []

    def insert(self, tokens: Sequence[int] | Tensor, state: State, salt: str = "") -> int:
        check_state(state, len(tokens))
        before, hit = self.counts["stored"], Hit()
        for i, (key, parent, block_tokens) in enumerate(self.index.chain(tokens, salt)):
            found = self.index.find(key, parent, block_tokens)
            if found is None:
                rows = slice(i * self.block_size, (i + 1) * self.block_size)
                # a copy of its own, so that evicting the block gives its memory back
                own = {name: part[:, rows].clone() for name, part in state.items()}
                found = Block(key, parent, block_tokens, own)
                if not self._enter(found):
                    if self.below is None or key in self.index:
                        break
                    self.below.put(found)  # the text is longer than the room: its end goes straight down
                self.counts["stored"] += self.block_size
            self._hold(found)
            hit.held.append(found)
        self.release(hit)
        return self.counts["stored"] - before

    def flush(self) -> None:
        """Copies every block to the tiers below, so that a disk has them all before the process ends."""
        if self.below is not None:
            held = [block for block in self.index.payloads() if block.refs]
            for block in [*self._idle.values(), *held]:  # the least recently used first
                self.below.put(block)
            self.below.flush()

    def _hold(self, block: Block) -> None:
        block.refs += 1
        self._idle.pop(block.key, None)

    def _enter(self, block: Block) -> bool:
        """Makes room for a block and enters it. Returns: False when all blocks are held, or the name is another's."""
        if block.key in self.index:
            return False
        if len(self.index) >= self.capacity:
            if not self._idle:
                return False
            key, oldest = self._idle.popitem(last=False)
            self.index.remove(key)
            self.counts["evicted"] += self.block_size
            if self.below is not None:
                self.below.put(oldest)
        return self.index.insert(block.key, block.parent, block.tokens, block)

    def _fetch(self, key: bytes, parent: bytes, tokens: bytes) -> Block | None:
        """A block from the tiers below, entered here again if there is room."""
        if self.below is None or key in self.index:
            return None
        block = self.below.get(key, parent, tokens)
        if block is not None:
            block.refs = 0
            if not self._enter(block):
                self.below.put(block)  # a tier may have given it away
        return block
