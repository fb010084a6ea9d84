"""The linear layers of a model: to replace them, and to see what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptlite.cache.contract import whole_batch
from gptlite.model import Block, GPTlite


@dataclass
class BlockInputs:
    """What `calibrate` shows of one block.

    Args:
        index: of the block, from 0.
        block: the block itself, to be changed in place.
        inputs: by the name of each of its linear layers, as in `linear_layers`, what goes into it
            [n_tokens, d_in], in fp32.
    """

    index: int
    block: Block
    inputs: dict[str, Tensor]


def linear_layers(model: GPTlite, head: bool = False) -> dict[str, nn.Module]:
    """The linear layers of the blocks by their names in the state dict, such as "blocks.0.mha.query_proj".

    Args:
        head: whether `fc_out` belongs to them; most methods leave it in full precision.
    Returns: the layers in the order in which they run. A layer that replaced a linear one (it has `in_features` and
        `out_features`) counts as one.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    return {name: module for name, module in found.items() if name.startswith("blocks.") or (head and name == "fc_out")}


def replace_linear(model: GPTlite, make: Callable[[str, nn.Linear], nn.Module], head: bool = False) -> GPTlite:
    """Puts another layer in the place of every linear layer, one by one, so that old and new never stand twice.

    Args:
        model: changed in place.
        make: gets a layer's name and the layer, and returns the new one, which has `in_features` and `out_features`,
            since shapes are read from modules; it may return the same object.
        head: whether `fc_out` is replaced too.
    Returns: the model.
    Raises: ValueError when a new layer has another shape than the old one, or does not say its shape.
    """
    for name, old in linear_layers(model, head).items():
        new = make(name, old)  # type: ignore[arg-type]
        shape = (getattr(new, "out_features", None), getattr(new, "in_features", None))
        if shape != (old.out_features, old.in_features):
            raise ValueError(f"the new {name} has shape {shape}, the old one {(old.out_features, old.in_features)}")
        model.set_submodule(name, new.train(old.training))
    return model


@torch.no_grad()
def calibrate(model: GPTlite, batches: Sequence[Tensor]) -> Iterator[BlockInputs]:
    """Goes through the blocks in order, and shows what goes into their linear layers.

    The caller may change a block (quantise it, prune it) before it asks for the next one; what the later blocks get
    is what the changed one puts out, so that they can make up for its error {cite}`frantar2023gptq`.

    Args:
        model: in eval mode, so that its dropout does nothing.
        batches: tokens [B, S], one or more batches; their shapes may differ.
    Raises: ValueError when there are no batches, or the model is in training mode.
    """
    if not batches:
        raise ValueError("calibration got 0 batches, it needs at least 1")
    if model.training:
        raise ValueError("the model is in training mode, calibration needs model.eval()")
    segments = []
    hidden = []  # of each batch [B * S, d], what goes into the block
    for tokens in batches:
        positions = model.next_positions(len(tokens), tokens.shape[1], None).to(tokens.device)  # [B, S]
        model.check(tokens, positions)
        segments.append([whole_batch(positions)])
        x = model.token_embedding(tokens.flatten()) + model.position_embedding(positions.flatten())
        hidden.append(x)
    for index, block in enumerate(model.blocks):
        yield BlockInputs(index, block, _inputs_of(model, index, hidden, segments))
        hidden = [block(x, segment, None, index) for x, segment in zip(hidden, segments)]


def _inputs_of(model: GPTlite, index: int, hidden: list[Tensor], segments: list) -> dict[str, Tensor]:
    """What goes into each linear layer of one block, by the layer's name: [n_tokens, d_in], in fp32."""
    layers = {name: layer for name, layer in linear_layers(model).items() if name.startswith(f"blocks.{index}.")}
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def see(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: seen[name].append(args[0].flatten(0, -2).float())

    hooks = [layer.register_forward_pre_hook(see(name)) for name, layer in layers.items()]
    try:
        for x, segment in zip(hidden, segments):
            model.blocks[index](x, segment, None, index)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}
