"""Chunked prefill in the real engine, and what a mixed step costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlite.cache.dense import StaticCache
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.measure import synchronize, time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, SweepModel, filled_cache, sweep
from gptlite.sampling import GREEDY
from gptlite.serving import metrics
from gptlite.serving.arrivals import WallClock
from gptlite.serving.engine import Engine
from gptlite.serving.sequence import Request
from gptlite.serving.step_time import FittedTime, Rows

SETTLE = 4  # steps that the running users decode before the long prompt comes, and again after its first token

# -- a long prompt comes ------------------------------------------------------------------------------------------


class _DeviceClock(WallClock):
    """Waits for the device before it says what time it is."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def now(self) -> float:
        synchronize(self.device)
        return super().now()


@sweep(
    "chunked-prefill",
    "what running users and an arriving prompt wait for, by the token budget of a step",
    preset="gptlite",
    running=4,
    context=32,
    prompt=160,
    budgets=[8, 16, 32, 64, 164],
    repeats=3,
)
def _chunked_prefill(recording: Recording) -> Iterator[Step]:
    params = recording.params
    running, context, prompt = params["running"], params["context"], params["prompt"]
    if min(params["budgets"]) <= running:
        raise ValueError(f"budgets has {min(params['budgets'])}, it must be above the {running} running users")
    steps = max(-(-prompt // (budget - running)) for budget in params["budgets"]) + 3 * SETTLE
    n_tokens = max(context + steps, prompt + SETTLE)
    models = SweepModel(recording, preset(params["preset"], context_length=max(n_tokens, 256)))
    trained = None
    if params["preset"] == "gptlite":
        if n_tokens > models.config.context_length or n_tokens > 256:
            raise ValueError(f"{n_tokens} tokens are needed, the trained model sees 256: take another preset")
        trained = load("gptlite", models.device, models.dtype)[0]
    shown: dict[str, list[list[float]]] = {}
    recording.data["steps"] = shown  # by budget, of one run: [decoding rows, prompt tokens, seconds] of each step

    def run(budget: int) -> dict[str, float]:
        model = trained or models.get()
        cache = StaticCache(model, running + 1, n_tokens, bucket=16)
        engine = Engine(model, cache, running + 1, clock=_DeviceClock(str(models.device)), trace=True)
        for i in range(running):
            engine.add(Request([1 + i] * context, steps, GREEDY))
        users = list(engine.scheduler.waiting)
        while any(user.n_generated < SETTLE for user in users):
            engine.step()
        assert engine.trace is not None
        engine.trace.clear()
        engine.scheduler.token_budget = budget  # from here on: the users have begun together
        arriving = engine.add(Request([7] * prompt, SETTLE, GREEDY))
        while not arriving.times:
            engine.step()
        gaps = [
            after - before
            for user in users
            for before, after in zip(user.times, user.times[1:], strict=False)
            if after > arriving.arrived
        ]
        while not arriving.finished:
            engine.step()
        shown[str(budget)], left = [], prompt
        for record in engine.trace:
            read = min(left, sum(n for key, n, _ in record.rows if key == arriving.key))
            left -= read
            decoding = len(record.rows) - (read > 0)
            shown[str(budget)].append([decoding, read, round(record.end - record.start, 6)])
        return {"longest gap": max(gaps), "mean gap": sum(gaps) / len(gaps), "TTFT": metrics.ttft(arriving)}

    for budget in params["budgets"]:
        yield from _several(
            partial(run, budget), {"budget": budget}, models.needed(running + 1, n_tokens, prompt), params
        )


def _several(
    run: Callable[[], dict[str, float]], at: dict[str, Any], needed: float, params: dict[str, Any]
) -> Iterator[Step]:
    """A step of the sweep for each thing that a run measures; the first of them makes all the runs."""
    found: dict[str, list[float]] = {}

    def point(what: str) -> Point:
        if not found:
            run()  # the first one pays for what is made at first use
            for _ in range(params["repeats"]):
                for name, seconds in run().items():
                    found.setdefault(name, []).append(seconds)
        return Point({"what": what, **at}, found[what])

    for what in ("longest gap", "mean gap", "TTFT"):
        yield {"what": what, **at}, needed, partial(point, what)


# -- what a step costs --------------------------------------------------------------------------------------------


@sweep(
    "step-costs",
    "seconds of mixed steps, by decoding rows, their context, and tokens of a prompt",
    preset="gpt2",
    decodes=[1, 8],
    contexts=[128, 512],
    chunks=[64, 256],
    repeats=3,
    warmup=1,
)
def _step_costs(recording: Recording) -> Iterator[Step]:
    params = recording.params
    longest = max(params["contexts"]) + max(params["chunks"])
    models = SweepModel(recording, preset(params["preset"], context_length=longest))

    def measure(rows: Rows, at: dict[str, int]) -> Point:
        model, device = models.get(), models.device
        cache = _filled(model, rows)
        keys = list(range(len(rows)))
        positions = [torch.arange(past, past + new) for past, new in rows]
        n_new = sum(new for _, new in rows)
        tokens = torch.zeros(n_new, dtype=torch.int64, device=device)
        last = torch.tensor([new for _, new in rows]).cumsum(0).sub(1).to(device)

        @torch.inference_mode()
        def step() -> Tensor:
            segments = cache.prepare(keys, positions, tokens=tokens)
            best = model.head(model.run(tokens, segments, cache)[last]).argmax(-1)
            cache.keep(keys, [0] * len(keys))  # so that the next sample is the same step
            return best

        timing = time_call(step, device, params["warmup"], params["repeats"])
        return Point(at, timing.wall)

    for decodes in (0, *params["decodes"]):
        for context in params["contexts"]:
            for chunk in (0, *params["chunks"]):
                rows = [(context - 1, 1)] * decodes + ([(context - 1, chunk)] if chunk else [])
                if rows:
                    at = {"decodes": decodes, "context": context, "chunk": chunk}
                    yield at, models.needed(len(rows), longest, max(chunk, 1)), partial(measure, rows, at)


def _filled(model: GPTlite, rows: Rows) -> StaticCache:
    """A cache with the past of each row, and room for what it adds."""
    return filled_cache(model, len(rows), rows[0][0], max(past + new for past, new in rows))


def fitted(recording: Recording) -> FittedTime:
    """The time of a step, from a recording of the sweep `step-costs`."""
    steps = []
    for point in recording.points:
        past = point.at["context"] - 1
        rows = [(past, 1)] * point.at["decodes"]
        rows += [(past, point.at["chunk"])] if point.at["chunk"] else []
        steps.append((rows, point.median))
    return FittedTime.fit(steps)
