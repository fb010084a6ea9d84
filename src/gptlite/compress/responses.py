"""Response-level distillation: the teacher writes text, and the student learns it like any other text."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from gptlite.compress.on_policy import write
from gptlite.model import GPTlite
from gptlite.train import Objective, TrainSettings, loss_of


def write_responses(
    teacher: GPTlite,
    tokens: Tensor,
    n: int,
    n_prompt: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
) -> Tensor:
    """The teacher's answers to prompts from a text {cite}`kim2016sequence`.

    Args:
        tokens: the text [m] that prompts are cut from, at random places.
        n: answers. n_prompt: tokens of each prompt. temperature: of the sampling. seed: of places and samples.
        batch_size: answers that are written at once.
    Returns: windows [n, S + 1] of prompt and answer, S the teacher's context length.
    Raises: ValueError when n is below 1, or the text is shorter than a prompt.
    """
    if n < 1 or len(tokens) < n_prompt:
        raise ValueError(f"{n} answers to prompts of {n_prompt} tokens of a text of {len(tokens)} cannot be written")
    starts = torch.randint(len(tokens) - n_prompt + 1, (n,), generator=torch.Generator().manual_seed(seed))
    prompts = tokens[starts[:, None] + torch.arange(n_prompt)]  # [n, n_prompt]
    length = teacher.context_length + 1
    parts = [
        # each row draws from its own seed, so that the batch size changes nothing
        write(teacher, part, length, temperature, seed=seed * 1_000_003 + i * batch_size)
        for i, part in enumerate(prompts.split(batch_size))
    ]
    return torch.cat(parts)


class Responses(Objective):
    """Learn a teacher's answers as text: only tokens are needed, no probabilities and no common vocabulary of logits.

    Args:
        windows: [n, S + 1] of prompt and answer, by `write_responses`; read in order, and from the first again.
        n_prompt: tokens of each prompt, from which nothing is learned.
    Raises: ValueError when the windows are no longer than their prompts.
    """

    def __init__(self, windows: Tensor, n_prompt: int = 32) -> None:
        super().__init__()
        if windows.dim() != 2 or not 1 <= n_prompt < windows.shape[1]:
            raise ValueError(f"windows of shape {tuple(windows.shape)} hold no answer after {n_prompt} prompt tokens")
        self.windows, self.n_prompt = windows, n_prompt

    def draw(self, model: GPTlite, tokens: Tensor, step: int, settings: TrainSettings) -> tuple[Tensor, ...]:
        """Inputs [B, S] and targets [B, S] of the next windows."""
        B = settings.batch_size
        rows = self.windows[torch.arange(step * B, (step + 1) * B) % len(self.windows)]
        return rows[:, :-1], rows[:, 1:]

    def loss(self, model: GPTlite, x: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy of the answers, a scalar in nats per token."""
        first = self.n_prompt - 1  # the prompt's last token predicts the answer's first
        return loss_of(model(x)[:, first:], y[:, first:], None)

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others: the answers by their hash."""
        digest = hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()
        return {"kind": "Responses", "n_prompt": self.n_prompt, "windows": digest}
