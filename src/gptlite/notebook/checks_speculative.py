"""Checks of the exercises on speculative decoding: each prints `right`, or the first counterexample."""

from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.notebook.checks import Case, _report
from gptlite.speculative.theory import best_n_draft, expected_tokens


def check_tokens_per_round(tokens_per_round: Callable[[float, int], float]) -> None:
    """Exercise of chapter 17: `tokens_per_round(acceptance, n_draft)`, the mean of what a round emits."""
    cases: list[Case] = []
    for acceptance, n_draft in ((0.8, 4), (0.0, 4), (1.0, 4), (0.5, 1), (0.9, 10), (0.7, 0)):
        words = f"an acceptance of {acceptance} and {n_draft} drafts"
        cases.append((words, (acceptance, n_draft), round(expected_tokens(acceptance, n_draft), 6)))
    _report(lambda *given: round(float(tokens_per_round(*given)), 6), cases)  # a sum or a fraction, rounded alike


def check_residual(residual: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise of chapter 17: `residual(p [V], q [V])`, what the next token is drawn from after a rejection."""
    cases: list[Case] = []
    for p, q in (
        ([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]),
        ([0.1, 0.2, 0.7], [0.7, 0.2, 0.1]),
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
        ([0.25, 0.25, 0.5], [0.5, 0.25, 0.25]),
    ):
        both = torch.tensor([p, q], dtype=torch.float64)
        left = (both[0] - both[1]).clamp(min=0)
        cases.append((f"p = {p}, q = {q}", (both[0], both[1]), left / left.sum()))
    _report(residual, cases)


def check_best_gamma(best_gamma: Callable[[float, float], int]) -> None:
    """Exercise of chapter 17: `best_gamma(acceptance, cost_ratio)`, of 0 to 32 drafts the fastest number."""
    cases: list[Case] = []
    for acceptance, cost_ratio in ((0.8, 0.2), (0.9, 0.05), (0.5, 0.5), (0.1, 0.2), (0.6, 0.1), (0.95, 0.01)):
        words = f"an acceptance of {acceptance} and a cost ratio of {cost_ratio}"
        cases.append((words, (acceptance, cost_ratio), best_n_draft(acceptance, cost_ratio)))
    _report(best_gamma, cases)
