"""Checks of the exercises on prefix caching."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gptlite.notebook.checks import _report


def check_prompt_reads(prompt_reads: Callable[[Sequence[Sequence[int]], int], list[int]]) -> None:
    """Exercise of chapter 5: `prompt_reads(prompts, block_size)`, what each prompt reads after those before it."""
    a, b = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9, 9]
    cases = [
        ([a], 4, [7]),
        ([a, a], 4, [7, 3]),
        ([a, b], 4, [7, 3]),
        ([a, b], 2, [7, 3]),
        ([a, b], 3, [7, 4]),  # only the first block of 3 is whole in both
        ([a, b, a], 1, [7, 3, 1]),  # all is cached, and the last token is read again
        ([a[:4], a[:4]], 4, [4, 1]),
        ([b, [5, *b]], 2, [7, 8]),  # the same tokens one place later are another prefix
        ([[5, 6], [1, 2, 5, 6]], 2, [2, 4]),  # and so is a block that another text began with
        ([a, b, [1, 2, 3, 4, 9, 9, 0]], 2, [7, 3, 1]),  # the longest of the earlier prompts counts
    ]
    words = "the prompts {} in blocks of {}"
    _report(prompt_reads, [(words.format(p, size), ([list(t) for t in p], size), right) for p, size, right in cases])


def check_break_even(break_even: Callable[[float, float], int | None]) -> None:
    """Exercise of chapter 5: `break_even(write, read)`, the reuses from which a paid-for prefix is cheaper."""
    cases = [
        (1.25, 0.1, 1),
        (2.0, 0.1, 2),
        (1.0, 0.5, 1),
        (1.0, 0.1, 1),
        (2.0, 0.5, 3),  # 2 + 2 / 2 equals 3: no cheaper yet
        (1.5, 0.5, 2),
        (1.25, 1.0, None),
        (1.0, 1.0, None),
    ]
    words = "write {} and read {}"
    _report(break_even, [(words.format(w, r), (w, r), right) for w, r, right in cases])
