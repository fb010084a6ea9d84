"""The three functions of attention, against loops in fp64 that share no line with them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.attention import attend, merge_states, visible

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seen_by_loop(q_pos, k_pos, window, sinks):
    """The rule of visibility, word by word, for one query and one key."""
    if q_pos == -1 or k_pos == -1:
        return False
    if k_pos > q_pos:
        return False
    return window is None or q_pos - k_pos <= window - 1 or k_pos < sinks


def attend_by_loop(q, k, v, mask, scale=None):
    """Softmax attention over python floats: out [B, H, S, Dv] and lse [B, H, S]."""
    B, H, S, D = q.shape
    G, T, Dv = k.shape[1], k.shape[2], v.shape[3]
    out = torch.zeros(B, H, S, Dv, dtype=torch.float64)
    lse = torch.full((B, H, S), -math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h * G // H
            for s in range(S):
                scores = {}
                for t in range(T):
                    if mask is None or mask[b, 0 if mask.shape[1] == 1 else g, s, t]:
                        dot = sum(float(q[b, h, s, i]) * float(k[b, g, t, i]) for i in range(D))
                        scores[t] = dot * (1 / math.sqrt(D) if scale is None else scale)
                if scores:
                    total = sum(math.exp(score) for score in scores.values())
                    lse[b, h, s] = math.log(total)
                    for t, score in scores.items():
                        out[b, h, s] += math.exp(score) / total * v[b, g, t].double()
    return out, lse


positions = st.integers(-1, 7)


@settings(max_examples=60, deadline=None)
@given(
    q_pos=st.lists(st.lists(positions, min_size=3, max_size=3), min_size=1, max_size=2),
    k_pos=st.data(),
    grouped=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5]),
    sinks=st.integers(0, 3),
)
def test_visible_is_the_rule_for_each_pair(q_pos, k_pos, grouped, window, sinks):
    B, G, T = len(q_pos), 2, 4
    row = st.lists(positions, min_size=T, max_size=T)
    keys = k_pos.draw(st.lists(st.lists(row, min_size=G, max_size=G) if grouped else row, min_size=B, max_size=B))
    mask = visible(torch.tensor(q_pos), torch.tensor(keys), window, sinks)
    assert mask.dtype == torch.bool
    assert mask.shape == (B, G if grouped else 1, 3, T)
    for b in range(B):
        for g in range(mask.shape[1]):
            for s in range(3):
                for t in range(T):
                    key = keys[b][g][t] if grouped else keys[b][t]
                    assert bool(mask[b, g, s, t]) == seen_by_loop(q_pos[b][s], key, window, sinks)


def test_a_window_of_w_is_w_keys_with_the_query_itself():
    pos = torch.arange(10)[None]
    for window in (1, 2, 4):
        assert visible(pos, pos, window).sum(-1)[0, 0].tolist() == [min(i + 1, window) for i in range(10)]
    with_sinks = visible(pos, pos, window=2, sinks=3)[0, 0, 9]
    assert with_sinks.nonzero().flatten().tolist() == [0, 1, 2, 8, 9]


@pytest.mark.parametrize(("window", "sinks", "message"), [(0, 0, "window is 0"), (-2, 0, "window"), (4, -1, "sinks")])
def test_bad_windows_are_named(window, sinks, message):
    pos = torch.arange(3)[None]
    with pytest.raises(ValueError, match=message):
        visible(pos, pos, window, sinks)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("masked", ["nothing", "one for all heads", "one per KV head"])
def test_attend_is_softmax_attention(need_lse, dtype, G, masked):
    B, H, S, T, D, Dv = 2, 4, 3, 5, 6, 7
    q, k, v = (
        randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(B, H, S, D), (B, G, T, D), (B, G, T, Dv)])
    )
    mask = None
    if masked != "nothing":
        mask = randn(B, G if "KV" in masked else 1, S, T, seed=9) > 0
        mask[0, :, 1] = False  # a query that sees nothing
    expected, expected_lse = attend_by_loop(q, k, v, mask)
    if need_lse:
        out, lse = attend(q, k, v, mask, need_lse=True)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)
    else:
        out = attend(q, k, v, mask)
    assert out.dtype == dtype
    assert out.shape == (B, H, S, Dv)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_scale_is_one_over_the_root_of_the_head_size_unless_given():
    q, k, v = randn(1, 2, 3, 6, seed=1), randn(1, 1, 4, 6, seed=2), randn(1, 1, 4, 5, seed=3)
    for scale in (None, 0.3):
        expected, _ = attend_by_loop(q, k, v, None, scale)
        torch.testing.assert_close(attend(q, k, v, scale=scale), expected)
        torch.testing.assert_close(attend(q, k, v, scale=scale, need_lse=True)[0], expected)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_query_that_sees_nothing_gives_zeros_whatever_the_keys_hold(need_lse, dtype):
    q, k, v = (randn(2, 2, 3, 4, dtype=dtype, seed=i) for i in range(3))
    big = torch.finfo(dtype).max / 1e3
    q[0, :, 1], k[:, :, 2], v[:, :, 2] = big**0.5, -(big**0.5), big  # garbage where the holes are
    q_pos, k_pos = torch.tensor([[0, -1, 1], [-1, -1, -1]]), torch.tensor([[0, 1, -1], [0, 1, -1]])
    result = attend(q, k, v, visible(q_pos, k_pos), need_lse=need_lse)
    out = result[0] if need_lse else result
    assert torch.isfinite(out).all()
    assert (out[0, :, 1] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, :, 0] != 0).all()
    torch.testing.assert_close(out[0, :, 0], v[0, :, 0])  # its only key, whatever the score
    if need_lse:
        assert (result[1][1] == -math.inf).all()
        assert torch.isfinite(result[1][0, :, 0]).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_keys_at_all(dtype):
    q, k, v = randn(2, 4, 3, 5, dtype=dtype), randn(2, 2, 0, 5, dtype=dtype), randn(2, 2, 0, 6, dtype=dtype)
    out, lse = attend(q, k, v, need_lse=True)
    assert out.shape == (2, 4, 3, 6)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    empty = torch.ones(2, 1, 3, 0, dtype=torch.bool)
    assert torch.equal(attend(q, k, v, empty), torch.zeros(2, 4, 3, 6, dtype=dtype))


def test_large_scores_do_not_overflow():
    q, k, v = (
        1e4 * randn(1, 1, 2, 8, dtype=torch.float32),
        randn(1, 1, 3, 8, dtype=torch.float32, seed=1),
        randn(1, 1, 3, 8),
    )
    out, lse = attend(q, k, v.float(), need_lse=True)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_with_fewer_queries_than_keys_query_i_sees_the_keys_up_to_sk_minus_sq_plus_i():
    Sq, Sk = 3, 8
    q, k, v = randn(1, 4, Sq, 5, seed=1), randn(1, 2, Sk, 5, seed=2), randn(1, 2, Sk, 5, seed=3)
    out = attend(q, k, v, visible(torch.arange(Sk - Sq, Sk)[None], torch.arange(Sk)[None]))
    for i in range(Sq):
        last = Sk - Sq + i + 1
        expected, _ = attend_by_loop(q[:, :, i : i + 1], k[:, :, :last], v[:, :, :last], None)
        torch.testing.assert_close(out[:, :, i : i + 1], expected)


def test_grouped_heads_equal_repeated_ones():
    q, k, v = randn(2, 6, 3, 4, seed=1), randn(2, 2, 5, 4, seed=2), randn(2, 2, 5, 3, seed=3)
    mask = randn(2, 2, 3, 5, seed=4) > -1  # one per KV head
    wide = [part.repeat_interleave(3, dim=1) for part in (k, v, mask)]
    for need_lse in (False, True):
        grouped = attend(q, k, v, mask, need_lse=need_lse)
        repeated = attend(q, *wide, need_lse=need_lse)
        torch.testing.assert_close(grouped, repeated)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="q has 4 heads, which is not a multiple of the 3 KV heads"):
        attend(randn(1, 4, 2, 5), randn(1, 3, 2, 5), randn(1, 3, 2, 5))


@pytest.mark.parametrize("cut", range(7))
def test_merging_any_split_is_exact(cut):
    T = 6
    q, k, v = randn(2, 4, 3, 5, seed=1), randn(2, 2, T, 5, seed=2), randn(2, 2, T, 4, seed=3)
    mask = randn(2, 1, 3, T, seed=4) > 0
    mask[0, 0, 0] = False  # sees nothing on either side
    expected, expected_lse = attend_by_loop(q, k, v, mask)
    left = attend(q, k[:, :, :cut], v[:, :, :cut], mask[..., :cut], need_lse=True)
    right = attend(q, k[:, :, cut:], v[:, :, cut:], mask[..., cut:], need_lse=True)
    out, lse = merge_states(*left, *right)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_merging_many_splits_in_any_order_and_dtype():
    q, k, v = (randn(1, 2, 2, 4, dtype=torch.bfloat16, seed=i) for i in range(3))
    k, v = randn(1, 2, 9, 4, dtype=torch.bfloat16, seed=5), randn(1, 2, 9, 4, dtype=torch.bfloat16, seed=6)
    parts = [attend(q, k[:, :, [t]], v[:, :, [t]], need_lse=True) for t in (4, 0, 8, 2, 1, 7, 3, 6, 5)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_states(out, lse, *part)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    expected, expected_lse = attend_by_loop(q, k, v, None)
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_merging_two_empty_sets_gives_zeros():
    zeros, nothing = torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -math.inf)
    out, lse = merge_states(zeros, nothing, zeros, nothing)
    assert torch.equal(out, zeros)
    assert torch.equal(lse, nothing)


def test_gradients_pass_through_attend():
    q, k, v = (randn(1, 2, 3, 4, seed=i).requires_grad_() for i in range(3))
    pos = torch.tensor([[0, 1, -1]])
    mask = visible(pos, pos)
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask), (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask, need_lse=True)[0], (q, k, v))


@pytest.mark.parametrize("G", [1, 2, 4])
def test_training_in_bf16_on_a_cpu_has_the_same_output_and_gradients(G):
    """The one case in which the fused kernel is not used."""
    shapes = [(2, 4, 5, 6), (2, G, 5, 6), (2, G, 5, 7)]
    pos = torch.tensor([[0, 1, 2, 3, -1], [-1, 0, 1, -1, -1]])
    for mask, scale in ((visible(pos, pos), None), (None, 0.3)):
        small = [randn(*shape, dtype=torch.bfloat16, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        exact = [part.detach().double().requires_grad_() for part in small]
        out, expected = attend(*small, mask, scale), attend(*exact, mask, scale)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(
            out.detach(), attend(*(part.detach() for part in small), mask, scale), atol=3e-2, rtol=3e-2
        )
        if mask is not None:
            assert (out[1, :, 0] == 0).all()
        weights = randn(*out.shape, seed=9)
        (out.double() * weights).sum().backward()
        (expected * weights).sum().backward()
        for a, b in zip(small, exact, strict=True):
            torch.testing.assert_close(a.grad.double(), b.grad, atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fused_kernel_runs_wherever_the_slow_way_is_not_needed(dtype, monkeypatch):
    calls, fused = [], torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].dtype)
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    q, k, v = (randn(1, 2, 3, 4, dtype=dtype, seed=i) for i in range(3))
    pos = torch.arange(3)[None]
    attend(q, k, v)
    attend(q, k, v, visible(pos, pos))
    assert calls == [dtype] * 2
    attend(q.requires_grad_(), k, v)
    assert len(calls) == (2 if dtype == torch.bfloat16 else 3)


@pytest.mark.parametrize("heads_of_the_mask", [None, 1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_new_token_of_grouped_heads_equals_the_same_row_of_many(heads_of_the_mask, dtype):
    """Decode folds the query heads of a group into rows: H = 6 over G = 2, some rows with no key at all."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(3, 6, 5, 4, generator=generator, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(3, 2, 7, D, generator=generator, dtype=torch.float64).to(dtype) for D in (4, 9))
    mask = None
    if heads_of_the_mask:
        mask = torch.rand(3, heads_of_the_mask, 5, 7, generator=generator) < 0.5
        mask[1, :, 2] = False
    whole = attend(q, k, v, mask, 0.3)
    for s in range(5):
        one = attend(q[:, :, s : s + 1], k, v, None if mask is None else mask[:, :, s : s + 1], 0.3)
        assert one.shape == (3, 6, 1, 9)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2  # bf16: its own rounding, two digits and a half
        torch.testing.assert_close(one[:, :, 0], whole[:, :, s], rtol=0, atol=tolerance)
    trained = attend(q[:, :, :1].requires_grad_(), k, v, None if mask is None else mask[:, :, :1], 0.3)
    torch.testing.assert_close(trained[:, :, 0], whole[:, :, 0], rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-2)


