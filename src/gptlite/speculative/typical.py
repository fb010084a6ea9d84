"""Medusa's typical acceptance: a draft stays when the target finds it likely enough, which changes what is written."""

from __future__ import annotations

import torch
from torch import Tensor

from gptlite.sampling import sample


def verify_typical(
    p: Tensor,
    tokens: Tensor,
    u: Tensor,
    parents: Tensor | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Keeps the longest path of drafts each of which is typical for the target {cite}`cai2024medusa`.

    A draft x is typical when p(x) > min(epsilon, delta exp(-H(p))): where the target is unsure (a high entropy H),
    less likely tokens pass too. No random number decides, so the result is not distributed as the target's own.

    Args:
        p: the target's distribution after the text, and after each draft [B, n + 1, V].
        tokens: the drafts [B, n]; -1 at the end of a row that has fewer.
        u: uniform numbers in [0, 1) [B], for the token that follows.
        parents: as in `verify` [B, n]; None for chains.
        epsilon, delta: the two bounds, each in (0, 1].
    Returns: which drafts stay, bool [B, n], one path from the text on (of the longest ones the first); and the token
        that follows it [B].
    Raises: ValueError when a bound is not in (0, 1], or the shapes disagree.
    """
    for name, bound in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < bound <= 1:
            raise ValueError(f"{name} is {bound}, it must be above 0 and at most 1")
    B, n = tokens.shape
    if p.shape[:2] != (B, n + 1) or u.shape != (B,):
        raise ValueError(f"p has shape {tuple(p.shape)} and u {tuple(u.shape)}, for {n} drafts of {B} rows")
    if parents is None:
        parents = torch.arange(-1, n - 1).expand(B, n)  # [B, n]
    entropy = -torch.special.xlogy(p, p).sum(-1)  # [B, n + 1]
    bound = (delta * (-entropy).exp()).clamp(max=epsilon)  # [B, n + 1]
    at = parents.to(p.device) + 1  # [B, n], where the distribution of each draft stands
    rows = torch.arange(B, device=p.device)[:, None]
    typical = (p[rows, at, tokens.clamp(min=0)] > bound[rows, at]) & (tokens >= 0)  # [B, n]
    kept = torch.zeros_like(typical)
    end = tokens.new_zeros(B)  # where the distribution of the token that follows stands
    for b, (good, tree) in enumerate(zip(typical.tolist(), parents.tolist(), strict=True)):
        paths: list[list[int]] = []
        for i, parent in enumerate(tree):
            above = [] if parent < 0 else paths[parent]
            whole = good[i] and (parent < 0 or bool(above))
            paths.append([*above, i] if whole else [])
        best = max(paths, key=len, default=[])
        kept[b, best] = True
        end[b] = best[-1] + 1 if best else 0
    return kept, sample(p[torch.arange(B, device=p.device), end], u)
