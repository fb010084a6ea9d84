"""Online distillation without a teacher: two students train at the same time and learn from each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gptlite.compress.distill import distillation_loss
from gptlite.model import GPTlite
from gptlite.train import Objective, loss_of, weights_sha256


class Mutual(Objective):
    """Each of two students learns the text and the other's distribution of the moment {cite}`zhang2018mutual`.

    Args:
        peer: the other student, with other random weights; trained along, and left behind at the end.
    """

    def __init__(self, peer: GPTlite) -> None:
        super().__init__()
        self.along: GPTlite = peer
        self.start = weights_sha256(peer)

    def loss(self, model: GPTlite, x: Tensor, y: Tensor) -> Tensor:
        """The sum of both students' losses, a scalar; each one's divergence has a gradient for that one alone."""
        mine, theirs = model(x), self.along(x)  # [B, S, V]
        own = loss_of(mine, y, None) + distillation_loss(mine, theirs)
        return own + loss_of(theirs, y, None) + distillation_loss(theirs, mine)

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others: the peer's weights before the first step, by their hash."""
        return {"kind": "Mutual", "peer": self.start}
