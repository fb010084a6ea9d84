"""The engine over a quantised pool: every request gets the tokens that it gets alone."""

import pytest
import torch
from serving_help import LONGEST, VOCAB, bank, solo, tiny

from gptlite.cache.quantized import QuantizedCache
from gptlite.cache.quantized_paged import QuantizedPagedCache
from gptlite.generate import generate
from gptlite.quantize.kv import KVFormat, Recipe, Rule
from gptlite.sampling import SamplingParams
from gptlite.serving.engine import Engine
from gptlite.serving.sequence import Request

TWO_BITS = Recipe(KVFormat("even", 2, "channel", 3), KVFormat("even", 2, "token", 3), Rule(0, 3), Rule(2, 1))
INT8 = Recipe(*[KVFormat("even", 8, symmetric=True)] * 2, Rule(0, 1), Rule(0, 1))
PLAIN = Recipe(*[KVFormat("plain")] * 2, Rule(0, 1), Rule(2, 1))


def pool(recipe, n_blocks=12, n_recent=24, chunk=20):
    return QuantizedPagedCache(tiny(), recipe, n_blocks, n_recent, 3, chunk)


def served(cache, requests, **options):
    engine = Engine(tiny(), cache, **options)
    sequences = [engine.add(request) for request in requests]
    preempted = 0
    while engine.busy:
        engine.step()
        engine.check()
        preempted += len(engine.scheduler.preempted)
    assert cache.code_pool.free == cache.n_code_blocks and cache.free_blocks == cache.n_blocks
    return [sequence.tokens[len(sequence.request.prompt) :] for sequence in sequences], preempted


def without_stops(n):
    return [Request(r.prompt, r.n_new, r.params, r.seed) for r in bank()[:n]]


@pytest.mark.parametrize("recipe", [TWO_BITS, INT8], ids=["2 bits", "int8"])
@pytest.mark.parametrize(("n_blocks", "n_recent"), [(40, 60), (7, 12)], ids=["room for all", "swapping"])
def test_outputs_equal_solo_runs(recipe, n_blocks, n_recent):
    requests = without_stops(40)
    found, preempted = served(pool(recipe, n_blocks, n_recent), requests, max_batch=6, preemption="swap")
    assert (preempted > 0) == (n_blocks == 7)
    differ = 0
    for request, tokens in zip(requests, found, strict=True):
        prompt = torch.tensor(request.prompt)[None]
        alone = generate(tiny(), prompt, request.n_new, request.params, cache=pool(recipe), seed=request.seed)
        assert tokens == alone[0, prompt.shape[1] :].tolist()
        dense = QuantizedCache(tiny(), recipe.in_blocks(3))  # whose codes are those of the pool
        assert torch.equal(
            alone, generate(tiny(), prompt, request.n_new, request.params, cache=dense, seed=request.seed)
        )
        differ += tokens != solo(request)[0]
    if recipe is TWO_BITS:
        assert differ  # the codes do round


def test_a_pool_that_rounds_nothing_equals_the_plain_loop_in_pieces_and_after_recomputing():
    requests = without_stops(40)
    for options in ({"token_budget": 6}, {"preemption": "recompute"}):
        found, _ = served(pool(PLAIN, 7, 12, chunk=4), requests, max_batch=5, **options)
        assert found == [solo(request)[0] for request in requests]


def test_samples_of_one_prompt_share_its_codes_and_equal_their_solo_runs():
    request = Request(torch.tensor([i % VOCAB for i in range(12)]), 6, SamplingParams(1.0), 5)
    cache = pool(TWO_BITS, 20, 40)
    engine = Engine(tiny(), cache, max_batch=4)
    sequences = engine.add_samples(request, 4)
    most = 0
    while engine.busy:
        engine.step()
        engine.check()
        most = max(most, cache.n_code_blocks - cache.code_pool.free)
    assert most < 2 * cache.blocks_for(18)  # four times the prompt's codes would be more
    for i, sequence in enumerate(sequences):
        prompt = torch.tensor(request.prompt)[None]
        alone = generate(tiny(), prompt, 6, request.params, cache=pool(TWO_BITS), seed=5 + i)
        assert sequence.tokens == alone[0].tolist()


def test_everyone_finishes_in_a_pool_that_is_too_small_and_who_can_never_fit_is_refused():
    requests = without_stops(60)
    for preemption in ("recompute", "swap"):
        found, preempted = served(pool(TWO_BITS, 7, 10), requests, max_batch=6, preemption=preemption)
        assert preempted and [len(tokens) for tokens in found] == [request.n_new for request in requests]
    with pytest.raises(ValueError, match="the cache holds 18 at most"):
        Engine(tiny(), pool(TWO_BITS, 6)).add(Request(torch.tensor([1] * 14), 6, SamplingParams(), 0))
    with pytest.raises(ValueError, match="n_recent is 5, a step of 20 tokens may need 8 recent blocks of 3"):
        pool(TWO_BITS, 6, 5)
    assert LONGEST == 20
