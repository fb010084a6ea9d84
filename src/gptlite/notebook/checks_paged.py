"""Checks of the exercises on PagedAttention: each prints `right`, or the first counterexample."""

from collections.abc import Callable

from gptlite.notebook.checks import Case, _report
from gptlite.serving.waste import length_for


def check_slot(slot: Callable[[list[int], int, int], int]) -> None:
    """Exercise of chapter 8: `slot(table, block_size, i)`, where in the pool a sequence's token i lies."""
    cases: list[Case] = []
    for table, size in (([3], 4), ([7, 0, 5], 4), ([2, 9], 16), ([4, 1, 8], 1)):
        for i in (0, size * len(table) - 1, size * (len(table) // 2)):
            words = f"token {i} of a sequence with the table {table}, blocks of {size}"
            cases.append((words, (table, size, i), table[i // size] * size + i % size))
    _report(slot, cases)


def check_blocks_of_step(blocks_of_step: Callable[[list[list[int]], list[int], int], int]) -> None:
    """Exercise of chapter 8: `blocks_of_step(tables, lengths, block_size)`, blocks that a decode step must take."""
    cases: list[Case] = []
    for tables, lengths, size in (
        ([[0]], [3], 4),
        ([[0]], [4], 4),
        ([[0, 1], [2]], [8, 3], 4),
        ([[0, 1], [0, 1]], [6, 6], 4),
        ([[0, 1], [0, 1], [0, 1]], [6, 6, 6], 4),
        ([[0, 1], [0, 1]], [8, 8], 4),
        ([[0, 1], [0, 2], [0, 2], [3]], [7, 6, 6, 4], 4),
        ([[0], [0], [1], [1]], [3, 3, 3, 3], 16),
    ):
        holders = [block for table in tables for block in table]
        # by definition, one row after the other: a full last block needs a new one, a shared one is copied
        needed = 0
        for table, n in zip(tables, lengths, strict=True):
            if n % size == 0:
                needed += 1
            elif holders.count(table[-1]) > 1:
                needed += 1
                holders.remove(table[-1])
        words = f"tables {tables}, lengths {lengths}, blocks of {size}"
        cases.append((words, (tables, lengths, size), needed))
    _report(blocks_of_step, cases)


def check_least_mean(least_mean: Callable[[float, int], int]) -> None:
    """Exercise of chapter 8: `least_mean(share, block_size)`, the mean length from which waste is at most a share."""
    cases: list[Case] = []
    for share, size in ((0.05, 16), (0.04, 16), (0.05, 1), (0.5, 17), (0.1, 32), (0.01, 16)):
        cases.append((f"a share of {share}, blocks of {size}", (share, size), length_for(share, size)))
    _report(least_mean, cases)
