"""Prefill, decode, the machine's roof over them, and the trained model's next characters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gptlite.arithmetic import decode_costs, prefill_costs, total
from gptlite.cache.dense import StaticCache
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.generate import decode_step, prefill
from gptlite.measure import ROOF_SIZES, time_call, time_copy, time_product
from gptlite.record import Point, Recording, Step, SweepModel, filled_cache, sweep


@sweep(
    "decode",
    "seconds per decode step, by batch and context",
    preset="gpt2",
    batches=[1, 2, 4, 8, 16],
    contexts=[128, 512, 1024, 2048],
    repeats=7,
    warmup=2,
)
def _decode(recording: Recording) -> Iterator[Step]:
    params = recording.params
    models = SweepModel(recording, preset(params["preset"], context_length=max(params["contexts"])))
    n_steps = params["warmup"] + params["repeats"]
    if min(params["contexts"]) <= n_steps:
        raise ValueError(f"contexts has {min(params['contexts'])}, it must be above warmup + repeats, {n_steps}")

    def measure(batch: int, context: int) -> Point:
        model = models.get()
        # the steps end at the context: the last sample attends to exactly that many tokens
        cache = filled_cache(model, batch, context - n_steps, context)
        tokens = torch.zeros(batch, dtype=torch.int64, device=models.device)
        timing = time_call(
            lambda: decode_step(model, tokens, cache), models.device, params["warmup"], params["repeats"]
        )
        width = models.width
        cost = total(decode_costs(models.shape, batch, context, bytes_per_weight=width, bytes_per_value=width))
        return Point.of({"batch": batch, "context": context}, timing, cost)

    for context in params["contexts"]:
        for batch in params["batches"]:
            at = {"batch": batch, "context": context}
            yield at, models.needed(batch, context, 1), partial(measure, batch, context)


@sweep(
    "prefill",
    "seconds to the first token, by prompt length",
    preset="gpt2",
    lengths=[32, 64, 128, 256, 512, 1024],
    batch=1,
    repeats=5,
    warmup=1,
)
def _prefill(recording: Recording) -> Iterator[Step]:
    params = recording.params
    models = SweepModel(recording, preset(params["preset"], context_length=max(params["lengths"])))

    def measure(length: int) -> Point:
        model, batch = models.get(), params["batch"]
        tokens = torch.zeros(batch, length, dtype=torch.int64, device=models.device)
        cache = StaticCache(model, batch, length, bucket=1)

        def first_token() -> Tensor:
            for row in range(batch):
                if cache.next_position(row):
                    cache.free(row)
            return prefill(model, tokens, cache).argmax(-1)

        timing = time_call(first_token, models.device, params["warmup"], params["repeats"])
        width = models.width
        cost = total(prefill_costs(models.shape, batch, length, bytes_per_weight=width, bytes_per_value=width))
        return Point.of({"batch": batch, "length": length}, timing, cost)

    for length in params["lengths"]:
        at = {"batch": params["batch"], "length": length}
        yield at, models.needed(params["batch"], length, length), partial(measure, length)


@sweep("roof", "the machine's own roof: a large matrix product and a large copy", repeats=7)
def _roof(recording: Recording) -> Iterator[Step]:
    params = recording.params
    size, n_bytes = ROOF_SIZES["cpu" if torch.device(params["device"]).type == "cpu" else "gpu"]
    device, dtype = params["device"], getattr(torch, params["dtype"])

    def product() -> Point:
        timing = time_product(device, dtype, size, params["repeats"])
        return Point({"what": "matrix product"}, timing.wall, flops=2 * size**3)

    def copy() -> Point:
        timing = time_copy(device, dtype, n_bytes, params["repeats"])
        return Point({"what": "copy"}, timing.wall, bytes=2 * n_bytes)

    yield {"what": "matrix product"}, 3 * size**2 * dtype.itemsize, product
    yield {"what": "copy"}, 2 * n_bytes, copy


@sweep(
    "roofline",
    "the machine's own roof, with decode steps by batch and prefills by length below it",
    preset="gpt2",
    batches=[1, 4, 16],
    contexts=[256],
    lengths=[32, 256],
    batch=1,
    repeats=5,
    warmup=1,
)
def _roofline(recording: Recording) -> Iterator[Step]:
    yield from _roof(recording)
    yield from _decode(recording)
    yield from _prefill(recording)


@sweep(
    "next-character",
    "the trained model's logits after some prompts; no times",
    model="gptlite",
    prompts=["ROMEO:\nO, ", "To be, or not to b", "KING HENRY:\nThe ", "What is thy na", "\n\n"],
)
def _next_character(recording: Recording) -> Iterator[Step]:
    params = recording.params
    model, tokenizer = load(params["model"], params["device"], getattr(torch, params["dtype"]))
    recording.data["chars"] = tokenizer.chars
    recording.data["prompts"] = [
        {
            "prompt": prompt,
            "logits": [
                round(logit, 4)
                for logit in prefill(model, tokenizer.encode(prompt)[None].to(params["device"]))[0].float().tolist()
            ],
        }
        for prompt in params["prompts"]
    ]
    return iter(())
