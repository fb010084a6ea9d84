"""Requests as counts, what became of them, and how many kept their promises: the goodput of a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gptlite.serving.routing import Chain


@dataclass(frozen=True)
class Job:
    """A request as a simulation sees it: no text, only counts.

    Args:
        arrival: seconds. n_prompt, n_new: tokens of the prompt and of the answer, each at least 1.
        chain: names of the prompt's full blocks, as `cache.prefix.block_keys` gives them; empty shares nothing.
    """

    arrival: float
    n_prompt: int
    n_new: int
    chain: Chain = ()

    def __post_init__(self) -> None:
        if not 0 <= self.arrival < math.inf or self.n_prompt < 1 or self.n_new < 1:
            raise ValueError(f"{self}: a job arrives at 0 or later, with at least 1 prompt token and 1 new one")


@dataclass
class Outcome:
    """What became of a job.

    Args:
        tokens: seconds at which its tokens came. replica: that read its prompt. n_cached: prompt tokens not read again.
    """

    job: Job
    tokens: list[float] = field(default_factory=list)
    replica: int = -1
    n_cached: int = 0

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.tokens[0] - self.job.arrival

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first, seconds; 0 for an answer of one token."""
        return (self.tokens[-1] - self.tokens[0]) / max(len(self.tokens) - 1, 1)

    @property
    def longest_gap(self) -> float:
        """The longest wait between two of its tokens, seconds; 0 for an answer of one token."""
        return max((b - a for a, b in zip(self.tokens, self.tokens[1:])), default=0.0)


@dataclass(frozen=True)
class Step:
    """One step of a replica: when it began and ended, and what it read.

    Args:
        begin, end: seconds. n_decode: rows that decoded. n_prompt: tokens of prompts.
        waiting: jobs without a slot when it began.
    """

    replica: int
    begin: float
    end: float
    n_decode: int
    n_prompt: int
    waiting: int


@dataclass
class Trace:
    """A simulation's result: outcomes in the order of the jobs, and all steps.

    Args:
        sent_bytes: of keys and values that went over the link.
    """

    outcomes: list[Outcome]
    steps: list[Step] = field(default_factory=list)
    sent_bytes: float = 0.0

    @property
    def finished(self) -> float:
        """When the last token came, in seconds."""
        return max(outcome.tokens[-1] for outcome in self.outcomes)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that no one read again, over all prompt tokens."""
        return sum(o.n_cached for o in self.outcomes) / sum(o.job.n_prompt for o in self.outcomes)


def poisson_jobs(
    rate: float,
    n_jobs: int,
    n_prompt: Callable[[np.random.Generator], int],
    n_new: Callable[[np.random.Generator], int],
    seed: int = 0,
) -> list[Job]:
    """Jobs that arrive independently of each other, `rate` per second on average, with lengths drawn by functions."""
    if not 0 < rate < math.inf or n_jobs < 1:
        raise ValueError(f"rate is {rate} and n_jobs {n_jobs}, they must be above 0 and finite, and at least 1")
    rng = np.random.default_rng(seed)
    times = rng.exponential(1 / rate, n_jobs).cumsum()
    return [Job(float(time), n_prompt(rng), n_new(rng)) for time in times]


# -- goodput ------------------------------------------------------------------------------------------------------


def attainment(outcomes: Sequence[Outcome], ttft: float, tpot: float) -> float:
    """Share of the requests whose TTFT and TPOT are both at most these limits, in seconds; in [0, 1].

    Raises: ValueError when there is no request, or a limit is not positive.
    """
    if not outcomes:
        raise ValueError("there are no requests to count")
    if not (ttft > 0 and tpot > 0):
        raise ValueError(f"the limits are {ttft} and {tpot} s, both must be positive")
    return sum(o.ttft <= ttft and o.tpot <= tpot for o in outcomes) / len(outcomes)


def goodput(outcomes: Sequence[Outcome], rate: float, ttft: float, tpot: float) -> float:
    """Requests per second that keep both limits {cite}`zhong2024distserve`, where `rate` arrive per second."""
    return rate * attainment(outcomes, ttft, tpot)


def highest_rate(keeps: Callable[[float], float], goal: float = 0.9, low: float = 0.01, high: float = 100.0) -> float:
    """The highest rate at which at least `goal` of the requests keep the limits: DistServe's goodput.

    Args:
        keeps: attainment at a rate, which does not rise with it.
        low, high: requests per second to search between; found to 1 %.
    Returns: requests per second; 0 when even `low` is too much, `high` when nothing is.
    Raises: ValueError unless 0 < low < high.
    """
    if not 0 < low < high < math.inf:
        raise ValueError(f"low is {low} and high {high}, it must be 0 < low < high")
    if keeps(low) < goal:
        return 0.0
    if keeps(high) >= goal:
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) >= goal else (low, middle)
    return low
