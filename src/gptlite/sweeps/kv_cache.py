"""The next token by position: without a cache, with one that grows, and with one that is preallocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gptlite.arithmetic import Cost, decode_costs, kv_bytes, prefill_costs, total
from gptlite.cache.contract import whole_batch
from gptlite.cache.dense import DynamicCache, StaticCache
from gptlite.config import preset
from gptlite.generate import decode_step
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, SweepModel, filled_cache, sweep

CACHES = ("none", "dynamic", "static")


@torch.inference_mode()
def read_again(model: GPTlite, tokens: Tensor) -> Tensor:
    """What a step costs at least when nothing is kept: the whole text once more, and the head for its last token.

    `generate` without a cache calls the plain model, whose head reads every token; a fair comparison leaves that out.

    Args:
        tokens: [B, n], the text so far.
    Returns: logits of the next token [B, V].
    """
    B, n = tokens.shape
    positions = torch.arange(n, device=tokens.device).expand(B, n)
    hidden = model.run(tokens.flatten(), [whole_batch(positions)])  # [B * n, d]
    return model.head(hidden.unflatten(0, (B, n))[:, -1])


def grown(model: GPTlite, cache: StaticCache) -> DynamicCache:
    """Returns: a dynamic cache that holds what a static one does."""
    other = DynamicCache(model)
    for sequence in list(cache.positions):
        other.load(sequence, cache.export(sequence))
    return other


@sweep(
    "kv-cache",
    "seconds for the next token by its position, without a cache, with a dynamic and with a static one",
    preset="gpt2",
    positions=[32, 64, 128, 256, 512, 768, 1024],
    caches=list(CACHES),
    batch=1,
    repeats=5,
    warmup=1,
)
def _kv_cache(recording: Recording) -> Iterator[Step]:
    params = recording.params
    positions, batch, n_steps = params["positions"], params["batch"], params["warmup"] + params["repeats"]
    if unknown := [kind for kind in params["caches"] if kind not in CACHES]:
        raise ValueError(f"caches has {unknown[0]!r}, it must be of {', '.join(CACHES)}")
    if min(positions) <= n_steps:
        raise ValueError(f"positions has {min(positions)}, it must be above warmup + repeats, {n_steps}")
    models = SweepModel(recording, preset(params["preset"], context_length=max(positions)))

    def measure(kind: str, n: int) -> Point:
        model, width = models.get(), models.width
        tokens = torch.zeros(batch, n, dtype=torch.int64, device=models.device)
        costs: Callable[..., dict[str, Cost]] = decode_costs
        if kind == "none":
            step, costs = partial(read_again, model, tokens), prefill_costs
        else:
            # the steps end at position n: the last sample attends to exactly n tokens
            cache = filled_cache(model, batch, n - n_steps, n)
            step = partial(decode_step, model, tokens[:, 0], grown(model, cache) if kind == "dynamic" else cache)
        timing = time_call(step, models.device, params["warmup"], params["repeats"])
        cost = total(costs(models.shape, batch, n, bytes_per_weight=width, bytes_per_value=width))
        return Point.of({"cache": kind, "position": n, "batch": batch}, timing, cost)

    for n in positions:
        for kind in params["caches"]:
            needed = models.needed(batch, n, n if kind == "none" else 1)
            if kind == "dynamic":  # it is filled from a static one
                needed += batch * kv_bytes(models.shape, n, models.width)
            yield {"cache": kind, "position": n, "batch": batch}, needed, partial(measure, kind, n)
