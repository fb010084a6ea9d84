"""A discrete-event simulation of one engine, a fleet of them, or prefill and decode apart: it runs no model.

What it assumes, beside the time of a step: a step takes exactly that time, and the host none; every replica is the same
machine; memory holds `max_batch` sequences of any length in the trace; requests say in advance how long their answer
is, and none is cancelled; kept prefixes have memory of their own; a transfer takes its bytes over the link's bandwidth,
one after the other, and costs the machines at its ends nothing. SimPy keeps the clock {cite}`simpy2026`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gptlite.serving.jobs import Job, Outcome, Step, Trace
from gptlite.serving.routing import BlockCounter, Router, prefix_order
from gptlite.serving.step_time import StepTime


@dataclass(frozen=True)
class Engine:
    """How a replica works.

    Args:
        step_time: seconds of a step from its rows (n_past, n_new).
        max_batch: sequences at once, at least 1.
        budget: tokens of a step at most, decoding rows first; None reads every prompt whole.
        n_blocks: blocks of finished prompts that it keeps for prompts with the same beginning; 0 keeps none.
        block_size: tokens of a block.
        patience: None serves in order of arrival; a number serves the longest cached prefix first, see `prefix_order`.
    Raises: ValueError when a count is below 1, or the budget below the batch.
    """

    step_time: StepTime
    max_batch: int = 32
    budget: int | None = None
    n_blocks: int | None = 0
    block_size: int = 16
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.block_size < 1:
            raise ValueError(f"max_batch is {self.max_batch} and block_size {self.block_size}, both must be at least 1")
        if self.budget is not None and self.budget < self.max_batch:
            raise ValueError(f"budget is {self.budget}, it must be at least max_batch, {self.max_batch}")


@dataclass
class _Row:
    outcome: Outcome
    read: int = 0  # prompt tokens whose keys and values are there
    passed: int = 0  # jobs that came later and began before it

    @property
    def missing(self) -> int:
        return self.outcome.job.n_prompt - self.read


class _Replica:
    """One engine in the simulation: the rules of `gptlite.serving.scheduler`, on counts."""

    def __init__(self, env: Any, number: int, engine: Engine, trace: Trace, hand_over: Any = None) -> None:
        self.env, self.number, self.engine, self.trace, self.hand_over = env, number, engine, trace, hand_over
        self.waiting: list[_Row] = []
        self.running: list[_Row] = []
        self.kept = BlockCounter(engine.n_blocks)
        self.arrived = env.event()
        env.process(self.work())

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def accept(self, row: _Row) -> None:
        self.waiting.append(row)
        if not self.arrived.triggered:
            self.arrived.succeed()

    def admit(self) -> bool:
        """Gives the next waiting job a slot, if there is one."""
        if not self.waiting or len(self.running) >= self.engine.max_batch:
            return False
        queue = self.waiting
        if self.engine.patience is not None:
            match = self.kept.match
            queue = prefix_order(
                queue, lambda row: match(row.outcome.job.chain), lambda row: row.passed, self.engine.patience
            )
        row = queue[0]
        place = self.waiting.index(row)
        for earlier in self.waiting[:place]:
            earlier.passed += 1
        del self.waiting[place]
        if not row.read:  # the last token of a prompt is always read, it gives the logits
            job = row.outcome.job
            row.read = min(self.kept.match(job.chain) * self.engine.block_size, job.n_prompt - 1)
            row.outcome.n_cached = row.read
        self.running.append(row)
        return True

    def plan(self) -> list[tuple[_Row, int]]:
        """Rows of the next step and the tokens that each adds: decoding rows first, then prompts, oldest first."""
        left = self.engine.budget if self.engine.budget is not None else float("inf")
        rows = [(row, 1) for row in self.running if not row.missing]
        left -= len(rows)
        for row in self.running:
            if row.missing and left > 0:
                rows.append((row, int(min(row.missing, left))))
                left -= rows[-1][1]
        while left > 0 and self.admit():
            row = self.running[-1]
            rows.append((row, int(min(row.missing, left)) if row.missing else 1))
            left -= rows[-1][1]
        return rows

    def work(self) -> Iterator[Any]:
        while True:
            rows = self.plan()
            if not rows:
                self.arrived = self.env.event()
                yield self.arrived
                yield self.env.timeout(0)  # those that arrive at the same moment share its first step
                continue
            begin, waiting, decodes = self.env.now, len(self.waiting), sum(not row.missing for row, _ in rows)
            seconds = self.engine.step_time([self._span(row, n) for row, n in rows])
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step takes {seconds} s, it must be above 0 and finite")
            yield self.env.timeout(seconds)
            n_prompt = sum(n for row, n in rows if row.missing)
            self.trace.steps.append(Step(self.number, begin, self.env.now, decodes, n_prompt, waiting))
            for row, n in rows:
                self.finish(row, n)
            yield self.env.timeout(0)  # who arrives just now waits already

    @staticmethod
    def _span(row: _Row, n: int) -> tuple[int, int]:
        past = row.read if row.missing else row.outcome.job.n_prompt + len(row.outcome.tokens) - 1
        return past, n

    def finish(self, row: _Row, n: int) -> None:
        """Books a row's step: a prompt that is not whole yet emits nothing."""
        outcome, job = row.outcome, row.outcome.job
        if row.missing:
            row.read += n
            if row.missing:
                return
            self.kept.add(job.chain)  # written now, and only now can be shared
        outcome.tokens.append(self.env.now)
        if len(outcome.tokens) == job.n_new:
            self.running.remove(row)
        elif self.hand_over:
            self.running.remove(row)
            self.hand_over(row)


