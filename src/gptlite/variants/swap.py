"""Swapping attention: the same model with another attention in each block."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar

import torch

from gptlite.config import GPTConfig
from gptlite.model import GPTlite, MultiHeadAttention

Attention = TypeVar("Attention", bound=MultiHeadAttention)


def swap_attention(model: GPTlite, factory: Callable[[MultiHeadAttention], MultiHeadAttention]) -> GPTlite:
    """Puts another attention into every block, one block after the other, so that old and new never stand twice.

    What a layer was told apart from its weights (its window and sinks, train or eval mode) goes over to the new one.

    Args:
        model: changed in place.
        factory: makes the new attention of a block from the one that it has; it may return the same object.
    Returns: the model.
    """
    for block in model.blocks:
        old = block.mha
        new = factory(old)
        new.window, new.sinks = old.window, old.sinks
        block.mha = new.train(old.training)
    return model


def recast(mha: MultiHeadAttention, kind: type[Attention]) -> Attention:
    """The same layer with the `mix` of another class; it shares its weights with `mha`, which stays as it is.

    Raises: ValueError when the layer makes its queries, keys and values in a way of its own, which would be lost.
    """
    if type(mha).project is not kind.project:
        raise ValueError(f"{kind.__name__} does not know the keys and values that {type(mha).__name__} makes")
    new: MultiHeadAttention = copy(mha)
    new._modules = dict(mha._modules)
    new.__class__ = kind
    assert isinstance(new, kind)
    return new


def shape_of(mha: MultiHeadAttention) -> GPTConfig:
    """The config of a model of one block with this attention, read from its weights."""
    return GPTConfig(
        vocab_size=1,
        context_length=1,
        n_layers=1,
        d_model=mha.query_proj.in_features,
        n_heads=mha.query_proj.out_features // mha.d_head,
        d_head=mha.d_head,
        n_kv_heads=mha.kv_shape[0],
        dropout=mha.dropout.p,
    )


def made_like(mha: MultiHeadAttention, make: Callable[[], Attention]) -> Attention:
    """What `make` makes, on the device and in the dtype of an attention that is there."""
    weight = mha.query_proj.weight
    with torch.device(weight.device):
        return make().to(weight.dtype)
