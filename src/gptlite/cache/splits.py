"""Attention that reads keys and values through a block table, some pages at a time, and merges what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gptlite.attention import attend, merge_states
from gptlite.cache.contract import Segment


@dataclass
class Split:
    """Some pages of the rows of a segment: what attention reads at once.

    Args:
        rows: which rows of the segment reach these pages [R]; None means all.
        blocks: the pages' blocks, row after row [R * pages]; a slice of the pool where they are neighbours.
        begin, end: which keys of a row they hold.
    """

    rows: Tensor | None
    blocks: Tensor | slice
    begin: int
    end: int

    def read(self, pool: Tensor) -> Tensor:
        """pool [n_blocks, block, G, D] -> the split's keys or values [R, G, end - begin, D]."""
        pages = pool[self.blocks] if isinstance(self.blocks, slice) else pool.flatten(1).index_select(0, self.blocks)
        return pages.view(-1, self.end - self.begin, *pool.shape[2:]).transpose(1, 2)


@dataclass
class Sight:
    """What the queries see of a split.

    Args:
        mask: bool [R, 1, S, keys]; None when they see all of it.
        bias: the same as numbers to add to the scores, 0 or -inf.
        blind: queries that see no key of it [R, 1, S]; None when there is none.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    blind: Tensor | None = None


@dataclass
class PagedSegment(Segment):
    """A segment that knows its splits; its slots are flat [B * S], counted through the pool."""

    table: Tensor | None = None  # [B, pages], padded with the spare block
    splits: list[Split] = field(default_factory=list)
    _seen: dict[tuple[int | None, int], list[tuple[Split, Sight]]] = field(default_factory=dict, repr=False)

    def seen(self, window: int | None, sinks: int, dtype: torch.dtype) -> list[tuple[Split, Sight]]:
        """The splits that some query sees, and what is seen of each; made once per step for layers with one window."""
        if (window, sinks) not in self._seen:
            assert self.k_pos is not None
            mask = self.visible(self.k_pos, window, sinks)  # bool [B, 1, S, T]
            self._seen[window, sinks] = []
            for split in self.splits:
                part = mask[..., split.begin : split.end]  # [B, 1, S, keys]
                part = part if split.rows is None else part[split.rows]  # [R, 1, S, keys]
                any_key = part.any(-1)  # [R, 1, S]
                if part.all():
                    sight = Sight()
                elif any_key.any() or split.begin == 0:
                    bias = torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill_(~part, float("-inf"))
                    sight = Sight(part, bias, None if any_key.all() else ~any_key)
                else:
                    continue  # the window of every query begins after it
                self._seen[window, sinks].append((split, sight))
        return self._seen[window, sinks]


def split_pages(
    tables: Sequence[Sequence[int]], spare: int, block_size: int, pages_per_split: int, device: torch.device
) -> list[Split]:
    """Cuts the block tables of a segment's rows into splits; a row that ends early is not in the later ones.

    Args:
        tables: the blocks of each row.
        spare: the block of a row that has none; a row with fewer pages than another is filled up with its own.
        pages_per_split: pages of a row in a split, at most.
    """
    longest = max(1, *map(len, tables))
    splits = []
    for page in range(0, longest, pages_per_split):
        rows = [b for b, table in enumerate(tables) if len(table) > page or not page]
        n_pages = min(pages_per_split, longest - page)
        blocks = []
        for b in rows:
            found = tables[b][page : page + n_pages]
            blocks += [*found, *[found[0] if found else spare] * (n_pages - len(found))]
        begin = blocks[0]
        neighbours = blocks == list(range(begin, begin + len(blocks)))  # read where they lie, others are gathered
        splits.append(
            Split(
                None if len(rows) == len(tables) else torch.tensor(rows, device=device),
                slice(begin, begin + len(blocks)) if neighbours else torch.tensor(blocks, device=device),
                page * block_size,
                (page + n_pages) * block_size,
            )
        )
    return splits


def attend_splits(
    q: Tensor, k: Tensor, v: Tensor, seen: list[tuple[Split, Sight]], scale: float | None = None
) -> Tensor:
    """Attention over the pages of a pool; no more than one split of the keys is ever in one piece.

    The splits are those of FlashDecoding {cite}`dao2023flashdecoding`, here one after the other: each gives its output
    and its log-sum-exp, and two such states make one, exactly.

    Args:
        q: queries [B, H, S, D].
        k, v: one layer's pool [n_blocks, block, G, D].
        seen: from `PagedSegment.seen`; the first split has a page of every row.
    Returns: [B, H, S, D]; zeros for a query that sees nothing.
    """
    (first, sight), *others = seen
    out, lse = _attend(q, first.read(k), first.read(v), sight, scale)
    for split, sight in others:
        rows = slice(None) if split.rows is None else split.rows
        part, part_lse = _attend(q[rows], split.read(k), split.read(v), sight, scale)
        out[rows], lse[rows] = merge_states(out[rows], lse[rows], part, part_lse)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float | None) -> tuple[Tensor, Tensor]:
    """`attend` and its lse, by the CPU's fused kernel where that can be: q [R, H, S, D] -> out, lse [R, H, S]."""
    if q.device.type != "cpu" or q.shape[-1] != v.shape[-1] or q.requires_grad:
        return attend(q, k, v, sight.mask, scale, need_lse=True)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(q, k, v, 0.0, False, attn_mask=sight.bias, scale=scale)
    if sight.blind is not None:  # the kernel gives zeros and 0 there
        lse = lse.masked_fill(sight.blind, float("-inf"))
    return out, lse
