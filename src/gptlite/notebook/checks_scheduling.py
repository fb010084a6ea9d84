"""Checks of the exercises on scheduling: each prints `right`, or the first counterexample."""

from collections.abc import Callable, Sequence

from gptlite.notebook.checks import Case, _report
from gptlite.serving.jobs import Job, Outcome, attainment


def check_share_budget(share_budget: Callable[[int, list[int], int], list[int]]) -> None:
    """Exercise of chapter 9: `share_budget(n_decoding, unread, budget)`, tokens that each prompt reads in a step."""
    cases: list[Case] = []
    for n_decoding, unread, budget in (
        (3, [10], 8),
        (0, [5, 4], 16),
        (2, [6, 9, 4], 10),
        (8, [5, 5], 8),  # the decodes take it all
        (1, [], 4),
        (4, [3, 7, 2], 9),
        (0, [12, 1], 12),
    ):
        left, right = budget - n_decoding, []
        for n in unread:
            right.append(min(n, left))
            left -= right[-1]
        words = f"{n_decoding} decoding, {unread} tokens to read and a budget of {budget}"
        cases.append((words, (n_decoding, list(unread), budget), right))
    _report(share_budget, cases)


def check_kept_per_second(kept_per_second: Callable[[list[Sequence[float]], float, float, float], float]) -> None:
    """Exercise of chapter 9: `kept_per_second(requests, seconds, ttft, tpot)`; a request is [arrival, token, ...]."""
    streams: list[list[list[float]]] = [
        [[0, 1, 2, 3], [0, 2, 3, 4], [1, 2, 5, 6]],
        [[0, 1, 2, 3], [0.5, 4, 5, 6]],
        [[2, 3], [2, 5]],  # one token: there is no time per output token to miss
        [[0, 1, 1.1, 6.2], [0, 1, 2, 3]],
    ]
    cases: list[Case] = []
    for times in streams:
        for ttft, tpot in ((1, 1), (2, 2), (5, 1)):
            outcomes = [Outcome(Job(t[0], 1, len(t) - 1), list(t[1:])) for t in times]
            right = attainment(outcomes, ttft, tpot) * len(times) / 10
            words = f"{times} within 10 s, TTFT at most {ttft} and TPOT at most {tpot}"
            cases.append((words, ([list(t) for t in times], 10.0, ttft, tpot), right))
    _report(kept_per_second, cases)