# -- one query over grouped heads, which decode takes apart in its own way ------------------------------------------


def one_query(dtype, G, masked, H=6, T=7):
    """A query of each of 3 sequences over G KV heads, and a mask: by the rule of visibility, or any at all."""
    q, k, v = (
        randn(3, H, 1, 4, dtype=dtype),
        randn(3, G, T, 4, dtype=dtype, seed=1),
        randn(3, G, T, 9, dtype=dtype, seed=2),
    )
    q_pos, k_pos = torch.tensor([[6], [2], [-1]]), torch.arange(T).repeat(3, 1)
    k_pos[0, 4] = -1  # a hole
    grouped_pos = torch.stack([(k_pos + g * 3) % T for g in range(G)], dim=1)  # [B, G, T]
    mask = {
        "nothing": None,
        "causal": visible(q_pos, k_pos),
        "window and sinks": visible(q_pos, k_pos, window=2, sinks=1),
        "tokens of its own in each KV head": visible(q_pos, grouped_pos, window=3),
        "one per query head": randn(3, H, 1, T, seed=8) > 0,
    }[masked]
    return q, k, v, mask


MASKS = ("nothing", "causal", "window and sinks", "tokens of its own in each KV head", "one per query head")


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("G", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_query_over_grouped_heads_is_softmax_attention(dtype, G, masked):
    q, k, v, mask = one_query(dtype, G, masked)
    H, wide = q.shape[1], []
    for h in range(H):  # head by head, so that each mask is the head's own
        g = h // (H // G)
        own = None if mask is None else mask[:, [{1: 0, G: g, H: h}[mask.shape[1]]]]
        wide.append(attend_by_loop(q[:, [h]], k[:, [g]], v[:, [g]], own))
    expected, expected_lse = (torch.cat(parts, dim=1) for parts in zip(*wide, strict=True))
    out = attend(q, k, v, mask)
    assert (out.shape, out.dtype) == ((3, H, 1, 9), dtype)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if masked != "nothing" and masked != "one per query head":
        assert (out[2] == 0).all()  # a query that is a hole
    if masked != "one per query head":
        same, lse = attend(q, k, v, mask, need_lse=True)
        torch.testing.assert_close(same.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("masked", MASKS)
def test_gradients_of_one_query_over_grouped_heads(masked):
    q, k, v, mask = one_query(torch.float64, 2, masked)
    leaves = [part.requires_grad_() for part in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask), leaves)
    # and in bf16 on a CPU, by products instead of the fused kernel; the same numbers in fp64 are what is right
    small = [part.detach().bfloat16().requires_grad_() for part in leaves]
    exact = [part.detach().double().requires_grad_() for part in small]
    weights = randn(3, 6, 1, 9, seed=9)
    for parts in (small, exact):
        (attend(*parts, mask).double() * weights).sum().backward()
    for a, b in zip(small, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=6e-2, rtol=6e-2)  # sums of three heads in bf16


def test_one_query_over_grouped_heads_and_no_keys():
    q, k, v = randn(2, 4, 1, 5), randn(2, 2, 0, 5), randn(2, 2, 0, 6)
    assert torch.equal(attend(q, k, v, torch.ones(2, 1, 1, 0, dtype=torch.bool)), torch.zeros(2, 4, 1, 6).double())
