"""Quantised weights against bitsandbytes, torchao, NumPy and PyTorch's own fake quantisation."""

import bitsandbytes as bnb
import bitsandbytes.functional as bnbf
import numpy as np
import pytest
import torch
from torch import nn
from torchao.prototype.awq.core import AWQObserver
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.quant_primitives import MappingType, dequantize_affine, quantize_affine

from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.quantize.awq import folds, search_scale
from gptlite.quantize.gptq import input_hessian
from gptlite.quantize.int8 import Int8Linear, int8_product, quantize_tokens, row_codes
from gptlite.quantize.llm_int8 import LLMInt8Linear
from gptlite.quantize.pack import pack
from gptlite.quantize.qat import RoundingLinear
from gptlite.quantize.rtn import Grid


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_bytes_are_those_of_numpy(bits: int) -> None:
    codes = torch.randint(2**bits, (3, 24), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    flat = ((codes.numpy()[..., None] >> np.arange(bits)) & 1).reshape(3, -1)  # the lowest bit of a code first
    assert np.array_equal(pack(codes, bits).numpy(), np.packbits(flat, axis=-1, bitorder="little"))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [8, 32])
def test_codes_and_values_are_those_of_torchao(bits: int, group: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    coded = Grid(bits, group).codes(weight)
    shape = (1, group)
    zero = coded.zero.int()
    codes = quantize_affine(weight, shape, coded.scale, zero, torch.uint8, 0, 2**bits - 1)
    assert torch.equal(coded.codes, codes)
    values = dequantize_affine(codes, shape, coded.scale, zero, torch.uint8, 0, 2**bits - 1)
    torch.testing.assert_close(coded.dequantize(), values, rtol=0, atol=0)


# -- LLM.int8 -----------------------------------------------------------------------------------------------------


def test_token_codes_and_products_are_those_of_bitsandbytes() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(16, 64)
    codes, scale = quantize_tokens(x)
    theirs, stats, _ = bnbf.int8_vectorwise_quant(x)
    # they multiply by 127 / max, we divide by max / 127: what lies halfway may fall the other way
    assert (codes.int() - theirs.int()).abs().max() <= 1 and (codes == theirs).float().mean() > 0.99
    torch.testing.assert_close(scale[:, 0] * 127, stats)
    rows = row_codes(weight).codes
    assert torch.equal(int8_product(codes, rows), bnbf.int8_linear_matmul(codes, rows))


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_a_layer_with_outliers_is_that_of_bitsandbytes(threshold: float) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(16, 64).half().float(), torch.randn(16).half().float(), torch.randn(9, 64)
    x[2, 5], x[7, 40] = 30, -50
    layer = bnb.nn.Linear8bitLt(64, 16, has_fp16_weights=False, threshold=threshold)
    layer.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    layer.bias = nn.Parameter(bias.half())
    with torch.no_grad():
        theirs = layer.to("cpu").eval()(x.half()).float()  # in training it would not round its inputs
        mine = LLMInt8Linear(weight, bias, threshold)(x) if threshold else Int8Linear(row_codes(weight), bias)(x)
    exact = x @ weight.T + bias
    ours, others = ((y - exact).square().mean().sqrt() for y in (mine, theirs))
    assert ours == pytest.approx(float(others), rel=0.02)  # the same method errs as much
    # their inputs and outputs are fp16: outputs up to 400 have steps of 0.25 at most
    assert (mine - theirs).abs().max() < 0.3
    assert (mine - theirs).square().mean().sqrt() < 0.5 * ours


def test_a_dynamic_layer_is_that_of_torchao() -> None:
    torch.manual_seed(2)
    linear, x = nn.Linear(64, 16), torch.randn(9, 64)
    mine = Int8Linear(row_codes(linear.weight), linear.bias)(x)
    box = nn.Sequential(linear)
    quantize_(box, Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad():
        theirs = box(x)
    exact = x @ linear.weight.dequantize().T + linear.bias
    # torchao's scales are max / 127.5 and its codes reach -128: other roundings of the same size
    assert (mine - theirs).square().mean().sqrt() < 2 * (theirs - exact).square().mean().sqrt() + 1e-3
    assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


# -- AWQ and QAT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_scale_is_the_one_that_torchao_finds(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(24, 64)
    inputs = torch.randn(300, 64) * torch.logspace(-1, 1, 64)[torch.randperm(64)]
    grid = IntxWeightOnlyConfig(torch.int4, PerGroup(32), mapping_type=MappingType.ASYMMETRIC)
    observer = AWQObserver(weight, None, grid, 20)
    observer(inputs, inputs @ weight.T)
    theirs = observer.calculate_qparams()
    model = GPTlite(GPTConfig(5, 4, n_layers=1, d_model=64, n_heads=2, d_head=4))
    fold = folds(model.blocks[0])[2]
    scale, alpha, errors = search_scale([weight], inputs.abs().mean(0), input_hessian(inputs), Grid(4, 32), fold)
    assert alpha > 0 and min(errors) < errors[0]
    torch.testing.assert_close(scale, theirs, rtol=1e-4, atol=0)


def test_gradients_are_those_of_pytorch_s_learnable_fake_quantisation() -> None:
    torch.manual_seed(3)
    linear, grid = nn.Linear(32, 6), Grid(3, None, clip=True)
    with torch.no_grad():
        # up to half a step beyond the range PyTorch passes the gradient, and we, who clamp first, do not: move those
        scale, zero = grid.of(linear.weight)
        steps = linear.weight / scale + zero
        near = ((steps > -0.7) & (steps < 0)) | ((steps > 7) & (steps < 7.7))
        linear.weight.copy_(torch.where(near, (steps.clamp(0.1, 6.9) - zero) * scale, linear.weight))
    layer = RoundingLinear(linear, grid)
    with torch.no_grad():
        layer.log_scale.copy_(scale.log().unsqueeze(-1))
        layer.zero.copy_(zero)
    up = torch.randn(6, 32)
    (layer.rounded() * up).sum().backward()
    weight = linear.weight.detach().clone().requires_grad_()
    scale = layer.log_scale.detach().exp().flatten().requires_grad_()
    offset = layer.zero.flatten().clone().requires_grad_()
    theirs = torch._fake_quantize_learnable_per_channel_affine(weight, scale, offset, 0, 0, 7, 1.0)
    torch.testing.assert_close(layer.rounded(), theirs)
    (theirs * up).sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    # by the logarithm: d/d log s = s d/ds
    torch.testing.assert_close(layer.log_scale.grad.flatten(), scale.grad * scale.detach(), rtol=1e-4, atol=1e-4)
