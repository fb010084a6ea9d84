"""Latent attention against transformers' DeepSeek-V2 attention on the same weights."""

from collections.abc import Callable

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from gptlite.cache.contract import whole_batch
from gptlite.cache.dense import StaticCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.variants.mla import LatentAttention, to_latent

B, S, WIDTH, ROPE = 3, 11, 64, 2  # theirs needs a rotary part of two at least: here it is zero


def same_weights(mha: LatentAttention) -> DeepseekV2Attention:
    """Theirs with our weights: no rotary part, no norm on the latent, no query bias."""
    heads, D, r = mha.query_proj.out_features // mha.d_head, mha.d_head, mha.kv_shape[1]
    config = DeepseekV2Config(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=r,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=D,
        v_head_dim=D,
        attention_bias=True,
        attn_implementation="eager",
    )
    theirs = DeepseekV2Attention(config, layer_idx=0).eval()
    theirs.kv_a_layernorm = torch.nn.Identity()
    theirs.scaling = D**-0.5  # theirs divides by the size with the rotary part
    with torch.no_grad():
        query = torch.zeros(heads, D + ROPE, WIDTH)
        query[:, :D] = mha.query_proj.weight.unflatten(0, (heads, D))
        theirs.q_proj.weight.copy_(query.flatten(0, 1))
        theirs.kv_a_proj_with_mqa.weight.copy_(torch.cat([mha.latent_proj.weight, torch.zeros(ROPE, WIDTH)]))
        theirs.kv_a_proj_with_mqa.bias.zero_()
        ups = [up.weight.unflatten(0, (heads, D)) for up in (mha.key_up, mha.value_up)]
        theirs.kv_b_proj.weight.copy_(torch.cat(ups, dim=1).flatten(0, 1))
        theirs.o_proj.load_state_dict(mha.out_proj.state_dict())
    return theirs


@pytest.mark.parametrize("absorb", [True, False])
@pytest.mark.parametrize(("heads", "d_latent"), [(4, 24), (4, 64), (8, 6), (1, 16)])
def test_latent_attention(heads: int, d_latent: int, absorb: bool) -> None:
    torch.manual_seed(0)
    mha = LatentAttention(GPTConfig(1, 1, 1, WIDTH, heads, 16), d_latent).eval()
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    mha.query_proj.bias.data.zero_()
    mha.absorb = absorb
    x = torch.randn(B, S, WIDTH)
    turns = torch.polar(torch.ones(1, S, ROPE // 2), torch.arange(S)[None, :, None].float())  # of a part that is zero
    mask = torch.zeros(1, 1, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    with torch.no_grad():
        want = same_weights(mha)(x, attention_mask=mask, position_embeddings=turns)[0]
        segment = whole_batch(torch.arange(S).expand(B, S))
        found = mha(x.flatten(0, 1), [segment], None, 0).unflatten(0, (B, S))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_a_conversion_is_theirs_with_the_same_weights(random_model: Callable[..., GPTlite]) -> None:
    """A converted layer, decoding token by token from latents in a cache, against theirs over the whole text."""
    model = to_latent(random_model(n_layers=1), 40)
    mha = model.blocks[0].mha
    mha.query_proj.bias.data.zero_()
    x = torch.randn(1, S, WIDTH)
    turns = torch.polar(torch.ones(1, S, ROPE // 2), torch.arange(S)[None, :, None].float())
    mask = torch.zeros(1, 1, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    cache = StaticCache(model, 1, S)
    with torch.no_grad():
        want = same_weights(mha)(x, attention_mask=mask, position_embeddings=turns)[0]
        rows = []
        for t in range(S):
            segments = cache.prepare(["a"], torch.tensor([[t]]))
            rows.append(mha(x[:, t], segments, cache, 0))
    torch.testing.assert_close(torch.stack(rows, dim=1), want, atol=1e-5, rtol=0)
