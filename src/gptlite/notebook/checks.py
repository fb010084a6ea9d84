"""Checks of the exercises: each calls the reader's function and prints `right`, or the first counterexample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gptlite.config import GPTConfig, preset
from gptlite.model import GPTlite

Case = tuple[str, tuple[Any, ...], Any]  # in words, arguments, right answer


def check_count_params(count_params: Callable[[GPTConfig], int]) -> None:
    """Exercise of chapter 1: `count_params(config)` counts the parameters of any shape."""
    shapes = {
        "the preset gptlite with 74 characters": preset("gptlite", vocab_size=74),
        "d_model 48 with 4 heads of 8": GPTConfig(20, 16, 2, d_model=48, n_heads=4, d_head=8),
        "4 heads over 2 KV heads": GPTConfig(20, 16, 3, d_model=32, n_heads=4, d_head=8, n_kv_heads=2),
        "d_ff 50": GPTConfig(20, 16, 1, d_model=32, n_heads=4, d_head=8, d_ff=50),
    }
    with torch.device("meta"):  # shapes without memory
        cases = [(words, (config,), GPTlite(config).n_params) for words, config in shapes.items()]
    _report(count_params, cases)


def check_min_p(min_p: Callable[[Tensor, float], Tensor]) -> None:
    """Exercise of chapter 1: `min_p(probs [B, V], p)` keeps what is at least p times as probable as the row's best."""
    one = [[0.5, 0.3, 0.15, 0.05]]
    two = [[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]
    cases = [
        (one, 0.4, [[0.625, 0.375, 0.0, 0.0]]),
        (one, 0.0, one),
        (one, 1.0, [[1.0, 0.0, 0.0, 0.0]]),
        ([[0.5, 0.25, 0.25, 0.0]], 0.5, [[0.5, 0.25, 0.25, 0.0]]),  # exactly p times as probable stays
        (two, 0.55, [[0.625, 0.375, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]),
    ]
    _report(min_p, [(f"{probs} with p = {p}", (_tensor(probs), p), _tensor(right)) for probs, p, right in cases])


def _report(function: Callable[..., Any], cases: Iterable[Case]) -> None:
    for words, arguments, right in cases:
        try:
            answer = function(*arguments)
        except Exception as error:  # whatever the reader's code raises is a counterexample too
            print(f"not yet: {words} raises {type(error).__name__}: {error}")
            return
        if not _same(answer, right):
            print(f"not yet: {words} gives {_words(answer)}, right is {_words(right)}")
            return
    print("right")


def _same(answer: Any, right: Any) -> bool:
    if not isinstance(right, Tensor):
        return bool(answer == right)
    if not isinstance(answer, Tensor) or answer.shape != right.shape:
        return False
    return torch.allclose(answer.double(), right, rtol=0, atol=1e-9)


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(torch.round(value, decimals=4).tolist())
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
