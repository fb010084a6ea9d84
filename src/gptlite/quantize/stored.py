"""Quantised models on disk: packed codes, scales and zero points, and the rest of the weights in 16 bits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gptlite.arithmetic import ModelShape, n_params
from gptlite.checkpoint import write_atomically
from gptlite.config import GPTConfig
from gptlite.data import CharTokenizer
from gptlite.layers import linear_layers, replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear

FORMAT = "gptlite-quantized-1"
KINDS = {"packed": torch.uint8, "scale": torch.float16, "zero": torch.uint8}


def save_quantized(
    path: str | Path,
    model: GPTlite,
    tokenizer: CharTokenizer,
    card: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes a model whose linear layers hold codes, and the card; each is whole or not there.

    Args:
        path: ends in .safetensors.
        model: with `CodedLinear` where it is quantised, and otherwise of its config's shape.
        card: how it was made.
        dtype: of the weights that are not in codes.
    Raises: ValueError when the path does not end in .safetensors, no layer holds codes, or the model has another shape
        than its config, which a file could not be read back into.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors")
    layers = {name: layer for name, layer in linear_layers(model, head=True).items() if isinstance(layer, CodedLinear)}
    if not layers:
        raise ValueError("no layer of the model holds codes: quantise it first, or use save_checkpoint")
    check_shape(model)
    kept = {name: tensor for name, tensor in model.state_dict().items() if _owner(name) not in layers}
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in kept.items()}
    described = {}
    for name, layer in layers.items():
        described[name] = {"bits": layer.bits, "group_size": layer.group_size, "symmetric": layer.symmetric}
        for part, kind in KINDS.items():
            value = getattr(layer, part)
            if value is not None:
                tensors[f"{name}.{part}"] = value.detach().to("cpu", kind).contiguous()
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias.detach().to("cpu", dtype).contiguous()
    header = {
        "format": FORMAT,
        "config": json.dumps(model.config.to_dict(), sort_keys=True),
        "chars": json.dumps(tokenizer.chars),
        "layers": json.dumps(described),
    }
    write_atomically(path, save(tensors, metadata=header))
    if card is not None:
        write_atomically(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())


def load_quantized(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPTlite, CharTokenizer]:
    """Reads a quantised model; the file is not trusted, as in `checkpoint.load_checkpoint`.

    Args:
        dtype: of the weights that are not in codes.
    Returns: the model in eval mode, and its tokenizer; its codes, scales and zero points are those of the file.
    Raises: ValueError when the file is missing, truncated, or does not fit what its header describes.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            model, tokenizer, layers = _described(file.metadata() or {}, os.path.getsize(path))
            shapes = _shapes(model, layers)
            if odd := sorted(set(file.keys()) ^ set(shapes)):
                raise ValueError(f"it does not fit its header: weight {odd[0]} is missing or unknown")
            tensors = {}
            for name, (shape, kind) in shapes.items():
                part = file.get_slice(name)
                if tuple(part.get_shape()) != shape:
                    raise ValueError(f"weight {name} has shape {tuple(part.get_shape())}, it must be {shape}")
                tensor = file.get_tensor(name)
                if kind is not None and tensor.dtype != kind:
                    raise ValueError(f"weight {name} has dtype {tensor.dtype}, it must be {kind}")
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise ValueError(f"weight {name} holds values that are not finite")
                tensors[name] = tensor.to(device, kind or dtype, copy=True)  # not the file's own pages
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no quantised model of gptlite, or is damaged: {error}") from None
    rest = {name: tensor for name, tensor in tensors.items() if _owner(name) not in layers}
    model.load_state_dict(rest, strict=False, assign=True)
    replace_linear(
        model,
        lambda name, layer: _layer(name, layer, tensors, *layers[name][:2]) if name in layers else layer,
        head=True,
    )
    return model.eval(), tokenizer


