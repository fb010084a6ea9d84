"""The paged cache: what lies in its blocks step by step, and a decode step's time by the size of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlite.arithmetic import decode_costs, kv_bytes, total
from gptlite.cache.contract import Cache
from gptlite.cache.paged import PagedCache
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.generate import decode_step
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, SweepModel, filled_cache, sweep
from gptlite.sampling import SamplingParams, probabilities, sample

CONTIGUOUS = "contiguous"


@sweep(
    "paged",
    "seconds per decode step, by the size of a cache's blocks and with a contiguous cache",
    preset="gptlite",
    batch=8,
    context=1024,
    block_sizes=[1, 4, 16, 64, 256],
    repeats=9,
    warmup=2,
)
def _paged(recording: Recording) -> Iterator[Step]:
    params = recording.params
    batch, context = params["batch"], params["context"]
    models = SweepModel(recording, preset(params["preset"], context_length=context))
    n_steps = params["warmup"] + params["repeats"]
    if context <= n_steps:
        raise ValueError(f"context is {context}, it must be above warmup + repeats, {n_steps}")

    def measure(block_size: int | None) -> Point:
        model = models.get()
        # the steps end at the context: the last sample attends to exactly that many tokens
        if block_size is None:
            cache: Cache = filled_cache(model, batch, context - n_steps, context)
        else:
            cache = scattered_cache(model, batch, context - n_steps, context, block_size)
        tokens = torch.zeros(batch, dtype=torch.int64, device=models.device)
        timing = time_call(
            lambda: decode_step(model, tokens, cache), models.device, params["warmup"], params["repeats"]
        )
        width = models.width
        cost = total(decode_costs(models.shape, batch, context, bytes_per_weight=width, bytes_per_value=width))
        name = CONTIGUOUS if block_size is None else f"blocks of {block_size}"
        return Point.of({"cache": name}, timing, cost)

    for block_size in (None, *params["block_sizes"]):
        pages = 0 if block_size is None else batch * kv_bytes(models.shape, block_size, models.width)
        name = CONTIGUOUS if block_size is None else f"blocks of {block_size}"
        yield {"cache": name}, models.needed(batch, context, 1) + pages, partial(measure, block_size)


def scattered_cache(model: GPTlite, batch: int, n_cached: int, max_tokens: int, block_size: int) -> PagedCache:
    """A paged cache of sequences that grew side by side, so that no two blocks of one are neighbours.

    What they hold is zeros: the time of a step doesn't depend on it.
    """
    n_blocks = batch * -(-max_tokens // block_size)
    cache = PagedCache(model, n_blocks, block_size)
    for begin in range(0, n_cached, block_size):
        positions = torch.arange(begin, min(begin + block_size, n_cached)).expand(batch, -1)  # [B, S]
        cache.prepare(range(batch), positions)
    return cache


@sweep(
    "paged-trace",
    "the blocks of a small pool while the trained model serves requests that share; no times",
    model="gptlite",
    n_blocks=14,
    block_size=4,
)
def _trace(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    recording.data["chars"] = tokenizer.chars
    cache = PagedCache(model, params["n_blocks"], params["block_size"], prefix_caching=True)
    recording.data["frames"] = block_trace(model, cache, tokenizer.encode)
    return iter(())


class Tracer:
    """Serves requests on a paged cache, and writes down what lies in its blocks after every step.

    Args:
        model: reads and samples. cache: an empty paged cache.
    """

    def __init__(self, model: GPTlite, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self.read: dict[str, list[int]] = {}  # the tokens of each sequence that the cache holds
        self.next: dict[str, int] = {}  # the token that each has sampled and not read
        self.frames: list[dict[str, Any]] = []
        self._probs: dict[str, Tensor] = {}  # [V], of each one's next token
        self._content: dict[int, list[int]] = {}  # what each block held when it was last held

    @torch.inference_mode()
    def step(self, what: str, new: dict[str, list[int]] | None = None) -> None:
        """Reads new tokens of some sequences, by default the next one of each, and samples one more for them."""
        new = {key: [token] for key, token in self.next.items()} if new is None else new
        before = {key: self.cache.table(key) for key in self.cache.positions}
        packed = torch.tensor([token for row in new.values() for token in row])  # [n_new]
        positions = [torch.arange(len(row)) + self.cache.next_position(key) for key, row in new.items()]
        segments = self.cache.prepare(list(new), positions, tokens=packed)
        logits = self.model.head(self.model.run(packed, segments, self.cache))  # [n_new, V]
        copies, written, end = list[list[int]](), list[int](), 0
        for key, row in new.items():
            end += len(row)
            first = len(self.read.get(key, [])) // self.cache.block_size
            self.read[key] = self.read.get(key, []) + row
            table = self.cache.table(key)
            copies += [[old, now] for old, now in zip(before.get(key, []), table, strict=False) if old != now]
            written += table[first:]
            self._probs[key] = probabilities(logits[end - 1 : end], SamplingParams())[0]
            self._sample(key)
        self.picture(what, copies, written)

    def fork(self, key: str, new: str) -> None:
        """Begins a second sample of a sequence, with a next token of its own."""
        self.cache.fork(key, new)
        self.read[new], self._probs[new] = list(self.read[key]), self._probs[key]
        self._sample(new)

    def begin(self, key: str, text: list[int]) -> list[int]:
        """Begins a sequence with what the cache has of its text. Returns: the tokens that are to be read."""
        n = self.cache.begin(key, torch.tensor(text))
        self.read[key] = text[:n]
        return text[n:]

    def next_with(self, key: str, tokens: list[int]) -> dict[str, list[int]]:
        """The next token of each, and these of one that has none yet."""
        return {**{name: [token] for name, token in self.next.items()}, key: tokens}

    def free(self, key: str) -> None:
        """Ends a sequence."""
        self.cache.free(key)
        for state in (self.read, self.next, self._probs):
            del state[key]

    def picture(self, what: str, copies: list[list[int]] | None = None, written: list[int] | None = None) -> None:
        """Writes down who holds each block, whether it is idle, and its tokens."""
        size, held, pages = self.cache.block_size, dict[int, list[str]](), dict[int, list[int]]()
        for key, text in self.read.items():
            for page, block in enumerate(self.cache.table(key)):
                tokens = text[page * size : (page + 1) * size]
                # of those that share a block one may have read further than another
                if block not in held or len(tokens) > len(self._content[block]):
                    self._content[block] = tokens
                held.setdefault(block, []).append(key)
                pages.setdefault(block, []).append(page)
        idle = self.cache.pool.idle
        blocks = [
            {"held": held.get(block, []), "pages": pages.get(block, []), "idle": block in idle}
            | {"tokens": self._content[block] if block in held or block in idle else []}
            for block in range(self.cache.n_blocks)
        ]
        self.cache.check()
        self.frames.append({"what": what, "blocks": blocks, "copies": copies or [], "written": written or []})

    def _sample(self, key: str) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, key)))
        u = torch.rand(len(self.read[key]), generator=generator, dtype=torch.float64)[-1:]  # a fresh one per position
        self.next[key] = int(sample(self._probs[key][None], u))


def block_trace(model: GPTlite, cache: PagedCache, encode: Callable[[str], Tensor]) -> list[dict[str, Any]]:
    """Three samples of one prompt and a second request; some end, and a later prompt shares what they leave.

    Args:
        cache: an empty one, of 14 blocks of 4 tokens at least. encode: text to tokens [n].
    Returns: a frame per step: `what` happened, `blocks` (who holds each and as which page, whether it is idle, its
        tokens), `copies` ([from, to] of each copy on write) and `written` (blocks that the step wrote into).
    """
    trace = Tracer(model, cache)
    first, second = encode("ROMEO:\nO, thou").tolist(), encode("KING:\nNow").tolist()
    trace.step("A and B arrive, and their prompts are read", {"A1": first, "B": second})
    for name in ("A2", "A3"):
        trace.fork("A1", name)
    trace.picture("A is to be sampled three times: its blocks get two more holders, nothing is copied")
    trace.step("each reads its own token: two of A's three copy the block they share, the last writes in place")
    for _ in range(3):
        trace.step("each reads one token more")
    trace.free("B")
    trace.picture("B ends: its last block is free, the full ones stay for a later prompt until they are needed")
    trace.step("A's samples go on")
    late = trace.begin("C", [*first[:-2], *encode("at").tolist()])
    trace.picture(f"C begins as A did: {len(trace.read['C'])} of its tokens are found by their content")
    trace.step("the rest of C's prompt is read, the others decode", trace.next_with("C", late))
    for name in ("A2", "A3"):
        trace.free(name)
    trace.picture("two samples of A end: what was theirs alone is free or idle")
    for _ in range(4):
        trace.step("A and C go on, in whatever block is free: an unused one, else the idle one that was let go first")
    return trace.frames
