"""How much a block matters: by how far it turns the residual stream, or by the loss without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.compress.structured import Kept, prune
from gptlite.measure import validation_loss
from gptlite.model import GPTlite


@torch.no_grad()
def block_influence(model: GPTlite, batches: Sequence[Tensor]) -> Tensor:
    """1 minus the mean cosine between what goes into a block and what comes out {cite}`men2024shortgpt`: [L].

    Args:
        batches: tokens [B, S]. A block that changes the stream little has a low influence, and is the first to go.
    Raises: ValueError when there are no batches.
    """
    if not batches:
        raise ValueError("the influence needs at least 1 batch, there are 0")
    cosines: list[list[Tensor]] = [[] for _ in model.blocks]

    def see(i: int) -> Callable[[nn.Module, tuple, Tensor], None]:
        return lambda _, args, out: cosines[i].append(F.cosine_similarity(args[0].float(), out.float(), dim=-1))

    hooks = [block.register_forward_hook(see(i)) for i, block in enumerate(model.blocks)]
    try:
        for tokens in batches:
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([1 - torch.cat(part).mean() for part in cosines])


def block_costs(model: GPTlite, tokens: Tensor, among: Sequence[int] | None = None) -> list[float]:
    """Loss of the model without each of its blocks, one at a time, in nats per token.

    Args:
        tokens: the text [n] that the loss is measured on.
        among: blocks that the model has at all; None means all. The others are left out throughout.
    Returns: by the order of `among`.
    Raises: ValueError when fewer than 2 blocks are there.
    """
    here = list(range(len(model.blocks))) if among is None else list(among)
    if len(here) < 2:
        raise ValueError(f"{len(here)} block is there, one without another needs at least 2")
    left = [torch.tensor([b for b in here if b != gone]) for gone in here]
    return [validation_loss(prune(model, Kept(blocks=blocks)), tokens) for blocks in left]


def choose_blocks(model: GPTlite, tokens: Tensor, n_keep: int) -> Tensor:
    """Drops the block whose loss costs least, then again without it, until n_keep are left: ascending [n_keep].

    Args:
        tokens: the text [n] that the loss is measured on.
    Raises: ValueError when n_keep is not 1 to the number of blocks.
    """
    here = list(range(len(model.blocks)))
    if not 1 <= n_keep <= len(here):
        raise ValueError(f"{n_keep} blocks are to be kept, it must be 1 to {len(here)}")
    while len(here) > n_keep:
        costs = block_costs(model, tokens, here)
        here.pop(costs.index(min(costs)))
    return torch.tensor(here)
