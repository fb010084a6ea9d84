"""Structured pruning: heads, neurons, channels and blocks go whole, and every matrix that knew them shrinks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from gptlite.config import GPTConfig
from gptlite.model import Block, GPTlite, MultiHeadAttention


@dataclass(frozen=True)
class Kept:
    """What is left of a model, as ascending indices [n]; None leaves all.

    Args:
        heads: the query heads of each block, a tensor per block of the model before pruning.
        neurons: likewise those of each feed-forward network.
        channels: of the residual stream, the same in all blocks.
        blocks: the blocks that stay.
    """

    heads: list[Tensor] | None = None
    neurons: list[Tensor] | None = None
    channels: Tensor | None = None
    blocks: Tensor | None = None

    def check(self, model: GPTlite) -> None:
        """Checks that the model has what is to be kept.

        Raises: ValueError when an index is no whole number, out of range, double or out of order, nothing is left, or
            the query heads that are left do not share their KV heads evenly.
        """
        n_blocks = len(model.blocks)
        for name in ("heads", "neurons"):
            part = getattr(self, name)
            if part is not None and len(part) != n_blocks:
                raise ValueError(f"{name} has indices for {len(part)} blocks, the model has {n_blocks}")
        _check_indices("blocks", self.blocks, n_blocks)
        _check_indices("channels", self.channels, model.token_embedding.embedding_dim)
        for i, block in enumerate(model.blocks):
            if self.neurons is not None:
                _check_indices(f"neurons of block {i}", self.neurons[i], ffn_layers(block)[0].out_features)
            if self.heads is not None:
                _check_indices(f"heads of block {i}", self.heads[i], n_heads(block.mha))
                try:
                    kept_kv_heads(block.mha, self.heads[i])
                except ValueError as error:
                    raise ValueError(f"heads of block {i}: {error}") from None


def _check_indices(what: str, indices: Tensor | None, n: int) -> None:
    if indices is None:
        return
    if indices.dim() != 1 or not len(indices):
        raise ValueError(f"{what} to keep have shape {tuple(indices.shape)}, at least 1 index [n] is needed")
    if indices.dtype != torch.int64:
        raise ValueError(f"{what} to keep are {indices.dtype}, indices of torch.int64 are needed")
    if (indices.diff() <= 0).any() or indices[0] < 0 or indices[-1] >= n:
        raise ValueError(f"{what} to keep are {indices.tolist()}, they must ascend within 0 to {n - 1}")


def ffn_layers(block: Block) -> tuple[nn.Linear, nn.Linear]:
    """The two linear layers of a block's feed-forward network: into the neurons, and out of them."""
    return cast(nn.Linear, block.ffwd.net[0]), cast(nn.Linear, block.ffwd.net[2])


def n_heads(mha: MultiHeadAttention) -> int:
    """H, the query heads of an attention, read from its weights."""
    return mha.query_proj.out_features // mha.d_head


