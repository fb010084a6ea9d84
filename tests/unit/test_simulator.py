"""The simulation against the real engine, against queueing theory, and against cases worked out by hand."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.arithmetic import ModelShape, decode_costs, prefill_costs, shipped_models, step_bound, total
from gptlite.cache.dense import DynamicCache
from gptlite.config import GPTConfig, preset
from gptlite.hardware import gpu
from gptlite.model import GPTlite
from gptlite.serving.arrivals import Arrival, StepClock
from gptlite.serving.engine import Engine as RealEngine
from gptlite.serving.jobs import Job, Outcome, attainment, goodput, highest_rate, poisson_jobs
from gptlite.serving.routing import CacheAware, RoundRobin
from gptlite.serving.sequence import Request
from gptlite.serving.simulator import Engine, simulate, simulate_disaggregated
from gptlite.serving.step_time import ArithmeticTime, FittedTime, counts


def second(rows):
    """Every step takes a second."""
    return 1.0


def per_token(rows):
    """A fixed part and a part for each new token."""
    return 2.0 + 0.125 * sum(n for _, n in rows)


# -- the real engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPTlite(GPTConfig(20, 64, 1, d_model=12, n_heads=2, d_head=4, n_kv_heads=1)).eval()


job = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(st.lists(job, min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([None, 5, 8, 16]))
def test_every_token_of_the_real_engine_comes_when_the_simulation_says(model, jobs, max_batch, budget):
    jobs = [Job(float(time), n_prompt, n_new) for time, n_prompt, n_new in sorted(jobs)]
    real = RealEngine(
        model,
        DynamicCache(model),
        max_batch,
        budget,
        clock=StepClock(lambda n_tokens: per_token([(0, n) for n in n_tokens])),
        trace=True,
    )
    served = real.serve([Arrival(one.arrival, Request([1] * one.n_prompt, one.n_new)) for one in jobs])
    trace = simulate(jobs, Engine(per_token, max_batch, budget))
    assert [outcome.tokens for outcome in trace.outcomes] == [sequence.times for sequence in served]
    # and step by step the same number of rows, tokens and waiting requests
    assert len(trace.steps) == real.n_steps == len(real.trace)
    for mine, theirs in zip(trace.steps, real.trace, strict=True):
        assert mine.n_decode + mine.n_prompt == sum(n for _, n, _ in theirs.rows)
        assert mine.waiting == theirs.n_waiting


# -- conservation -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(job, min_size=1, max_size=30), st.integers(1, 4), st.sampled_from([None, 8]), st.booleans())
def test_nothing_is_lost_and_littles_law_holds(jobs, n, budget, apart):
    jobs = [Job(float(time), n_prompt, n_new) for time, n_prompt, n_new in jobs]
    engine = Engine(per_token, 4, budget)
    if apart:
        trace = simulate_disaggregated(jobs, engine, engine, n, n, bytes_per_token=4, bandwidth=64)
        assert trace.sent_bytes == sum(4 * one.n_prompt for one in jobs if one.n_new > 1)
    else:
        trace = simulate(jobs, engine, n)
    for outcome in trace.outcomes:
        assert len(outcome.tokens) == outcome.job.n_new and outcome.tokens == sorted(outcome.tokens)
        assert outcome.tokens[0] > outcome.job.arrival
    # every prompt token is read once, every new token but the first of each job is a decode
    assert sum(step.n_prompt for step in trace.steps) == sum(one.n_prompt for one in jobs)
    assert sum(step.n_decode for step in trace.steps) == sum(one.n_new - 1 for one in jobs)
    # a replica does one thing at a time
    for replica in {step.replica for step in trace.steps}:
        own = [step for step in trace.steps if step.replica == replica]
        assert all(before.end <= after.begin for before, after in pairwise(own))
    # jobs in the system at a time, summed over time, are the sum of the times that each is in it: by two counts
    moments = sorted([(o.job.arrival, 1) for o in trace.outcomes] + [(o.tokens[-1], -1) for o in trace.outcomes])
    area = inside = 0.0
    for (now, change), (then, _) in pairwise(moments):
        inside += change
        area += inside * (then - now)
    assert area == pytest.approx(sum(o.tokens[-1] - o.job.arrival for o in trace.outcomes))


# -- queueing theory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_with_equal_jobs_waits_as_the_formula_of_pollaczek_and_khinchine_says(load):
    """M/D/1: the mean wait in the queue is load / (2 (1 - load)) service times."""
    jobs = poisson_jobs(load, 40_000, lambda rng: 1, lambda rng: 1, seed=1)
    trace = simulate(jobs, Engine(second, max_batch=1))
    waits = [outcome.ttft - 1 for outcome in trace.outcomes]
    # the standard error of the mean is below 2 % here
    assert sum(waits) / len(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.06)


# -- by hand ------------------------------------------------------------------------------------------------------


def test_chunked_and_whole_by_hand():
    """A decodes when B comes with 10 prompt tokens; each token costs a second."""

    def tokens(rows):
        return float(sum(n for _, n in rows))

    jobs = [Job(0, 1, 6), Job(1.5, 10, 2)]
    whole = simulate(jobs, Engine(tokens, 2))
    # A reads 1 (t=1), decodes (2), then shares B's step of 1 + 10 (13), then both decode (15), then A alone
    assert [o.tokens for o in whole.outcomes] == [[1, 2, 13, 15, 16, 17], [13, 15]]
    chunked = simulate(jobs, Engine(tokens, 2, budget=4))
    # steps of A's token and 3 of B's: 6, 10, 14, then B's last 1 (16); then B decodes alone, and A's six are there
    assert [o.tokens for o in chunked.outcomes] == [[1, 2, 6, 10, 14, 16], [16, 17]]
    assert (whole.outcomes[0].longest_gap, chunked.outcomes[0].longest_gap) == (11, 4)
    assert (whole.outcomes[1].ttft, chunked.outcomes[1].ttft) == (11.5, 14.5)


def test_prefill_and_decode_apart_by_hand():
    """A second per step, a token of keys is 2 bytes, the link moves 4 bytes a second."""
    jobs = [Job(0, 4, 3), Job(0, 2, 2), Job(0, 6, 1)]
    trace = simulate_disaggregated(jobs, Engine(second, 1), Engine(second, 4), bytes_per_token=2, bandwidth=4)
    # prompts are read at 1, 2, 3; A's keys arrive at 1 + 2 and it decodes at 4 and 5; B's wait for the link till 3,
    # arrive at 4 and B shares A's second step
    assert [o.tokens for o in trace.outcomes] == [[1, 4, 5], [2, 5], [3]]
    assert trace.sent_bytes == 2 * (4 + 2)
    assert [step.replica for step in trace.steps] == [0, 0, 0, 1, 1]


def test_goodput_by_hand():
    outcomes = [Outcome(Job(0, 1, 3), [a, a + 1, a + 2 * b]) for a, b in ((1, 1), (2, 1), (3, 4), (4, 1))]
    assert [o.ttft for o in outcomes] == [1, 2, 3, 4] and [o.tpot for o in outcomes] == [1, 1, 4, 1]
    assert [o.longest_gap for o in outcomes] == [1, 1, 7, 1]
    assert attainment(outcomes, 3, 2) == 0.5  # the third is too slow per token, the fourth too late
    assert attainment(outcomes, 4, 4) == 1 and attainment(outcomes, 0.5, 9) == 0
    assert goodput(outcomes, 8.0, 3, 2) == 4
    assert Outcome(Job(0, 1, 1), [2.0]).tpot == 0
    with pytest.raises(ValueError, match="both must be positive"):
        attainment(outcomes, 0, 1)


def test_the_highest_rate_is_found():
    assert highest_rate(lambda rate: 1 / rate, 0.25, 0.5, 64) == pytest.approx(4, rel=0.01)
    assert highest_rate(lambda rate: 0.0) == 0
    assert highest_rate(lambda rate: 1.0) == 100


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Job(0, 0, 1), "at least 1 prompt token"),
        (lambda: Job(-1, 1, 1), "arrives at 0 or later"),
        (lambda: Job(float("nan"), 1, 1), "arrives at 0 or later"),
        (lambda: Job(float("inf"), 1, 1), "arrives at 0 or later"),
        (lambda: Engine(second, 0), "max_batch is 0"),
        (lambda: Engine(second, 8, 7), "budget is 7, it must be at least max_batch, 8"),
        (lambda: simulate([], Engine(second)), "no jobs"),
        (lambda: simulate([Job(0, 1, 1)], Engine(second), 0), "n_replicas is 0"),
        (lambda: simulate([Job(0, 1, 1)], Engine(lambda rows: float("nan"))), "a step takes nan s"),
        (lambda: simulate([Job(0, 1, 1)], Engine(lambda rows: 0.0)), "a step takes 0.0 s"),
        (lambda: simulate_disaggregated([Job(0, 1, 1)], Engine(second), Engine(second), 0), "n_prefill is 0"),
        (lambda: simulate_disaggregated([Job(0, 1, 1)], Engine(second), Engine(second), 1, 0), "n_decode 0"),
        (lambda: simulate_disaggregated([Job(0, 1, 2)], Engine(second), Engine(second), bandwidth=0), "bandwidth 0"),
        (
            lambda: simulate_disaggregated([Job(0, 1, 2)], Engine(second), Engine(second), bytes_per_token=-1),
            "bytes_per_token -1",
        ),
        (lambda: poisson_jobs(0, 5, lambda rng: 1, lambda rng: 1), "rate is 0"),
        (lambda: poisson_jobs(float("nan"), 5, lambda rng: 1, lambda rng: 1), "rate is nan"),
        (lambda: attainment([], 1, 1), "no requests to count"),
        (lambda: attainment([Outcome(Job(0, 1, 1), [1.0])], float("nan"), 1), "both must be positive"),
        (lambda: highest_rate(lambda rate: 1.0, low=0), "low is 0"),
        (lambda: highest_rate(lambda rate: 1.0, low=2, high=1), "high 1"),
        (lambda: counts([]), "one row is needed"),
        (lambda: counts([(3, 0)]), "at least 1 token"),
        (lambda: FittedTime.fit([([(0, 1)], 1.0)] * 4), "4 steps to fit"),
        (lambda: FittedTime.fit([([(0, 1)], 0.0)] * 6), "a time above 0"),
        (lambda: FittedTime.fit([([(0, 1)], float("nan"))] * 6), "a time above 0"),
        (lambda: ArithmeticTime(shipped_models()["DeepSeek-V2"], gpu("L4")), "no sum over the rows"),
        (lambda: ArithmeticTime(shipped_models()["GPT-2"], gpu("L4"), 1.5), "reached is 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert said in str(error.value)


def test_without_simpy_the_extra_is_named():
    code = (
        "import sys; sys.modules['simpy'] = None\n"
        "from gptlite.serving.simulator import *\n"
        "try:\n    simulate([Job(0, 1, 1)], Engine(lambda rows: 1.0))\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'gptlite.serving.simulator needs simpy: pip install "gptlite[lab]"'


# -- a fleet ------------------------------------------------------------------------------------------------------


def test_hits_in_a_fleet_by_hand():
    """Blocks of 4; two groups of prompts, A with 2 shared blocks and B with 1; each has a block of its own."""
    shared = {"A": ("A0", "A1"), "B": ("B0",)}
    jobs = [Job(10.0 * i, 12, 1, (*shared[group], f"own {i}")) for i, group in enumerate("ABABAB")]
    engine = Engine(second, 4, n_blocks=None, block_size=4)
    turns = simulate(jobs, engine, 2, RoundRobin())  # A's go to 0, B's to 1, by luck
    assert [o.n_cached for o in turns.outcomes] == [0, 0, 8, 4, 8, 4]
    assert [o.replica for o in turns.outcomes] == [0, 1, 0, 1, 0, 1]
    assert turns.hit_rate == 24 / 72
    three = simulate(jobs, engine, 3, RoundRobin())  # 0: A B, 1: B A, 2: A B; nothing is seen again
    assert three.hit_rate == 0
    aware = simulate(jobs, engine, 3, CacheAware(3))
    assert aware.hit_rate == 24 / 72 and [o.replica for o in aware.outcomes] == [0, 1, 0, 1, 0, 1]


def test_a_prompt_that_is_cached_whole_still_reads_its_last_token_and_one_unread_shares_nothing():
    chain = ("x", "y")
    jobs = [Job(0, 8, 1, chain), Job(0, 8, 1, chain), Job(5, 8, 1, chain)]
    trace = simulate(jobs, Engine(second, 4, n_blocks=None, block_size=4))
    assert [o.n_cached for o in trace.outcomes] == [0, 0, 7]  # the first two read at the same time


def test_order_by_prefix_turns_misses_into_hits_when_room_is_short():
    """Room for the 2 blocks of one group: served in turn A B A B, each drives the other out."""
    jobs = [Job(0, 8, 1, ((group, 0), (group, 1))) for group in "ABABAB"]
    fifo = simulate(jobs, Engine(second, 1, n_blocks=2, block_size=4))
    assert fifo.hit_rate == 0
    by_prefix = simulate(jobs, Engine(second, 1, n_blocks=2, block_size=4, patience=10))
    assert by_prefix.hit_rate == 4 * 7 / 48  # all but the first of each group
    assert [o.tokens[0] for o in by_prefix.outcomes] == [1, 4, 2, 5, 3, 6]
    # with a patience of 1 the second A overtakes the first B, which then goes; the last B overtakes the last A
    impatient = simulate(jobs, Engine(second, 1, n_blocks=2, block_size=4, patience=1))
    assert [o.tokens[0] for o in impatient.outcomes] == [1, 3, 2, 4, 6, 5]


# -- the time of a step -------------------------------------------------------------------------------------------


def least(costs, card):
    """Linear layers and attention apart, from the parts of the roofline chapter's costs."""
    attention = costs["scores"] + costs["mix"]
    linear = costs["projections"] + costs["feed-forward"] + costs["head"]
    return sum(step_bound(cost, card.peak_flops, card.bandwidth)[0] for cost in (linear, attention))


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "GPT-2"])
def test_the_arithmetic_of_a_step_is_that_of_the_roofline_chapter(name):
    shape, card = shipped_models()[name], gpu("H100 SXM")
    time = ArithmeticTime(shape, card)
    for batch, context in ((1, 1), (8, 300), (64, 2000)):
        costs, rows = decode_costs(shape, batch, context), [(context - 1, 1)] * batch
        assert sum(cost.flops for cost in time.costs(rows)) == pytest.approx(total(costs).flops, rel=1e-12)
        assert time(rows) == pytest.approx(least(costs, card), rel=1e-12)
    for n in (1, 100, 4096):
        costs = prefill_costs(shape, 1, n)
        assert sum(cost.bytes for cost in time.costs([(0, n)])) == pytest.approx(total(costs).bytes, rel=1e-12)
        assert time([(0, n)]) == pytest.approx(least(costs, card), rel=1e-12)
    assert ArithmeticTime(shape, card, 0.5)([(0, 9)]) == pytest.approx(2 * time([(0, 9)]))


