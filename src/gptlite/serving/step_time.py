"""How long a step of an engine takes, by arithmetic or by a fit through measured steps: what a simulation runs on.

A step is a list of rows (n_past, n_new): tokens of a sequence that are cached already, and those that the step adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gptlite.arithmetic import Cost, ModelShape, step_bound, step_costs, total
from gptlite.hardware import GPU

Rows = Sequence[tuple[int, int]]
StepTime = Callable[[Rows], float]


def counts(rows: Rows) -> tuple[int, int, int, int]:
    """What the cost of a step depends on: (new tokens, rows, keys read, pairs of query and key).

    Raises: ValueError when there is no row, or one adds no token.
    """
    if not rows or any(n_new < 1 or n_past < 0 for n_past, n_new in rows):
        raise ValueError(f"a step of rows {list(rows)[:3]}, each must add at least 1 token, and one row is needed")
    n_new = sum(new for _, new in rows)
    keys = sum(past + new for past, new in rows)
    pairs = sum(new * past + new * (new + 1) // 2 for past, new in rows)
    return n_new, len(rows), keys, pairs


class ArithmeticTime:
    """The least time of a mixed step {cite}`williams2009roofline`: its linear layers, and then its attention.

    Each of the two takes max(FLOPs / peak, bytes / bandwidth). The linear layers read their weights once for all tokens
    of the step; in attention each row reads its own keys and values. The head runs for one token of each row.

    Args:
        shape: the model's; without a window, a latent or experts, whose costs are no sum over rows.
        card: the GPU.
        reached: share of the card's peak and bandwidth that is reached, in (0, 1].
        bytes_per_weight, bytes_per_value: 2 in 16 bits.
    Raises: ValueError on a shape that does not add up row by row, or a share that is none.
    """

    def __init__(
        self,
        shape: ModelShape,
        card: GPU,
        reached: float = 1.0,
        bytes_per_weight: float = 2,
        bytes_per_value: float = 2,
    ) -> None:
        if shape.n_sliding or shape.d_latent or shape.n_experts:
            raise ValueError("the model has a window, a latent or experts: its cost is no sum over the rows of a step")
        if not 0 < reached <= 1:
            raise ValueError(f"reached is {reached}, it must be in (0, 1]")
        self.peak, self.bandwidth = reached * card.peak_flops, reached * card.bandwidth

        def cost(n_new: int, n_past: int = 0, n_logits: int = 0) -> Cost:
            return total(step_costs(shape, 1, n_new, n_past, bytes_per_weight, bytes_per_value, n_logits))

        one = cost(1)
        # one more cached token adds a pair and the bytes of a key; what remains of a token is its linear layers
        self.pair = cost(1, 1).flops - one.flops
        self.key = cost(1, 1).kv_bytes - one.kv_bytes
        self.token = one.flops - self.pair
        self.row = cost(1, n_logits=1).flops - one.flops
        self.weights = cost(1, n_logits=1).weight_bytes

    def costs(self, rows: Rows) -> tuple[Cost, Cost]:
        """FLOPs and bytes of a step: of its linear layers, and of its attention."""
        n_new, n_rows, keys, pairs = counts(rows)
        linear = Cost(self.token * n_new + self.row * n_rows, self.weights)
        return linear, Cost(self.pair * pairs, 0, self.key * keys)

    def __call__(self, rows: Rows) -> float:
        """Seconds."""
        return sum(step_bound(cost, self.peak, self.bandwidth)[0] for cost in self.costs(rows))


@dataclass(frozen=True)
class FittedTime:
    """Seconds of a step as a sum: a fixed part, and parts for each new token, row, key read and pair.

    Args:
        parts: seconds (fixed, per new token, per row, per key read, per pair), none negative.
        error: median of |predicted - measured| / measured over the steps that it was fitted to.
    """

    parts: tuple[float, float, float, float, float]
    error: float = 0.0

    @classmethod
    def fit(cls, steps: Sequence[tuple[Rows, float]]) -> FittedTime:
        """Fits the parts to measured steps by least squares of the relative error, with none below 0.

        Args:
            steps: of each, its rows and its seconds.
        Raises: ValueError when there are fewer than 5 steps, or a time is not positive.
        """
        if len(steps) < 5 or not all(0 < seconds < np.inf for _, seconds in steps):
            raise ValueError(f"{len(steps)} steps to fit, it takes at least 5, each with a time above 0")
        x = np.array([[1.0, *counts(rows)] for rows, _ in steps])  # [steps, 5]
        t = np.array([seconds for _, seconds in steps])  # [steps]
        x_relative = x / t[:, None]
        used = list(range(x.shape[1]))
        while True:  # a part that would be negative is none: leave the most negative out and fit again
            found = np.linalg.lstsq(x_relative[:, used], np.ones(len(t)), rcond=None)[0]
            worst = int(np.argmin(found * x[:, used].mean(0)))
            if found[worst] >= 0:
                break
            del used[worst]
        parts = np.zeros(x.shape[1])
        parts[used] = found
        error = float(np.median(np.abs(x @ parts - t) / t))
        return cls(tuple(float(part) for part in parts), error)  # type: ignore[arg-type]

    def __call__(self, rows: Rows) -> float:
        """Seconds."""
        return float(np.dot(self.parts, (1, *counts(rows))))
