"""Floating-point formats: codes by hand, every code there and back, ties, subnormals, and beyond the largest."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.quantize.formats import (
    BF16,
    E2M1,
    E4M3,
    E4M3_IEEE,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    FloatFormat,
    code_dtype,
    decode,
    encode,
)

SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]
INF, NAN = math.inf, math.nan


def all_codes(fmt):
    return torch.arange(2**fmt.bits, dtype=torch.int32).to(code_dtype(fmt))


def by_definition(code, fmt):
    """The value of a code from the definition, in Python's own numbers."""
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    field, mantissa = divmod(code % 2 ** (fmt.bits - 1), 2**fmt.mantissa_bits)
    if fmt.specials == "ieee" and field == 2**fmt.exponent_bits - 1:
        return NAN if mantissa else sign * INF
    if fmt.specials == "nan" and code % 2 ** (fmt.bits - 1) == 2 ** (fmt.bits - 1) - 1:
        return NAN
    part = mantissa / 2**fmt.mantissa_bits
    return sign * (2.0 ** (field - fmt.bias) * (1 + part) if field else 2.0 ** (1 - fmt.bias) * part)


@pytest.mark.parametrize(
    ("fmt", "bits", "bias", "largest", "least_normal", "least"),
    [
        (FP32, 32, 127, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149),
        (FP16, 16, 15, 65504, 2.0**-14, 2.0**-24),
        (BF16, 16, 127, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133),
        (E5M2, 8, 15, 57344, 2.0**-14, 2.0**-16),
        (E4M3, 8, 7, 448, 2.0**-6, 2.0**-9),
        (E4M3_IEEE, 8, 7, 240, 2.0**-6, 2.0**-9),
        (E2M1, 4, 1, 6, 1, 0.5),
    ],
    ids=lambda value: value.name if isinstance(value, FloatFormat) else "",
)
def test_the_sizes_of_each_format(fmt, bits, bias, largest, least_normal, least):
    assert (fmt.bits, fmt.bias, fmt.largest) == (bits, bias, largest)
    assert (fmt.least_normal, fmt.least) == (least_normal, least)


def test_codes_by_hand():
    assert encode(torch.tensor([1.0, -1.5, 448.0, 0.001953125]), E4M3).tolist() == [0x38, 0xBC, 0x7E, 0x01]
    assert encode(torch.tensor([1.0, -1.5, 57344.0]), E5M2).tolist() == [0x3C, 0xBE, 0x7B]
    assert encode(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0]), E2M1).tolist() == [*range(8), 15]
    assert E2M1.values().tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert len(E4M3.values()) == 253 and len(E5M2.values()) == 247


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_every_code_stands_for_its_value_and_comes_back(fmt):
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    step = 1 if fmt.bits <= 8 else 7  # a part of the 65,536
    for code in range(0, 2**fmt.bits, step):
        right = by_definition(code, fmt)
        found = float(values[code])
        assert (math.isnan(right) and math.isnan(found)) or (found, math.copysign(1, found)) == (
            right,
            math.copysign(1, right),
        )
    numbers = ~values.isnan()
    assert torch.equal(encode(values[numbers], fmt), codes[numbers])
    if fmt.nan_code is not None:
        kept = encode(values[~numbers], fmt).to(torch.int32) & (2 ** (fmt.bits - 1) - 1)
        assert (kept == fmt.nan_code).all()


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_halves_go_to_the_even_mantissa_and_neighbours_of_halves_do_not(fmt):
    values = fmt.values().double()
    values = values[(values >= 0) & (values < 1e30)]
    halves = (values[:-1] + values[1:]) / 2
    found = encode(halves, fmt).to(torch.int32)
    assert (found % 2 == 0).all()
    below, above = (encode(torch.nextafter(halves, torch.tensor(end).double()), fmt) for end in (-INF, INF))
    assert torch.equal(decode(below, fmt).double(), values[:-1])
    assert torch.equal(decode(above, fmt).double(), values[1:])


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
@settings(max_examples=200, deadline=None)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_nearest_value_is_taken(fmt, x):
    values = fmt.values().double()
    found = float(decode(encode(torch.tensor([x]), fmt, saturate=True), fmt))
    assert abs(found - x) == float((values - x).abs().min())


def test_beyond_the_largest():
    x = torch.tensor([464.0, 464.1, 480.0, 1e30, INF, -INF])  # 464 lies half-way to what would be the next
    assert encode(x, E4M3).tolist() == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF]
    assert encode(x, E4M3, saturate=True).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    x = torch.tensor([61439.0, 61440.0, 1e30, INF, -INF])  # 61440 is the tie, and the even one is infinity
    assert encode(x, E5M2).tolist() == [0x7B, 0x7C, 0x7C, 0x7C, 0xFC]
    assert encode(x, E5M2, saturate=True).tolist() == [0x7B, 0x7B, 0x7B, 0x7B, 0xFB]
    for saturate in (False, True):  # no code is left for infinity or NaN
        assert encode(torch.tensor([6.9, 7.1, INF, -1e9]), E2M1, saturate).tolist() == [7, 7, 7, 15]
    assert decode(encode(torch.tensor([65519.0, 65520.0, -INF]), FP16), FP16).tolist() == [65504.0, INF, -INF]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_zeros_keep_their_sign_and_nan_stays(fmt):
    zeros = decode(encode(torch.tensor([0.0, -0.0, -1e-45]), fmt), fmt)
    assert zeros[:2].tolist() == [0.0, 0.0] and zeros.signbit().tolist() == [False, True, True]
    if fmt is E2M1:
        with pytest.raises(ValueError, match="x holds NaN, fp4 e2m1 has no code for it"):
            encode(torch.tensor([1.0, NAN]), fmt)
    else:
        for saturate in (False, True):
            assert decode(encode(torch.tensor([NAN, -NAN]), fmt, saturate), fmt).isnan().all()


def test_fp64_is_rounded_once():
    """Through fp32 it would be rounded twice: to a half first, and then to the even neighbour."""
    x = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert decode(encode(x, FP16), FP16).item() == 1 + 2.0**-10
    assert decode(encode(x.float(), FP16), FP16).item() == 1.0
    bits = torch.randn(1000).view(torch.int32)
    assert torch.equal(encode(bits.view(torch.float32), FP32), bits)


def test_narrow_dtypes_are_widened():
    x = torch.randn(1000)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        assert torch.equal(encode(narrow, E4M3), encode(narrow.double(), E4M3))
    with pytest.raises(ValueError, match="wide has more bits than x"):
        encode(x, FloatFormat("wide", 8, 30, "ieee"))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: encode(torch.tensor([1]), E4M3), "x has dtype torch.int64, fp8 e4m3 encodes a float tensor"),
        (lambda: decode(torch.tensor([1]), E4M3), "codes have dtype torch.int64, those of fp8 e4m3 have torch.uint8"),
        (lambda: decode(torch.tensor([16], dtype=torch.uint8), E2M1), "codes go up to 16, those of fp4 e2m1 end at 15"),
        (FP32.values, "fp32 has 4,294,967,296 codes"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_any_shape_and_no_elements():
    assert encode(torch.zeros(0), E4M3).shape == (0,)
    x = torch.randn(2, 3, 4)
    turned = x.transpose(0, 2)
    assert torch.equal(encode(turned, E4M3), encode(x, E4M3).transpose(0, 2))
