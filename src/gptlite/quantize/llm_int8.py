"""LLM.int8: the few columns of the input that hold outliers are multiplied in full precision, the rest in INT8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.layers import calibrate, replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.int8 import int8_product, quantize_tokens, row_codes, scaled

THRESHOLD = 6.0  # of the paper


class LLMInt8Linear(nn.Module):
    """y = x W^T + b, with the columns of outliers apart {cite}`dettmers2022llmint8`.

    A column is apart in a call when any of the call's tokens has a value of at least the threshold in it. Its weights
    are read from their codes, except those of the columns that are known to hold outliers: these are kept in 16 bits,
    and leave the other weights of a row a finer scale.

    Args:
        weight: [d_out, d_in]. bias: [d_out] or None.
        threshold: above 0.
        columns: known from calibration, always apart.
    Raises: ValueError when the threshold is not positive.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, threshold: float = THRESHOLD, columns: Sequence[int] = ()
    ) -> None:
        super().__init__()
        if not threshold > 0:
            raise ValueError(f"threshold is {threshold}, it must be above 0")
        self.out_features, self.in_features = weight.shape
        self.threshold = threshold
        self.columns: Tensor
        self.kept: Tensor
        self.codes: Tensor
        self.scale: Tensor
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.int64, device=weight.device))
        self.register_buffer("kept", weight[:, self.columns].half())  # [d_out, n_columns]
        coded = row_codes(weight.index_fill(1, self.columns, 0.0))
        self.register_buffer("codes", coded.codes)  # int8 [d_out, d_in], 0 in the known columns
        self.register_buffer("scale", coded.scale[:, 0])  # [d_out]
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight: codes, scales, and the columns that are kept."""
        return self.codes.nbytes + self.scale.nbytes + self.kept.nbytes

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)  # [n, d_in]
        apart = (flat.abs() >= self.threshold).any(0)  # [d_in]
        apart[self.columns] = True
        codes, scale = quantize_tokens(flat.masked_fill(apart, 0.0))
        y = scaled(int8_product(codes, self.codes), scale, self.scale, x.dtype)  # [n, d_out]
        found = apart.nonzero()[:, 0]
        read = self.codes[:, found].to(x.dtype) * self.scale[:, None].to(x.dtype)  # [d_out, n_found]
        y = y + F.linear(flat[:, found], read) + F.linear(flat[:, self.columns], self.kept.to(x.dtype))
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


@torch.no_grad()
def to_llm_int8(
    model: GPTlite, batches: Sequence[Tensor] | None = None, threshold: float = THRESHOLD
) -> GPTlite:  # fmt: skip
    """LLM.int8 for the blocks' linear layers, in place.

    Args:
        batches: tokens [B, S] of a calibration text: columns that reach the threshold in it are kept in 16 bits. None
            keeps none, and finds outliers in each call alone.
    Returns: the model, whose layers are `LLMInt8Linear`.
    """
    columns: dict[str, list[int]] = {}
    for part in calibrate(model, batches) if batches is not None else ():
        for name, inputs in part.inputs.items():
            columns[name] = (inputs.abs().amax(0) >= threshold).nonzero()[:, 0].tolist()
    return replace_linear(
        model, lambda name, layer: LLMInt8Linear(layer.weight.detach(), layer.bias, threshold, columns.get(name, ()))
    )


@torch.no_grad()
def plant_outliers(model: GPTlite, columns: Sequence[int], factor: float = 64.0) -> GPTlite:
    """Makes some columns of what each LayerNorm puts out larger, and the weights that read them smaller, in place.

    The model computes the same: bit for bit where the factor is a power of two. Models of billions of parameters grow
    such columns by themselves {cite}`dettmers2022llmint8`; GPTlite has few, and none that INT8 minds.

    Args:
        columns: of the model's width. factor: above 0.
    Returns: the model.
    Raises: ValueError when a column is not there, or the factor is not positive.
    """
    d_model = model.blocks[0].ln1.weight.shape[0]
    if wrong := [c for c in columns if not 0 <= c < d_model]:
        raise ValueError(f"column {wrong[0]} is not there, the model has {d_model}")
    if not factor > 0:
        raise ValueError(f"factor is {factor}, it must be above 0")
    for block in model.blocks:
        mha, net = block.mha, block.ffwd.net
        for norm, layers in (
            (block.ln1, (mha.query_proj, mha.key_proj, mha.value_proj)),
            (block.ln2, (net[0],)),
        ):
            norm.weight[list(columns)] *= factor
            norm.bias[list(columns)] *= factor
            for layer in layers:
                layer.get_parameter("weight")[:, list(columns)] /= factor
    return model
