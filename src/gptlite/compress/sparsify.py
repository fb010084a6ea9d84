"""Zeros in a trained model without training: by magnitude, gradient, Wanda or SparseGPT, scattered or 2:4."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.compress.masks import mask_pattern, mask_smallest, wanda_scores
from gptlite.compress.sparsegpt import second_moment, sparsegpt
from gptlite.layers import calibrate, linear_layers
from gptlite.model import GPTlite

METHODS = ("magnitude", "taylor", "wanda", "sparsegpt")


def sparsify(
    model: GPTlite,
    batches: Sequence[Tensor],
    sparsity: float = 0.5,
    method: str = "wanda",
    pattern: tuple[int, int] | None = None,
) -> GPTlite:
    """A copy of the model in which a share of the weights of each linear layer in the blocks is 0.

    Wanda and SparseGPT go block by block: a later block is pruned for what the pruned earlier ones give it.

    Args:
        batches: tokens [B, S] that the inputs and gradients are taken from; "magnitude" looks at none.
        sparsity: share of the weights that goes, in [0, 1]; of no effect with a pattern.
        method: "magnitude", "taylor" (size of weight times gradient), "wanda" or "sparsegpt".
        pattern: n and m of an n:m pattern along the inputs.
    Raises: ValueError on an unknown method, a sparsity outside [0, 1], or without batches where they are needed.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, it must be one of {', '.join(METHODS)}")
    model = deepcopy(model).eval()
    if method in ("magnitude", "taylor"):
        layers = linear_layers(model)
        felt = weight_gradients(model, batches) if method == "taylor" else {}
        for name, layer in layers.items():
            weight: Tensor = layer.weight  # type: ignore[assignment]
            scores = weight.detach().abs() * felt.get(name, torch.ones_like(weight))
            keep = mask_smallest(scores, sparsity) if pattern is None else mask_pattern(scores, *pattern)
            weight.data *= keep
        return model
    for at in calibrate(model, batches):
        for name, inputs in at.inputs.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            weight = layer.weight.detach()
            if method == "wanda":
                scores = wanda_scores(weight, inputs)
                keep = (
                    mask_smallest(scores, sparsity, per_row=True) if pattern is None else mask_pattern(scores, *pattern)
                )
                layer.weight.data = weight * keep
            else:
                layer.weight.data, _ = sparsegpt(weight, second_moment(inputs), sparsity, pattern)
    return model


def weight_gradients(model: GPTlite, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Root of the mean square of the loss's gradient, for each linear layer in the blocks [d_out, d_in].

    Times the weight, this is the first-order estimate of what its removal changes {cite}`molchanov2019importance`;
    squares keep the gradients of different windows, whose mean is near 0 after training, from cancelling.

    Args:
        batches: tokens [B, S]; each window counts by itself.
    Raises: ValueError when there are no batches.
    """
    if not batches:
        raise ValueError("the gradient needs at least 1 batch, there are 0")
    layers = linear_layers(model)
    weights: list[Tensor] = [layer.weight for layer in layers.values()]  # type: ignore[misc]
    squares = [torch.zeros_like(weight) for weight in weights]
    n_windows = 0
    for tokens in batches:
        for window in tokens:  # [S]
            loss = F.cross_entropy(model(window[None, :-1])[0].float(), window[1:])
            for square, grad in zip(squares, torch.autograd.grad(loss, weights)):
                square += grad.square()
            n_windows += 1
    return {name: (square / n_windows).sqrt() for name, square in zip(layers, squares)}


def zeros(model: GPTlite) -> tuple[int, int]:
    """Weights of the blocks' linear layers that are 0, and all of them."""
    weights: list[Tensor] = [layer.weight for layer in linear_layers(model).values()]  # type: ignore[misc]
    return sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
