"""The cache of a drafter's own blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import SimpleNamespace

from gptlite.model import Block, GPTlite
from gptlite.speculative.drafters import DraftCache


class BlocksCache(DraftCache):
    """Keys and values of blocks that a drafter has beside the trunk, for as many tokens as its window holds.

    Args:
        model: the trunk.
        blocks: those of the drafter.
        max_batch: texts that it drafts for at once.
        spare: slots of a text beyond the window, for trees, whose siblings share a position.
    Raises: ValueError when max_batch is below 1.
    """

    def __init__(self, model: GPTlite, blocks: Sequence[Block], max_batch: int, spare: int = 0) -> None:
        shapes = SimpleNamespace(blocks=blocks, token_embedding=model.token_embedding)
        super().__init__(shapes, max_batch, model.context_length + spare)  # type: ignore[arg-type]

    def trim(self, sequence: Hashable, n_tokens: int) -> None:
        """Forgets all but the first n tokens of a sequence; nothing happens when it has no more."""
        if len(self._held(sequence)) > n_tokens:
            self.cut(sequence, n_tokens)

    def drop(self, sequence: Hashable) -> None:
        """Frees a sequence, if it is held."""
        if sequence in self.positions:
            self.free(sequence)
