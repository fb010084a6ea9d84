"""What fewer bits cost and save: losses by method, bits and group, with and without training, and times by format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from gptlite.arithmetic import Cost, ModelShape, decode_costs, kv_bytes_per_token, n_params, prefill_costs, total
from gptlite.cache.dense import StaticCache
from gptlite.cache.quantized_text import QuantizedText
from gptlite.checkpoint import load
from gptlite.config import preset
from gptlite.data import load_corpus
from gptlite.generate import decode_step, prefill
from gptlite.layers import linear_layers, replace_linear
from gptlite.measure import time_call
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.int8 import Int8Linear, row_codes
from gptlite.quantize.kernels import KernelLinear, reason_against
from gptlite.quantize.kv import recipe
from gptlite.quantize.make import calibration_windows, make_quantized, quantize_model
from gptlite.quantize.rtn import Grid
from gptlite.quantize.stored import model_bytes, weight_bytes
from gptlite.record import Point, Recording, Step, filled_cache, random_model, sweep
from gptlite.train import TrainSettings

FORMATS = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "int8 weights": "INT8 weights, kernel",
    "int8 both": "INT8 weights and inputs",
    "int4": "INT4 weights, kernel",
    "int4 plain": "INT4 weights, made again",
    "int3 plain": "3 bits, made again",
    "int2 plain": "2 bits, made again",
}


def read_grid(text: str, bits: int) -> Grid:
    """The grid of a text such as "128", "rows" or "128 clip". Raises: ValueError when it is none."""
    words = text.split()
    if not words or not (words[0] == "rows" or words[0].isdigit()) or words[1:] not in ([], ["clip"]):
        raise ValueError(f"grid is {text!r}, it must be like '128', 'rows' or '128 clip'")
    return Grid(bits, None if words[0] == "rows" else int(words[0]), clip=len(words) == 2)


# -- losses -------------------------------------------------------------------------------------------------------


@sweep(
    "quantized-losses",
    "validation loss of a part of the held-out text by method, bits and grid; minutes",
    model="gptlite",
    methods=["rtn", "gptq", "awq"],
    bits=[8, 4, 3, 2],
    grids=["128", "128 clip", "32", "rows"],
    windows=64,
)
def _losses(recording: Recording) -> Iterator[Step]:
    params = recording.params
    grids = [(text, [read_grid(text, bits) for bits in params["bits"]]) for text in params["grids"]]
    rows = recording.data.setdefault("rows", [])
    text: list[Tensor] = []
    reference: list[Tensor] = []  # of the model in full precision

    def part(model_name: str) -> tuple[GPTlite, Tensor, list[Tensor]]:
        model, tokenizer = load(model_name, params["device"])
        if not text:
            corpus = load_corpus()
            text.extend((tokenizer.encode(corpus.held_out), tokenizer.encode(corpus.train)))
        return (
            model,
            text[0][: params["windows"] * model.context_length + 1],
            calibration_windows(text[1], model.context_length),
        )

    def run(method: str, grid: Grid, at: dict[str, object]) -> Point:
        begin = time.perf_counter()
        model, watched, batches = part(params["model"])
        report = quantize_model(model, method, grid, batches)
        n_bytes, n_weights = weight_bytes(model)
        found = log_probabilities(model, watched)
        ratios = [row["stored"] / row["nearest"] for row in report]
        rows.append(
            {
                **at,
                "bytes_per_weight": round(n_bytes / n_weights, 4),
                "model_bytes": int(model_bytes(model)),
                **compared(found, reference[0], watched[1:]),
                "largest_error_ratio": round(max(ratios), 4) if ratios else None,
                "layers": len(report),
            }
        )
        return Point(at, [time.perf_counter() - begin])

    def plain() -> Point:
        begin = time.perf_counter()
        model, watched, _ = part(params["model"])
        reference.append(log_probabilities(model, watched))
        recording.data["loss"] = compared(reference[0], reference[0], watched[1:])["loss"]
        recording.data["model_bytes"] = 2 * model.n_params
        recording.data["characters"] = len(watched) - 1
        return Point({"method": "none"}, [time.perf_counter() - begin])

    yield {"method": "none"}, 1e8, plain
    for text_of, of_bits in grids:
        for grid in of_bits:
            for method in params["methods"]:
                at = {"method": method, "bits": grid.bits, "grid": text_of}
                yield at, 1e9, partial(run, method, grid, at)


@torch.inference_mode()
def log_probabilities(model: GPTlite, tokens: Tensor, batch_size: int = 16) -> Tensor:
    """What a model gives to the characters of a text [n + 1], read in whole windows: log-probabilities [n, V]."""
    windows = tokens[:-1].view(-1, model.context_length)
    return torch.cat([model(x).log_softmax(-1).flatten(0, 1) for x in windows.split(batch_size)])


def compared(found: Tensor, reference: Tensor, targets: Tensor) -> dict[str, float]:
    """How far a model is from the one that it was made of.

    Args:
        found, reference: their log-probabilities [n, V]. targets: the characters that came [n].
    Returns: in nats per character: the loss; the standard error of what is added to the reference's; and the divergence
        KL(reference || found), which does not depend on which characters came, and so needs much less text.
    """
    lost, before = (-one.gather(1, targets[:, None])[:, 0].double() for one in (found, reference))
    divergence = (reference.exp() * (reference - found)).sum(1).double().mean()
    error = (lost - before).std() / len(targets) ** 0.5
    return {
        "loss": round(float(lost.mean()), 5),
        "standard_error": round(float(error), 5),
        "divergence": round(float(divergence), 6),
    }


@sweep(
    "quantized-training",
    "validation loss after training for few bits; minutes for each number of bits",
    model="gptlite",
    bits=[2],
    grid="128 clip",
    steps=60,
    batch=16,
    lr="0.003",
    windows=64,
    folder="",
)
def _training(recording: Recording) -> Iterator[Step]:
    params = recording.params
    folder = params["folder"]
    params["folder"] = Path(folder).name  # a recording keeps no path of a machine
    rows = recording.data.setdefault("rows", [])
    save_every = max(1, params["steps"] // 6)
    settings = TrainSettings(
        params["steps"], params["batch"], float(params["lr"]), "muon", "bf16", 10, 1.0, 0.0, 1, save_every
    )

    def run(bits: int) -> Point:
        begin = time.perf_counter()
        grid = read_grid(params["grid"], bits)
        with TemporaryDirectory() as scratch:
            out = Path(folder or scratch) / f"{params['model']}-qat{bits}.safetensors"
            words = f"--method qat --bits {bits} --group {grid.group_size or 0}" + (" --clip" if grid.clip else "")
            words += f" --steps {params['steps']} --batch-size {params['batch']} --lr {params['lr']} --precision bf16"
            command = f"gptlite quantize {words} --save-every {save_every} --out {out.name}"
            card = make_quantized(
                params["model"], "qat", grid, load_corpus(), out, settings, True, command, params["device"], "bf16"
            )
            n_bytes = out.stat().st_size
            model, tokenizer = load(out, params["device"])
            held_out = tokenizer.encode(load_corpus().held_out)
            watched = held_out[: params["windows"] * model.context_length + 1]
            base, _ = load(params["model"], params["device"])
            part = compared(log_probabilities(model, watched), log_probabilities(base, watched), watched[1:])
        keep = ("command", "bytes_of_them", "weights_in_codes", "tokens_seen", "base_loss", "loss_curve")
        losses = {"loss_of_all": card["validation_loss"], **part}
        sizes = {"file_bytes": n_bytes, "model_bytes": int(model_bytes(model))}
        rows.append({key: card[key] for key in keep} | {"bits": bits, **losses, **sizes})
        return Point({"bits": bits}, [time.perf_counter() - begin])

    for bits in params["bits"]:
        yield {"bits": bits}, 1e9, partial(run, bits)


@sweep(
    "quantized-together",
    "bytes and loss of fewer KV heads, weights in few bits and a quantised cache, alone and together",
    models=["gptlite", "gptlite-gqa2"],
    weights=["16 bits", "gptq 4", "awq 4"],
    caches=["plain", "int8"],
    windows=64,
)
def _together(recording: Recording) -> Iterator[Step]:
    params = recording.params
    rows = recording.data.setdefault("rows", [])

    def run(name: str, weights: str, cache: str, at: dict[str, str]) -> Point:
        begin = time.perf_counter()
        model, tokenizer = load(name, params["device"])
        corpus = load_corpus()
        watched = tokenizer.encode(corpus.held_out)[: params["windows"] * model.context_length + 1]
        if weights != "16 bits":
            method, bits = weights.split()
            batches = calibration_windows(tokenizer.encode(corpus.train), model.context_length)
            quantize_model(model, method, Grid(int(bits), clip=True), batches)
        rows.append(
            {
                **at,
                "model_bytes": int(model_bytes(model)),
                "cache_bytes": cache_bytes(model, cache),
                "loss": round(cached_loss(model, watched, cache), 5),
            }
        )
        return Point(dict(at), [time.perf_counter() - begin])

    for name in params["models"]:
        for weights in params["weights"]:
            for cache in params["caches"]:
                at = {"model": name, "weights": weights, "cache": cache}
                yield dict(at), 1e9, partial(run, name, weights, cache, at)


def cache_bytes(model: GPTlite, cache: str) -> int:
    """Bytes that a token adds to a cache: "plain" in 16 bits, else codes and scales of the recipe of that name."""
    if cache == "plain":
        return sum(G * (Dk + Dv) * 2 for G, Dk, Dv in (block.mha.kv_shape for block in model.blocks))
    chosen = recipe(cache)
    held = 0
    for block in model.blocks:
        G, Dk, Dv = block.mha.kv_shape
        for kind, width in ((chosen.keys, Dk), (chosen.values, Dv)):
            held += sum(part.nbytes for part in kind.encode(torch.ones(G, 64, width)))  # of 64 tokens
    return held // 64


@torch.inference_mode()
def cached_loss(model: GPTlite, tokens: Tensor, cache: str, batch_size: int = 16) -> float:
    """`validation_loss` of tokens [n] as a cache of that recipe lets the model see them, in whole windows alone.

    Returns: nats per token.
    """
    S = model.context_length
    n = (len(tokens) - 1) // S
    x, y = tokens[: n * S].view(n, S), tokens[1 : n * S + 1].view(n, S)
    lost = 0.0
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        logits = model(inputs) if cache == "plain" else model(inputs, cache=QuantizedText(recipe(cache)))
        lost += nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return lost / (n * S)


# -- times --------------------------------------------------------------------------------------------------------


def layer_in(format: str, layer: nn.Linear) -> nn.Module:
    """A linear layer in one of FORMATS, rounded to nearest. Raises: ValueError when there is no such format."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, it must be one of {', '.join(FORMATS)}")
    weight = layer.weight.detach()
    if format == "float32":
        return layer
    if format == "bfloat16":
        return layer.bfloat16()
    if format == "int8 both":
        return Int8Linear(row_codes(weight), layer.bias)
    if format == "int8 weights":
        coded = CodedLinear(Grid(8, None, symmetric=True).codes(weight), layer.bias)
    else:
        coded = CodedLinear(Grid(int(format[3])).codes(weight), layer.bias)
    if format.endswith("plain"):
        return coded
    if why := reason_against(coded):
        raise ValueError(f"format {format!r} has a kernel on the CPU alone, and not for this layer: {why}")
    return KernelLinear(coded)


