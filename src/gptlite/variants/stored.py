"""Converted models on disk: the tensors that differ from the model they came from, and the kind of attention."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gptlite.checkpoint import SHIPPED, checkpoint_path, load_checkpoint, write_atomically
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite, MultiHeadAttention
from gptlite.variants.mla import LatentAttention
from gptlite.variants.swap import shape_of, swap_attention

FORMAT = "gptlite-variant-1"


def save_variant(path: str | Path, model: GPTlite, base: str | Path, card: dict[str, Any] | None = None) -> None:
    """Writes what a converted model does not share with its base, in fp16, and the card; each is whole or not there.

    Args:
        path: ends in .safetensors.
        model: with grouped or latent attention, of the same size in every block.
        base: the checkpoint that it was converted from: a shipped one's name, or a file that will lie beside `path`.
        card: how it was made.
    Raises: ValueError when the path does not end in .safetensors, or the blocks differ in kind or size.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors")
    kinds = {attention_of(block.mha) for block in model.blocks}
    if len(kinds) != 1:
        raise ValueError(f"the blocks have different attentions, {', '.join(map(str, sorted(kinds)))}")
    kind, size = kinds.pop()
    whole, _ = load_checkpoint(checkpoint_path(base))
    known = {name: tensor.half() for name, tensor in whole.state_dict().items()}
    changed = {}
    for name, tensor in model.state_dict().items():
        stored = tensor.detach().to("cpu", torch.float16).contiguous()
        if name not in known or known[name].shape != stored.shape or not torch.equal(known[name], stored):
            changed[name] = stored
    header = {
        "format": FORMAT,
        "base": str(base) if str(base) in SHIPPED else Path(base).name,
        "base_sha256": hashlib.sha256(checkpoint_path(base).read_bytes()).hexdigest(),
        "attention": json.dumps({"kind": kind, "size": size}),
    }
    write_atomically(path, save(changed, metadata=header))
    if card is not None:
        write_atomically(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())


def attention_of(mha: MultiHeadAttention) -> tuple[str, int]:
    """Kind and size of an attention: ("latent", r) or ("grouped", G)."""
    if isinstance(mha, LatentAttention):
        return "latent", mha.kv_shape[1]
    return "grouped", mha.kv_shape[0]


def load_variant(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPTlite, CharTokenizer]:
    """Reads a converted model, on top of its base; neither file is trusted, as in `checkpoint.load_checkpoint`.

    Returns: the model in eval mode, and its tokenizer.
    Raises: ValueError when a file is missing or damaged, or the base is not the one that was converted.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"its header does not say {FORMAT}")
            model, tokenizer = load_checkpoint(_base(path, header), device, dtype)
            model = _with_attention(model, json.loads(header["attention"]), os.path.getsize(path))
            weights, names = dict(model.state_dict()), set(file.keys())
            if odd := sorted(names - set(weights)):
                raise ValueError(f"weight {odd[0]} is unknown")
            if odd := sorted(name for name, like in weights.items() if like.is_meta and name not in names):
                raise ValueError(f"weight {odd[0]} is missing")
            for name in names:
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(weights[name].shape):
                    raise ValueError(f"weight {name} has shape {shape}, it must be {tuple(weights[name].shape)}")
                weights[name] = file.get_tensor(name).to(device, dtype, copy=True)
                if not weights[name].isfinite().all():
                    raise ValueError(f"weight {name} holds values that are not finite")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no converted model of gptlite, or is damaged: {error}") from None
    model.load_state_dict(weights, assign=True)
    return model.eval(), tokenizer


def _base(path: Path, header: dict[str, str]) -> Path:
    """Where the base lies. Raises: ValueError when it is not there or not the one that was converted."""
    name = header["base"]
    found = checkpoint_path(name) if name in SHIPPED else path.parent / Path(name).name  # never outside the folder
    if not found.is_file():
        raise ValueError(f"its base {name} is not there")
    if hashlib.sha256(found.read_bytes()).hexdigest() != header["base_sha256"]:
        raise ValueError(f"its base {name} is not the one that it was converted from")
    return found


def _with_attention(model: GPTlite, attention: dict[str, Any], n_bytes: int) -> GPTlite:
    """The base with attentions of this kind and size, whose weights are still without memory where they differ.

    Raises: ValueError when there is no such kind, or the size is not one that the file can hold.
    """
    kind, size = attention["kind"], attention["size"]
    if kind not in ("grouped", "latent") or type(size) is not int or not 1 <= size <= n_bytes:
        raise ValueError(f"its attention is {str(attention)[:80]}")

    def make(mha: MultiHeadAttention) -> MultiHeadAttention:
        config: GPTConfig = shape_of(mha)
        with torch.device("meta"):
            if kind == "latent":
                new: MultiHeadAttention = LatentAttention(config, size)
            else:
                new = MultiHeadAttention(replace(config, n_kv_heads=size))
        for name in ("query_proj", "out_proj"):
            setattr(new, name, getattr(mha, name))
        if kind == "grouped" and size == config.n_kv_heads:
            new.key_proj, new.value_proj = mha.key_proj, mha.value_proj
        return new

    model = swap_attention(model, make)
    if kind == "grouped":
        model.config = replace(model.config, n_kv_heads=size)
    return model
