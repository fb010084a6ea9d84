"""Attention with split keys equals attention, for any split; the model decodes with it; and how cores are filled."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.attention import attend, visible
from gptlite.cache.dense import DynamicCache
from gptlite.config import preset
from gptlite.generate import decode_step, prefill
from gptlite.model import GPTlite
from gptlite.variants import split_kv
from gptlite.variants.split_kv import SplitKVAttention, even_splits, merge_all, partial_states, split_attend, waves
from gptlite.variants.swap import swap_attention


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(q, k, v, mask):
    """In fp64 over the whole matrix, written out."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    weights = torch.where(mask, (q @ k.mT / math.sqrt(q.shape[-1])).exp(), 0.0)
    l = weights.sum(-1, keepdim=True)
    return weights @ v / l.where(l > 0, 1.0)


@pytest.mark.parametrize(
    ("T", "n", "sizes"), [(10, 3, [4, 3, 3]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (7, 1, [7]), (8, 4, [2] * 4)]
)
def test_even_splits(T, n, sizes):
    assert even_splits(T, n) == sizes


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),  # with empty parts
    S=st.integers(1, 4),
    seed=st.integers(0, 2**20),
    shared=st.sampled_from([1, 3]),
    hidden=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_split_equals_attention_in_fp64(sizes, S, seed, shared, hidden):
    """fp32 within 2e-6 of the largest value of attention in fp64."""
    B, G, D, T = 2, 2, 8, sum(sizes)
    q, k, v = randn(B, G * shared, S, D, seed=seed), randn(B, G, T, D, seed=seed + 1), randn(B, G, T, 8, seed=seed + 2)
    q, k, v = q.float(), k.float(), v.float()
    mask = torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(seed)) >= hidden
    out = split_attend(q, k, v, sizes, mask)
    expected = reference(q.double(), k.double(), v.double(), mask)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(5)), seed=st.integers(0, 2**20))
def test_the_order_of_the_parts_does_not_matter(order, seed):
    q, k = randn(1, 2, 1, 4, seed=seed), randn(1, 2, 11, 4, seed=seed + 1)
    mask = torch.ones(1, 1, 1, 11, dtype=torch.bool)
    mask[..., 4:7] = False  # a part that nothing sees
    states = partial_states(q, k, k, [4, 3, 0, 2, 2], mask)
    assert torch.equal(states[1][1], torch.full((1, 2, 1), -math.inf, dtype=torch.float64))
    out, lse = merge_all([states[i] for i in order])
    expected, expected_lse = attend(q, k, k, mask, need_lse=True)
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-14, rtol=0)


def test_a_part_says_how_much_of_the_softmax_it_holds():
    """Two keys with scores 0 and ln 3: a quarter and three quarters."""
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3)]]]])
    v = torch.tensor([[[[8.0], [4.0]]]])
    states = partial_states(q, k, v, [1, 1])
    assert [float(out) for out, _ in states] == [8.0, 4.0]
    assert [round(float(lse.exp()), 6) for _, lse in states] == [1.0, 3.0]
    assert float(merge_all(states)[0]) == pytest.approx(0.25 * 8 + 0.75 * 4)


def test_the_merge_is_not_rounded_to_bf16_in_between():
    q, k, v = (randn(1, 1, n, 16, seed=n).bfloat16() for n in (1, 64, 64))
    many = split_attend(q, k, v, [1] * 64)
    assert many.dtype == torch.bfloat16
    exact = reference(q.double(), k.double(), v.double(), torch.ones(1, 1, 1, 64, dtype=torch.bool))
    torch.testing.assert_close(many.double(), exact, atol=0, rtol=2**-8)  # one rounding


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: even_splits(3, 0), "n_splits is 0"),
        (lambda: even_splits(-3, 2), "n_keys is -3"),
        (lambda: split_attend(*[torch.zeros(1, 1, 0, 2)] * 3, []), r"sizes is \[\]"),
        (lambda: merge_all([]), "states is empty"),
        (lambda: waves(0, 132), "n_blocks is 0"),
        (lambda: waves(3, 0), "n_cores 0"),
        (lambda: split_attend(*[torch.zeros(1, 1, 4, 2)] * 3, [1, 2]), r"sizes is \[1, 2\]"),
        (lambda: split_attend(*[torch.zeros(1, 1, 4, 2)] * 3, [5, -1]), r"sizes is \[5, -1\]"),
        (lambda: SplitKVAttention.of(GPTlite(preset("nano")).blocks[0].mha, 0), "n_splits is 0"),
    ],
)
def test_bad_splits_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("n_splits", [1, 3, 40])
def test_the_model_decodes_with_split_keys(n_splits, monkeypatch):
    torch.manual_seed(0)
    plain = GPTlite(preset("nano", n_heads=4, n_kv_heads=2, d_head=8, d_model=24)).double().eval()
    split = swap_attention(copy.deepcopy(plain), lambda mha: SplitKVAttention.of(mha, n_splits))
    calls, real = [], split_kv.split_attend
    monkeypatch.setattr(split_kv, "split_attend", lambda *args: calls.append(args[3]) or real(*args))
    tokens = torch.randint(0, 20, (2, 18), generator=torch.Generator().manual_seed(0))
    logits = []
    for model in (plain, split):
        cache = DynamicCache(model)
        prefill(model, tokens[:, :17], cache)
        if model is split:
            assert not calls  # 17 queries are no decode step
        logits.append(decode_step(model, tokens[:, 17], cache))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-12, rtol=0)
    assert calls == [even_splits(18, n_splits)] * plain.config.n_layers


def test_waves_of_blocks():
    assert waves(32, 132) == (1, 32 / 132)
    assert waves(132, 132) == (1, 1.0)
    assert waves(133, 132) == (2, 133 / 264)


def test_visible_and_split_agree_on_a_cache_with_holes():
    q_pos, k_pos = torch.tensor([[5]]), torch.tensor([[0, -1, 2, 3, -1, 5]])
    q, k, v = randn(1, 2, 1, 4), randn(1, 1, 6, 4, seed=1), randn(1, 1, 6, 4, seed=2)
    mask = visible(q_pos, k_pos)
    torch.testing.assert_close(split_attend(q, k, v, [2, 2, 2], mask), reference(q, k, v, mask), atol=1e-14, rtol=0)
