"""What a step is to the model (a segment) and what the model asks of a cache (the contract).

Positions are data, and a hole is position -1: ragged batches, padding, chunked prefill, paging, eviction, trees of
drafts and their rollback are all the same code.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.attention import visible

if TYPE_CHECKING:
    from gptlite.model import MultiHeadAttention

Positions = Tensor | Sequence[Tensor]  # of a step's tokens: [B, S], or one [S_b] per row
Parents = Sequence[Sequence[int] | None] | None  # of a step's tokens, per row, where they are trees of drafts


@dataclass
class Segment:
    """The rows of a step that have the same number S of new tokens.

    Args:
        rows: where their tokens lie in the packed step [B * S]; None when the segment is the whole step.
        positions: of their tokens [B, S]; -1 is a hole.
        sequences: the cache's key of each row.
        lines: which line of the cache's storage each row has [B]; None when the cache has no lines.
        span: the same lines as a slice where they are neighbours, so that reading them copies nothing.
        slots: where in its line each token is stored [B, S].
        k_pos: positions of the keys that the rows attend to [B, T]; -1 is a hole.
        mask: bool [B, 1, S, T], which keys a tree of drafts lets each token see; None where there is no tree.
        sees_all: whether the cache knows that nothing is masked: each token sees every key, and is the last of them.
    """

    rows: Tensor | None
    positions: Tensor
    sequences: tuple[Hashable, ...] = ()
    lines: Tensor | None = None
    span: Tensor | slice | None = None
    slots: Tensor | None = None
    k_pos: Tensor | None = None
    mask: Tensor | None = None
    sees_all: bool = False
    _visible: dict[tuple[int | None, int], Tensor] = field(default_factory=dict, repr=False)

    def visible(self, k_pos: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
        """Which keys each token sees: `attention.visible` and the tree's mask, bool [B, 1 or G, S, T].

        Made once per step for all layers that attend to the same keys with the same window.
        """
        shared = k_pos is self.k_pos or k_pos is self.positions
        if shared and (window, sinks) in self._visible:
            return self._visible[window, sinks]
        mask = visible(self.positions, k_pos, window, sinks)
        mask = mask if self.mask is None else mask & self.mask
        if shared:
            self._visible[window, sinks] = mask
        return mask

    def take(self, packed: Tensor) -> Tensor:
        """The segment's part of packed [n, ...] as [B, S, ...]."""
        return (packed if self.rows is None else packed[self.rows]).view(*self.positions.shape, *packed.shape[1:])


class Cache:
    """Keys and values of the tokens that a model has read, by sequence. Every cache passes one contract test."""

    # how many of the last queries' received weight the cache wants to see (H2O, SnapKV); none by default
    observes = 0

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        """Takes in the positions of one step's tokens, on the host, once for all layers; all or nothing.

        Args:
            sequences: the key of each row, no two alike; one that is new to the cache begins empty.
            positions: of each row's new tokens, [B, S] or B tensors [S_b]; -1 is a hole. A row's own are the
                positions of its text: they do not repeat one that is cached, save in a tree.
            parents: for a row whose tokens are a tree of drafts, the index within the row of each token's parent,
                -1 for a child of the cached text; None for a row that is a plain run of tokens.
            tokens: the step's packed tokens [n_new], for a cache that shares blocks by their content; one that does
                not ignores them, and one that does shares nothing of a sequence whose tokens it was not told.
        Returns: the segments of the step, ready for `GPTlite.run`.
        Raises: ValueError when the step does not fit or makes no sense; then the cache is as it was.
        """
        raise NotImplementedError

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        """Stores one layer's new keys and values, and gives what the segment attends to.

        Args:
            k: [B, G, S, Dk], of the segment's tokens.
            v: [B, G, S, Dv], or None when k is a latent that holds both (MLA).
        Returns: k [B, G, T, Dk], v [B, G, T, Dv] or None, k_pos [B, T] or [B, G, T].
        """
        raise NotImplementedError

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, segment: Segment, attention: MultiHeadAttention
    ) -> Tensor:
        """Stores k and v, and mixes the queries q [B, H, S, D] with what is cached.

        The layer's own `mix` does it, so that a variant's attention and window hold with a cache too. A paged or a
        quantised cache overrides this, to read through its table or to dequantise tile by tile.
        Returns: [B, H, S, Dv].
        """
        keys, values, k_pos = self.update(layer, k, v, segment)
        # values are None for a latent alone, and then the layer's mix expands it
        mask = attention.mask(segment, k_pos)
        return attention.mix(q, keys, values, segment.positions, k_pos, mask)  # type: ignore[arg-type]

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        """Keeps some of the last step's tokens of each sequence, and forgets the others as if never seen.

        Args:
            kept: per sequence how many of its tokens, from the first, or the indices of one path of its tree.
                Holes do not count.
        Raises: ValueError when a sequence was not in the last step or has no such tokens.
        """
        raise NotImplementedError

    def free(self, sequence: Hashable) -> None:
        """Forgets the sequence and gives its memory back. Raises: ValueError when the cache does not hold it."""
        raise NotImplementedError

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        """Begins the sequence `new` as a copy of `sequence`; from there each goes its way.

        Raises: ValueError when `sequence` is not held, `new` is, or there is no room.
        """
        raise NotImplementedError

    def whole(self, segment: Segment) -> Segment | None:
        """The same step over all lines of the cache, in their order, with holes where a line has no new token.

        Its shapes do not depend on who is in the step, and nothing is gathered: what a program compiled for fixed
        shapes wants. Row b of `segment` is row `segment.lines[b]` of the result.
        Args:
            segment: one that `prepare` returned, the whole of its step and no tree.
        Returns: None for a cache that has no lines.
        """
        return None

    # tokens of the longest sequence that the cache could hold if it held nothing else; None means no limit of its own
    longest: int | None = None

    def fits(self, new: Mapping[Hashable, int]) -> bool:
        """Whether a step that adds so many tokens to each of these sequences has room, as the cache stands now."""
        return True

    def match(self, tokens: Tensor, salt: str = "") -> int:
        """How many of these tokens [n], from the first, the cache already holds; 0 for one that shares nothing.

        Args:
            salt: what else must agree for two texts to share: an adapter, a tenant.
        """
        return 0

    def begin(self, sequence: Hashable, tokens: Tensor, salt: str = "") -> int:
        """Begins a sequence with what the cache already holds of its text.

        Args:
            tokens: its prompt [n].
            salt: as in `match`.
        Returns: how many of the tokens are cached, at most n - 1, since the last must be read to give logits; the
            caller goes on from there. 0, and nothing begun, for a cache that shares nothing.
        Raises: ValueError when the cache already holds the sequence.
        """
        return 0

    def next_position(self, sequence: Hashable) -> int:
        """The position after the last cached one; 0 for a sequence that the cache does not hold."""
        raise NotImplementedError

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        """The sequence's state, to move to another cache or a file.

        Returns: "k_pos" [n], and for each layer "k.LAYER" [G, n, Dk] and "v.LAYER" [G, n, Dv]; no holes.
        """
        raise NotImplementedError

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        """Begins a sequence from an exported state.

        Raises: ValueError when the sequence is held, or the state does not fit the model or the room.
        """
        raise NotImplementedError


