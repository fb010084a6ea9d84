"""Whole texts in one step, as a quantised cache would have seen them token by token: to measure what it loses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gptlite.cache.contract import Cache, Parents, Positions, Segment, whole_batch
from gptlite.model import MultiHeadAttention
from gptlite.quantize.kv import Recipe, Rule


class QuantizedText(Cache):
    """Gives the logits that a `QuantizedCache` gives when a text is read token by token, all of them at once.

    Query i finds codes of the tokens that the recipe's rules name when i tokens are final, and full precision after
    them. All keys and values are quantised in one shot; it keeps nothing, so each step is a text of its own.

    Args:
        recipe: formats and rules, from `gptlite.quantize.kv.recipe`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        if not isinstance(positions, Tensor) or parents is not None:
            raise ValueError("a text is read whole: positions must be [B, S], and no tree of drafts")
        if not torch.equal(positions, torch.arange(positions.shape[1]).expand(positions.shape).to(positions)):
            raise ValueError("a text is read whole: each row's positions must be 0 to S - 1")
        return [whole_batch(positions)]

    def next_position(self, sequence: Hashable) -> int:
        return 0

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, segment: Segment, attention: MultiHeadAttention
    ) -> Tensor:
        """Attention to codes and to full precision: q [B, H, S, D], k [B, G, S, D], v [B, G, S, Dv] -> [B, H, S, Dv].

        Raises: ValueError for a latent, or attention that mixes in its own way.
        """
        if v is None or type(attention).mix is not MultiHeadAttention.mix:
            raise ValueError(f"{type(attention).__name__} mixes in its own way, only plain attention is measured here")
        H, G, S = q.shape[1], k.shape[1], q.shape[2]
        seen = attention.mask(segment, segment.positions.to(q.device))  # bool [B, 1, S, S]
        assert seen is not None  # a text that is read whole has something to mask
        coded_k, coded_v = (_coded(rule, S, q.device) for rule in (self.recipe.key_rule, self.recipe.value_rule))
        grouped = q.unflatten(1, (G, H // G)) * attention.scale  # [B, G, H/G, S, D]
        codes, plain = (grouped @ part[:, :, None].mT for part in (self.recipe.keys.rounded(k), k))
        scores = torch.where(coded_k, codes, plain).masked_fill(~seen[:, :, None], float("-inf"))
        weights = scores.softmax(-1)  # [B, G, H/G, S, S]; each query sees itself
        values = self.recipe.values.rounded(v)
        out = (weights * coded_v) @ values[:, :, None] + (weights * ~coded_v) @ v[:, :, None]
        return out.flatten(1, 2)  # [B, H, S, Dv]


def _coded(rule: Rule, n: int, device: torch.device) -> Tensor:
    """Which of n tokens each query finds as codes, when those before it are final: bool [n, n]."""
    counts = torch.tensor([rule.n_quantized(i) for i in range(n)], device=device)
    return torch.arange(n, device=device) < counts[:, None]
