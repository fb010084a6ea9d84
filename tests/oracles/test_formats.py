"""Number formats code by code: ml_dtypes and NumPy, bitsandbytes for nf4, torchao for block scales and integers.

Where a library departs from the others, or from its own other half, the difference is a test too, so that a new version
of it shows.
"""

import logging
import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from gptlite.notebook.recordings import recorded
from gptlite.quantize.blocks import (
    NF4_LEVELS,
    decode_power,
    quantize_mxfp4,
    quantize_nf4,
    quantize_nvfp4,
)
from gptlite.quantize.formats import BF16, E2M1, E4M3, E4M3_IEEE, E5M2, FORMATS, FP16, FP32, FloatFormat, decode, encode
from gptlite.quantize.linear_quant import quantize_linear
from gptlite.record import run_sweep

logging.disable(logging.WARNING)  # torchao tells of kernels that a CPU has no use for
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bitsandbytes.functional as bnb
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )
logging.disable(logging.NOTSET)

THEIRS: dict[FloatFormat, Any] = {
    FP32: np.float32,
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3: ml_dtypes.float8_e4m3fn,
    E4M3_IEEE: ml_dtypes.float8_e4m3,
    E2M1: ml_dtypes.float4_e2m1fn,
}
NARROW = [fmt for fmt in THEIRS if fmt is not FP32]
INTEGER = {8: np.uint8, 16: np.int16, 32: np.int32}
NAME = {"ids": lambda fmt: fmt.name}
INF, NAN = math.inf, math.nan


def their_codes(x: Tensor, fmt: FloatFormat) -> Tensor:
    with np.errstate(all="ignore"):
        cast = x.numpy().astype(THEIRS[fmt])
    return torch.from_numpy(cast.view(INTEGER[max(8, fmt.bits)]).copy())


