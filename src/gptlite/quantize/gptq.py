"""GPTQ: round one column after the other, and let the columns that are left make up for the error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gptlite.layers import calibrate, linear_layers
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.linear_quant import LinearCodes
from gptlite.quantize.rtn import Grid


def input_hessian(inputs: Tensor) -> Tensor:
    """H = X^T X / n of a layer's inputs X: what turns an error of its weights into one of its outputs.

    Args:
        inputs: X [n_tokens, d_in].
    Returns: [d_in, d_in] in fp64, half of the second derivative of the mean squared error by a row of the weight; the
        products are those of the inputs' dtype, and of fp32 where that is narrower.
    """
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    return (wide.T @ wide / len(wide)).double()


def output_errors(weight: Tensor, stored: Tensor, hessian: Tensor) -> Tensor:
    """Mean squared error of each output over the calibration tokens, (w - v) H (w - v)^T by rows.

    Args:
        weight, stored: before and after [d_out, d_in]. hessian: H [d_in, d_in], in whose dtype it is computed.
    Returns: [d_out].
    """
    off = weight.to(hessian.dtype) - stored.to(hessian.dtype)
    return ((off @ hessian) * off).sum(1)


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, damping: float = 0.01, act_order: bool = False, block: int = 32
) -> LinearCodes:
    """Codes of a weight whose outputs, not whose weights, are near to the old ones {cite}`frantar2023gptq`.

    Column i is rounded, and its error is taken up by the columns after it, in the way that changes the outputs least:
    w_j -= (w_i - v_i) / U_ii * U_ij, with U the upper Cholesky factor of H^-1. Columns inside a block are changed at
    once, those behind it when the block is done. The scale of a group is chosen when its first column comes up, from
    the group's weights as they are then.

    Args:
        weight: [d_out, d_in]. hessian: H [d_in, d_in], by `input_hessian`.
        damping: share of H's mean diagonal that is added to its diagonal, above 0.
        act_order: take the columns with the largest H_ii first; the codes come back in the weight's own order, and a
            group is still `group_size` neighbours in it.
        block: columns of a block; the result does not depend on it, up to rounding errors.
    Returns: the codes [d_out, d_in], as they are stored.
    Raises: ValueError on a shape, a Hessian, a damping or a block that makes no sense.
    """
    d_out, d_in = weight.shape
    if hessian.shape != (d_in, d_in):
        raise ValueError(f"hessian has shape {tuple(hessian.shape)}, it must be {(d_in, d_in)}")
    if not hessian.isfinite().all():
        raise ValueError("hessian holds an infinity or NaN: so do the inputs that it was made of")
    if not damping > 0:
        raise ValueError(f"damping is {damping}, it must be above 0")
    if block < 1:
        raise ValueError(f"block is {block}, it must be at least 1")
    diagonal = hessian.double().diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(d_in, device=weight.device)
    H = hessian.double()[order][:, order].clone()
    # an input that is always zero has no say, and takes no error
    H.diagonal().add_((damping * diagonal.mean()).clamp(min=torch.finfo(H.dtype).tiny) + (diagonal == 0)[order])
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)  # H^-1 = U^T U

    group = min(grid.group_size or d_in, d_in)
    of_group = order // group  # [d_in], of each place in the order
    n_groups = -(-d_in // group)
    W = weight.detach().double().T[order].contiguous()  # [d_in, d_out]: the columns one after the other
    codes = torch.empty_like(W)
    scale = torch.empty(n_groups, d_out, dtype=torch.float64, device=weight.device)
    zero = None if grid.symmetric else torch.empty_like(scale)
    whole = Grid(grid.bits, None, grid.symmetric, grid.clip)  # the grid of one group
    seen: set[int] = set()
    for begin in range(0, d_in, block):
        end = min(begin + block, d_in)
        errors = W.new_zeros(end - begin, d_out)
        for i in range(begin, end):
            g = int(of_group[i])
            if g not in seen:
                seen.add(g)
                places = (of_group == g).nonzero()[:, 0]  # where the group's columns come in the order
                late = (places >= end).to(W.dtype)  # those that this block has not changed yet
                now = W[places] - (U[begin:end, places] * late).T @ errors  # [g, d_out]
                found, offset = whole.of(now.T.float())
                scale[g] = found[:, 0]
                if zero is not None and offset is not None:
                    zero[g] = offset[:, 0]
            at = (scale[g], None if zero is None else zero[g])
            codes[i] = grid.nearest(W[i], *at)
            error = (W[i] - grid.values(codes[i], *at)) / U[i, i]  # [d_out]
            W[i + 1 : end] -= U[i, i + 1 : end, None] * error
            errors[i - begin] = error
        W[end:] -= U[begin:end, end:].T @ errors
    offsets = None if zero is None else zero.T.float()
    return grid.coded(codes[order.argsort()].T, scale.T.float(), offsets)


def better_rows(weight: Tensor, hessian: Tensor, coded: LinearCodes, other: LinearCodes) -> tuple[LinearCodes, int]:
    """Of two ways to store a weight the better one for each row, by the error of its output.

    Greedy rounding is a heuristic: now and then a row would have done better with plain rounding. Rows are
    independent, so each may be stored in its own way, and no row, and so no layer, is worse than either of the two.

    Args:
        weight: [d_out, d_in]. hessian: H [d_in, d_in]. coded, other: on the same grid.
    Returns: the codes, and how many rows are from `other`.
    """
    errors = [output_errors(weight, one.dequantize(torch.float64), hessian) for one in (coded, other)]
    worse = (errors[0] > errors[1])[:, None]  # [d_out, 1]

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(worse, b, a)

    zero = None if coded.zero is None or other.zero is None else pick(coded.zero, other.zero)
    codes, scale = pick(coded.codes, other.codes), pick(coded.scale, other.scale)
    made = LinearCodes(codes, scale, zero, coded.bits, coded.axis, coded.group_size, coded.shape)
    return made, int(worse.sum())


@torch.no_grad()
def gptq_model(
    model: GPTlite, batches: Sequence[Tensor], grid: Grid, damping: float = 0.01, act_order: bool = True
) -> list[dict[str, Any]]:
    """Stores every linear layer of the blocks by GPTQ, in place, one block after the other.

    What a block is calibrated on is what the blocks before it put out, as they are stored now.

    Args:
        model: in eval mode. batches: tokens [B, S] of the calibration text. damping, act_order: see `gptq`.
    Returns: for each layer its name, the error of its outputs by round to nearest (`nearest`) and as it is stored
        (`stored`), both relative to the outputs' mean square, and the rows that round to nearest did better (`rows`).
    """
    report: list[dict[str, Any]] = []
    for part in calibrate(model, batches):
        layers = linear_layers(model)
        for name, inputs in part.inputs.items():
            layer = layers[name]
            weight, hessian = layer.get_parameter("weight").detach(), input_hessian(inputs)
            plain = grid.codes(weight)
            coded, rows = better_rows(weight, hessian, gptq(weight, hessian, grid, damping, act_order), plain)
            size = output_errors(weight, torch.zeros_like(weight), hessian).sum().clamp(min=1e-300)  # inputs may be 0
            nearest, stored = (
                float(output_errors(weight, one.dequantize(), hessian).sum() / size) for one in (plain, coded)
            )
            report.append({"layer": name, "nearest": nearest, "stored": stored, "rows": rows})
            model.set_submodule(name, CodedLinear(coded, layer.bias).train(layer.training))  # type: ignore[arg-type]
    return report
