"""Checks of the exercises of the chapter on quantised weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.notebook.checks import Case, _report


def check_stored_bits(stored_bits: Callable[[int, int, bool], float]) -> None:
    """Exercise of chapter 13: `stored_bits(bits, group_size, zero_point)`, bits of a weight and its share of the scale.

    A scale takes 16 bits, a zero point as many as a code.
    """
    cases: list[Case] = [
        ("4 bits, groups of 128, with a zero point", (4, 128, True), 4 + 20 / 128),
        ("4 bits, groups of 32, with a zero point", (4, 32, True), 4.625),
        ("2 bits, groups of 16, without one", (2, 16, False), 3.0),
        ("8 bits, groups of 4,096, without one", (8, 4096, False), 8 + 16 / 4096),
        ("3 bits, groups of 1, with one", (3, 1, True), 22.0),
    ]
    _report(stored_bits, cases)


def check_passed_on(passed_on: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Exercise of chapter 13: `passed_on(w, v, U)`, a row's other weights after its first one was rounded.

    The reader's function gets the weights w [n], the stored value v of the first one, a scalar, and U [n, n], and gives
    the n - 1 others.
    """

    def made(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(n, generator=generator, dtype=torch.float64)
        x = torch.randn(20, n, generator=generator, dtype=torch.float64)
        U = torch.linalg.cholesky(torch.linalg.inv(x.T @ x / 20), upper=True)
        return w, w[0].round(), U

    two = torch.tensor([0.4, 1.0]).double(), torch.tensor(0.0).double(), torch.tensor([[2.0, -1.0], [0, 1]]).double()
    cases: list[Case] = [("w [0.4, 1], v 0 and U [[2, -1], [0, 1]]", two, torch.tensor([1.2]).double())]
    for n in (2, 3, 6):
        w, v, U = made(n, n)
        inverse = U.T @ U
        right = w[1:] - (w[0] - v) / inverse[0, 0] * inverse[0, 1:]
        cases.append((f"a row of {n}", (w, v, U), right))
    _report(passed_on, cases)
