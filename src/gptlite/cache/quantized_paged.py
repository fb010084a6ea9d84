"""A pool whose blocks hold codes: final blocks are quantised, the newest tokens lie in a small pool beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite import hardware
from gptlite.cache.blocks import BlockPool
from gptlite.cache.contract import Parents, Positions, Segment, plan_rows
from gptlite.cache.paged import PagedCache, bytes_per_token
from gptlite.cache.splits import PagedSegment, Split, attend_splits, split_pages
from gptlite.config import check_counts
from gptlite.model import MultiHeadAttention
from gptlite.quantize.kv import KVFormat, Parts, Recipe

if TYPE_CHECKING:
    from gptlite.model import GPTlite


@dataclass
class HalfPool:
    """One layer's keys, or values: blocks of codes, and blocks of the newest tokens.

    Args:
        format: of the codes.
        codes: per part [n_blocks + 1, G, block, ...], as `KVFormat.encode` gives them.
        recent: [n_recent + 1, block, G, D].
    """

    format: KVFormat
    codes: Parts
    recent: Tensor

    def decode(self, blocks: Tensor | slice) -> Tensor:
        """Blocks of codes, dequantised: [n, block, G, D]."""
        parts = tuple(part[blocks] for part in self.codes)
        return self.format.decode(parts, self.recent.shape[-1], self.recent.dtype).transpose(1, 2)


class RecentSplit(Split):
    """Pages of the newest tokens."""

    def read(self, pool: HalfPool) -> Tensor:  # type: ignore[override]
        return super().read(pool.recent)


class CodeSplit(Split):
    """Pages of codes, dequantised when they are read, a split at a time."""

    def read(self, pool: HalfPool) -> Tensor:  # type: ignore[override]
        pages = pool.decode(self.blocks)  # [R * pages, block, G, D]
        return pages.reshape(-1, self.end - self.begin, *pages.shape[2:]).transpose(1, 2)


@dataclass
class QuantizedSegment(PagedSegment):
    """A segment over both pools: its keys are those with codes, page after page, then the newest."""

    code_table: Tensor | None = None  # [B, pages of codes], padded


class QuantizedPagedCache(PagedCache):
    """A paged cache whose final blocks hold codes.

    Tokens begin their life in the pool of recent blocks, as in a `PagedCache`. When a block's tokens are final and
    `residual` newer ones are there too, `prepare` quantises the block into the pool of codes and lets go of the recent
    one. A block of codes never changes, so forks share it and nobody ever copies it.

    Args:
        model: the model whose keys and values it keeps; read for the shape of each layer.
        recipe: its formats, and the `recent` tokens of its rule for values; see `Recipe.in_blocks`.
        n_blocks: blocks of codes. n_recent: blocks in full precision, for what is not quantised yet.
        block_size: tokens of a block.
        chunk: new tokens of a sequence in a step at most, since they need recent blocks; a longer prompt comes in
            pieces.
        pages_per_split: blocks of a row that attention reads at once; None means those of about 128 tokens.
    Raises: ValueError when a number is below 1, groups of tokens that share scales do not fill the blocks, or the
        recent blocks are too few for a single sequence.
    """

    def __init__(
        self,
        model: GPTlite,
        recipe: Recipe,
        n_blocks: int,
        n_recent: int,
        block_size: int = 32,
        chunk: int = 128,
        pages_per_split: int | None = None,
    ) -> None:
        check_counts(n_blocks=n_blocks, n_recent=n_recent, chunk=chunk)
        super().__init__(model, n_recent, block_size, pages_per_split=pages_per_split)
        self.recipe, self.chunk = recipe.in_blocks(block_size), chunk
        self.rule = self.recipe.key_rule
        needed = self.blocks_for(self.rule.bound(chunk))
        if n_recent < needed:
            raise ValueError(
                f"n_recent is {n_recent}, a step of {chunk} tokens may need {needed} recent blocks of {block_size}"
            )
        self.longest = n_blocks * block_size
        self.code_pool = BlockPool(n_blocks, block_size)
        self.n_code_blocks = n_blocks
        self.code_tables: dict[Hashable, list[int]] = {}
        self.code_positions = torch.full((n_blocks + 1, block_size), -1)  # on the host; the spare block has none
        self.pools = [
            tuple(
                HalfPool(kv_format, _blocks(kv_format, n_blocks + 1, recent), recent)
                for kv_format, recent in ((self.recipe.keys, k), (self.recipe.values, v))
            )
            for k, v in zip(self.k, self.v, strict=True)
        ]

    @classmethod
    def sized(
        cls, model: GPTlite, fraction: float = 0.9, memory_bytes: float | None = None, **options: Any
    ) -> QuantizedPagedCache:
        """A pool with as many blocks of codes as fit beside the recent ones.

        Args:
            fraction: of the memory that is free now on the model's device. memory_bytes: of both pools instead.
            options: as those of the class, `recipe` and `n_recent` among them.
        Raises: ValueError when the fraction is not in (0, 1], or not one block of codes fits.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction}, it must be above 0 and at most 1")
        if memory_bytes is None:
            memory_bytes = fraction * hardware.free_bytes(model.token_embedding.weight.device)
        block_size, recipe, n_recent = options.get("block_size", 32), options["recipe"], options["n_recent"]
        check_counts(block_size=block_size, n_recent=n_recent)
        shapes = [block.mha.kv_shape for block in model.blocks]
        recent_bytes = (n_recent + 1) * block_size * bytes_per_token(model)
        block_bytes = block_size * recipe.token_bytes(shapes, model.token_embedding.weight.element_size())
        n_blocks = int((memory_bytes - recent_bytes) // block_bytes) - 1  # the spare block is there too
        if n_blocks < 1:
            raise ValueError(
                f"{memory_bytes:.0f} bytes are too few: {n_recent} recent blocks of {block_size} tokens and a spare "
                f"one take {recent_bytes}, a block of codes and a spare one {2 * block_bytes:.0f}"
            )
        return cls(model, n_blocks=n_blocks, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of both pools, the spare blocks among them."""
        return super().nbytes + sum(part.nbytes for pair in self.pools for half in pair for part in half.codes)

    def next_position(self, sequence: Hashable) -> int:
        codes = self.code_tables.get(sequence)
        if self.positions.get(sequence) or not codes:
            return super().next_position(sequence)
        return int(self.code_positions[codes[-1], -1]) + 1

    def table_of_codes(self, sequence: Hashable) -> list[int]:
        """The sequence's blocks of codes, in the order of its tokens. Raises: ValueError when it is not held."""
        self._held(sequence)
        return list(self.code_tables.get(sequence, ()))

    # -- a step -------------------------------------------------------------------------------------------------

    def _final_blocks(self, sequences: Sequence[Hashable]) -> dict[Hashable, list[int]]:
        """Per sequence the recent blocks at its beginning whose tokens can be quantised now."""
        final = {}
        for key in sequences:
            done = len(self.code_tables.get(key, ())) * self.block_size
            n = self.rule.n_quantized(done + len(self.positions.get(key, ()))) - done
            if n > 0:
                final[key] = self._rows[key].table[: n // self.block_size]
        return final

    def _needs(self, new: Mapping[Hashable, int]) -> tuple[int, int, int]:
        """Blocks of codes and recent blocks that a step must take, and the recent blocks that are free then."""
        final = self._final_blocks(list(new))
        drops = Counter(block for blocks in final.values() for block in blocks)
        freed = sum(self.pool.references[block] == n for block, n in drops.items())
        codes, recent = len(drops), self._missing(new)
        for key, n in new.items():
            if key not in self.positions:
                # one that was swapped out brings its codes with it; more recent tokens than a step can have are codes
                held = self.rule.n_quantized(n) // self.block_size
                codes += held
                most = self.blocks_for(min(n, self.rule.bound(self.chunk)))
                recent += most - self.blocks_for(n)
        return codes, recent, self.pool.free + freed

    def fits(self, new: Mapping[Hashable, int]) -> bool:
        codes, recent, free = self._needs(new)
        return codes <= self.code_pool.free and recent <= free

    def prepare(
        self, sequences: Sequence[Hashable], positions: Positions, parents: Parents = None, tokens: Tensor | None = None
    ) -> list[Segment]:
        plan_rows(sequences, positions, parents)
        new = {key: int((row >= 0).sum()) for key, row in zip(sequences, positions, strict=True)}
        longest = max(new, key=lambda key: new[key])
        if new[longest] > self.chunk:
            raise ValueError(f"sequence {longest!r} has {new[longest]} new tokens, a step takes {self.chunk} of each")
        final = self._final_blocks(sequences)
        blocks = list(dict.fromkeys(block for found in final.values() for block in found))
        recent, free = self._missing(new), self._needs(new)[2]
        for what, needed, there in (("blocks of codes", len(blocks), self.code_pool.free), ("recent", recent, free)):
            if needed > there:
                raise ValueError(f"the step needs {needed} {what} of {self.block_size} tokens, {there} are free")
        encoded = self._encoded(blocks)
        # nothing fails from here on
        self._quantize(final, blocks, encoded)
        return super().prepare(sequences, positions, parents)

    def _encoded(self, blocks: list[int]) -> list[list[Parts]]:
        """Codes of recent blocks, per layer of keys and values."""
        if not blocks:
            return []
        rows = torch.tensor(blocks, device=self.device)
        return [[half.format.encode(half.recent[rows].transpose(1, 2)) for half in pair] for pair in self.pools]

    def _quantize(self, final: Mapping[Hashable, list[int]], blocks: list[int], encoded: list[list[Parts]]) -> None:
        """Moves final blocks to the pool of codes; siblings that share one share its codes."""
        if not blocks:
            return
        taken = self.code_pool.take(len(blocks))
        for pair, both in zip(self.pools, encoded, strict=True):
            for half, new in zip(pair, both, strict=True):
                for part, codes in zip(half.codes, new, strict=True):
                    part[taken] = codes
        self.code_positions[taken] = self.k_pos[blocks]
        codes_of, holders = dict(zip(blocks, taken, strict=True)), Counter[int]()
        for key, found in final.items():
            row, n = self._rows[key], len(found) * self.block_size
            self.code_tables.setdefault(key, []).extend(codes_of[block] for block in found)
            holders.update(codes_of[block] for block in found)
            self.pool.release(found)
            row.table, self.positions[key] = row.table[len(found) :], self.positions[key][n:]
            row.before, row.written = max(row.before - n, 0), max(row.written - n, 0)
        for block, n in holders.items():
            for _ in range(n - 1):
                self.code_pool.share([block])

    def _segment(
        self,
        keys: list[Hashable],
        positions: Tensor,
        packed: Tensor | None,
        trees: Parents,
        taken: Mapping[Hashable, list[int]],
    ) -> PagedSegment:
        recent = super()._segment(keys, positions, packed, trees, taken)
        tables = [self.code_tables.get(key, []) for key in keys]
        n_pages, spare = max(map(len, tables)), self.n_code_blocks
        n = n_pages * self.block_size
        # short tables are filled up with a block of their own: nothing of another row's is read, masked or not
        table = torch.tensor([blocks + (blocks[:1] or [spare]) * (n_pages - len(blocks)) for blocks in tables])
        table = table.long()  # of no pages it would be of floats
        k_pos = self.code_positions[table].flatten(1)  # [B, n]
        inside = torch.arange(n) < torch.tensor([len(blocks) * self.block_size for blocks in tables])[:, None]
        assert recent.k_pos is not None
        splits: list[Split] = []
        if n:
            found = split_pages(tables, spare, self.block_size, self.pages_per_split, self.device)
            splits += [CodeSplit(split.rows, split.blocks, split.begin, split.end) for split in found]
        splits += [RecentSplit(split.rows, split.blocks, n + split.begin, n + split.end) for split in recent.splits]
        return QuantizedSegment(
            packed,
            recent.positions,
            recent.sequences,
            slots=recent.slots,
            k_pos=torch.cat([k_pos.masked_fill(~inside, -1).to(self.device), recent.k_pos], dim=1),
            mask=None if recent.mask is None else F.pad(recent.mask, (n, 0), value=True),
            table=recent.table,
            splits=splits,
            code_table=table.to(self.device),
        )

    def update(self, layer: int, k: Tensor, v: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor | None, Tensor]:
        keys, values, k_pos = super().update(layer, k, v, segment)
        assert isinstance(segment, QuantizedSegment) and segment.code_table is not None
        table, (first, second) = segment.code_table, self.pools[layer]

        def before(half: HalfPool) -> Tensor:
            pages = half.decode(table.flatten())  # [B * pages, block, G, D]
            return pages.reshape(len(table), -1, *pages.shape[2:]).transpose(1, 2)  # [B, G, n, D]

        keys = torch.cat([before(first), keys], dim=2) if table.numel() else keys
        if values is not None and table.numel():
            values = torch.cat([before(second), values], dim=2)
        return keys, values, k_pos

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, segment: Segment, attention: MultiHeadAttention
    ) -> Tensor:
        """Stores k and v, and reads both pools through the block tables, a split of pages at a time.

        A variant that mixes in its own way (and a latent, where v is None) gets all keys of the segment in one piece.
        Returns: [B, H, S, Dv].
        """
        if v is None or type(attention).mix is not MultiHeadAttention.mix:
            return super().attend(layer, q, k, v, segment, attention)
        assert isinstance(segment, QuantizedSegment)
        self._store(layer, k, v, segment)
        seen = segment.seen(attention.window, attention.sinks, q.dtype)
        keys, values = self.pools[layer]
        return attend_splits(q, keys, values, seen, attention.scale)  # type: ignore[arg-type]  # the splits read them

    # -- what goes and what comes -------------------------------------------------------------------------------

    def free(self, sequence: Hashable) -> None:
        super().free(sequence)
        self.code_pool.release(self.code_tables.pop(sequence, []))

    def fork(self, sequence: Hashable, new: Hashable) -> None:
        super().fork(sequence, new)
        blocks = self.code_tables.get(sequence, [])
        self.code_pool.share(blocks)
        self.code_tables[new] = list(blocks)

    def export(self, sequence: Hashable) -> dict[str, Tensor]:
        """The sequence's state in the CPU's memory, dequantised, so that any cache can load it."""
        state = super().export(sequence)
        blocks = self.code_tables.get(sequence, [])
        if blocks:
            state["k_pos"] = torch.cat([self.code_positions[blocks].flatten(), state["k_pos"]])
            for layer, pair in enumerate(self.pools):
                for name, half in zip("kv", pair, strict=True):
                    values = half.decode(torch.tensor(blocks, device=self.device)).flatten(0, 1)  # [n, G, D]
                    both = [values.transpose(0, 1).cpu(), state[f"{name}.{layer}"]]
                    state[f"{name}.{layer}"] = torch.cat(both, dim=1)
        return state

    def load(self, sequence: Hashable, state: dict[str, Tensor]) -> None:
        self._absent(sequence)
        positions = self._check_state(state)
        n = self.rule.n_quantized(len(positions))
        n_blocks = n // self.block_size
        if n_blocks > self.code_pool.free:
            raise ValueError(
                f"sequence {sequence!r} needs {n_blocks} blocks of codes, {self.code_pool.free} of "
                f"{self.n_code_blocks} are free"
            )
        encoded = []
        for layer, pair in enumerate(self.pools):
            for name, half in zip("kv", pair, strict=True):
                values = state[f"{name}.{layer}"][:, :n].to(self.device, self.dtype)  # [G, n, D]
                pages = values.unflatten(1, (n_blocks, self.block_size)).transpose(0, 1) if n else values
                encoded.append((half, half.format.encode(pages) if n else ()))
        rest = {name: part[n:] if name == "k_pos" else part[:, n:] for name, part in state.items()}
        super().load(sequence, rest)
        taken = self.code_pool.take(n_blocks)
        self.code_tables[sequence] = taken
        self.code_positions[taken] = state["k_pos"][:n].cpu().view(n_blocks, self.block_size)
        for half, new in encoded:
            for part, codes in zip(half.codes, new, strict=False):
                part[taken] = codes

    def check(self) -> None:
        super().check()
        self.code_pool.check(self.code_tables.values())
        assert self.code_tables.keys() <= self.positions.keys(), "a table of codes belongs to no sequence"


def _blocks(kv_format: KVFormat, n_blocks: int, recent: Tensor) -> Parts:
    """Empty blocks of codes for a layer whose recent blocks are [n_recent + 1, block, G, D]."""
    _, block_size, G, D = recent.shape
    one = kv_format.encode(recent.new_zeros(1, G, block_size, D))
    return tuple(torch.zeros(n_blocks, *part.shape[1:], dtype=part.dtype, device=part.device) for part in one)
