"""Round to nearest: the plainest way to store a weight in few bits, and the grid that all other ways share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptlite.layers import replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.linear_quant import LinearCodes, clip_by_error, quantize_linear

LEAST_SCALE = 2.0**-24  # the least positive number of fp16


@dataclass(frozen=True)
class Grid:
    """The values that a stored weight may have: in each group of a row, evenly spaced ones.

    Args:
        bits: of a code, 2 to 8.
        group_size: consecutive weights of a row that share a scale and a zero point; None: the whole row.
        symmetric: around zero, without a zero point; else from the least to the largest weight of the group.
        clip: whether the grid may leave out the ends of the range, where that makes the squared error less.
    Raises: ValueError that names the field and what is allowed.
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = False
    clip: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, it must be 2 to 8")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}, it must be at least 1, or None for whole rows")

    def of(self, weight: Tensor, clip: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points [d_out, n_groups] for weights [d_out, d_in], as they are stored: scales in fp16.

        Args:
            clip: the part of each group's range that the grid covers [d_out, n_groups]; None: what `self.clip` says.
        Returns: scale in the dtype of `quantize_linear`, with values of fp16; zero, whole numbers, or None.
        Raises: ValueError when a weight is not finite, or too large for a scale in fp16.
        """
        how = {"axis": 1, "group_size": self.group_size, "symmetric": self.symmetric}
        if clip is None and self.clip:
            clip = clip_by_error(weight, self.bits, **how, n_steps=20)  # type: ignore[arg-type]
        coded = quantize_linear(weight, self.bits, **how, clip=clip)  # type: ignore[arg-type]
        scale = coded.scale.half().clamp(min=LEAST_SCALE).to(coded.scale.dtype)
        if not scale.isfinite().all():
            raise ValueError(f"a weight of {float(weight.abs().max()):g} is too large: its scale must fit fp16")
        return scale, coded.zero

    def codes(self, weight: Tensor, clip: Tensor | None = None) -> LinearCodes:
        """The nearest codes of weights [d_out, d_in] on their own grid: round to nearest; clip as in `of`."""
        scale, zero = self.of(weight, clip)
        group = weight.shape[1] if self.group_size is None else min(self.group_size, weight.shape[1])
        wide = scale.repeat_interleave(group, 1)[:, : weight.shape[1]]  # [d_out, d_in]
        codes = self.nearest(weight.to(scale.dtype), wide, _spread(zero, group, weight.shape[1]))
        return self.coded(codes, scale, zero)

    def coded(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> LinearCodes:
        """Codes [d_out, d_in] with their scales and zero points [d_out, n_groups], all as they are stored."""
        d_in = codes.shape[1]
        kind = torch.int8 if self.symmetric else torch.uint8
        group = min(self.group_size or d_in, d_in)
        return LinearCodes(codes.to(kind), scale, zero, self.bits, 1, group, codes.shape)

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, as whole numbers in the weight's dtype; all three [d_out, n], or what broadcasts to it."""
        most = 2 ** (self.bits - 1) - 1
        if zero is None:
            return (weight / scale).round().clamp(-most, most)
        return ((weight / scale).round() + zero).clamp(0, 2**self.bits - 1)

    def values(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """What codes stand for; all three [d_out, n], or what broadcasts to it."""
        return (codes if zero is None else codes - zero) * scale


def _spread(zero: Tensor | None, group: int, n: int) -> Tensor | None:
    return None if zero is None else zero.repeat_interleave(group, 1)[:, :n]


def round_to_nearest(model: GPTlite, grid: Grid, head: bool = False) -> GPTlite:
    """Stores every linear layer of the blocks in codes, each weight rounded on its own, in place.

    Args:
        head: whether `fc_out` is stored so too.
    Returns: the model, whose layers are `CodedLinear`.
    """
    return store(model, lambda name, layer: grid.codes(layer.weight.detach()), head)


def store(model: GPTlite, code: Callable[[str, nn.Linear], LinearCodes], head: bool = False) -> GPTlite:
    """Replaces every linear layer by its codes, in place.

    Args:
        code: gets a layer's name and the layer, and returns its codes.
    Returns: the model, whose layers are `CodedLinear`.
    """
    return replace_linear(model, lambda name, layer: CodedLinear(code(name, layer), layer.bias), head)
