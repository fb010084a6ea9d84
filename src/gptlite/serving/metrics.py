"""What a server is judged by: TTFT, TPOT, throughput, and how much of its batch it used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gptlite.serving.sequence import Key
from gptlite.serving.sequence import Sequence as Served


@dataclass
class StepRecord:
    """One step of an engine, as its trace keeps it.

    Args:
        start, end: in seconds of the engine's clock.
        rows: of each row the sequence, its new tokens (holes of a padded batch too) and those of them that were real.
        sampled: the sequences that got a token.
        n_waiting: sequences in the queue. preempted: those that gave their memory back.
        parts: seconds of "schedule", "prepare", "model" and "sample".
    """

    start: float
    end: float = 0.0
    rows: list[tuple[Key, int, int]] = field(default_factory=list)
    sampled: list[Key] = field(default_factory=list)
    n_waiting: int = 0
    preempted: list[Key] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile, between neighbours by proportion; NaN of nothing.

    Args:
        q: between 0 and 100.
    Raises: ValueError when it is not.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q}, it must be between 0 and 100")
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ttft(sequence: Served) -> float:
    """Time to first token: from its arrival, in seconds."""
    return sequence.times[0] - sequence.arrived


def tpot(sequence: Served) -> float:
    """Time per output token after the first, in seconds; NaN of an answer of one token."""
    n = len(sequence.times)
    return (sequence.times[-1] - sequence.times[0]) / (n - 1) if n > 1 else float("nan")


def gaps(sequence: Served) -> list[float]:
    """The time between each token and the next, in seconds: a stall shows here and not in the mean."""
    return [later - earlier for earlier, later in zip(sequence.times, sequence.times[1:], strict=False)]


def throughput(sequences: Iterable[Served]) -> float:
    """Generated tokens per second, from the first arrival to the last token; 0 of nothing."""
    served = [sequence for sequence in sequences if sequence.times]
    if not served:
        return 0.0
    span = max(s.times[-1] for s in served) - min(s.arrived for s in served)
    return sum(len(s.times) for s in served) / span if span else float("inf")


def utilisation(steps: Sequence[StepRecord], max_batch: int) -> float:
    """Tokens that were given out over those that a full batch would have got: the share of seats that paid, 0 to 1.

    A seat that reads a prompt in pieces, waits for a padded batch to end, or is empty, gives out nothing.
    """
    return sum(len(step.sampled) for step in steps) / (len(steps) * max_batch) if steps else 0.0


def overhead(steps: Sequence[StepRecord]) -> float:
    """The share of the steps' time that was not the model's, 0 to 1."""
    total = sum(sum(step.parts.values()) for step in steps)
    return 1 - sum(step.parts["model"] for step in steps) / total if total else 0.0


def summary(sequences: Iterable[Served], percentiles: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """Percentiles of TTFT, TPOT and latency in seconds, and the throughput in tokens per second."""
    served = [sequence for sequence in sequences if sequence.times]
    rows = {}
    paced = [s for s in served if len(s.times) > 1]
    for q in percentiles:
        rows[f"ttft_p{q:g}"] = percentile(map(ttft, served), q)
        rows[f"tpot_p{q:g}"] = percentile(map(tpot, paced), q)
        rows[f"latency_p{q:g}"] = percentile((s.times[-1] - s.arrived for s in served), q)
    rows["throughput"] = throughput(served)
    return rows
