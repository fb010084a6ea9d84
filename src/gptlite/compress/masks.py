"""Masks over single weights: the share with the lowest scores, or the best few of every few neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PATTERN = (2, 4)  # at most 2 of 4 neighbours stay: what a GPU's sparse units can skip


def wanda_scores(weight: Tensor, inputs: Tensor) -> Tensor:
    """Size of each weight times the norm of the input that it meets {cite}`sun2024wanda`: [d_out, d_in].

    Args:
        weight: [d_out, d_in]. inputs: what goes into the layer [n, d_in].
    """
    return weight.abs() * inputs.norm(dim=0)  # [d_in], the same for all rows


def mask_smallest(scores: Tensor, sparsity: float, per_row: bool = False) -> Tensor:
    """Which weights stay: all but the share with the lowest scores; bool [d_out, d_in].

    Args:
        scores: [d_out, d_in]. sparsity: share that goes, in [0, 1].
        per_row: compare within an output's row, as Wanda does, so that each row loses as many; else in the layer.
    Returns: exactly round(sparsity * d_in) False in each row, or round(sparsity * d_out * d_in) in all, ties or not.
    Raises: ValueError when the sparsity is no share.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is {sparsity}, it must be in [0, 1]")
    rows = scores if per_row else scores.flatten()[None]  # [groups, n]
    lowest = rows.topk(round(sparsity * rows.shape[1]), dim=1, largest=False).indices
    return torch.ones_like(rows, dtype=torch.bool).scatter(1, lowest, False).view_as(scores)


def check_pattern(n: int, m: int) -> None:
    """Raises: ValueError when a pattern does not keep 1 to m of m."""
    if not 1 <= n <= m:
        raise ValueError(f"the pattern is {n}:{m}, it must keep at least 1 of {m}, and no more than there are")


def mask_pattern(scores: Tensor, n: int = PATTERN[0], m: int = PATTERN[1]) -> Tensor:
    """Which weights stay: the best n of each m neighbours along the inputs {cite}`mishra2021sparse`.

    Args:
        scores: [d_out, d_in]. n, m: 1 <= n <= m; of a last group that is shorter, min(n, its size) stay.
    Returns: bool [d_out, d_in].
    Raises: ValueError when n is not 1 to m.
    """
    check_pattern(n, m)
    d_in = scores.shape[1]
    padded = F.pad(scores, (0, -d_in % m), value=-torch.inf)  # what is not there is never among the best
    groups = padded.unflatten(1, (-1, m))  # [d_out, groups, m]
    best = groups.topk(n, dim=-1).indices
    return torch.zeros_like(groups, dtype=torch.bool).scatter(-1, best, True).flatten(1)[:, :d_in]