def awkward(fmt: FloatFormat) -> Tensor:
    """Every value of a format, every tie and its neighbours, the ends, and 100,000 random ones of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(100_000, generator=generator, dtype=torch.float64)
    random *= torch.exp2(torch.randint(-40, 30, (100_000,), generator=generator).double())
    parts = [random, torch.tensor([0.0, -0.0, 1e-45, -1e-40, INF, -INF], dtype=torch.float64)]
    parts.append(torch.tensor([1.0, 1.01, 1.1, -2.0]).double() * fmt.largest)
    if fmt is not FP32:
        values = fmt.values().double()
        ties = (values[1:] + values[:-1]) / 2
        parts += [values, ties, *(torch.nextafter(ties.float(), torch.tensor(end)).double() for end in (-INF, INF))]
        next_up = fmt.largest + float(values[-1] - values[-2])  # where another value would be
        parts.append(torch.tensor([(fmt.largest + next_up) / 2, next_up]).double())
    else:  # too many to list: ties of any two neighbours, subnormals, and what lies about the largest
        below = torch.randint(0x7F7FFFFF, (20_000,), generator=generator, dtype=torch.int32)
        parts.append((below.view(torch.float32).double() + (below + 1).view(torch.float32).double()) / 2)
        parts.append((torch.randint(2**24, (20_000,), generator=generator).double() + 0.5) * 2.0**-149)
        end = FP32.largest + 2.0**103  # the tie with what would be the next
        ends = [end, -end, math.nextafter(end, 0), 2.0**128, 2.0**-150, math.nextafter(2.0**-150, 1)]
        parts.append(torch.tensor(ends, dtype=torch.float64))
    if fmt is not E2M1:
        parts.append(torch.tensor([NAN, -NAN], dtype=torch.float64))
    return torch.cat(parts)


@pytest.mark.parametrize("fmt", THEIRS, **NAME)  # type: ignore[call-overload]
def test_codes(fmt: FloatFormat) -> None:
    """From fp64, and from fp32 where the format is narrower."""
    x = awkward(fmt)
    if fmt is not FP32:
        x = x.float()
        assert torch.equal(encode(x, fmt), their_codes(x, fmt))
        x = x.double()
    assert torch.equal(encode(x, fmt), their_codes(x, fmt))


@pytest.mark.parametrize("fmt", NARROW, **NAME)  # type: ignore[call-overload]
def test_every_code_has_their_value(fmt: FloatFormat) -> None:
    codes = torch.arange(2**fmt.bits, dtype=torch.int32).to(torch.uint8 if fmt.bits <= 8 else torch.int16)
    theirs = torch.from_numpy(codes.numpy().view(THEIRS[fmt]).astype(np.float32))
    found = decode(codes, fmt)
    assert torch.equal(found.isnan(), theirs.isnan())
    numbers = ~found.isnan()
    assert torch.equal(found[numbers].view(torch.int32), theirs[numbers].view(torch.int32))  # the zeros' signs too


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], **NAME)  # type: ignore[call-overload]
def test_saturating_codes_are_those_of_clipped_values(fmt: FloatFormat) -> None:
    x = awkward(fmt).float()
    clipped = x.clamp(-fmt.largest, fmt.largest)  # NaN stays
    assert torch.equal(encode(x, fmt, saturate=True), their_codes(clipped, fmt))


def test_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert torch.equal(decode_power(codes)[:255], theirs[:255]) and theirs[255].isnan()


# -- torch's own casts ----------------------------------------------------------------------------------------------


def test_torch_casts_agree_where_both_have_a_value() -> None:
    for fmt, dtype in ((FP16, torch.float16), (BF16, torch.bfloat16), (E5M2, torch.float8_e5m2)):
        x = awkward(fmt).float()
        x = x[~x.isnan()]  # which of the codes of NaN it is differs, see below
        codes = x.to(dtype).view(torch.uint8 if fmt.bits == 8 else torch.int16)
        assert torch.equal(encode(x, fmt), codes)
    x = awkward(E4M3).float()
    x = x[x.abs() <= 464]  # what lies beyond became NaN in older versions, and the largest value since 2.12
    assert torch.equal(encode(x, E4M3), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_which_nan_torch_writes() -> None:
    nan = torch.tensor([NAN])
    assert nan.to(torch.float8_e5m2).view(torch.uint8).item() == 0x7F
    assert encode(nan, E5M2).item() == their_codes(nan, E5M2).item() == 0x7E


def test_ml_dtypes_writes_a_signed_zero_for_nan_where_there_is_none() -> None:
    assert their_codes(torch.tensor([NAN, -NAN]), E2M1).tolist() == [8, 0]
    with pytest.raises(ValueError, match="x holds NaN"):
        encode(torch.tensor([NAN]), E2M1)


# -- mxfp4 ----------------------------------------------------------------------------------------------------------

MODES = {
    "floor": ScaleCalculationMode.FLOOR,
    "even": ScaleCalculationMode.EVEN,
    "ceil": ScaleCalculationMode.CEIL,
    "fit": ScaleCalculationMode.RCEIL,
}


def theirs_mx(x: Tensor, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Their scales, codes and values."""
    scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, MODES[scaling])
    values = to_dtype(packed, scales, torch.float4_e2m1fn_x2, 32, torch.float32)
    return scales.view(torch.uint8), unpack_uint4(packed), values


def blocks() -> Tensor:
    """Normal values of all magnitudes in 2,048 blocks of 32, with blocks of ties, of zeros and of the ends."""
    torch.manual_seed(0)
    x = torch.randn(1024, 64) * torch.exp2(torch.randint(-60, 60, (1024, 1)))
    x[0], x[1], x[2] = 0, torch.arange(64.0), torch.linspace(-1, 1, 64)
    x[3, :32], x[3, 32:] = 6.0, 7.0
    x[4] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8)
    x[5, 0], x[6, 1], x[7, 0] = INF, -INF, 3e38
    x[8] = torch.randn(64) * 1e-4
    x[8, 0] = 1.0
    return x


@pytest.mark.parametrize("scaling", MODES)
def test_mxfp4(scaling: str) -> None:
    x = blocks()
    if scaling == "fit":
        x[0] = 1  # a block of zeros: they multiply by 1 what is 0 anyway, but the scales agree
    coded = quantize_mxfp4(x, scaling)
    scales, codes, values = theirs_mx(x, scaling)
    infinite = x.isinf().any(1)
    assert torch.equal(coded.scales[~infinite], scales[~infinite])
    assert torch.equal(coded.codes[~infinite], codes[~infinite])
    assert torch.equal(coded.dequantize()[~infinite], values[~infinite])
    if scaling != "fit":
        assert torch.equal(coded.scales, scales) and torch.equal(coded.codes, codes)