def whole_batch(positions: Tensor) -> Segment:
    """The segment of a step without a cache: one batch with positions [B, S], attending to itself."""
    return Segment(None, positions)


def plan_rows(
    sequences: Sequence[Hashable], positions: Positions, parents: Parents
) -> list[tuple[list[int], Tensor, Tensor | None]]:
    """Checks a step and groups its rows by their number of new tokens; what every cache's `prepare` begins with.

    Returns: per group the indices of its rows, their positions [B, S], and where their tokens lie in the packed
        step [B * S], which is None for a group that is the whole step.
    Raises: ValueError that names what is wrong with the step.
    """
    if len(sequences) != len(positions) or not len(sequences):
        raise ValueError(
            f"a step has {len(sequences)} sequences and positions for {len(positions)}, not the same or none"
        )
    if len(set(sequences)) != len(sequences):
        twice = next(key for i, key in enumerate(sequences) if key in list(sequences)[:i])
        raise ValueError(f"sequence {twice!r} comes twice in a step")
    whole = isinstance(positions, Tensor)
    for row in [positions] if isinstance(positions, Tensor) else positions:
        if row.dim() != (2 if whole else 1) or row.is_floating_point():
            found, wanted = f"{row.dtype} {tuple(row.shape)}", "[B, S]" if whole else "[S] for each row"
            raise ValueError(f"positions is {found}, it must be integers {wanted}")
    if parents is not None:
        if len(parents) != len(sequences):
            raise ValueError(f"a step has {len(sequences)} sequences and parents for {len(parents)}")
        for key, row, tree in zip(sequences, positions, parents, strict=True):
            if tree is not None and (len(tree) != len(row) or any(not -1 <= p < i for i, p in enumerate(tree))):
                raise ValueError(f"sequence {key!r} has parents {list(tree)}, each must be -1 or come before its child")
    if isinstance(positions, Tensor):
        if not positions.shape[1]:
            raise ValueError(f"sequence {sequences[0]!r} has no new tokens in this step")
        return [(list(range(len(sequences))), positions, None)]
    starts = torch.tensor([0, *(len(row) for row in positions)]).cumsum(0).tolist()
    groups: dict[int, list[int]] = {}
    for b, row in enumerate(positions):
        if not len(row):
            raise ValueError(f"sequence {sequences[b]!r} has no new tokens in this step")
        groups.setdefault(len(row), []).append(b)
    plan = []
    for S, members in groups.items():
        packed = torch.tensor([starts[b] + i for b in members for i in range(S)])  # [B * S]
        rows = None if len(groups) == 1 else packed.to(positions[0].device)
        plan.append((members, torch.stack([positions[b] for b in members]), rows))
    return plan


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Which tokens of a tree each of them sees: its ancestors and itself. Returns: bool [S, S]."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def kept_indices(real: Sequence[int], kept: int | Sequence[int], sequence: Hashable) -> list[int]:
    """The kept ones among a row's real (not hole) tokens, as `Cache.keep` counts them.

    Args:
        real: indices within the row of its tokens that are not holes.
    Raises: ValueError when there are no such tokens.
    """
    order = list(kept) if not isinstance(kept, int) else list(range(kept)) if kept >= 0 else [kept]
    if any(not 0 <= i < len(real) for i in order) or order != sorted(set(order)):
        raise ValueError(f"cannot keep {kept!r} of the {len(real)} tokens of sequence {sequence!r}")
    return [real[i] for i in order]
