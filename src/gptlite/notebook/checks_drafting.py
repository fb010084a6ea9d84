"""Checks of the exercises on drafting without a draft model: each prints `right`, or the first counterexample."""

from collections.abc import Callable, Sequence

from gptlite.cache.contract import tree_mask
from gptlite.notebook.checks import Case, _report
from gptlite.speculative.lookup import last_match


def check_look_up(look_up: Callable[[list[int], int, int], list[int]]) -> None:
    """Exercise of chapter 18: `look_up(tokens, n, n_draft)`, what followed the same n tokens before."""
    cases: list[Case] = []
    for tokens, n, n_draft in (
        ([1, 2, 3, 4, 1, 2, 3], 3, 2),
        ([1, 2, 3, 4, 1, 2, 3], 3, 9),
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 1),
        ([5, 5, 5, 5], 2, 3),
        ([1, 2, 3], 2, 4),
        ([7], 1, 2),
    ):
        begin = last_match(tokens, n, n)
        right = [] if begin is None else tokens[begin : begin + n_draft]
        cases.append((f"the text {tokens}, n = {n}, {n_draft} drafts", (list(tokens), n, n_draft), right))
    _report(look_up, cases)


def check_sees(sees: Callable[[list[int], int, int], bool]) -> None:
    """Exercise of chapter 18: `sees(parents, i, j)`, whether node i of a tree may attend to node j."""
    cases: list[Case] = []
    for parents in ([-1, 0, 1], [-1, -1, 0, 0, 1], [-1, 0, 0, 1, 2, 4]):
        mask = tree_mask(parents).tolist()
        for i in range(len(parents)):
            for j in range(len(parents)):
                cases.append((f"the tree {parents}, nodes {i} and {j}", (list(parents), i, j), mask[i][j]))
    _report(sees, cases)


def check_best_nodes(best_nodes: Callable[[Sequence[Sequence[float]], int], float]) -> None:
    """Exercise of chapter 18: `best_nodes(probs, n)`, tokens per round of the best tree of n nodes over such heads."""
    cases: list[Case] = []
    for probs, n in (
        ([[0.6, 0.3, 0.1]], 1),
        ([[0.6, 0.3, 0.1]], 2),
        ([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], 2),
        ([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], 3),
        ([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], 4),
        ([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]], 3),
    ):
        values, paths = list[float](), [1.0]
        for head in probs:
            paths = [path * p for path in paths for p in head]
            values += paths
        right = round(1 + sum(sorted(values, reverse=True)[:n]), 9)
        cases.append((f"heads {probs}, {n} nodes", ([list(head) for head in probs], n), right))

    _report(lambda heads, n: round(best_nodes(heads, n), 9), cases)
