"""When requests come: Poisson arrivals and recorded traces, and the clock that an engine lives by."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from gptlite.sampling import SamplingParams
from gptlite.serving.sequence import Request


class WallClock:
    """The machine's clock, in seconds from its making."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def wait_until(self, when: float) -> None:
        """Sleeps until then, where it is not past."""
        time.sleep(max(0.0, when - self.now()))

    def tick(self, n_tokens: Sequence[int]) -> None:
        """Called in each step once the model has run; real time passes by itself."""


class StepClock(WallClock):
    """A clock that only steps move, so that a test or an example gives the same times everywhere.

    Args:
        cost: seconds of a step, from the number of new tokens of each of its rows; or the same for every step.
    """

    def __init__(self, cost: float | Callable[[Sequence[int]], float] = 1.0) -> None:
        self.cost, self.time = cost, 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, when: float) -> None:
        self.time = max(self.time, when)

    def tick(self, n_tokens: Sequence[int]) -> None:
        self.time += self.cost if isinstance(self.cost, int | float) else self.cost(n_tokens)


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds. Raises: ValueError when that is no finite number."""

    time: float
    request: Request

    def __post_init__(self) -> None:
        if not isfinite(self.time):
            raise ValueError(f"time is {self.time}, a request must come at a finite number of seconds")


def _check_number(n: int) -> None:
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"n is {n}, it must be a whole number of at least 0")


def poisson_times(rate: float, n: int, seed: int = 0) -> list[float]:
    """Times of n arrivals that know nothing of each other: the gaps between them are exponential.

    Args:
        rate: arrivals per second on average; infinite means all at once.
        n: how many. seed: of the gaps.
    Returns: seconds, rising. Raises: ValueError when the rate is not positive, or n is below 0.
    """
    _check_number(n)
    if not rate > 0:
        raise ValueError(f"rate is {rate}, it must be above 0 requests per second")
    if rate == float("inf"):
        return [0.0] * n
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (-torch.log1p(-u) / rate).cumsum(0).tolist()


def poisson(requests: Iterable[Request], rate: float, seed: int = 0) -> list[Arrival]:
    """The requests at Poisson times; see `poisson_times`."""
    requests = list(requests)
    return [Arrival(t, request) for t, request in zip(poisson_times(rate, len(requests), seed), requests, strict=True)]


def mixed_lengths(n: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Lengths of which many are short and few long: their logarithms are uniform, so half lie below sqrt(low * high).

    Args:
        n: how many. low, high: the shortest and the longest, in tokens. seed: of the lengths.
    Raises: ValueError when low is below 1 or above high, or n is below 0.
    """
    _check_number(n)
    if not 1 <= low <= high:
        raise ValueError(f"lengths from {low} to {high}: they must begin at 1 or more, and rise")
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (low * (high + 1 - 1e-9) ** u / low**u).long().tolist()


def mixed_requests(
    text: Tensor,
    n: int = 48,
    prompts: tuple[int, int] = (8, 64),
    answers: tuple[int, int] = (8, 128),
    params: SamplingParams | None = None,
    seed: int = 0,
) -> list[Request]:
    """Requests of mixed lengths, whose prompts are cut from a text; the workload of benchmarks, recordings and labs.

    Args:
        text: tokens to cut prompts from [n_text], at least as many as the longest prompt.
        n: how many. prompts, answers: shortest and longest of each, in tokens.
        params: of their sampling; None means plain sampling. seed: of lengths and cuts; request i draws with seed + i.
    Raises: ValueError when the text is shorter than the longest prompt.
    """
    if len(text) < prompts[1]:
        raise ValueError(f"the text has {len(text)} tokens, the longest prompt {prompts[1]}")
    n_prompts, n_answers = mixed_lengths(n, *prompts, seed), mixed_lengths(n, *answers, seed + 1)
    cuts = torch.rand(n, generator=torch.Generator().manual_seed(seed + 2), dtype=torch.float64).tolist()
    requests = []
    for i, (n_prompt, n_new, cut) in enumerate(zip(n_prompts, n_answers, cuts, strict=True)):
        begin = int(cut * (len(text) - n_prompt + 1))
        prompt = text[begin : begin + n_prompt].clone()
        requests.append(Request(prompt, n_new, params or SamplingParams(), seed + i))
    return requests


@dataclass(frozen=True)
class TraceRow:
    """One line of a recorded trace: when a request came and how long its prompt and its answer were, in tokens."""

    time: float
    n_prompt: int
    n_new: int


def load_trace(path: str | Path) -> list[TraceRow]:
    """Reads a trace: JSON lines with `time` in seconds, `n_prompt` and `n_new`, in the order of time.

    Raises: ValueError that names the line and what is wrong with it.
    """
    rows: list[TraceRow] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = TraceRow(**json.loads(line))
            sound = row.time >= (rows[-1].time if rows else 0) and row.n_prompt >= 1 and row.n_new >= 1
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of {Path(path).name} is no arrival: {error}") from None
        if not sound:
            raise ValueError(f"line {number} of {Path(path).name} goes back in time, or has no tokens: {row}")
        rows.append(row)
    return rows


def save_trace(rows: Iterable[TraceRow], path: str | Path) -> None:
    """Writes a trace as `load_trace` reads it."""
    lines = [json.dumps({"time": row.time, "n_prompt": row.n_prompt, "n_new": row.n_new}) for row in rows]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
