"""INT8 for weights and inputs: whole numbers are multiplied, and one scale for each row and token comes after."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gptlite.layers import calibrate, replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.linear_quant import LinearCodes, quantize_linear


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of whole numbers, exactly: the sums are kept in 32 bits.

    Args:
        a, b: int8 [n, d_in] and [d_out, d_in].
    Returns: int32 [n, d_out].
    """
    if a.device.type == "cpu" or (a.device.type == "cuda" and a.shape[1] % 8 == 0 and b.shape[0] % 8 == 0):
        n = len(a)
        if a.device.type == "cuda" and n <= 16:  # the kernel wants more rows than 16
            a = torch.nn.functional.pad(a, (0, 0, 0, 17 - n))
        return torch._int_mm(a.contiguous(), b.T)[:n]
    return (a.double() @ b.double().T).int()  # exact too, up to 2^53


def quantize_tokens(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """INT8 codes of inputs, symmetric around zero.

    Args:
        x: [n, d]. scale: a scalar, known beforehand (static); None: each token's largest value decides (dynamic).
    Returns: codes in -127..127 [n, d], int8; the scales [n, 1], or the scalar.
    """
    if scale is None:
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(x.dtype).tiny)  # [n, 1]
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def scaled(product: Tensor, tokens: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers [n, d_out] times the scales of tokens [n, 1] or [] and of rows [d_out], in that dtype.

    The products are made in fp32 or wider: the sums of long rows do not fit fp16.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (product.to(wide) * (tokens.to(wide) * rows.to(wide))).to(dtype)


class Int8Linear(nn.Module):
    """y = x W^T + b with INT8 codes of both: (codes of x) (codes of W)^T, times the scales of token and row.

    Args:
        coded: of the weight [d_out, d_in], symmetric, 8 bits, a scale for each row.
        bias: [d_out] or None.
        input_scale: of the inputs, from calibration (static); None takes each token's own (dynamic).
    Raises: ValueError when the codes are of another kind.
    """

    def __init__(self, coded: LinearCodes, bias: Tensor | None = None, input_scale: float | None = None) -> None:
        super().__init__()
        if coded.bits != 8 or coded.zero is not None or coded.scale.shape != (coded.shape[0], 1):
            raise ValueError(
                f"the codes have {coded.bits} bits and scales {tuple(coded.scale.shape)}, INT8 products take "
                "symmetric ones of 8 bits with a scale for each row"
            )
        self.out_features, self.in_features = coded.shape
        self.codes: Tensor
        self.scale: Tensor
        self.input_scale: Tensor | None
        self.register_buffer("codes", coded.codes)  # int8 [d_out, d_in]
        self.register_buffer("scale", coded.scale[:, 0])  # [d_out]
        self.register_buffer("input_scale", None if input_scale is None else torch.tensor(input_scale))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight: codes and scales, without the bias."""
        return self.codes.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = quantize_tokens(x.reshape(-1, self.in_features), self.input_scale)  # [n, d_in]
        y = scaled(int8_product(codes, self.codes), scale, self.scale, x.dtype)  # [n, d_out]
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


def row_codes(weight: Tensor) -> LinearCodes:
    """INT8 codes of a weight [d_out, d_in], symmetric, with a scale for each row."""
    return quantize_linear(weight, 8, axis=1)


@torch.no_grad()
def to_int8(model: GPTlite, batches: Sequence[Tensor] | None = None) -> GPTlite:
    """Weights and inputs of the blocks' linear layers in INT8, in place {cite}`nagel2021whitepaper`.

    Args:
        batches: tokens [B, S] of a calibration text, whose largest input of a layer sets its scale (static); None: each
            token sets its own (dynamic).
    Returns: the model, whose layers are `Int8Linear`.
    """
    if batches is None:
        return replace_linear(model, lambda _, layer: Int8Linear(row_codes(layer.weight), layer.bias))
    largest: dict[str, float] = {}
    for part in calibrate(model, batches):
        largest |= {name: float(inputs.abs().max()) for name, inputs in part.inputs.items()}
    return replace_linear(
        model, lambda name, layer: Int8Linear(row_codes(layer.weight), layer.bias, largest[name] / 127 or 1.0)
    )