def check_shape(model: GPTlite) -> None:
    """Raises: ValueError unless the model, its weights in codes or not, has the shapes that its config says."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, layer in linear_layers(model, head=True).items():
        if isinstance(layer, CodedLinear):
            for part in KINDS:
                shapes.pop(f"{name}.{part}", None)
            shapes[f"{name}.weight"] = (layer.out_features, layer.in_features)
    expected = {name: tuple(tensor.shape) for name, tensor in _meta(model.config).state_dict().items()}
    if odd := sorted(name for name in shapes.keys() | expected if shapes.get(name) != expected.get(name)):
        raise ValueError(f"the model is not of its config's shape: {odd[0]} differs")


def weight_bytes(model: GPTlite) -> tuple[int, int]:
    """Of the layers that hold codes: bytes of what is stored of their weights, and how many weights these are."""
    layers = [layer for layer in linear_layers(model, head=True).values() if isinstance(layer, CodedLinear)]
    return sum(one.nbytes for one in layers), sum(one.in_features * one.out_features for one in layers)


def model_bytes(model: GPTlite, bytes_per_weight: float = 2) -> float:
    """Bytes of a whole model: codes with their scales and zero points as they are, all else in 16 bits.

    Args:
        bytes_per_weight: of what is not in codes.
    """
    return weight_bytes(model)[0] + model.n_params * bytes_per_weight


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _meta(config: GPTConfig) -> GPTlite:
    with torch.device("meta"):
        return GPTlite(config)


def _described(header: dict[str, str], n_bytes: int) -> tuple[GPTlite, CharTokenizer, dict[str, tuple[int, int, bool]]]:
    """The model that a header describes, without memory, its tokenizer, and (bits, group size, symmetric) by layer.

    Raises: ValueError, TypeError, KeyError or AttributeError when the header makes no sense, or describes more than the
        file can hold.
    """
    if header.get("format") != FORMAT:
        raise ValueError(f"its header does not say {FORMAT}")
    config, chars = GPTConfig.from_dict(json.loads(header["config"])), json.loads(header["chars"])
    if not isinstance(chars, str):
        raise ValueError("its vocabulary is no text")
    tokenizer = CharTokenizer(chars)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(f"it has {tokenizer.vocab_size} characters, its config a vocabulary of {config.vocab_size}")
    if n_params(ModelShape.of(config)) / 4 > n_bytes:  # a weight takes at least 2 bits
        raise ValueError("it is too small for the model that its header describes")
    model = _meta(config)
    known = linear_layers(model, head=True)
    layers = {}
    for name, values in json.loads(header["layers"]).items():
        bits, group, symmetric = values["bits"], values["group_size"], values["symmetric"]
        if name not in known:
            raise ValueError(f"layer {name[:80]} is unknown")
        if type(bits) is not int or not 2 <= bits <= 8 or type(symmetric) is not bool:
            raise ValueError(f"layer {name} has bits {bits!r} and symmetric {symmetric!r}")
        if type(group) is not int or not 1 <= group <= known[name].in_features:  # type: ignore[operator]
            raise ValueError(f"layer {name} has group_size {group!r}, it must be 1 to {known[name].in_features}")
        layers[name] = (bits, group, symmetric)
    return model, tokenizer, layers


def _shapes(
    model: GPTlite, layers: dict[str, tuple[int, int, bool]]
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """What must be in the file: shape and dtype by name; None is any float."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
    for name, like in model.state_dict().items():
        owner = _owner(name)
        if owner in layers and name.endswith(".weight"):
            d_out, d_in = like.shape
            for part, shape in CodedLinear.shapes(d_out, d_in, *layers[owner]).items():
                shapes[f"{owner}.{part}"] = (shape, KINDS[part])
        else:
            shapes[name] = (tuple(like.shape), None)
    return shapes


def _layer(name: str, like: nn.Linear, tensors: dict[str, Tensor], bits: int, group_size: int) -> CodedLinear:
    """The layer of that name, which shares the memory of the tensors."""
    parts = {part: tensors[f"{name}.{part}"] for part in KINDS if f"{name}.{part}" in tensors}
    shape = (like.out_features, like.in_features)
    return CodedLinear.of(shape, bits, group_size, parts, tensors.get(f"{name}.bias"))
