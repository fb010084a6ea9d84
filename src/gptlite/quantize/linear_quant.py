"""Linear quantisation: values on an even grid, value = (code - zero) * scale, with a scale for each group of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.quantize.groups import cut, per_group, spread


@dataclass(frozen=True)
class LinearCodes:
    """Codes of a tensor on even grids, and what turns them back into values {cite}`jacob2018quantization`.

    Args:
        codes: of the tensor's own shape; symmetric: int8 within -Q..Q with Q = 2^(bits - 1) - 1, else uint8 within
            0..2^bits - 1. One code to a byte; packing is another step.
        scale: the step of each grid, in fp32 (fp64 for fp64 values): the tensor's shape with the number of groups in
            the axis's place, or a scalar for the whole tensor.
        zero: the code of the value 0, in the same shape and dtype, or None for symmetric codes. A whole number when
            the grid contains 0.
        bits: of a code.
        axis: along which values share a scale, counted from the front; None: the whole tensor shares one.
        group_size: how many values along the axis share a scale; the last group may be shorter.
        shape: of the tensor.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    axis: int | None
    group_size: int
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values on the grid: of the tensor's shape, in `dtype`, or in that of the scales.

        Returns: [...], computed in the dtype of the scales.
        """
        values = self.codes.to(self.scale.dtype)
        if self.zero is not None:
            values = values - spread(self.zero, self.axis, self.group_size, self.shape)
        values = values * spread(self.scale, self.axis, self.group_size, self.shape)
        return values.to(dtype or self.scale.dtype)

    def bits_per_value(self, scale_bits: int = 16, zero_bits: int | None = None) -> float:
        """Stored bits for each value, the scales and zero points included.

        Args:
            scale_bits: that a scale is stored in.
            zero_bits: that a zero point is stored in; None means as many as a code.
        """
        each = scale_bits + (0 if self.zero is None else self.bits if zero_bits is None else zero_bits)
        return self.bits + self.scale.numel() * each / self.codes.numel()


def quantize_linear(
    x: Tensor,
    bits: int,
    axis: int | None = -1,
    group_size: int | None = None,
    symmetric: bool = True,
    clip: float | Tensor | None = None,
    contain_zero: bool = True,
    rounding: Callable[[Tensor], Tensor] = torch.round,
) -> LinearCodes:
    """The codes of the nearest values on an even grid {cite}`krishnamoorthi2018quantizing`.

    An unclipped value is off by at most half a step, its group's scale / 2.

    Args:
        x: values [...], any float dtype; computed in fp32, or in fp64 for fp64 values.
        bits: of a code: 2 to 8, or 1 to 8 with a zero point.
        axis: values that share a scale are consecutive along it; None: the whole tensor shares one.
        group_size: how many of them share one; None: the whole axis. The last group takes what is left.
        symmetric: codes -Q..Q, Q for the largest magnitude; else 0..2^bits - 1 from the least to the largest value.
        clip: the part of each group's range that the grid covers, above 0 and at most 1, one number or a tensor of the
            scales' shape; values beyond it take the nearest end. None covers all.
        contain_zero: with a zero point: the range is widened to hold 0, and the zero point is a whole number, so that
            0 is kept exactly {cite}`jacob2018quantization`; False: the range is that of the values alone, and the zero
            point any number.
        rounding: of values/scale to whole numbers; `torch.round` takes the even one of two equally near.
    Returns: LinearCodes; a group whose values are all 0, or below the least normal number, has scale 1 and gives 0.
    Raises: ValueError when an argument is out of range, the axis is empty or not there, or a value is not finite.
    """
    axis, group = _check(x, bits, axis, group_size, symmetric)
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    low, high = (per_group(end, axis) for end in cut(wide, axis, group).aminmax(dim=-1))  # [..., n_groups, ...] each
    if not (low.isfinite().all() and high.isfinite().all()):
        raise ValueError("x holds an infinity or NaN, only finite values have codes on an even grid")
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    elif contain_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    if clip is not None:
        low, high = _clipped(low, high, clip, contain_zero)
    least, most = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    scale = (high / 2 - low / 2) / ((most - least) / 2)  # halves, which do not overflow where the range would
    scale = torch.where(scale < torch.finfo(scale.dtype).tiny, 1.0, scale)
    steps = wide / spread(scale, axis, group, x.shape)
    zero = None
    if symmetric:
        codes = rounding(steps)
    elif contain_zero:
        zero = torch.round(-low / scale)
        codes = rounding(steps) + spread(zero, axis, group, x.shape)
    else:  # a zero point between two codes moves the grid, so it is added before rounding
        zero = -low / scale
        codes = rounding(steps + spread(zero, axis, group, x.shape))
    codes = codes.clamp(least, most).to(torch.int8 if symmetric else torch.uint8)
    return LinearCodes(codes, scale, zero, bits, axis, group, x.shape)


def clip_by_percentile(x: Tensor, percent: float, axis: int | None = -1, group_size: int | None = None) -> Tensor:
    """The part of each group's range that holds `percent` per cent of its magnitudes: `clip` for `quantize_linear`.

    Args:
        x: values [...], any float dtype.
        percent: above 0 and at most 100; 100 clips nothing.
        axis, group_size: as in `quantize_linear`.
    Returns: in the scales' shape [..., n_groups, ...], above 0 and at most 1: magnitude at that rank over the largest.
    Raises: ValueError as `quantize_linear` does, or when percent is out of range.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent}, it must be above 0 and at most 100")
    axis, group = _check(x, 8, axis, group_size, True)
    sizes = x.detach().abs().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if not sizes.isfinite().all():
        raise ValueError("x holds an infinity or NaN, only finite values have a range")
    parts = cut(sizes, axis, group, float("inf"))  # [..., n_groups, g]
    ranked = parts.sort(-1).values
    counts = parts.isfinite().sum(-1, keepdim=True)
    rank = (counts * (percent / 100)).ceil().long().clamp(min=1) - 1
    largest = ranked.gather(-1, counts - 1)
    part = torch.where(largest > 0, ranked.gather(-1, rank) / largest, 1.0).squeeze(-1)
    part = torch.where(part > 0, part, 1.0)  # a group that is mostly zeros is left whole
    return per_group(part, axis)


