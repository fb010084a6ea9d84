"""The three functions that every attention variant is made of: what is visible, attend, merge.

Positions are data: a key or a query whose position is -1 is a hole, which nothing sees and which sees nothing.
"""

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """Which keys each query may see: those at or before its own position, and no holes.

    Args:
        q_pos: positions of the queries [B, S], integers; -1 is a hole.
        k_pos: positions of the keys, [B, T], or [B, G, T] when the KV heads hold different tokens.
        window: keys that a query sees at most, itself included; None means all.
        sinks: first positions of the sequence that stay visible whatever the window {cite}`xiao2024sinks`.
    Returns: bool [B, 1, S, T], or [B, G, S, T].
    Raises: ValueError when the window is below 1 or sinks below 0.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, it must be at least 1 (a query sees itself)")
    if sinks < 0:
        raise ValueError(f"sinks is {sinks}, it must be at least 0")
    q = q_pos[:, None, :, None]  # [B, 1, S, 1]
    k = k_pos[:, None, None, :] if k_pos.dim() == 2 else k_pos[:, :, None, :]  # [B, 1 or G, 1, T]
    mask = (k >= 0) & (k <= q)
    if window is not None:
        mask = mask & ((q - k < window) | (k < sinks))
    return mask


@overload
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = ..., scale: float | None = ...) -> Tensor: ...


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = ..., scale: float | None = ..., *, need_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, need_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention {cite}`vaswani2017attention` with grouped KV heads {cite}`ainslie2023gqa`.

    Args:
        q: queries [B, H, S, D]; query head h reads KV head h // (H / G).
        k: keys [B, G, T, D].
        v: values [B, G, T, Dv].
        mask: bool, True where a query sees a key, [B, 1, G or H, S, T] without the 1; None means everything.
        scale: factor of the scores; None means 1 / sqrt(D).
        need_lse: return the log-sum-exp of the scores too, which `merge_states` needs.
    Returns: out [B, H, S, Dv], in q's dtype; with need_lse also lse [B, H, S], in fp32 (fp64 for fp64 input).
        A query that sees no key gives zeros and lse = -inf.
    Raises: ValueError when H is not a multiple of G.
    """
    H, G = q.shape[1], k.shape[1]
    if H % G:
        raise ValueError(f"q has {H} heads, which is not a multiple of the {G} KV heads")
    if q.shape[2] == 1 and H != G and not need_lse:
        # decode: the queries of a group become rows over one KV head, so that its keys are read once for all of them
        if mask is not None and mask.shape[1] == H:
            mask = mask.unflatten(1, (G, H // G)).flatten(2, 3)  # [B, G, H/G, T]
        rows = q.unflatten(1, (G, H // G)).flatten(2, 3)  # [B, G, H/G, D]
        return attend(rows, k, v, mask, scale).flatten(1, 2)[:, :, None]  # [B, H, 1, Dv]
    if mask is not None and mask.shape[1] not in (1, H):
        mask = mask.repeat_interleave(H // mask.shape[1], dim=1)  # [B, H, S, T]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not need_lse:
        q = q * scale  # not in the kernel: OPT scales its queries first, and the same rounding gives the same bits
        if q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu":
            out = _attend_by_products(q, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=H != G)
        # back ends disagree on a row with no key (zeros or NaN): it is zeros here
        return out if mask is None else out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (G, H // G))  # [B, G, H/G, S, D]
    scores = (grouped @ k.to(wide)[:, :, None].mT * scale).flatten(1, 2)  # [B, H, S, T]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))  # [B, H, S]
    safe = lse.masked_fill(lse == float("-inf"), 0.0)  # a row with no key: exp(-inf - 0) is 0, never NaN
    weights = (scores - safe[..., None]).exp()  # [B, H, S, T]
    out = weights.unflatten(1, (G, H // G)) @ v.to(wide)[:, :, None]  # [B, G, H/G, S, Dv]
    return out.flatten(1, 2).to(q.dtype), lse


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The same by two matrix products: on a CPU in bf16 the backward pass of the fused kernel takes much longer.

    Args:
        q: queries, already scaled.
    """
    H, G = q.shape[1], k.shape[1]
    scores = (q.unflatten(1, (G, H // G)) @ k[:, :, None].mT).flatten(1, 2)  # [B, H, S, T]
    if mask is not None:
        # finite, so that a row with no key has no NaN in its gradient; half, so that adding a score stays finite
        never = torch.finfo(scores.dtype).min / 2
        scores = scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, never)
    weights = scores.softmax(-1).unflatten(1, (G, H // G))  # [B, G, H/G, S, T]
    return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2)  # [B, H, S, Dv]


def merge_states(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys, from the attention over each {cite}`dao2023flashdecoding`.

    Each output is weighted by its share of the softmax's denominator, so the result is exact.

    Args:
        out1, out2: [..., Dv], attention over the first and the second set.
        lse1, lse2: [...], log-sum-exp of their scores; -inf for an empty set.
    Returns: out [..., Dv] in out1's dtype, and lse [...]; zeros and -inf where both sets are empty.
    """
    lse = torch.logaddexp(lse1, lse2)  # [...]
    safe = lse.masked_fill(lse == float("-inf"), 0.0)  # both empty: exp(-inf - 0) is 0, never NaN
    share1, share2 = (lse1 - safe).exp()[..., None], (lse2 - safe).exp()[..., None]  # [..., 1]
    return (out1.to(lse.dtype) * share1 + out2.to(lse.dtype) * share2).to(out1.dtype), lse
