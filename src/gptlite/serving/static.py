"""Static batching: a group of requests, padded on the right, that runs until its longest answer is written."""

from __future__ import annotations

from collections.abc import Hashable

from gptlite.cache.contract import Cache
from gptlite.serving.scheduler import Scheduled, Scheduler
from gptlite.serving.sequence import Sequence


class StaticScheduler(Scheduler):
    """One group after another; an engine with this scheduler is static batching.

    Whoever waits when a group ends, up to `max_batch`, is the next group. Its prompts are padded with holes to the
    longest, on the right, and read in one step; then each step reads one token per row. A row that has finished stays
    as a hole: its seat is computed, gives nothing, and keeps its memory until the whole group has ended. Room for the
    longest that each answer can become is reserved beforehand, so that nobody is ever preempted.

    Args:
        cache: where keys and values are kept. max_batch: sequences of a group at most.
    """

    def __init__(self, cache: Cache, max_batch: int = 16) -> None:
        super().__init__(cache, max_batch)

    def schedule(self) -> list[Scheduled]:
        """Plans the next step: the next group's prompts, or one token for each row of the group that runs."""
        if not self.running:
            self._next_group()
        rows = [[] if sequence.finished else sequence.tokens[sequence.n_computed :] for sequence in self.running]
        S = max(map(len, rows), default=0)
        plan = []
        for sequence, row in zip(self.running, rows, strict=True):
            holes = S - len(row)
            begin = sequence.n_computed
            positions = [*range(begin, begin + len(row)), *[-1] * holes]
            plan.append(Scheduled(sequence, row + [0] * holes, positions, None, bool(row)))
        return plan

    def _next_group(self) -> None:
        room: dict[Hashable, int] = {}
        for sequence in self.waiting[: self.max_batch]:
            room[sequence.key] = sequence.n_prompt + sequence.request.n_new - 1
            if not self.cache.fits(room):
                break
            self.running.append(sequence)
        if self.waiting and not self.running:
            raise ValueError(f"{self.waiting[0]!r} does not fit the cache, though nothing else runs")
        self.waiting = self.waiting[len(self.running) :]

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out; one of the group keeps its seat and its memory until the group has ended."""
        if sequence not in self.running:
            super().remove(sequence)
        elif all(other.finished for other in self.running):
            for other in self.running:
                if self.cache.next_position(other.key):
                    self.cache.free(other.key)
            self.running = []

    def fork(self, sequence: Sequence, new: Sequence) -> None:
        """Queues `new`: no group takes anybody in while it runs."""
        self.add(new)

    def check(self) -> None:
        """The invariants of the group and the queue between two steps. Raises: AssertionError."""
        assert len(self.running) <= self.max_batch, f"{len(self.running)} run, {self.max_batch} may"
        for sequence in self.running:
            held = self.cache.next_position(sequence.key)
            assert held == sequence.n_computed, f"{sequence!r}, and the cache holds {held}"
        for sequence in self.waiting:
            held = self.cache.next_position(sequence.key)
            assert held == 0, f"{sequence!r} waits, and the cache holds {held} tokens of it"
        check = getattr(self.cache, "check", None)
        if check is not None:
            check()
