"""Checks of the exercises of the chapter on number formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.notebook.checks import Case, _report
from gptlite.quantize.formats import BF16, E2M1, E4M3, E5M2, FP16, decode


def check_value_of(value_of: Callable[[int, int, int], float]) -> None:
    """Exercise: `value_of(code, exponent_bits, mantissa_bits)`, the value of a finite code of any such format."""
    cases: list[Case] = []
    for fmt, codes in (
        (E2M1, (1, 2, 7, 9, 0)),
        (E4M3, (0x38, 0x7E, 0x01, 0xBC, 0x07)),
        (E5M2, (0x3C, 0x7B, 0x82)),
        (FP16, (0x3C01, 0x0001, 0x7BFF)),
        (BF16, (0x3FC0, 0x0001)),
    ):
        for code in codes:
            kind = torch.uint8 if fmt.bits <= 8 else torch.int16
            value = float(decode(torch.tensor([code], dtype=torch.int32).to(kind), fmt))
            words = f"code {code:#x} with {fmt.exponent_bits} bits of exponent and {fmt.mantissa_bits} of mantissa"
            cases.append((words, (code, fmt.exponent_bits, fmt.mantissa_bits), value))
    _report(value_of, cases)


def check_bits_with_scales(bits_with_scales: Callable[[int, int, int, bool], float]) -> None:
    """Exercise: `bits_with_scales(bits, group_size, scale_bits, zero_point)`, bits per value with them."""
    cases: list[Case] = [
        ("4 bits, groups of 32, scales of 16", (4, 32, 16, False), 4.5),
        ("4 bits, groups of 32, scales of 16 and a zero point", (4, 32, 16, True), 4.625),
        ("2 bits, groups of 64, scales of 16 and a zero point", (2, 64, 16, True), 2.28125),
        ("4 bits, groups of 32, scales of 8", (4, 32, 8, False), 4.25),
        ("8 bits, groups of 128, scales of 32", (8, 128, 32, False), 8.25),
    ]
    _report(bits_with_scales, cases)


def check_double_quantized(double_quantized: Callable[[Tensor], Tensor]) -> None:
    """Exercise: `double_quantized(scales [n])`, scales after a second quantisation as in QLoRA, to 8 bits.

    Their mean is taken off, and blocks of 256 of what is left are rounded to int8 with one scale each.
    """

    def right(scales: Tensor) -> Tensor:
        mean, parts = scales.mean(), []
        for part in (scales - mean).split(256):
            step = part.abs().max() / 127
            parts.append((part / step).round() * step if step > 0 else part)
        return torch.cat(parts) + mean

    cases: list[Case] = [
        ("scales 1, 2, 3", (torch.tensor([1.0, 2.0, 3.0]).double(),), torch.tensor([1.0, 2, 3]).double())
    ]
    for n in (5, 256, 300):
        generator = torch.Generator().manual_seed(n)
        scales = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
        cases.append((f"{n} scales", (scales,), right(scales)))
    cases.append(("scales that are all alike", (torch.full((4,), 0.5).double(),), torch.full((4,), 0.5).double()))
    _report(double_quantized, cases)
