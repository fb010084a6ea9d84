"""Dense caches: one line of memory per sequence, grown (dynamic), preallocated (static) or reused in a ring."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.cache.contract import Parents, Positions, Segment, plan_rows
from gptlite.cache.tracked import TrackedCache
from gptlite.config import check_counts

if TYPE_CHECKING:
    from gptlite.model import GPTlite


class DynamicCache(TrackedCache):
    """Grows by concatenation: as simple as a cache can be, and each step copies all that it holds.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
    """

    def __init__(self, model: GPTlite) -> None:
        super().__init__(model)
        self.k: dict[Hashable, list[Tensor]] = {}  # per sequence and layer [G, n, Dk]
        self.v: dict[Hashable, list[Tensor]] = {}  # per sequence and layer [G, n, Dv]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(t.nbytes for kv in (self.k, self.v) for layers in kv.values() for t in layers)

    def _begin(self, sequence: Hashable) -> None:
        self.positions[sequence] = []
        self.k[sequence] = [torch.empty(G, 0, Dk, dtype=self.dtype, device=self.device) for G, Dk, _ in self.shapes]
        self.v[sequence] = [torch.empty(G, 0, Dv, dtype=self.dtype, device=self.device) for G, _, Dv in self.shapes]

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        plan = plan_rows(sequences, positions, parents)
        return self._grow(plan, sequences, parents, self._begin)

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        assert segment.k_pos is not None
        T = segment.k_pos.shape[1]
        keys = self._append(self.k, layer, k, segment.sequences, T)  # [B, G, T, Dk]
        # a latent has no values beside it: as many of width 0 are kept, so that all else counts alike
        values = self._append(self.v, layer, k[..., :0] if v is None else v, segment.sequences, T)  # [B, G, T, Dv]
        return keys, None if v is None else values, segment.k_pos

    def _append(
        self, store: dict[Hashable, list[Tensor]], layer: int, new: Tensor, sequences: Sequence[Hashable], T: int
    ) -> Tensor:
        """Appends the real tokens of new [B, G, S, D] to each sequence's own, and pads all to [B, G, T, D]."""
        for key, row in zip(sequences, new, strict=True):
            real = self._real[key]
            row = row if len(real) == row.shape[1] else row[:, real]  # without its holes [G, S, D]
            store[key][layer] = torch.cat([store[key][layer], row], dim=1)  # [G, n, D]
        rows = [store[key][layer] for key in sequences]
        padded = [row if row.shape[1] == T else F.pad(row, (0, 0, 0, T - row.shape[1])) for row in rows]
        return padded[0][None] if len(padded) == 1 else torch.stack(padded)  # a lone row is not copied

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        for key, (begin, path) in zip(sequences, self._cut(sequences, kept), strict=True):
            order = [*range(begin), *(begin + i for i in path)]
            for store in (self.k, self.v):
                store[key] = [layer[:, order] for layer in store[key]]

    def free(self, sequence: Hashable) -> None:
        self._held(sequence)
        for store in (self.positions, self.k, self.v):
            del store[sequence]
        self._real.pop(sequence, None)

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        positions = self._held(sequence)
        self._absent(new)
        # a concatenation makes new tensors, so the two can share the old ones
        self.positions[new] = list(positions)
        self.k[new], self.v[new] = list(self.k[sequence]), list(self.v[sequence])

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        state = {"k_pos": torch.tensor(self._held(sequence), dtype=torch.int64)}
        for name, store in (("k", self.k), ("v", self.v)):
            state |= {f"{name}.{layer}": kept.clone() for layer, kept in enumerate(store[sequence])}
        return state

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        self._absent(sequence)
        self.positions[sequence] = self._check_state(state)
        for name, store in (("k", self.k), ("v", self.v)):
            layers = [state[f"{name}.{layer}"] for layer in range(len(self.shapes))]
            store[sequence] = [kept.to(self.device, self.dtype, copy=True) for kept in layers]


