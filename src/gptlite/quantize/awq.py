"""AWQ: make the weights that see large inputs larger before rounding, and the inputs smaller, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.layers import BlockInputs, calibrate
from gptlite.model import Block, GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.gptq import input_hessian, output_errors
from gptlite.quantize.rtn import Grid

N_GRID = 20  # exponents tried, from 0 (nothing is scaled) on
N_CLIP = 10  # parts of the range tried besides the whole one, in steps of a twentieth


@dataclass(frozen=True)
class Fold:
    """A place of a block where a scale goes in before some layers and comes out of them.

    Args:
        name: of the place.
        source: what is divided by the scale: a LayerNorm, or a linear layer whose outputs the layers read.
        layers: the names of what is multiplied by it, within the block, such as "mha.query_proj".
        repeats: heads of the layers' input that read the same head of the source, one after the other (GQA); else 1.
        d_head: size of a head where there are several, else 1.
    """

    name: str
    source: nn.Module
    layers: tuple[str, ...]
    repeats: int = 1
    d_head: int = 1

    def shared(self, values: Tensor) -> Tensor:
        """The mean over what reads the same output of the source: [d_in] -> [d_source]."""
        return values.unflatten(0, (-1, self.repeats, self.d_head)).mean(1).flatten()

    def spread(self, scale: Tensor) -> Tensor:
        """From one number for each output of the source to one for each input of the layers: [d_source] -> [d_in]."""
        return scale.unflatten(0, (-1, 1, self.d_head)).expand(-1, self.repeats, -1).flatten()


def folds(block: Block) -> list[Fold]:
    """The four places of a block where scaling is exact.

    A LayerNorm ends in a gain and a bias, which take any scale. Attention averages values, so that a scale of a value's
    number is one of the output's. A ReLU lets a positive scale through.
    """
    mha = block.mha
    G, _, Dv = mha.kv_shape
    n_heads = mha.out_proj.in_features // Dv
    return [
        Fold("ln1", block.ln1, ("mha.query_proj", "mha.key_proj", "mha.value_proj")),
        Fold("values", mha.value_proj, ("mha.out_proj",), n_heads // G, Dv),
        Fold("ln2", block.ln2, ("ffwd.net.0",)),
        Fold("hidden", block.ffwd.net[0], ("ffwd.net.2",)),
    ]


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module, its weight [d_out, d_in] for example, without its gradient."""
    return module.get_parameter(name).detach()


@torch.no_grad()
def apply_scale(block: Block, fold: Fold, scale: Tensor) -> None:
    """Divides the source's outputs by a scale and multiplies the layers' columns by it: the block computes the same.

    Args:
        scale: [d_source], positive; the scale of each output of the source.
    Raises: ValueError when a number of it is not positive.
    """
    if not (scale > 0).all():
        raise ValueError(f"the least scale is {float(scale.min()):g}, all must be positive")
    weight = tensor_of(fold.source, "weight")
    scale = scale.to(weight.dtype)
    weight.div_(scale if weight.dim() == 1 else scale[:, None])
    tensor_of(fold.source, "bias").div_(scale)
    for name in fold.layers:
        tensor_of(block.get_submodule(name), "weight").mul_(fold.spread(scale))


def search_scale(
    weights: Sequence[Tensor], magnitude: Tensor, hessian: Tensor, grid: Grid, fold: Fold
) -> tuple[Tensor, float, list[float]]:
    """The scale, among powers of the inputs' mean magnitude, that leaves the least error {cite}`lin2024awq`.

    s = magnitude^alpha for alpha = 0, 1/20, ... 19/20, divided by sqrt(max s min s). alpha = 0 scales nothing, so that
    what is found is never worse than plain rounding, by the error that is measured: that of the layers' outputs.

    Args:
        weights: of the layers that share the scale [d_out, d_in] each.
        magnitude: mean of |x| [d_in]. hessian: H of x [d_in, d_in], by `input_hessian`.
        fold: where the scale goes.
    Returns: the scale [d_source], alpha, and the error of each alpha that was tried.
    """
    errors: list[float] = []
    best = torch.ones_like(fold.shared(magnitude)), 0.0
    shared, hessian = fold.shared(magnitude).clamp(min=1e-4), hessian.to(magnitude.dtype)
    for step in range(N_GRID):
        alpha = step / N_GRID
        scale = shared**alpha
        scale = scale / (scale.max() * scale.min()).sqrt()
        wide = fold.spread(scale)  # [d_in]
        error = 0.0
        for weight in weights:
            stored = grid.codes(weight * wide).dequantize(weight.dtype) / wide
            error += float(output_errors(weight, stored, hessian).sum())
        if not errors or error < min(errors):
            best = (scale, alpha)
        errors.append(error)
    return *best, errors


