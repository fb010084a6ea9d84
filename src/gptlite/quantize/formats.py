"""Floating-point formats bit by bit: sign, exponent and mantissa, encoded and decoded in integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# integer type of the same width, exponent bits and mantissa bits of the dtypes that values come in
_SOURCES = {torch.float32: (torch.int32, 8, 23), torch.float64: (torch.int64, 11, 52)}


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: a code is sign, exponent and mantissa, from the highest bit to the lowest.

    A code with exponent field e and mantissa field m stands for 2^(e - bias) (1 + m / 2^mantissa_bits), and with e = 0
    for 2^(1 - bias) m / 2^mantissa_bits, so that steps stay even down to 0.

    Args:
        name: as in the book. exponent_bits, mantissa_bits: of a code; with the sign they are all its bits.
        specials: what the highest codes stand for: "ieee": all of the highest exponent are infinity or NaN; "nan": only
            the highest code of each sign is NaN, and there is no infinity; "none": every code is a number.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Literal["ieee", "nan", "none"]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What the exponent field is above the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value, without a sign."""
        unused = {"ieee": 2**self.mantissa_bits, "nan": 1, "none": 0}[self.specials]
        return 2 ** (self.bits - 1) - 1 - unused

    @property
    def largest(self) -> float:
        """The largest finite value."""
        exponent, mantissa = divmod(self.largest_code, 2**self.mantissa_bits)
        return 2.0 ** (exponent - self.bias) * (1 + mantissa / 2**self.mantissa_bits)

    @property
    def least_normal(self) -> float:
        """The least positive value with a full mantissa; below it, steps no longer shrink."""
        return 2.0 ** (1 - self.bias)

    @property
    def least(self) -> float:
        """The least positive value."""
        return self.least_normal / 2**self.mantissa_bits

    @property
    def nan_code(self) -> int | None:
        """The code of NaN that `encode` gives, without a sign; None when the format has none."""
        if self.specials == "ieee":  # the highest exponent, and the highest bit of the mantissa
            return self.largest_code + 1 + 2 ** (self.mantissa_bits - 1)
        return self.largest_code + 1 if self.specials == "nan" else None

    def values(self) -> Tensor:
        """The finite values [n] in rising order, in fp32, 0 once. Raises: ValueError above 16 bits."""
        if self.bits > 16:
            raise ValueError(f"{self.name} has {2**self.bits:,} codes, listed are formats of at most 16 bits")
        codes = torch.arange(self.largest_code + 1).to(torch.int32)  # [n], without a sign
        positive = decode(codes.to(code_dtype(self)), self)
        return torch.cat([-positive[1:].flip(0), positive])


FP32 = FloatFormat("fp32", 8, 23, "ieee")
FP16 = FloatFormat("fp16", 5, 10, "ieee")
BF16 = FloatFormat("bf16", 8, 7, "ieee")  # {cite}`kalamkar2019bfloat16`
E5M2 = FloatFormat("fp8 e5m2", 5, 2, "ieee")  # {cite}`micikevicius2022fp8`
E4M3 = FloatFormat("fp8 e4m3", 4, 3, "nan")  # the same paper; libraries call it e4m3fn
E4M3_IEEE = FloatFormat("fp8 e4m3 (IEEE)", 4, 3, "ieee")  # what some libraries call e4m3
E2M1 = FloatFormat("fp4 e2m1", 2, 1, "none")  # {cite}`rouhani2023microscaling`
FORMATS = {fmt.name: fmt for fmt in (FP32, FP16, BF16, E5M2, E4M3, E4M3_IEEE, E2M1)}


def code_dtype(fmt: FloatFormat) -> torch.dtype:
    """The integer type that codes of a format are kept in: the smallest that holds them."""
    return torch.uint8 if fmt.bits <= 8 else torch.int16 if fmt.bits <= 16 else torch.int32