def kept_kv_heads(mha: MultiHeadAttention, heads: Tensor) -> Tensor:
    """The KV heads [n_kv] that the kept query heads [n] read; a KV head that none of them reads goes.

    Raises: ValueError when they do not share the KV heads that are left evenly, since query head h reads KV head
        h // (H / G) and no other, or the attention is not made of plain heads.
    """
    if type(mha).project is not MultiHeadAttention.project:
        raise ValueError(f"{type(mha).__name__} makes its keys in a way of its own, its heads cannot be taken out")
    H, G = n_heads(mha), mha.kv_shape[0]
    readers = torch.bincount(heads.cpu() // (H // G), minlength=G)  # [G], kept query heads of each
    left = readers[readers > 0]
    if (left != left[0]).any():
        raise ValueError(
            f"query heads {heads.tolist()} leave {readers.tolist()} of the {H // G} that read each of the {G} KV "
            "heads: every KV head that stays needs the same number"
        )
    return readers.nonzero()[:, 0]


def prune(model: GPTlite, kept: Kept) -> GPTlite:
    """A copy of the model without what is not kept; its caches and its steps shrink with it.

    Args:
        model: with plain linear layers; stays as it is.
        kept: what is left. Heads and neurons may differ from block to block.
    Returns: the smaller model, in the mode of the given one. It computes what the model computes with the removed
        parts masked (see `gptlite.compress.masked.mask`).
    Raises: ValueError when the model has not what is to be kept, or not plain linear layers.
    """
    for name, module in model.named_modules():
        if hasattr(module, "in_features") and not isinstance(module, nn.Linear):
            raise ValueError(f"{name} is a {type(module).__name__}, only plain linear layers can be cut")
    kept.check(model)
    model = deepcopy(model)
    for i, block in enumerate(model.blocks):
        if kept.heads is not None:
            _cut_heads(block.mha, kept.heads[i])
        if kept.neurons is not None:
            first, second = ffn_layers(block)
            block.ffwd.net[0] = cut_linear(first, rows=kept.neurons[i])
            block.ffwd.net[2] = cut_linear(second, columns=kept.neurons[i])
    if kept.blocks is not None:
        model.blocks = nn.ModuleList(model.blocks[i] for i in kept.blocks.tolist())  # type: ignore[assignment]
    if kept.channels is not None:
        _cut_channels(model, kept.channels)
    model.config = describe(model)
    return model


def cut_linear(linear: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Linear:
    """A linear layer with some of its outputs (rows [n] of the weight, and the bias's) and inputs (columns [m])."""
    weight: Tensor = linear.weight.detach()
    bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
    if rows is not None:
        rows = rows.to(weight.device)
        weight, bias = weight[rows], None if bias is None else bias[rows]
    if columns is not None:
        weight = weight[:, columns.to(weight.device)]
    new = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    new.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        new.bias = nn.Parameter(bias.clone())
    return new.train(linear.training)


def _rows_of(heads: Tensor, d_head: int) -> Tensor:
    """The rows [n * D] of a projection that belong to heads [n]."""
    return (heads[:, None] * d_head + torch.arange(d_head, device=heads.device)).flatten()


def _cut_heads(mha: MultiHeadAttention, heads: Tensor) -> None:
    kv_heads = kept_kv_heads(mha, heads)
    _, D, Dv = mha.kv_shape
    queries = n_heads(mha)
    mha.query_proj = cut_linear(mha.query_proj, rows=_rows_of(heads, D))
    mha.key_proj = cut_linear(mha.key_proj, rows=_rows_of(kv_heads, D))
    mha.value_proj = cut_linear(mha.value_proj, rows=_rows_of(kv_heads, Dv))
    mha.out_proj = cut_linear(mha.out_proj, columns=_rows_of(heads, mha.out_proj.in_features // queries))


def _cut_channels(model: GPTlite, channels: Tensor) -> None:
    """Removes channels of the residual stream from all that reads or writes it."""
    for name in ("token_embedding", "position_embedding"):
        old: nn.Embedding = getattr(model, name)
        columns = channels.to(old.weight.device)
        setattr(model, name, nn.Embedding.from_pretrained(old.weight.detach()[:, columns].clone(), freeze=False))
    for block in model.blocks:
        mha, (first, second) = block.mha, ffn_layers(block)
        for name in ("query_proj", "key_proj", "value_proj"):  # these read the stream
            setattr(mha, name, cut_linear(getattr(mha, name), columns=channels))
        block.ffwd.net[0] = cut_linear(first, columns=channels)
        mha.out_proj = cut_linear(mha.out_proj, rows=channels)  # these write it
        block.ffwd.net[2] = cut_linear(second, rows=channels)
        block.ln1, block.ln2 = _cut_norm(block.ln1, channels), _cut_norm(block.ln2, channels)
    model.ln = _cut_norm(model.ln, channels)
    model.fc_out = cut_linear(model.fc_out, columns=channels)


def _cut_norm(norm: nn.LayerNorm, channels: Tensor) -> nn.LayerNorm:
    channels = channels.to(norm.weight.device)
    new = nn.LayerNorm(len(channels), eps=norm.eps, device="meta")
    new.weight = nn.Parameter(norm.weight.detach()[channels].clone())
    new.bias = nn.Parameter(norm.bias.detach()[channels].clone())
    return new.train(norm.training)


def describe(model: GPTlite) -> GPTConfig:
    """The config of a model, read from its weights; where its blocks differ, the largest of each size."""
    widest = max((block.mha for block in model.blocks), key=n_heads)
    return replace(
        model.config,
        n_layers=len(model.blocks),
        d_model=model.token_embedding.embedding_dim,
        n_heads=n_heads(widest),
        n_kv_heads=widest.kv_shape[0],
        d_ff=max(ffn_layers(block)[0].out_features for block in model.blocks),
    )


def is_uniform(model: GPTlite) -> bool:
    """Whether all blocks have the same sizes, so that one config describes them and a checkpoint can hold them."""
    sizes = {(n_heads(b.mha), b.mha.kv_shape, ffn_layers(b)[0].out_features) for b in model.blocks}
    return len(sizes) == 1


def pruned_params(config: GPTConfig, kept: Kept) -> int:
    """N of a pruned model, in closed form.

    Args:
        config: of the model before, with plain multi-head or grouped attention.
        kept: as in `prune`.
    """
    d, D = config.d_model if kept.channels is None else len(kept.channels), config.d_head
    group = config.n_heads // config.n_kv_heads
    total = (2 * config.vocab_size + config.context_length + 2) * d + config.vocab_size  # embeddings, head, last norm
    for i in range(config.n_layers) if kept.blocks is None else kept.blocks.tolist():
        H, G, f = config.n_heads, config.n_kv_heads, config.d_ff
        if kept.heads is not None:
            H, G = len(kept.heads[i]), len({h // group for h in kept.heads[i].tolist()})
        if kept.neurons is not None:
            f = len(kept.neurons[i])
        attention = (H + 2 * G) * D * (d + 1) + d * (H * D + 1)
        total += attention + f * (d + 1) + d * (f + 1) + 4 * d  # and two norms
    return total
