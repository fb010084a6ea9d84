"""What a whole generation costs with a cache and without, and what the two kinds of cache write and allocate.

A generation of m new tokens after a prompt of n makes m passes. Without a cache pass j reads n + j - 1 tokens; with one
the first reads the prompt and every other a single token. The last new token is never read.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from gptlite.arithmetic import PARTS, Cost, ModelShape, decode_costs, kv_bytes_per_token, prefill_costs
from gptlite.config import check_counts

Kind = Literal["dynamic", "static"]


def tokens_read(n_prompt: int, n_new: int, cached: bool) -> int:
    """Tokens that go through the linear layers in all passes of a generation, per sequence.

    Args:
        n_prompt, n_new: tokens of the prompt and generated ones, each at least 1.
        cached: whether keys and values are kept.
    Raises: ValueError on a count that is not a whole number of at least 1.
    """
    check_counts(n_prompt=n_prompt, n_new=n_new)
    passes = n_new - 1  # after the first
    return n_prompt + passes if cached else n_new * n_prompt + passes * n_new // 2


def pairs_seen(n_prompt: int, n_new: int, cached: bool) -> int:
    """Visible (query, key) pairs in all passes of a generation, per sequence, layer and query head.

    A text of n tokens has n (n + 1) / 2 of them. With a cache each pair comes once; without, in every later pass again.

    Args and Raises: as of `tokens_read`.
    """
    check_counts(n_prompt=n_prompt, n_new=n_new)
    last = n_prompt + n_new - 1  # tokens that the last pass attends to
    if cached:
        return last * (last + 1) // 2
    before = n_prompt - 1

    def tetrahedron(n: int) -> int:  # the sum of n (n + 1) / 2 from 1 to n
        return n * (n + 1) * (n + 2) // 6

    return tetrahedron(last) - tetrahedron(before)


def generation_costs(
    shape: ModelShape, n_prompt: int, n_new: int, cached: bool, batch: int = 1, **options: Any
) -> dict[str, Cost]:
    """FLOPs and bytes of all passes of a generation, by part of the model.

    Args:
        shape: the model's. n_prompt, n_new, cached: as in `tokens_read`.
        batch: B, sequences.
        options: of `arithmetic.step_costs`.
    Returns: a Cost for each of `arithmetic.PARTS`.
    Raises: ValueError on a count that is not a whole number of at least 1.
    """
    check_counts(n_prompt=n_prompt, n_new=n_new, batch=batch)
    sums = dict.fromkeys(PARTS, Cost())
    for n_tokens in range(n_prompt, n_prompt + n_new):
        step = decode_costs if cached and n_tokens > n_prompt else prefill_costs
        for part, cost in step(shape, batch, n_tokens, **options).items():
            sums[part] += cost
    return sums


def written_bytes(shape: ModelShape, n_prompt: int, n_new: int, kind: Kind, bytes_per_value: float = 2) -> float:
    """Bytes of keys and values that a cache writes during a generation, per sequence.

    A static cache writes each token once. A dynamic one concatenates, which writes all that it holds in every pass.
    Layers whose window is full are not considered: neither cache drops anything.

    Raises: ValueError on a count that is not a whole number of at least 1, a width that is not positive, another kind.
    """
    check_counts(n_prompt=n_prompt, n_new=n_new)
    _check_width(bytes_per_value)
    if kind not in ("dynamic", "static"):
        raise ValueError(f"kind is {kind!r}, it must be 'dynamic' or 'static'")
    last = n_prompt + n_new - 1
    held = last if kind == "static" else (last * (last + 1) - (n_prompt - 1) * n_prompt) // 2
    return held * kv_bytes_per_token(shape, bytes_per_value)


def static_bytes(shape: ModelShape, n_sequences: int, max_tokens: int, bytes_per_value: float = 2) -> float:
    """Bytes that a static cache allocates for keys and values, used or not: a line per sequence and a spare slot each.

    Args:
        n_sequences: lines. max_tokens: tokens that a line holds.
    Raises: ValueError on a count that is not a whole number of at least 1, or a width that is not positive.
    """
    check_counts(n_sequences=n_sequences, max_tokens=max_tokens)
    _check_width(bytes_per_value)
    return n_sequences * (max_tokens + 1) * kv_bytes_per_token(shape, bytes_per_value)


def longest_context(shape: ModelShape, batch: int, budget: float, bytes_per_value: float = 2) -> int | None:
    """The most tokens that each of `batch` sequences can hold when all keys and values get `budget` bytes.

    Args:
        batch: B, sequences. budget: bytes, for example of `arithmetic.kv_budget`.
    Returns: tokens, 0 when not even one fits; None when windows end the growth before the budget does.
    Raises: ValueError when batch is not a whole number of at least 1, the budget not finite, the width not positive.
    """
    check_counts(batch=batch)
    _check_width(bytes_per_value)
    if not math.isfinite(budget):
        raise ValueError(f"budget is {budget}, it must be a finite number of bytes")
    per_layer = kv_bytes_per_token(shape, bytes_per_value) / shape.n_layers  # of one token
    layers = budget / (batch * per_layer)  # sum over the layers of the tokens that each may hold
    n_full = shape.n_layers - shape.n_sliding
    if layers < shape.n_layers * shape.window or not shape.n_sliding:  # no window is full yet
        return max(0, int(layers // shape.n_layers))
    return int((layers - shape.n_sliding * shape.window) // n_full) if n_full else None


def _check_width(bytes_per_value: float) -> None:
    if not 0 < bytes_per_value < math.inf:
        raise ValueError(f"bytes_per_value is {bytes_per_value}, it must be positive and finite")
