"""Faster products on a CPU: PyTorch's own kernels read INT8 and INT4 codes without making the matrix again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.fast import fuse_projections
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


class Int8InputsLinear(nn.Module):
    """`CodedLinear`s that read the same input, as one product of INT8 weights and inputs {cite}`jacob2018quantization`.

    PyTorch's dynamic linear layer, on most machines by FBGEMM. Each call looks for the least and the largest value of
    its whole input, zero included, and cuts that range into 255 steps; a code is a whole number from 0 to 255, and the
    sums are exact. Of each row of the weight the codes and the scale are those of the `CodedLinear`.

    **One scale serves the whole input of a call**, not one for each token. So a token's result depends on which others
    share its step: a large value in one of them makes everybody's step coarser. The engine's promise that a request
    gets the same tokens alone and in company then holds only up to that error; weight-only kernels keep it.

    Without VNNI instructions FBGEMM adds pairs of products in 16 bits, which two large codes overflow. Such a machine
    gets inputs in half as many steps.

    Args:
        layers: with the same number of inputs, 8 bits, symmetric, a scale for each row, on a CPU; their outputs follow
            one another.
    Raises: ValueError when the kernel does not take one of them, or this build of torch has no engine for it.
    """

    def __init__(self, *layers: CodedLinear) -> None:
        super().__init__()
        for layer in layers:
            if why := reason_against(layer, int8_inputs=True):
                raise ValueError(f"no kernel takes the layer: {why}")
        self.in_features = layers[0].in_features
        self.sizes = [layer.out_features for layer in layers]
        self.out_features = sum(self.sizes)
        coded = [layer.coded for layer in layers]
        codes = torch.cat([one.codes for one in coded])  # int8 [out, in]
        scale = torch.cat([one.scale[:, 0] for one in coded])  # [out]
        biases = [scale.new_zeros(n) if layer.bias is None else layer.bias for n, layer in zip(self.sizes, layers)]
        self.weight = _packed_weight(codes, scale, torch.cat([bias.detach().float() for bias in biases]))
        self.reduce_range = not full_range(torch.backends.quantized.engine)

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads of the weight: codes, and scales in fp32."""
        return self.out_features * (self.in_features + 4)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        flat = x.reshape(-1, self.in_features).float()  # [n, in]
        y = torch.ops.quantized.linear_dynamic(flat, self.weight, self.reduce_range)  # [n, out]
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _save_to_state_dict(self, *args: Any) -> None:
        raise ValueError("a kernel's weights are not saved: save the model before it gets kernels")


def _packed_weight(codes: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """int8 codes [out, in], scales and bias [out], in the order in which the engine's kernel reads them."""
    with warnings.catch_warnings():
        # the tensor that the kernel packs is of a kind that PyTorch means to drop
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
        zero = torch.zeros(len(codes), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(codes, scale.double(), zero, 0)
    return torch.ops.quantized.linear_prepack(quantized, bias)


@functools.cache
def full_range(engine: str) -> bool:
    """Whether products of the largest codes are added without overflow.

    Args:
        engine: the current one of `torch.backends.quantized`.
    """
    n = 64
    weight = _packed_weight(torch.full((1, n), 127, dtype=torch.int8), torch.ones(1), None)
    y = torch.ops.quantized.linear_dynamic(torch.ones(1, n), weight, False)  # ones get the code 255
    return abs(float(y) - 127 * n) < 1


def reason_against(layer: CodedLinear, int8_inputs: bool = False) -> str:
    """Why no kernel takes a layer, or with `int8_inputs` why that for INT8 inputs does not; empty when one does."""
    if layer.packed.device.type != "cpu":
        return f"it is on {layer.packed.device.type}, the kernels are for the CPU"
    if layer.bits == 8:
        if not layer.symmetric or layer.group_size < layer.in_features:
            return "8 bits must be symmetric, by rows"
        engine = torch.backends.quantized.engine
        if int8_inputs and engine not in torch.backends.quantized.supported_engines:
            return f"this build of torch has no engine for INT8 inputs, torch.backends.quantized.engine is {engine!r}"
        return ""
    if int8_inputs:
        return f"it has {layer.bits} bits, with INT8 inputs it takes 8"
    if layer.bits != 4:
        return f"it has {layer.bits} bits, there are kernels for 4 and 8"
    if layer.group_size not in GROUPS or layer.in_features % layer.group_size:
        return f"groups of {layer.group_size} in rows of {layer.in_features}, it takes whole ones of {GROUPS}"
    return f"{layer.out_features} outputs are no multiple of 16" if layer.out_features % 16 else ""


def use_kernels(model: GPTlite, int8_inputs: bool = False) -> int:
    """Gives every layer that a kernel takes to it, in place; the others stay as they are.

    Args:
        int8_inputs: layers of 8 bits round their inputs to INT8 as well, and the queries, keys and values of a block
            become one product. Many rows are much faster so, but a token's result then depends a little on who shares
            its step (`Int8InputsLinear`). Layers of 4 bits get their kernel in either case.
    Returns: how many layers it was, so that nobody measures the plain way by mistake; three that became one count as
        three.
    """
    taken = 0
    if int8_inputs:
        for block in model.blocks:
            fused = fuse_projections(block.mha, _take_int8_inputs, Int8InputsLinear)
            if fused is not block.mha:
                block.mha = fused
                taken += 3

    def change(_: str, layer: nn.Module) -> nn.Module:
        nonlocal taken
        if not isinstance(layer, CodedLinear):
            return layer
        both = int8_inputs and layer.bits == 8
        if reason_against(layer, both):
            return layer
        taken += 1
        return Int8InputsLinear(layer) if both else KernelLinear(layer)

    replace_linear(model, change, head=True)
    return taken


def _take_int8_inputs(layers: Sequence[nn.Module]) -> bool:
    return all(isinstance(layer, CodedLinear) and not reason_against(layer, int8_inputs=True) for layer in layers)
