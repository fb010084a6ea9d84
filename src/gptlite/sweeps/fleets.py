"""What simulations say: goodput of whole, chunked and separate prefills, and the hit rate of a fleet by its router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gptlite.arithmetic import kv_bytes_per_token, shipped_models
from gptlite.hardware import gpu
from gptlite.record import Recording, Step, sweep
from gptlite.serving.jobs import Job, Outcome, poisson_jobs
from gptlite.serving.routing import CacheAware, LeastLoaded, RoundRobin, Router
from gptlite.serving.simulator import Engine, simulate, simulate_disaggregated
from gptlite.serving.step_time import ArithmeticTime, StepTime

# -- goodput ------------------------------------------------------------------------------------------------------

# of prompt and answer: median, spread of the logarithm, least and most tokens
LENGTHS = {
    "chat": ((512, 0.6, 32, 4096), (200, 0.5, 8, 800)),
    "documents": ((6000, 0.4, 1000, 16_000), (150, 0.4, 8, 400)),
}
KEPT = 120  # requests of a run that are recorded: the middle ones, when the machines are neither empty nor drained


def drawn(workload: str, rate: float, n_jobs: int, seed: int) -> list[Job]:
    """Jobs of a workload of `LENGTHS`, whose prompts and answers have log-normal lengths."""

    def length(middle: int, spread: float, least: int, most: int) -> Callable[[np.random.Generator], int]:
        return lambda rng: int(np.clip(middle * np.exp(spread * rng.standard_normal()), least, most))

    prompt, answer = LENGTHS[workload]
    return poisson_jobs(rate, n_jobs, length(*prompt), length(*answer), seed)


@sweep(
    "goodput",
    "simulated: TTFT and TPOT of requests on whole, chunked and separate prefills, by arrival rate; no times",
    model="Llama 3.1 8B",
    card="H100 SXM",
    machines=4,
    reached=0.6,
    max_batch=64,
    budget=512,
    link_gb_s=50.0,
    chat=[16.0, 32.0, 48.0, 64.0, 80.0, 96.0],
    documents=[2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
    jobs=400,
    seed=1,
)
def _goodput(recording: Recording) -> Iterator[Step]:
    params = recording.params
    recording.data["runs"] = [
        {"workload": workload, "rate": rate, "system": name, **_milliseconds(outcomes)}
        for workload in LENGTHS
        for rate in params[workload]
        for name, outcomes in systems(params, workload, rate).items()
    ]
    return iter(())


def systems(params: dict[str, Any], workload: str, rate: float) -> dict[str, list[Outcome]]:
    """The middle requests of a run, by how the same machines are used; see the sweep `goodput` for the parameters."""
    shape, n = shipped_models()[params["model"]], params["machines"]
    time = ArithmeticTime(shape, gpu(params["card"]), params["reached"])
    jobs = drawn(workload, rate, params["jobs"], params["seed"])
    whole = Engine(time, params["max_batch"])
    chunked = Engine(time, params["max_batch"], params["budget"])
    # a decode machine takes what several would have run; a prompt does not gain from sharing its pass
    prefill, decode = Engine(time, 1), Engine(time, params["max_batch"] * n)
    link = {"bytes_per_token": kv_bytes_per_token(shape), "bandwidth": params["link_gb_s"] * 1e9}
    traces = {"whole prompts": simulate(jobs, whole, n), "chunked": simulate(jobs, chunked, n)}
    for n_prefill in range(1, n):
        name = f"apart, {n_prefill} + {n - n_prefill}"
        traces[name] = simulate_disaggregated(jobs, prefill, decode, n_prefill, n - n_prefill, **link)
    middle = slice((len(jobs) - KEPT) // 2, (len(jobs) + KEPT) // 2)
    return {name: trace.outcomes[middle] for name, trace in traces.items()}


def _milliseconds(outcomes: list[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [round(1e3 * outcome.ttft) for outcome in outcomes],
        "tpot": [round(1e3 * outcome.tpot, 1) for outcome in outcomes],
        "gap": [round(1e3 * outcome.longest_gap) for outcome in outcomes],
    }


# -- a fleet ------------------------------------------------------------------------------------------------------

BLOCK = 16  # tokens
SHARED, OWN, ANSWER = 24, (16, 64), (4, 16)  # blocks of a shared prefix; tokens of the rest and of the answer
KEPT_BLOCKS = 100  # that a replica keeps: the prefixes of 4 groups and a little
POPULARITY = {"equally popular": 0.0, "one far ahead": 1.5}  # the share of group i goes with i ** -exponent


def policies(n_replicas: int) -> dict[str, Router]:
    """The routers that the explorer compares, each new."""
    return {
        "taking turns": RoundRobin(),
        "least loaded": LeastLoaded(),
        "cache-aware": CacheAware(n_replicas, 0.3, gap=4, ratio=1.5, n_blocks=4 * KEPT_BLOCKS),
        "cache alone": CacheAware(n_replicas, 0.3, gap=10**9, n_blocks=4 * KEPT_BLOCKS),
    }


def shared_jobs(rate: float, n_jobs: int, n_groups: int, exponent: float, seed: int = 0) -> list[Job]:
    """Jobs of groups whose prompts begin with the group's own prefix and end on their own."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, n_groups + 1) ** -exponent
    group = rng.choice(n_groups, n_jobs, p=weights / weights.sum())
    times = rng.exponential(1 / rate, n_jobs).cumsum()
    own, answer = rng.integers(*OWN, n_jobs), rng.integers(*ANSWER, n_jobs)
    return [
        Job(
            float(times[i]),
            SHARED * BLOCK + int(own[i]),
            int(answer[i]),
            tuple((int(group[i]), block) for block in range(SHARED)),
        )
        for i in range(n_jobs)
    ]


def fleet(time: StepTime, jobs: list[Job], n_replicas: int, policy: str) -> dict[str, float]:
    """One simulation of a fleet.

    Returns: hit_rate in [0, 1]; ttft, the mean in seconds; busiest, the largest share of the jobs that a replica took.
    """
    engine = Engine(time, 8, 256, n_blocks=KEPT_BLOCKS, block_size=BLOCK)
    trace = simulate(jobs, engine, n_replicas, policies(n_replicas)[policy])
    ttft = [outcome.ttft for outcome in trace.outcomes]
    taken = Counter(outcome.replica for outcome in trace.outcomes)
    return {
        "hit_rate": trace.hit_rate,
        "ttft": sum(ttft) / len(ttft),
        "busiest": max(taken.values()) / len(jobs),
    }


def alone(time: StepTime) -> float:
    """Seconds that a replica takes for a typical job of `shared_jobs` when nothing else runs and nothing is cached."""
    n_prompt, n_new = SHARED * BLOCK + sum(OWN) // 2, sum(ANSWER) // 2
    return simulate([Job(0.0, n_prompt, n_new)], Engine(time, 8, 256)).finished
