"""Heads on disk: their weights in fp16 with the trunk that they belong to, and the run that makes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gptlite.checkpoint import SHIPPED, checkpoint_path, load_checkpoint, read_card, write_atomically
from gptlite.data import Corpus
from gptlite.model import GPTlite
from gptlite.speculative.eagle import EagleHeads
from gptlite.speculative.heads import Heads
from gptlite.speculative.heads_train import agreement, train_heads
from gptlite.speculative.medusa import MedusaHeads
from gptlite.speculative.mtp import MTPHeads
from gptlite.speculative.self_draft import ExitHeads
from gptlite.train import TrainSettings

FORMAT = "gptlite-heads-1"
KINDS: dict[str, Callable[..., Heads]] = {kind.kind: kind for kind in (MedusaHeads, EagleHeads, MTPHeads, ExitHeads)}
N_WINDOWS = 200  # of the held-out text, on which the agreement is measured
SHIPPED_HEADS = ("gptlite-medusa", "gptlite-eagle", "gptlite-mtp", "gptlite-exit")


def heads_path(name: str | Path) -> Path:
    """Where the heads of that name lie: shipped ones, else the path itself."""
    if str(name) in SHIPPED_HEADS:
        return checkpoint_path("gptlite").with_name(f"{name}.safetensors")
    return Path(name)


def save_heads(path: str | Path, heads: Heads, base: str | Path, card: dict[str, Any] | None = None) -> None:
    """Writes heads in fp16, and the card as a JSON file of the same name; each is whole or not there.

    Args:
        path: ends in .safetensors.
        base: the trunk's checkpoint: a shipped one's name, or a file that will lie beside `path`.
        card: how they were made.
    Raises: ValueError when the path does not end in .safetensors, or there is no such base.
    """
    path, source = Path(path), checkpoint_path(base)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors")
    if not source.is_file():
        raise ValueError(f"there is no checkpoint {base}")
    header = {
        "format": FORMAT,
        "kind": heads.kind,
        "sizes": json.dumps(heads.sizes, sort_keys=True),
        "base": str(base) if str(base) in SHIPPED else source.name,
        "base_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
    }
    weights = {name: t.detach().to("cpu", torch.float16).contiguous() for name, t in heads.state_dict().items()}
    write_atomically(path, save(weights, metadata=header))
    if card is not None:
        write_atomically(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())


def load_heads(name: str | Path, model: GPTlite, base: str | Path = "gptlite") -> Heads:
    """Reads heads for a trunk; the file is not trusted, as in `checkpoint.load_checkpoint`.

    Args:
        name: one of SHIPPED_HEADS, or the path of a .safetensors file.
        model: the trunk; the heads come on its device and in its dtype.
        base: the checkpoint that the trunk was loaded from.
    Returns: the heads in eval mode.
    Raises: ValueError when the file is missing, damaged, no heads, or made for another trunk.
    """
    path = heads_path(name)
    if not path.is_file():
        raise ValueError(f"there are no heads {path.name}")
    weight = model.token_embedding.weight
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            heads = _described(header, model, os.path.getsize(path))
            found = hashlib.sha256(checkpoint_path(base).read_bytes()).hexdigest()
            if found != header["base_sha256"]:
                raise ValueError(f"they were trained on {header['base']}, which is not this {base}")
            expected = heads.state_dict()
            if odd := sorted(set(file.keys()) ^ set(expected)):
                raise ValueError(f"weight {odd[0]} is missing or unknown")
            weights = {}
            for key, like in expected.items():
                shape = tuple(file.get_slice(key).get_shape())
                if shape != tuple(like.shape):
                    raise ValueError(f"weight {key} has shape {shape}, for this trunk it must be {tuple(like.shape)}")
                weights[key] = file.get_tensor(key).to(weight.device, weight.dtype, copy=True)
                if not weights[key].isfinite().all():
                    raise ValueError(f"weight {key} holds values that are not finite")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name} holds no heads for this trunk, or is damaged: {error}") from None
    heads.load_state_dict(weights, assign=True)
    return heads.eval()


def _described(header: dict[str, str], model: GPTlite, n_bytes: int) -> Heads:
    """The heads that a header describes, without memory for their weights.

    Raises: ValueError, TypeError or KeyError when the header makes no sense, or describes more than the file can hold.
    """
    if header.get("format") != FORMAT:
        raise ValueError(f"the header does not say {FORMAT}")
    if header["kind"] not in KINDS:
        raise ValueError(f"their kind is {header['kind'][:40]!r}, it must be one of {', '.join(KINDS)}")
    sizes = json.loads(header["sizes"])
    d = model.fc_out.in_features
    for name, size in sizes.items():
        many = size if isinstance(size, list) else [size]
        # every head holds at least a d x d matrix, in two bytes a number
        least = len(many) if isinstance(size, list) else size
        if not all(type(n) is int and n >= 1 for n in many) or least * d * d * 2 > n_bytes:
            raise ValueError(f"the header's {name[:40]} is {str(size)[:40]}, the file cannot hold that")
    with torch.device("meta"):
        return KINDS[header["kind"]](model, **sizes)


def make_heads(
    base: str | Path,
    kind: str,
    sizes: dict[str, Any],
    corpus: Corpus,
    out: str | Path,
    settings: TrainSettings,
    command: str = "",
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Trains heads on a checkpoint that stays as it is, and writes them with a card.

    Args:
        base: the trunk: a shipped one's name, or a file in the folder of `out`.
        kind, sizes: which heads, and what their constructor takes beside the trunk.
        out: ends in .safetensors.
        command: the command line, for the card.
        on_step: see `train_heads`.
    Returns: the card. Its agreement is measured on the held-out text, with the weights as stored, in fp16.
    Raises: ValueError when the base cannot be read, was trained on another corpus, or a size is of no use.
    """
    source = checkpoint_path(base)
    trained = read_card(base)
    if trained.get("corpus", {}).get("sha256") != corpus.sha256:
        raise ValueError(f"{base} was trained on another text than {corpus.name}: its card has another sha256")
    model, tokenizer = load_checkpoint(source, device)
    torch.manual_seed(settings.seed)
    heads = KINDS[kind](model, **sizes).to(device)
    curve = train_heads(model, heads, tokenizer.encode(corpus.train), settings, on_step=on_step)
    save_heads(out, heads, base)
    stored = load_heads(out, model, base)
    held_out = tokenizer.encode(corpus.held_out)[: N_WINDOWS * model.context_length + 1]
    card = {
        "command": command,
        "base": str(base) if str(base) in SHIPPED else source.name,
        "kind": kind,
        "sizes": heads.sizes,
        "n_params": heads.n_params,
        "corpus": trained["corpus"],
        "held_out_chars": len(held_out) - 1,
        "settings": asdict(settings),
        "tokens_seen": settings.steps * settings.batch_size * model.context_length,
        "device": str(torch.device(device).type),
        "torch": torch.__version__,
        "agreement": agreement(model, stored, held_out),
        "agreement_of": "held-out text; top: same most probable token; overlap: sum of min(p, q) at temperature 1",
        "loss_curve": curve,
        "loss_curve_columns": ["tokens seen", "mean loss of the heads since the row before, nats per character"],
    }
    save_heads(out, heads, base, card)
    return card
