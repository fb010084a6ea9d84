"""A prompt read in chunks among decodes gives what it gives alone, and keeps nobody waiting longer than one budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.generate import generate, prefill
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY, SamplingParams
from gptlite.serving.arrivals import Arrival, StepClock
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import gaps
from gptlite.serving.sequence import Request

CACHES = [lambda m: DynamicCache(m), lambda m: StaticCache(m, 6, 64), lambda m: PagedCache(m, 60, 4)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPTlite(GPTConfig(20, 64, 2, d_model=24, n_heads=4, d_head=8, n_kv_heads=2)).eval()


@pytest.fixture(scope="module")
def exact(model):
    copy = GPTlite(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.double().eval()


def tokens(n, seed):
    return torch.randint(0, 20, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("budget", [4, 5, 7, 16, 64])
def test_tokens_and_logits_are_those_of_the_whole_prompt(model, exact, make, budget):
    requests = [Request(tokens(n, n), 6, SamplingParams(0.7), seed=n) for n in (1, 40, 13, 3)]
    engine = Engine(exact, make(exact), 4, budget)
    served = [engine.add(request) for request in requests]
    engine.run()
    for request, sequence in zip(requests, served, strict=True):
        alone = generate(exact, torch.tensor([request.tokens]), 6, request.params, seed=request.seed)
        assert sequence.output == alone[0, -6:].tolist()
    engine = Engine(model, make(model), 4, budget, keep_logits=True)
    served = [engine.add(request) for request in requests]
    engine.run()
    for request, sequence in zip(requests, served, strict=True):
        for i, logits in enumerate(sequence.logits):
            whole = prefill(model, torch.tensor([request.tokens + sequence.output[:i]]))[0]
            assert torch.allclose(logits, whole, rtol=0, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_the_longest_gap_is_the_cost_of_one_budget(model, jobs, max_batch, more):
    """With a clock that counts tokens: a step costs as many seconds as it has tokens."""
    budget = max_batch + more
    engine = Engine(model, DynamicCache(model), max_batch, budget, clock=StepClock(sum), trace=True)
    arrivals = [Arrival(time, Request([1] * n, n_new, GREEDY)) for time, n, n_new in jobs]
    for sequence in engine.serve(arrivals):
        # between two tokens of a user lies one step and no more, and a step has no more tokens than the budget
        assert max(gaps(sequence), default=0) <= budget
    for step in engine.trace:
        assert sum(n for _, n, _ in step.rows) <= budget
        reads = [key for key, n, _ in step.rows if key not in step.sampled]
        assert len(step.sampled) + len(reads) == len(step.rows)  # a part of a prompt emits nothing


def test_a_whole_prompt_makes_everybody_wait_for_all_of_it(model):
    def longest(budget):
        engine = Engine(model, DynamicCache(model), 3, budget, clock=StepClock(sum))
        users = [engine.add(Request([1], 30, GREEDY)) for _ in range(2)]
        for _ in range(5):
            engine.step()
        late = engine.add(Request([2] * 48, 2, GREEDY))
        engine.run()
        return max(gaps(users[0])), late.times[0] - late.arrived

    # a step of 2 decodes and the whole prompt; or steps of 8, 6 of them of the prompt, and the first token after 8
    assert longest(None) == (50, 50)
    assert longest(8) == (8, 64)
    # an eighth of the wait, and the prompt's own wait is longer by the decodes that went along with it
