"""What attention moves between main memory (HBM) and the chip (SRAM): by formula, and counted load by load.

Both algorithms run on a model of a chip that holds M numbers and refuses more. Numbers are counted, of any width:
bytes are numbers times bytes per number, and M is the SRAM's bytes over the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptlite.variants.flash import INFINITY, absorb


@dataclass(frozen=True)
class Traffic:
    """Numbers that moved: `loads` from HBM to the chip, `stores` from the chip to HBM."""

    loads: int
    stores: int

    @property
    def total(self) -> int:
        """Numbers moved, in both directions."""
        return self.loads + self.stores


def flash_tiles(d_head: int, sram: int) -> tuple[int, int]:
    """Queries and keys of a tile such that all that a tile needs fits: (tile_q, tile_k).

    The chip holds queries and output (2 D numbers a query), m and l (2), keys and values (2 D a key), and scores.
    Few keys leave room for many queries, and the more queries stay, the less often keys and values pass by. At most
    D keys and a quarter of the chip for them keep tile_q within a constant factor of M / D, which the theorem needs.

    Args:
        d_head: D. sram: M, numbers that the chip holds.
    Raises: ValueError when d_head is below 1, or not even one query and one key fit.
    """
    if d_head < 1:
        raise ValueError(f"d_head is {d_head}, it must be at least 1")
    tile_k = max(1, min(d_head, sram // (8 * d_head)))
    tile_q = (sram - 2 * d_head * tile_k) // (2 * d_head + tile_k + 2)
    if tile_q < 1:
        raise ValueError(f"sram is {sram} numbers, a tile of heads of {d_head} needs at least {4 * d_head + 3}")
    return tile_q, tile_k


def flash_traffic(n_tokens: int, d_head: int, sram: int, causal: bool = False) -> Traffic:
    """What FlashAttention moves for one head, to the number.

    Queries come once, the output and the log-sum-exp leave once. Keys and values come once for each tile of queries,
    and there are about 4 n D / M of those: Theta(n^2 D^2 / M) for D <= M <= n D {cite}`dao2022flashattention`.

    Args:
        n_tokens: n, queries and as many keys. d_head: D. sram: M, numbers that the chip holds.
        causal: tiles of keys above the diagonal are skipped.
    Raises: ValueError when there are fewer than 0 tokens, or a tile does not fit, as in `flash_tiles`.
    """
    if n_tokens < 0:
        raise ValueError(f"n_tokens is {n_tokens}, it must be at least 0")
    tile_q, tile_k = flash_tiles(d_head, sram)
    keys = 0  # that come to the chip, over all tiles of queries
    for start in range(0, n_tokens, tile_q):
        last = min(start + tile_q, n_tokens)
        keys += min(-(-last // tile_k) * tile_k, n_tokens) if causal else n_tokens
    return Traffic(n_tokens * d_head + 2 * d_head * keys, n_tokens * (d_head + 1))


def standard_traffic(n_tokens: int, d_head: int, sram: int) -> Traffic:
    """What three kernels move for one head, to the number: scores, softmax, and the product with the values.

    The n x n matrix crosses four times: scores out and in, weights out and in. Its products read keys and values in
    the same tiles as FlashAttention does: Theta(n D + n^2) for M of at least D^2 {cite}`dao2022flashattention`.

    Args:
        n_tokens: n. d_head: D. sram: M, numbers that the chip holds.
    """
    n, streamed = n_tokens, flash_traffic(n_tokens, d_head, sram)
    return Traffic(streamed.loads + 2 * n * n, n * d_head + 2 * n * n)


class Chip:
    """A chip that holds `sram` numbers, and counts what it loads and stores.

    Args:
        sram: M, numbers that it holds at most.
    """

    def __init__(self, sram: int) -> None:
        self.sram = sram
        self.loads = self.stores = self.held = self.most = 0

    @property
    def traffic(self) -> Traffic:
        """What moved so far."""
        return Traffic(self.loads, self.stores)

    def hold(self, x: Tensor) -> Tensor:
        """Room for a result x [...] that was computed on the chip. Raises: MemoryError when it is full."""
        self.held += x.numel()
        self.most = max(self.most, self.held)
        if self.held > self.sram:
            raise MemoryError(f"the chip holds {self.sram} numbers, {self.held} are needed at once")
        return x

    def load(self, x: Tensor) -> Tensor:
        """Brings x [...] from main memory."""
        self.loads += x.numel()
        return self.hold(x.clone())

    def store(self, target: Tensor, x: Tensor) -> None:
        """Writes x [...] to its place in main memory; the chip still holds it."""
        self.stores += x.numel()
        target.copy_(x)

    def drop(self, *held: Tensor) -> None:
        """Forgets what it holds, tensors of any shape [...]."""
        self.held -= sum(x.numel() for x in held)


def run_flash(chip: Chip, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """FlashAttention of one head on a chip: q, k, v [n, D] -> out [n, D] and lse [n].

    Raises: ValueError when the three differ in shape.
    """
    _check_same(q, k, v)
    (n, D), (tile_q, tile_k) = q.shape, flash_tiles(q.shape[1], chip.sram)
    out, lse = torch.empty_like(q), q.new_empty(n)  # in main memory
    for start in range(0, n, tile_q):
        rows = torch.arange(n)[start : start + tile_q]
        q_tile = chip.load(q[rows])
        acc, l = chip.hold(torch.zeros_like(q_tile)), chip.hold(q.new_zeros(len(rows)))
        m = chip.hold(q.new_full((len(rows),), -INFINITY))
        for columns in torch.arange(n).split(tile_k):
            if causal and columns[0] > rows[-1]:
                break
            k_tile, v_tile = chip.load(k[columns]), chip.load(v[columns])
            scores = chip.hold(q_tile @ k_tile.mT * D**-0.5)
            if causal:
                scores[rows[:, None] < columns] = -INFINITY
            m, l, acc = absorb(m, l, acc, scores, v_tile)  # in place on a real chip
            chip.drop(k_tile, v_tile, scores)
        chip.store(out[start : start + tile_q], acc / l[:, None])
        chip.store(lse[start : start + tile_q], m + l.log())
        chip.drop(q_tile, acc, m, l)
    return out, lse


def run_standard(chip: Chip, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one head on a chip as three kernels, scores and weights in main memory: [n, D] each -> [n, D].

    Raises: ValueError when the three differ in shape.
    """
    _check_same(q, k, v)
    (n, D), (tile_q, tile_k) = q.shape, flash_tiles(q.shape[1], chip.sram)
    scores, weights, out = q.new_empty(n, n), q.new_empty(n, n), torch.empty_like(q)  # in main memory
    tiles = [(slice(i, i + tile_q), slice(j, j + tile_k)) for i in range(0, n, tile_q) for j in range(0, n, tile_k)]
    held = q.new_empty(0)
    for rows, columns in tiles:  # scores, a tile of queries stays while the keys pass by
        if columns.start == 0:
            chip.drop(held)
            held = chip.load(q[rows])
        k_tile = chip.load(k[columns])
        product = chip.hold(held @ k_tile.mT * D**-0.5)
        chip.store(scores[rows, columns], product)
        chip.drop(k_tile, product)
    chip.drop(held)
    for i in range(n):  # softmax, a row at a time
        row = chip.load(scores[i])
        chip.store(weights[i], row.softmax(-1))
        chip.drop(row)
    for rows, columns in tiles:  # the product with the values, its sums stay on the chip
        if columns.start == 0:
            acc = chip.hold(torch.zeros_like(out[rows]))
        w_tile, v_tile = chip.load(weights[rows, columns]), chip.load(v[columns])
        acc += w_tile @ v_tile
        chip.drop(w_tile, v_tile)
        if columns.start + tile_k >= n:
            chip.store(out[rows], acc)
            chip.drop(acc)
    return out


def _check_same(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}, they must be alike")


class _Largest(TorchDispatchMode):
    """Watches the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode composites arrive whole: look at what they are made of
            result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def largest_tensor(fn: Callable[[], Any]) -> int:
    """Elements of the largest tensor that any operation of a call makes, in its forward and its backward pass.

    Views count with the elements that they show. What a fused kernel keeps to itself is not seen.
    """
    with _Largest() as largest:
        fn()
    return largest.numel
