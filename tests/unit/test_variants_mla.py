"""Latent attention: absorbed against expanded and against plain attention with the same weights, and conversion."""

import itertools
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import gptlite
from gptlite.arithmetic import decode_costs, kv_bytes_per_token
from gptlite.attention import attend, visible
from gptlite.cache.contract import whole_batch
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import GPTConfig
from gptlite.generate import decode_step, generate, prefill
from gptlite.measure import count_work
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.variants.low_rank import factorize, input_moments
from gptlite.variants.mla import LatentAttention, compress, latent_shape, to_latent

H, D, WIDTH, CONTEXT = 6, 4, 20, 16
TOKENS = torch.randint(23, (3, 14), generator=torch.Generator().manual_seed(2))


def make_model(dtype: torch.dtype = torch.float64, n_kv_heads: int = H) -> GPTlite:
    torch.manual_seed(1)
    config = GPTConfig(23, CONTEXT, n_layers=2, d_model=WIDTH, n_heads=H, d_head=D, n_kv_heads=n_kv_heads)
    model = GPTlite(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_attention(d_latent: int, dtype: torch.dtype = torch.float64) -> LatentAttention:
    torch.manual_seed(3)
    mha = LatentAttention(GPTConfig(1, 1, 1, WIDTH, H, D), d_latent).to(dtype).eval()
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mha


@torch.no_grad()
def logits(model: GPTlite) -> Tensor:
    return model(TOKENS)


def set_absorb(model: GPTlite, absorb: bool | None) -> GPTlite:
    for block in model.blocks:
        block.mha.absorb = absorb
    return model


# -- the attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_latent", [1, 3, 20, 33])
@pytest.mark.parametrize(("S", "T"), [(1, 1), (1, 9), (5, 9), (9, 9)])
def test_absorbed_equals_expanded(d_latent: int, S: int, T: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        mha = make_attention(d_latent, dtype)
        q, c = torch.randn(2, H, S, D, dtype=dtype), torch.randn(2, 1, T, d_latent, dtype=dtype)
        k_pos = torch.arange(T).repeat(2, 1)
        k_pos[1, : T // 2] = -1  # holes in one row
        mask = visible(torch.arange(T - S, T).expand(2, S), k_pos)
        with torch.no_grad():
            one, other = mha.absorbed(q, c, mask), mha.expanded(q, c, mask)
        assert one.shape == (2, H, S, D)
        # fp32: outputs of about one, sums of d_latent and D products
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_latent_attention_is_plain_attention_with_the_effective_weights() -> None:
    """W_K = W_uk W_down, W_V = W_uv W_down in every head: written as loops over heads and positions."""
    mha = make_attention(3)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        out = mha(x, [whole_batch(torch.arange(7)[None])], None, 0)
        w_k = (mha.key_up.weight @ mha.latent_proj.weight).unflatten(0, (H, D))
        w_v = (mha.value_up.weight @ mha.latent_proj.weight).unflatten(0, (H, D))
        q = mha.query_proj(x).unflatten(-1, (H, D))
        rows = []
        for t in range(7):
            heads = []
            for h in range(H):
                scores = torch.stack([q[t, h] @ (w_k[h] @ x[s]) / D**0.5 for s in range(t + 1)])
                weights = scores.softmax(0)
                heads.append(sum(weights[s] * (w_v[h] @ x[s]) for s in range(t + 1)))
            rows.append(mha.out_proj(torch.cat(heads)))
    torch.testing.assert_close(out, torch.stack(rows), rtol=0, atol=1e-12)


def test_the_scale_is_that_of_the_head_and_not_of_the_latent() -> None:
    mha = make_attention(16)
    assert mha.scale == D**-0.5
    q, c = torch.randn(1, H, 1, D, dtype=torch.float64), torch.randn(1, 1, 5, 16, dtype=torch.float64)
    w_uk, w_uv = (up.weight.unflatten(0, (H, D)) for up in (mha.key_up, mha.value_up))
    with torch.no_grad():
        right, wrong = (attend(q @ w_uk, c, c, None, scale) @ w_uv.mT for scale in (D**-0.5, 16**-0.5))
        found = mha.absorbed(q, c, None)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    assert (found - wrong).abs().max() > 1e-2


def test_one_new_token_is_absorbed_and_more_are_expanded() -> None:
    mha = make_attention(5)
    asked = []
    mha.absorbed = lambda q, c, mask: asked.append("absorbed") or q  # type: ignore[method-assign]
    mha.expanded = lambda q, c, mask: asked.append("expanded") or q  # type: ignore[method-assign]
    for absorb, S in itertools.product((None, True, False), (1, 2)):
        mha.absorb = absorb
        mha.mix(torch.ones(1, H, S, D), torch.ones(1, 1, 2, 5), None, None, None, None)  # type: ignore[arg-type]
    assert asked == ["absorbed", "expanded", "absorbed", "absorbed", "expanded", "expanded"]


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    mha = make_attention(5, torch.float32)
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    for form in (mha.absorbed, mha.expanded):
        assert torch.equal(form(torch.randn(1, H, 2, D), torch.randn(1, 1, 3, 5), mask), torch.zeros(1, H, 2, D))


def test_gradients_of_both_forms_agree() -> None:
    q, c = torch.randn(1, H, 4, D, dtype=torch.float64), torch.randn(1, 1, 4, 5, dtype=torch.float64)
    found = []
    for name in ("absorbed", "expanded"):
        mha = make_attention(5)
        getattr(mha, name)(q, c, None).square().sum().backward()
        found.append([mha.key_up.weight.grad, mha.value_up.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# -- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absorb", [None, True, False])
def test_the_cache_holds_one_latent_per_token_and_nothing_else(absorb: bool | None) -> None:
    model = set_absorb(to_latent(make_model(), 7), absorb)
    dynamic, static = DynamicCache(model), StaticCache(model, 3, CONTEXT, bucket=1)
    want = generate(model, TOKENS[:, :5], 6, SamplingParams(0))
    for cache in (dynamic, static):
        assert torch.equal(generate(model, TOKENS[:, :5], 6, SamplingParams(0), cache), want)
    assert [tuple(layer.shape) for layer in dynamic.k[0]] == [(1, 10, 7)] * 2
    assert [layer.numel() for layer in dynamic.v[0]] == [0, 0]
    assert [tuple(layer.shape) for layer in static.k] == [(3, 1, CONTEXT + 1, 7)] * 2
    assert [layer.numel() for layer in static.v] == [0, 0]
    assert dynamic.nbytes == 2 * 3 * 10 * 7 * 8  # layers, rows, tokens, r, bytes


def test_chunks_forks_and_exports_work_on_latents() -> None:
    model = to_latent(make_model(), 7)
    whole = logits(model)
    for make in (DynamicCache, lambda m: StaticCache(m, 4, CONTEXT, bucket=4)):
        cache = make(model)
        prefill(model, TOKENS[:, :9], cache, chunk=4)
        cache.fork(0, "other")
        state = cache.export(0)
        assert {name: tuple(t.shape) for name, t in state.items() if name != "k_pos"} == {
            "k.0": (1, 9, 7), "v.0": (1, 9, 0), "k.1": (1, 9, 7), "v.1": (1, 9, 0)
        }  # fmt: skip
        cache.free(0)
        cache.load(0, state)
        found = decode_step(model, TOKENS[:, 9], cache)
        torch.testing.assert_close(found, whole[:, 9], rtol=0, atol=1e-10)
        cache.keep([0, 1, 2], [0, 1, 1])
        assert [cache.next_position(key) for key in (0, 1, "other")] == [9, 10, 9]


# -- the conversion -----------------------------------------------------------------------------------------------


def test_full_rank_is_the_same_model_whatever_the_heads_and_biases() -> None:
    for n_kv_heads in (6, 2, 1):
        model = make_model(n_kv_heads=n_kv_heads)
        full = min(2 * n_kv_heads * D, WIDTH)
        for moments in (None, input_moments(model, TOKENS.flatten(), 2)):
            for absorb in (True, False):
                converted = set_absorb(to_latent(model, full, moments), absorb)
                torch.testing.assert_close(logits(converted), logits(model), rtol=0, atol=1e-8)


def test_full_rank_reproduces_the_trained_model() -> None:
    model, tokenizer = gptlite.load("gptlite")
    tokens = tokenizer.encode("ROMEO:\nBut soft, what light through yonder window breaks?")[None]
    with torch.no_grad():
        want = model(tokens)
        for absorb in (True, False):
            found = set_absorb(to_latent(model, 256), absorb)(tokens)
            torch.testing.assert_close(found, want, rtol=0, atol=1e-4)


def test_the_bias_of_the_keys_changes_nothing() -> None:
    """Why the latent needs none: it adds the same to every score of a query."""
    model = make_model()
    want = logits(model)
    for block in model.blocks:
        torch.nn.init.normal_(block.mha.key_proj.bias, std=5.0)
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-10)


def test_a_cut_singular_value_is_the_error_of_the_weights() -> None:
    weight = torch.randn(9, 6, dtype=torch.float64)
    singular = torch.linalg.svdvals(weight)
    for rank in range(1, 7):
        up, down = factorize(weight, rank)
        assert (up.shape, down.shape) == ((9, rank), (rank, 6))
        error = torch.linalg.matrix_norm(weight - up @ down)
        torch.testing.assert_close(error, singular[rank:].square().sum().sqrt(), rtol=0, atol=1e-10)
        torch.testing.assert_close(up.T @ up, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-10)


def test_factors_for_the_data_lose_least_on_the_data() -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 6, dtype=torch.float64)
    x = torch.randn(500, 6, dtype=torch.float64) * torch.tensor([5, 1, 0.1, 2, 0.5, 3]) + torch.randn(6)
    covariance = x.T.cov(correction=0)
    centred = x - x.mean(0)

    def error(up: Tensor, down: Tensor) -> float:
        return (centred @ (weight - up @ down).T).square().sum().item()

    for rank in (1, 2, 4):
        best = error(*factorize(weight, rank, covariance))
        assert best < error(*factorize(weight, rank))
        # independent: what principal components leave is the sum of the smallest variances of the outputs
        variances = torch.linalg.eigvalsh(weight @ covariance @ weight.T).flip(0)
        assert best == pytest.approx(500 * variances[rank:].sum().item(), rel=1e-5)
        for _ in range(20):  # and no other factors of that rank do better
            other = torch.linalg.qr(torch.randn(9, rank, dtype=torch.float64)).Q
            assert best < error(other, other.T @ weight)


def test_the_moments_are_those_of_the_attention_s_inputs() -> None:
    model = make_model()
    seen: list[list[Tensor]] = [[], []]
    for layer, block in enumerate(model.blocks):
        block.ln1.register_forward_hook(lambda module, args, out, layer=layer: seen[layer].append(out.detach()))
    text = TOKENS.flatten()
    moments = input_moments(model, text, batch_size=2)
    for found, parts in zip(moments, seen, strict=True):
        x = torch.cat(parts)
        assert len(x) == len(text) // CONTEXT * CONTEXT
        torch.testing.assert_close(found.mean, x.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(found.covariance, x.T.cov(correction=0), rtol=0, atol=1e-12)
    assert not any(block.mha._forward_pre_hooks for block in model.blocks)


def test_the_mean_of_what_is_left_out_goes_into_the_bias() -> None:
    """With one token of context the weights are one, so the mean over tokens of the output is exactly kept."""
    mha = make_model().blocks[0].mha
    x = torch.randn(200, WIDTH, dtype=torch.float64) + 2
    moments = type("M", (), {"mean": x.mean(0), "covariance": x.T.cov(correction=0)})()
    alone = [whole_batch(torch.zeros(200, 1, dtype=torch.int64))]
    with torch.no_grad():
        want = mha(x, alone, None, 0).mean(0)
        aware, blind = (compress(mha, 3, m)(x, alone, None, 0).mean(0) for m in (moments, None))
    torch.testing.assert_close(aware, want, rtol=0, atol=1e-10)
    assert (blind - want).abs().max() > 1e-2


def test_the_old_model_is_left_as_it_was_and_shares_nothing() -> None:
    model = make_model()
    before = deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in to_latent(model, 5, input_moments(model, TOKENS.flatten(), 2)).parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


# -- arithmetic ---------------------------------------------------------------------------------------------------


def test_bytes_and_flops_of_a_decode_step_are_those_of_the_arithmetic() -> None:
    model = to_latent(make_model(torch.float32), 7)
    shape = latent_shape(model.config, 7)
    assert shape.kind == "MLA"
    assert kv_bytes_per_token(shape, 4) == 2 * 7 * 4
    cache = DynamicCache(model)
    prefill(model, TOKENS[:, :9], cache)
    with torch.inference_mode(), count_work() as work:
        decode_step(model, TOKENS[:, 9], cache)
    costs = decode_costs(shape, 3, 10, computed=True)
    assert work.flops == sum(cost.flops for cost in costs.values())


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_latent", [0, -3, 21])
def test_a_latent_out_of_range_is_refused(d_latent: int) -> None:
    with pytest.raises(ValueError, match=f"d_latent is {d_latent}, it must be 1 to 20"):
        to_latent(make_model(), d_latent)


def test_other_bad_arguments_are_named() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="d_latent is 0"):
        LatentAttention(model.config, 0)
    with pytest.raises(ValueError, match="moments are given for 1 blocks, the model has 2"):
        to_latent(model, 5, input_moments(model, TOKENS.flatten())[:1])
    with pytest.raises(ValueError, match="rank is 7, it must be 1 to 6"):
        factorize(torch.ones(9, 6), 7)
    with pytest.raises(ValueError, match="the text has 5 tokens, at least a window of 16"):
        input_moments(model, TOKENS.flatten()[:5])
