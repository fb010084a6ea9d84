"""Distillation while the teacher runs beside the student: soft labels, their mix with the text, logits, ensembles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gptlite.compress.distill import check_temperature, distillation_loss, logit_loss, mean_teacher
from gptlite.model import GPTlite
from gptlite.train import Objective, loss_of, weights_sha256


class SoftLabels(Objective):
    """Learn the distribution of one teacher, or the mean of several, and the text too {cite}`hinton2015distilling`.

    Args:
        teachers: one or more, with the student's vocabulary; put into eval mode, and run without gradients.
        temperature: tau, softens both distributions.
        hard: alpha, the weight of the text's cross-entropy, in [0, 1]; the soft labels have the rest.
        logits: match the centred logits by their squared difference instead; the temperature then has no part in it.
    Raises: ValueError when there is no teacher, or a number is out of range.
    """

    def __init__(self, *teachers: GPTlite, temperature: float = 1.0, hard: float = 0.0, logits: bool = False) -> None:
        super().__init__()
        if not teachers:
            raise ValueError("0 teachers are given, soft labels need at least 1")
        check_temperature(temperature)
        check_share(hard=hard)
        self.teachers = [teacher.eval() for teacher in teachers]
        self.temperature, self.hard, self.logits = temperature, hard, logits

    @torch.no_grad()
    def goal(self, x: Tensor) -> Tensor:
        """The logits [B, S, V] to learn for tokens x [B, S]: the teacher's, or those of the teachers' mean."""
        if len(self.teachers) == 1:
            return self.teachers[0](x)
        return mean_teacher([teacher(x) for teacher in self.teachers], self.temperature)

    def loss(self, model: GPTlite, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch: the weighted sum of soft and hard labels, a scalar."""
        return self.loss_of_logits(model(x), self.goal(x), y)

    def loss_of_logits(self, found: Tensor, goal: Tensor, y: Tensor) -> Tensor:
        """Soft and hard labels together, a scalar, from logits of both [B, S, V] and targets [B, S]."""
        soft = logit_loss(found, goal) if self.logits else distillation_loss(found, goal, self.temperature)
        return soft if self.hard == 0 else (1 - self.hard) * soft + self.hard * loss_of(found, y, None)

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others: its numbers, and the weights of the teachers by their hash."""
        numbers = {"temperature": self.temperature, "hard": self.hard, "logits": self.logits}
        return {"kind": type(self).__name__, **numbers, "teachers": [weights_sha256(t) for t in self.teachers]}


def check_share(**shares: float) -> None:
    """Raises: ValueError that names the first share that is not in [0, 1]."""
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, it must be in [0, 1]")
