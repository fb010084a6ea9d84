"""Fewer KV heads: a trained model of H heads becomes one of G, by pooling what the heads of a group project to."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from gptlite.model import GPTlite, MultiHeadAttention
from gptlite.variants.low_rank import Moments, factorize
from gptlite.variants.swap import made_like, shape_of, swap_attention

POOLINGS = ("mean", "first", "random")


def pool_heads(mha: MultiHeadAttention, n_kv_heads: int, pooling: str = "mean", seed: int = 0) -> MultiHeadAttention:
    """The same attention with fewer KV heads {cite}`ainslie2023gqa`; queries and output stay.

    Neighbouring heads form a group, as `attend` reads them: query head h reads KV head h // (H / G).

    Args:
        mha: with G' KV heads.
        n_kv_heads: G, a divisor of G'; G = G' gives the same weights, bit for bit.
        pooling: "mean" of the group's projections, its "first", or a "random" projection of the usual spread.
        seed: of the random one.
    Returns: a new attention that shares no weights with the old one.
    Raises: ValueError when G does not divide G', or there is no such pooling.
    """
    old, D = mha.kv_shape[0], mha.d_head
    if n_kv_heads < 1 or old % n_kv_heads:
        raise ValueError(f"n_kv_heads is {n_kv_heads}, it must divide the {old} KV heads that are there")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}, it must be one of {', '.join(POOLINGS)}")
    config = replace(shape_of(mha), n_kv_heads=n_kv_heads)
    new = made_like(mha, lambda: MultiHeadAttention(config))
    new.query_proj.load_state_dict(mha.query_proj.state_dict())
    new.out_proj.load_state_dict(mha.out_proj.state_dict())
    generator = torch.Generator().manual_seed(seed)

    def pooled(part: Tensor) -> Tensor:
        heads = part.detach().unflatten(0, (n_kv_heads, old // n_kv_heads, D))  # [G, G'/G, D, ...]
        if pooling == "mean":
            return heads.mean(1).flatten(0, 1)
        if pooling == "first":
            return heads[:, 0].flatten(0, 1)
        noise = torch.randn(heads[:, 0].shape, generator=generator).to(part)
        return (noise * part.detach().std()).flatten(0, 1)

    for name in ("key_proj", "value_proj"):
        source, target = getattr(mha, name), getattr(new, name)
        target.weight.data = pooled(source.weight)  # [G * D, d]
        target.bias.data = pooled(source.bias) if pooling != "random" else torch.zeros_like(target.bias)
    return new


@torch.no_grad()
def factor_heads(mha: MultiHeadAttention, n_kv_heads: int, moments: Moments | None = None) -> MultiHeadAttention:
    """The same attention with fewer KV heads, where the queries and the output adapt to them.

    The keys that a group's heads project to are W_h x, each of size D. The best common key of size D is a factor of
    the stacked W_h, and what turns it back into each head's own goes into that head's queries; likewise for the
    values and the output. Rotary positions would stand between the two, so this needs learned ones.

    Args:
        mha: with G' KV heads.
        n_kv_heads: G, a divisor of G'.
        moments: of the attention's inputs; None factorises the weights without looking at any input.
    Returns: a new attention that shares no weights with the old one.
    Raises: ValueError when G does not divide G'.
    """
    new = pool_heads(mha, n_kv_heads)
    old, D, covariance = mha.kv_shape[0], mha.d_head, None if moments is None else moments.covariance
    shared = new.query_proj.out_features // D // old  # query heads of each old KV head
    queries, query_bias, outputs, constant = (  # copies, which change group by group
        part.detach().to(torch.float64, copy=True)
        for part in (mha.query_proj.weight, mha.query_proj.bias, mha.out_proj.weight, mha.value_proj.bias)
    )
    queries, query_bias = queries.unflatten(0, (-1, D)), query_bias.unflatten(0, (-1, D))  # [H, D, d], [H, D]
    outputs = outputs.unflatten(1, (-1, D)).transpose(0, 1)  # [H, d, D]
    constant = constant.unflatten(0, (old, D))  # [G', D], what of the values is the same for every token
    for g in range(n_kv_heads):
        members = slice(g * old // n_kv_heads, (g + 1) * old // n_kv_heads)
        for source, target in ((mha.key_proj, new.key_proj), (mha.value_proj, new.value_proj)):
            stacked = source.weight.double().unflatten(0, (old, D))[members].flatten(0, 1)  # [G'/G * D, d]
            up, down = factorize(stacked, D, covariance)
            target.weight[g * D : (g + 1) * D] = down.to(target.weight.dtype)
            target.bias[g * D : (g + 1) * D] = 0
            heads = up.unflatten(0, (-1, D)).repeat_interleave(shared, dim=0)  # [H/G, D, D]
            of_group = slice(members.start * shared, members.stop * shared)
            if source is mha.key_proj:
                queries[of_group] = heads.mT @ queries[of_group]
                query_bias[of_group] = (heads.mT @ query_bias[of_group, :, None])[..., 0]
            else:
                outputs[of_group] = outputs[of_group] @ heads
                if moments is not None:
                    mean = moments.mean.to(stacked)
                    constant[members] += (stacked @ mean - up @ (down @ mean)).unflatten(0, (-1, D))
    new.query_proj.weight.copy_(queries.flatten(0, 1))
    new.query_proj.bias.copy_(query_bias.flatten())
    new.out_proj.weight.copy_(outputs.transpose(0, 1).flatten(1))
    fixed = mha.out_proj.weight.double() @ constant.repeat_interleave(shared, dim=0).flatten()
    new.out_proj.bias.copy_(mha.out_proj.bias.double() + fixed)
    return new


def to_grouped(model: GPTlite, n_kv_heads: int, pooling: str = "mean", seed: int = 0) -> GPTlite:
    """A copy of the model with G KV heads in every block; see `pool_heads` for the arguments."""
    model = swap_attention(deepcopy(model), lambda mha: pool_heads(mha, n_kv_heads, pooling, seed))
    model.config = replace(model.config, n_kv_heads=n_kv_heads)
    return model


def factor_groups(model: GPTlite, n_kv_heads: int, moments: list[Moments] | None = None) -> GPTlite:
    """A copy of the model with G KV heads in every block, by factors; see `factor_heads` for the arguments."""
    rest = iter(moments if moments is not None else [None] * len(model.blocks))
    model = swap_attention(deepcopy(model), lambda mha: factor_heads(mha, n_kv_heads, next(rest)))
    model.config = replace(model.config, n_kv_heads=n_kv_heads)
    return model
