"""FlashAttention: exact attention one tile of queries and keys at a time, so that the scores never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.attention import visible
from gptlite.cache.contract import Segment
from gptlite.model import MultiHeadAttention
from gptlite.variants.swap import recast
from gptlite.variants.tiles import EDGE, HIDDEN, WHOLE, check_tile, tile_kinds

INFINITY = float("inf")

# called after each tile: (tile of queries, tile of keys, m, l, acc)
Observer = Callable[[int, int, Tensor, Tensor, Tensor], None]


def online_softmax(scores: Tensor, tile: int = 1) -> tuple[Tensor, Tensor]:
    """Maximum and denominator of a softmax in one pass over the scores {cite}`milakov2018online`.

    Args:
        scores: [..., T]. tile: how many of them are read at a time.
    Returns: m [...], their maximum, and l [...], the sum of exp(scores - m); -inf and 0 where all are -inf, or none is.
    Raises: ValueError when the tile is below 1.
    """
    if tile < 1:
        raise ValueError(f"tile is {tile}, it must be at least 1")
    m, l = scores.new_full(scores.shape[:-1], -INFINITY), scores.new_zeros(scores.shape[:-1])
    for part in scores.split(tile, dim=-1) if scores.shape[-1] else ():
        m_new = torch.maximum(m, part.amax(-1))
        safe = m_new.masked_fill(m_new == -INFINITY, 0.0)  # nothing seen yet: exp(-inf - 0) is 0, never NaN
        l = l * (m - safe).exp() + (part - safe[..., None]).exp().sum(-1)  # the old sum on the new scale, and the part
        m = m_new
    return m, l


def absorb(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tile of scores arrives: the running maximum, sum and output of its queries {cite}`dao2022flashattention`.

    Args:
        m, l: maximum and sum of exp(score - m) so far [..., s]; -inf and 0 at first.
        acc: sum of exp(score - m) times value so far [..., s, Dv]; 0 at first.
        scores: of the tile [..., s, t], -inf where a query doesn't see a key.
        v: values of the tile [..., t, Dv].
    Returns: m, l and acc with the tile; in the end the output is acc / l.
    """
    m_new = torch.maximum(m, scores.amax(-1))
    safe = m_new.masked_fill(m_new == -INFINITY, 0.0)  # nothing seen yet: exp(-inf - 0) is 0, never NaN
    shrink = (m - safe).exp()  # what was summed up under the old maximum, on the scale of the new one
    p = (scores - safe[..., None]).exp()  # [..., s, t]
    return m_new, l * shrink + p.sum(-1), acc * shrink[..., None] + p @ v


@dataclass(frozen=True)
class _Tiling:
    """How one call is cut, and what each tile may see."""

    scale: float
    tile_q: int
    tile_k: int
    kinds: list[list[int]]  # [tiles of queries][tiles of keys]
    mask: Tensor | None  # [B, 1 or G, 1 or H / G, S, T]
    q_pos: Tensor | None
    k_pos: Tensor | None
    window: int | None
    sinks: int

    def row(self, i: int) -> slice:
        return slice(i * self.tile_q, (i + 1) * self.tile_q)

    def seen(self, i: int) -> Iterator[tuple[int, slice]]:
        """The tiles of keys that a tile of queries needs."""
        for j, kind in enumerate(self.kinds[i]):
            if kind != HIDDEN:
                yield j, slice(j * self.tile_k, (j + 1) * self.tile_k)

    def scores(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        """Of a tile of queries q [B, G, H / G, s, D] and one of keys k [B, G, 1, t, D]: [B, G, H / G, s, t]."""
        scores = (q * self.scale) @ k.mT
        rows, columns = self.row(i), slice(j * self.tile_k, (j + 1) * self.tile_k)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask[..., rows, columns], -INFINITY)
        if self.q_pos is not None and self.kinds[i][j] == EDGE:
            assert self.k_pos is not None
            near = visible(self.q_pos[:, rows], self.k_pos[..., columns], self.window, self.sinks)
            scores = scores.masked_fill(~near[:, :, None], -INFINITY)
        return scores


class _Flash(torch.autograd.Function):
    """The forward pass by tiles, and a backward pass that computes every tile of the scores again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiling: _Tiling, observe: Observer | None
    ) -> tuple[Tensor, Tensor]:
        """q [B, G, H / G, S, D], k [B, G, 1, T, D], v [B, G, 1, T, Dv] -> out [B, G, H / G, S, Dv], lse [.., S]."""
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], -INFINITY)
        for i in range(len(tiling.kinds)):
            rows = tiling.row(i)
            q_tile, acc, m, l = q[..., rows, :], out[..., rows, :], lse[..., rows], torch.zeros_like(lse[..., rows])
            for j, columns in tiling.seen(i):
                m, l, acc = absorb(m, l, acc, tiling.scores(q_tile, k[..., columns, :], i, j), v[..., columns, :])
                if observe:
                    observe(i, j, m, l, acc)
            out[..., rows, :] = acc / l.masked_fill(l == 0, 1.0)[..., None]  # a row that sees nothing stays 0
            lse[..., rows] = m + l.log()  # m and l are needed only together
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiling = tiling
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        """Gradients of q, k and v; of the scores' n x n gradient only a tile exists at a time."""
        q, k, v, out, lse = ctx.saved_tensors
        tiling: _Tiling = ctx.tiling
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        empty = lse == -INFINITY
        safe = lse.masked_fill(empty, 0.0)
        # the softmax's own part: what all scores of a query lose together
        shared = (grad_out * out).sum(-1) - grad_lse.masked_fill(empty, 0.0)  # [B, G, H / G, S]
        for i in range(len(tiling.kinds)):
            rows = tiling.row(i)
            q_tile, g_tile = q[..., rows, :], grad_out[..., rows, :]
            for j, columns in tiling.seen(i):
                k_tile, v_tile = k[..., columns, :], v[..., columns, :]
                p = (tiling.scores(q_tile, k_tile, i, j) - safe[..., rows, None]).exp()  # again, from lse
                ds = p * (g_tile @ v_tile.mT - shared[..., rows, None]) * tiling.scale  # [B, G, H / G, s, t]
                dq[..., rows, :] += ds @ k_tile
                dk[..., columns, :] += (ds.mT @ q_tile).sum(2, keepdim=True)
                dv[..., columns, :] += (p.mT @ g_tile).sum(2, keepdim=True)
        return dq, dk, dv, None, None


