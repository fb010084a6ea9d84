"""Attention by tiles against attention in fp64; its gradients; what is skipped; and how large its tensors get."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.attention import attend, visible
from gptlite.cache.block_store import BlockStore
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.cache.paged import PagedCache
from gptlite.cache.radix import RadixStore
from gptlite.cache.reuse import PrefixCache
from gptlite.config import preset
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.variants.flash import FlashAttention, absorb, flash_attend, flash_states, online_softmax
from gptlite.variants.mla import to_latent
from gptlite.variants.split_kv import SplitKVAttention
from gptlite.variants.swap import swap_attention
from gptlite.variants.tiles import EDGE, HIDDEN, WHOLE, causal_tiles, tile_kinds
from gptlite.variants.traffic import largest_tensor


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def small_model(**changes):
    torch.manual_seed(0)
    return GPTlite(preset("nano", n_heads=4, d_head=8, d_model=24, **changes)).double().eval()


# -- the online softmax ---------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-300, 300) | st.just(-math.inf), min_size=1, max_size=30), st.integers(1, 31))
def test_online_softmax_is_the_softmax(scores, tile):
    m, l = online_softmax(torch.tensor(scores, dtype=torch.float64), tile)
    assert float(m) == max(scores)
    seen = [score for score in scores if score > -math.inf]
    expected = math.fsum(math.exp(score - max(seen)) for score in seen)
    assert float(l) == pytest.approx(expected, rel=1e-12)


def test_online_softmax_by_hand():
    """1, 3, 2: the sum begins as 1, becomes exp(-2) + 1, and gains exp(-1)."""
    m, l = online_softmax(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64))
    assert (float(m), float(l)) == (3.0, pytest.approx(math.exp(-2) + 1 + math.exp(-1), abs=1e-15))


def test_scores_far_beyond_exp_stay_finite():
    m, l = online_softmax(torch.tensor([[1e4, 1e4, -1e4]]), 2)
    assert (float(m), float(l)) == (1e4, 2.0)


def test_absorb_rescales_what_was_there():
    m, l, acc = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[5.0]])
    m, l, acc = absorb(m, l, acc, torch.tensor([[math.log(4.0)]]), torch.tensor([[10.0]]))
    torch.testing.assert_close(torch.stack([m, l, acc[:, 0]]), torch.tensor([[math.log(4)], [1.25], [11.25]]))
    assert float(acc / l) == pytest.approx((5 + 40) / 5)  # weights 1 and 4


# -- equal to attention -----------------------------------------------------------------------------------------------


def reference(q, k, v, mask):
    """Attention in fp64 over the whole matrix, written out; no key gives zeros and -inf."""
    H, G = q.shape[1], k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(H // G, 1), v.double().repeat_interleave(H // G, 1)
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(q.shape[-1])
    weights = torch.where(mask, scores.exp(), 0.0)
    l = weights.sum(-1)
    return torch.einsum("bhst,bhtd->bhsd", weights, v) / l.where(l > 0, 1.0)[..., None], l.log()


@st.composite
def calls(draw):
    B, G, shared = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T = draw(st.integers(0, 40))
    S = draw(st.integers(1, max(1, T)))
    return {
        "shape": (B, G, shared, S, T, draw(st.sampled_from([3, 8, 17])), draw(st.sampled_from([8, 12]))),
        "tiles": (draw(st.integers(1, 45)), draw(st.integers(1, 45))),
        "seed": draw(st.integers(0, 2**20)),
        "holes": draw(st.sampled_from([0.0, 0.3, 1.0])),  # 1: every query or key is a hole
        "where": draw(st.sampled_from(["queries", "keys", "both"])),
        "mask": draw(st.sampled_from([None, "one", "KV heads", "heads"])),
        "positions": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 4, 25])),
        "sinks": draw(st.integers(0, 2)),
    }


@settings(max_examples=200, deadline=None)
@given(calls())
def test_tiles_equal_attention_in_fp64(call):
    """fp32 within 2e-6 of the largest value: its rounding, 6e-8, a few dozen times."""
    B, G, shared, S, T, D, Dv = call["shape"]
    H, seed = G * shared, call["seed"]
    q, k, v = randn(B, H, S, D, seed=seed), randn(B, G, T, D, seed=seed + 1), randn(B, G, T, Dv, seed=seed + 2)
    q, k, v = q.float(), k.float(), v.float()
    q_pos, k_pos = torch.arange(T - S, T).repeat(B, 1), torch.arange(T).repeat(B, 1)
    chance = torch.Generator().manual_seed(seed)
    for name, positions in (("queries", q_pos), ("keys", k_pos)):
        if call["where"] in (name, "both"):
            positions[torch.rand(positions.shape, generator=chance) < call["holes"]] = -1
    seen = torch.ones(B, H, S, T, dtype=torch.bool)
    options = {}
    if call["positions"]:
        options = {"q_pos": q_pos, "k_pos": k_pos, "window": call["window"], "sinks": call["sinks"]}
        seen = seen & visible(q_pos, k_pos, call["window"], call["sinks"])
    mask = None
    if call["mask"]:
        mask = randn(B, {"one": 1, "KV heads": G, "heads": H}[call["mask"]], S, T, seed=seed + 3) > 0
        seen = seen & mask.repeat_interleave(H // mask.shape[1], 1)
    out, lse = flash_states(q, k, v, mask, tile_q=call["tiles"][0], tile_k=call["tiles"][1], **options)
    expected, expected_lse = reference(q, k, v, seen)
    assert out.dtype == torch.float32 and out.shape == (B, H, S, Dv)
    assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert torch.equal(lse == -math.inf, ~seen.any(-1))
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)
    assert not out[~seen.any(-1)].any()


def test_long_rows_and_large_scores():
    q, k, v = (randn(1, 2, 700, 64, seed=i).float() for i in range(3))
    pos = torch.arange(700)[None]
    expected, _ = reference(4 * q, k, v, visible(pos, pos))
    out = flash_attend(4 * q, k, v, q_pos=pos, k_pos=pos)
    assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_scale_is_used_and_bf16_comes_back_as_bf16():
    q, k, v = (randn(2, 2, 9, 8, seed=i) for i in range(3))
    torch.testing.assert_close(flash_attend(q, k, v, scale=0.1, tile_k=4), attend(q, k, v, scale=0.1))
    half = flash_attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), tile_k=4)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), attend(q, k, v), atol=3e-2, rtol=3e-2)  # 8 bits of a bf16


def test_keys_that_differ_by_head():
    """An evicting cache holds other tokens in each KV head: k_pos [B, G, T]."""
    q, k, v = randn(1, 4, 3, 8), randn(1, 2, 6, 8, seed=1), randn(1, 2, 6, 8, seed=2)
    q_pos, k_pos = torch.tensor([[5, 6, 7]]), torch.tensor([[[0, 1, 2, 5, 6, 7], [3, -1, -1, 5, 6, 7]]])
    expected = attend(q, k, v, visible(q_pos, k_pos))
    torch.testing.assert_close(flash_attend(q, k, v, q_pos=q_pos, k_pos=k_pos, tile_q=2, tile_k=2), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_q": 0}, "tile_q is 0"),
        ({"tile_k": -1}, "tile_k -1"),
        ({"q_pos": torch.arange(4)[None]}, "q_pos and k_pos come together"),
        ({"q": torch.zeros(1, 3, 4, 8)}, "3 heads, which is not a multiple of the 2 KV heads"),
        ({"q_pos": torch.arange(4)[None], "k_pos": torch.arange(4)[None], "window": 0}, "window is 0"),
        # tiles of one pair are hidden or whole, never masked: what makes no sense is named all the same
        (
            {"q_pos": torch.arange(4)[None], "k_pos": torch.arange(4)[None], "window": -2, "tile_q": 1, "tile_k": 1},
            "-2",
        ),
        ({"q_pos": torch.arange(4)[None], "k_pos": torch.arange(4)[None], "sinks": -1, "tile_q": 1, "tile_k": 1}, "-1"),
        ({"window": 2}, "window is 2, which needs q_pos and k_pos"),
        ({"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)}, r"mask is \[1, 1, 1, 4\], it must be .*, 4, 4\]"),
        ({"mask": torch.ones(1, 3, 4, 4, dtype=torch.bool)}, r"mask is \[1, 3, 4, 4\]"),
        ({"q_pos": torch.arange(4)[None], "k_pos": torch.arange(3)[None]}, "k_pos is for 3 tokens, it must be for 4"),
        ({"v": torch.zeros(1, 2, 6, 8), "tile_k": 4}, "v is for 6 tokens, it must be for 4"),
    ],
)
def test_bad_calls_are_named(change, message):
    call = {"q": torch.zeros(1, 2, 4, 8), "k": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8), **change}
    with pytest.raises(ValueError, match=message):
        flash_attend(**call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: online_softmax(torch.zeros(3), 0), "tile is 0"),
        (lambda: causal_tiles(-1), "n_tiles is -1"),
        (lambda: tile_kinds(torch.arange(3)[None], torch.arange(3)[None], 1, 0), "tile_k 0"),
        (lambda: FlashAttention.of(small_model().blocks[0].mha, 0), "tile_q is 0"),
        (
            lambda: FlashAttention.of(to_latent(small_model(), 4).blocks[0].mha),
            "FlashAttention does not know the keys and values that LatentAttention makes",
        ),
    ],
)
def test_other_bad_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_at_all():
    """No queries, no keys: nothing, and zeros with a log-sum-exp of minus infinity."""
    assert online_softmax(torch.zeros(2, 0))[0].tolist() == [-math.inf] * 2
    q, none = randn(1, 2, 3, 8), randn(1, 2, 0, 8)
    assert flash_attend(none, q, q).shape == (1, 2, 0, 8)
    out, lse = flash_states(q, none, none)
    assert not out.any() and out.shape == q.shape and lse.eq(-math.inf).all()


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", ["nothing", "positions", "a mask with an empty row"])
def test_gradcheck(masked):
    q, k, v = (randn(1, n, size, 3, seed=n).requires_grad_() for n, size in ((4, 5), (2, 7), (1, 7)))
    v = randn(1, 2, 7, 2, seed=9).requires_grad_()
    options, mask = {"tile_q": 2, "tile_k": 3}, None
    if masked == "positions":
        options |= {"q_pos": torch.tensor([[2, 3, -1, 5, 6]]), "k_pos": torch.tensor([[0, 1, -1, 3, 4, 5, 6]])}
    if "mask" in masked:
        mask = randn(1, 2, 5, 7, seed=5) > 0
        mask[:, :, 1] = False

    def both(q, k, v):
        out, lse = flash_states(q, k, v, mask, **options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both, (q, k, v), eps=1e-6, atol=1e-7)


def test_gradients_of_the_model_are_the_plain_ones():
    plain = small_model(n_kv_heads=2)
    flash = swap_attention(copy.deepcopy(plain), lambda mha: FlashAttention.of(mha, 5, 3))
    tokens = torch.randint(0, 20, (2, 13), generator=torch.Generator().manual_seed(0))
    for model in (plain, flash):
        model(tokens)[:, :-1].flatten(0, 1).logsumexp(-1).mean().backward()
    for (name, expected), got in zip(plain.named_parameters(), flash.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-12, rtol=1e-9, msg=name)


# -- which tiles --------------------------------------------------------------------------------------------------


def kinds_by_pairs(mask, tile_q, tile_k):
    """From every pair of the mask [B, 1, S, T]."""
    S, T = mask.shape[-2:]
    rows = []
    for i in range(0, S, tile_q):
        tiles = [mask[..., i : i + tile_q, j : j + tile_k] for j in range(0, T, tile_k)]
        rows.append([HIDDEN if not tile.any() else WHOLE if tile.all() else EDGE for tile in tiles])
    return rows


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 30), st.integers(0, 30), st.integers(1, 12), st.integers(1, 12),
    st.sampled_from([None, 1, 3, 10]), st.integers(0, 2),
)  # fmt: skip
def test_kinds_of_tiles_are_those_of_their_pairs(S, past, tile_q, tile_k, window, sinks):
    """For positions that rise one by one the bounds are exact, but for a sink in the tile, where they are careful."""
    q_pos, k_pos = torch.arange(past, past + S)[None], torch.arange(past + S)[None]
    kinds = tile_kinds(q_pos, k_pos, tile_q, tile_k, window, sinks).tolist()
    exact = kinds_by_pairs(visible(q_pos, k_pos, window, sinks), tile_q, tile_k)
    if sinks and window:
        assert all(a in (b, EDGE) for row, right in zip(kinds, exact) for a, b in zip(row, right))
    else:
        assert kinds == exact


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 7), st.integers(1, 7), st.sampled_from([None, 1, 4]), st.integers(0, 2))
def test_with_holes_and_any_order_no_needed_tile_is_skipped(seed, tile_q, tile_k, window, sinks):
    chance = torch.Generator().manual_seed(seed)
    q_pos = torch.randint(-1, 12, (2, 9), generator=chance)
    k_pos = torch.randint(-1, 12, (2, 3, 11), generator=chance)
    kinds = tile_kinds(q_pos, k_pos, tile_q, tile_k, window, sinks).tolist()
    exact = kinds_by_pairs(visible(q_pos, k_pos, window, sinks), tile_q, tile_k)
    assert all(a in (b, EDGE) for row, right in zip(kinds, exact) for a, b in zip(row, right))


@pytest.mark.parametrize(("t", "tile"), [(1, 4), (4, 4), (8, 2), (16, 16)])
def test_skipped_tiles_of_a_square_have_a_closed_form(t, tile):
    """t by t tiles: t (t - 1) / 2 lie above the diagonal, t on it, t (t - 1) / 2 below."""
    pos = torch.arange(t * tile)[None]
    kinds = tile_kinds(pos, pos, tile, tile).flatten().tolist()
    by_kind = tuple(kinds.count(kind) for kind in (HIDDEN, EDGE, WHOLE))
    assert by_kind == causal_tiles(t) == (t * (t - 1) // 2, t, t * (t - 1) // 2)


def test_skipped_tiles_are_not_computed():
    """10 tiles of 16 for a square; behind 32 cached tokens, 16 queries need all of the old tiles: 8 + 3 of 12."""
    q, k = randn(1, 1, 16, 4), randn(1, 1, 48, 4, seed=1)
    for past, expected in ((0, [(0, 0), (1, 0), (1, 1)]), (32, [(i, j) for i in range(2) for j in range(5 + i)])):
        done: list[tuple[int, int]] = []
        keys = k[:, :, : past + 16]
        q_pos, k_pos = torch.arange(past, past + 16)[None], torch.arange(past + 16)[None]
        flash_attend(
            q,
            keys,
            keys,
            q_pos=q_pos,
            k_pos=k_pos,
            tile_q=8,
            tile_k=8,
            observe=lambda i, j, *_, done=done: done.append((i, j)),
        )
        assert done == expected


def test_the_observer_sees_m_l_and_the_output_grow():
    q, k, v = (randn(1, 2, 6, 4, seed=i) for i in range(3))
    pos, steps = torch.arange(6)[None], []
    out = flash_attend(q, k, v, q_pos=pos, k_pos=pos, tile_q=3, tile_k=2, observe=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    _, _, m, l, acc = steps[2]  # of queries 3 to 5, keys 0 and 1
    scores = q[:, :, 3:] @ k[:, :, :2].mT / 2
    torch.testing.assert_close(m[:, :, 0], scores.amax(-1))
    torch.testing.assert_close(m[:, :, 0] + l[:, :, 0].log(), scores.logsumexp(-1))
    torch.testing.assert_close(acc[:, :, 0] / l[:, :, 0, :, None], scores.softmax(-1) @ v[:, :, :2])
    *_, l, acc = steps[-1]
    torch.testing.assert_close(acc[:, :, 0] / l[:, :, 0, :, None], out[:, :, 3:])


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_no_tensor_is_ever_n_by_n(backward):
    n, D = 320, 8
    q, k, v = (randn(1, 1, n, D, seed=i).requires_grad_(backward) for i in range(3))
    pos = torch.arange(n)[None]

    def run(attention):
        out = attention()
        if backward:
            out.sum().backward()

    tiled = largest_tensor(lambda: run(lambda: flash_attend(q, k, v, q_pos=pos, k_pos=pos, tile_q=32, tile_k=32)))
    assert tiled == n * D  # the inputs and the output are the largest
    plain = largest_tensor(lambda: run(lambda: attend(q, k, v, visible(pos, pos), need_lse=True)[0]))
    assert plain == n * n


def test_a_model_by_tiles_has_no_n_by_n_tensor_either():
    n = 192
    model = small_model(context_length=n, n_kv_heads=2)
    tokens = torch.zeros(1, n, dtype=torch.int64)
    with torch.no_grad():
        plain = largest_tensor(lambda: model(tokens))
        tiled = swap_attention(copy.deepcopy(model), lambda mha: FlashAttention.of(mha, 16, 16))
        assert plain >= n * n > largest_tensor(lambda: tiled(tokens))
        cache = DynamicCache(tiled)
        assert n * n > largest_tensor(lambda: tiled(tokens, cache=cache))


# -- in the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tiles", [(4, 4), (3, 7), (64, 64)])
def test_the_model_gives_the_same_logits(window, tiles):
    plain = small_model(n_kv_heads=2)
    for block in plain.blocks:
        block.mha.window, block.mha.sinks = window, 1 if window else 0
    flash = swap_attention(copy.deepcopy(plain), lambda mha: FlashAttention.of(mha, *tiles))
    tokens = torch.randint(0, 20, (3, 14), generator=torch.Generator().manual_seed(1))
    positions = (torch.arange(14) - torch.tensor([0, 3, 9])[:, None]).clamp(min=-1)  # holes at the left
    real = positions >= 0
    with torch.no_grad():
        expected = plain(tokens, positions)
        torch.testing.assert_close(flash(tokens, positions)[real], expected[real], atol=1e-12, rtol=0)
        for cache in (DynamicCache(flash), StaticCache(flash, 3, 20, bucket=8)):
            parts = [flash(tokens[:, a:b], positions[:, a:b], cache) for a, b in ((0, 6), (6, 7), (7, 14))]
            torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], atol=1e-12, rtol=0)


def test_a_tree_of_drafts_is_masked_too():
    plain = small_model()
    flash = swap_attention(copy.deepcopy(plain), lambda mha: FlashAttention.of(mha, 2, 3))
    logits = []
    for model in (plain, flash):
        cache = DynamicCache(model)
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3, 4]]), cache=cache)
            tokens, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([[4, 5, 5, 6]])
            segments = cache.prepare([0], positions, parents=[[-1, 0, 0, 1]], tokens=tokens)
            logits.append(model.head(model.run(tokens, segments, cache)))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-12, rtol=0)


CACHES = {
    "dynamic": DynamicCache,
    "static": lambda model: StaticCache(model, 2, 48, bucket=16),
    "prefix, blocks": lambda model: PrefixCache(model, 2, 48, BlockStore(6, 4), bucket=16),
    "prefix, radix tree": lambda model: PrefixCache(model, 2, 48, RadixStore(30), bucket=16),
    "paged": lambda model: PagedCache(model, 64),
    "paged, prefix caching": lambda model: PagedCache(model, 64, 3, True, pages_per_split=2),
}


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (5, 0), (5, 2), (1, 0)])
@pytest.mark.parametrize("kind", [lambda mha: FlashAttention.of(mha, 3, 4), lambda mha: SplitKVAttention.of(mha, 3)])
@pytest.mark.parametrize("name", CACHES)
def test_with_every_cache_it_is_the_plain_model(name, kind, window, sinks):
    """Without a mask of the step: chunks of two sequences, holes, trees, blocks that another prompt left, a fork."""
    plain = small_model(n_kv_heads=2, context_length=48)
    for block in plain.blocks:
        block.mha.window, block.mha.sinks = window, sinks
    variant = swap_attention(copy.deepcopy(plain), kind)
    caches = {model: CACHES[name](model) for model in (plain, variant)}
    text = torch.randint(0, 20, (20,), generator=torch.Generator().manual_seed(0))

    def step(sequences, positions, tokens, parents=None):
        logits = []
        for model, cache in caches.items():
            segments = cache.prepare(sequences, positions, parents, tokens)
            with torch.no_grad():
                logits.append(model.head(model.run(tokens, segments, cache)))
        real = torch.cat([row.flatten() for row in positions]) >= 0
        torch.testing.assert_close(logits[1][real], logits[0][real], atol=1e-12, rtol=0)

    def both(method, *args):
        results = [getattr(cache, method)(*args) for cache in caches.values()]
        assert results[0] == results[1]
        return results[0]

    step(["a"], torch.arange(9)[None], text[:9])
    step(["a", "b"], [torch.arange(9, 12), torch.arange(7)], torch.cat([text[9:12], text[:7]]))
    step(["a", "b"], torch.tensor([[-1, 12], [7, 8]]), text[:4])
    step(["a", "b"], torch.tensor([[13, 14, 14, 15], [9, 10, 10, 10]]), text[:8], [[-1, 0, 0, 2], [-1, 0, 0, 0]])
    both("keep", ["a", "b"], [[0, 2, 3], [0, 3]])
    step(["a", "b"], torch.tensor([[16], [11]]), text[:2])
    both("free", "b")
    n = both("begin", "c", text[:12])
    step(["c", "a"], [torch.arange(n, 12), torch.tensor([17])], text[n:13])
    both("free", "a")
    both("fork", "c", "d")
    step(["c", "d"], torch.tensor([[12, 13], [12, 13]]), text[:4])


def test_the_same_text_and_shared_weights():
    plain = small_model()
    tokens = torch.tensor([[1, 2, 3]])
    expected = generate(plain, tokens, 20, SamplingParams(0), DynamicCache(plain))
    weight = plain.blocks[0].mha.query_proj.weight
    old = plain.blocks[0].mha
    flash = swap_attention(plain, FlashAttention.of)
    assert type(flash.blocks[0].mha) is FlashAttention and flash.blocks[0].mha.query_proj.weight is weight
    assert type(old) is not FlashAttention  # the old layer stays what it was
    assert torch.equal(generate(flash, tokens, 20, SamplingParams(0), DynamicCache(flash)), expected)
