"""Values as a format keeps them: rounded there and back, with the bits that they take; and layers that compute so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.layers import calibrate
from gptlite.model import GPTlite
from gptlite.quantize.blocks import BlockCodes, quantize_mxfp4, quantize_nf4, quantize_nvfp4
from gptlite.quantize.formats import FORMATS, FP16, FloatFormat, decode, encode
from gptlite.quantize.groups import cut, per_group, spread
from gptlite.quantize.linear_quant import LinearCodes, quantize_linear

KINDS = ("fp32", "bf16", "fp16", "fp8 e5m2", "fp8 e4m3", "int8", "int4", "nf4", "mxfp4", "nvfp4")
_BLOCKS = {"mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4, "nf4": quantize_nf4}


@dataclass(frozen=True)
class FloatCodes:
    """Codes of a floating-point format, and the scales that keep its values in range.

    Args:
        fmt: of the codes.
        codes: [..., n], by `gptlite.quantize.formats.encode`.
        scale: [..., n_groups] in fp32, or None for formats that need none.
        group_size: values along the last axis that share a scale.
    """

    fmt: FloatFormat
    codes: Tensor
    scale: Tensor | None
    group_size: int

    def dequantize(self) -> Tensor:
        """The values [..., n] in fp32."""
        values = decode(self.codes, self.fmt)
        if self.scale is None:
            return values
        return values * spread(self.scale, self.codes.dim() - 1, self.group_size, self.codes.shape)

    def bits_per_value(self) -> float:
        """Stored bits for each value, with scales of 16 bits."""
        return self.fmt.bits + (0 if self.scale is None else 16 * self.scale.numel() / self.codes.numel())


def to_codes(x: Tensor, kind: str, group_size: int | None = None) -> FloatCodes | LinearCodes | BlockCodes:
    """The codes of values in a format; `dequantize()` gives the values back, `bits_per_value()` says what they take.

    Formats of 16 bits and more have no scale. fp8, int8 and int4 (symmetric) have one for each group along the last
    axis, kept in fp16; nf4, mxfp4 and nvfp4 have the scales that define them.

    Args:
        x: values [..., n], finite, any float dtype, taken in fp32.
        kind: one of `KINDS`.
        group_size: values that share a scale; None: the whole row, or what the format itself prescribes.
    Returns: codes [..., n] with their scales.
    Raises: ValueError when kind or group_size is none of these, a scale does not fit fp16, or x is not finite or its
        last axis is empty.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, it must be one of {', '.join(KINDS)}")
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size is {group_size}, it must be at least 1")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, a format needs a last axis with values")
    x = x.detach().float()
    if not x.isfinite().all():
        raise ValueError(f"x holds an infinity or NaN, {kind} takes finite values here")
    if kind in _BLOCKS:
        return _BLOCKS[kind](x) if group_size is None else _BLOCKS[kind](x, block=group_size)  # type: ignore[operator]
    if kind.startswith("int"):
        coded = quantize_linear(x, int(kind.removeprefix("int")), -1, group_size)
        stored, most = _stored(coded.scale), 2 ** (coded.bits - 1) - 1
        # the codes are those of the scale that is kept
        steps = x / spread(stored, coded.axis, coded.group_size, x.shape)
        codes = steps.round().clamp(-most, most).to(torch.int8)
        return replace(coded, codes=codes, scale=stored)
    fmt, axis, size = FORMATS[kind], x.dim() - 1, min(group_size or x.shape[-1], x.shape[-1])
    if fmt.bits > 8:
        return FloatCodes(fmt, encode(x, fmt), None, size)
    largest = per_group(cut(x.abs(), axis, size).amax(-1), axis)  # [..., n_groups]
    scale = _stored(torch.where(largest > 0, largest / fmt.largest, 1.0))
    return FloatCodes(fmt, encode(x / spread(scale, axis, size, x.shape), fmt, saturate=True), scale, size)


def round_trip(x: Tensor, kind: str, group_size: int | None = None) -> Tensor:
    """The values [..., n] in fp32 that a format keeps of values x [..., n]; arguments and errors as in `to_codes`."""
    return to_codes(x, kind, group_size).dequantize()


def _stored(scale: Tensor) -> Tensor:
    """Scales as fp16 keeps them."""
    kept = scale.half().clamp(min=FP16.least)
    if not kept.isfinite().all():
        raise ValueError(f"a scale is {float(scale.max()):g}, it is kept in fp16, which ends at {FP16.largest:,.0f}")
    return kept.float()


def signal_to_noise(x: Tensor, rounded: Tensor) -> float:
    """Power of the values over power of the error, in dB: 6 more is half the error; infinite without an error.

    Args:
        x, rounded: [...], of the same shape.
    """
    x, rounded = x.double(), rounded.double()
    return float(10 * torch.log10(x.square().sum() / (x - rounded).square().sum()))


class RoundedLinear(nn.Module):
    """A linear layer in simulation: its weight, and on request its inputs, are rounded to a format, the rest is fp32.

    It shows what a format does to a model, not how fast it is: the rounded values take as many bytes as before.

    Args:
        linear: the layer; its weight [d_out, d_in] is rounded once, its bias is kept.
        weights: format of the weight, one of `KINDS`.
        inputs: format that x is rounded to at each call, a scale for each token (for nvfp4 the second scale is that of
            all tokens of the call); None leaves it.
        group_size: of the weight, as in `to_codes`.
    Raises: ValueError as `to_codes` does.
    """

    def __init__(
        self, linear: nn.Linear, weights: str = "int8", inputs: str | None = None, group_size: int | None = None
    ) -> None:
        super().__init__()
        if inputs is not None and inputs not in KINDS:
            raise ValueError(f"inputs is {inputs!r}, it must be None or one of {', '.join(KINDS)}")
        self.out_features, self.in_features = linear.weight.shape
        self.inputs = inputs
        coded = to_codes(linear.weight, weights, group_size)
        self.bits_per_weight = coded.bits_per_value()
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", coded.dequantize())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out], in x's dtype."""
        if self.inputs is not None:
            x = round_trip(x, self.inputs).to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def example_tensors(model: GPTlite, tokens: Tensor, layer: str = "blocks.2.ffwd.net.0", seed: int = 0) -> dict:
    """Four tensors to try a format on, by name: drawn ones, and those of a layer of a model.

    Args:
        model: in eval mode. tokens: [B, S] that it reads for the activations.
        layer: name of the linear layer, as in `linear_layers`. seed: of the drawn ones.
    Returns: normal and heavy-tailed (Student's t with 3 degrees of freedom) [1024, 256]; weights [d_out, d_in] of the
        layer; activations [n_tokens, d_in] that go into it.
    Raises: ValueError when the model has no such layer.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(1024, 256, generator=generator)
    chi = torch.randn(3, 1024, 256, generator=generator).square().sum(0)
    heavy = torch.randn(1024, 256, generator=generator) / (chi / 3).sqrt()
    for block in calibrate(model, [tokens]):
        if layer in block.inputs:
            weight = model.get_submodule(layer).weight
            assert isinstance(weight, Tensor)
            return {
                "normal": normal,
                "heavy-tailed": heavy,
                "weights": weight.detach(),
                "activations": block.inputs[layer],
            }
    raise ValueError(f"layer is {layer!r}, the model has no such linear layer")
