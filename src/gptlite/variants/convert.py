"""One conversion of a trained model from start to end: fewer KV heads or a latent, uptraining, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import SHIPPED, checkpoint_path, load_checkpoint, read_card
from gptlite.data import Corpus
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.train import TrainSettings
from gptlite.variants.grouped import POOLINGS, factor_groups, to_grouped
from gptlite.variants.low_rank import Moments, input_moments
from gptlite.variants.mla import to_latent
from gptlite.variants.stored import load_variant, save_variant
from gptlite.variants.uptrain import uptrain

STARTS = {"grouped": (*POOLINGS, "weights", "data"), "latent": ("weights", "data")}
N_CALIBRATION = 64  # windows of the training text from which the moments are taken


@dataclass(frozen=True)
class Conversion:
    """What the attention of a trained model becomes.

    Args:
        kind: "grouped" or "latent".
        size: G, or r.
        start: where the new weights come from: "mean", "first" or "random" pool the heads of a group; "weights" and
            "data" factorise, by the weights alone or for the inputs that they see.
    Raises: ValueError on an unknown kind or start.
    """

    kind: str
    size: int
    start: str

    def __post_init__(self) -> None:
        if self.kind not in STARTS:
            raise ValueError(f"kind is {self.kind!r}, it must be one of {', '.join(STARTS)}")
        if self.start not in STARTS[self.kind]:
            raise ValueError(
                f"start is {self.start!r}, for {self.kind} it must be one of {', '.join(STARTS[self.kind])}"
            )

    def apply(self, model: GPTlite, moments: list[Moments]) -> GPTlite:
        """A converted copy of the model; see `to_grouped` and `to_latent`.

        Args:
            moments: of each block's inputs; only the start "data" looks at them.
        Raises: ValueError when the model cannot become that.
        """
        known = moments if self.start == "data" else None
        if self.kind == "latent":
            return to_latent(model, self.size, known)
        if self.start in POOLINGS:
            return to_grouped(model, self.size, self.start)
        return factor_groups(model, self.size, known)


def calibration_moments(model: GPTlite, tokens: Tensor) -> list[Moments]:
    """Moments of each block's inputs over windows spread evenly over a text [n]."""
    n = min(N_CALIBRATION, len(tokens) // model.context_length)
    starts = torch.linspace(0, len(tokens) - model.context_length, max(n, 1)).long()  # [n]
    windows = tokens[starts[:, None] + torch.arange(model.context_length)]  # [n, S]
    return input_moments(model, windows.flatten())


def make_variant(
    base: str | Path,
    conversion: Conversion,
    corpus: Corpus,
    out: str | Path,
    settings: TrainSettings | None = None,
    distill: bool = True,
    parts: str = "all",
    command: str = "",
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    converted_loss: float | None = None,
    watch: int = 60,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Converts a checkpoint, uptrains it and writes what changed, with a card that says what was lost and won back.

    Args:
        base: the checkpoint: a shipped one's name, or a file in the folder of `out`.
        out: ends in .safetensors.
        settings: of the uptraining; None converts alone.
        distill, parts, on_step: see `uptrain`; the teacher is the base.
        command: the command line, for the card.
        precision: of the losses: "fp32", or "bf16" for products in bf16, which moves them by about 1e-4 here.
        converted_loss: that of the conversion before uptraining, when it was measured already.
        watch: windows of the held-out text that the curve follows; the losses of the card are over all of it.
    Returns: the card. Its losses are in nats per token, measured on the weights as stored, in fp16.
    Raises: ValueError when the base cannot be read or converted, does not lie beside `out`, or was trained on another
        corpus.
    """
    card = read_card(base)
    if card.get("corpus", {}).get("sha256") != corpus.sha256:
        raise ValueError(f"{base} was trained on another text than {corpus.name}: its card has another sha256")
    source, target = checkpoint_path(base).resolve(), Path(out).resolve()
    if str(base) not in SHIPPED and (source.parent != target.parent or source == target):
        raise ValueError(f"{out} only holds what differs from {base}: it must lie beside it, under another name")
    model, tokenizer = load_checkpoint(checkpoint_path(base), device)
    text, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    moments = calibration_moments(model, text) if conversion.start == "data" else []
    converted = conversion.apply(model, moments)

    def loss(measured: GPTlite) -> float:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            return validation_loss(measured, held_out)

    losses = {"original": float(card["validation_loss"])}
    losses["converted"] = loss(converted) if converted_loss is None else converted_loss
    curve: list[list[float]] = []
    if settings:
        part = held_out[: watch * model.context_length + 1]
        curve = uptrain(converted, text, settings, model if distill else None, parts, part, on_step)
    save_variant(out, converted, base)
    stored, _ = load_variant(out, device)
    losses["after"] = loss(stored) if settings else losses["converted"]
    added = losses["converted"] - losses["original"]
    seen = settings.steps * settings.batch_size * model.context_length if settings else 0
    result = {
        "command": command,
        "base": str(base) if checkpoint_path(base) != Path(base) else Path(base).name,
        "conversion": asdict(conversion),
        "n_params": converted.n_params,
        "cache_values_per_token": sum(G * (Dk + Dv) for G, Dk, Dv in (b.mha.kv_shape for b in converted.blocks)),
        "corpus": card["corpus"],
        "held_out_chars": len(corpus.held_out),
        "settings": asdict(settings) if settings else None,
        "teacher": distill and settings is not None,
        "parts": parts,
        "tokens_seen": seen,
        "calibration_tokens": N_CALIBRATION * model.context_length if moments else 0,
        "share_of_original_tokens": round(seen / card["tokens_seen"], 4),
        "device": str(torch.device(device).type),
        "torch": torch.__version__,
        "losses": {name: round(value, 4) for name, value in losses.items()},
        "loss_precision": precision,
        "validation_loss": round(losses["after"], 4),
        "validation_loss_unit": "nats per character",
        "recovered": round(1 - (losses["after"] - losses["original"]) / added, 4) if settings and added > 0 else None,
        "loss_curve": curve,
        "loss_curve_columns": ["tokens seen", "mean training loss since the row before", f"loss of {watch} windows"],
    }
    save_variant(out, converted, base, result)
    return result
