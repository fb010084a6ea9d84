"""Checks of the exercises of the chapter on quantised keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.notebook.checks import Case, _report


def check_bits_per_value(bits_per_value: Callable[[int, int, int], float]) -> None:
    """Exercise of chapter 14: `bits_per_value(bits, group, numbers)`, with the 16-bit numbers beside each group."""
    cases: list[Case] = [
        ("2 bits, groups of 32, a scale and a least value", (2, 32, 2), 3.0),
        ("2 bits, groups of 128, both numbers", (2, 128, 2), 2.25),
        ("4 bits, groups of 32, both numbers", (4, 32, 2), 5.0),
        ("8 bits, one scale for a head of 128", (8, 128, 1), 8.125),
        ("8 bits without scales", (8, 32, 0), 8.0),
    ]
    _report(bits_per_value, cases)


def check_centred(centred: Callable[[Tensor, int], Tensor]) -> None:
    """Exercise of chapter 14: `centred(keys, bits)`, keys [G, n, D] less their mean over the tokens, rounded per token.

    The reader's function gives the rounded keys without the mean: codes of a grid from the least to the largest value
    of each token.
    """

    def right(keys: Tensor, bits: int) -> Tensor:
        rest = keys - keys.mean(1, keepdim=True)
        low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
        size = (high - low) / (2**bits - 1)
        return low + size * ((rest - low) / size).round()

    def number(keys: Tensor, bits: int, place: tuple[int, int, int] | None) -> Tensor | list[int]:
        answer = centred(keys, bits)
        return list(answer.shape) if place is None else answer[place]

    cases: list[Case] = []  # number by number, so that the counterexample is one of them
    for G, n, D, bits in ((1, 4, 3, 2), (2, 6, 5, 2), (3, 8, 4, 4)):
        keys = torch.randn(G, n, D, generator=torch.Generator().manual_seed(G), dtype=torch.float64)
        keys[..., 1] += 4
        words, rounded = f"keys {[G, n, D]} and {bits} bits", right(keys, bits)
        cases.append((f"{words}: the shape", (keys, bits, None), [G, n, D]))
        for g, t, d in torch.cartesian_prod(torch.arange(G), torch.arange(n), torch.arange(D)).tolist():
            cases.append((f"{words}: head {g}, token {t}, channel {d}", (keys, bits, (g, t, d)), rounded[g, t, d]))
    _report(number, cases)
