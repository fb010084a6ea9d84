"""Hidden states as a second lesson: a projection maps the student's onto the teacher's, which may be wider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.compress.distill import cosine_loss, hidden_loss
from gptlite.compress.objectives import SoftLabels
from gptlite.model import GPTlite


class HiddenStates(SoftLabels):
    """Soft labels, and what chosen blocks put out: squared differences {cite}`romero2015fitnets` or directions.

    The projections are trained along with the student and thrown away with the teacher; the student keeps its shape.

    Args:
        teacher: as in `SoftLabels`.
        d_student: width of the student.
        pairs: which block of the student learns from which of the teacher, both counted from 0.
        squares: weight of `hidden_loss`, at least 0.
        cosine: weight of `cosine_loss` {cite}`sanh2019distilbert`, at least 0.
        soft: weight of the soft and hard labels together, at least 0.
        temperature, hard: as in `SoftLabels`.
    Raises: ValueError when a pair names a block that the teacher lacks, or a weight is negative.
    """

    def __init__(
        self,
        teacher: GPTlite,
        d_student: int,
        pairs: Sequence[tuple[int, int]],
        squares: float = 1.0,
        cosine: float = 0.0,
        soft: float = 1.0,
        temperature: float = 1.0,
        hard: float = 0.0,
    ) -> None:
        super().__init__(teacher, temperature=temperature, hard=hard)
        if not pairs or any(not 0 <= there < len(teacher.blocks) or here < 0 for here, there in pairs):
            raise ValueError(f"pairs is {pairs}, it must pair blocks with some of the teacher's {len(teacher.blocks)}")
        for name, weight in (("squares", squares), ("cosine", cosine), ("soft", soft)):
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{name} is {weight}, it must be at least 0")
        self.pairs, self.squares, self.cosine, self.soft = list(pairs), squares, cosine, soft
        projections = [nn.Linear(d_student, teacher.token_embedding.embedding_dim) for _ in pairs]
        generator = torch.Generator().manual_seed(0)  # the same projections in a resumed run
        for projection in projections:
            nn.init.normal_(projection.weight, std=d_student**-0.5, generator=generator)
            nn.init.zeros_(projection.bias)
        self.projections = self.along = nn.ModuleList(projections)

    def loss(self, model: GPTlite, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch: labels, and the mean over the pairs of blocks of their hidden states, a scalar."""
        found, here = with_hidden(model, x, [pair[0] for pair in self.pairs])
        with torch.no_grad():
            goal, there = with_hidden(self.teachers[0], x, [pair[1] for pair in self.pairs])
        total = self.soft * self.loss_of_logits(found, goal, y)
        for projection, mine, theirs in zip(self.projections, here, there, strict=True):
            mapped = projection(mine)  # [B * S, d of the teacher]
            for weight, measure in ((self.squares, hidden_loss), (self.cosine, cosine_loss)):
                if weight:
                    total = total + weight / len(self.pairs) * measure(mapped, theirs)
        return total

    def describe(self) -> dict[str, Any]:
        """What tells this objective from others."""
        weights = {"squares": self.squares, "cosine": self.cosine, "soft": self.soft}
        return {**super().describe(), **weights, "pairs": [list(pair) for pair in self.pairs]}


def with_hidden(model: GPTlite, x: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """A forward pass that also gives what some blocks put out.

    Args:
        x: tokens [B, S]. blocks: their numbers, from 0.
    Returns: logits [B, S, V], and for each of `blocks` its output [B * S, d].
    Raises: ValueError when the model has no such block.
    """
    if odd := [number for number in blocks if not 0 <= number < len(model.blocks)]:
        raise ValueError(f"block {odd[0]} is asked for, the model has {len(model.blocks)}, counted from 0")
    seen: dict[int, Tensor] = {}
    hooks = [
        model.blocks[number].register_forward_hook(lambda _, __, out, number=number: seen.update({number: out}))
        for number in set(blocks)
    ]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return logits, [seen[number] for number in blocks]


def even_pairs(n_student: int, n_teacher: int) -> list[tuple[int, int]]:
    """Each block of the student with the one that ends the same share of the teacher, such as 0 with 2 and 1 with 5.

    Raises: ValueError when the student has no block, or more than the teacher.
    """
    if not 1 <= n_student <= n_teacher:
        raise ValueError(f"the student has {n_student} blocks, it must have 1 to the teacher's {n_teacher}")
    return [(i, round((i + 1) * n_teacher / n_student) - 1) for i in range(n_student)]
