"""Tiles and split keys against PyTorch's own attention in fp64, in the forward and in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptlite.cache.contract import whole_batch
from gptlite.config import GPTConfig
from gptlite.model import MultiHeadAttention
from gptlite.variants.flash import FlashAttention, flash_attend
from gptlite.variants.split_kv import even_splits, split_attend


def inputs(n: int, G: int) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(n)
    return tuple(torch.randn(2, heads, n, 24, generator=chance, dtype=torch.float64) for heads in (6, G, G))


@pytest.mark.parametrize("G", [6, 3, 1])
@pytest.mark.parametrize("tiles", [(1, 1), (16, 16), (7, 30), (128, 128)])
def test_causal_attention_and_its_gradients(G: int, tiles: tuple[int, int]) -> None:
    n, results = 45, []
    pos = torch.arange(n).expand(2, n)
    for ours in (True, False):
        q, k, v = (x.requires_grad_() for x in inputs(n, G))
        if ours:
            out = flash_attend(q, k, v, q_pos=pos, k_pos=pos, tile_q=tiles[0], tile_k=tiles[1])
        else:
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        (out * weight).sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("parts", [1, 2, 9, 60])
def test_one_query_over_split_keys(parts: int) -> None:
    q, k, v = inputs(45, 3)
    want = F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    torch.testing.assert_close(split_attend(q[:, :, -1:], k, v, even_splits(45, parts)), want, atol=1e-12, rtol=0)


def test_a_whole_layer_against_torchs_multi_head_attention() -> None:
    """d_model 64 with 4 heads of 16; holes at the left of two rows."""
    torch.manual_seed(0)
    config = GPTConfig(10, 20, 1, d_model=64, n_heads=4, d_head=16)
    mha = FlashAttention.of(MultiHeadAttention(config), tile_q=3, tile_k=5).double()
    theirs = nn.MultiheadAttention(64, 4, batch_first=True).double()
    projections = (mha.query_proj, mha.key_proj, mha.value_proj)
    theirs.in_proj_weight.data = torch.cat([linear.weight.data for linear in projections])
    theirs.in_proj_bias.data = torch.cat([linear.bias.data for linear in projections])
    theirs.out_proj.load_state_dict(mha.out_proj.state_dict())
    x, n_holes = torch.randn(3, 11, 64, dtype=torch.float64), torch.tensor([0, 3, 8])
    positions = (torch.arange(11) - n_holes[:, None]).clamp(min=-1)
    hole = positions < 0
    with torch.no_grad():
        got = mha(x.flatten(0, 1), [whole_batch(positions)], None, 0).unflatten(0, (3, 11))
        later = torch.ones(11, 11, dtype=torch.bool).triu(1)
        want = theirs(x, x, x, attn_mask=later, key_padding_mask=hole, need_weights=False)[0]
    torch.testing.assert_close(got[~hole], want[~hole], atol=1e-12, rtol=0)
