"""Routers and the order by prefix choose as worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptlite.cache.paged import PagedCache
from gptlite.cache.prefix import block_keys
from gptlite.config import GPTConfig
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY
from gptlite.serving.engine import Engine
from gptlite.serving.routing import BlockCounter, CacheAware, LeastLoaded, PrefixScheduler, RoundRobin, prefix_order
from gptlite.serving.scheduler import Scheduler
from gptlite.serving.sequence import Request


def test_taking_turns_and_the_least_loaded():
    turns = RoundRobin()
    assert [turns.route((), [9, 0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]
    least = LeastLoaded()
    # equals: the one that was chosen longest ago
    assert [least.route((), loads) for loads in ([3, 1, 2], [0, 0, 0], [0, 0, 0], (5, 4, 4))] == [1, 0, 2, 1]


def test_cache_aware_by_hand():
    router = CacheAware(2, threshold=0.5, gap=2, ratio=1.5)
    assert router.route("abc", [0, 0]) == 0  # nothing is known: the first of equals
    assert router.route("abx", [1, 0]) == 0  # 2 of 3 blocks are known there, though the other is idle
    assert router.route("ayz", [2, 0]) == 1  # 1 of 3 is too little: the replica that was sent less
    assert router.route("abq", [2, 1]) == 0
    assert router.route("abc", [4, 1]) == 1  # 3 apart and more than 1.5 times: the least loaded, which learns it
    assert router.route("abc", [3, 1]) == 1  # 2 apart is not more than 2; both know all of it: the less loaded
    assert router.route("abx", [3, 1]) == 0  # only the first knows all of this
    assert [seen.match("abc") for seen in router.sent] == [3, 3]


def test_the_exercise_of_the_chapter_by_hand():
    """Six requests, none of which ends: with the limit on imbalance, and without."""
    for gap, where, n_read in ((2, [0, 0, 0, 1, 1, 1], [5, 7]), (10**9, [0, 0, 0, 0, 1, 0], [7, 3])):
        router, loads, kept = CacheAware(2, threshold=0.5, gap=gap), [0, 0], [set(), set()]
        for chain, expected in zip(("abc", "abd", "abe", "abf", "xyz", "abg"), where, strict=True):
            assert router.route(chain, loads) == expected
            loads[expected] += 1
            kept[expected] |= set(chain)
        assert [len(blocks) for blocks in kept] == n_read


def test_loads_far_apart_by_difference_but_not_by_ratio_are_no_reason_to_leave_the_cache():
    router = CacheAware(2, threshold=0.5, gap=2, ratio=2.0)
    assert router.route("ab", [0, 0]) == 0
    assert router.route("ab", [100, 60]) == 0 and router.route("ab", [121, 60]) == 1


def test_a_router_forgets_what_is_long_ago():
    router = CacheAware(2, threshold=0.5, n_blocks=2)
    assert [router.route(chain, [0, 0]) for chain in ("ab", "cd", "ef")] == [0, 1, 0]
    assert router.sent[0].match("ab") == 0 and router.sent[0].match("ef") == 2


@pytest.mark.parametrize("wrong", [{"n_replicas": 0}, {"threshold": 1.1}, {"gap": -1}, {"ratio": 0.9}])
def test_a_router_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="they must be"):
        CacheAware(**{"n_replicas": 2, **wrong})
    with pytest.raises(ValueError, match="3 loads for 2 replicas"):
        CacheAware(2).route("a", [0, 0, 0])
    with pytest.raises(ValueError, match="n_blocks is -1"):
        BlockCounter(-1)


def test_the_end_of_a_text_is_forgotten_before_its_beginning():
    kept = BlockCounter(3)
    kept.add("abc")
    kept.add("abd")  # a and b are used again, so c goes
    assert [kept.match(chain) for chain in ("abc", "abd", "x")] == [2, 3, 0]
    kept.add("e")
    assert [kept.match(chain) for chain in ("abd", "e")] == [2, 1]
    BlockCounter(0).add("abc")
    assert len(BlockCounter(0)) == 0


@given(st.lists(st.text("ab", max_size=6), max_size=20), st.integers(0, 8))
def test_a_counter_never_keeps_more_than_its_room_nor_a_block_without_those_before_it(texts, room):
    kept = BlockCounter(room)
    for text in texts:
        chain = tuple(text[: i + 1] for i in range(len(text)))  # names that stand for all before them
        kept.add(chain)
        assert len(kept) <= room and kept.match(chain) == min(len(chain), room)
        assert all(name[:-1] in kept._used for name in kept._used if len(name) > 1)


def test_longest_prefix_first_and_none_left_behind():
    waiting = ["p0", "q2", "r2", "s1"]
    order = prefix_order(waiting, lambda name: int(name[1]))
    assert order == ["q2", "r2", "s1", "p0"]  # equals in order of arrival
    passed = {"p0": 3, "q2": 0, "r2": 0, "s1": 4}
    assert prefix_order(waiting, lambda name: int(name[1]), passed.__getitem__, 3) == ["p0", "s1", "q2", "r2"]
    assert prefix_order([], len) == []


# -- in the real engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPTlite(GPTConfig(20, 64, 2, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)).double().eval()


def serve(model, scheduler_type, prompts, **options):
    # one seat, and a pool that holds one prompt with its answer and little more: 3 blocks of 4
    cache = PagedCache(model, 3, 4, prefix_caching=True)
    engine = Engine(model, cache, scheduler=scheduler_type(cache, 1, **options))
    sequences = [engine.add(Request(prompt, 2, GREEDY)) for prompt in prompts]
    ended = []
    while engine.busy:
        ended += [output.sequence.key[0] for output in engine.step() if output.finished]
        engine.check()
    return ended, sequences


def test_the_order_by_prefix_saves_reading_in_the_real_engine_and_changes_no_token(model):
    a, b = [1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]
    prompts = [[*(a, b)[i % 2], 10 + i] for i in range(6)]
    served, first_come = serve(model, Scheduler, prompts)
    assert served == [0, 1, 2, 3, 4, 5] and sum(s.n_cached for s in first_come) == 0  # each drives the other out
    served, by_prefix = serve(model, PrefixScheduler, prompts)
    assert served == [0, 2, 4, 1, 3, 5]
    assert [s.n_cached for s in by_prefix] == [0, 0, 8, 8, 8, 8]  # 2 full blocks of 4, for all but the first of each
    served, patient = serve(model, PrefixScheduler, prompts, patience=1)
    assert served == [0, 2, 1, 3, 5, 4]
    for sequences in (first_come, by_prefix, patient):
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.output == generate(model, torch.tensor([prompt]), 2, GREEDY)[0, -2:].tolist()


def test_nobody_starves_behind_a_stream_of_hits(model):
    """One request without a prefix among many with the same one: it is passed `patience` times and no more."""
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    prompts = [[*common, 11], [15] * 9, *([*common, 12 + i % 8] for i in range(10))]
    served, _ = serve(model, PrefixScheduler, prompts, patience=3)
    assert served.index(1) == 4  # after request 0 and three that passed it


def test_blocks_of_texts_that_begin_alike_have_the_same_names():
    one, two = block_keys([1, 2, 3, 4, 5], 2), block_keys([1, 2, 3, 9, 5, 6], 2)
    assert len(one) == 2 and len(two) == 3
    kept = BlockCounter()
    kept.add(one)
    assert kept.match(two) == 1
