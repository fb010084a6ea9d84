"""On-policy distillation: the student writes, and the teacher says what it would have expected at each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.compress.distill import distillation_loss, reverse_loss
from gptlite.compress.objectives import check_share
from gptlite.generate import generate
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams
from gptlite.train import Objective, TrainSettings


class OnPolicy(Objective):
    """Learn a teacher's distribution on the text and on the student's own samples {cite}`agarwal2024gkd`.

    What the student writes is data: no gradient goes through the sampling.

    Args:
        teacher: put into eval mode, and run without gradients.
        share: lambda, the share of the steps that read the student's own samples, in [0, 1].
        begin: the first step that may; before it, the student is no writer yet.
        n_prompt: tokens of text that each sample goes on from; nothing is learned from them.
        reverse: learn by KL(student || teacher) on the student's samples {cite}`gu2024minillm`.
    Raises: ValueError when a number is out of range.
    """

    def __init__(
        self, teacher: GPTlite, share: float = 0.5, begin: int = 0, n_prompt: int = 32, reverse: bool = False
    ) -> None:
        super().__init__(teacher)
        check_share(share=share)
        for name, value, least in (("begin", begin, 0), ("n_prompt", n_prompt, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, it must be at least {least}")
        self.share, self.begin, self.n_prompt, self.reverse = share, begin, n_prompt, reverse

    def draw(self, model: GPTlite, tokens: Tensor, step: int, settings: TrainSettings) -> tuple[Tensor, ...]:
        """Inputs [B, S], and the first position that counts, a scalar: 0 on text, n_prompt - 1 on samples."""
        x, _ = super().draw(model, tokens, step, settings)
        if step < self.begin or torch.rand(()) >= self.share:
            return x, torch.tensor(0)
        return write(model, x[:, : self.n_prompt], x.shape[1]), torch.tensor(self.n_prompt - 1)

    def loss(self, model: GPTlite, x: Tensor, first: Tensor) -> Tensor:
        """The divergence of one batch, a scalar."""
        assert self.teacher is not None
        with torch.no_grad():
            goal = self.teacher(x)[:, first:]  # [B, S - first, V]
        found = model(x)[:, first:]
        own = int(first) > 0
        return reverse_loss(found, goal) if own and self.reverse else distillation_loss(found, goal)

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others."""
        numbers = {"share": self.share, "begin": self.begin, "n_prompt": self.n_prompt, "reverse": self.reverse}
        return {"kind": "OnPolicy", **super().describe(), **numbers}


def write(model: GPTlite, prompts: Tensor, n_tokens: int, temperature: float = 1.0, seed: int | None = None) -> Tensor:
    """What a model writes after some prompts, ready to be learned from.

    Args:
        prompts: [B, n].
        n_tokens: length of each row afterwards, above n and at most one more than the model's context.
        temperature: of the sampling.
        seed: None takes one from torch's generator, which training seeds before each step.
    Returns: prompts and samples [B, n_tokens], on the CPU. The model is in the mode in which it was.
    Raises: ValueError when n_tokens is out of range.
    """
    n = prompts.shape[1]
    if not n < n_tokens <= model.context_length + 1:
        raise ValueError(f"n_tokens is {n_tokens}, it must be {n + 1} to {model.context_length + 1}")
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    training, device = model.training, model.fc_out.weight.device
    model.eval()
    with torch.autocast(device.type, enabled=False):
        cache = StaticCache(model, len(prompts), n_tokens)
        params = SamplingParams(temperature)
        text = generate(model, prompts.to(device), n_tokens - n, params, cache, seed=seed)
    model.train(training)
    return text.cpu()
