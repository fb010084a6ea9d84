"""Quantisation-aware training: the forward pass rounds, the backward pass pretends that it did not."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.layers import replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.linear_quant import LinearCodes
from gptlite.quantize.rtn import LEAST_SCALE, Grid, store
from gptlite.train import TrainSettings
from gptlite.variants.uptrain import uptrain


def round_straight(x: Tensor) -> Tensor:
    """Rounds, and lets the gradient through as if it had not {cite}`bengio2013ste`: x [...] -> [...]."""
    return x + (x.round() - x).detach()


class RoundingLinear(nn.Linear):
    """A linear layer that trains its weights as they are while it computes with the rounded ones.

    The scales of the groups are trained too {cite}`esser2020lsq`, as logarithms, so that they stay positive and a step
    of the optimiser changes small and large ones by the same share.

    Args:
        layer: whose weight and bias it starts from; copied.
        grid: of the weights; its scales and zero points are where the scales start and what the zero points stay.
    """

    def __init__(self, layer: nn.Linear, grid: Grid) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.grid = grid
        self.weight = nn.Parameter(layer.weight.detach().clone())  # [d_out, d_in]
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        scale, zero = grid.of(self.weight.detach())
        # of three axes, so that no optimiser takes it for a matrix
        self.log_scale = nn.Parameter(scale.log().unsqueeze(-1).to(self.weight.dtype))  # [d_out, n_groups, 1]
        self.zero: Tensor | None
        self.register_buffer("zero", None if zero is None else zero.to(self.weight.dtype))

    def rounded(self) -> Tensor:
        """The weight [d_out, d_in] on its grid; gradients reach the weight inside the range, and the scale."""
        scale, zero = self._wide(self.log_scale.exp().squeeze(-1)), None if self.zero is None else self._wide(self.zero)
        steps = self.weight / scale
        # clamped before rounding: a weight outside the range gets no gradient, but its group's scale does
        if zero is None:
            most = 2 ** (self.grid.bits - 1) - 1
            return round_straight(steps.clamp(-most, most)) * scale
        return (round_straight((steps + zero).clamp(0, 2**self.grid.bits - 1)) - zero) * scale

    def coded(self) -> LinearCodes:
        """The codes [d_out, d_in] that the layer has come to, with its scales in fp16."""
        scale = self.log_scale.detach().exp().squeeze(-1).half().clamp(min=LEAST_SCALE).float()
        zero = None if self.zero is None else self._wide(self.zero)
        codes = self.grid.nearest(self.weight.detach().float(), self._wide(scale), zero)
        return self.grid.coded(codes, scale, self.zero)

    def _wide(self, per_group: Tensor) -> Tensor:
        """[d_out, n_groups] -> [d_out, d_in]."""
        group = min(self.grid.group_size or self.in_features, self.in_features)
        return per_group.repeat_interleave(group, 1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded(), self.bias)


def train_rounded(
    model: GPTlite,
    tokens: Tensor,
    settings: TrainSettings,
    grid: Grid,
    teacher: GPTlite | None = None,
    watch: Tensor | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[list[float]]:
    """Quantisation-aware training {cite}`jacob2018quantization`, in place: a short run, and then the codes are stored.

    Args:
        model: trained; in eval mode before and after.
        tokens: the text [n] that it trains on.
        grid: of the blocks' linear layers.
        settings, teacher, watch, on_step: as in `variants.uptrain.uptrain`; all weights move.
    Returns: the curve of `uptrain`; its held-out losses are those of the rounded weights.
    """
    replace_linear(model, lambda name, layer: RoundingLinear(layer, grid))
    curve = uptrain(model, tokens, settings, teacher, "all", watch, on_step)
    store(model, lambda name, layer: layer.coded())  # type: ignore[operator]
    return curve
