"""Checks of the exercises of the chapter on FlashAttention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.notebook.checks import Case, _report

Merge = Callable[[list[Tensor], list[float]], Tensor]


def check_merge_parts(merge_parts: Merge) -> None:
    """Exercise: `merge_parts(outs, lses)`, attention over all parts from each part's output [Dv] and log-sum-exp."""
    infinity = math.inf
    cases: list[Case] = [
        ("two parts of the same weight", ([_row(2.0), _row(4.0)], [0.0, 0.0]), _row(3.0)),
        ("weights of one to three", ([_row(8.0, 0.0), _row(4.0, 1.0)], [0.0, math.log(3)]), _row(5.0, 0.75)),
        ("log-sum-exps of 1,000 and 1,000", ([_row(1.0), _row(5.0)], [1000.0, 1000.0]), _row(3.0)),
        ("log-sum-exps of -900 and -900", ([_row(1.0), _row(5.0)], [-900.0, -900.0]), _row(3.0)),
        ("an empty part", ([_row(7.0), _row(0.0)], [0.5, -infinity]), _row(7.0)),
        ("only empty parts", ([_row(0.0), _row(0.0)], [-infinity, -infinity]), _row(0.0)),
        ("three parts", ([_row(1.0), _row(2.0), _row(3.0)], [math.log(w) for w in (1, 2, 1)]), _row(2.0)),
    ]
    _report(merge_parts, cases)


def check_computed_tiles(computed_tiles: Callable[[int, int, int], int]) -> None:
    """Exercise: `computed_tiles(S, T, tile)`, tiles that S queries at the end of T keys need under a causal mask."""
    cases: list[Case] = []
    for S, T, tile in ((64, 64, 16), (1, 64, 16), (16, 64, 16), (20, 64, 16), (64, 64, 64), (7, 50, 8), (50, 50, 8)):
        needed = sum(
            any(key <= T - S + row for row in range(i, min(i + tile, S)) for key in range(j, min(j + tile, T)))
            for i in range(0, S, tile)
            for j in range(0, T, tile)
        )
        cases.append((f"S = {S}, T = {T}, tiles of {tile}", (S, T, tile), needed))
    _report(computed_tiles, cases)


def check_sdpa_arguments(sdpa_arguments: Callable[[int, int], dict[str, Any]]) -> None:
    """Exercise: `sdpa_arguments(S, T)`, what SDPA needs for S new tokens at the end of T to see those before them."""

    def seen(S: int, T: int) -> str:
        arguments = sdpa_arguments(S, T)
        # scores are all equal and values are unit vectors: the output shows whom a query saw
        q, k, v = torch.zeros(1, 1, S, T), torch.zeros(1, 1, T, T), torch.eye(T)[None, None]
        out = F.scaled_dot_product_attention(q, k, v, **arguments)[0, 0]
        keys = [(row > 0).nonzero().flatten().add(1).tolist() for row in out]
        return _seen(keys, arguments.get("attn_mask") is not None)

    cases: list[Case] = []
    for S, T in ((5, 5), (1, 8), (3, 8), (7, 8), (1, 1)):
        right = _seen([list(range(1, T - S + row + 2)) for row in range(S)], S not in (1, T))
        cases.append((f"S = {S}, T = {T}", (S, T), right))
    _report(seen, cases)


def _seen(keys: list[list[int]], masked: bool) -> str:
    spans = [f"{row[0]} to {row[-1]}" if row == list(range(1, len(row) + 1)) != [] else str(row) for row in keys]
    return f"keys {', '.join(spans)}, {'with' if masked else 'without'} a mask"


def _row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
