"""Four-bit formats whose values come in blocks with a scale of their own: mxfp4, nvfp4 and nf4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.quantize.formats import E2M1, E4M3, decode, encode
from gptlite.quantize.groups import cut, spread

BLOCK = {"mxfp4": 32, "nvfp4": 16, "nf4": 64}  # values that share a scale, as the formats are defined
SCALE_BITS = {"mxfp4": 8, "nvfp4": 8, "nf4": 32}
SCALINGS = ("floor", "even", "fit", "ceil")
# the 16 levels of nf4 {cite}`dettmers2023qlora` (appendix E), in fp32
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class BlockCodes:
    """Four-bit codes of a tensor and the scales of their blocks.

    Args:
        kind: mxfp4, nvfp4 or nf4.
        codes: [..., n], uint8 from 0 to 15, one to a byte.
        scales: [..., n_blocks] as they are stored: codes of powers of two (mxfp4), codes of fp8 e4m3 (nvfp4), both
            uint8, or fp32 (nf4).
        tensor_scale: scalar in fp32 that multiplies all scales of nvfp4, else None.
        block: how many values along the last axis share a scale; the last block may be shorter.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    block: int

    def dequantize(self) -> Tensor:
        """The values [..., n] in fp32."""
        if self.kind == "nf4":
            levels = torch.tensor(NF4_LEVELS, device=self.codes.device)
            return levels[self.codes.long()] * self._spread(self.scales)
        scales = decode_power(self.scales) if self.kind == "mxfp4" else decode(self.scales, E4M3)
        if self.tensor_scale is not None:
            scales = self.tensor_scale * scales
        return decode(self.codes, E2M1) * self._spread(scales)

    def bits_per_value(self) -> float:
        """Stored bits for each value, the blocks' and the tensor's scales included."""
        whole = 0 if self.tensor_scale is None else 32
        return 4 + (self.scales.numel() * SCALE_BITS[self.kind] + whole) / self.codes.numel()

    def _spread(self, scales: Tensor) -> Tensor:
        return spread(scales, scales.dim() - 1, self.block, self.codes.shape)


def encode_power(exponents: Tensor) -> Tensor:
    """The codes of powers of two, 8 bits of exponent and nothing else (e8m0): 2^(code - 127), and 255 for NaN.

    Args:
        exponents: whole numbers [...]; those outside -127..127 take the nearest end.
    Returns: [...], uint8, from 0 to 254.
    """
    return (exponents.clamp(-127, 127) + 127).to(torch.uint8)


def decode_power(codes: Tensor) -> Tensor:
    """The powers of two [...] in fp32 of codes [...] by `encode_power`; 255 gives NaN."""
    wide = codes.to(torch.int32)
    normal = (wide << 23).view(torch.float32)  # the code is fp32's own exponent field
    values = torch.where(wide > 0, normal, 2.0**-127)
    return torch.where(wide == 255, float("nan"), values)


