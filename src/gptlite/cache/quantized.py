"""A cache that keeps codes of older keys and values, and the newest ones as they are {cite}`liu2024kivi`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.attention import attend, merge_states
from gptlite.cache.contract import Parents, Positions, Segment, plan_rows
from gptlite.cache.tracked import TrackedCache
from gptlite.config import check_counts
from gptlite.model import MultiHeadAttention
from gptlite.quantize.kv import KVFormat, Parts, Recipe, Rule

if TYPE_CHECKING:
    from gptlite.model import GPTlite


@dataclass(frozen=True)
class Line:
    """The keys, or the values, of one sequence: codes of its first tokens, and the others as they are.

    Args:
        format, rule: how codes are made, and of which tokens.
        codes: per layer, of the first n tokens.
        rest: per layer [G, r, D], of those after them.
        n: tokens that have codes.
    """

    format: KVFormat
    rule: Rule
    codes: tuple[Parts, ...]
    rest: tuple[Tensor, ...]
    n: int = 0

    @classmethod
    def of(cls, kv_format: KVFormat, rule: Rule, layers: Sequence[Tensor]) -> Line:
        """A line of final tokens, per layer [G, n, D]; those that the rule names are quantised at once."""
        none = tuple(kv_format.encode(layer[:, :0]) for layer in layers)
        return cls(kv_format, rule, none, tuple(layers)).settled(layers[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, and what is in full precision."""
        return sum(part.nbytes for parts in (*self.codes, self.rest) for part in parts)

    def settled(self, n_final: int) -> Line:
        """The line after quantising what the rule names among its first n_final tokens; this one stays as it is."""
        n_new = self.rule.n_quantized(n_final) - self.n
        if n_new <= 0:
            return self
        codes = []
        for parts, layer in zip(self.codes, self.rest, strict=True):
            new = self.format.encode(layer[:, :n_new])
            codes.append(tuple(torch.cat(pair, dim=-2) for pair in zip(parts, new, strict=True)))
        rest = tuple(layer[:, n_new:].clone() for layer in self.rest)  # a view would keep what it was cut from
        return replace(self, codes=tuple(codes), rest=rest, n=self.n + n_new)

    def appended(self, layer: int, new: Tensor) -> Line:
        """The line with new tokens [G, S, D] of one layer behind the others."""
        longer = torch.cat([self.rest[layer], new], dim=1)
        return replace(self, rest=(*self.rest[:layer], longer, *self.rest[layer + 1 :]))

    def kept(self, order: Sequence[int]) -> Line:
        """The line with these of its tokens alone, counted from its first; all that have codes are among them."""
        places = [i - self.n for i in order[self.n :]]
        return replace(self, rest=tuple(layer[:, places] for layer in self.rest))

    def read(self, layer: int, begin: int, end: int) -> Tensor:
        """One layer's keys or values of some tokens, dequantised: [G, end - begin, D]."""
        rest, n = self.rest[layer], self.n
        found = [rest[:, max(begin - n, 0) : max(end - n, 0)]]
        if begin < n:
            step = self.format.tokens
            low, high = begin // step * step, min(-(-end // step) * step, n)  # whole groups
            values = self.format.decode(self.format.slice(self.codes[layer], low, high), rest.shape[-1], rest.dtype)
            found.insert(0, values[:, begin - low : min(end, n) - low])
        return torch.cat(found, dim=1)


