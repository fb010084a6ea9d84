"""Fewer KV heads: what pooling and factorising give, against the model itself, hand-worked heads and enumeration."""

from copy import deepcopy

import pytest
import torch

import gptlite
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.variants.grouped import factor_groups, factor_heads, pool_heads, to_grouped
from gptlite.variants.low_rank import input_moments
from gptlite.variants.swap import swap_attention

TOKENS = torch.randint(23, (3, 14), generator=torch.Generator().manual_seed(2))


def make_model(n_kv_heads: int = 6, dtype: torch.dtype = torch.float64) -> GPTlite:
    """Six heads of 4 on a width of 20, with weights and biases large enough for sharp attention."""
    torch.manual_seed(1)
    config = GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=n_kv_heads)
    model = GPTlite(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def logits(model: GPTlite) -> torch.Tensor:
    return model(TOKENS)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_as_many_groups_as_heads_are_the_same_model_bit_for_bit(pooling: str) -> None:
    for n_kv_heads in (6, 3):
        model = make_model(n_kv_heads, torch.float32)
        assert torch.equal(logits(to_grouped(model, n_kv_heads, pooling)), logits(model))


def test_the_trained_model_with_8_groups_is_itself_bit_for_bit() -> None:
    model, tokenizer = gptlite.load("gptlite")
    tokens = tokenizer.encode("ROMEO:\nBut soft, what light through yonder window breaks?")[None]
    with torch.no_grad():
        assert torch.equal(to_grouped(model, 8)(tokens), model(tokens))


def test_a_grouped_model_is_the_multi_head_model_whose_heads_of_a_group_agree() -> None:
    """An independent way to GQA: write each group's key and value head into all of its members."""
    for n_kv_heads in (3, 2, 1):
        grouped = make_model(n_kv_heads)
        plain = make_model(6)
        weights = deepcopy(grouped.state_dict())
        for name, weight in grouped.state_dict().items():
            if "key_proj" in name or "value_proj" in name:
                heads = [weight[4 * (h // (6 // n_kv_heads)) : 4 * (h // (6 // n_kv_heads)) + 4] for h in range(6)]
                weights[name] = torch.cat(heads)
        plain.load_state_dict(weights)
        torch.testing.assert_close(logits(grouped), logits(plain), rtol=0, atol=1e-12)
        # and pooling it back finds the heads again, whatever the pooling
        for pooling in ("mean", "first"):
            torch.testing.assert_close(
                logits(to_grouped(plain, n_kv_heads, pooling)), logits(grouped), rtol=0, atol=1e-12
            )


def test_pooling_by_hand() -> None:
    """Two groups of two heads of size one: the numbers are worked out on paper."""
    mha = GPTlite(GPTConfig(5, 4, n_layers=1, d_model=2, n_heads=4, d_head=1)).blocks[0].mha
    mha.key_proj.weight.data = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 8.0], [4.0, 0.0]])
    mha.value_proj.bias.data = torch.tensor([1.0, 2.0, -3.0, 3.0])
    mean, first = pool_heads(mha, 2, "mean"), pool_heads(mha, 2, "first")
    assert mean.key_proj.weight.tolist() == [[2.0, 1.0], [2.0, 4.0]]
    assert mean.value_proj.bias.tolist() == [1.5, 0.0]
    assert first.key_proj.weight.tolist() == [[1.0, 0.0], [0.0, 8.0]]
    assert first.value_proj.bias.tolist() == [1.0, -3.0]


def test_mean_pooling_by_hand_where_a_head_has_two_numbers() -> None:
    """Heads 0 and 1 are the first group, 2 and 3 the second, and a head's numbers keep their order."""
    mha = GPTlite(GPTConfig(5, 4, n_layers=1, d_model=1, n_heads=4, d_head=2)).blocks[0].mha
    rows = torch.tensor([1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 14.0, 40.0])  # of heads 0, 0, 1, 1, 2, 2, 3, 3
    for proj in (mha.key_proj, mha.value_proj):
        proj.weight.data, proj.bias.data = rows[:, None].clone(), -rows
    for n_kv_heads, means in ((2, [2.0, 4.0, 12.0, 30.0]), (1, [7.0, 17.0])):
        pooled = pool_heads(mha, n_kv_heads, "mean")
        for proj in (pooled.key_proj, pooled.value_proj):
            assert proj.weight.flatten().tolist() == means
            assert proj.bias.tolist() == [-mean for mean in means]


def test_random_pooling_depends_on_its_seed_alone_and_has_the_spread_of_the_old_weights() -> None:
    mha = make_model().blocks[0].mha
    one, same, other = (pool_heads(mha, 2, "random", seed).key_proj.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.7 < one.std() / mha.key_proj.weight.std() < 1.3


def test_the_old_model_is_left_as_it_was_and_shares_nothing() -> None:
    model = make_model()
    before = deepcopy(model.state_dict())
    converted = [to_grouped(model, 2), factor_groups(model, 2, input_moments(model, TOKENS.flatten(), 2))]
    with torch.no_grad():
        for new in converted:
            for parameter in new.parameters():
                parameter.zero_()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("n_kv_heads", [3, 2, 1])
def test_a_converted_model_caches_g_heads_and_no_more(n_kv_heads: int) -> None:
    model = to_grouped(make_model(), n_kv_heads)
    assert model.config.n_kv_heads == n_kv_heads
    dynamic, static = DynamicCache(model), StaticCache(model, 3, 16, bucket=1)
    want = generate(model, TOKENS[:, :5], 6, SamplingParams(0))
    for cache in (dynamic, static):
        assert torch.equal(generate(model, TOKENS[:, :5], 6, SamplingParams(0), cache), want)
    # 10 tokens were read, the last new one was not
    assert [tuple(layer.shape) for layer in dynamic.k[0] + dynamic.v[0]] == [(n_kv_heads, 10, 4)] * 4
    assert [tuple(layer.shape) for layer in static.k + static.v] == [(3, n_kv_heads, 17, 4)] * 4
    assert dynamic.nbytes == 2 * 2 * 3 * n_kv_heads * 10 * 4 * 8  # k and v, layers, rows, heads, tokens, size, bytes


# -- factors ------------------------------------------------------------------------------------------------------


def test_factors_are_exact_where_nothing_is_lost() -> None:
    """As many groups as heads, or heads of a group that span a space of one head's size."""
    model = make_model()
    moments = input_moments(model, TOKENS.flatten(), 2)
    for known in (None, moments):
        torch.testing.assert_close(logits(factor_groups(model, 6, known)), logits(model), rtol=0, atol=1e-9)
    turned = make_model()
    for block in turned.blocks:
        for proj in (block.mha.key_proj, block.mha.value_proj):
            for group in range(2):  # heads 1 and 2 of each group are head 0, mixed by any matrix
                head = proj.weight.data[12 * group : 12 * group + 4]
                for member in (1, 2):
                    proj.weight.data[12 * group + 4 * member :][:4] = torch.randn(4, 4, dtype=torch.float64) @ head
    for known in (None, input_moments(turned, TOKENS.flatten(), 2)):
        torch.testing.assert_close(logits(factor_groups(turned, 2, known)), logits(turned), rtol=0, atol=1e-9)
    with pytest.raises(AssertionError):  # where pooling is not
        torch.testing.assert_close(logits(to_grouped(turned, 2)), logits(turned), rtol=0, atol=1e-3)


def test_factors_work_on_a_model_that_has_groups_already() -> None:
    model = make_model(n_kv_heads=3)
    torch.testing.assert_close(logits(factor_groups(model, 3)), logits(model), rtol=0, atol=1e-9)
    assert logits(factor_groups(model, 1)).isfinite().all()


def test_factors_for_the_data_keep_more_of_the_trained_model_than_any_pooling() -> None:
    model, tokenizer = gptlite.load("gptlite")
    text = tokenizer.encode(
        "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\nDeny thy father and refuse thy name;\nOr, if thou "
        "wilt not, be but sworn my love,\nAnd I'll no longer be a Capulet.\n\nROMEO:\nShall I hear more?\n"
    )
    moments = input_moments(model, text.repeat(8)[:1024])

    def loss(converted: GPTlite) -> float:
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(converted(text[None, :-1])[0], text[1:]).item()

    by_data = loss(factor_groups(model, 2, moments))
    assert by_data < loss(factor_groups(model, 2)) < loss(to_grouped(model, 2, "random"))
    assert by_data < loss(to_grouped(model, 2, "mean"))


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_heads", [0, -1, 4, 12])
def test_groups_that_do_not_divide_the_heads_are_refused(n_kv_heads: int) -> None:
    model = make_model()
    for call in (lambda: to_grouped(model, n_kv_heads), lambda: factor_groups(model, n_kv_heads)):
        with pytest.raises(ValueError, match=f"n_kv_heads is {n_kv_heads}, it must divide the 6 KV heads"):
            call()


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling is 'max', it must be one of mean, first, random"):
        to_grouped(make_model(), 2, "max")


# -- swap ---------------------------------------------------------------------------------------------------------


def test_a_swap_keeps_window_sinks_and_mode_and_asks_once_per_block() -> None:
    model = make_model()
    for block in model.blocks:
        block.mha.window, block.mha.sinks = 5, 1
    want = logits(model)
    seen = []

    def copied(mha):
        seen.append(mha)
        return pool_heads(mha, 6)

    olds = [block.mha for block in model.blocks]
    assert swap_attention(model, copied) is model
    assert seen == olds
    assert all(block.mha is not old for block, old in zip(model.blocks, olds, strict=True))
    assert [(b.mha.window, b.mha.sinks, b.mha.training) for b in model.blocks] == [(5, 1, False)] * 2
    assert torch.equal(logits(model), want)
    assert factor_heads(model.blocks[0].mha, 2).query_proj.weight.dtype == torch.float64
