"""One layer's attention against torch's MultiheadAttention and transformers' Llama attention, on the same weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from gptlite.cache.contract import whole_batch
from gptlite.model import GPTlite, MultiHeadAttention

B, S = 3, 11


def ours(mha: MultiHeadAttention, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """The layer's output [B, S, d] for x [B, S, d]."""
    positions = torch.arange(S).expand(B, S) if positions is None else positions
    with torch.no_grad():
        return mha(x.flatten(0, 1), [whole_batch(positions)], None, 0).unflatten(0, (B, S))


def inputs(d_model: int) -> Tensor:
    return torch.randn(B, S, d_model, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("n_heads", "d_head"), [(4, 16), (1, 64), (16, 4)])
def test_multi_head_attention(random_model: Callable[..., GPTlite], n_heads: int, d_head: int) -> None:
    mha = random_model(n_heads=n_heads, d_head=d_head).blocks[0].mha
    theirs = nn.MultiheadAttention(64, n_heads, batch_first=True).eval()
    projections = (mha.query_proj, mha.key_proj, mha.value_proj)
    theirs.in_proj_weight.data = torch.cat([linear.weight.data for linear in projections])
    theirs.in_proj_bias.data = torch.cat([linear.bias.data for linear in projections])
    theirs.out_proj.load_state_dict(mha.out_proj.state_dict())
    x = inputs(64)
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)  # True hides
    with torch.no_grad():
        want = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(mha, x), want, atol=1e-5, rtol=0)


def test_padding_equals_a_key_padding_mask(random_model: Callable[..., GPTlite]) -> None:
    """Holes at the left of a row: torch hides them by a mask, we by position -1."""
    mha = random_model().blocks[0].mha
    theirs = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    projections = (mha.query_proj, mha.key_proj, mha.value_proj)
    theirs.in_proj_weight.data = torch.cat([linear.weight.data for linear in projections])
    theirs.in_proj_bias.data = torch.cat([linear.bias.data for linear in projections])
    theirs.out_proj.load_state_dict(mha.out_proj.state_dict())
    x, n_holes = inputs(64), torch.tensor([0, 3, 10])
    positions = (torch.arange(S) - n_holes[:, None]).clamp(min=-1)  # [B, S]
    hole = positions < 0
    with torch.no_grad():
        want = theirs(
            x, x, x, attn_mask=torch.ones(S, S, dtype=torch.bool).triu(1), key_padding_mask=hole, need_weights=False
        )[0]
    torch.testing.assert_close(ours(mha, x, positions)[~hole], want[~hole], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "d_head"), [(4, 4, 16), (4, 2, 16), (4, 1, 16), (8, 4, 4), (8, 2, 16)]
)
def test_grouped_query_attention(
    random_model: Callable[..., GPTlite], n_heads: int, n_kv_heads: int, d_head: int
) -> None:
    """MHA, GQA and MQA, also with n_heads * d_head other than d_model. Llama rotates by position: by no angle here."""
    mha = random_model(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).blocks[0].mha
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=d_head,
        attention_bias=True,
        attn_implementation="eager",
    )
    theirs = LlamaAttention(config, layer_idx=0).eval()
    pairs = (("q_proj", "query_proj"), ("k_proj", "key_proj"), ("v_proj", "value_proj"), ("o_proj", "out_proj"))
    for theirs_name, our_name in pairs:
        getattr(theirs, theirs_name).load_state_dict(getattr(mha, our_name).state_dict())
    x = inputs(64)
    no_angle = torch.ones(B, S, d_head), torch.zeros(B, S, d_head)  # cosine and sine of 0
    mask = torch.zeros(1, 1, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    with torch.no_grad():
        want = theirs(x, position_embeddings=no_angle, attention_mask=mask)[0]
    torch.testing.assert_close(ours(mha, x), want, atol=1e-5, rtol=0)
