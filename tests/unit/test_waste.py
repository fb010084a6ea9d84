"""The waste of memory, by hand on small traces, and by the closed form on long ones."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.serving.waste import (
    FirstFit,
    Job,
    Use,
    block_waste,
    chat_jobs,
    known,
    length_for,
    longest,
    mean_use,
    power_of_two,
    run_contiguous,
    run_paged,
    sharing,
    waste_share,
)


def test_first_fit_by_hand():
    memory = FirstFit(10)
    assert [memory.take(n) for n in (4, 3, 2, 2)] == [0, 4, 7, None]
    memory.release(4)
    assert memory.gaps() == [(4, 3), (9, 1)]
    assert (memory.take(4), memory.take(2), memory.take(1)) == (None, 4, 6)
    assert memory.gaps() == [(9, 1)]


@settings(max_examples=100, deadline=None)
@given(ops=st.lists(st.integers(-5, 9), max_size=40), n_slots=st.integers(1, 30))
def test_regions_never_overlap_and_gaps_are_what_they_leave(ops, n_slots):
    memory, held = FirstFit(n_slots), {}
    for op in ops:
        if op > 0:
            begin = memory.take(op)
            taken = {slot for b, size in held.items() for slot in range(b, b + size)}
            fits = [b for b in range(n_slots - op + 1) if not taken & set(range(b, b + op))]
            assert begin == (fits[0] if fits else None)
            if begin is not None:
                held[begin] = op
        elif held:
            begin = sorted(held)[op % len(held)]
            memory.release(begin)
            del held[begin]
        free = set(range(n_slots)) - {slot for b, size in held.items() for slot in range(b, b + size)}
        assert free == {slot for begin, size in memory.gaps() for slot in range(begin, begin + size)}


def test_contiguous_regions_by_hand():
    """10 slots, regions of 4: two jobs run, the third waits; 2 slots are left over, and too few for it."""
    jobs = [Job(1, 2), Job(2, 2), Job(1, 1)]
    uses = run_contiguous(jobs, 10, longest(4))
    assert uses == [Use(5, 2, 1, 0, 2), Use(7, 0, 1, 0, 2)]
    # the regions as long as the jobs: 3 + 4 + 2 slots, all run at once and nobody waits
    assert run_contiguous(jobs, 10, known) == []
    assert run_contiguous(jobs, 10, known, batch=1) == [
        Use(2, 1, 0, 0, 7), Use(3, 0, 0, 0, 7), Use(3, 1, 0, 0, 6), Use(4, 0, 0, 0, 6),
    ]  # fmt: skip


def test_external_fragmentation_is_free_memory_in_pieces():
    """8 slots: regions of 3, 2 and 3. When the first and the last end, 6 slots are free and a job of 4 has no room."""
    jobs = [Job(2, 1), Job(1, 1), Job(2, 1), Job(3, 1), Job(1, 1)]
    assert run_contiguous(jobs, 8, known)[0] == Use(8, 0, 0, 0, 0)
    longer = [Job(2, 1), Job(1, 3), Job(1, 1), Job(3, 1), Job(1, 1)]  # regions of 3, 4 and 2, then 4: in 9 slots
    uses = run_contiguous(longer, 9, known)
    assert uses[0] == Use(7, 2, 0, 0, 0)
    assert uses[1] == Use(3, 1, 0, 5, 0)  # 3 slots before and 2 behind


def test_blocks_by_hand():
    """6 blocks of 4, jobs of 6 and 9 tokens at the end, one of 5 that waits for a place in the batch."""
    uses = run_paged([Job(4, 2), Job(6, 3), Job(3, 2)], 24, 4, batch=2)
    # held 5 and 7 in 2 + 2 blocks, then 6 and 8; then the first is gone
    assert uses[:2] == [Use(12, 1 + 1, 2, 0, 8), Use(14, 0, 2, 0, 8)]
    assert len(uses) == 2  # the third came in at the next step


def test_a_pool_too_small_for_all_puts_the_youngest_back_and_serves_everyone():
    jobs = [Job(5, 20), Job(5, 20), Job(5, 20), Job(1, 1)]
    uses = run_paged(jobs, 48, 4)
    assert uses and all(use.tokens + use.reserved + use.internal + use.free == 48 for use in uses)
    assert max(use.tokens for use in uses) > 44


def test_equal_work_in_every_policy():
    """Every step of every job is there once where nothing is put back: the tokens add up."""
    jobs = [Job(3, 5), Job(2, 9), Job(7, 1)] * 5
    whole = sum(sum(range(job.prompt + 1, job.total + 1)) for job in jobs[:-1])
    for uses in (run_contiguous(jobs, 64, known, batch=1), run_paged(jobs, 64, 4, batch=1)):
        assert sum(use.tokens for use in uses) == whole


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 32])
def test_measured_waste_is_half_a_block_where_lengths_fill_it_in_every_way(block_size):
    """Answers of a whole number of blocks pass through every remainder equally often: (block - 1) / 2, exactly."""
    rng = random.Random(block_size)
    jobs = [Job(rng.randint(1, 90), block_size * rng.randint(1, 3)) for _ in range(20)]
    use = mean_use(run_paged(jobs, 256, block_size, batch=1))
    assert use.reserved + use.internal == pytest.approx(block_waste(block_size), abs=1e-12)


def test_measured_waste_of_a_trace_equals_its_closed_form_and_is_near_half_a_block():
    """The closed form of a trace is the sum of (-n) mod 16 over its live sequences; nothing is put back here."""
    jobs = chat_jobs(120, 256, seed=3)
    uses = run_paged(jobs, 16 * 400, 16, batch=24)
    waiting, running, expected, lives = list(jobs), [], [], []
    while waiting or running:
        while waiting and len(running) < 24:
            running.append([waiting.pop(0), 0])
        for row in running:
            row[1] = row[1] + 1 if row[1] else row[0].prompt + 1
        if waiting:
            expected.append(sum(-n % 16 for _, n in running))
            lives.append(len(running))
        running = [row for row in running if row[1] < row[0].total]
    assert [use.reserved + use.internal for use in uses] == expected
    assert sum(expected) / sum(lives) == pytest.approx(block_waste(16), rel=0.1)  # about 2,000 lengths
    # reservation by the longest wastes many times that on the same trace
    reserved = mean_use(run_contiguous(jobs, 256 * 24, longest(256), batch=24))
    assert reserved.reserved + reserved.internal > 10 * sum(expected) / len(expected)


def test_arithmetic_of_waste():
    assert [block_waste(n) for n in (1, 16, 32)] == [0, 7.5, 15.5]
    assert waste_share(7.5, 16) == 0.5
    assert length_for(0.05, 16) == 143
    assert waste_share(143, 16) < 0.05 < waste_share(142, 16)
    assert length_for(0.5, 17) == 8  # 8 slots to spare and 8 tokens: exactly half
    assert length_for(0.05, 1) == 0


def test_shares_sum_up_and_means_need_something():
    use = Use(1, 2, 3, 4, 0)
    assert use.total == 10 and use.shares() == Use(0.1, 0.2, 0.3, 0.4, 0)
    assert mean_use([Use(2), Use(4, 2)]) == Use(3, 1)
    with pytest.raises(ValueError, match="empty"):
        mean_use([])


def test_sharing_counts_entries_and_blocks():
    cache = PagedCache(GPTlite(GPTConfig(4, 64, n_layers=1, d_model=4, n_heads=1, d_head=4)), 20, 4)
    cache.prepare(["a"], [torch.arange(10)])
    cache.fork("a", "b")
    assert sharing(cache) == (6, 3)
    cache.prepare(["a"], [torch.tensor([10])])
    assert sharing(cache) == (6, 4)


def test_jobs_that_never_fit_are_refused():
    with pytest.raises(ValueError, match="12 tokens asks for 8 slots of 100"):
        run_contiguous([Job(6, 6)], 100, longest(8))
    with pytest.raises(ValueError, match="asks for 16 slots of 15"):
        run_contiguous([Job(6, 6)], 15, power_of_two)
    with pytest.raises(ValueError, match="12 tokens needs 3 blocks, there are 2"):
        run_paged([Job(6, 6)], 8, 4)


def test_chat_jobs_are_short_mostly_and_never_longer_than_the_limit():
    jobs = chat_jobs(300, 256)
    assert jobs == chat_jobs(300, 256) != chat_jobs(300, 256, seed=1)
    assert all(job.prompt >= 1 and job.answer >= 1 and job.total <= 256 for job in jobs)
    assert 50 < sum(job.total for job in jobs) / 300 < 110
    assert [power_of_two(Job(1, n)) for n in (1, 2, 3, 4)] == [2, 4, 4, 8]
