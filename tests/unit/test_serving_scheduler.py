"""What each step runs, worked out by hand: the steps of both policies, budgets, preemption, stop strings, clients."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch
from serving_help import LONGEST, VOCAB, Pairs, SmallPool, tiny

import gptlite
from gptlite.cache.dense import RingCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.serving.arrivals import Arrival, StepClock
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import utilisation
from gptlite.serving.scheduler import Scheduler
from gptlite.serving.sequence import Request, Sequence
from gptlite.serving.static import StaticScheduler


def request(n_prompt: int, n_new: int, first: int = 0, **options) -> Request:
    return Request([(first + i) % VOCAB for i in range(n_prompt)], n_new, **options)


def engine_of(policy: str = "continuous", max_batch: int = 2, **options) -> Engine:
    cache = StaticCache(tiny(), 8, LONGEST, bucket=4)
    scheduler = StaticScheduler(cache, max_batch) if policy == "static" else None
    return Engine(tiny(), cache, max_batch, scheduler=scheduler, clock=StepClock(), trace=True, **options)


def steps_of(policy: str, max_batch: int, requests: list[tuple[float, int, int]]) -> Engine:
    """Serves requests (when they come in steps, tokens of the prompt, new tokens); a step takes a second."""
    engine = engine_of(policy, max_batch)
    sequences = engine.serve([Arrival(t, request(n, m)) for t, n, m in requests])
    assert all(len(s.output) == m for s, (_, _, m) in zip(sequences, requests, strict=True))
    return engine


# Each case is worked out by hand. A step gives every running sequence one token, its first with the prompt's own step.
BY_HAND = {
    # one after the other on one seat: 3 + 4, whatever the policy
    "one seat": (1, [(0, 2, 3), (0, 5, 4)], 7, 7),
    # equal lengths: both run in two groups of 3 steps
    "equal lengths": (2, [(0, 2, 3), (0, 4, 3), (0, 3, 3), (0, 2, 3)], 6, 6),
    # seats 1 and 2 take answers of 6 and 1; then 2, 2 and 1 share the second seat: 1 + 2 + 2 + 1 = 6.
    # static: groups (6, 1), (2, 2), (1): 6 + 2 + 1 = 9
    "one long": (2, [(0, 2, 6), (0, 2, 1), (0, 3, 2), (0, 2, 2), (0, 2, 1)], 6, 9),
    # three seats: 5, 1, 3 | the 4 takes the seat of the 1 after step 1 and ends at 5; the 2 that of the 3: 3 + 2 = 5
    # static: (5, 1, 3), (4, 2): 5 + 4
    "three seats": (3, [(0, 1, 5), (0, 2, 1), (0, 3, 3), (0, 2, 4), (0, 2, 2)], 5, 9),
    # the second comes at second 1, while the first runs: it sits beside it at once and ends at step 3 of 4;
    # static: it waits for the first: 4 + 2
    "comes later": (2, [(0, 2, 4), (1, 2, 2)], 4, 6),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_steps_worked_out_by_hand(case: str) -> None:
    max_batch, requests, continuous, static = BY_HAND[case]
    assert steps_of("continuous", max_batch, requests).n_steps == continuous
    assert steps_of("static", max_batch, requests).n_steps == static


def test_utilisation_by_hand() -> None:
    """'One long' gives out 12 tokens: in 6 steps of 2 seats all of them, in 9 steps 12 of 18."""
    max_batch, requests, *_ = BY_HAND["one long"]
    assert utilisation(steps_of("continuous", max_batch, requests).trace, max_batch) == 1
    assert utilisation(steps_of("static", max_batch, requests).trace, max_batch) == 12 / 18


def lockstep(lengths: list[int], seats: int) -> int:
    """Steps of static batching: each group takes its longest."""
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def on_seats(lengths: list[int], seats: int) -> int:
    """Steps of continuous batching of requests that all wait: each takes the seat that is free first."""
    free = [0] * seats
    for length in lengths:
        free[free.index(min(free))] += length
    return max(free)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_lengths_need_fewer_steps_by_the_ratio_of_the_seats(seed: int) -> None:
    """Answers of mixed lengths: most are short, some long."""
    generator = torch.Generator().manual_seed(seed)
    short = torch.randint(1, 5, (24,), generator=generator)
    long = torch.randint(10, 17, (24,), generator=generator)
    lengths = torch.where(torch.rand(24, generator=generator) < 0.3, long, short).tolist()
    requests = [(0, 2, n) for n in lengths]
    continuous, static = steps_of("continuous", 4, requests).n_steps, steps_of("static", 4, requests).n_steps
    assert static / continuous == lockstep(lengths, 4) / on_seats(lengths, 4) > 1.2


def test_a_prompt_is_read_in_pieces_that_emit_nothing() -> None:
    engine = engine_of(max_batch=2, token_budget=4)
    runs = engine.add(request(2, 5))
    engine.step()
    reads = engine.add(request(7, 2))
    emitted = [{o.sequence: len(o.tokens) for o in engine.step()} for _ in range(4)]
    # the one that runs gets its token in each step, the prompt what is left of 4: 3 + 3 + 1
    assert [[n for _, n, _ in step.rows] for step in engine.trace[1:4]] == [[1, 3], [1, 3], [1, 1]]
    assert emitted == [{runs: 1}, {runs: 1}, {runs: 1, reads: 1}, {runs: 1, reads: 1}]
    assert runs.reason == reads.reason == "length"


def test_the_budget_counts_what_the_prefix_cache_leaves_to_read() -> None:
    """A prompt of 9 shares two blocks of 4 and costs 1, so that a second one fits the budget of the same step."""
    cache = PagedCache(tiny(), 16, block_size=4, prefix_caching=True)
    engine = Engine(tiny(), cache, 2, token_budget=10, clock=StepClock(), trace=True)
    engine.add(request(9, 1))
    engine.run()
    again, other = engine.add(request(9, 2)), engine.add(request(9, 2, first=5))
    engine.step()
    assert engine.trace[-1].rows == [(again.key, 1, 1), (other.key, 9, 9)]
    assert again.n_cached == 8


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_by_hand(preemption: str) -> None:
    """Room for 10 tokens and two requests that come to need 6 each: the younger one gives way and comes back."""
    engine = Engine(tiny(), SmallPool(tiny(), 10), 2, preemption=preemption, clock=StepClock(), trace=True)
    old, young = engine.add(request(3, 4)), engine.add(request(3, 4, first=4))
    engine.run()
    # steps 1 to 3 hold 3 + 3, 4 + 4 and 5 + 5; the fourth needs 6 + 6
    assert [step.preempted for step in engine.trace] == [[], [], [], [young.key], []]
    assert [key for key, _, _ in engine.trace[3].rows] == [old.key]
    # what comes back reads its 3 + 3 tokens again, or its last one alone where they were kept
    assert engine.trace[4].rows == [(young.key, 1, 1) if preemption == "swap" else (young.key, 6, 6)]
    assert young.n_preempted == 1 and len(young.output) == 4
    assert engine.cache.positions == {}


def test_preemption_reads_only_what_the_prefix_cache_has_lost() -> None:
    """After its preemption a sequence finds its own blocks again."""
    cache = PagedCache(tiny(), 6, block_size=2, prefix_caching=True)
    engine = Engine(tiny(), cache, 2, clock=StepClock(), trace=True)
    old, young = engine.add(request(4, 6)), engine.add(request(5, 3, first=6))
    engine.run()
    assert young.n_preempted == 1 and young.n_cached > 0
    # 5 tokens, 1 more, and once it is back its 5 + 2 without those that were still there
    assert [n for step in engine.trace for key, n, _ in step.rows if key == young.key] == [5, 1, 7 - young.n_cached]
    assert len(old.output) == 6 and len(young.output) == 3


def test_nobody_overtakes_a_long_request() -> None:
    """The head of the queue needs more room than is free; the short ones behind it wait for it."""
    engine = Engine(tiny(), SmallPool(tiny(), 16), 3, clock=StepClock(), trace=True)
    first = engine.add(request(5, 6))
    engine.step()
    long, short = engine.add(request(12, 2)), engine.add(request(1, 1))
    engine.run()
    order = list(dict.fromkeys(key for step in engine.trace for key, _, _ in step.rows))
    assert order == [first.key, long.key, short.key]


def test_a_ring_reads_pieces_of_its_chunk() -> None:
    model = tiny.__wrapped__()  # one of its own, with a window
    for block in model.blocks:
        block.mha.window = 6
    engine = Engine(model, RingCache(model, 2, chunk=3), 2, clock=StepClock(), trace=True)
    sequence = engine.add(request(8, 3, params=GREEDY))
    engine.run()
    assert [n for step in engine.trace for _, n, _ in step.rows] == [3, 3, 2, 1, 1]
    expected = gptlite.generate(model, torch.tensor([sequence.request.prompt]), 3, GREEDY)[0].tolist()
    assert sequence.tokens == expected


# -- stop strings -----------------------------------------------------------------------------------------------------


def fed(stop: tuple[str, ...], tokens: list[int], n_new: int = 99) -> tuple[Sequence, list[list[int]]]:
    sequence = Sequence(Request([0], n_new, stop=stop), (0, 0))
    released = []
    for token in tokens:
        released.append(sequence.append(token, 0.0, Pairs()))
        if sequence.finished:
            break
    return sequence, released


# tokens of Pairs: 0 a, 1 b, 2 c, 3 ab, 4 ba, 5 bb, 6 ca, 7 d, 8 da, 9 cd, 10 e
@pytest.mark.parametrize(
    ("stop", "tokens", "released", "text", "reason"),
    [
        (("d",), [0, 1, 7, 0], [[0], [1], []], "ab", "stop"),
        # over a boundary: "b" could begin "bd", is held, and comes once "ba" says that it did not
        (("bd",), [1, 0, 1, 7], [[], [1, 0], [], []], "ba", "stop"),
        # inside tokens: a|b c|d stops at "bc"; the "a" of the token "ab" is text, but no whole token
        (("bc",), [0, 3, 9], [[0], [], []], "aa", "stop"),
        # the end of the length releases what was held
        (("bd",), [0, 1], [[0], [1]], "ab", "length"),
        # the stop string that is complete first wins, then the earlier one
        (("cde", "d"), [2, 7, 10], [[], [2]], "c", "stop"),
        # a stop string that overlaps itself
        (("aab",), [0, 0, 0, 1], [[], [], [0], []], "a", "stop"),
    ],
)
def test_stop_strings(stop, tokens, released, text, reason) -> None:
    sequence, got = fed(stop, tokens, n_new=2 if reason == "length" else 99)
    assert (got, sequence.text, sequence.reason) == (released, text, reason)


# -- clients ------------------------------------------------------------------------------------------------------


def test_streams_share_the_engine() -> None:
    async def read(stream: AsyncIterator[int]) -> list[int]:
        return [token async for token in stream]

    async def clients() -> list[list[int]]:
        engine = engine_of(max_batch=3)
        return await asyncio.gather(*(read(engine.stream(r)) for r in requests))

    requests = [request(1 + i, 3 + i, first=i, seed=i) for i in range(5)]
    for r, tokens in zip(requests, asyncio.run(clients()), strict=True):
        prompt = torch.tensor([r.prompt])
        expected = gptlite.generate(tiny(), prompt, r.n_new, r.params, seed=r.seed)[0, prompt.shape[1] :]
        assert tokens == expected.tolist()


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_a_client_that_goes_away_frees_its_blocks_at_the_next_step(how: str) -> None:
    async def scenario() -> None:
        cache = PagedCache(tiny(), 12, block_size=2)
        engine = Engine(tiny(), cache, 2, clock=StepClock())
        stays = engine.add(request(2, 9))
        if how == "aclose":
            stream = engine.stream(request(5, 9))
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(_exhaust(engine.stream(request(5, 9))))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        engine.step()
        assert list(cache.positions) == [stays.key]
        engine.check()
        engine.run()
        assert cache.free_blocks == 12 and len(stays.output) == 9

    asyncio.run(scenario())


async def _exhaust(stream: AsyncIterator[int]) -> None:
    async for _ in stream:
        pass


def test_samples_of_one_prompt_equal_runs_alone() -> None:
    """Four samples share the prompt's blocks: it is read once, and each draws with its own seed."""
    cache = PagedCache(tiny(), 40, block_size=2)
    engine = Engine(tiny(), cache, 4, clock=StepClock(), trace=True)
    sequences = engine.add_samples(request(7, 6, seed=3), 4)
    engine.step()
    assert engine.trace[0].rows == [(sequences[0].key, 7, 7)]
    engine.check()
    assert len({cache.table(s.key)[0] for s in sequences}) == 1
    engine.run()
    for i, s in enumerate(sequences):
        expected = gptlite.generate(tiny(), torch.tensor([s.request.prompt]), 6, seed=3 + i)[0].tolist()
        assert s.tokens == expected
    assert cache.free_blocks == 40


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [1, 2, 4])
def test_samples_without_a_seat_wait_and_one_that_is_cancelled_takes_nobody_along(gone: int, max_batch: int) -> None:
    engine = engine_of(max_batch=max_batch)
    before = engine.add(request(1, 2))
    sequences = engine.add_samples(request(4, 3, seed=5), 3)
    engine.cancel(sequences[gone])
    while engine.busy:
        engine.step()
        engine.check()
    assert before.reason == "length" and not sequences[gone].output
    for i, s in enumerate(sequences):
        if i != gone:
            expected = gptlite.generate(tiny(), torch.tensor([s.request.prompt]), 3, seed=5 + i)[0].tolist()
            assert s.tokens == expected
    assert engine.cache.positions == {}