def bytes_in(format: str) -> float:
    """Bytes of a weight in one of FORMATS, with the scales of groups of 128, without those of rows."""
    return {"float32": 4.0, "bfloat16": 2.0}.get(format) or int(format[3]) / 8 + (
        0 if format.startswith("int8") else (16 + int(format[3])) / 128 / 8
    )


@sweep(
    "quantized-linear",
    "seconds of one linear layer by format, width and batch",
    formats=["float32", "bfloat16", "int8 weights", "int8 both", "int4", "int4 plain"],
    widths=[1024, 2048, 4096],
    batches=[1, 16, 256],
    repeats=5,
    warmup=2,
)
def _linear(recording: Recording) -> Iterator[Step]:
    params = recording.params
    device = params["device"]
    made: dict[tuple[str, int], nn.Module] = {}  # the layer in use, and no other

    def measure(format: str, width: int, batch: int) -> Point:
        if (format, width) not in made:
            made.clear()
            torch.manual_seed(0)
            made[format, width] = layer_in(format, nn.Linear(width, width, device=device))
        layer = made[format, width]
        x = torch.randn(batch, width, device=device)
        x = x.bfloat16() if format == "bfloat16" else x
        with torch.inference_mode():
            timing = time_call(lambda: layer(x), device, params["warmup"], params["repeats"])
        cost = Cost(2 * batch * width**2, width**2 * bytes_in(format), 0, 0)
        return Point.of({"format": format, "width": width, "batch": batch}, timing, cost)

    for format in params["formats"]:
        for width in params["widths"]:
            for batch in params["batches"]:
                at = {"format": format, "width": width, "batch": batch}
                yield at, 24 * width**2 + 64 * batch * width, partial(measure, format, width, batch)


