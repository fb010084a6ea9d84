"""Training heads on a trunk that stays as it is, or together with it; and how well they guess what it says."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gptlite.data import training_batch
from gptlite.model import GPTlite
from gptlite.speculative.heads import Heads, trunk_states
from gptlite.speculative.theory import overlap
from gptlite.train import TrainSettings, loss_of, make_optimizers


def train_heads(
    model: GPTlite,
    heads: Heads,
    tokens: Tensor,
    settings: TrainSettings,
    together: float = 0.0,
    on_step: Callable[[int, float], None] | None = None,
) -> list[list[float]]:
    """Trains heads in place; eval mode before and after.

    Args:
        model: the trunk.
        tokens: the text [n] to train on.
        settings: `save_every` is the number of steps between two points of the curve; nothing is saved.
        together: 0 leaves the trunk as it is, and the heads learn its distribution (KL divergence). Above 0 the trunk
            learns the text, and the heads too, with this weight beside it {cite}`gloeckle2024mtp`.
        on_step: called after each step with the number of steps done and the heads' loss, in nats per token.
    Returns: the curve, rows of tokens seen and mean loss of the heads since the row before.
    Raises: ValueError on a negative weight, a text shorter than a window, or a loss that is no number any more.
    """
    if not 0 <= together < float("inf"):
        raise ValueError(f"together is {together}, it must be 0 (a trunk that stays as it is) or a positive weight")
    context, device = model.context_length, model.token_embedding.weight.device
    model.requires_grad_(together > 0).train(together > 0)
    heads.train()
    learning: list[nn.Module] = [heads, model] if together else [heads]
    optimizers = [optimizer for part in learning for optimizer in make_optimizers(part, settings)]  # type: ignore[arg-type]
    curve: list[list[float]] = []
    recent: list[float] = []
    for step in range(settings.steps):
        batch = training_batch(tokens, step, settings.batch_size, context, settings.seed)
        x, y = (part.to(device) for part in batch)  # [B, S]
        torch.manual_seed(settings.seed * 1_000_003 + step)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            states = trunk_states(model, x)
            if together:
                heads_loss = heads.loss(model, states, y, None)
                loss = loss_of(model.head(states.hidden), y, None) + together * heads_loss
            else:
                loss = heads_loss = heads.loss(model, states, y, model.head(states.hidden))
        value = heads_loss.item()
        if not math.isfinite(value):
            raise ValueError(f"the loss of step {step + 1} is {value}: choose a learning rate below {settings.lr:g}")
        loss.backward()
        for part in learning:
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * settings.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(value)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            seen = (step + 1) * settings.batch_size * context
            curve.append([seen, round(sum(recent) / len(recent), 4)])
            recent = []
        if on_step:
            on_step(step + 1, value)
    model.requires_grad_(True).eval()
    heads.eval()
    return curve


@torch.inference_mode()
def agreement(model: GPTlite, heads: Heads, tokens: Tensor, batch_size: int = 16) -> list[dict[str, float]]:
    """How well each head guesses what the trunk will say, over the whole windows of a text [n].

    Both read the text itself, so that a guess far ahead is judged as if those before it had been right.

    Returns: per head its "ahead"; "top", the share of the positions where its most probable token is the trunk's; and
        "overlap", the mean of sum(min(p, q)), which is the probability that a draft sampled from it is accepted at
        temperature 1 {cite}`leviathan2023speculative`.
    Raises: ValueError when the text is shorter than a window.
    """
    context, device = model.context_length, model.token_embedding.weight.device
    n = (len(tokens) - 1) // context
    if n < 1:
        raise ValueError(f"the text has {len(tokens)} tokens, a window of {context} needs at least {context + 1}")
    x, y = tokens[: n * context].view(n, context), tokens[1 : n * context + 1].view(n, context)  # [n, S]
    sums: dict[int, list[float]] = {}
    for inputs, following in zip(x.split(batch_size), y.split(batch_size), strict=True):
        states = trunk_states(model, inputs.to(device))
        logits = model.head(states.hidden).float()  # [B, S, V]
        for number, guess in enumerate(heads.guesses(model, states, following.to(device))):
            p, q = logits[:, guess.ahead :].softmax(-1), guess.logits.float().softmax(-1)
            same = (p.argmax(-1) == q.argmax(-1)).sum().item()
            both = overlap(p, q).double().sum().item()
            old = sums.setdefault(number, [guess.ahead, 0.0, 0.0, 0.0])
            sums[number] = [guess.ahead, old[1] + same, old[2] + both, old[3] + p[..., 0].numel()]
    return [
        {"ahead": int(ahead), "top": round(top / count, 4), "overlap": round(both / count, 4)}
        for ahead, top, both, count in sums.values()
    ]
