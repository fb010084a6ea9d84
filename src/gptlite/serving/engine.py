"""Continuous batching: every step runs whoever is ready, and a finished sequence's seat is free at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from gptlite.cache.contract import Cache, Segment
from gptlite.config import check_counts
from gptlite.measure import synchronize
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, greedy, probabilities, sample
from gptlite.serving.arrivals import Arrival, WallClock
from gptlite.serving.metrics import StepRecord
from gptlite.serving.scheduler import Preemption, Scheduled, Scheduler
from gptlite.serving.sequence import Request, Sequence, Tokenizer


class Output(NamedTuple):
    """What a step gives to one client: `tokens` may be empty while they could still begin a stop string."""

    sequence: Sequence
    tokens: list[int]
    finished: bool


class Engine:
    """Serves many requests at once on one model {cite}`yu2022orca`.

    Each request's tokens are those of `gptlite.generate` for it alone, whoever shares its batch.

    Args:
        model: any GPTlite; its linear layers read all rows of a step at once, its attention runs per segment.
        cache: an empty one; see `Scheduler` for what its size does.
        max_batch, token_budget, preemption: see `Scheduler`.
        tokenizer: needed for stop strings alone.
        clock: what time it is; a `StepClock` makes every run the same.
        scheduler: another one than those arguments make.
        keep_logits: keep the logits of every generated token on its sequence.
        trace: keep a `StepRecord` of every step in `trace`.
    """

    def __init__(
        self,
        model: GPTlite,
        cache: Cache,
        max_batch: int = 16,
        token_budget: int | None = None,
        preemption: Preemption = "recompute",
        *,
        tokenizer: Tokenizer | None = None,
        clock: WallClock | None = None,
        scheduler: Scheduler | None = None,
        keep_logits: bool = False,
        trace: bool = False,
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.scheduler = scheduler or Scheduler(cache, max_batch, token_budget, preemption)
        self.clock = clock or WallClock()
        self.keep_logits = keep_logits
        self.trace: list[StepRecord] | None = [] if trace else None
        self.n_steps = 0
        self.device = model.token_embedding.weight.device
        self._n_requests = 0
        self._cancelled: list[Sequence] = []
        self._clients: dict[Sequence, list[int]] = {}  # what each stream has still to read

    # -- clients --------------------------------------------------------------------------------------------------

    def add(self, request: Request, arrived: float | None = None) -> Sequence:
        """Takes a request in.

        Args:
            arrived: when it came, in seconds of the clock; None means now.
        Returns: its sequence, which grows with the steps.
        Raises: ValueError when it can never fit, with both sizes; or has a token that the model does not know, a
            value of the wrong kind, or stop strings and the engine no tokenizer.
        """
        return self.add_samples(request, 1, arrived)[0]

    def add_samples(self, request: Request, n: int, arrived: float | None = None) -> list[Sequence]:
        """Takes a request in that wants n answers; the prompt is read once and its keys and values are shared.

        Returns: the sequences; number i draws with the request's seed + i.
        Raises: ValueError as `add`, or when n is below 1.
        """
        check_counts(n=n)
        self._check(request)
        when = self.clock.now() if arrived is None else arrived
        sequences = [Sequence(request, (self._n_requests, i), when) for i in range(n)]
        self._n_requests += 1
        sequences[0].siblings = sequences[1:]
        self.scheduler.add(sequences[0])
        return sequences

    def _check(self, request: Request) -> None:
        """Refuses at the door what would end a step that others share."""
        prompt, vocabulary = request.prompt, self.model.token_embedding.num_embeddings
        for name, values in (("a token", prompt), ("seed", [request.seed])):
            odd = [v for v in values if isinstance(v, bool) or not isinstance(v, Integral)]
            if odd:
                raise ValueError(f"{name} is {odd[0]!r}, it must be a whole number")
        if not -(2**63) <= request.seed < 2**63:
            raise ValueError(f"seed is {request.seed}, it must fit 64 bits")
        if not isinstance(request.params, SamplingParams):
            raise ValueError(f"params is {request.params!r}, it must be SamplingParams")
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= worst < vocabulary:
            raise ValueError(f"token {worst} is outside the vocabulary of {vocabulary}")
        if request.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {request.stop!r} need the engine to have a tokenizer")
        needed = len(prompt) + request.n_new - 1  # the last token is sampled and never read
        for what, limit in (("the context window", self.model.context_length), ("the cache", self.cache.longest)):
            if limit is not None and needed > limit:
                raise ValueError(
                    f"a request of {len(prompt)} tokens and {request.n_new} new ones needs {needed}, "
                    f"{what} holds {limit} at most"
                )

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence that nobody waits for any more; its memory is free at the next step."""
        if not sequence.finished:
            sequence.reason = "cancelled"
            self._cancelled.append(sequence)

    async def stream(self, request: Request) -> AsyncIterator[int]:
        """The tokens of a request as they come; a client that goes away frees its memory at the next step.

        Streams share the engine: whichever of them waits for a token runs the next step, for all.
        Yields: tokens. Raises: ValueError as `add`.
        """
        sequence = self.add(request)
        unread = self._clients[sequence] = []
        try:
            while True:
                while unread:
                    yield unread.pop(0)
                if sequence.finished:
                    return
                self.step()
                await asyncio.sleep(0)  # the others' turn
        finally:
            del self._clients[sequence]
            self.cancel(sequence)

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._cancelled)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Runs one step: drop who was cancelled, schedule, run the model, sample, let go of who has finished.

        Returns: what it gives to each client; nothing for a prompt that is read in part.
        """
        now = self.clock.now
        record = StepRecord(now())
        self._drop()
        plan = self.scheduler.schedule()
        if not plan:
            return []
        scheduled = now()
        tokens, segments = self._prepare(plan)
        prepared = now()
        n_new = [row.n_new for row in plan]
        last, begin = [], 0  # of each row that samples, where its last token lies in the packed step
        for row, n in zip(plan, n_new, strict=True):
            if row.samples:
                last.append(begin + n - 1)
            begin += len(row.tokens)
        hidden = self.model.run(tokens, segments, self.cache)  # [n_new, d]
        # the head reads only the rows that sample
        logits = self.model.head(hidden if len(last) == len(hidden) else hidden[last]) if last else None
        if self.trace is not None:
            synchronize(self.device)  # a GPU may still compute what it was given
        ran = now()
        for row, n in zip(plan, n_new, strict=True):
            row.sequence.n_computed += n
        self.clock.tick([len(row.tokens) for row in plan])
        outputs = [] if logits is None else self._sample([row.sequence for row in plan if row.samples], logits)
        self.n_steps += 1
        if self.trace is not None:
            record.end = now()
            record.rows = [(row.sequence.key, len(row.tokens), n) for row, n in zip(plan, n_new, strict=True)]
            record.sampled = [output.sequence.key for output in outputs]
            record.n_waiting, record.preempted = len(self.scheduler.waiting), self.scheduler.preempted
            parts = (scheduled - record.start, prepared - scheduled, ran - prepared, record.end - ran)
            record.parts = dict(zip(("schedule", "prepare", "model", "sample"), parts, strict=True))
            self.trace.append(record)
        return outputs

    def _drop(self) -> None:
        """Forgets the cancelled sequences and frees what they held."""
        for sequence in self._cancelled:
            self._release(sequence)
        self._cancelled.clear()

    def _release(self, sequence: Sequence) -> None:
        for other in self.scheduler.running + self.scheduler.waiting:  # a sample that waits to be forked
            if sequence in other.siblings:
                other.siblings.remove(sequence)
        self.scheduler.remove(sequence)

    def _prepare(self, plan: list[Scheduled]) -> tuple[Tensor, list[Segment]]:
        """Packs a plan into one step: its tokens [n_new] and the segments of the cache."""
        tokens = torch.tensor([token for row in plan for token in row.tokens], device=self.device)
        positions = torch.tensor([position for row in plan for position in row.positions])  # on the host
        sizes = [len(row.tokens) for row in plan]
        parents = [row.parents for row in plan] if any(row.parents is not None for row in plan) else None
        equal = min(sizes) == max(sizes)
        by_row = positions.view(len(plan), -1) if equal else positions.split(sizes)
        return tokens, self.cache.prepare([row.sequence.key for row in plan], by_row, parents, tokens)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Output]:
        """One token for each row of logits [B, V], and one for each sample that is forked from a row."""
        parents: list[Sequence | None] = [None] * len(sequences)
        if any(sequence.siblings for sequence in sequences):
            sequences, parents, logits = _with_siblings(sequences, logits)
        params = [sequence.request.params for sequence in sequences]
        if all(p.temperature == 0 for p in params):
            chosen = greedy(logits).tolist()
        else:
            numbers = [s.uniform if p.temperature else 0.0 for s, p in zip(sequences, params, strict=True)]
            u = torch.tensor(numbers, dtype=torch.float64)
            chosen = sample(probabilities(logits, params), u).tolist()
        time, outputs = self.clock.now(), []
        for i, (sequence, token) in enumerate(zip(sequences, chosen, strict=True)):
            if self.keep_logits:
                sequence.logits.append(logits[i].clone())
            outputs.append(Output(sequence, sequence.append(token, time, self.tokenizer), sequence.finished))
            if sequence in self._clients:
                self._clients[sequence] += outputs[-1].tokens
            parent = parents[i]
            if parent is not None and not sequence.finished:
                self.scheduler.fork(parent, sequence)
        for sequence in sequences:
            if sequence.finished:
                self.scheduler.remove(sequence)
        return outputs

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            self.step()

    def serve(self, arrivals: Iterable[Arrival]) -> list[Sequence]:
        """Serves requests as they come, until all have finished.

        Returns: their sequences, in the order in which they came. Raises: ValueError as `add`.
        """
        coming = sorted(arrivals, key=lambda arrival: arrival.time)
        sequences: list[Sequence] = []
        while len(sequences) < len(coming) or self.busy:
            while len(sequences) < len(coming) and coming[len(sequences)].time <= self.clock.now():
                arrival = coming[len(sequences)]
                sequences.append(self.add(arrival.request, arrival.time))
            if self.busy:
                self.step()
            elif len(sequences) < len(coming):
                self.clock.wait_until(coming[len(sequences)].time)
        return sequences

    def check(self) -> None:
        """The engine's invariants, between two steps. Raises: AssertionError that says which is broken."""
        self.scheduler.check()
        for sequence in self.scheduler.running:
            assert sequence.finished or sequence.n_generated < sequence.request.n_new, f"{sequence!r} should have ended"
        if self.trace and self.scheduler.token_budget is not None:
            n_tokens = sum(n for _, n, _ in self.trace[-1].rows)
            assert n_tokens <= self.scheduler.token_budget, f"a step of {n_tokens} tokens is over the budget"


def _with_siblings(sequences: list[Sequence], logits: Tensor) -> tuple[list[Sequence], list[Sequence | None], Tensor]:
    """Repeats a prompt's last row of logits for each sample that is to be forked from it."""
    every: list[Sequence] = []
    parents: list[Sequence | None] = []
    rows: list[int] = []
    for i, sequence in enumerate(sequences):
        group = [sequence, *sequence.siblings]
        every += group
        parents += [None, *[sequence] * len(sequence.siblings)]
        rows += [i] * len(group)
        sequence.siblings = []
    return every, parents, logits[rows]