def quantize_mxfp4(x: Tensor, scaling: str = "floor", block: int = 32) -> BlockCodes:
    """Codes in fp4 e2m1 with a power of two for each block of 32 values {cite}`rouhani2023microscaling`.

    Args:
        x: values [..., n], any float dtype, taken in fp32.
        scaling: the power is 2^(k - 2), where 2^k lies below the block's largest magnitude, or is twice that if the
            largest over 2^k is too great. floor: never, as the specification has it {cite}`ocp2023microscaling`, which
            cuts off what lies beyond 6 times the power; even: from 1.75 on; fit: above 1.5, so that nothing is cut off;
            ceil: above 1.
        block: how many values share a scale, along the last axis.
    Returns: BlockCodes. Infinite values count as the largest exponent and are cut off; a block that holds NaN has the
        scale NaN, and all its values are lost.
    Raises: ValueError when an argument is out of range.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, it must be one of {', '.join(SCALINGS)}")
    x = _rows(x, block)
    size = min(block, x.shape[-1])
    largest = cut(x.abs(), x.dim() - 1, size).amax(-1)  # [..., n_blocks]
    nan = largest.isnan()
    # what is added to the bits carries into the exponent field where the mantissa is too great
    carry = {"floor": 0, "even": 2**21, "fit": 2**22 - 1, "ceil": 2**23 - 1}[scaling]
    exponents = ((torch.where(nan, 0.0, largest).view(torch.int32) + carry) >> 23) - 127 - 2
    scales = torch.where(nan, 255, encode_power(exponents))
    unit = spread(decode_power(scales), x.dim() - 1, size, x.shape)
    codes = encode(torch.where(unit.isnan(), 0.0, x / unit), E2M1)
    return BlockCodes("mxfp4", codes, scales, None, size)


def quantize_nvfp4(x: Tensor, two_levels: bool = True, block: int = 16) -> BlockCodes:
    """Codes in fp4 e2m1 with a scale in fp8 e4m3 for each block of 16 values {cite}`nvidia2025nvfp4`.

    Args:
        x: values [..., n], any float dtype, taken in fp32.
        two_levels: a scale of the whole tensor, in fp32, makes the largest block's scale 448, the largest of fp8;
            without it a block of values beyond 6 * 448 is cut off.
        block: how many values share a scale, along the last axis.
    Returns: BlockCodes; a block's scale is never below the least normal value of fp8, so a block of zeros keeps one.
    Raises: ValueError when an argument is out of range, or a value is not finite.
    """
    x = _rows(x, block)
    _finite(x, "nvfp4")
    size = min(block, x.shape[-1])
    largest = cut(x.abs(), x.dim() - 1, size).amax(-1)  # [..., n_blocks]
    tensor_scale = None
    whole = torch.ones((), device=x.device)
    if two_levels:
        tensor_scale = largest.max() / (E4M3.largest * E2M1.largest)
        tensor_scale = whole = torch.where(tensor_scale < torch.finfo(torch.float32).tiny, 1.0, tensor_scale)
    wanted = largest / E2M1.largest / whole
    scales = encode(wanted.clamp(E4M3.least_normal, E4M3.largest), E4M3)
    inverse = (1.0 / whole) / decode(scales, E4M3)
    codes = encode(x * spread(inverse, x.dim() - 1, size, x.shape), E2M1)
    return BlockCodes("nvfp4", codes, scales, tensor_scale, size)


def quantize_nf4(x: Tensor, block: int = 64) -> BlockCodes:
    """Codes of 16 levels that split a normal distribution evenly, scaled by a block's largest magnitude.

    The levels and the rule are those of QLoRA {cite}`dettmers2023qlora`. Of two equally near levels the lower is taken.

    Args:
        x: values [..., n], any float dtype, taken in fp32.
        block: how many values share a scale, along the last axis.
    Returns: BlockCodes; the scales are fp32.
    Raises: ValueError when an argument is out of range, or a value is not finite.
    """
    x = _rows(x, block)
    _finite(x, "nf4")
    size = min(block, x.shape[-1])
    largest = cut(x.abs(), x.dim() - 1, size).amax(-1)  # [..., n_blocks]
    levels = torch.tensor(NF4_LEVELS, device=x.device)
    between = (levels[:-1] + levels[1:]) / 2
    inverse = 1.0 / largest.clamp(min=1e-38)  # of a block of zeros: its values stay 0
    codes = torch.bucketize(x * spread(inverse, x.dim() - 1, size, x.shape), between)
    return BlockCodes("nf4", codes.to(torch.uint8), largest, None, size)


def _rows(x: Tensor, block: int) -> Tensor:
    """The tensor in fp32, if blocks can be cut of it."""
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, blocks are made of a float tensor")
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, blocks need a last axis with values")
    if block < 1:
        raise ValueError(f"block is {block}, it must be at least 1")
    return x.detach().float().contiguous()


def _finite(x: Tensor, kind: str) -> None:
    if not x.isfinite().all():
        raise ValueError(f"x holds an infinity or NaN, {kind} has no code for it")