def test_a_block_with_nan_is_lost_in_both() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = NAN
    scales, _, values = theirs_mx(x, "floor")
    assert scales.item() == quantize_mxfp4(x).scales.item() == 255
    assert values.isnan().all() and quantize_mxfp4(x).dequantize().isnan().all()


def test_torchao_divides_tiny_blocks_by_twice_their_scale() -> None:
    """Its least scale is 2^-127 when it multiplies and 2^-126 when it divides, so such a block comes back halved."""
    x = torch.full((1, 32), 2.0**-126)
    scales, _, values = theirs_mx(x, "floor")
    assert scales.item() == quantize_mxfp4(x).scales.item() == 0
    assert torch.equal(values, x / 2) and torch.equal(quantize_mxfp4(x).dequantize(), x)


def test_torchao_rounds_a_logarithm_when_it_fits_the_scale() -> None:
    """A hair above 6 times a power of two its logarithm is rounded to the power, and the hair is cut off."""
    power = 2.0**20
    x = torch.zeros(1, 32)
    x[0, 0] = torch.nextafter(torch.tensor(6 * power), torch.tensor(INF))
    scales, _, values = theirs_mx(x, "fit")
    assert decode_power(scales).item() == power and values[0, 0] == 6 * power
    assert decode_power(quantize_mxfp4(x, "fit").scales).item() == 2 * power


# -- nvfp4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_levels", [True, False])
@pytest.mark.parametrize("spread", [0, 4, 12])
def test_nvfp4(two_levels: bool, spread: int) -> None:
    torch.manual_seed(spread)
    x = torch.randn(1024, 128) * torch.exp2(torch.randint(-spread, spread + 1, (1024, 1)))  # 131,072 values
    x[0], x[1, :16] = 0, torch.linspace(-6, 6, 16)
    coded = quantize_nvfp4(x, two_levels)
    scale = per_tensor_amax_to_scale(x.abs().max()) if two_levels else None
    scales, packed = nvfp4_quantize(x, 16, scale)
    assert torch.equal(coded.scales, scales.view(torch.uint8)) and torch.equal(coded.codes, unpack_uint4(packed))
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    assert torch.equal(coded.dequantize(), theirs)
    assert coded.tensor_scale is None if scale is None else torch.equal(coded.tensor_scale, scale)


# -- nf4 ------------------------------------------------------------------------------------------------------------