def clip_by_error(
    x: Tensor,
    bits: int,
    axis: int | None = -1,
    group_size: int | None = None,
    symmetric: bool = True,
    contain_zero: bool = True,
    n_steps: int = 60,
    least: float = 0.3,
) -> Tensor:
    """The part of each group's range that gives the least squared error, by trying: `clip` for `quantize_linear`.

    The whole range is among those tried, so that no group gets worse by it.

    Args:
        x, bits, axis, group_size, symmetric, contain_zero: as in `quantize_linear`; x is [...].
        n_steps: how many ranges are tried, evenly from `least` to the whole one.
        least: the smallest part of the range that is tried, above 0 and at most 1.
    Returns: in the scales' shape [..., n_groups, ...], from `least` to 1.
    Raises: ValueError as `quantize_linear` does, or when n_steps is below 1.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps is {n_steps}, it must be at least 1")
    place, group = _check(x, bits, axis, group_size, symmetric)
    best = best_error = None
    for part in torch.linspace(1.0, least, n_steps).tolist():
        tried = quantize_linear(x, bits, axis, group_size, symmetric, part, contain_zero).dequantize()
        error = per_group(cut((tried - x).square(), place, group, 0.0).sum(-1), place)
        if best is None or best_error is None:
            best, best_error = torch.full_like(error, part), error
        else:
            better = error < best_error
            best, best_error = torch.where(better, part, best), torch.where(better, error, best_error)
    assert best is not None
    return best


def round_stochastic(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Rounds up with the probability of the part after the point, so that the mean of many is the value itself.

    Args:
        x: [...], any float dtype; e.g. 2.3 gives 3 in three of ten cases and 2 in the others.
        generator: whose uniform numbers decide; None takes torch's own.
    Returns: [...], whole numbers in x's dtype.
    """
    u = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.floor(x + u)


def _check(x: Tensor, bits: int, axis: int | None, group_size: int | None, symmetric: bool) -> tuple[int | None, int]:
    """The axis counted from the front, and the size of a group."""
    if not (2 if symmetric else 1) <= bits <= 8:
        raise ValueError(f"bits is {bits}, it must be {'2 to 8' if symmetric else '1 to 8 with a zero point'}")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, linear quantisation takes a float tensor")
    if axis is None:
        if group_size is not None:
            raise ValueError(f"group_size is {group_size}, groups need an axis")
        if x.numel() == 0:
            raise ValueError("x is empty, its range is not defined")
        return None, x.numel()
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis is {axis}, x has {x.dim()} axes")
    axis %= x.dim()
    if x.shape[axis] == 0:
        raise ValueError(f"axis {axis} of x has length 0, its range is not defined")
    if group_size is None:
        return axis, x.shape[axis]
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, it must be at least 1")
    return axis, min(group_size, x.shape[axis])


def _clipped(low: Tensor, high: Tensor, clip: float | Tensor, contain_zero: bool) -> tuple[Tensor, Tensor]:
    """A part of each range: shrunk towards 0 where the grid holds it, else towards the middle."""
    part = torch.as_tensor(clip, dtype=low.dtype, device=low.device)
    if not ((part > 0) & (part <= 1)).all():
        raise ValueError(f"clip is {clip}, it must be above 0 and at most 1")
    if part.dim() and part.shape != low.shape:
        raise ValueError(f"clip has shape {tuple(part.shape)}, the scales have {tuple(low.shape)}")
    middle = torch.zeros_like(low) if contain_zero else low / 2 + high / 2
    return middle + (low - middle) * part, middle + (high - middle) * part
