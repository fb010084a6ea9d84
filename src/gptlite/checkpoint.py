"""Checkpoints: weights as safetensors with the shape and the vocabulary in the header, and a JSON card beside them."""

from __future__ import annotations

import contextlib
import json
import os
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.model import GPTlite

FORMAT = "gptlite-1"
SHIPPED = ("gptlite", "draft")
VARIANTS = ("gptlite-gqa2", "gptlite-mla128")  # converted from gptlite, and stored as what differs from it
QUANTIZED = ("gptlite-qat2",)  # stored in codes of a few bits


def save_checkpoint(
    path: str | Path,
    model: GPTlite,
    tokenizer: CharTokenizer,
    card: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes the weights, and the card as a JSON file of the same name; each is whole or not there.

    Args:
        path: ends in .safetensors.
        card: how the model was made: command, corpus hash, steps, device, loss curve, validation loss.
        dtype: of the stored weights.
    Raises: ValueError when the path does not end in .safetensors, or the model is not what its config says (its blocks
        were pruned to different shapes), so that the file could not be read again.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors")
    with torch.device("meta"):
        described = GPTlite(model.config).state_dict()
    for name, tensor in model.state_dict().items():
        said = tuple(described[name].shape) if name in described else None
        if said != tuple(tensor.shape):
            raise ValueError(f"cannot save {name} of shape {tuple(tensor.shape)}, its config says {said}")
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    header = {
        "format": FORMAT,
        "config": json.dumps(model.config.to_dict(), sort_keys=True),
        "chars": json.dumps(tokenizer.chars),
    }
    write_atomically(path, save(weights, metadata=header))
    if card is not None:
        write_atomically(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPTlite, CharTokenizer]:
    """Reads a checkpoint; the file is not trusted: no pickle, and shapes are checked before anything is allocated.

    Returns: the model in eval mode, and its tokenizer.
    Raises: ValueError when the file is missing, truncated, or not a checkpoint of gptlite.
    """
    if not os.path.isfile(path):
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            model, tokenizer = _described(file.metadata() or {}, len(file.keys()), os.path.getsize(path))
            expected = model.state_dict()
            if odd := sorted(set(file.keys()) ^ set(expected)):
                raise ValueError(f"it does not fit its config: weight {odd[0]} is missing or unknown")
            weights = {}
            for name, like in expected.items():
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(like.shape):
                    raise ValueError(f"weight {name} has shape {shape}, its config says {tuple(like.shape)}")
                weights[name] = file.get_tensor(name).to(device, dtype, copy=True)  # not the file's own pages
                if not weights[name].isfinite().all():
                    raise ValueError(f"weight {name} holds values that are not finite")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no checkpoint of gptlite, or is damaged: {error}") from None
    model.load_state_dict(weights, assign=True)
    return model.eval(), tokenizer


def _described(header: dict[str, str], n_weights: int, n_bytes: int) -> tuple[GPTlite, CharTokenizer]:
    """The model that a header describes, without memory for its weights, and the tokenizer.

    Raises: ValueError, TypeError or KeyError when the header makes no sense, or describes more than the file can hold.
    """
    if header.get("format") != FORMAT:
        raise ValueError(f"its header does not say {FORMAT}")
    config, chars = GPTConfig.from_dict(json.loads(header["config"])), json.loads(header["chars"])
    if not isinstance(chars, str):
        raise ValueError("its vocabulary is no text")
    tokenizer = CharTokenizer(chars)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"it has {tokenizer.vocab_size} characters, its config a vocabulary of {config.vocab_size}")
    # a weight takes at least a byte per number
    widest = max(config.vocab_size, config.context_length, config.n_heads * config.d_head, config.d_ff)
    if config.n_layers > n_weights or config.d_model * widest > n_bytes:
        raise ValueError("it is too small for the model that its header describes")
    with torch.device("meta"):
        return GPTlite(config), tokenizer


def load(
    name: str | Path = "gptlite", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPTlite, CharTokenizer]:
    """The trained model of a chapter.

    Args:
        name: one of SHIPPED, VARIANTS or QUANTIZED, which come with the package, or the path of a .safetensors file.
    Returns: the model in eval mode, and its tokenizer.
    Raises: ValueError when there is no such checkpoint or it is damaged.
    """
    path = checkpoint_path(name)
    # a technique reads its own format; the checkpoint knows no technique
    kind = format_of(path)
    if kind.startswith("gptlite-variant"):
        return import_module("gptlite.variants.stored").load_variant(path, device, dtype)
    if kind.startswith("gptlite-quantized"):
        return import_module("gptlite.quantize.stored").load_quantized(path, device, dtype)
    return load_checkpoint(path, device, dtype)


def format_of(path: Path) -> str:
    """The format that a file says it has; empty when it says none."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format", "")
    except (SafetensorError, OSError):
        return ""


def checkpoint_path(name: str | Path) -> Path:
    """Where the checkpoint of that name lies: a shipped one, else the path itself."""
    if str(name) in (*SHIPPED, *VARIANTS, *QUANTIZED):
        return Path(str(resources.files("gptlite") / "checkpoints" / f"{name}.safetensors"))
    return Path(name)


def read_card(name: str | Path = "gptlite") -> dict[str, Any]:
    """The card of a checkpoint. Raises: ValueError when it is missing or not JSON."""
    path = checkpoint_path(name).with_suffix(".json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the card {path}: {error}") from None


def from_original(path: str | Path, tokenizer: CharTokenizer, d_head: int) -> GPTlite:
    """A model from a checkpoint that the original GPTlite code wrote with torch.save.

    The parameters have the same names; what the state cannot tell is given.

    Args:
        path: a state dict; read without executing anything in it (weights_only).
        tokenizer: the vocabulary it was trained on.
        d_head: D, size of a head.
    Returns: the model in eval mode, fp32.
    Raises: ValueError when the file is not such a state dict.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = {name: t.float() for name, t in state.items() if not name.endswith((".mask", ".tril"))}
        V, d_model = state["token_embedding.weight"].shape
        config = GPTConfig(
            vocab_size=V,
            context_length=state["position_embedding.weight"].shape[0],
            n_layers=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
            d_model=d_model,
            n_heads=state["blocks.0.mha.query_proj.weight"].shape[0] // d_head,
            n_kv_heads=state["blocks.0.mha.key_proj.weight"].shape[0] // d_head,
            d_head=d_head,
            d_ff=state["blocks.0.ffwd.net.0.weight"].shape[0],
        )
        model = GPTlite(config)
        model.load_state_dict(state)
    except Exception as error:  # torch.load raises many kinds; all mean the same to the reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is no state dict of the original GPTlite: {reason}") from None
    if tokenizer.vocab_size != V:
        raise ValueError(f"{path} has a vocabulary of {V}, the tokenizer {tokenizer.vocab_size} characters")
    return model.eval()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that whoever looks finds the old one or the new one, never a part.

    Raises: ValueError when the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
