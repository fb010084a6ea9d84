"""Whole generations by closed formulas: against their passes written out, the work that is counted, and real caches."""

import pytest
import torch

from gptlite.arithmetic import ModelShape, kv_bytes, kv_bytes_per_token, shipped_models, total
from gptlite.arithmetic_cache import (
    generation_costs,
    longest_context,
    pairs_seen,
    static_bytes,
    tokens_read,
    written_bytes,
)
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.generate import generate
from gptlite.measure import count_work
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.sweeps.kv_cache import read_again
from gptlite.writes import count_writes

SIZES = [(1, 1), (1, 7), (5, 1), (5, 2), (4, 9), (20, 13)]
# heads whose width is not the model's, and grouped
CONFIG = GPTConfig(vocab_size=19, context_length=64, n_layers=3, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)


def passes(n_prompt: int, n_new: int, cached: bool) -> list[tuple[int, int]]:
    """(new tokens, tokens before them) of every pass."""
    if cached:
        return [(n_prompt, 0), *((1, n_prompt + j) for j in range(n_new - 1))]
    return [(n_prompt + j, 0) for j in range(n_new)]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("n_prompt", "n_new"), SIZES)
def test_tokens_and_pairs_are_those_of_the_passes(n_prompt: int, n_new: int, cached: bool) -> None:
    plan = passes(n_prompt, n_new, cached)
    assert tokens_read(n_prompt, n_new, cached) == sum(new for new, _ in plan)
    assert pairs_seen(n_prompt, n_new, cached) == sum(past + i + 1 for new, past in plan for i in range(new))


def test_the_chapters_worked_numbers() -> None:
    assert (tokens_read(1, 500, False), tokens_read(1, 500, True)) == (125_250, 500)
    assert (pairs_seen(1, 500, False), pairs_seen(1, 500, True)) == (20_958_500, 125_250)


@pytest.mark.parametrize("cached", [True, False])
def test_flops_are_two_per_multiply_add_of_every_pass(cached: bool) -> None:
    n_prompt, n_new, batch = 6, 5, 3
    per_token = 2 * 3 * (20 * 24 + 2 * 20 * 12 + 24 * 20 + 2 * 20 * 80)  # queries, keys and values, output, two layers
    head, pair = 2 * 20 * 19, 2 * 3 * 24 * 2  # scores and mix, each 2 H D in 3 layers
    plan = passes(n_prompt, n_new, cached)
    by_hand = batch * (
        per_token * sum(new for new, _ in plan)
        + head * len(plan)
        + pair * sum(past + i + 1 for new, past in plan for i in range(new))
    )
    assert total(generation_costs(ModelShape.of(CONFIG), n_prompt, n_new, cached, batch)).flops == by_hand


