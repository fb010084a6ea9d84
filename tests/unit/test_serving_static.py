"""Static batching: rows padded on the right equal their solo runs, and finished rows are holes that give nothing."""

import random

import pytest
import torch
from serving_help import LONGEST, VOCAB, SmallPool, bank, solo, tiny

import gptlite
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import StepClock
from gptlite.serving.engine import Engine
from gptlite.serving.sequence import Request
from gptlite.serving.static import StaticScheduler

CACHES = {
    "static": lambda model, n: StaticCache(model, n, LONGEST, bucket=4),
    "dynamic": lambda model, n: DynamicCache(model),
    "paged": lambda model, n: PagedCache(model, n * LONGEST // 4, block_size=4),
}


def static(cache, max_batch: int, model=None, **options) -> Engine:
    scheduler = StaticScheduler(cache, max_batch)
    return Engine(model or tiny(), cache, scheduler=scheduler, clock=StepClock(), trace=True, **options)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(6))
def test_each_row_equals_its_solo_run(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = rng.sample([request for request in bank() if not request.stop], 11)
    cache = CACHES[kind](tiny(), 4)
    engine = static(cache, 4)
    sequences = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
        engine.check()
    assert [sequence.output for sequence in sequences] == [solo(request)[0] for request in requests]
    assert cache.positions == {}
    groups = [requests[i : i + 4] for i in range(0, len(requests), 4)]
    assert engine.n_steps == sum(max(request.n_new for request in group) for group in groups)


def test_the_logits_of_padded_rows_equal_those_alone_in_fp32() -> None:
    model = tiny(torch.float32)
    engine = static(StaticCache(model, 6, LONGEST), 6, model, keep_logits=True)
    sequences = [engine.add(request) for request in bank()[:12] if not request.stop]
    engine.run()
    for sequence in sequences:
        with torch.inference_mode():
            expected = model(torch.tensor([sequence.tokens]))[0, sequence.n_prompt - 1 : -1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=0, atol=1e-5)  # fp32, as any cache


def test_padding_is_holes_on_the_right_and_a_finished_row_emits_nothing() -> None:
    engine = static(DynamicCache(tiny()), 2)
    short, long = (engine.add(Request([i % VOCAB for i in range(n)], m, GREEDY)) for n, m in ((2, 1), (5, 3)))
    plan = engine.scheduler.schedule()
    assert plan[0].positions == [0, 1, -1, -1, -1] and plan[0].n_new == 2 and plan[1].positions == [0, 1, 2, 3, 4]
    given = [[output.sequence for output in engine.step()] for _ in range(3)]
    assert given == [[short, long], [long], [long]]
    assert [step.rows for step in engine.trace] == [
        [(short.key, 5, 2), (long.key, 5, 5)],
        [(short.key, 1, 0), (long.key, 1, 1)],
        [(short.key, 1, 0), (long.key, 1, 1)],
    ]


def test_a_group_reserves_what_its_longest_answers_will_need() -> None:
    """16 tokens of room: two of 4 + 4 - 1 fit, a third does not, though its prompt would."""
    engine = static(SmallPool(tiny(), 16), 3)
    for first in range(3):
        engine.add(Request([first] * 4, 4, GREEDY))
    engine.step()
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 1
    engine.run()
    assert not any(step.preempted for step in engine.trace)


def test_who_comes_while_a_group_runs_waits_for_its_end() -> None:
    engine = static(DynamicCache(tiny()), 2)
    first = engine.add(Request([1], 4, GREEDY))
    engine.step()
    late = engine.add(Request([2], 1, GREEDY))
    engine.run()
    assert (first.times, late.times) == ([1, 2, 3, 4], [5])


@pytest.mark.parametrize("when", ["waiting", "running", "last of its group"])
def test_cancelling(when: str) -> None:
    cache = StaticCache(tiny(), 2, LONGEST)
    engine = static(cache, 2)
    a, b, c = (engine.add(Request([i + 1] * 3, n, GREEDY)) for i, n in enumerate((2, 5, 2)))
    engine.step()
    gone = {"waiting": c, "running": a, "last of its group": b}[when]
    if when == "last of its group":
        engine.step()  # now a has ended
    engine.cancel(gone)
    engine.run()
    engine.check()
    assert cache.positions == {} and gone.reason == "cancelled"
    for sequence in {a, b, c} - {gone}:
        text = gptlite.generate(tiny(), torch.tensor([sequence.request.prompt]), sequence.request.n_new, GREEDY)
        assert sequence.tokens == text[0].tolist()


def test_samples_of_one_prompt_wait_for_the_next_group() -> None:
    engine = static(DynamicCache(tiny()), 4)
    sequences = engine.add_samples(Request([1, 2, 3], 3, seed=4), 3)
    engine.run()
    for i, sequence in enumerate(sequences):
        expected = gptlite.generate(tiny(), torch.tensor([[1, 2, 3]]), 3, seed=4 + i)[0].tolist()
        assert sequence.tokens == expected
