"""SDPA's back ends: which ran, why not the others, the same output; FlexAttention; and is_causal on a cache."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from gptlite.attention import attend, visible
from gptlite.variants import backends
from gptlite.variants.backends import (
    BACKENDS,
    Choice,
    block_mask,
    count_operators,
    flex_attend,
    kernel_of,
    position_rule,
    reasons_under,
    run_backend,
    survey,
    try_backend,
)
from gptlite.variants.flash import flash_attend
from gptlite.variants.tiles import EDGE, HIDDEN, WHOLE, tile_kinds


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(S=20, T=20, G=2):
    return randn(2, 4, S, 16), randn(2, G, T, 16, seed=1), randn(2, G, T, 16, seed=2)


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("masked", ["nothing", "causal", "a mask"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_back_ends_on_a_cpu_agree(backend, masked, G):
    q, k, v = qkv(G=G)
    pos = torch.arange(20)[None]
    mask = {"nothing": None, "causal": visible(pos, pos), "a mask": visible(pos, pos, 5)}[masked]
    out = run_backend(backend, q, k, v, mask if masked == "a mask" else None, masked == "causal")
    torch.testing.assert_close(out, attend(q, k, v, mask), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_which_kernel_ran(mode):
    with mode():
        q, k, v = qkv()
        free, choices = survey(q, k, v, causal=True)
        assert free == "_scaled_dot_product_flash_attention_for_cpu"
        assert [choice.backend for choice in choices] == list(BACKENDS)
        ran = {choice.backend: choice.kernel for choice in choices if choice.kernel}
        assert ran == {"math": "matrix products", "flash": free}
        left = [choice.reason for choice in choices if not choice.kernel]
        assert left == ["PyTorch has no such kernel for tensors on cpu"] * 2
        assert kernel_of(lambda: flash_attend(q, k, v)) == "matrix products"


def test_operators_are_counted():
    a = torch.ones(3, 3)
    assert count_operators(lambda: (a + a).exp() @ a) == 3
    q, k, v = qkv()
    fused = count_operators(lambda: run_backend("flash", q, k, v))
    tiled = [count_operators(lambda tile=tile: flash_attend(q, k, v, tile_q=tile, tile_k=tile)) for tile in (5, 10)]
    assert fused < tiled[1] < tiled[0]


def test_no_warning_gets_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        survey(*qkv())
        q, k, v = qkv()
        pos = torch.arange(20).repeat(2, 1)
        flex_attend(q, k, v, block_mask(position_rule(pos, pos), q, k))


CUDA_WORDS = [
    "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:776.)",
    "Memory Efficient attention has been runtime disabled. (Triggered internally at sdp_utils_cpp.h:550.)",
    "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:778.)",
    "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got float. (Triggered internally at x.h:1.)",
    "Flash attention only supports gpu architectures in the range [sm80, sm121].",
    "CuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:780.)",
    "cuDNN attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:1.)",
]


def test_a_gpus_reasons_are_those_of_the_kernel_that_was_asked_for(monkeypatch):
    assert reasons_under("cudnn attention", CUDA_WORDS) == ["cuDNN attention has been runtime disabled."]
    assert reasons_under("", []) == []

    def refuse(*args):
        for text in CUDA_WORDS:
            warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(backends, "run_backend", refuse)
    reason = (
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got float."
        " Flash attention only supports gpu architectures in the range [sm80, sm121]."
    )
    assert try_backend("flash", *qkv()) == Choice("flash", None, reason)


def test_another_error_is_told_as_it_is():
    q, k, v = qkv()
    choice = try_backend("math", q, k[..., :3], v)
    assert choice.kernel is None and "size" in choice.reason


def test_an_unknown_back_end_is_named():
    with pytest.raises(ValueError, match="no back end 'fast', there are math, efficient, flash, cudnn"):
        run_backend("fast", *qkv())


def test_other_bad_calls_are_named():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="mask is given and causal is True"):
        run_backend("flash", q, k, v, torch.ones(2, 1, 20, 20, dtype=torch.bool), causal=True)
    with pytest.raises(ValueError, match="block is 0"):
        block_mask(lambda b, h, i, j: j <= i, q, k, block=0)


# -- is_causal on a cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_is_causal_is_aligned_to_the_top_left(backend):
    """With 3 new tokens behind 17, query i should see 18 + i keys; is_causal shows it i + 1."""
    q, k, v = qkv(S=3)
    keys = torch.arange(20).repeat(2, 1)
    right = attend(q, k, v, visible(torch.arange(17, 20).repeat(2, 1), keys))
    wrong = attend(q, k, v, visible(torch.arange(3).repeat(2, 1), keys))
    out = run_backend(backend, q, k, v, causal=True)
    torch.testing.assert_close(out, wrong, atol=1e-6, rtol=0)
    assert (out - right).abs().max() > 0.5
    torch.testing.assert_close(run_backend(backend, q, k, v, visible(keys[:, 17:], keys)), right, atol=1e-6, rtol=0)


def test_the_lower_right_bias_is_right():
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = qkv(S=3, G=4)
    keys = torch.arange(20).repeat(2, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 20))
    torch.testing.assert_close(out, attend(q, k, v, visible(keys[:, 17:], keys)), atol=1e-6, rtol=0)


# -- FlexAttention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 2)])
def test_flex_attention_by_positions(window, sinks):
    q, k, v = qkv(S=5)
    k_pos = torch.arange(20).repeat(2, 1)
    k_pos[0, 3] = k_pos[1, 10:] = -1
    q_pos = torch.tensor([[15, 16, -1, 18, 19], [5, 6, 7, 8, 9]])
    mask = block_mask(position_rule(q_pos, k_pos, window, sinks), q, k, block=4)
    expected = attend(q, k, v, visible(q_pos, k_pos, window, sinks))
    out = flex_attend(q, k, v, mask)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
    assert not out[0, :, 2].any()  # a hole sees nothing: zeros
    torch.testing.assert_close(
        flex_attend(q, k, v, mask, scale=0.1),
        attend(q, k, v, visible(q_pos, k_pos, window, sinks), 0.1),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("window", [None, 20])
def test_its_blocks_are_our_tiles(window):
    """The blocks that FlexAttention skips, masks and takes whole are the tiles that our bounds give."""
    q, k, _ = qkv(S=64, T=64)
    pos = torch.arange(64).repeat(2, 1)
    mask = block_mask(position_rule(pos, pos, window), q, k, block=16)
    kinds = tile_kinds(pos, pos, 16, 16, window)
    assert mask.kv_num_blocks[0, 0].tolist() == (kinds == EDGE).sum(-1).tolist()
    assert mask.full_kv_num_blocks[0, 0].tolist() == (kinds == WHOLE).sum(-1).tolist()
    assert mask.sparsity() == pytest.approx(100 * (kinds == HIDDEN).float().mean())


def test_a_rule_of_ones_own():
    """Documents that follow each other in one row: a token sees its own only, which no causal flag can say."""
    q, k, v = qkv()
    document = torch.arange(20) // 7
    mask = block_mask(lambda b, h, i, j: (j <= i) & (document[i] == document[j]), q, k, block=4)
    i, j = torch.arange(20)[:, None], torch.arange(20)
    expected = attend(q, k, v, ((j <= i) & (document[i] == document[j])).expand(2, 1, 20, 20))
    torch.testing.assert_close(flex_attend(q, k, v, mask), expected, atol=1e-6, rtol=0)
