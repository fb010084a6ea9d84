"""Which replica takes a request, and which waiting request goes first, when texts share their beginnings.

A text is a chain of blocks, as `gptlite.cache.prefix.block_keys` names them: each name stands for the block's own
tokens and all those before it, so two texts share as many blocks as their chains have in common from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

import torch

from gptlite.cache.contract import Cache
from gptlite.serving.scheduler import Scheduled, Scheduler
from gptlite.serving.sequence import Sequence

T = TypeVar("T")
Chain = Seq[Hashable]


class BlockCounter:
    """Which blocks a replica keeps after use: the last recently used ones, a text's end before its beginning.

    It counts blocks and holds no keys; `gptlite.cache.paged` holds them.

    Args:
        n_blocks: how many are kept; None means all.
    """

    def __init__(self, n_blocks: int | None = None) -> None:
        if n_blocks is not None and n_blocks < 0:
            raise ValueError(f"n_blocks is {n_blocks}, it must be at least 0")
        self.n_blocks = n_blocks
        self._used: dict[Hashable, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def match(self, chain: Chain) -> int:
        """How many blocks of the chain are kept, from the first; changes nothing."""
        for i, block in enumerate(chain):
            if block not in self._used:
                return i
        return len(chain)

    def add(self, chain: Chain) -> None:
        """Keeps the chain's blocks as the most recent, and drops the least recent ones beyond the room."""
        for block in reversed(chain):  # the beginning last: it is the most recent, and goes last
            self._used.pop(block, None)
            self._used[block] = None
        while self.n_blocks is not None and len(self._used) > self.n_blocks:
            del self._used[next(iter(self._used))]


class Router(Protocol):
    """Chooses a replica for each request as it arrives."""

    def route(self, chain: Chain, loads: Seq[int]) -> int:
        """The index of the replica.

        Args:
            chain: blocks of the prompt. loads: unfinished requests of each replica.
        """


class RoundRobin(Router):
    """The next replica in turn, whatever it holds."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, chain: Chain, loads: Seq[int]) -> int:
        self._next += 1
        return (self._next - 1) % len(loads)


class LeastLoaded(Router):
    """The replica with the fewest unfinished requests; of equals, the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}  # when each was chosen last
        self._count = 0

    def route(self, chain: Chain, loads: Seq[int]) -> int:
        self._count += 1
        i = min(range(len(loads)), key=lambda i: (loads[i], self._chosen.get(i, 0)))
        self._chosen[i] = self._count
        return i


class CacheAware(Router):
    """The replica that has seen most of the prompt, unless the loads are too far apart {cite}`sglang2026router`.

    The router remembers which blocks it sent where. It asks no replica, so what one has evicted it may still count on.

    Args:
        n_replicas: at least 1.
        threshold: share of the prompt's blocks that must be known for the prompt to follow them; below it the replica
            that was sent the fewest different blocks takes the prompt, so that texts spread.
        gap, ratio: the loads are too far apart when the largest is more than `gap` requests above the smallest and
            more than `ratio` times as large; then the least loaded replica takes the prompt.
        n_blocks: blocks remembered for each replica; None means all.
    Raises: ValueError on a count or share that makes no sense.
    """

    def __init__(
        self,
        n_replicas: int,
        threshold: float = 0.3,
        gap: int = 64,
        ratio: float = 1.5,
        n_blocks: int | None = None,
    ) -> None:
        if n_replicas < 1 or not 0 <= threshold <= 1 or gap < 0 or ratio < 1:
            raise ValueError(
                f"n_replicas is {n_replicas}, threshold {threshold}, gap {gap} and ratio {ratio}: they must be at least"
                " 1, in [0, 1], at least 0 and at least 1"
            )
        self.threshold, self.gap, self.ratio = threshold, gap, ratio
        self.sent = [BlockCounter(n_blocks) for _ in range(n_replicas)]

    def route(self, chain: Chain, loads: Seq[int]) -> int:
        if len(loads) != len(self.sent):
            raise ValueError(f"{len(loads)} loads for {len(self.sent)} replicas")
        apart = max(loads) - min(loads) > self.gap and max(loads) > self.ratio * min(loads)
        known = [seen.match(chain) for seen in self.sent]
        if apart:
            chosen = min(range(len(loads)), key=lambda i: loads[i])
        elif chain and max(known) > self.threshold * len(chain):
            chosen = max(range(len(loads)), key=lambda i: (known[i], -loads[i]))
        else:
            chosen = min(range(len(loads)), key=lambda i: (len(self.sent[i]), loads[i]))
        self.sent[chosen].add(chain)
        return chosen


def prefix_order(
    waiting: Iterable[T], cached: Callable[[T], int], passed: Callable[[T], int] = lambda _: 0, patience: int = 8
) -> list[T]:
    """The waiting requests with the longest cached prefix first {cite}`zheng2024sglang`, and none left behind.

    Args:
        waiting: in order of arrival.
        cached: tokens (or blocks) of a request that the cache holds now, for example by `Cache.match`.
        passed: how often a request that came later was begun before this one.
        patience: a request that was passed so often goes before all that were not.
    """
    requests = list(waiting)
    late = [request for request in requests if passed(request) >= patience]  # in order of arrival
    rest = [request for request in requests if passed(request) < patience]
    return late + sorted(rest, key=lambda request: -cached(request))  # equals keep their order


class PrefixScheduler(Scheduler):
    """A scheduler that lets the waiting sequence with the longest cached prefix in first.

    Args:
        patience: see `prefix_order`. The others are those of `Scheduler`.
    """

    def __init__(self, cache: Cache, *args: Any, patience: int = 8, **kwargs: Any) -> None:
        super().__init__(cache, *args, **kwargs)
        self.patience = patience
        self.passed: Counter[Hashable] = Counter()

    def schedule(self) -> list[Scheduled]:
        before = set(self.running)
        plan = super().schedule()
        begun = [sequence.key for sequence in self.running if sequence not in before]
        for sequence in self.waiting:
            self.passed[sequence.key] += sum(key > sequence.key for key in begun)
        return plan

    def choose(self) -> Sequence:
        def cached(sequence: Sequence) -> int:
            return self.cache.match(torch.tensor(sequence.tokens), sequence.request.salt)

        return prefix_order(self.waiting, cached, lambda sequence: self.passed[sequence.key], self.patience)[0]