def test_a_mixed_step_reads_the_weights_once():
    time = ArithmeticTime(ModelShape.of(preset("1b")), gpu("L4"))
    one, two, both = (time.costs(rows) for rows in ([(100, 1)], [(0, 50)], [(100, 1), (0, 50)]))
    assert both[0].bytes == one[0].bytes == two[0].bytes
    assert both[0].flops == pytest.approx(one[0].flops + two[0].flops)
    assert both[1].bytes == pytest.approx(one[1].bytes + two[1].bytes)


def test_chunks_do_the_flops_of_the_whole_and_read_more_bytes():
    time = ArithmeticTime(ModelShape.of(preset("1b")), gpu("L4"))
    whole, parts = time.costs([(0, 96)]), [time.costs([(past, 32)]) for past in (0, 32, 64)]
    # the head runs once more for each further chunk
    assert sum(part[0].flops for part in parts) - 2 * time.row == pytest.approx(whole[0].flops)
    assert sum(part[1].flops for part in parts) == pytest.approx(whole[1].flops)
    assert sum(part[0].bytes for part in parts) == 3 * whole[0].bytes
    assert sum(part[1].bytes for part in parts) == pytest.approx(whole[1].bytes * (32 + 64 + 96) / 96)


def test_a_fit_finds_what_the_times_were_made_of():
    steps = [[(past, new)] * rows for past in (0, 50, 200) for new in (1, 7, 64) for rows in (1, 3, 8)]
    made = FittedTime((2e-3, 1e-4, 5e-4, 1e-6, 1e-8))
    fitted = FittedTime.fit([(rows, made(rows)) for rows in steps])
    assert fitted.parts == pytest.approx(made.parts, rel=1e-6) and fitted.error < 1e-9
    assert fitted([(10, 5), (3, 1)]) == pytest.approx(2e-3 + 6e-4 + 1e-3 + 19e-6 + 69e-8)
    # a part that would be negative is left out
    odd = FittedTime.fit([(rows, 1.0 - 1e-6 * sum(n for _, n in rows)) for rows in steps])
    assert min(odd.parts) >= 0 and math.isfinite(odd.error)
