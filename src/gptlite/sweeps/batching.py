"""Serving: throughput and latency by the largest batch, and who sits on which seat under two policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from gptlite.arithmetic import ModelShape, kv_bytes, n_params
from gptlite.cache.dense import StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, random_model, sweep
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.serving.arrivals import Arrival, StepClock, mixed_requests, poisson_times
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import StepRecord, overhead, summary, utilisation
from gptlite.serving.sequence import Key, Request
from gptlite.serving.static import StaticScheduler

PROMPTS, ANSWERS = (8, 64), (8, 96)  # shortest and longest, in tokens; they fit the shipped model's context
BLOCK = 16


def workload(model: str, n: int, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[GPTlite, list[Request]]:
    """A model and requests of mixed lengths for it.

    Args:
        model: "gptlite" is the trained one; another preset has random weights.
        n: requests. seed: of their lengths.
    """
    if model == "gptlite":
        served = load(model, device, dtype)[0]
    else:
        served = random_model(preset(model, context_length=sum(map(max, (PROMPTS, ANSWERS)))), device, dtype)
    V = served.token_embedding.num_embeddings
    text = torch.randint(V, (256,), generator=torch.Generator().manual_seed(seed))  # no time depends on it
    return served, mixed_requests(text, n, PROMPTS, ANSWERS, SamplingParams(0.8), seed)


def pool(model: GPTlite, n_sequences: int, n_tokens: int = max(PROMPTS) + max(ANSWERS)) -> PagedCache:
    """Blocks for so many sequences of the longest request, so that nobody is preempted."""
    return PagedCache(model, n_sequences * -(-n_tokens // BLOCK), BLOCK)


@sweep(
    "batching",
    "throughput, TTFT and TPOT of mixed requests, by the largest batch and the rate of arrivals",
    model="gptlite",
    requests=48,
    rates=[8.0, 24.0, 1000.0],
    batches=[1, 2, 4, 8, 16, 32],
)
def _batching(recording: Recording) -> Iterator[Step]:
    params = recording.params
    dtype = getattr(torch, params["dtype"])
    made: list[Any] = []
    recording.data["served"] = []
    shape = ModelShape.of(preset(params["model"]))
    weights = n_params(shape) * dtype.itemsize

    def measure(rate: float, batch: int) -> Point:
        if not made:
            made.extend(workload(params["model"], params["requests"], params["device"], dtype))
            _serve(made[0], made[1][:2], 1000.0, 2)  # what happens at the first call only
        sequences, engine = _serve(made[0], made[1], rate, batch)
        assert engine.trace is not None
        at = {"rate": rate, "batch": batch}
        recording.data["served"].append(
            at
            | {name: round(value, 6) for name, value in summary(sequences).items()}
            | {"steps": engine.n_steps, "utilisation": utilisation(engine.trace, batch)}
            | {"overhead": overhead(engine.trace)}
        )
        return Point(at, [(s.times[-1] - s.times[0]) / (len(s.times) - 1) for s in sequences])

    for rate in params["rates"]:
        for batch in params["batches"]:
            needed = weights + batch * kv_bytes(shape, max(PROMPTS) + max(ANSWERS), dtype.itemsize)
            yield {"rate": rate, "batch": batch}, needed, partial(measure, rate, batch)


def _serve(model: GPTlite, requests: list[Request], rate: float, batch: int) -> tuple[list[Any], Engine]:
    engine = Engine(model, pool(model, batch), batch, trace=True)
    times = poisson_times(rate, len(requests), seed=1)
    return engine.serve([Arrival(t, r) for t, r in zip(times, requests, strict=True)]), engine


# -- who sits where -----------------------------------------------------------------------------------------------

SEATS = 4
POLICIES = ("static batching", "continuous batching")
LOADS = {"all at once": float("inf"), "one every 6 steps": 1 / 6, "one every 25 steps": 1 / 25}


def seat_trace(model: GPTlite, text: Tensor, policy: str, load: str, n: int = 16, seats: int = SEATS) -> dict[str, Any]:
    """Serves requests of mixed lengths on a few seats, and tells who sat on which in each step.

    A step takes a unit of time, so that the trace is the same on every machine.

    Args:
        text: tokens that prompts are cut from. policy: one of POLICIES. load: one of LOADS. n: requests.
    Returns: "spans" [seat, request, first step, step after the last, "prefill", "decode" or "idle"]; and of each
        step "waiting" and "given", the sequences in the queue and the tokens given out so far, and "finished".
    """
    cache = StaticCache(model, seats, model.context_length)
    scheduler = StaticScheduler(cache, seats) if policy == POLICIES[0] else None
    engine = Engine(model, cache, seats, scheduler=scheduler, clock=StepClock(), trace=True)
    requests = mixed_requests(text, n, (4, 24), (2, 40), GREEDY, seed=3)
    times = [ceil(t) for t in poisson_times(LOADS[load], n, seed=5)]
    arrivals = [Arrival(t, r) for t, r in zip(times, requests, strict=True)]
    sequences = engine.serve(arrivals)
    assert engine.trace is not None
    ends = [sequence.times[-1] for sequence in sequences]
    spans = seat_spans(engine.trace, seats)
    last = max(span[3] for span in spans)
    given, waiting = [0] * last, [0] * last
    for step in engine.trace:
        given[round(step.start)] = len(step.sampled)
        waiting[round(step.start)] = step.n_waiting
    for i in range(1, last):
        given[i] += given[i - 1]
    finished = [sum(end <= i + 1 for end in ends) for i in range(last)]
    return {
        "policy": policy, "load": load, "seats": seats, "requests": n, "steps": engine.n_steps, "spans": spans,
        "given": given, "waiting": waiting, "finished": finished,
    }  # fmt: skip


def seat_spans(trace: Sequence[StepRecord], seats: int) -> list[list[Any]]:
    """Gives each sequence the lowest free seat when it first runs, until it is in the steps no more.

    Returns: [seat, request, first step, step after the last, kind], neighbouring steps of one kind joined.
    """
    held: dict[Key, int] = {}
    spans: list[list[Any]] = []
    open_spans: dict[int, list[Any]] = {}
    for record in trace:
        at = round(record.start)
        here = {key for key, _, _ in record.rows}
        held = {key: seat for key, seat in held.items() if key in here}
        for key, _, real in record.rows:
            if key not in held:
                held[key] = min(set(range(seats)) - set(held.values()))
            seat = held[key]
            kind = "idle" if not real else "prefill" if real > 1 or key not in record.sampled else "decode"
            span = open_spans.get(seat)
            if span and span[1] == key[0] and span[3] == at and span[4] == kind:
                span[3] = at + 1
            else:
                open_spans[seat] = [seat, key[0], at, at + 1, kind]
                spans.append(open_spans[seat])
    return spans


@sweep(
    "seat-trace",
    "who sits on which seat in each step, under static and continuous batching; no times",
    model="gptlite",
    prompt="To be, or not to be, that is the question:\n",
)
def _batching_trace(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    text = tokenizer.encode(params["prompt"])
    recording.data["traces"] = [seat_trace(model, text, policy, load) for load in LOADS for policy in POLICIES]
    return iter(())