def flash_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The output of `flash_states` alone: q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv] -> [B, H, S, Dv]."""
    return flash_states(q, k, v, mask, **options)[0]


def flash_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    tile_q: int = 64,
    tile_k: int = 64,
    observe: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as `gptlite.attention.attend` computes it, in tiles {cite}`dao2022flashattention,dao2023flash2`.

    The order is FlashAttention-2's: a tile of queries stays while the keys and values pass by. A tile that the
    positions hide is skipped, one that they show whole gets no mask.

    Args:
        q, k, v: queries [B, H, S, D], keys [B, G, T, D], values [B, G, T, Dv]; computed in fp32 (fp64 for fp64).
        mask: bool [B, 1, G or H, S, T] without the 1, True where a query sees a key; None means everything.
        q_pos, k_pos: positions [B, S] and [B, T] or [B, G, T], both or none: a query then sees what `visible` says,
            which is worked out tile by tile. With a mask too, both must agree.
        window, sinks: as in `visible`. scale: of the scores; None means 1 / sqrt(D).
        tile_q, tile_k: queries and keys of a tile. observe: called after each tile, for a trace.
    Returns: out [B, H, S, Dv], in q's dtype, and the log-sum-exp of the scores, lse [B, H, S]. A query that sees no key
        gives zeros and lse = -inf. Both can be differentiated once, with respect to q, k and v.
    Raises: ValueError when H is not a multiple of G, a tile is below 1, only one of q_pos and k_pos is given, a window
        comes without them, or a mask, positions or values are not those of S queries and T keys.
    """
    (H, S), (G, T) = q.shape[1:3], k.shape[1:3]
    if H % G:
        raise ValueError(f"q has {H} heads, which is not a multiple of the {G} KV heads")
    check_tile(tile_q, tile_k)
    if (q_pos is None) != (k_pos is None):
        raise ValueError("q_pos and k_pos come together: one of them is None")
    if q_pos is None and window is not None:
        raise ValueError(f"window is {window}, which needs q_pos and k_pos")
    if mask is not None and (mask.shape[2:] != (S, T) or mask.shape[1] not in (1, G, H)):
        raise ValueError(f"mask is {list(mask.shape)}, it must be [B, 1 or {G} or {H}, {S}, {T}]")
    for name, x, n in (("q_pos", q_pos, S), ("k_pos", k_pos, T), ("v", v[..., 0], T)):
        if x is not None and x.shape[-1] != n:
            raise ValueError(f"{name} is for {x.shape[-1]} tokens, it must be for {n}")
    if mask is not None:  # [B, 1 or G, 1 or H / G, S, T]
        mask = mask.unflatten(1, (G, H // G)) if mask.shape[1] == H else mask[:, :, None]
    if q_pos is None or k_pos is None:
        kinds = torch.full((-(-S // tile_q), -(-T // tile_k)), WHOLE if mask is None else EDGE)
    else:
        kinds = tile_kinds(q_pos, k_pos, tile_q, tile_k, window, sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tiling = _Tiling(scale, tile_q, tile_k, kinds.tolist(), mask, q_pos, k_pos, window, sinks)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (G, H // G))  # [B, G, H / G, S, D]
    out, lse = _Flash.apply(grouped, k.to(wide)[:, :, None], v.to(wide)[:, :, None], tiling, observe)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


class FlashAttention(MultiHeadAttention):
    """The model's attention by tiles, from the weights that it has; `swap_attention(model, FlashAttention.of)`.

    Positions tell what is visible, so that it works with any cache and never needs the mask of a whole step.
    """

    tile_q = tile_k = 64

    @classmethod
    def of(cls, attention: MultiHeadAttention, tile_q: int = 64, tile_k: int = 64) -> FlashAttention:
        """The same layer, which shares its weights with `attention`, in tiles of tile_q queries and tile_k keys.

        Raises: ValueError when a tile is below 1.
        """
        check_tile(tile_q, tile_k)
        new = recast(attention, cls)
        new.tile_q, new.tile_k = tile_q, tile_k
        return new

    def mask(self, segment: Segment, k_pos: Tensor) -> Tensor:
        return segment.mask  # type: ignore[return-value]  # a tree's, or None: positions say the rest

    def mix(self, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, mask: Tensor | None) -> Tensor:
        return flash_attend(
            q, k, v, mask, q_pos=q_pos, k_pos=k_pos, window=self.window, sinks=self.sinks, scale=self.scale,
            tile_q=self.tile_q, tile_k=self.tile_k,
        )  # fmt: skip