@sweep(
    "quantized-steps",
    "seconds of a decode step and of a prefill of a whole model by format of its weights",
    preset="gpt2",
    layers=12,
    formats=list(FORMATS),
    batches=[1, 16],
    context=128,
    prompt=256,
    repeats=3,
    warmup=1,
)
def _steps(recording: Recording) -> Iterator[Step]:
    params = recording.params
    config = preset(
        params["preset"], n_layers=params["layers"], context_length=max(params["context"], params["prompt"])
    )
    shape, device = ModelShape.of(config), params["device"]
    n_steps = params["warmup"] + params["repeats"]
    if params["context"] <= n_steps:
        raise ValueError(f"context is {params['context']}, it must be above warmup + repeats, {n_steps}")
    made: dict[str, GPTlite] = {}  # the model in use, and no other

    def in_format(format: str) -> GPTlite:
        if format not in made:
            made.clear()
            torch.manual_seed(0)
            dtype = torch.bfloat16 if format == "bfloat16" else torch.float32
            model = random_model(config, device, dtype)
            if format not in ("float32", "bfloat16"):
                replace_linear(model, lambda _, layer: layer_in(format, layer), head=True)
                kinds = {type(layer).__name__ for layer in linear_layers(model, head=True).values()}
                assert "Linear" not in kinds and len(kinds) == 1, kinds
            made[format] = model
        return made[format]

    def decode(format: str, batch: int) -> Point:
        model = in_format(format)
        cache = filled_cache(model, batch, params["context"] - n_steps, params["context"])
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        timing = time_call(lambda: decode_step(model, tokens, cache), device, params["warmup"], params["repeats"])
        width = 2 if format == "bfloat16" else 4
        cost = total(
            decode_costs(shape, batch, params["context"], bytes_per_weight=bytes_in(format), bytes_per_value=width)
        )
        return Point.of({"format": format, "phase": "decode", "batch": batch}, timing, cost)

    def read(format: str) -> Point:
        model = in_format(format)
        tokens = torch.zeros(1, params["prompt"], dtype=torch.int64, device=device)

        def whole() -> Tensor:
            return prefill(model, tokens, StaticCache(model, 1, params["prompt"]))

        timing = time_call(whole, device, params["warmup"], params["repeats"])
        cost = total(prefill_costs(shape, 1, params["prompt"], bytes_per_weight=bytes_in(format)))
        return Point.of({"format": format, "phase": "prefill", "batch": 1}, timing, cost)

    for format in params["formats"]:
        needed = 4 * n_params(shape) * 1.5 + kv_bytes_per_token(shape, 4) * params["context"] * max(params["batches"])
        for batch in params["batches"]:
            at = {"format": format, "phase": "decode", "batch": batch}
            yield at, needed, partial(decode, format, batch)
        yield {"format": format, "phase": "prefill", "batch": 1}, needed, partial(read, format)