def encode(x: Tensor, fmt: FloatFormat, saturate: bool = False) -> Tensor:
    """The codes of the nearest values, of two equally near ones the one whose mantissa is even.

    Args:
        x: values [...], any float dtype. Narrower ones than fp32 are widened first, which is exact.
        fmt: to encode to.
        saturate: what lies beyond the largest value, infinity included, takes its code; else it becomes infinity, or
            NaN where the format has no infinity. A format without either always saturates.
    Returns: [...], in `code_dtype(fmt)`; the bits of a 16- or 32-bit code as a signed integer.
    Raises: ValueError when x is no float tensor or narrower than the format, or holds NaN and the format has none.
    """
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, {fmt.name} encodes a float tensor")
    x = x.detach() if x.dtype in _SOURCES else x.detach().float()
    integer, source_exponent, source_mantissa = _SOURCES[x.dtype]
    if fmt.exponent_bits > source_exponent or fmt.mantissa_bits > source_mantissa:
        raise ValueError(f"{fmt.name} has more bits than x, whose dtype is {x.dtype}")
    bits = x.contiguous().view(integer)
    sign = bits >> (source_exponent + source_mantissa)  # 0, or -1: all its bits
    size = bits & ~(-1 << (source_exponent + source_mantissa))  # without the sign
    field, mantissa = size >> source_mantissa, size & (2**source_mantissa - 1)

    # |x| = significand 2^(exponent - source_mantissa), the significand a whole number
    significand = torch.where(field > 0, mantissa + 2**source_mantissa, mantissa)
    exponent = field.clamp(min=1) - (2 ** (source_exponent - 1) - 1)
    new_field = exponent.clamp(min=1 - fmt.bias) + fmt.bias
    # bits that the new format has no room for: more below its least normal value
    shift = source_mantissa - fmt.mantissa_bits + (new_field - fmt.bias - exponent)
    shift = shift.clamp(max=source_mantissa + 2)  # so far down that all is rounded off
    odd = (significand >> shift) & 1
    # half of what a unit is worth, less one where the mantissa is even already: halves go to the even one
    kept = (significand + (((1 << shift) - 1 + odd) >> 1)) >> shift
    # a mantissa that rounds up to 2 carries into the exponent by itself
    code = ((new_field - 1) << fmt.mantissa_bits) + kept

    beyond = code > fmt.largest_code  # infinity too, whose field is the highest
    past_the_end = fmt.largest_code if saturate or fmt.specials == "none" else fmt.largest_code + 1
    code = torch.where(beyond, past_the_end, code)  # the next code is infinity, or else NaN
    nan = x.isnan()
    if fmt.nan_code is not None:
        code = torch.where(nan, fmt.nan_code, code)
    elif nan.any():
        raise ValueError(f"x holds NaN, {fmt.name} has no code for it")
    return (code | ((sign & 1) << (fmt.bits - 1))).to(code_dtype(fmt))


def decode(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """The values of codes; every value of these formats is one of fp32, so this is exact.

    Args:
        codes: [...], by `encode`, in `code_dtype(fmt)`; of a 4-bit code the low half of a byte.
        fmt: that they are in.
    Returns: [...], in fp32.
    Raises: ValueError when the codes have another dtype, or a code has more bits than the format.
    """
    if codes.dtype != code_dtype(fmt):
        raise ValueError(f"codes have dtype {codes.dtype}, those of {fmt.name} have {code_dtype(fmt)}")
    wide = codes.to(torch.int32)
    if fmt.bits < 8 and (wide >> fmt.bits).any():
        raise ValueError(f"codes go up to {int(wide.max())}, those of {fmt.name} end at {2**fmt.bits - 1}")
    size = wide & (2 ** (fmt.bits - 1) - 1)
    field, mantissa = size >> fmt.mantissa_bits, size & (2**fmt.mantissa_bits - 1)
    wide_mantissa = mantissa << (23 - fmt.mantissa_bits)
    normal = ((field - fmt.bias + 127) << 23 | wide_mantissa).view(torch.float32)
    values = torch.where(field > 0, normal, mantissa.float() * fmt.least)
    if fmt.specials == "ieee":
        infinite = torch.where(mantissa == 0, float("inf"), float("nan"))
        values = torch.where(field == 2**fmt.exponent_bits - 1, infinite, values)
    elif fmt.specials == "nan":
        values = torch.where(size > fmt.largest_code, float("nan"), values)
    return torch.where((wide >> (fmt.bits - 1)) & 1 == 1, -values, values)
