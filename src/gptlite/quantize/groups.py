"""Values that share a scale: consecutive ones along an axis, the last group as long as what is left."""

from __future__ import annotations

import torch
from torch import Tensor


def cut(x: Tensor, axis: int | None, size: int, fill: float | None = None) -> Tensor:
    """The groups of a tensor, with the axis last.

    Args:
        x: values [...]. axis: counted from the front; None: the whole tensor is one group.
        size: of a group, from 1 to the axis's length.
        fill: what fills up a short last group; None: its last value again.
    Returns: [..., n_groups, size].
    """
    if axis is None:
        return x.reshape(1, -1)
    x = x.movedim(axis, -1)
    missing = -x.shape[-1] % size
    if missing:
        end = x[..., -1:].expand(*x.shape[:-1], missing)
        x = torch.cat([x, end if fill is None else torch.full_like(end, fill)], -1)
    return x.unflatten(-1, (-1, size))


def per_group(values: Tensor, axis: int | None) -> Tensor:
    """One number for each group [..., n_groups] in the tensor's own order of axes, or a scalar for the whole of it."""
    return values.squeeze(0) if axis is None else values.movedim(-1, axis)


def spread(values: Tensor, axis: int | None, size: int, shape: torch.Size) -> Tensor:
    """From one number for each group to one for each value, or to what broadcasts to it.

    Args:
        values: by `per_group`. axis, size: of the groups. shape: of the tensor.
    Returns: [...] of that shape, or with length 1 in the axis's place, or a scalar.
    """
    if axis is None or values.shape[axis] == 1:
        return values
    return values.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
