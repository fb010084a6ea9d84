"""Which sequences run in the next step, and with how many tokens each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Literal, NamedTuple

import torch

from gptlite.cache.contract import Cache
from gptlite.config import check_counts
from gptlite.serving.sequence import Key, Sequence

Preemption = Literal["recompute", "swap"]


class Scheduled(NamedTuple):
    """One row of a step.

    Args:
        sequence: whose tokens it has.
        tokens, positions: the new ones that it reads; a position of -1 is a hole, after them, that pads the row.
        parents: where they are a tree of drafts, as in `Cache.prepare`; None for a plain run.
        samples: whether its last token's logits choose a token. A prompt read in part chooses none.
    """

    sequence: Sequence
    tokens: list[int]
    positions: Seq[int]
    parents: Seq[int] | None
    samples: bool

    @property
    def n_new(self) -> int:
        """New tokens without the holes."""
        return len(self.tokens) - self.positions.count(-1)


class Scheduler:
    """Iteration-level scheduling {cite}`yu2022orca`: batches are made anew for every step, first come first served.

    In each step the running sequences come first: one token for each that decodes, then pieces of prompts that are
    not read yet. What remains of seats and budget goes to those who wait, in their order; nobody overtakes the head
    of the queue, so short requests cannot starve a long one. When the cache has no room for the step, the youngest
    running sequence gives its memory back and waits again, by age; the oldest always goes on, so all finish.

    Args:
        cache: where keys and values are kept.
        max_batch: sequences that run at once at most.
        token_budget: tokens of a step at most; a longer prompt is read in pieces {cite}`agrawal2024sarathi`. None
            reads every prompt in one step.
        preemption: "recompute" forgets the keys and values and reads the text again later; "swap" moves them to the
            CPU's memory and back {cite}`kwon2023pagedattention`.
    Raises: ValueError when a number is out of range.
    """

    def __init__(
        self, cache: Cache, max_batch: int = 16, token_budget: int | None = None, preemption: Preemption = "recompute"
    ) -> None:
        check_counts(max_batch=max_batch)
        if token_budget is not None and (not isinstance(token_budget, int) or token_budget < max_batch):
            raise ValueError(
                f"token_budget is {token_budget}, it must be at least max_batch, {max_batch}: a token for each"
            )
        if preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption is {preemption!r}, it must be 'recompute' or 'swap'")
        self.cache, self.max_batch, self.token_budget, self.preemption = cache, max_batch, token_budget, preemption
        self.chunk: int | None = getattr(cache, "chunk", None)  # what a ring takes in a step at most
        self.waiting: list[Sequence] = []  # by age
        self.running: list[Sequence] = []  # by age
        self.preempted: list[Key] = []  # in the last step

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those that came before it."""
        insort(self.waiting, sequence, key=_age)

    def schedule(self) -> list[Scheduled]:
        """Plans the next step, after giving memory back where the running sequences need it.

        The plan changes nothing but the queues and the cache's room; who runs it then counts `n_computed` up.
        Returns: its rows, by age; none when nothing is there to do.
        """
        self.preempted = []
        new = self._share(self.running)
        while new and not self.cache.fits({sequence.key: n for sequence, n in new.items()}):
            self._preempt()
            new = self._share(self.running)
        self._admit(new)  # nobody after a preemption: who left is the head of the queue, and does not fit
        if not new and self.waiting:
            raise ValueError(f"{self.waiting[0]!r} does not fit the cache, though nothing else runs")
        return [self._row(sequence, n) for sequence, n in new.items() if n]

    def _share(self, running: list[Sequence]) -> dict[Sequence, int]:
        """New tokens of each running sequence: decodes first, so that no prompt makes them wait for its pieces."""
        left = self.token_budget
        if left is None and self.chunk is None:
            return {sequence: len(sequence.tokens) - sequence.n_computed for sequence in running}
        new = dict.fromkeys(running, 1)
        reading = [sequence for sequence in running if len(sequence.tokens) - sequence.n_computed > 1]
        left = None if left is None else left - (len(running) - len(reading))
        for sequence in reading:
            new[sequence] = self._piece(sequence, left)
            left = None if left is None else left - new[sequence]
        return {sequence: n for sequence, n in new.items() if n}

    def _piece(self, sequence: Sequence, budget: int | None) -> int:
        """Tokens that a sequence reads in this step, of those that the cache has not seen."""
        rest = len(sequence.tokens) - sequence.n_computed
        return min(rest, rest if budget is None else budget, self.chunk or rest)

    def _admit(self, new: dict[Sequence, int]) -> None:
        """Lets those who wait in, from the head of the queue, until one does not fit."""
        left = None if self.token_budget is None else self.token_budget - sum(new.values())
        planned: dict[Hashable, int] = {sequence.key: n for sequence, n in new.items()}
        while self.waiting and len(self.running) < self.max_batch and (left is None or left > 0):
            sequence = self.choose()
            held = self._begin(sequence)
            n = self._piece(sequence, left)
            # room for the whole text, not for its first piece alone: who is let in should not be sent back soon
            whole = self._piece(sequence, None)
            if not self.cache.fits({**planned, sequence.key: whole + (0 if sequence.state is None else held)}):
                if sequence.state is None:
                    self._forget(sequence)
                return
            if sequence.state is not None:
                self.cache.load(sequence.key, sequence.state)
                sequence.state = None
            else:
                sequence.n_cached += held
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_age)
            new[sequence] = planned[sequence.key] = n
            left = None if left is None else left - n

    def choose(self) -> Sequence:
        """The next of those who wait; another order overrides it."""
        return self.waiting[0]

    def _begin(self, sequence: Sequence) -> int:
        """Starts a waiting sequence from what the cache has of its text. Returns: how many tokens need no reading."""
        if sequence.state is None:
            text = torch.tensor(sequence.tokens)
            sequence.n_computed = self.cache.begin(sequence.key, text, sequence.request.salt)
        return sequence.n_computed

    def _preempt(self) -> None:
        """Takes the memory of the youngest running sequence, which waits again from its place in the queue."""
        sequence = self.running.pop()
        if self.preemption == "swap" and sequence.n_computed:
            sequence.state = {name: part.cpu() for name, part in self.cache.export(sequence.key).items()}
            self.cache.free(sequence.key)
        else:
            self._forget(sequence)
        sequence.n_preempted += 1
        self.preempted.append(sequence.key)
        insort(self.waiting, sequence, key=_age)

    def _forget(self, sequence: Sequence) -> None:
        """Gives back what the cache holds of a sequence, if it has begun it at all."""
        with suppress(ValueError):
            self.cache.free(sequence.key)
        sequence.n_computed = 0

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its memory back; samples that waited for it wait alone."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._forget(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state, sequence.n_computed = None, 0
        if sequence.siblings:
            first, first.siblings = sequence.siblings[0], sequence.siblings[1:]
            sequence.siblings = []
            self.add(first)

    def fork(self, sequence: Sequence, new: Sequence) -> None:
        """Lets `new` go on from what `sequence` has computed, or wait and read the text itself for want of room."""
        if len(self.running) < self.max_batch:
            with suppress(ValueError):
                self.cache.fork(sequence.key, new.key)
                new.n_computed = sequence.n_computed
                insort(self.running, new, key=_age)
                return
        self.add(new)

    @staticmethod
    def _row(sequence: Sequence, n: int) -> Scheduled:
        begin, end = sequence.n_computed, sequence.n_computed + n
        tokens = sequence.tokens[begin:end]
        return Scheduled(sequence, tokens, range(begin, end), None, end == len(sequence.tokens))

    def check(self) -> None:
        """The invariants of the queues and the cache between two steps.

        Raises: AssertionError that says which is broken.
        """
        for name, queue in (("running", self.running), ("waiting", self.waiting)):
            assert queue == sorted(queue, key=_age), f"{name} is not by age: {queue}"
            assert not any(s.finished and s.reason != "cancelled" for s in queue), (
                f"{name} holds a finished sequence: {queue}"
            )
        assert not set(self.running) & set(self.waiting), "a sequence both runs and waits"
        assert len(self.running) <= self.max_batch, f"{len(self.running)} run, {self.max_batch} may"
        for sequence in self.running:
            held = self.cache.next_position(sequence.key)
            assert held == sequence.n_computed, f"{sequence!r}, and the cache holds {held}"
            assert sequence.state is None, f"{sequence!r} runs and is swapped out"
            assert sequence.n_computed < len(sequence.tokens), f"{sequence!r} has nothing to read"
        for sequence in self.waiting:
            held = self.cache.next_position(sequence.key)
            assert held == 0, f"{sequence!r} waits, and the cache holds {held} tokens of it"
            assert (sequence.state is None) == (sequence.n_computed == 0), f"{sequence!r} waits"
        check = getattr(self.cache, "check", None)
        if check is not None:
            check()


def _age(sequence: Sequence) -> Key:
    return sequence.key
