"""Faster products on a CPU: PyTorch's own kernels read INT8 and INT4 weights without making the matrix again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptlite.layers import replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear

GROUPS = (32, 64, 128, 256)  # that the INT4 kernel has


class KernelLinear(nn.Module):
    """A `CodedLinear` for PyTorch's weight-only CPU kernels: inputs in bf16, sums in fp32.

    The kernel wants the codes in an order of its own; that copy replaces the packed ones, and is not saved. Scales
    become bf16, so the result is off that of the plain way by about one part in 256.

    Args:
        layer: with 8 bits, symmetric, a scale for each row; or with 4 bits and groups of 32, 64, 128 or 256.
    Raises: ValueError when no kernel takes it.
    """

    def __init__(self, layer: CodedLinear) -> None:
        super().__init__()
        if why := reason_against(layer):
            raise ValueError(f"no kernel takes the layer: {why}")
        self.out_features, self.in_features, self.bits = layer.out_features, layer.in_features, layer.bits
        self.group_size = layer.group_size
        coded = layer.coded
        self.codes: Tensor
        self.scale: Tensor
        if layer.bits == 8:
            codes, scale = coded.codes, coded.scale[:, 0]  # int8 [d_out, d_in], [d_out]
        else:
            whole = layer.coded.codes.int() + (8 if coded.zero is None else 0)
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)  # uint8 [d_out, d_in / 2]
            # the kernel computes (code - 8) scale + offset, ours is (code - zero) scale
            zero = torch.full_like(coded.scale, 8.0) if coded.zero is None else coded.zero
            scale = torch.stack((coded.scale, (8 - zero) * coded.scale), -1).transpose(0, 1)  # [n_groups, d_out, 2]
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.bfloat16().contiguous())
        self.bias = layer.bias

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads of the weight: codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).bfloat16()  # [n, d_in]
        if self.bits == 8:
            y = torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scale)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, self.group_size, self.scale)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def reason_against(layer: CodedLinear) -> str:
    """Why no kernel takes a layer; empty when one does."""
    if layer.packed.device.type != "cpu":
        return f"it is on {layer.packed.device.type}, the kernels are for the CPU"
    if layer.bits == 8:
        return "" if layer.symmetric and layer.group_size >= layer.in_features else "8 bits must be symmetric, by rows"
    if layer.bits != 4:
        return f"it has {layer.bits} bits, there are kernels for 4 and 8"
    if layer.group_size not in GROUPS or layer.in_features % layer.group_size:
        return f"groups of {layer.group_size} in rows of {layer.in_features}, it takes whole ones of {GROUPS}"
    return f"{layer.out_features} outputs are no multiple of 16" if layer.out_features % 16 else ""


def use_kernels(model: GPTlite) -> int:
    """Gives every layer that a kernel takes to it, in place; the others stay as they are.

    Returns: how many layers it was, so that nobody measures the plain way by mistake.
    """
    taken = 0

    def change(_: str, layer: nn.Module) -> nn.Module:
        nonlocal taken
        if isinstance(layer, CodedLinear) and not reason_against(layer):
            taken += 1
            return KernelLinear(layer)
        return layer

    replace_linear(model, change, head=True)
    return taken