class StaticCache(TrackedCache):
    """Preallocated for a number of sequences and tokens, and written in place, so that shapes and addresses stay.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
        n_sequences: lines of memory, one per sequence.
        max_tokens: tokens that a line holds.
        bucket: T is padded to a multiple of it, so that few shapes occur and a compiled step is used again; 1 reads
            no further than is filled, and a step of one token per sequence then needs no mask.
    Raises: ValueError when a count is not a whole number of at least 1.
    """

    def __init__(self, model: GPTlite, n_sequences: int, max_tokens: int, bucket: int = 1) -> None:
        check_counts(n_sequences=n_sequences, max_tokens=max_tokens, bucket=bucket)
        super().__init__(model)
        self.max_tokens, self.bucket = max_tokens, bucket
        self.longest = max_tokens
        # one slot more than is ever attended to: holes write there
        size = max_tokens + 1
        with torch.device(self.device):
            self.k = [torch.zeros(n_sequences, G, size, Dk, dtype=self.dtype) for G, Dk, _ in self.shapes]
            self.v = [torch.zeros(n_sequences, G, size, Dv, dtype=self.dtype) for G, _, Dv in self.shapes]
            self.k_pos = torch.full((n_sequences, size), -1)  # [lines, size]
        self._lines: dict[Hashable, int] = {}
        self._slots: dict[Hashable, list[int]] = {}  # of each sequence's tokens, in order

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values allocated."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def _take_lines(self, sequences: Sequence[Hashable]) -> dict[Hashable, int]:
        """A line for each sequence that has none. Raises: ValueError when there are too few."""
        new = [key for key in sequences if key not in self._lines]
        free = sorted(set(range(len(self.k_pos))) - set(self._lines.values())) if new else []
        if len(new) > len(free):
            raise ValueError(f"{len(new)} new sequences need a line each, {len(free)} of {len(self.k_pos)} are free")
        return dict(zip(new, free, strict=False))

    def _next_slots(self, n_held: int, n_new: int, sequence: Hashable) -> list[int]:
        """Where a sequence's next tokens go, after those it has. Raises: ValueError when the line is full."""
        if n_held + n_new > self.max_tokens:
            raise ValueError(
                f"sequence {sequence!r} needs {n_held + n_new} tokens, a line of the cache has {self.max_tokens}"
            )
        return list(range(n_held, n_held + n_new))

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        plan = plan_rows(sequences, positions, parents)
        # everything that can fail comes before anything that changes
        new_lines = self._take_lines(sequences)
        real, taken = {}, {}
        for members, pos, _ in plan:
            for b, row in zip(members, pos.tolist(), strict=True):
                key = sequences[b]
                real[key] = [i for i, p in enumerate(row) if p >= 0]
                taken[key] = self._next_slots(len(self._slots.get(key, ())), len(real[key]), key)
        self._lines |= new_lines
        self._real = real
        segments = []
        for members, pos, rows in plan:
            keys = tuple(sequences[b] for b in members)
            slots = []  # [B, S]; holes go to the spare slot
            for key, row in zip(keys, pos.tolist(), strict=True):
                next_slot = iter(taken[key])
                slots.append([next(next_slot) if p >= 0 else self.max_tokens for p in row])
                self._slots.setdefault(key, []).extend(taken[key])
                self.positions.setdefault(key, []).extend(row[i] for i in real[key])
            used = max(1, *(min(len(self._slots[key]), self.max_tokens) for key in keys))
            T = min(self.max_tokens, -(-used // self.bucket) * self.bucket)
            numbers = [self._lines[key] for key in keys]
            lines = torch.tensor(numbers, device=self.device)  # [B]
            at, pos = torch.tensor(slots, device=self.device), pos.to(self.device)  # [B, S]
            self.k_pos[lines[:, None], at] = pos
            # neighbouring lines are read where they lie; others are gathered
            begin, end = numbers[0], numbers[0] + len(numbers)
            span = slice(begin, end) if numbers == list(range(begin, end)) else lines
            trees = parents and [parents[b] for b in members]
            mask = self._step_mask(keys, trees, [taken[key] for key in keys], T)
            segment = Segment(rows, pos, keys, lines, span, at, self.k_pos[span, :T], mask)
            segment.sees_all = mask is None and self._last_of_all(keys, slots, T) and isinstance(span, slice)
            segments.append(segment)
        return segments

    def _last_of_all(self, keys: Sequence[Hashable], slots: list[list[int]], T: int) -> bool:
        """Whether each row has one new token, in slot T - 1, whose position is past those of all the keys before it."""
        # read in whole buckets, the answer would change from step to step, and a compiled step with it
        if self.bucket > 1 or any(row != [T - 1] for row in slots):
            return False
        return all(self.positions[key][-1] == max(self.positions[key]) for key in keys)

    def whole(self, segment: Segment) -> Segment:
        n, n_rows = len(self.k_pos), len(segment.sequences)
        if isinstance(segment.span, slice) and n_rows == n:
            return segment
        assert segment.k_pos is not None and segment.slots is not None and segment.lines is not None
        lines, S, T = segment.lines, segment.positions.shape[1], segment.k_pos.shape[1]
        pos, at = (torch.full((n, S), idle, device=self.device) for idle in (-1, self.max_tokens))
        pos[lines], at[lines] = segment.positions, segment.slots  # [lines, S]
        every = torch.arange(n, device=self.device)
        return Segment(None, pos, segment.sequences, every, slice(0, n), at, self.k_pos[:, :T])

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        assert segment.k_pos is not None
        keys = self._write(self.k[layer], k, segment)  # [B, G, T, Dk]
        return keys, None if v is None else self._write(self.v[layer], v, segment), segment.k_pos

    @staticmethod
    def _write(stored: Tensor, new: Tensor, segment: Segment) -> Tensor:
        """Writes new [B, G, S, D] into its slots of stored [lines, G, size, D], and reads [B, G, T, D]."""
        lines, slots, k_pos = segment.lines, segment.slots, segment.k_pos
        assert lines is not None and slots is not None and k_pos is not None
        if segment.sees_all:  # each row's last key, side by side
            read = stored[segment.span, :, : k_pos.shape[1]]
            read[:, :, -1:] = new
            return read
        stored[lines[:, None], :, slots] = new.transpose(1, 2)  # [B, S, G, D]
        return stored[segment.span, :, : k_pos.shape[1]]

    def fits(self, new: Mapping[Hashable, int]) -> bool:
        lines = len(self.k_pos) - len(self._lines)
        return sum(key not in self._lines for key in new) <= lines and all(
            len(self._slots.get(key, ())) + n <= self.max_tokens for key, n in new.items()
        )

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        for key, (begin, path) in zip(sequences, self._cut(sequences, kept), strict=True):
            line, slots = self._lines[key], self._slots[key][begin:]
            source, target = [slots[i] for i in path], slots[: len(path)]
            if source != target:  # a path through a tree: close the gaps that its rejected siblings leave
                for store in (*self.k, *self.v):
                    store[line][:, target] = store[line][:, source]
            self.k_pos[line, slots] = -1
            self.k_pos[line, target] = torch.tensor(self.positions[key][begin:], dtype=torch.int64, device=self.device)
            self._slots[key] = self._slots[key][:begin] + target

    def free(self, sequence: Hashable) -> None:
        self._held(sequence)
        self.k_pos[self._lines[sequence]] = -1
        for lines in (*self.k, *self.v):  # masking gives the weight 0, but 0 times a NaN left behind would be NaN
            lines[self._lines[sequence]] = 0
        for store in (self._lines, self._slots, self.positions, self._real):
            store.pop(sequence, None)

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        positions = self._held(sequence)
        self._absent(new)
        self._lines |= self._take_lines([new])
        for store in (*self.k, *self.v, self.k_pos):
            store[self._lines[new]] = store[self._lines[sequence]]
        self._slots[new], self.positions[new] = list(self._slots[sequence]), list(positions)

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        positions, line = self._held(sequence), self._lines[sequence]
        stored = self.k_pos[line].tolist()
        # a ring has written over its older tokens: only the last can be there, less those that `keep` took back
        last = list(zip(self._slots[sequence], positions, strict=True))[-self.max_tokens :]
        whole = [(slot, p) for slot, p in last if stored[slot] == p]
        slots = [slot for slot, _ in whole]
        state = {"k_pos": torch.tensor([p for _, p in whole], dtype=torch.int64)}
        for name, store in (("k", self.k), ("v", self.v)):
            state |= {f"{name}.{layer}": lines[line][:, slots] for layer, lines in enumerate(store)}
        return state

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        self._absent(sequence)
        positions = self._check_state(state)
        # a ring takes more at once here than in a step
        slots = StaticCache._next_slots(self, 0, len(positions), sequence)
        self._lines |= self._take_lines([sequence])
        line = self._lines[sequence]
        self._slots[sequence], self.positions[sequence] = slots, positions
        self.k_pos[line, slots] = state["k_pos"].to(self.device)
        for name, store in (("k", self.k), ("v", self.v)):
            for layer, lines in enumerate(store):
                lines[line][:, slots] = state[f"{name}.{layer}"].to(self.device, self.dtype)


class RingCache(StaticCache):
    """A static cache for a model whose attention has a window: slots are used again once they fall out of it.

    A step of c tokens on a window of w needs w + c - 1 slots: its first token still sees w - 1 keys before itself
    while the last is being written. A rejected draft loses nothing, since what it overwrote was out of reach.

    Args:
        model: a model each of whose layers has a `window`.
        n_sequences: lines of memory, one per sequence.
        chunk: c, new tokens of a sequence in a step at most.
    Raises: ValueError when a count is not a whole number of at least 1, a layer has no window, or one keeps sinks,
        which a ring would overwrite.
    """

    def __init__(self, model: GPTlite, n_sequences: int, chunk: int = 1) -> None:
        check_counts(n_sequences=n_sequences, chunk=chunk)
        windows = [block.mha.window for block in model.blocks]
        widths = [window for window in windows if window is not None]
        if len(widths) < len(windows) or any(block.mha.sinks for block in model.blocks):
            raise ValueError(f"a ring needs a window and no sinks in each layer, the windows are {windows}")
        super().__init__(model, n_sequences, max(widths) + chunk - 1, bucket=1)
        self.chunk, self.longest = chunk, None

    def fits(self, new: Mapping[Hashable, int]) -> bool:
        lines = len(self.k_pos) - len(self._lines)
        return sum(key not in self._lines for key in new) <= lines and all(n <= self.chunk for n in new.values())

    def _last_of_all(self, keys: Sequence[Hashable], slots: list[list[int]], T: int) -> bool:
        return False  # the window masks in any case

    def _next_slots(self, n_held: int, n_new: int, sequence: Hashable) -> list[int]:
        if n_new > self.chunk:
            raise ValueError(f"sequence {sequence!r} has {n_new} new tokens, the ring takes {self.chunk} in a step")
        return [(n_held + i) % self.max_tokens for i in range(n_new)]