class QuantizedCache(TrackedCache):
    """Keeps codes of what is final, and full precision for the newest tokens; it grows by concatenation.

    A token is final once a later step begins: nobody can take it back then. So `prepare` quantises, and a rejected
    draft never reaches the codes, nor the scales that others share with it. A step of S tokens finds in full precision
    its own, and at most `recipe.key_rule.bound(S) - S` keys and `recipe.value_rule.bound(S) - S` values before them.

    What a token sees of the past therefore depends on where its step began: a prompt that is read in pieces, or a draft
    that is verified, sees other roundings than the same tokens one by one. The cache is as close to the model as its
    codes are, not exact.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
        recipe: formats and rules, from `gptlite.quantize.kv.recipe`.
        tile: tokens whose keys and values are dequantised at once.
    Raises: ValueError when the tile is not a whole number of at least 1.
    """

    def __init__(self, model: GPTlite, recipe: Recipe, tile: int = 256) -> None:
        check_counts(tile=tile)
        super().__init__(model)
        self.recipe, self.tile = recipe, tile
        self.keys: dict[Hashable, Line] = {}
        self.values: dict[Hashable, Line] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales, and keys and values in full precision that are held."""
        return sum(line.nbytes for lines in (self.keys, self.values) for line in lines.values())

    def _lines_of(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Line, Line]:
        return (
            Line.of(self.recipe.keys, self.recipe.key_rule, keys),
            Line.of(self.recipe.values, self.recipe.value_rule, values),
        )

    def _begin(self, sequence: Hashable) -> None:
        with torch.device(self.device):
            keys = [torch.empty(G, 0, Dk, dtype=self.dtype) for G, Dk, _ in self.shapes]
            values = [torch.empty(G, 0, Dv, dtype=self.dtype) for G, _, Dv in self.shapes]
        self.positions[sequence] = []
        self.keys[sequence], self.values[sequence] = self._lines_of(keys, values)

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        plan = plan_rows(sequences, positions, parents)
        held = [key for key in sequences if key in self.positions]
        settled = [
            (key, lines[key].settled(len(self.positions[key]))) for lines in (self.keys, self.values) for key in held
        ]
        # nothing fails from here on
        self.keys |= dict(settled[: len(held)])
        self.values |= dict(settled[len(held) :])
        return self._grow(plan, sequences, parents, self._begin)

    def _append(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> None:
        """Puts the real tokens of k and v [B, G, S, D] behind what each sequence has."""
        # a latent has no values beside it: as many of width 0 are kept, so that all else counts alike
        for lines, new in ((self.keys, k), (self.values, k[..., :0] if v is None else v)):
            for key, row in zip(segment.sequences, new, strict=True):
                lines[key] = lines[key].appended(layer, row[:, self._real[key]])

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        assert segment.k_pos is not None
        self._append(layer, k, v, segment)
        T = segment.k_pos.shape[1]

        def whole(lines: dict[Hashable, Line]) -> Tensor:
            rows = [lines[key].read(layer, 0, len(self.positions[key])) for key in segment.sequences]
            return torch.stack([F.pad(row, (0, 0, 0, T - row.shape[1])) for row in rows])  # [B, G, T, D]

        return whole(self.keys), None if v is None else whole(self.values), segment.k_pos

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, segment: Segment, attention: MultiHeadAttention
    ) -> Tensor:
        """Stores k and v, and dequantises what is cached a tile at a time, merging what each gives.

        A variant that mixes in its own way (and a latent, where v is None) gets all keys of the segment in one piece.
        Returns: [B, H, S, Dv].
        """
        if v is None or type(attention).mix is not MultiHeadAttention.mix:
            return super().attend(layer, q, k, v, segment, attention)
        assert segment.k_pos is not None
        self._append(layer, k, v, segment)
        seen = segment.visible(segment.k_pos, attention.window, attention.sinks)  # bool [B, 1, S, T]
        rows = [
            self._attend_row(layer, q[b : b + 1], seen[b : b + 1], key, attention.scale)
            for b, key in enumerate(segment.sequences)
        ]
        return torch.cat(rows)

    def _attend_row(self, layer: int, q: Tensor, seen: Tensor, sequence: Hashable, scale: float) -> Tensor:
        """One sequence's queries [1, H, S, D] and what they see [1, 1, S, T] -> [1, H, S, Dv], tile by tile."""
        keys, values = self.keys[sequence], self.values[sequence]
        n = len(self.positions[sequence])
        out = lse = None
        for begin in range(0, max(n, 1), self.tile):
            end = min(begin + self.tile, n)
            k, v = (line.read(layer, begin, end)[None] for line in (keys, values))  # [1, G, tile, D]
            part, part_lse = attend(q, k, v, seen[..., begin:end], scale, need_lse=True)
            if out is None or lse is None:
                out, lse = part, part_lse
            else:
                out, lse = merge_states(out, lse, part, part_lse)
        assert out is not None
        return out

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        for key, (begin, path) in zip(sequences, self._cut(sequences, kept), strict=True):
            order = [*range(begin), *(begin + i for i in path)]
            for lines in (self.keys, self.values):
                lines[key] = lines[key].kept(order)

    def free(self, sequence: Hashable) -> None:
        self._held(sequence)
        for store in (self.positions, self.keys, self.values):
            del store[sequence]
        self._real.pop(sequence, None)

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        positions = self._held(sequence)
        self._absent(new)
        # a line is never changed, only replaced, so the two can share it
        self.positions[new] = list(positions)
        self.keys[new], self.values[new] = self.keys[sequence], self.values[sequence]

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        """The sequence's state, dequantised, so that any cache can load it.

        One with the same recipe makes the same codes of it again, since the values lie on its grid; in a 16-bit dtype
        up to the rounding of that dtype.
        """
        positions = self._held(sequence)
        state = {"k_pos": torch.tensor(positions, dtype=torch.int64)}
        for name, lines in (("k", self.keys), ("v", self.values)):
            line = lines[sequence]
            state |= {f"{name}.{i}": line.read(i, 0, len(positions)) for i in range(len(self.shapes))}
        return state

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        self._absent(sequence)
        positions = self._check_state(state)
        keys, values = (
            [state[f"{name}.{i}"].to(self.device, self.dtype, copy=True) for i in range(len(self.shapes))]
            for name in "kv"
        )
        self.keys[sequence], self.values[sequence] = self._lines_of(keys, values)
        self.positions[sequence] = positions
