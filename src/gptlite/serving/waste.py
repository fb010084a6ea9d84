"""Where a cache's memory goes: tokens, and the three kinds of waste, by contiguous regions and by blocks."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields

import torch

from gptlite.cache.paged import PagedCache
from gptlite.config import GPTConfig
from gptlite.model import GPTlite


@dataclass(frozen=True)
class Job:
    """A request, as far as memory is concerned: tokens of its prompt, tokens of its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Tokens that its cache holds at the end."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Use:
    """What the slots of a cache are used for, in tokens {cite}`kwon2023pagedattention`.

    Args:
        tokens: keys and values of tokens that are there.
        reserved: slots that their sequence will use later, and that nobody else can use now.
        internal: slots that their sequence has and never will use.
        external: free slots that the next in the queue could use, were they in one piece.
        free: other free slots.
    """

    tokens: float = 0
    reserved: float = 0
    internal: float = 0
    external: float = 0
    free: float = 0

    @property
    def total(self) -> float:
        """All slots."""
        return sum(getattr(self, part.name) for part in fields(self))

    def shares(self) -> Use:
        """The same as parts of all slots, which sum up to 1."""
        return Use(*(getattr(self, part.name) / self.total for part in fields(self)))


def mean_use(uses: Sequence[Use]) -> Use:
    """The mean over time. Raises: ValueError when there is none."""
    if not uses:
        raise ValueError("uses is empty, a mean needs one at least")
    return Use(*(sum(getattr(use, part.name) for use in uses) / len(uses) for part in fields(Use)))


# -- in one piece -------------------------------------------------------------------------------------------------


class FirstFit:
    """Hands out contiguous regions of a memory of n_slots: of the gaps that are large enough, the first."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.regions: dict[int, int] = {}  # begin -> size

    def gaps(self) -> list[tuple[int, int]]:
        """Begin and size of each free piece, in order."""
        found, begin = [], 0
        for start in sorted(self.regions):
            if start > begin:
                found.append((begin, start - begin))
            begin = start + self.regions[start]
        return [*found, (begin, self.n_slots - begin)] if begin < self.n_slots else found

    def take(self, size: int) -> int | None:
        """Where a region of this size begins now; None when no gap holds it."""
        for begin, room in self.gaps():
            if room >= size:
                self.regions[begin] = size
                return begin
        return None

    def release(self, begin: int) -> None:
        """Gives a region back."""
        del self.regions[begin]


def longest(limit: int) -> Callable[[Job], int]:
    """A region of the largest size that any job may have."""
    return lambda job: limit


def power_of_two(job: Job) -> int:
    """The next power of two above the job's length, as if its length were guessed to within a factor of two."""
    return 1 << (job.total - 1).bit_length()


def known(job: Job) -> int:
    """The job's length itself, as if it were known beforehand."""
    return job.total


def run_contiguous(jobs: Sequence[Job], n_slots: int, size: Callable[[Job], int], batch: int = 1 << 30) -> list[Use]:
    """Serves jobs first come first served, each in one region from its first step to its last.

    Args:
        size: of a job's region, in slots. batch: jobs that run at once at most.
    Returns: the use of the memory in each step, as long as jobs wait.
    Raises: ValueError when a job can never fit.
    """
    for job in jobs:
        if not job.total <= size(job) <= n_slots:
            raise ValueError(f"a job of {job.total} tokens asks for {size(job)} slots of {n_slots}, it never fits")
    memory, queue = FirstFit(n_slots), deque(jobs)
    running: list[tuple[Job, int, int]] = []  # job, where its region begins, tokens so far
    uses = []
    while queue or running:
        while queue and len(running) < batch and (begin := memory.take(size(queue[0]))) is not None:
            running.append((queue.popleft(), begin, 0))
        running = [(job, begin, n + 1 if n else job.prompt + 1) for job, begin, n in running]
        if queue:
            tokens = sum(n for _, _, n in running)
            reserved = sum(job.total - n for job, _, n in running)
            internal = sum(size(job) - job.total for job, _, _ in running)
            free = n_slots - tokens - reserved - internal
            scattered = len(running) < batch and free >= size(queue[0])
            uses.append(Use(tokens, reserved, internal, free * scattered, free * (not scattered)))
        for job, begin, n in running:
            if n == job.total:
                memory.release(begin)
        running = [row for row in running if row[2] < row[0].total]
    return uses


