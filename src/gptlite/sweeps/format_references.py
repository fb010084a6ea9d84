"""The codes of every number format beside those of the library that is its reference, and where libraries disagree."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from gptlite.quantize.blocks import NF4_LEVELS, quantize_mxfp4, quantize_nf4, quantize_nvfp4
from gptlite.quantize.formats import BF16, E2M1, E4M3, E4M3_IEEE, E5M2, FP16, FP32, FloatFormat, encode
from gptlite.quantize.linear_quant import quantize_linear
from gptlite.record import Point, Recording, Step, sweep

REFERENCES = {
    FP32: ("numpy", "float32"),
    FP16: ("numpy", "float16"),
    BF16: ("ml_dtypes", "bfloat16"),
    E5M2: ("ml_dtypes", "float8_e5m2"),
    E4M3: ("ml_dtypes", "float8_e4m3fn"),
    E4M3_IEEE: ("ml_dtypes", "float8_e4m3"),
    E2M1: ("ml_dtypes", "float4_e2m1fn"),
}
SCALED = {"int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes", "mxfp4": "torchao", "nvfp4": "torchao"}


def library(name: str) -> Any:
    """A module that only the comparison needs. Raises: ValueError that names the extra when it is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao tells of kernels that a CPU has no use for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError:
        raise ValueError(f'no library {name.partition(".")[0]}: pip install "gptlite[test]"') from None
    finally:
        logging.disable(before)


