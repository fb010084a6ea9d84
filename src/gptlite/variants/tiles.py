"""Which tiles of a mask nothing sees, so that they are skipped, and which all see, so that they need no mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptlite.attention import visible

HIDDEN, EDGE, WHOLE = range(3)  # kinds of tiles: no pair of them is visible, some may be, all are
FAR = torch.iinfo(torch.int64).max  # beyond every position


def tile_kinds(
    q_pos: Tensor, k_pos: Tensor, tile_q: int, tile_k: int, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Which tiles can be skipped and which need no mask, from the lowest and highest positions in each.

    Args:
        q_pos, k_pos: positions [B, S] and [B, T] or [B, G, T]; -1 is a hole.
        tile_q, tile_k: queries and keys of a tile. window, sinks: as in `visible`.
    Returns: integers [tiles of queries, tiles of keys]: HIDDEN where no query of any row sees a key of the tile, WHOLE
        where all see all, else EDGE.
    Raises: ValueError when a tile or the window is below 1, or sinks below 0.
    """
    check_tile(tile_q, tile_k)
    visible(q_pos[:, :0], k_pos[..., :0], window, sinks)  # it knows which windows make sense
    keys = [part.flatten(1) for part in k_pos.split(tile_k, dim=-1)]
    queries = q_pos.split(tile_q, dim=-1)
    if not k_pos.numel() or not q_pos.numel():
        return torch.zeros(len(queries) * (q_pos.numel() > 0), len(keys) * (k_pos.numel() > 0), dtype=torch.int64)

    q_any, q_low, q_high = (bound[:, None] for bound in _bounds(queries))  # [tiles of queries, 1, B]
    k_any, k_low, k_high = (bound[None] for bound in _bounds(keys))  # [1, tiles of keys, B]
    hidden = (q_high < 0) | (k_high < 0) | (k_low > q_high)
    whole = (q_any >= 0) & (k_any >= 0) & (k_high <= q_low)
    if window is not None:
        hidden = hidden | ((q_low - k_high >= window) & (k_low >= sinks))
        whole = whole & (q_high - k_low < window)
    return torch.where(hidden.all(-1), HIDDEN, torch.where(whole.all(-1), WHOLE, EDGE))


def check_tile(tile_q: int, tile_k: int) -> None:
    """Raises: ValueError when a tile has no queries or no keys."""
    if tile_q < 1 or tile_k < 1:
        raise ValueError(f"tile_q is {tile_q} and tile_k {tile_k}, both must be at least 1")


def _bounds(parts: Sequence[Tensor]) -> list[Tensor]:
    """Of each part's positions, by row: the lowest, a hole's -1 too; the lowest of no hole; the highest."""
    real = [part.masked_fill(part < 0, FAR) for part in parts]
    return [
        torch.stack([part.amin(-1) for part in parts]),
        torch.stack([part.amin(-1) for part in real]),
        torch.stack([part.amax(-1) for part in parts]),
    ]


def causal_tiles(n_tiles: int) -> tuple[int, int, int]:
    """Tiles of n_tiles x n_tiles under a causal mask: (hidden above the diagonal, edge on it, whole below it).

    Raises: ValueError when n_tiles is below 0.
    """
    if n_tiles < 0:
        raise ValueError(f"n_tiles is {n_tiles}, it must be at least 0")
    beside = n_tiles * (n_tiles - 1) // 2
    return beside, n_tiles, beside