def simulate(jobs: Sequence[Job], engine: Engine, n_replicas: int = 1, router: Router | None = None) -> Trace:
    """A fleet of engines that each read and write, with a router before them.

    Args:
        jobs: in any order. router: with more than one replica; None takes turns.
    Raises: ImportError without SimPy; ValueError when there are no jobs or no replicas, or a step takes no time.
    """
    if n_replicas < 1:
        raise ValueError(f"n_replicas is {n_replicas}, it must be at least 1")
    env, trace = _begin(jobs)
    replicas = [_Replica(env, i, engine, trace) for i in range(n_replicas)]
    turn = iter(range(len(jobs)))

    def send(row: _Row) -> None:
        loads = [replica.load for replica in replicas]
        i = router.route(row.outcome.job.chain, loads) if router else next(turn) % n_replicas
        row.outcome.replica = i
        replicas[i].accept(row)

    env.process(_arrivals(env, trace, send))
    env.run()
    return trace


def simulate_disaggregated(
    jobs: Sequence[Job],
    prefill: Engine,
    decode: Engine,
    n_prefill: int = 1,
    n_decode: int = 1,
    bytes_per_token: float = 0.0,
    bandwidth: float = float("inf"),
) -> Trace:
    """Prefill and decode on machines of their own {cite}`zhong2024distserve`, with a link between the two pools.

    Each job goes to the prefill machine and then to the decode machine with the fewest jobs.

    Args:
        jobs: in any order. prefill, decode: how the machines of each pool work.
        bytes_per_token: keys and values of one token. bandwidth: of the link, bytes/s.
    Raises: as `simulate`; ValueError when a pool is empty, or the bytes or the bandwidth make no sense.
    """
    if n_prefill < 1 or n_decode < 1 or not bytes_per_token >= 0 or not bandwidth > 0:
        raise ValueError(
            f"n_prefill is {n_prefill}, n_decode {n_decode}, bytes_per_token {bytes_per_token} and bandwidth"
            f" {bandwidth}: they must be at least 1, 1 and 0, and above 0"
        )
    import simpy

    env, trace = _begin(jobs)
    link = simpy.Resource(env, capacity=1)

    def hand_over(row: _Row) -> None:
        env.process(transfer(row))

    def transfer(row: _Row) -> Iterator[Any]:
        with link.request() as turn:
            yield turn
            size = bytes_per_token * row.outcome.job.n_prompt
            yield env.timeout(size / bandwidth)
            trace.sent_bytes += size
        min(decoders, key=lambda replica: replica.load).accept(row)

    readers = [_Replica(env, i, prefill, trace, hand_over) for i in range(n_prefill)]
    decoders = [_Replica(env, n_prefill + i, decode, trace) for i in range(n_decode)]

    def send(row: _Row) -> None:
        reader = min(readers, key=lambda replica: replica.load)
        row.outcome.replica = reader.number
        reader.accept(row)

    env.process(_arrivals(env, trace, send))
    env.run()
    return trace


def _begin(jobs: Sequence[Job]) -> tuple[Any, Trace]:
    if not jobs:
        raise ValueError("there are no jobs to simulate")
    try:
        import simpy
    except ImportError:
        raise ImportError('gptlite.serving.simulator needs simpy: pip install "gptlite[lab]"') from None
    return simpy.Environment(), Trace([Outcome(job) for job in jobs])


def _arrivals(env: Any, trace: Trace, send: Callable[[_Row], None]) -> Iterator[Any]:
    for outcome in sorted(trace.outcomes, key=lambda outcome: outcome.job.arrival):
        if outcome.job.arrival > env.now:
            yield env.timeout(outcome.job.arrival - env.now)
        send(_Row(outcome))
