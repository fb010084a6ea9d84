"""The time of a decode step and of a prefill when half of a model is gone, as a part or as zeros."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gptlite.arithmetic import ModelShape, decode_costs, kv_bytes, n_params, prefill_costs, total
from gptlite.cache.dense import StaticCache
from gptlite.compress.importance import choose_heads
from gptlite.compress.masks import mask_pattern, mask_smallest
from gptlite.compress.minitron import target_shape
from gptlite.compress.structured import Kept, describe, prune
from gptlite.config import preset
from gptlite.generate import decode_step, prefill
from gptlite.layers import linear_layers
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.record import Point, Recording, Step, filled_cache, random_model, sweep

CUTS = ("whole", "half the heads and neurons", "half the blocks", "half the channels", "zeros, scattered", "zeros, 2:4")


@sweep(
    "prune-times",
    "seconds of a decode step and of a prefill, by what was pruned: half of the heads, blocks or channels, or zeros",
    preset="gpt2",
    cuts=list(CUTS),
    batch=1,
    context=256,
    prompt=128,
    repeats=5,
    warmup=2,
)
def _prune_times(recording: Recording) -> Iterator[Step]:
    params = recording.params
    device, dtype = params["device"], getattr(torch, params["dtype"])
    n_steps = params["warmup"] + params["repeats"]
    if params["context"] <= n_steps:
        raise ValueError(f"context is {params['context']}, it must be above warmup + repeats, {n_steps}")
    for cut in params["cuts"]:
        if cut not in CUTS:
            raise ValueError(f"cut is {cut!r}, it must be one of {', '.join(CUTS)}")
    config = preset(params["preset"], context_length=max(params["context"], params["prompt"]))
    made: dict[str, GPTlite] = {}  # the model in use, and no other

    def measure(cut: str, phase: str) -> Point:
        if cut not in made:
            made.clear()
            made[cut] = cut_model(random_model(config, device, dtype), cut)
        model = made[cut]
        shape = ModelShape.of(describe(model))
        widths = {"bytes_per_weight": dtype.itemsize, "bytes_per_value": dtype.itemsize}
        if phase == "decode":
            cache = filled_cache(model, params["batch"], params["context"] - n_steps, params["context"])
            tokens = torch.zeros(params["batch"], dtype=torch.int64, device=device)
            timing = time_call(lambda: decode_step(model, tokens, cache), device, params["warmup"], params["repeats"])
            cost = total(decode_costs(shape, params["batch"], params["context"], **widths))
        else:
            prompt = torch.zeros(params["batch"], params["prompt"], dtype=torch.int64, device=device)

            def read() -> None:
                prefill(model, prompt, StaticCache(model, params["batch"], params["prompt"]))

            timing = time_call(read, device, params["warmup"], params["repeats"])
            cost = total(prefill_costs(shape, params["batch"], params["prompt"], **widths))
        return Point.of({"cut": cut, "phase": phase, "n_params": model.n_params}, timing, cost)

    shape = ModelShape.of(config)
    needed = 2 * n_params(shape) + params["batch"] * kv_bytes(shape, max(params["context"], params["prompt"]), 1)
    for cut in params["cuts"]:
        for phase in ("decode", "prefill"):
            yield {"cut": cut, "phase": phase}, needed * dtype.itemsize, partial(measure, cut, phase)


def cut_model(model: GPTlite, cut: str) -> GPTlite:
    """The model with half of something, for its time alone: what goes is the second half, or what a mask hits.

    Args:
        cut: one of CUTS. Zeros leave all shapes as they are, and change the model in place.
    """
    config = model.config
    if cut == "whole":
        return model
    if cut.startswith("zeros"):
        for layer in linear_layers(model).values():
            weight: Tensor = layer.weight  # type: ignore[assignment]
            scores = weight.detach().abs()
            weight.data *= mask_pattern(scores) if cut.endswith("2:4") else mask_smallest(scores, 0.5, per_row=True)
        return model
    if cut == "half the blocks":
        return prune(model, Kept(blocks=torch.arange((config.n_layers + 1) // 2)))
    if cut == "half the channels":
        return prune(model, Kept(channels=torch.arange((config.d_model + 1) // 2)))
    heads, neurons = target_shape(config, 0.5)
    ones = torch.ones(config.n_heads)
    kept = [choose_heads(ones, config.n_kv_heads, heads)] * config.n_layers
    return prune(model, Kept(heads=kept, neurons=[torch.arange(neurons)] * config.n_layers))
