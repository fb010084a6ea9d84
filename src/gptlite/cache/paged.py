"""PagedAttention: keys and values in a pool of fixed blocks, found through block tables, shared and copied."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptlite import hardware
from gptlite.cache.contract import Parents, Positions, Segment, plan_rows
from gptlite.cache.splits import PagedSegment, attend_splits, split_pages
from gptlite.cache.tables import BlockTables, Row
from gptlite.model import MultiHeadAttention

if TYPE_CHECKING:
    from gptlite.model import GPTlite

SPLIT_TOKENS = 128  # keys of a row that attention reads at once, by default


class PagedCache(BlockTables):
    """Keys and values in blocks of a pool, found through a block table {cite}`kwon2023pagedattention`.

    A block is taken when a token needs it, wherever one is free: nothing is reserved, and only the last block of a
    sequence has room left. Tables may share blocks; a step that writes into a shared one copies it first.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
        n_blocks: blocks of the pool.
        block_size: tokens of a block.
        prefix_caching: keep full blocks for later prompts that begin alike, until their room is needed.
        pages_per_split: blocks of a row that attention reads at once; None means those of about 128 tokens.
    Raises: ValueError when a number is below 1.
    """

    def __init__(
        self,
        model: GPTlite,
        n_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = False,
        pages_per_split: int | None = None,
    ) -> None:
        super().__init__(model, n_blocks, block_size, prefix_caching)
        if pages_per_split is not None and pages_per_split < 1:
            raise ValueError(f"pages_per_split is {pages_per_split}, it must be at least 1")
        self.pages_per_split = pages_per_split or max(1, SPLIT_TOKENS // block_size)
        # one block more than is ever given away: holes write there, and padded tables point there
        size = (n_blocks + 1, block_size)
        with torch.device(self.device):
            self.k = [torch.zeros(*size, G, Dk, dtype=self.dtype) for G, Dk, _ in self.shapes]
            self.v = [torch.zeros(*size, G, Dv, dtype=self.dtype) for G, _, Dv in self.shapes]
        self.k_pos = torch.full(size, -1)  # on the host, as the tables are

    @classmethod
    def sized(
        cls, model: GPTlite, fraction: float = 0.9, memory_bytes: float | None = None, **options: Any
    ) -> PagedCache:
        """A pool of as many blocks as fit.

        Args:
            fraction: of the memory that is free now on the model's device; the rest is for activations.
            memory_bytes: size of the pool in bytes instead, whatever is free.
            options: as those of the class.
        Raises: ValueError when the fraction is not in (0, 1], or not one block fits.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction}, it must be above 0 and at most 1")
        if memory_bytes is None:
            memory_bytes = fraction * hardware.free_bytes(model.token_embedding.weight.device)
        block_size = options.get("block_size", 16)
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        block_bytes = block_size * bytes_per_token(model)
        n_blocks = int(memory_bytes // block_bytes) - 1  # the spare block is there too
        if n_blocks < 1:
            raise ValueError(
                f"{memory_bytes:.0f} bytes are too few for a pool: one block of {block_size} tokens and a spare one "
                f"take {2 * block_bytes}"
            )
        return cls(model, n_blocks, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values allocated, the spare block among them."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    # -- a step -------------------------------------------------------------------------------------------------

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        plan = plan_rows(sequences, positions, parents)
        steps = [row.tolist() for row in positions]
        real = {key: [i for i, p in enumerate(step) if p >= 0] for key, step in zip(sequences, steps, strict=True)}
        told = [] if tokens is None else tokens.tolist()
        if tokens is not None and len(told) != sum(map(len, steps)):
            raise ValueError(f"a step has {sum(map(len, steps))} positions and {len(told)} tokens")
        missing = self._missing({key: len(indices) for key, indices in real.items()})
        if missing > self.pool.free:
            raise ValueError(
                f"the step needs {missing} blocks of {self.block_size} tokens, "
                f"{self.pool.free} of {self.n_blocks} are free"
            )
        # nothing fails from here on
        self._settle(self._real)
        self._real, self._stored, self._writers = real, False, []
        fresh, copies, start = iter(self._take(missing)), dict[int, int](), 0
        slots = {}
        for key, step in zip(sequences, steps, strict=True):
            row, held = self._rows.setdefault(key, Row()), self.positions.setdefault(key, [])
            row.before = len(held)
            slots[key] = self._extend(key, len(real[key]), fresh, copies)
            if told and self.prefix_caching and len(row.text) == len(held):
                row.text += [told[start + i] for i in real[key]]
            held += [step[i] for i in real[key]]
            start += len(step)
        self._copy(copies)
        new = [p for key in sequences for p in self.positions[key][self._rows[key].before :]]
        self.k_pos.view(-1)[[slot for key in sequences for slot in slots[key]]] = torch.tensor(new, dtype=torch.int64)
        return [
            self._segment(
                [sequences[b] for b in members], pos, packed, parents and [parents[b] for b in members], slots
            )
            for members, pos, packed in plan
        ]

    def _take(self, n: int) -> list[int]:
        """n blocks of zeros. What an earlier request left, infinite perhaps, would come through any mask: 0 * inf."""
        blocks = self.pool.take(n)
        if blocks:
            rows = torch.tensor(blocks, device=self.device)
            for store in (*self.k, *self.v):
                store.index_fill_(0, rows, 0)
        return blocks

    def _copy(self, copies: Mapping[int, int]) -> None:
        """Copies whole blocks: for each new one the old one that it was made from."""
        if copies:
            new, old = list(copies), list(copies.values())
            for store in (*self.k, *self.v, self.k_pos):
                store[new] = store[old]

    def _segment(
        self,
        keys: list[Hashable],
        positions: Tensor,
        packed: Tensor | None,
        trees: Parents,
        taken: Mapping[Hashable, list[int]],
    ) -> PagedSegment:
        tables, counts = [self._rows[key].table for key in keys], [len(self.positions[key]) for key in keys]
        n_pages, spare = max(1, *map(len, tables)), self.n_blocks
        # short tables are filled up with a block of their own: nothing of another row's is read, masked or not
        table = torch.tensor([blocks + (blocks[:1] or [spare]) * (n_pages - len(blocks)) for blocks in tables])
        # a shared block may hold tokens past a sequence's own end
        inside = torch.arange(n_pages * self.block_size) < torch.tensor(counts)[:, None]  # [B, T]
        k_pos = self.k_pos[table].flatten(1).masked_fill(~inside, -1)  # [B, T]
        slots = []  # [B * S]; holes go to the spare block
        for key, row in zip(keys, positions.tolist(), strict=True):
            next_slot = iter(taken[key])
            slots += [next(next_slot) if p >= 0 else spare * self.block_size for p in row]
        written = [range(self._rows[key].before, count) for key, count in zip(keys, counts, strict=True)]
        return PagedSegment(
            packed,
            positions.to(self.device),
            tuple(keys),
            slots=torch.tensor(slots, device=self.device),
            k_pos=k_pos.to(self.device),
            mask=self._step_mask(keys, trees, written, k_pos.shape[1]),
            table=table.to(self.device),
            splits=split_pages(tables, spare, self.block_size, self.pages_per_split, self.device),
        )

    def _store(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> None:
        """Writes new keys and values [B, G, S, D] into their slots."""
        assert segment.slots is not None
        for store, new in ((self.k[layer], k), (self.v[layer], v)):
            if new is not None:
                store.flatten(0, 1).index_copy_(0, segment.slots, new.transpose(1, 2).flatten(0, 1))
        self._stored = self._stored or layer == len(self.k) - 1

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        self._store(layer, k, v, segment)
        assert isinstance(segment, PagedSegment) and segment.table is not None and segment.k_pos is not None
        keys, values = (store[layer][segment.table].flatten(1, 2).transpose(1, 2) for store in (self.k, self.v))
        return keys, None if v is None else values, segment.k_pos

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, segment: Segment, attention: MultiHeadAttention
    ) -> Tensor:
        """Stores k and v, and reads what is cached through the block tables, a split of pages at a time.

        A variant that mixes in its own way (and a latent, where v is None) gets all keys of the segment in one piece.
        Returns: [B, H, S, Dv].
        """
        if v is None or type(attention).mix is not MultiHeadAttention.mix:
            return super().attend(layer, q, k, v, segment, attention)
        assert isinstance(segment, PagedSegment)
        self._store(layer, k, v, segment)
        seen = segment.seen(attention.window, attention.sinks, q.dtype)
        return attend_splits(q, self.k[layer], self.v[layer], seen, attention.scale)

    # -- what goes and what comes -------------------------------------------------------------------------------

    def keep(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        self._room_to_move(sequences, kept)
        for key, (begin, path) in zip(sequences, self._cut(sequences, kept), strict=True):
            row, n = self._rows[key], len(self.positions[key])
            if path != list(range(len(path))):  # through a tree: close the gaps that rejected siblings leave
                self._move(row, [begin + i for i in path], range(begin, n))
            if len(row.text) > begin:
                row.text[begin:] = [row.text[begin + i] for i in path]
            row.written = min(row.written, n)
            del row.keys[n // self.block_size :]
            self.pool.release(row.table[self.blocks_for(n) :])
            del row.table[self.blocks_for(n) :]

    def _room_to_move(self, sequences: Sequence[Hashable], kept: Sequence[int | Sequence[int]]) -> None:
        """Raises: ValueError when moving along a path may have to copy blocks, shared since, that have no room."""
        needed = 0
        for key, n in zip(sequences, kept, strict=False):  # `_cut` refuses what does not match
            if key in self._real and not isinstance(n, int):
                row = self._rows[key]
                needed += sum(self.pool.references[block] > 1 for block in row.table[row.before // self.block_size :])
        if needed > self.pool.free:
            raise ValueError(f"keeping a path may copy {needed} shared blocks, {self.pool.free} are free")

    def _move(self, row: Row, source: Sequence[int], target: Sequence[int]) -> None:
        """Moves tokens of a sequence to other places in its blocks."""
        size = self.block_size
        for page in range(target[0] // size, -(-(target[-1] + 1) // size)) if target else ():
            block = row.table[page]
            if self.pool.references[block] > 1:
                (row.table[page],) = self._take(1)
                self._copy({row.table[page]: block})
                self.pool.release([block])
            self.pool.forget(row.table[page])
        old, new = ([row.table[i // size] * size + i % size for i in places] for places in (source, target))
        for store in (*self.k, *self.v, self.k_pos):
            flat = store.flatten(0, 1)
            flat[new] = flat[old]

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        """The sequence's state in the CPU's memory: to swap it out, or to move it to another cache."""
        positions, table = self._held(sequence), self._rows[sequence].table
        state = {"k_pos": torch.tensor(positions, dtype=torch.int64)}
        for name, pools in (("k", self.k), ("v", self.v)):
            for layer, pool in enumerate(pools):
                tokens = pool[table].flatten(0, 1)[: len(positions)]  # [n, G, D]
                state[f"{name}.{layer}"] = tokens.transpose(0, 1).contiguous().cpu()
        return state

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        self._absent(sequence)
        positions = self._check_state(state)
        n, needed = len(positions), self.blocks_for(len(positions))
        if needed > self.pool.free:
            raise ValueError(
                f"sequence {sequence!r} needs {needed} blocks, {self.pool.free} of {self.n_blocks} are free"
            )
        table = self._take(needed)
        self.positions[sequence], self._rows[sequence] = positions, Row(table, before=n)
        slots = [block * self.block_size + i for block in table for i in range(self.block_size)][:n]
        self.k_pos.view(-1)[slots] = state["k_pos"].cpu()
        for name, pools in (("k", self.k), ("v", self.v)):
            for layer, pool in enumerate(pools):
                tokens = state[f"{name}.{layer}"].to(self.device, self.dtype).transpose(0, 1)  # [n, G, D]
                pool.flatten(0, 1)[slots] = tokens


def bytes_per_token(model: GPTlite) -> int:
    """Bytes of one token's keys and values, over all layers."""
    width = model.token_embedding.weight.element_size()
    return sum(G * (Dk + Dv) * width for G, Dk, Dv in (block.mha.kv_shape for block in model.blocks))
