"""Checks of the exercises of the chapter on pruning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.compress.masks import mask_pattern
from gptlite.compress.structured import Kept, pruned_params
from gptlite.config import GPTConfig
from gptlite.notebook.checks import Case, _report


def check_params_left(params_left: Callable[[int, int, int, int, int, int, int], int]) -> None:
    """Exercise of chapter 16: `params_left(V, n, L, d, D, heads, neurons)`, the parameters of a pruned GPTlite."""
    cases: list[Case] = []
    for V, n, L, d, D, heads, neurons in (
        (74, 256, 6, 256, 32, 4, 512),
        (74, 256, 3, 256, 32, 8, 1024),
        (10, 8, 1, 6, 2, 1, 5),
        (50, 16, 2, 12, 4, 2, 7),
    ):
        config = GPTConfig(V, n, L, d, heads, D, d_ff=neurons)
        words = f"V = {V}, n = {n}, L = {L}, d = {d}, D = {D}, {heads} heads, {neurons} neurons"
        cases.append((words, (V, n, L, d, D, heads, neurons), pruned_params(config, Kept())))
    _report(params_left, cases)


def check_two_of_four(two_of_four: Callable[[Tensor], Tensor]) -> None:
    """Exercise of chapter 16: `two_of_four(scores)`, the mask of a 2:4 pattern along the inputs, [d_out, d_in].

    True and 1 both say that a weight stays.
    """
    cases: list[Case] = [
        (
            "scores [[1, 2, 3, 4], [4, 3, 2, 1]]",
            (torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1]]),),
            torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]]).double(),
        )
    ]
    for seed, (d_out, d_in) in enumerate(((3, 8), (1, 16), (6, 12))):
        scores = torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(seed))
        cases.append((f"random scores [{d_out}, {d_in}]", (scores,), mask_pattern(scores).double()))
    _report(two_of_four, cases)
