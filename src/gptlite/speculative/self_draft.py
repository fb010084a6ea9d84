"""Self-speculation: the target's own first layers, or the target without some of its layers, as the draft."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from gptlite.model import GPTlite
from gptlite.speculative.heads import Guess, Heads, TrunkStates
from gptlite.speculative.theory import overlap


class ExitHeads(Heads):
    """A way out of the trunk after each of some layers: a residual layer and a norm before the trunk's output layer.

    LayerSkip {cite}`elhoushi2024layerskip` trains the trunk itself so that its early layers can use its output layer.
    Here the trunk stays as it is, and an adapter does what a trained one would not need, as a tuned lens does
    {cite}`belrose2023lens`.

    Args:
        model: the trunk; an adapter starts as zero, a norm as a copy of the trunk's last one.
        layers: after how many blocks the ways out are.
    Raises: ValueError when a way out is not after 1 to L - 1 blocks, or one comes twice.
    """

    kind = "exit"

    def __init__(self, model: GPTlite, layers: Sequence[int]) -> None:
        layers = list(layers)
        if len(set(layers)) != len(layers) or not all(1 <= n < len(model.blocks) for n in layers):
            raise ValueError(f"layers is {layers}, each must be 1 to {len(model.blocks) - 1}, and come once")
        super().__init__(layers=layers)
        d = model.fc_out.in_features
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in layers)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in layers)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
            if not (norm.weight.is_meta or model.ln.weight.is_meta):
                norm.load_state_dict(model.ln.state_dict())

    def guesses(self, model: GPTlite, states: TrunkStates, following: Tensor) -> list[Guess]:
        guesses = []
        for n, block, norm in zip(self.sizes["layers"], self.blocks, self.norms, strict=True):  # type: ignore[arg-type]
            x = states.layers[n - 1]  # [B, S, d]
            guesses.append(Guess(model.head(norm(x + block(x))), 0))
        return guesses


class ExitNorm(nn.Module):
    """What stands in the place of the trunk's last norm when it is left early: x [..., d] -> [..., d]."""

    def __init__(self, block: nn.Linear, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.block, self.norm = block, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.block(x))


def with_blocks(model: GPTlite, layers: Sequence[int]) -> GPTlite:
    """The model with some of its blocks alone, in the same order; it shares every weight with the model.

    Args:
        layers: indices of the blocks that it has.
    Raises: ValueError when there are none, they are not in order, or the model has no such block.
    """
    layers = list(layers)
    if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < len(model.blocks):
        raise ValueError(f"layers is {layers}, it must be some of 0 to {len(model.blocks) - 1}, in order")
    small = copy(model)
    small._modules = dict(model._modules)
    small.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)  # type: ignore[assignment]
    small.config = replace(model.config, n_layers=len(layers))
    return small


def early_exit(model: GPTlite, heads: ExitHeads, layer: int) -> GPTlite:
    """The first blocks of the model and a way out: a draft model that shares every weight with its target.

    Args:
        layer: after how many blocks, one of those that the heads were trained for.
    Raises: ValueError when there is no such way out.
    """
    layers: list[int] = heads.sizes["layers"]  # type: ignore[assignment]
    if layer not in layers:
        raise ValueError(f"there is no way out after {layer} blocks, there are those after {layers}")
    small = with_blocks(model, range(layer))
    small.ln = ExitNorm(heads.blocks[layers.index(layer)], heads.norms[layers.index(layer)])  # type: ignore[arg-type,assignment]
    return small


@torch.inference_mode()
def choose_blocks(model: GPTlite, tokens: Tensor, n_skipped: int) -> list[int]:
    """Which blocks to keep when some are skipped, chosen one after the other by what the draft is worth without them.

    Zhang and others {cite}`zhang2024draftverify` search over attention and feed-forward layers one by one; whole
    blocks are enough to show the idea, and their cache is simply smaller.

    Args:
        tokens: windows of text [B, S] on which the draft is judged.
        n_skipped: blocks to leave out.
    Returns: indices of the blocks that are kept.
    Raises: ValueError when n_skipped is not 1 to L - 1.
    """
    if not 1 <= n_skipped < len(model.blocks):
        raise ValueError(f"n_skipped is {n_skipped}, it must be 1 to {len(model.blocks) - 1}")
    p = model(tokens).float().softmax(-1)  # [B, S, V]

    def worth(layers: list[int]) -> float:
        return overlap(p, with_blocks(model, layers)(tokens).float().softmax(-1)).mean().item()

    kept = list(range(len(model.blocks)))
    for _ in range(n_skipped):
        kept = max(([layer for layer in kept if layer != out] for out in kept), key=worth)
    return kept