def test_the_package_does_as_much_work_as_the_formula_says() -> None:
    model, shape = GPTlite(CONFIG).eval(), ModelShape.of(CONFIG)
    prompt = torch.randint(19, (2, 6), generator=torch.Generator().manual_seed(0))
    for cache in (DynamicCache(model), StaticCache(model, 2, 40, bucket=1)):
        with count_work() as work:
            text = generate(model, prompt, 9, SamplingParams(0), cache=cache)
        cost = total(generation_costs(shape, 6, 9, True, 2, bytes_per_weight=4, bytes_per_value=4, computed=True))
        assert (work.flops, work.operand_bytes) == (cost.flops, cost.operand_bytes)
    with count_work() as work:
        for n in range(6, 15):
            read_again(model, text[:, :n])
    cost = total(generation_costs(shape, 6, 9, False, 2, bytes_per_weight=4, bytes_per_value=4, computed=True))
    assert (work.flops, work.operand_bytes) == (cost.flops, cost.operand_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cache_allocates_and_writes_what_the_formula_says(dtype: torch.dtype) -> None:
    model, shape, width = GPTlite(CONFIG).eval().to(dtype), ModelShape.of(CONFIG), dtype.itemsize
    prompt = torch.zeros(1, 6, dtype=torch.int64)
    dynamic, static = DynamicCache(model), StaticCache(model, 4, 40)
    for kind, cache in (("dynamic", dynamic), ("static", static)):
        with count_writes() as written:
            generate(model, prompt, 9, SamplingParams(0), cache=cache)
        caches = written.joined if kind == "dynamic" else written.in_place
        # the loop joins its text too, and its uniforms: 8 bytes a token, in fp64
        assert 0 <= caches - written_bytes(shape, 6, 9, kind, width) <= 9 * 8
        assert (written.in_place == 0) == (kind == "dynamic")
    assert dynamic.nbytes == kv_bytes(shape, 14, width)
    assert static.nbytes == static_bytes(shape, 4, 40, width) == 4 * 41 * kv_bytes_per_token(shape, width)


def test_written_bytes_by_hand() -> None:
    shape = ModelShape.of(CONFIG)
    token = 2 * 3 * 3 * 4 * 2  # keys and values, layers, KV heads, size, bytes
    assert kv_bytes_per_token(shape) == token
    assert written_bytes(shape, 4, 3, "static") == 6 * token
    assert written_bytes(shape, 4, 3, "dynamic") == (4 + 5 + 6) * token


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Gemma 2 9B", "Mistral 7B v0.1", "DeepSeek-V2", "GPT-2"])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_longest_context_fits_and_one_token_more_does_not(name: str, batch: int) -> None:
    shape = shipped_models()[name]
    for budget in (0, 1e5, 3e8, 2**30, 1e10, 4e11):
        n = longest_context(shape, batch, budget)
        if n is None:  # Mistral's layers all slide, and its cache has stopped to grow
            assert batch * kv_bytes(shape, 10**9) <= budget and shape.n_sliding == shape.n_layers
        else:
            assert batch * kv_bytes(shape, n) <= budget < batch * kv_bytes(shape, n + 1)
    assert longest_context(shape, batch, -1e9) == 0  # of weights that do not fit themselves


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: tokens_read(0, 1, True), "n_prompt is 0, it must be a whole number of at least 1"),
        (lambda s: tokens_read(2.5, 1, True), "n_prompt is 2.5, it must be a whole number of at least 1"),
        (lambda s: pairs_seen(1, 0, True), "n_new is 0, it must be a whole number of at least 1"),
        (lambda s: pairs_seen(1, float("nan"), True), "n_new is nan, it must be a whole number of at least 1"),
        (lambda s: generation_costs(s, 1, -2, False), "n_new is -2, it must be a whole number of at least 1"),
        (lambda s: generation_costs(s, 1, 2, False, True), "batch is True, it must be a whole number of at least 1"),
        (lambda s: written_bytes(s, 1, 1, "static", 0), "bytes_per_value is 0, it must be positive and finite"),
        (lambda s: written_bytes(s, 1, 1, "ring"), "kind is 'ring', it must be 'dynamic' or 'static'"),
        (lambda s: static_bytes(s, 0, 5), "n_sequences is 0, it must be a whole number of at least 1"),
        (lambda s: static_bytes(s, 1, 0), "max_tokens is 0, it must be a whole number of at least 1"),
        (lambda s: static_bytes(s, 1, 5, -1), "bytes_per_value is -1, it must be positive and finite"),
        (lambda s: longest_context(s, 0, 1e9), "batch is 0, it must be a whole number of at least 1"),
        (lambda s: longest_context(s, 1, 1e9, float("nan")), "bytes_per_value is nan, it must be positive and finite"),
        (lambda s: longest_context(s, 1, float("inf")), "budget is inf, it must be a finite number of bytes"),
        (lambda s: longest_context(s, 1, float("nan")), "budget is nan, it must be a finite number of bytes"),
    ],
)
def test_a_bad_count_is_named(call, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call(ModelShape.of(CONFIG))
    assert str(raised.value) == message