# -- in blocks ----------------------------------------------------------------------------------------------------


def run_paged(jobs: Sequence[Job], n_slots: int, block_size: int = 16, batch: int = 1 << 30) -> list[Use]:
    """Serves the same jobs with the block tables of a `PagedCache`; where blocks run out, the youngest waits again.

    Returns: the use of the memory in each step, as long as jobs wait.
    Raises: ValueError when a job can never fit.
    """
    # what is stored doesn't matter here, only where: the smallest model there is, and no forward pass
    limit = max(job.total for job in jobs)
    model = GPTlite(GPTConfig(2, limit, n_layers=1, d_model=1, n_heads=1, d_head=1, d_ff=1))
    cache = PagedCache(model, n_slots // block_size, block_size)
    if cache.n_blocks * block_size < limit:
        raise ValueError(f"a job of {limit} tokens needs {cache.blocks_for(limit)} blocks, there are {cache.n_blocks}")
    queue, running, uses = deque(enumerate(jobs)), list[tuple[int, Job]](), []
    while queue or running:
        while not cache.fits(_next(cache, running)):
            cache.free(running[-1][0])
            queue.appendleft(running.pop())
        # whoever comes in has room for its prompt, and those who run for a step more
        while queue and len(running) < batch and cache.fits(_next(cache, [*running, queue[0]])):
            running.append(queue.popleft())
        new = _next(cache, running)
        cache.prepare(list(new), [torch.arange(n) + cache.next_position(key) for key, n in new.items()])
        if queue:
            held = {key: cache.next_position(key) for key, _ in running}
            tokens = sum(held.values())
            room = {key: len(cache.table(key)) * block_size - held[key] for key, _ in running}
            reserved = sum(min(room[key], job.total - held[key]) for key, job in running)
            taken = sum(len(cache.table(key)) for key, _ in running) * block_size
            uses.append(Use(tokens, reserved, taken - tokens - reserved, 0, n_slots - taken))
        for key, job in running:
            if cache.next_position(key) == job.total:
                cache.free(key)
        running = [(key, job) for key, job in running if cache.next_position(key)]
    return uses


def _next(cache: PagedCache, running: Sequence[tuple[int, Job]]) -> dict[Hashable, int]:
    """How many tokens each adds in its next step: a prompt and its first token, or one."""
    return {key: 1 if cache.next_position(key) else job.prompt + 1 for key, job in running}


# -- by arithmetic ------------------------------------------------------------------------------------------------


def block_waste(block_size: int) -> float:
    """Slots that a sequence's last block has to spare, in the mean over lengths that fill it in every way alike."""
    return (block_size - 1) / 2


def waste_share(mean_tokens: float, block_size: int) -> float:
    """Of the slots that sequences of this mean length hold in blocks, the part that holds no token."""
    return block_waste(block_size) / (mean_tokens + block_waste(block_size))


def length_for(share: float, block_size: int) -> int:
    """The least mean length, in tokens, at which the waste is at most this share."""
    # above 0 by a hair: the quotient of a share such as 0.05 is not exact
    return math.ceil(block_waste(block_size) * (1 - share) / share - 1e-9)


def sharing(cache: PagedCache) -> tuple[int, int]:
    """Blocks that the tables of all sequences name, and the blocks that they are: fewer, where tables share some."""
    tables = [cache.table(key) for key in cache.positions]
    return sum(map(len, tables)), len({block for table in tables for block in table})


def chat_jobs(n: int = 200, limit: int = 256, seed: int = 0) -> list[Job]:
    """Jobs like those of a chat: prompts and answers of very different lengths, few of them long.

    Args:
        limit: tokens of the longest.
    """
    rng = random.Random(seed)
    jobs = []
    for _ in range(n):
        prompt = min(limit // 2, 1 + int(rng.expovariate(8 / limit)))
        jobs.append(Job(prompt, min(limit - prompt, 1 + int(rng.expovariate(6 / limit)))))
    return jobs