def reference_codes(x: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes [n] of the library that is a format's reference, for x [n] in fp32 or fp64."""
    name, kind = REFERENCES[fmt]
    numpy = library("numpy")
    with numpy.errstate(all="ignore"):
        cast = x.numpy().astype(getattr(library(name), kind))
    view = {8: numpy.uint8, 16: numpy.int16, 32: numpy.int32}[max(8, fmt.bits)]
    return torch.from_numpy(cast.view(view).copy())


def trying_values(fmt: FloatFormat, n_random: int) -> Tensor:
    """Values [n] in fp64: all of the format's, every tie and its neighbours, the ends, and random ones of all sizes."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(n_random, generator=generator, dtype=torch.float64)
    random *= torch.exp2(torch.randint(-40, 30, (n_random,), generator=generator).double())
    ends = [0.0, -0.0, 1e-45, -1e-40, math.inf, -math.inf, fmt.largest, -1.01 * fmt.largest, 1.1 * fmt.largest]
    parts = [random, torch.tensor(ends, dtype=torch.float64)]
    if fmt.bits <= 16:
        values = fmt.values().double()
        ties = (values[1:] + values[:-1]) / 2
        ends_of = [torch.nextafter(ties.float(), torch.tensor(end)).double() for end in (-math.inf, math.inf)]
        parts += [values, ties, *ends_of]
    if fmt.nan_code is not None:
        parts.append(torch.tensor([math.nan, -math.nan], dtype=torch.float64))
    return torch.cat(parts)


def scaled_codes(kind: str, n_random: int) -> tuple[Tensor, Tensor]:
    """Codes of rows of 256 random values, of ties and of zeros: ours and the reference's, both [n, 256]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_random // 256 + 2, 256, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (len(x), 1), generator=generator))
    x[0] = 0
    if kind == "nf4":
        levels = torch.tensor(NF4_LEVELS)
        x[1] = torch.cat([(levels[1:] + levels[:-1]) / 2, torch.ones(1)]).repeat(16)
        packed, _ = library("bitsandbytes.functional").quantize_4bit(x, blocksize=64, quant_type="nf4")
        return quantize_nf4(x).codes, torch.stack([packed >> 4, packed & 15], -1).view(x.shape)
    if kind in ("int8", "int4"):
        bits = int(kind.removeprefix("int"))
        most = 2 ** (bits - 1) - 1
        x[1] = (torch.arange(256) % (2 * most) - most + 0.5).clamp(-most, most)
        x[1, 0] = most  # a step of exactly 1, and ties
        primitives = library("torchao.quantization.quant_primitives")
        how = {"quant_min": -most, "quant_max": most}
        symmetric = primitives.MappingType.SYMMETRIC
        scale, zero = primitives.choose_qparams_affine(x, symmetric, (1, 32), torch.int8, **how, eps=1e-30)
        theirs = primitives.quantize_affine(x, (1, 32), scale, zero, torch.int8, most * -1, most)
        return quantize_linear(x, bits, -1, 32).codes, theirs
    x[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(32)
    kernels = library("torchao.prototype.mx_formats.kernels")
    if kind == "mxfp4":
        _, packed = library("torchao.prototype.mx_formats.mx_tensor").to_mx(x, torch.float4_e2m1fn_x2, 32)
        return quantize_mxfp4(x).codes, kernels.unpack_uint4(packed)
    nvfp4 = library("torchao.prototype.mx_formats.nvfp4_tensor")
    _, packed = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    return quantize_nvfp4(x).codes, kernels.unpack_uint4(packed)


def disagreements() -> list[dict[str, str]]:
    """Where libraries differ, from each other or from themselves: what, ours, theirs."""
    rows: list[dict[str, str]] = []
    nan, beyond = torch.tensor([math.nan]), torch.tensor([500.0])

    def code(codes: Tensor) -> str:
        return f"{int(codes.flatten()[0]) & 0xFF:#04x}"

    def add(what: str, ours: str, theirs: str) -> None:
        rows.append({"what": what, "ours": ours, "theirs": theirs})

    both = f"{code(encode(beyond, E4M3))}, saturating {code(encode(beyond, E4M3, True))}"
    torch_code = code(beyond.to(torch.float8_e4m3fn).view(torch.uint8))
    add("500 in e4m3", both, f"ml_dtypes {code(reference_codes(beyond, E4M3))}, torch {torch_code}")
    other = code(reference_codes(torch.tensor([300.0]), E4M3_IEEE))
    add("300 in e4m3", code(encode(torch.tensor([300.0]), E4M3)), f"ml_dtypes' float8_e4m3, not e4m3fn: {other}")
    torch_code = code(nan.to(torch.float8_e5m2).view(torch.uint8))
    add("NaN in e5m2", code(encode(nan, E5M2)), f"ml_dtypes {code(reference_codes(nan, E5M2))}, torch {torch_code}")
    add("NaN in e2m1", "refused", f"ml_dtypes {code(reference_codes(nan, E2M1))}, which is -0")

    x = torch.zeros(1, 32)
    x[0, 0] = 2.0**-126
    mx = library("torchao.prototype.mx_formats.mx_tensor")
    fp4, modes = torch.float4_e2m1fn_x2, mx.ScaleCalculationMode
    scales, packed = mx.to_mx(x, fp4, 32)
    back = mx.to_dtype(packed, scales, fp4, 32, torch.float32)
    ours = quantize_mxfp4(x).dequantize()
    add("2^-126 alone in a block of mxfp4", _power(ours[0, 0]), f"torchao {_power(back[0, 0])}")
    x[0, 0] = torch.nextafter(torch.tensor(6 * 2.0**20), torch.tensor(math.inf))
    scales, _ = mx.to_mx(x, fp4, 32, modes.RCEIL)
    theirs = _power(2.0 ** (int(scales.view(torch.uint8)[0, 0]) - 127))
    found = _power(2.0 ** (int(quantize_mxfp4(x, "fit").scales[0, 0]) - 127))
    add("scale that fits a hair more than 6 · 2^20", found, f"torchao {theirs}")

    bnb = library("bitsandbytes.functional")
    x = torch.tensor([[1.0] * 40, [8.0] * 40])
    _, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
    ours_text = ", ".join(f"{v:g}" for v in quantize_nf4(x).scales.flatten().tolist())
    add("nf4 scales of rows of 40", ours_text, "bitsandbytes " + ", ".join(f"{v:g}" for v in state.absmax.tolist()))
    primitives = library("torchao.quantization.quant_primitives")
    x = torch.tensor([[-255.0, 102.0, 255.0]])
    scale, zero = primitives.choose_qparams_affine(x, primitives.MappingType.SYMMETRIC, (1, 3), torch.int8)
    lowest = primitives.quantize_affine(x, (1, 3), scale, zero, torch.int8)[0, 0].item()
    add("int8 code of the least of ±255", str(int(quantize_linear(x, 8).codes[0, 0])), f"torchao, by default, {lowest}")
    return rows


def _power(value: float | Tensor) -> str:
    return f"2^{int(math.log2(float(value)))}"


@sweep(
    "format-references",
    "codes of every number format beside those of its reference library; needs gptlite[test]",
    n_random=100_000,
)
def _references(recording: Recording) -> Iterator[Step]:
    n_random = recording.params["n_random"]
    rows = recording.data.setdefault("formats", [])

    def compare(name: str, reference: str, codes: Callable[[], tuple[Tensor, Tensor]]) -> Point:
        begin = time.perf_counter()
        ours, theirs = codes()
        package = reference.partition(".")[0]
        version = metadata.version(package)
        different = int((ours != theirs).sum())
        rows.append(
            {"format": name, "reference": f"{reference}, {version}", "codes": ours.numel(), "different": different}
        )
        if not recording.data.get("disagreements"):
            recording.data["disagreements"] = disagreements()
        return Point({"format": name}, [time.perf_counter() - begin])

    def plain(fmt: FloatFormat) -> tuple[Tensor, Tensor]:
        x = trying_values(fmt, n_random)
        x = x if fmt is FP32 else x.float()
        return encode(x, fmt), reference_codes(x, fmt)

    for fmt, (name, kind) in REFERENCES.items():
        yield {"format": fmt.name}, 1e8, partial(compare, fmt.name, f"{name}.{kind}", partial(plain, fmt))
    for kind, name in SCALED.items():
        yield {"format": kind}, 1e8, partial(compare, kind, name, partial(scaled_codes, kind, n_random))
