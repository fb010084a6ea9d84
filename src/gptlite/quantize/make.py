"""One quantisation of a trained model from start to end: calibration or training, the stored file, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import checkpoint_path, load, read_card
from gptlite.data import Corpus
from gptlite.layers import linear_layers
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.quantize.awq import awq_model
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.gptq import gptq_model
from gptlite.quantize.qat import train_rounded
from gptlite.quantize.rtn import Grid, round_to_nearest
from gptlite.quantize.stored import check_shape, load_quantized, save_quantized, weight_bytes
from gptlite.train import TrainSettings

METHODS = ("rtn", "gptq", "awq", "qat")
N_CALIBRATION = 32  # windows of the training text


def calibration_windows(tokens: Tensor, context: int, n: int = N_CALIBRATION) -> list[Tensor]:
    """Windows spread evenly over a text [n_tokens]: one batch [n, context], or fewer where the text is short.

    Raises: ValueError when the text is shorter than a window.
    """
    if len(tokens) < context:
        raise ValueError(f"the text has {len(tokens)} tokens, a window of calibration needs {context}")
    starts = torch.linspace(0, len(tokens) - context, max(1, min(n, len(tokens) // context))).long()  # [n]
    return [tokens[starts[:, None] + torch.arange(context)]]


def check_uncoded(model: GPTlite) -> None:
    """Raises: ValueError when a layer of the model holds codes already."""
    coded = [name for name, layer in linear_layers(model, head=True).items() if isinstance(layer, CodedLinear)]
    if coded:
        raise ValueError(f"layer {coded[0]} holds codes already: quantise the model that these were made of")


def quantize_model(model: GPTlite, method: str, grid: Grid, batches: list[Tensor]) -> list[dict[str, Any]]:
    """Stores the linear layers of the blocks in codes, in place, without training.

    Args:
        method: "rtn", "gptq" or "awq". batches: tokens [B, S] of the calibration text; "rtn" does not look at them.
    Returns: the report of the method, empty for "rtn".
    Raises: ValueError on another method, or a model whose layers hold codes already.
    """
    if method not in METHODS or method == "qat":
        raise ValueError(f"method is {method!r}, without training it must be rtn, gptq or awq")
    check_uncoded(model)
    if method == "rtn":
        round_to_nearest(model, grid)
        return []
    return gptq_model(model, batches, grid) if method == "gptq" else awq_model(model, batches, grid)


def make_quantized(
    base: str | Path,
    method: str,
    grid: Grid,
    corpus: Corpus,
    out: str | Path,
    settings: TrainSettings | None = None,
    distill: bool = True,
    command: str = "",
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Quantises a checkpoint and writes the codes, with a card that says how many bytes and what loss it has.

    Args:
        base: a shipped checkpoint's name, or a file.
        method: one of METHODS.
        out: ends in .safetensors.
        settings: of the training; for "qat" alone, and needed there.
        distill: with "qat": learn the distribution of the base (KL divergence per token) instead of the text.
        command: the command line, for the card.
        precision: of the loss: "fp32", or "bf16" for products in bf16, which moves it by about 1e-4 here.
    Returns: the card; its losses are in nats per token over all held-out text, of the model as it is stored.
    Raises: ValueError on an unknown method, training settings where there is no training, a base that cannot be read,
        that was trained on another corpus, holds codes already, or has another shape than its config (a latent
        attention).
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, it must be one of {', '.join(METHODS)}")
    if (method == "qat") != (settings is not None):
        raise ValueError(f"method {method} is given {'no ' if settings is None else ''}steps of training")
    card = read_card(base)
    if card.get("corpus", {}).get("sha256") != corpus.sha256:
        raise ValueError(f"{base} was trained on another text than {corpus.name}: its card has another sha256")
    model, tokenizer = load(base, device)
    check_shape(model)  # a file could not be read back into another one
    check_uncoded(model)
    text = tokenizer.encode(corpus.train)
    curve: list[list[float]] = []
    if settings is None:
        quantize_model(model, method, grid, [b.to(device) for b in calibration_windows(text, model.context_length)])
    else:
        teacher = load(base, device)[0] if distill else None
        curve = train_rounded(model, text, settings, grid, teacher, None, on_step)
    save_quantized(out, model, tokenizer)
    stored, _ = load_quantized(out, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
        loss = validation_loss(stored, tokenizer.encode(corpus.held_out))
    n_bytes, n_weights = weight_bytes(stored)
    seen = settings.steps * settings.batch_size * model.context_length if settings else 0
    result = {
        "command": command,
        "base": str(base) if checkpoint_path(base) != Path(base) else Path(base).name,
        "method": method,
        "grid": asdict(grid),
        "weights_in_codes": n_weights,
        "bytes_of_them": n_bytes,
        "corpus": card["corpus"],
        "held_out_chars": len(corpus.held_out),
        "settings": asdict(settings) if settings else None,
        "teacher": distill and settings is not None,
        "tokens_seen": seen,
        "calibration_tokens": N_CALIBRATION * model.context_length if method in ("gptq", "awq") else 0,
        "device": str(torch.device(device).type),
        "torch": torch.__version__,
        "base_loss": card["validation_loss"],
        "loss_precision": precision,
        "validation_loss": round(loss, 4),
        "validation_loss_unit": "nats per character",
        "loss_curve": curve,
        "loss_curve_columns": ["tokens seen", "mean training loss since the row before, nats per character"],
    }
    save_quantized(out, model, tokenizer, result)
    return result
