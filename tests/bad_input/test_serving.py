"""What the serving engine refuses, in one line that names the value and what is allowed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.sampling import GREEDY
from gptlite.serving.arrivals import Arrival, load_trace, mixed_lengths, mixed_requests, poisson_times
from gptlite.serving.engine import Engine
from gptlite.serving.metrics import percentile, throughput
from gptlite.serving.scheduler import Scheduler
from gptlite.serving.sequence import Request
from gptlite.serving.static import StaticScheduler

MODEL = GPTlite(GPTConfig(7, 32, n_layers=1, d_model=12, n_heads=4, d_head=2, n_kv_heads=2)).eval()
CACHE = DynamicCache(MODEL)


def add(cache: Any = CACHE, n_prompt: int = 3, n_new: int = 2, **options: Any) -> Any:
    return Engine(MODEL, cache).add(Request([1] * n_prompt, n_new, **options))


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Request([], 3), r"tokens have shape \(0,\), it must be \[n\] with at least one token"),
    (lambda: Request(torch.ones(2, 3), 3), r"tokens have shape \(2, 3\), it must be \[n\]"),
    (lambda: Request([1], 0), "n_new is 0, it must be a whole number of at least 1"),
    (lambda: Request([1], 2.5), "n_new is 2.5, it must be a whole number"),  # type: ignore[arg-type]
    (lambda: Request("to be", 3), "tokens are 'to be', they must be a tensor"),  # type: ignore[arg-type]
    (lambda: Request(7, 3), "tokens are 7, they must be a tensor"),  # type: ignore[arg-type]
    (lambda: Request([1], 1, stop=(3,)), r"stop is \(3,\), it must be a tuple of strings"),  # type: ignore[arg-type],
    (lambda: Request([1], 1, stop="end"), "stop is 'end', it must be a tuple of strings"),
    (lambda: Request([1], 1, stop=("",)), r"stop is \('',\), it must be a tuple of strings that are not empty"),
    (
        lambda: add(n_prompt=20, n_new=14),
        "20 tokens and 14 new ones needs 33, the context window holds 32",
    ),
    (
        lambda: add(StaticCache(MODEL, 2, 10), 8, 4),
        "a request of 8 tokens and 4 new ones needs 11, the cache holds 10 at most",
    ),
    (
        lambda: add(PagedCache(MODEL, 3, block_size=4), 8, 6),
        "a request of 8 tokens and 6 new ones needs 13, the cache holds 12 at most",
    ),
    (lambda: Engine(MODEL, CACHE).add(Request([1, 7], 2)), "token 7 is outside the vocabulary of 7"),
    (lambda: Engine(MODEL, CACHE).add(Request([-1, 6], 2)), "token -1 is outside the vocabulary of 7"),
    (lambda: add(stop=("a",)), r"stop strings \('a',\) need the engine to have a tokenizer"),
    # what only a step would find out, and the users that share it would pay for
    (lambda: Engine(MODEL, CACHE).add(Request(torch.tensor([1.5]), 2)), "a token is 1.5, it must be a whole number"),
    (lambda: Engine(MODEL, CACHE).add(Request([True], 2)), "a token is True, it must be a whole number"),
    (lambda: add(seed=1.5), "seed is 1.5, it must be a whole number"),
    (lambda: add(seed=2**70), "seed is 1180591620717411303424, it must fit 64 bits"),
    (lambda: add(params=None), "params is None, it must be SamplingParams"),
    (lambda: Engine(MODEL, CACHE).add_samples(Request([1], 1), 0), "n is 0, it must be a whole number of at least 1"),
    (lambda: Scheduler(CACHE, 0), "max_batch is 0, it must be a whole number of at least 1"),
    (lambda: Scheduler(CACHE, float("nan")), "max_batch is nan, it must be a whole number"),  # type: ignore[arg-type]
    (lambda: StaticScheduler(CACHE, 0), "max_batch is 0, it must be a whole number of at least 1"),
    (lambda: Scheduler(CACHE, 8, token_budget=7), "token_budget is 7, it must be at least max_batch, 8"),
    (lambda: Scheduler(CACHE, 8, float("nan")), "token_budget is nan, it must be at least max_batch, 8"),  # type: ignore[arg-type]
    (lambda: Scheduler(CACHE, 8, preemption="forget"), "preemption is 'forget', it must be 'recompute' or 'swap'"),  # type: ignore[arg-type]
    (lambda: Arrival(float("nan"), Request([1], 1)), "time is nan, a request must come at a finite number of seconds"),
    (lambda: poisson_times(1.0, -1), "n is -1, it must be a whole number of at least 0"),
    (lambda: mixed_lengths(-1, 1, 4), "n is -1, it must be a whole number of at least 0"),
    (lambda: percentile([1.0], 101), "q is 101, it must be between 0 and 100"),
    (lambda: percentile([1.0], float("nan")), "q is nan, it must be between 0 and 100"),
    (lambda: poisson_times(0.0, 3), "rate is 0.0, it must be above 0 requests per second"),
    (lambda: poisson_times(float("nan"), 3), "rate is nan, it must be above 0"),
    (lambda: mixed_lengths(3, 0, 4), "lengths from 0 to 4: they must begin at 1 or more, and rise"),
    (lambda: mixed_lengths(3, 5, 4), "lengths from 5 to 4: they must begin at 1 or more, and rise"),
    (lambda: mixed_requests(torch.arange(9)), "the text has 9 tokens, the longest prompt 64"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_longest_that_fits_is_served() -> None:
    """One token less than the refused ones above."""
    for cache, n_prompt, n_new in (
        (DynamicCache(MODEL), 20, 13),
        (StaticCache(MODEL, 2, 10), 8, 3),
        (PagedCache(MODEL, 3, block_size=4), 8, 5),
    ):
        engine = Engine(MODEL, cache)
        sequence = engine.add(Request([1] * n_prompt, n_new))
        engine.run()
        assert len(sequence.output) == n_new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 of trace.jsonl is no arrival"),
        ('{"time": 0, "n_prompt": 3}', "line 1 of trace.jsonl is no arrival"),
        ('{"time": 0, "n_prompt": 3, "n_new": 1, "user": 4}', "line 1 of trace.jsonl is no arrival"),
        ('{"time": "soon", "n_prompt": 3, "n_new": 1}', "line 1 of trace.jsonl is no arrival"),
        ('{"time": 0, "n_prompt": 0, "n_new": 1}', "line 1 of trace.jsonl goes back in time, or has no tokens"),
        ('{"time": 2, "n_prompt": 3, "n_new": 1}\n{"time": 1, "n_prompt": 3, "n_new": 1}', "line 2 of .* goes back"),
        ("[1, 2]", "line 1 of trace.jsonl is no arrival"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trace(tmp_path / "trace.jsonl")


def test_logits_that_are_no_numbers_end_a_greedy_step_as_they_end_generate() -> None:
    broken = GPTlite(MODEL.config).eval()
    broken.fc_out.weight.data[3, 0] = float("nan")
    engine = Engine(broken, DynamicCache(broken))
    engine.add(Request([1, 2], 3, GREEDY))
    with pytest.raises(ValueError, match="a row of logits holds NaN or an infinite value"):
        engine.step()


def test_nothing_served_is_a_throughput_of_0() -> None:
    assert throughput([]) == 0.0


def test_a_refused_request_leaves_the_engine_as_it_was() -> None:
    engine = Engine(MODEL, StaticCache(MODEL, 2, 10))
    good = engine.add(Request([1, 2], 3))
    with pytest.raises(ValueError, match=re.escape("needs 31")):
        engine.add(Request([1] * 30, 2))
    engine.run()
    assert len(good.output) == 3 and not engine.busy
