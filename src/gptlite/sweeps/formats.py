"""Number formats: error, bits and time of coding a tensor, and the loss of a model that is rounded to them."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.checkpoint import load
from gptlite.data import load_corpus
from gptlite.layers import replace_linear
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.quantize.rounded import KINDS, RoundedLinear, example_tensors, signal_to_noise, to_codes
from gptlite.record import Point, Recording, Step, sweep

TENSORS = ("normal", "heavy-tailed", "weights", "activations")


def tensor_of(name: str, n_values: int, device: str) -> Tensor:
    """One of TENSORS as [n, 256], its rows again and again until there are n_values of them, in fp32.

    Raises: ValueError as `check_tensor` does.
    """
    check_tensor(name, n_values)
    model, tokenizer = load("gptlite")
    tokens = tokenizer.encode(load_corpus().held_out[:1024]).view(-1, model.context_length)
    rows = example_tensors(model, tokens)[name]
    needed = n_values // 256
    return rows.repeat(-(-needed // len(rows)), 1)[:needed].to(device)


def check_tensor(name: str, n_values: int) -> None:
    """Raises: ValueError when there is no such tensor, or n_values are less than a row."""
    if name not in TENSORS:
        raise ValueError(f"tensor is {name!r}, it must be one of {', '.join(TENSORS)}")
    if n_values < 256:
        raise ValueError(f"n_values is {n_values}, a row has 256")


def check_formats(names: list[str]) -> None:
    """Raises: ValueError when one of the names is no format."""
    if unknown := [kind for kind in names if kind not in KINDS]:
        raise ValueError(f"formats has {unknown[0]!r}, there are {', '.join(KINDS)}")


@sweep(
    "formats",
    "seconds to encode and to decode a tensor in each number format, with its error and its bits",
    formats=[kind for kind in KINDS if kind != "fp32"],
    tensor="weights",
    group="own",
    n_values=262_144,
    repeats=3,
    warmup=1,
)
def _formats(recording: Recording) -> Iterator[Step]:
    params = recording.params
    device, group = params["device"], params["group"]
    check_formats(params["formats"])
    check_tensor(params["tensor"], params["n_values"])
    if group != "own" and not (group.isdigit() and int(group) >= 1):
        raise ValueError(f"group is {group!r}, it must be own or a number of values")
    size = None if group == "own" else int(group)
    rows = recording.data.setdefault("formats", {})
    known: list[Tensor] = []

    def measure(kind: str, what: str) -> Point:
        if not known:
            known.append(tensor_of(params["tensor"], params["n_values"], device))
        x = known[0]
        coded = to_codes(x, kind, size)
        ratio = signal_to_noise(x, coded.dequantize())
        rows[kind] = {"snr": ratio if math.isfinite(ratio) else None, "bits": coded.bits_per_value()}  # None: exact
        call = partial(to_codes, x, kind, size) if what == "encode" else coded.dequantize
        timing = time_call(call, device, params["warmup"], params["repeats"])
        return Point({"format": kind, "what": what}, timing.wall, bytes=x.numel() * (4 + coded.bits_per_value() / 8))

    for kind in params["formats"]:
        for what in ("encode", "decode"):
            # values, and about eight integers of four bytes for each while they are encoded
            yield {"format": kind, "what": what}, 40.0 * params["n_values"], partial(measure, kind, what)


def character_losses(model: GPTlite, tokens: Tensor, batch_size: int = 8) -> Tensor:
    """The loss of each character after the first [n - 1] in nats, in fp64, in consecutive windows of the context.

    Args:
        tokens: [n]; n - 1 must be a multiple of the context. batch_size: windows that are read at once.
    Raises: ValueError as `check_length` does.
    """
    context = model.context_length
    check_length(len(tokens), context)
    inputs, targets = tokens[:-1].view(-1, context), tokens[1:].view(-1, context)
    with torch.inference_mode():
        parts = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").double()
            for x, y in zip(inputs.split(batch_size), targets.split(batch_size))
        ]
    return torch.cat(parts)


def check_length(n_chars: int, context: int) -> None:
    """Raises: ValueError when a text is not one character longer than some whole windows."""
    if n_chars < 2 or (n_chars - 1) % context:
        raise ValueError(f"n_chars is {n_chars}, it must be one more than a multiple of {context}")


@sweep(
    "format-losses",
    "loss of the trained model with its weights, or weights and activations, rounded to each format, on a short text",
    formats=list(KINDS),
    model="gptlite",
    n_chars=4097,
)
def _losses(recording: Recording) -> Iterator[Step]:
    params = recording.params
    check_formats(params["formats"])
    rows = recording.data.setdefault("losses", [])
    model, tokenizer = load(params["model"])
    check_length(params["n_chars"], model.context_length)
    model = model.to(params["device"]).eval()
    tokens = tokenizer.encode(load_corpus().held_out[: params["n_chars"]]).to(params["device"])
    known: list[Tensor] = []

    def measure(kind: str, what: str) -> Point:
        if not known:
            known.append(character_losses(model, tokens))
            recording.data["loss"] = float(known[0].mean())
        inputs = kind if what == "weights and activations" else None
        rounded = replace_linear(copy.deepcopy(model), lambda name, layer: RoundedLinear(layer, kind, inputs))
        begin = time.perf_counter()
        change = character_losses(rounded, tokens) - known[0]
        seconds = time.perf_counter() - begin
        row = {"format": kind, "what": what, "bits": rounded.blocks[0].ffwd.net[0].bits_per_weight}
        # of the mean of a change, character by character: the text is the same on both sides
        error = float(change.std() / len(change) ** 0.5)
        rows.append({**row, "change": float(change.mean()), "standard_error": error})
        return Point({"format": kind, "what": what}, [seconds])

    for kind in params["formats"]:
        for what in ("weights", "weights and activations"):
            yield {"format": kind, "what": what}, 1e9, partial(measure, kind, what)
