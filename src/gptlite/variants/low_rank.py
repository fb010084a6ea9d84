"""The best approximation of a linear layer by a narrow one and a wide one, for the inputs that it really sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.model import GPTlite


@dataclass(frozen=True)
class Moments:
    """What is known of a layer's inputs x: their mean [d] and their covariance [d, d], in fp64."""

    mean: Tensor
    covariance: Tensor


def factorize(weight: Tensor, rank: int, covariance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """up @ down of a rank, closest to a weight: for all directions of its input alike, or for inputs as they come.

    The error E|W x - up down x|^2 is least when up holds the first principal components of the outputs W x, the left
    singular vectors of W C^(1/2) {cite}`eckart1936approximation`; C = 1 gives the truncated SVD of the weight itself.

    Args:
        weight: W [d_out, d_in].
        rank: r, at least 1; from min(d_out, d_in) on the product is exact.
        covariance: C [d_in, d_in] of the inputs around their mean; None means all directions alike.
    Returns: up [d_out, r] with orthonormal columns and down = up^T W [r, d_in], in fp64.
    Raises: ValueError when the rank is not from 1 to the smaller side of the weight.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank is {rank}, it must be 1 to {min(weight.shape)} for a weight of {tuple(weight.shape)}")
    wide = weight.detach().double()
    scaled = wide
    if covariance is not None:
        values, vectors = torch.linalg.eigh(covariance.double())
        floor = 1e-6 * values.mean()  # a direction that never came up still counts a little
        scaled = wide @ vectors * values.clamp(min=floor).sqrt()  # W C^(1/2), up to a rotation at the right
    up = torch.linalg.svd(scaled, full_matrices=False).U[:, :rank]  # [d_out, r]
    return up, up.T @ wide


@torch.no_grad()
def input_moments(model: GPTlite, tokens: Tensor, batch_size: int = 8) -> list[Moments]:
    """Mean and covariance of what enters each block's attention while the model reads a text.

    Args:
        tokens: [n], read in windows of the model's context length; a rest is dropped.
        batch_size: windows that are read at once.
    Returns: one Moments per block.
    Raises: ValueError when the text is shorter than a window.
    """
    context, device = model.context_length, model.token_embedding.weight.device
    if len(tokens) < context:
        raise ValueError(f"the text has {len(tokens)} tokens, at least a window of {context} is needed")
    windows = tokens[: len(tokens) // context * context].view(-1, context)
    sums = [torch.zeros(block.ln1.normalized_shape[0], dtype=torch.float64) for block in model.blocks]
    squares = [torch.zeros(len(total), len(total), dtype=torch.float64) for total in sums]

    def note(layer: int, x: Tensor) -> None:
        x = x.double().cpu()  # [n, d]
        sums[layer] += x.sum(0)
        squares[layer] += x.T @ x

    hooks = [
        block.mha.register_forward_pre_hook(lambda module, args, layer=layer: note(layer, args[0]))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        for part in windows.split(batch_size):
            model(part.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    n = windows.numel()
    means = [total / n for total in sums]
    return [Moments(mean, square / n - mean.outer(mean)) for mean, square in zip(means, squares, strict=True)]
