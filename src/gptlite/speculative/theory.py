"""What speculative decoding is worth, by arithmetic: tokens per round, speed-up, the best number of drafts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gptlite.config import check_counts
from gptlite.speculative.decode import Verdict


def expected_tokens(acceptance: float, n_draft: int) -> float:
    """Tokens that a round emits on average: 1 + alpha + ... + alpha^gamma {cite}`leviathan2023speculative`.

    Args:
        acceptance: alpha, probability that a draft stays where all before it did, in [0, 1].
        n_draft: gamma, drafts per round, a chain; 0 drafts nothing.
    Raises: ValueError when the acceptance is no probability, or n_draft below 0.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}, it must be in [0, 1]")
    if n_draft:
        check_counts(n_draft=n_draft)
    return float(sum(acceptance**i for i in range(n_draft + 1)))


def speedup(acceptance: float, n_draft: int, cost_ratio: float, verify_ratio: float = 1.0) -> float:
    """Times faster than one token per step of the target: the tokens of a round over what it costs.

    Args:
        acceptance, n_draft: as in `expected_tokens`.
        cost_ratio: c, time of a draft step over that of a step of the target, which reads one token.
        verify_ratio: time of the pass that reads n_draft + 1 tokens over that same step; 1 while it waits for weights.
    Raises: ValueError when a ratio is below 0, or nothing costs anything.
    """
    cost = n_draft * cost_ratio + verify_ratio
    if not (cost_ratio >= 0 and verify_ratio > 0):
        raise ValueError(f"cost_ratio is {cost_ratio} and verify_ratio {verify_ratio}, they must be >= 0 and > 0")
    return expected_tokens(acceptance, n_draft) / cost


def best_n_draft(acceptance: float, cost_ratio: float, longest: int = 32) -> int:
    """The gamma that is fastest by `speedup`, the smallest of equal ones; 0 when drafting does not pay.

    Args:
        longest: gamma at most; without a limit a perfect draft that costs nothing would never stop.
    Raises: ValueError when `speedup` refuses the arguments, or longest is below 1.
    """
    check_counts(longest=longest)
    return max(range(longest + 1), key=lambda n: (round(speedup(acceptance, n, cost_ratio), 12), -n))


def acceptance_from_tokens(tokens_per_round: float, n_draft: int) -> float:
    """The acceptance rate that gives so many tokens per round; the inverse of `expected_tokens`.

    Raises: ValueError when no acceptance rate does.
    """
    check_counts(n_draft=n_draft)
    if not 1 <= tokens_per_round <= n_draft + 1:
        raise ValueError(f"{tokens_per_round} tokens per round cannot come of {n_draft} drafts: 1 to {n_draft + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):  # halves an interval that begins at 1
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, n_draft) < tokens_per_round else (low, middle)
    return (low + high) / 2


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Probability that a draft from q is accepted: the sum of min(p, q), which is 1 minus their total variation.

    Args:
        p, q: distributions [..., V]. Returns: [...].
    """
    return torch.minimum(p, q).sum(-1)


class Tally:
    """Counts over the verdicts of a generation.

    Args:
        trace: rounds, as `speculate` writes them down.
        n_draft: gamma; rounds at the end of a text, which had no room for so many, are left out. None counts all.
    """

    def __init__(self, trace: Iterable[list[Verdict]], n_draft: int | None = None) -> None:
        verdicts = [verdict for verdicts in trace for verdict in verdicts]
        whole = [verdict for verdict in verdicts if n_draft is None or len(verdict.drafts) >= n_draft]
        self.rounds = len(whole)
        self.drafted = sum(len(verdict.drafts) for verdict in whole)
        self.kept = sum(len(verdict.kept) for verdict in whole)
        # in a chain the first rejected draft was tried too, and none after it
        self.tried = sum(min(len(verdict.kept) + 1, len(verdict.drafts)) for verdict in whole)

    @property
    def acceptance(self) -> float:
        """Of the drafts of chains that were tried, the part that stayed; 0 when none was."""
        return self.kept / max(1, self.tried)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round emitted on average."""
        return (self.kept + self.rounds) / max(1, self.rounds)