def theirs_nf4(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Their codes and scales."""
    packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
    flat = packed.flatten()
    codes = torch.stack([flat >> 4, flat & 15], 1).flatten()[: x.numel()].view(x.shape)
    return codes, state.absmax


@pytest.mark.parametrize("block", [32, 64, 256])
def test_nf4(block: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 256) * torch.exp2(torch.randint(-40, 40, (512, 1)))
    levels = torch.tensor(NF4_LEVELS)
    x[0], x[1, :15], x[1, 15:] = 0, (levels[1:] + levels[:-1]) / 2, 1.0  # ties
    codes, scales = theirs_nf4(x, block)
    values = bnb.dequantize_4bit(*bnb.quantize_4bit(x, blocksize=block, quant_type="nf4"))
    coded = quantize_nf4(x, block)
    assert torch.equal(coded.codes, codes) and torch.equal(coded.scales.flatten(), scales)
    assert torch.equal(coded.dequantize(), values)
    assert torch.equal(bnb.get_4bit_type("nf4", device="cpu"), levels)


def test_bitsandbytes_divides_in_a_short_last_block_and_multiplies_elsewhere() -> None:
    """The scaled values differ in their last bit, which decides where they lie next to a tie."""
    torch.manual_seed(0)
    whole = torch.randn(100_000, 64)
    between = (torch.tensor(NF4_LEVELS)[1:] + torch.tensor(NF4_LEVELS)[:-1]) / 2
    largest = whole.abs().amax(1, keepdim=True)
    close = between[torch.arange(63) % 15] * largest  # as near to the ties as fp32 comes
    short = torch.where(whole[:, :63].abs() == largest, whole[:, :63], close)
    codes = quantize_nf4(short).codes
    divided = torch.bucketize(short / short.abs().amax(1, keepdim=True), between)
    assert 0 < int((codes != divided).sum()) < codes.numel() // 2
    rows = (codes != divided).any(1).nonzero()[:20, 0]
    for row in rows.tolist():
        theirs, _ = theirs_nf4(short[row : row + 1].contiguous(), 64)  # 63 values: a short block
        assert torch.equal(theirs[0].long(), divided[row])


def test_bitsandbytes_lets_blocks_run_over_the_ends_of_rows() -> None:
    x = torch.tensor([[1.0] * 40, [8.0] * 40])
    _, scales = theirs_nf4(x, 64)
    assert scales.tolist() == [8.0, 8.0]
    assert quantize_nf4(x).scales.tolist() == [[1.0], [8.0]]


# -- integers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("block", [(1, 256), (1, 32), (64, 256), (64, 1)], ids=["row", "group", "tensor", "column"])
def test_symmetric_integers(bits: int, block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-6, 6, (64, 1)))
    x[0] = torch.linspace(-1, 1, 256)
    most = 2 ** (bits - 1) - 1
    how = {"target_dtype": torch.int8, "quant_min": -most, "quant_max": most}
    scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, block, **how, eps=1e-30)
    theirs = quantize_affine(x, block, scale, zero, torch.int8, -most, most)
    axis, group = {(1, 256): (1, None), (1, 32): (1, 32), (64, 256): (None, None), (64, 1): (0, None)}[block]
    coded = quantize_linear(x, bits, axis, group)
    torch.testing.assert_close(coded.scale.flatten(), scale.flatten(), rtol=2e-7, atol=0)  # one rounding of fp32
    assert int((coded.codes.int() - theirs.int()).abs().max()) <= 1  # only where that rounding meets a tie
    assert int((coded.codes != theirs).sum()) <= x.numel() // 1000
    values = dequantize_affine(theirs, block, scale, zero, torch.int8, -most, most, output_dtype=torch.float32)
    same = coded.codes == theirs
    torch.testing.assert_close(coded.dequantize()[same], values[same], rtol=3e-7, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("block", [(1, 256), (1, 32)], ids=["row", "group"])
def test_integers_with_a_zero_point(bits: int, block: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 256) + 0.7
    x[0] = x[0].abs() + 1  # does not hold 0, so the range is widened
    most = 2**bits - 1
    how = {"target_dtype": torch.uint8, "quant_min": 0, "quant_max": most}
    scale, zero = choose_qparams_affine(x, MappingType.ASYMMETRIC, block, **how, eps=1e-30)
    theirs = quantize_affine(x, block, scale, zero, torch.uint8, 0, most)
    coded = quantize_linear(x, bits, 1, block[1], symmetric=False)
    torch.testing.assert_close(coded.scale.flatten(), scale.flatten(), rtol=2e-7, atol=0)
    assert torch.equal(coded.zero.flatten(), zero.flatten().float())
    assert int((coded.codes.int() - theirs.int()).abs().max()) <= 1
    assert int((coded.codes != theirs).sum()) <= x.numel() // 1000


def test_torchao_uses_minus_128_unless_told_otherwise() -> None:
    """Its symmetric grid has 255 steps from -127.5 to 127.5, ours 254 from -127 to 127."""
    x = torch.tensor([[-255.0, 102.0, 255.0]])
    scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 3), torch.int8)
    assert scale.item() == 255 / 127.5 and quantize_linear(x, 8).scale.item() == pytest.approx(255 / 127)
    codes = quantize_affine(x, (1, 3), scale, zero, torch.int8)
    assert codes.tolist() == [[-128, 51, 127]] and quantize_linear(x, 8).codes.tolist() == [[-127, 51, 127]]


def test_every_format_has_its_reference() -> None:
    assert set(FORMATS.values()) == set(THEIRS)


def test_what_the_book_says_of_the_libraries_is_so() -> None:
    """The recording that the chapter prints, made again."""
    *_, again = run_sweep("format-references")
    kept = recorded("format-references")[0]
    assert again.data["disagreements"] == kept.data["disagreements"]
    assert again.data["formats"] == kept.data["formats"]
    assert all(row["different"] == 0 and row["codes"] > 100_000 for row in again.data["formats"])
