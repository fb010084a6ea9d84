"""The whole model with some of its parts masked: what a pruned model must compute, without being smaller."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.compress.structured import Kept, ffn_layers, n_heads
from gptlite.model import GPTlite


class NormOfKept(nn.Module):
    """LayerNorm over the channels that are kept; the others come out as 0.

    Mean and variance of a norm change when channels go, so zeros in the stream alone are not what pruning leaves.
    """

    def __init__(self, norm: nn.LayerNorm, channels: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        kept = self.channels.to(x.device)
        some = F.layer_norm(x[..., kept], kept.shape, self.weight[kept], self.bias[kept], self.eps)
        return torch.zeros_like(x).index_copy(-1, kept, some)


@torch.no_grad()
def mask(model: GPTlite, kept: Kept) -> GPTlite:
    """A copy of the model, as large as it was, in which what is not kept contributes nothing.

    A head or a neuron is masked where its output is read, a block where it writes, a channel wherever it is written.

    Args:
        model: with plain linear layers; stays as it is.
        kept: what is left, see `gptlite.compress.structured.prune`.
    Raises: ValueError when the model has not what is to be kept.
    """
    kept.check(model)
    model = deepcopy(model)
    for i, block in enumerate(model.blocks):
        mha, (_, second) = block.mha, ffn_layers(block)
        if kept.heads is not None:
            gone = _others(kept.heads[i], n_heads(mha))
            mha.out_proj.weight.unflatten(1, (n_heads(mha), -1))[:, gone] = 0
        if kept.neurons is not None:
            second.weight[:, _others(kept.neurons[i], second.in_features)] = 0
        if kept.blocks is not None and i not in kept.blocks.tolist():
            for writer in (mha.out_proj, second):
                writer.weight.zero_()
                writer.bias.zero_()
        if kept.channels is not None:
            gone = _others(kept.channels, mha.out_proj.out_features)
            for writer in (mha.out_proj, second):
                writer.weight[gone] = 0
                writer.bias[gone] = 0
            block.ln1, block.ln2 = NormOfKept(block.ln1, kept.channels), NormOfKept(block.ln2, kept.channels)  # type: ignore[assignment]
    if kept.channels is not None:
        gone = _others(kept.channels, model.token_embedding.embedding_dim)
        for embedding in (model.token_embedding, model.position_embedding):
            embedding.weight[:, gone] = 0
        model.ln = NormOfKept(model.ln, kept.channels)  # type: ignore[assignment]
    return model


def _others(kept: Tensor, n: int) -> Tensor:
    """The indices below n that are not kept [n - len(kept)]."""
    left = torch.ones(n, dtype=torch.bool)
    left[kept.cpu()] = False
    return left.nonzero()[:, 0]
