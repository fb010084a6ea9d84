"""What fewer bits for keys and values cost and save: the loss by recipe and context, and the time of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor

import gptlite
from gptlite.arithmetic import decode_costs, kv_bytes, total
from gptlite.cache.contract import Cache
from gptlite.cache.quantized import QuantizedCache
from gptlite.cache.quantized_text import QuantizedText
from gptlite.config import preset
from gptlite.data import load_corpus
from gptlite.generate import decode_step
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.quantize.kv import RECIPES, KVFormat, Recipe, Rule, recipe
from gptlite.record import Point, Recording, Step, SweepModel, filled_cache, sweep

AXES = ("channel", "token")


def axes_recipe(bits: int, keys: str, values: str, residual: int, group: int = 32) -> Recipe:
    """KIVI's recipe with another choice of who shares a scale.

    Args:
        bits: 2 or 4. keys, values: "channel" or "token". residual, group: as in `gptlite.quantize.kv.recipe`.
    Raises: ValueError when a value is out of range.
    """
    if not {keys, values} <= set(AXES):
        raise ValueError(f"axes are {keys!r} and {values!r}, they must be of {', '.join(AXES)}")
    by_channel, by_token = Rule(0, residual), Rule(residual, 1)
    return Recipe(
        KVFormat("even", bits, keys, group),  # type: ignore[arg-type]
        KVFormat("even", bits, values, group),  # type: ignore[arg-type]
        by_channel,
        by_channel if values == "channel" else by_token,
    )


def read_case(text: str) -> Recipe:
    """The recipe of a text such as "int8", "kivi2 32" (with its residual) or "2 token channel 32" (bits, who shares a
    scale among keys and among values, residual).

    Raises: ValueError when it is no such text.
    """
    words = text.split()
    if len(words) == 4 and words[0].isdigit() and words[3].isdigit():
        return axes_recipe(int(words[0]), words[1], words[2], int(words[3]))
    if not words or len(words) > 2 or not "".join(words[1:] or ["1"]).isdigit():
        raise ValueError(f"case is {text!r}, it must be like 'int8', 'kivi2 32' or '2 token channel 32'")
    return recipe(words[0], int(words[1])) if len(words) == 2 else recipe(words[0])


@torch.inference_mode()
def losses(model: GPTlite, windows: Tensor, cache: Cache | None = None, batch: int = 8) -> Tensor:
    """The loss at every position of some windows of text.

    Args:
        windows: [W, n + 1] tokens. cache: a `QuantizedText`, or None for the model as it is. batch: windows at once.
    Returns: [W, n], nats per token.
    """
    found = []
    for part in windows.split(batch):
        logits = model(part[:, :-1], cache=cache).float()  # [B, n, V]
        found.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(found)


def spread_windows(tokens: Tensor, n_windows: int, context: int) -> Tensor:
    """Windows [W, context + 1] at even distances over a text [n]. Raises: ValueError when it is too short for them."""
    if n_windows < 2 or len(tokens) < n_windows * (context + 1):
        raise ValueError(f"{n_windows} windows of {context} tokens: there must be at least 2, and a text to hold them")
    starts = torch.linspace(0, len(tokens) - context - 1, n_windows).long()
    return torch.stack([tokens[i : i + context + 1] for i in starts.tolist()])


@sweep(
    "kv-rounding",
    "what quantised keys and values add to the trained model's loss, by recipe and by place in the context",
    model="gptlite",
    cases=["int8", "fp8", "kivi4 32", "kivi2 32", "kivi2 64", "kivi2 128"]
    + [f"{bits} {keys} {values} 32" for bits in (4, 2) for keys, values in (("token", "token"), ("token", "channel"))]
    + ["4 channel channel 32", "2 channel channel 32"],
    windows=48,
    parts=4,
)
def _loss(recording: Recording) -> Iterator[Step]:
    params = recording.params
    cases = {case: read_case(case) for case in params["cases"]}
    rows = recording.data.setdefault("losses", [])
    known: dict[str, Tensor] = {}
    made: list[tuple[GPTlite, Tensor]] = []

    def measure(case: str) -> Point:
        begin = time.perf_counter()
        if not made:
            model, tokenizer = gptlite.load(params["model"], params["device"])
            text = tokenizer.encode(load_corpus().held_out).to(params["device"])
            made.append((model, spread_windows(text, params["windows"], model.context_length)))
        model, windows = made[0]
        if "plain" not in known:
            known["plain"] = losses(model, windows)
            recording.data["plain"] = round(known["plain"].mean().item(), 4)
        added = losses(model, windows, QuantizedText(cases[case])) - known["plain"]  # [W, n]
        rows.append({"case": case, **summary(added, params["parts"])})
        return Point({"case": case}, [time.perf_counter() - begin])

    for case in cases:
        yield {"case": case}, 1e9, partial(measure, case)


def summary(added: Tensor, parts: int) -> dict[str, object]:
    """What was added to a loss, in nats per token.

    Args:
        added: [W, n], by window and position. parts: equal parts of the context.
    Returns: "mean"; "error", the standard error of that mean over the windows; "by_part", means of each part [parts].
    """
    by_window = added.double().mean(1).tolist()
    by_part = added.double().unflatten(1, (parts, -1)).mean((0, 2)).tolist()
    return {
        "mean": round(mean(by_window), 5),
        "error": round(stdev(by_window) / len(by_window) ** 0.5, 5),
        "by_part": [round(part, 5) for part in by_part],
    }


# -- the time of a decode step ------------------------------------------------------------------------------------


@sweep(
    "kv-quant",
    "seconds per decode step and bytes of the cache, by recipe and context",
    preset="gpt2",
    recipes=list(RECIPES),
    contexts=[128, 512, 1024],
    residual=64,
    batch=1,
    repeats=5,
    warmup=2,
)
def _kv_quant(recording: Recording) -> Iterator[Step]:
    params = recording.params
    n_steps, batch = params["warmup"] + params["repeats"], params["batch"]
    if min(params["contexts"]) <= n_steps:
        raise ValueError(f"contexts has {min(params['contexts'])}, it must be above warmup + repeats, {n_steps}")
    rules = {name: recipe(name, params["residual"]) for name in params["recipes"]}
    models = SweepModel(recording, preset(params["preset"], context_length=max(params["contexts"])))

    def measure(name: str, context: int) -> Point:
        model, width = models.get(), models.width
        # the steps end at the context: the last sample attends to exactly that many tokens
        cache = quantized(model, rules[name], batch, context - n_steps)
        tokens = torch.zeros(batch, dtype=torch.int64, device=models.device)
        step: Callable[[], object] = partial(decode_step, model, tokens, cache)
        timing = time_call(step, models.device, params["warmup"], params["repeats"])
        per_value = cache.nbytes / (batch * kv_bytes(models.shape, context, 1))
        cost = total(decode_costs(models.shape, batch, context, bytes_per_weight=width, bytes_per_value=per_value))
        at = {"recipe": name, "context": context, "batch": batch, "cache_bytes": cache.nbytes}
        return Point.of(at, timing, cost)

    for context in params["contexts"]:
        for name in params["recipes"]:
            at = {"recipe": name, "context": context, "batch": batch}
            yield at, 2 * models.needed(batch, context, 1), partial(measure, name, context)


def quantized(model: GPTlite, rules: Recipe, batch: int, n_tokens: int) -> QuantizedCache:
    """A quantised cache that holds n_tokens made-up tokens of each of a batch's sequences."""
    cache, filled = QuantizedCache(model, rules), filled_cache(model, batch, n_tokens, n_tokens)
    for sequence in range(batch):
        cache.load(sequence, filled.export(sequence))
        filled.free(sequence)
    return cache
