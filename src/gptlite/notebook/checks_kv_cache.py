"""Checks of the exercises on the KV cache: each prints `right`, or the first counterexample."""

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.arithmetic import ModelShape, shipped_models
from gptlite.arithmetic_cache import longest_context
from gptlite.attention import visible
from gptlite.config import preset
from gptlite.notebook.checks import Case, _report


def check_step_mask(step_mask: Callable[[int, int], Tensor]) -> None:
    """Exercise of chapter 4: `step_mask(n_new, n_keys)`, bool [S, T]: which keys each of the newest tokens sees."""

    cases: list[Case] = []
    for n_new, n_keys in ((4, 4), (2, 6), (1, 5), (3, 4), (1, 1)):
        positions = torch.arange(n_keys)[None]
        right = visible(positions[:, n_keys - n_new :], positions)[0, 0]  # [S, T]
        cases.append((f"{n_new} new tokens among {n_keys} keys", (n_new, n_keys), right.double()))

    def as_numbers(n_new: int, n_keys: int) -> Tensor:
        mask = step_mask(n_new, n_keys)
        if mask.dtype != torch.bool:  # zeros and ones would be added to the scores
            raise TypeError(f"the mask is {mask.dtype}, not torch.bool")
        return mask.double()

    _report(as_numbers, cases)


def check_longest_text(longest_text: Callable[[ModelShape, int, float], int]) -> None:
    """Exercise of chapter 4: `longest_text(shape, batch, budget)`, the most tokens that each sequence can hold."""
    models = shipped_models()
    cases: list[Case] = []
    for name, shape, batch, budget in (
        ("Llama 3.1 8B", models["Llama 3.1 8B"], 1, 2**30),
        ("Llama 3.1 8B", models["Llama 3.1 8B"], 32, 5e10),
        ("Llama 2 7B", models["Llama 2 7B"], 7, 1e10),
        ("gptlite", ModelShape.of(preset("gptlite")), 3, 1e6),
        ("Llama 3.1 8B", models["Llama 3.1 8B"], 1, 1000.0),
        ("Gemma 2 9B", models["Gemma 2 9B"], 4, 2e9),
        ("Gemma 2 9B", models["Gemma 2 9B"], 4, 3e10),
    ):
        words = f"{name} with {batch} sequences and {budget:,.0f} B"
        cases.append((words, (shape, batch, budget), longest_context(shape, batch, budget)))
    _report(longest_text, cases)
