"""FlashDecoding: one query against a long cache, whose keys are split into parts that are read at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptlite.attention import attend, merge_states
from gptlite.model import MultiHeadAttention
from gptlite.variants.swap import recast


def even_splits(n_keys: int, n_splits: int) -> list[int]:
    """Sizes of n_splits parts that differ by one at most; some are empty when there are fewer keys than parts.

    Raises: ValueError when n_splits is below 1 or n_keys below 0.
    """
    if n_splits < 1:
        raise ValueError(f"n_splits is {n_splits}, it must be at least 1")
    if n_keys < 0:
        raise ValueError(f"n_keys is {n_keys}, it must be at least 0")
    return [n_keys // n_splits + (i < n_keys % n_splits) for i in range(n_splits)]


def partial_states(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], mask: Tensor | None = None, scale: float | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Attention over each part of the keys alone; no part needs another, so a GPU reads them all at once.

    Args:
        q, k, v, mask, scale: as in `gptlite.attention.attend`, q [B, H, S, D] and k [B, G, T, D].
        sizes: keys of each part, in order, one part at least; they add up to T.
    Returns: out [B, H, S, Dv] and lse [B, H, S] of each part.
    Raises: ValueError when the sizes don't add up to T, or there are none.
    """
    if sum(sizes) != k.shape[2] or min(sizes, default=-1) < 0:
        raise ValueError(f"sizes is {list(sizes)}, they must be parts of the {k.shape[2]} keys")
    begin, states = 0, []
    for size in sizes:
        part = slice(begin, begin + size)
        part_mask = None if mask is None else mask[..., part]
        states.append(attend(q, k[:, :, part], v[:, :, part], part_mask, scale, need_lse=True))
        begin += size
    return states


def merge_all(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The states of several sets of keys in one: out [..., Dv] and lse [...]; the order does not matter.

    Raises: ValueError when there are none.
    """
    if not states:
        raise ValueError("states is empty, there must be one at least")
    out, lse = states[0]
    for state in states[1:]:
        out, lse = merge_states(out, lse, *state)
    return out, lse


def split_attend(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention with the keys in parts, merged exactly {cite}`dao2023flashdecoding`: q [B, H, S, D] -> [B, H, S, Dv].

    Args:
        q, k, v, mask, scale: as in `gptlite.attention.attend`. sizes: keys of each part, in order.
    """
    wide = torch.promote_types(q.dtype, torch.float32)  # the parts are rounded once, after the merge
    return merge_all(partial_states(q.to(wide), k, v, sizes, mask, scale))[0].to(q.dtype)


def waves(n_blocks: int, n_cores: int) -> tuple[int, float]:
    """How a GPU's cores take blocks of work of the same size: (rounds, share of the cores' time that is used).

    Args:
        n_blocks: blocks of work. n_cores: streaming multiprocessors, each with one block at a time.
    Raises: ValueError when one of them is below 1.
    """
    if n_blocks < 1 or n_cores < 1:
        raise ValueError(f"n_blocks is {n_blocks} and n_cores {n_cores}, both must be at least 1")
    rounds = -(-n_blocks // n_cores)
    return rounds, n_blocks / (rounds * n_cores)


class SplitKVAttention(MultiHeadAttention):
    """The model's attention with split keys for few queries, from the weights that it has, as in decode.

    `swap_attention(model, SplitKVAttention.of)`; a step of more than `most_queries` tokens is done as before.
    """

    n_splits = 8
    most_queries = 16

    @classmethod
    def of(cls, attention: MultiHeadAttention, n_splits: int = 8) -> SplitKVAttention:
        """The same layer, which shares its weights with `attention`. Raises: ValueError when n_splits is below 1."""
        even_splits(0, n_splits)
        new = recast(attention, cls)
        new.n_splits = n_splits
        return new

    def mix(self, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[2] > self.most_queries:
            return super().mix(q, k, v, q_pos, k_pos, mask)
        return split_attend(q, k, v, even_splits(k.shape[2], self.n_splits), mask, self.scale)
