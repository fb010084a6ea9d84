"""From logits to the next token: temperature, top-k, top-p, a mask; and sampling by a uniform number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How a next token is chosen.

    Args:
        temperature: tau, divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens {cite}`fan2018topk`; None keeps all.
        top_p: of those, keep the most probable ones whose probabilities first add up to p
            {cite}`holtzman2020topp`; 1 keeps all.
    Raises: ValueError that names the value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, it must be 0 (greedy) or a positive number")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top_k is {self.top_k}, it must be a whole number of at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be in (0, 1]")


GREEDY = SamplingParams(temperature=0.0)


def probabilities(
    logits: Tensor, params: SamplingParams | Sequence[SamplingParams], allowed: Tensor | None = None
) -> Tensor:
    """The distribution that the next token is really drawn from; drafting and verifying share it.

    The order is mask, temperature, top-k, top-p, each on what the one before left. Equal logits at the border of
    top-k all stay; of equal ones at the border of top-p those with the lower token number stay.

    Args:
        logits: [B, V].
        params: for all rows, or one per row.
        allowed: bool [B, V] or [V], False for tokens that must not come; None allows all.
    Returns: [B, V], fp32 (fp64 for fp64 logits); each row adds up to 1, a one-hot where the temperature is 0.
    Raises: ValueError when the shapes disagree or a row allows no token.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}, it must be [B, V]")
    rows = [params] * len(logits) if isinstance(params, SamplingParams) else list(params)
    if len(rows) != len(logits):
        raise ValueError(f"there are {len(rows)} sampling parameters for {len(logits)} rows of logits")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if allowed is not None:
        if allowed.dtype != torch.bool or allowed.shape not in (logits.shape, logits.shape[1:]):
            found = f"{allowed.dtype} {tuple(allowed.shape)}"
            raise ValueError(f"allowed is {found}, it must be bool {tuple(logits.shape)}")
        logits = logits.masked_fill(~allowed, float("-inf"))
    highest = logits.amax(-1)  # [B]; NaN where the row has one
    if not bool(highest.isfinite().all()):
        raise ValueError("a row of logits has no allowed token, or holds NaN or an infinite value")
    tau = logits.new_tensor([row.temperature for row in rows])[:, None]  # [B, 1]
    best = logits.argmax(-1, keepdim=True)  # [B, 1]
    # the largest logit becomes 0 before the division, so that a tiny temperature overflows to -inf, not to inf
    scaled = (logits - highest[:, None]) / tau.masked_fill(tau == 0, 1.0)  # [B, V]
    if any(row.top_k for row in rows):
        V = logits.shape[-1]
        k = torch.tensor([min(row.top_k or V, V) for row in rows], device=logits.device)[:, None]  # [B, 1]
        least = scaled.sort(-1, descending=True).values.gather(-1, k - 1)  # [B, 1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probs = scaled.softmax(-1)  # [B, V]
    if any(row.top_p < 1 for row in rows):
        p = probs.new_tensor([row.top_p for row in rows])[:, None]  # [B, 1]
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # [B, V]; the mass of the tokens that are more probable
        # the token that crosses p stays, none after it; a sum short of p by rounding alone has crossed it
        stays = before < p * (1 - 8 * torch.finfo(probs.dtype).eps)
        keep = torch.zeros_like(stays).scatter(-1, order, stays)
        nucleus = probs * keep
        # a row that keeps all stays as it would be alone, to the last bit
        probs = torch.where(p < 1, nucleus / nucleus.sum(-1, keepdim=True), probs)
    return torch.where(tau == 0, torch.zeros_like(probs).scatter(-1, best, 1.0), probs)


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row: what the one-hot of `probabilities` holds at temperature 0, at once.

    Args:
        logits: [B, V].
    Returns: tokens [B], int64.
    Raises: ValueError when a row holds NaN or an infinite value.
    """
    best = logits.argmax(-1, keepdim=True)  # [B, 1]; where the row has a NaN, that
    if not all(map(math.isfinite, logits.gather(-1, best).flatten().tolist())):
        raise ValueError("a row of logits holds NaN or an infinite value")
    return best[:, 0]


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draws one token per row by inverting its distribution function.

    With each sequence's own uniform numbers, a batch draws what its rows would draw alone.

    Args:
        probs: [B, V], as `probabilities` gives them.
        u: uniform numbers in [0, 1), [B].
    Returns: tokens [B], int64; never one of probability zero.
    """
    if probs.device.type == "mps":  # which has no fp64
        return sample(probs.cpu(), u).to(probs.device)
    cdf = probs.double().cumsum(-1)  # [B, V]
    # scaled by the last value, so that rounding leaves no gap at the end
    tokens = torch.searchsorted(cdf, (u.to(cdf) * cdf[:, -1])[:, None], right=True)[:, 0]  # [B]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)  # [B], the last token that can come
    return torch.minimum(tokens, last)
