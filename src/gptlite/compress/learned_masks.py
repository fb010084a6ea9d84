"""Learned masks: gates on heads and neurons that open and close by gradient, with a fixed number open in each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gptlite.compress.importance import Scores
from gptlite.compress.structured import ffn_layers, n_heads
from gptlite.data import training_batch
from gptlite.model import GPTlite
from gptlite.train import loss_of

BETA = 2 / 3  # temperature of the hard concrete distribution
LOW, HIGH = -0.1, 1.1  # what it is stretched to before it is clipped, so that 0 and 1 come up exactly
EDGE = BETA * torch.tensor(-LOW / HIGH).log().item()


def open_probability(location: Tensor) -> Tensor:
    """Chance that a gate is not exactly 0 {cite}`louizos2018l0`, elementwise [...].

    Args:
        location: log alpha of the hard concrete distribution [...].
    """
    return (location - EDGE).sigmoid()


def hard_concrete(location: Tensor, u: Tensor) -> Tensor:
    """Gates in [0, 1] that are often exactly 0 or 1, yet have a gradient {cite}`louizos2018l0`: [...].

    Args:
        location: log alpha [...]. u: uniform in (0, 1) [...].
    """
    soft = ((u.logit() + location) / BETA).sigmoid()
    return (soft * (HIGH - LOW) + LOW).clamp(0, 1)


@torch.no_grad()
def budget_shift(location: Tensor, n_open: float) -> Tensor:
    """What to add to all locations [n] so that n_open gates are open on average: a scalar, by bisection.

    Raises: ValueError when n_open is not between 0 and n.
    """
    if not 0 < n_open < len(location):
        raise ValueError(f"{n_open} gates are to be open, it must be between 0 and {len(location)}")
    low, high = (torch.tensor(end).to(location) - location.mean() for end in (-60.0, 60.0))
    for _ in range(60):
        middle = (low + high) / 2
        if open_probability(location + middle).sum() < n_open:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@contextmanager
def gated(model: GPTlite, heads: list[Tensor], neurons: list[Tensor]) -> Iterator[None]:
    """While it lasts, each head's and neuron's output is multiplied by its gate.

    Args:
        heads: gates of each block [H]. neurons: of each block [d_ff].
    """

    def times(gate: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
        def scale(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            wide = gate.repeat_interleave(args[0].shape[-1] // len(gate))  # [H * Dv]
            return (args[0] * wide.to(args[0].dtype),)

        return scale

    hooks = []
    for block, head, neuron in zip(model.blocks, heads, neurons):
        hooks.append(block.mha.out_proj.register_forward_pre_hook(times(head)))
        hooks.append(block.ffwd.net[2].register_forward_pre_hook(times(neuron)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def learn_masks(
    model: GPTlite,
    tokens: Tensor,
    n_open: tuple[int, int],
    steps: int,
    batch_size: int = 2,
    lr: float = 0.1,
    seed: int = 0,
    precision: str = "fp32",
    on_step: Callable[[int, float], None] | None = None,
) -> Scores:
    """Learns which heads and neurons of each block to keep, for a target number of each; the weights stay as they are.

    Sheared LLaMA {cite}`xia2024sheared` holds the target by Lagrange multipliers while the weights learn too. Here one
    shift per block and kind holds it exactly at every step, and falls from all open to the target over half the steps.

    Args:
        tokens: the text [n] to learn from. n_open: heads and neurons of a block that stay open on average.
        steps, batch_size, lr, seed: of the gates' training (Adam).
        precision: "fp32", or "bf16" for the products in bf16.
        on_step: called after each step with the number of steps done and the step's loss, in nats per token.
    Returns: the gates' locations as scores; all channels score 1.
    Raises: ValueError when n_open is not below what a block has, or steps below 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, it must be at least 1")
    device = model.ln.weight.device
    sizes = [(n_heads(block.mha), ffn_layers(block)[0].out_features) for block in model.blocks]
    for have in sizes:
        if not all(0 < n < size for n, size in zip(n_open, have)):
            raise ValueError(f"{n_open} heads and neurons are to stay, it must be below the {have} that are there")
    locations = [torch.zeros(n, device=device, requires_grad=True) for size in sizes for n in size]
    optimizer = torch.optim.Adam(locations, lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        done = min(1.0, 2 * (step + 1) / steps)
        gates = []
        for i, location in enumerate(locations):
            budget = len(location) + done * (n_open[i % 2] - len(location))
            shift = budget_shift(location, min(budget, len(location) - 1e-3))
            u = torch.rand(len(location), generator=generator).clamp(1e-6, 1 - 1e-6).to(device)
            gates.append(hard_concrete(location + shift, u))
        x, y = (part.to(device) for part in training_batch(tokens, step, batch_size, model.context_length, seed))
        with (
            gated(model, gates[::2], gates[1::2]),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            loss = loss_of(model(x), y, None)
        grads = torch.autograd.grad(loss, locations)
        for location, grad in zip(locations, grads):
            location.grad = grad
        optimizer.step()
        if on_step:
            on_step(step + 1, loss.item())
    found = [location.detach() for location in locations]
    return Scores(found[::2], found[1::2], torch.ones(model.ln.weight.numel(), device=device))
