"""Multi-head latent attention: one small vector per token is cached, from which every head's key and value follow."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from gptlite.arithmetic import ModelShape
from gptlite.attention import attend
from gptlite.config import GPTConfig
from gptlite.model import GPTlite, MultiHeadAttention
from gptlite.variants.low_rank import Moments, factorize
from gptlite.variants.swap import made_like, shape_of, swap_attention


class LatentAttention(MultiHeadAttention):
    """Attention over a latent c [n, r] that holds keys and values of all heads {cite}`deepseek2024v2`.

    Expanded, it is multi-head attention with the keys W_uk c and the values W_uv c. Absorbed, W_uk moves to the
    queries and W_uv to the output, and attention runs over the latents as if they were one KV head. Neither has a
    bias: that of the keys adds the same to all scores of a query, that of the values the same to every output.

    Args:
        config: shape of the attention. d_latent: r, size of the latent.
    Raises: ValueError when d_latent is below 1.
    """

    def __init__(self, config: GPTConfig, d_latent: int) -> None:
        if d_latent < 1:
            raise ValueError(f"d_latent is {d_latent}, it must be at least 1")
        super().__init__(config)
        d_attn = config.n_heads * config.d_head
        del self.key_proj, self.value_proj
        self.latent_proj = nn.Linear(config.d_model, d_latent, bias=False)
        self.key_up = nn.Linear(d_latent, d_attn, bias=False)
        self.value_up = nn.Linear(d_latent, d_attn, bias=False)
        self.absorb: bool | None = None  # None: absorbed for a single new token, expanded for more

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(1, r, 0): a token adds one latent to a cache, and no values beside it."""
        return 1, self.latent_proj.out_features, 0

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """Queries [n, H, D] and latents [n, 1, r] of the packed tokens x [n, d]; None stands for the values."""
        q = self.query_proj(x).unflatten(-1, (-1, self.d_head))  # [n, H, D]
        return q, self.latent_proj(x)[:, None], None

    def mix(self, q: Tensor, k: Tensor, v: Tensor | None, q_pos: Tensor, k_pos: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of one segment: q [B, H, S, D] over the latents k [B, 1, T, r] -> [B, H, S, D]."""
        absorb = q.shape[2] == 1 if self.absorb is None else self.absorb
        return self.absorbed(q, k, mask) if absorb else self.expanded(q, k, mask)

    def expanded(self, q: Tensor, c: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, S, D], c [B, 1, T, r] -> [B, H, S, D]: makes each head's keys and values, then attends to them."""
        k, v = (up(c[:, 0]).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for up in (self.key_up, self.value_up))
        return attend(q, k, v, mask, self.scale)  # k, v [B, H, T, D]

    def absorbed(self, q: Tensor, c: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, S, D], c [B, 1, T, r] -> [B, H, S, D]: attends to the latents themselves."""
        w_uk, w_uv = (up.weight.unflatten(0, (-1, self.d_head)) for up in (self.key_up, self.value_up))  # [H, D, r]
        q_latent = q @ w_uk.to(q.dtype)  # [B, H, S, r]
        # scores are q . (W_uk c), as before: the scale stays that of D, though the vectors now have size r
        mixed = attend(q_latent, c, c, mask, self.scale)  # [B, H, S, r]
        return mixed @ w_uv.to(q.dtype).mT


def compress(mha: MultiHeadAttention, d_latent: int, moments: Moments | None = None) -> LatentAttention:
    """Latent attention from trained multi-head attention, by factorising its key and value weights together.

    The biases need no place of their own: that of the keys changes no softmax and is dropped, and that of the values,
    with what the factorisation leaves out on average, goes into the output's bias.

    Args:
        mha: attention with any number of KV heads, whose head sizes are all D.
        d_latent: r; from d_model on (or 2 G D, if that is less) the result is exact.
        moments: of the attention's inputs; None factorises the weights without looking at any input.
    Returns: a new attention that shares no weights with the old one.
    Raises: ValueError when r is not from 1 to the exact one.
    """
    config, weight = shape_of(mha), mha.query_proj.weight
    G, H, D = mha.kv_shape[0], config.n_heads, mha.d_head
    stacked = torch.cat([mha.key_proj.weight, mha.value_proj.weight]).detach().double()  # [2 G D, d]
    if not 1 <= d_latent <= min(stacked.shape):
        raise ValueError(f"d_latent is {d_latent}, it must be 1 to {min(stacked.shape)}, where it is exact")
    up, down = factorize(stacked, d_latent, None if moments is None else moments.covariance)
    per_head = up.unflatten(0, (2, G, D)).repeat_interleave(H // G, dim=1)  # [2, H, D, r]
    new = made_like(mha, lambda: LatentAttention(config, d_latent))
    new.query_proj.load_state_dict(mha.query_proj.state_dict())
    with torch.no_grad():
        new.latent_proj.weight.copy_(down)
        for part, target in zip(per_head, (new.key_up, new.value_up), strict=True):
            target.weight.copy_(part.flatten(0, 1))  # [H * D, r]
        value_bias = mha.value_proj.bias.double().unflatten(0, (G, D))  # [G, D]
        if moments is not None:
            mean = moments.mean.to(stacked)
            value_bias = value_bias + (stacked @ mean - up @ (down @ mean)).unflatten(0, (2, G, D))[1]
        constant = value_bias.repeat_interleave(H // G, dim=0).flatten()  # [H * D]
        out = mha.out_proj.weight.double() @ constant + mha.out_proj.bias.double()
        new.out_proj.weight.copy_(mha.out_proj.weight)
        new.out_proj.bias.copy_(out.to(weight.dtype))
    return new


def to_latent(model: GPTlite, d_latent: int, moments: list[Moments] | None = None) -> GPTlite:
    """A copy of the model with latent attention in every block.

    Args:
        d_latent: r, for every block.
        moments: of each block's inputs, by `low_rank.input_moments`; None looks at the weights alone.
    Raises: ValueError when r is out of range, or there are not as many moments as blocks.
    """
    if moments is not None and len(moments) != len(model.blocks):
        raise ValueError(f"moments are given for {len(moments)} blocks, the model has {len(model.blocks)}")
    rest = iter(moments if moments is not None else [None] * len(model.blocks))
    return swap_attention(deepcopy(model), lambda mha: compress(mha, d_latent, next(rest)))


def latent_shape(config: GPTConfig, d_latent: int) -> ModelShape:
    """The shape, for `gptlite.arithmetic`, of a model of this config with latents of size r in every block.

    Args:
        config: of the model before its conversion. d_latent: r.
    """
    D = config.d_head
    return replace(ModelShape.of(config), d_latent=d_latent, d_nope=D, d_value=D)
