"""Uptraining: a short run with a small part of the original tokens that lets a converted model settle."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.train import Objective, TrainSettings, make_optimizers

PARTS = ("attention", "all")


def uptrain(
    model: GPTlite,
    tokens: Tensor,
    settings: TrainSettings,
    teacher: GPTlite | None = None,
    parts: str = "attention",
    watch: Tensor | None = None,
    on_step: Callable[[int, float], None] | None = None,
    objective: Objective | None = None,
) -> list[list[float]]:
    """Trains a converted model a little further {cite}`ainslie2023gqa`, in place; eval mode before and after.

    Args:
        tokens: the text [n] that it trains on.
        settings: `save_every` is the number of steps between two points of the curve; nothing is saved.
        teacher: learn the distribution of the model before its conversion (KL divergence per token)
            {cite}`hinton2015distilling`; None learns the text.
        parts: which weights move: those of "attention" (with the norm before it), or "all".
        watch: a held-out text [m] whose loss the curve follows; None leaves it out.
        on_step: called after each step with the number of steps done and the step's loss, in nats per token.
        objective: what is minimised instead of the text's or the teacher's loss; it brings its own teacher.
    Returns: the curve, rows of tokens seen, mean training loss since the row before, and the held-out loss, in nats
        per token; its first row, before any step, has no training loss and repeats the held-out one.
    Raises: ValueError on unknown parts, a text shorter than a window, both a teacher and an objective, or a loss that
        is no number any more.
    """
    if objective is not None and teacher is not None:
        raise ValueError("a teacher and an objective are given: the objective brings its own teacher")
    if parts not in PARTS:
        raise ValueError(f"parts is {parts!r}, it must be one of {', '.join(PARTS)}")
    device, goal = model.token_embedding.weight.device, objective or Objective(teacher)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parts == "all" or ".mha." in name or ".ln1." in name)
    along = None if goal.along is None else goal.along.to(device).train()
    optimizers = make_optimizers(model, settings, along)
    lowp = settings.precision == "bf16"

    def held_out() -> list[float]:
        if watch is None:
            return []
        with torch.autocast(device.type, torch.bfloat16, enabled=lowp):
            return [round(validation_loss(model, watch), 4)]

    curve: list[list[float]] = [[0, *held_out()]]
    recent: list[float] = []
    model.train()
    for step in range(settings.steps):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        with torch.autocast(device.type, torch.bfloat16, enabled=lowp):
            batch = goal.draw(model, tokens, step, settings)
            loss = goal.loss(model, *(part.to(device) for part in batch))
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(f"the loss of step {step + 1} is {value}: choose a learning rate below {settings.lr:g}")
        loss.backward()
        for trained in (model, along):
            if trained is not None:
                torch.nn.utils.clip_grad_norm_([p for p in trained.parameters() if p.grad is not None], 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * settings.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(value)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            seen = (step + 1) * settings.batch_size * model.context_length
            curve.append([seen, round(sum(recent) / len(recent), 4), *held_out()])
            recent = []
        if on_step:
            on_step(step + 1, value)
    model.eval().requires_grad_(True)
    return curve