def clip_by_output(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """The part of each group's range that leaves the least error in the layer's outputs, as far as the group makes it.

    The whole range is among those tried. It is the second half of AWQ: where `Grid.clip` minds the weights, this minds
    what they are multiplied by.

    Args:
        weight: [d_out, d_in]. hessian: H of the layer's inputs [d_in, d_in]. grid: of the weight; its clip is not used.
    Returns: [d_out, n_groups], from 1 - N_CLIP / 20 to 1.
    """
    d_out, d_in = weight.shape
    group = min(grid.group_size or d_in, d_in)
    edges = list(range(0, d_in, group))
    best = torch.ones(d_out, len(edges), dtype=weight.dtype, device=weight.device)
    least = torch.full_like(best, float("inf"))
    for step in range(N_CLIP + 1):
        part = 1 - step / 20
        off = weight - grid.codes(weight, torch.full_like(best, part)).dequantize(weight.dtype)
        for g, begin in enumerate(edges):
            own = slice(begin, begin + group)
            error = output_errors(off[:, own], torch.zeros_like(off[:, own]), hessian[own, own].to(weight.dtype))
            better = error < least[:, g]
            best[better, g], least[better, g] = part, error[better]
    return best


def scales_of(part: BlockInputs, grid: Grid) -> list[tuple[Fold, Tensor, Tensor, dict[str, Any]]]:
    """The scales of one block's places, all found by the inputs as they came, before any is folded in.

    Returns: for each place the fold, its scale [d_source], H of its inputs [d_in, d_in], and a row of the report.
    """
    found = []
    for fold in folds(part.block):
        inputs = part.inputs[f"blocks.{part.index}.{fold.layers[0]}"]
        weights = [tensor_of(part.block.get_submodule(name), "weight") for name in fold.layers]
        hessian = input_hessian(inputs)
        scale, alpha, errors = search_scale(weights, inputs.abs().mean(0), hessian, grid, fold)
        size = sum(float(output_errors(w, torch.zeros_like(w), hessian).sum()) for w in weights) or 1.0
        relative = {"nearest": errors[0] / size, "stored": min(errors) / size}
        found.append((fold, scale, hessian, {"block": part.index, "place": fold.name, "alpha": alpha, **relative}))
    return found


@torch.no_grad()
def scale_model(model: GPTlite, batches: Sequence[Tensor], grid: Grid) -> list[dict[str, Any]]:
    """Finds the scales of every block and folds them in, in place: the model computes the same as before.

    Args:
        model: in eval mode. batches: tokens [B, S] of the calibration text. grid: that the weights will be rounded to.
    Returns: for each place its block, name, alpha, and the error at alpha = 0 (`nearest`) and at the chosen one
        (`stored`), both relative to the outputs' mean square.
    """
    report = []
    for part in calibrate(model, batches):
        for fold, scale, _, row in scales_of(part, grid):
            apply_scale(part.block, fold, scale)
            report.append(row)
    return report


@torch.no_grad()
def awq_model(model: GPTlite, batches: Sequence[Tensor], grid: Grid) -> list[dict[str, Any]]:
    """Stores every linear layer of the blocks by AWQ, in place, block after block: scale, clip, round to nearest.

    Args:
        model: in eval mode. batches: tokens [B, S] of the calibration text. grid: of the weights.
    Returns: the report of `scale_model`; what a block is calibrated on is what the stored ones before it put out.
    """
    report = []
    for part in calibrate(model, batches):
        found = scales_of(part, grid)
        for fold, scale, _, row in found:
            apply_scale(part.block, fold, scale)
            report.append(row)
        for fold, scale, hessian, _ in found:
            wide = fold.spread(scale).to(hessian.dtype)
            for name in fold.layers:
                layer = part.block.get_submodule(name)
                weight = tensor_of(layer, "weight")
                coded = grid.codes(weight, clip_by_output(weight, hessian / wide / wide[:, None], grid))
                bias = None if layer.bias is None else tensor_of(layer, "bias")
                stored = CodedLinear(coded, bias).train(layer.training)
                part.block.set_submodule(name, stored)
    return report
