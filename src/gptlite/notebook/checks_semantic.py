"""The check of the exercise on semantic caching."""

from collections.abc import Callable, Sequence

from gptlite.notebook.checks import Case, _report


def check_pick_threshold(pick_threshold: Callable[[Sequence[float], Sequence[bool], int], float | None]) -> None:
    """Exercise of chapter 6: `pick_threshold(similarity, same, max_wrong)`, the lowest one that serves few wrongly."""
    rows: list[tuple[list[float], list[bool], int, float | None]] = [
        ([0.9, 0.8, 0.7], [True, True, False], 0, 0.8),
        ([0.9, 0.8, 0.7], [True, False, True], 0, 0.9),
        ([0.9, 0.8, 0.7], [True, False, True], 1, 0.7),
        ([0.7, 0.9, 0.8], [False, True, True], 0, 0.8),  # in any order
        ([0.9, 0.9, 0.5], [True, False, True], 0, None),  # a wrong one at the same similarity is served too
        ([0.5, 0.9], [True, False], 0, None),
        ([0.9, 0.8, 0.6, 0.7], [True, False, True, True], 1, 0.6),
        ([0.6, 0.7], [True, True], 0, 0.6),
        ([0.9, 0.8, 0.7], [True, False, False], 1, 0.8),  # a wrong one's similarity may be a threshold too
    ]
    words = "similarities {}, same {}, at most {} wrong"
    cases: list[Case] = [
        (words.format(similarity, same, limit), (list(similarity), list(same), limit), right)
        for similarity, same, limit, right in rows
    ]
    _report(pick_threshold, cases)
