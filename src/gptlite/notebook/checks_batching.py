"""Checks of the exercises on batching: each prints `right`, or the first counterexample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gptlite.notebook.checks import Case, _report
from gptlite.serving.arrivals import mixed_lengths


def check_continuous_steps(continuous_steps: Callable[[Sequence[int], int], int]) -> None:
    """Exercise of chapter 7: `continuous_steps(answers, seats)`, steps to serve requests that all wait at the start."""
    cases: list[Case] = [
        ("answers [3, 4] on 1 seat", ([3, 4], 1), 7),
        ("answers [6, 1, 2, 2, 1] on 2 seats", ([6, 1, 2, 2, 1], 2), 6),
        ("answers [1, 2, 2, 1, 6] on 2 seats", ([1, 2, 2, 1, 6], 2), 9),  # the order of arrival stays
        ("answers [5, 1, 3, 4, 2] on 3 seats", ([5, 1, 3, 4, 2], 3), 5),
        ("answers [2, 2, 2] on 8 seats", ([2, 2, 2], 8), 2),
    ]
    for seed, seats in ((0, 2), (1, 4), (2, 7)):
        answers = mixed_lengths(20, 1, 30, seed)
        cases.append((f"answers {answers} on {seats} seats", (answers, seats), _on_seats(answers, seats)))
    _report(continuous_steps, cases)


def _on_seats(answers: Sequence[int], seats: int) -> int:
    """Each request in turn takes the seat that is free first."""
    free = [0] * seats
    for n_new in answers:
        free[free.index(min(free))] += n_new
    return max(free)


def check_seats_needed(seats_needed: Callable[[float, float, Mapping[int, float]], int | None]) -> None:
    """Exercise of chapter 7: `seats_needed(rate, n_new, step)`, the smallest batch that keeps up with the arrivals."""
    flat = {1: 0.010, 2: 0.010, 4: 0.010, 8: 0.010}
    rising = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.020, 16: 0.040}
    words = "{} requests per s of {} tokens, steps of {} s"
    cases: list[Case] = [
        (words.format(*arguments), arguments, right)
        for arguments, right in (
            ((1.0, 50.0, flat), 1),
            ((2.0, 50.0, flat), 1),  # exactly as many as it serves
            ((2.5, 50.0, flat), 2),
            ((8.0, 50.0, flat), 4),
            ((17.0, 50.0, flat), None),
            ((8.0, 50.0, rising), 8),
            ((8.0, 51.0, rising), None),  # a batch of 16 serves no more than one of 8
            ((0.1, 50.0, rising), 1),
        )
    ]
    _report(seats_needed, cases)
