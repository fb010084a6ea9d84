"""The bookkeeping that caches of whole tokens share: positions, real tokens of the last step, trees, `keep`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.cache.contract import Cache, Parents, Segment, kept_indices, tree_mask

if TYPE_CHECKING:
    from gptlite.model import GPTlite


class TrackedCache(Cache):
    """Knows the positions of every sequence's tokens, and which of its last step can still be taken back.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
    """

    def __init__(self, model: GPTlite) -> None:
        self.shapes = [block.mha.kv_shape for block in model.blocks]
        weight = model.token_embedding.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.positions: dict[Hashable, list[int]] = {}  # of each sequence's tokens, in order
        self._real: dict[Hashable, list[int]] = {}  # of the last step: which tokens of a row are no holes

    def next_position(self, sequence: Hashable) -> int:
        positions = self.positions.get(sequence)
        return positions[-1] + 1 if positions else 0

    def _held(self, sequence: Hashable) -> list[int]:
        """The sequence's positions. Raises: ValueError when it is not held."""
        if sequence not in self.positions:
            raise ValueError(f"the cache does not hold sequence {sequence!r}")
        return self.positions[sequence]

    def _absent(self, sequence: Hashable) -> None:
        if sequence in self.positions:
            raise ValueError(f"the cache already holds sequence {sequence!r}")

    def _step_mask(
        self, keys: Sequence[Hashable], trees: Parents, slots: Sequence[Sequence[int]], T: int
    ) -> Tensor | None:
        """Of each row's keys [B, 1, S, T], which its tree lets each new token see; None when no row has a tree.

        Args:
            slots: per row, where among its T keys the step's real tokens lie.
        """
        if trees is None or all(tree is None for tree in trees):
            return None
        S = max(len(tree) for tree in trees if tree is not None)
        mask = torch.ones(len(keys), 1, S, T, dtype=torch.bool)
        for b, (key, tree) in enumerate(zip(keys, trees, strict=True)):
            if tree is not None:
                mask[b, 0, :, list(slots[b])] = tree_mask(tree)[:, self._real[key]]
        return mask.to(self.device)

    def _grow(
        self,
        plan: list[tuple[list[int], Tensor, Tensor | None]],
        sequences: Sequence[Hashable],
        parents: Parents,
        begin: Callable[[Hashable], None],
    ) -> list[Segment]:
        """Takes in the positions of a planned step whose tokens come behind those that each sequence has.

        Args:
            plan: what `plan_rows` gave.
            begin: makes an empty sequence, called for each one that is new.
        Returns: the step's segments, with k_pos [B, T] of all that a row then holds.
        """
        self._real = {}
        segments = []
        for members, pos, rows in plan:
            keys = tuple(sequences[b] for b in members)
            slots = []  # per row, where among its keys the new ones come
            for key, row in zip(keys, pos.tolist(), strict=True):
                if key not in self.positions:
                    begin(key)
                n_held, self._real[key] = len(self.positions[key]), [i for i, p in enumerate(row) if p >= 0]
                self.positions[key] = self.positions[key] + [row[i] for i in self._real[key]]
                slots.append(range(n_held, len(self.positions[key])))
            known = [self.positions[key] for key in keys]
            T = max(1, *map(len, known))
            k_pos = torch.tensor([row + [-1] * (T - len(row)) for row in known], device=self.device)  # [B, T]
            mask = self._step_mask(keys, parents and [parents[b] for b in members], slots, T)
            segments.append(Segment(rows, pos.to(self.device), keys, k_pos=k_pos, mask=mask))
        return segments

    def _cut(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> list[tuple[int, list[int]]]:
        """Cuts the positions as `keep` says, after checking every sequence.

        Returns: per sequence, where its last step began among its tokens, and which of that step's are kept.
        """
        if len(sequences) != len(kept) or len(set(sequences)) != len(sequences):
            raise ValueError(f"{len(sequences)} sequences and what to keep of {len(kept)}: one for each, none twice")
        for key in sequences:
            if key not in self._real:
                raise ValueError(f"sequence {key!r} was not in the last step")
        chosen = [kept_indices(self._real[key], n, key) for key, n in zip(sequences, kept, strict=True)]
        cuts = []
        for key, indices in zip(sequences, chosen, strict=True):
            held, real = self.positions[key], self._real[key]
            begin, path = len(held) - len(real), [real.index(i) for i in indices]
            self.positions[key] = held[:begin] + [held[begin + i] for i in path]
            self._real[key] = indices
            cuts.append((begin, path))
        return cuts

    def _check_state(self, state: dict[str, Tensor]) -> list[int]:
        """Returns: its positions. Raises: ValueError when an exported state is not of a model with these shapes."""
        if "k_pos" not in state:
            raise ValueError("the state has no k_pos, the positions of its tokens")
        k_pos = state["k_pos"]
        if k_pos.dim() != 1 or k_pos.is_floating_point() or bool((k_pos < 0).any()):
            raise ValueError(
                f"the state's k_pos is {k_pos.dtype} {tuple(k_pos.shape)}, it must be integers [n], no holes"
            )
        n = len(k_pos)
        for layer, (G, Dk, Dv) in enumerate(self.shapes):
            for name, shape in ((f"k.{layer}", (G, n, Dk)), (f"v.{layer}", (G, n, Dv))):
                found = tuple(state[name].shape) if name in state else "missing"
                if found != shape:
                    raise ValueError(f"the state's {name} is {found}, the cache needs {shape}")
        return k_pos.tolist()