def test_a_greedy_row_and_a_sampled_one_share_a_batch() -> None:
    engine = engine_of(max_batch=2)
    rows = [engine.add(request(3, 6, params=params, seed=2)) for params in (GREEDY, SamplingParams(1.4))]
    engine.run()
    for s in rows:
        expected = gptlite.generate(tiny(), torch.tensor([s.request.prompt]), 6, s.request.params, seed=2)
        assert s.tokens == expected[0].tolist()


def test_the_numbers_of_a_sequence_are_those_that_generate_draws() -> None:
    sequence = Sequence(request(1, 40, seed=9), (0, 2))
    generator = torch.Generator().manual_seed(9 + 2)
    for _ in range(40):
        assert sequence.uniform == torch.rand((), generator=generator, dtype=torch.float64).item()
        sequence.tokens.append(0)


def test_a_step_with_nothing_to_do_is_empty() -> None:
    engine = engine_of()
    assert engine.step() == [] and engine.n_steps == 0 and not engine.busy


def test_a_cache_that_others_fill_is_an_error_and_no_endless_loop() -> None:
    pool = SmallPool(tiny(), 8)
    pool.prepare(["somebody else"], [torch.arange(6)])
    engine = Engine(tiny(), pool, 2)
    engine.add(request(4, 1))
    with pytest.raises(ValueError, match="does not fit the cache, though nothing else runs"):
        engine.run()


def test_the_scheduler_can_be_asked_alone() -> None:
    """The joint: rows of (sequence, tokens, positions, parents, samples)."""
    scheduler = Scheduler(StaticCache(tiny(), 2, LONGEST), max_batch=2, token_budget=5)
    a, b = Sequence(request(3, 2), (0, 0)), Sequence(request(4, 2), (1, 0))
    scheduler.add(b)
    scheduler.add(a)
    assert scheduler.schedule() == [(a, [0, 1, 2], range(3), None, True), (b, [0, 1], range(2), None, False)]
