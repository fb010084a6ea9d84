"""SparseGPT: a weight that goes leaves its work to those that stay, by the inputs' second moments."""

from __future__ import annotations

import torch
from torch import Tensor

from gptlite.compress.masks import check_pattern, mask_pattern, mask_smallest

DAMPING = 0.01  # of the mean diagonal, added to it, so that the inverse exists
WIDTH = 128  # columns whose mask is chosen at once


def second_moment(inputs: Tensor) -> Tensor:
    """X^T X / n of a layer's inputs [n, d_in]: [d_in, d_in], in fp64; half the Hessian of its squared error."""
    wide = inputs.double()
    return wide.mT @ wide / len(wide)


def damped(moment: Tensor) -> Tensor:
    """The second moment [d_in, d_in] with a share of its mean added to the diagonal; an input that is always 0 gets 1.

    Args:
        moment: as `second_moment` gives it.
    """
    diagonal = moment.diagonal()
    extra = torch.where(diagonal == 0, 1.0, 0.0) + DAMPING * diagonal.mean()
    return moment + torch.diag(extra)


@torch.no_grad()
def sparsegpt(
    weight: Tensor, moment: Tensor, sparsity: float = 0.5, pattern: tuple[int, int] | None = None, width: int = WIDTH
) -> tuple[Tensor, Tensor]:
    """Prunes one layer, column by column, and lets the columns to the right make up for each weight that goes.

    Removing weight w with the others free to move adds w^2 / [H^-1]_cc to the squared error, and the best move is a
    multiple of row c of H^-1 {cite}`hassibi1993obs`. Going from left to right, all rows share one H^-1, that of the
    columns not yet seen, which is a row of one Cholesky factor {cite}`frantar2023sparsegpt`.

    Args:
        weight: [d_out, d_in]. moment: of the layer's inputs [d_in, d_in], see `second_moment`.
        sparsity: share of the weights that goes, in [0, 1]; 0 changes nothing. Of no effect with a pattern.
        pattern: n and m of an n:m pattern along the inputs, see `masks.mask_pattern`.
        width: columns in which the weights compete with each other, in all rows.
    Returns: the new weight [d_out, d_in], in the old one's dtype, and which weights stay, bool [d_out, d_in]; exactly
        round(sparsity * d_out * d_in) do not.
    Raises: ValueError when the shapes do not fit, the moment is not finite, the sparsity is no share, the pattern does
        not keep n of m, or the width is below 1.
    """
    d_out, d_in = weight.shape
    if moment.shape != (d_in, d_in):
        raise ValueError(f"moment has shape {tuple(moment.shape)}, a layer of {d_in} inputs needs {(d_in, d_in)}")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is {sparsity}, it must be in [0, 1]")
    if not moment.isfinite().all():
        raise ValueError("moment holds an infinity or NaN: so do the inputs that it was made of, or there are none")
    if width < 1:
        raise ValueError(f"width is {width}, it must be at least 1")
    if pattern is not None:
        check_pattern(*pattern)
        width = max(pattern[1], width // pattern[1] * pattern[1])  # a group is never split
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped(moment.double()))), upper=True)
    new = weight.double()  # a copy, unless it is in fp64
    new = new.clone() if new is weight else new
    keep = torch.ones_like(weight, dtype=torch.bool)
    for start in range(0, d_in, width):
        stop = min(start + width, d_in)
        costs = new[:, start:stop].square() / factor.diagonal()[start:stop].square()  # [d_out, width]
        if pattern is None:
            gone = round(sparsity * d_out * stop) - round(sparsity * d_out * start)
            keep[:, start:stop] = mask_smallest(costs, gone / costs.numel())
        errors = torch.zeros_like(costs)
        for c in range(start, stop):
            if pattern is not None and (c - start) % pattern[1] == 0:
                group = slice(c, min(c + pattern[1], stop))
                costs = new[:, group].square() / factor.diagonal()[group].square()
                keep[:, group] = mask_pattern(costs, *pattern)
            error = torch.where(keep[:, c], 0.0, new[:, c]) / factor[c, c]  # [d_out]
            new[:, c:stop] -= error[:, None] * factor[c, c:stop]
            errors[:, c - start] = error
        new[:, stop:] -= errors @ factor[start:stop, stop:]
    return torch.where(keep, new, 0.0).to(weight.dtype), keep


@torch.no_grad()
def best_weights(weight: Tensor, keep: Tensor, moment: Tensor) -> Tensor:
    """The weights that make the squared error least for a given mask: one linear system per row, in fp64.

    Args:
        weight: [d_out, d_in]. keep: which weights stay, bool [d_out, d_in]. moment: of the inputs [d_in, d_in].
    Returns: [d_out, d_in], 0 where nothing is kept.
    """
    H = damped(moment.double())
    new = torch.zeros_like(weight, dtype=torch.float64)
    for row, kept in enumerate(keep):
        new[row, kept] = torch.linalg.solve(H[kept][:, kept], H[kept] @ weight[row].double())
    return new


def squared_error(weight: Tensor, new: Tensor, moment: Tensor) -> float:
    """Mean squared change of a layer's output, summed over the outputs: tr((W - W') M (W - W')^T).

    Args:
        weight, new: [d_out, d_in]. moment: of the inputs [d_in, d_in].
    """
    change = weight.double() - new.double()
    return float((change @ moment.double() * change).sum())
