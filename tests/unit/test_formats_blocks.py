"""Four-bit formats with block scales, by hand; values as a format keeps them; and layers that compute so."""

import copy
import math

import pytest
import torch
from torch import nn

from gptlite.config import GPTConfig
from gptlite.layers import linear_layers, replace_linear
from gptlite.model import GPTlite
from gptlite.quantize.blocks import (
    NF4_LEVELS,
    SCALINGS,
    decode_power,
    encode_power,
    quantize_mxfp4,
    quantize_nf4,
    quantize_nvfp4,
)
from gptlite.quantize.formats import E2M1, E4M3, decode
from gptlite.quantize.rounded import KINDS, RoundedLinear, example_tensors, round_trip, signal_to_noise, to_codes

INF, NAN = math.inf, math.nan
MAKE = {"mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4, "nf4": quantize_nf4}


def test_powers_of_two():
    codes = encode_power(torch.tensor([-200, -127, -1, 0, 1, 127, 200]))
    assert codes.tolist() == [0, 0, 126, 127, 128, 254, 254]
    assert decode_power(codes).tolist() == [2.0**-127, 2.0**-127, 0.5, 1.0, 2.0, 2.0**127, 2.0**127]
    assert decode_power(torch.tensor([255], dtype=torch.uint8)).isnan()


def test_mxfp4_by_hand():
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([6.0, -3.2, 0.24, 0.25])  # floor(log2 6) - 2 = 0: a scale of 1
    x[0, 32:35] = torch.tensor([100.0, 31.0, 3.9])  # 2^6 / 4 = 16
    coded = quantize_mxfp4(x)
    assert coded.scales.tolist() == [[127, 131]]
    assert coded.dequantize()[0, :4].tolist() == [6.0, -3.0, 0.0, 0.0]  # 0.25 is a tie: to the even 0
    assert coded.dequantize()[0, 32:35].tolist() == [96.0, 32.0, 0.0]
    assert coded.bits_per_value() == 4 + 8 / 32


@pytest.mark.parametrize(("scaling", "from_"), [("floor", 2.0), ("even", 1.75), ("fit", 1.5), ("ceil", 1.0)])
def test_each_scaling_doubles_from_its_own_mantissa_on(scaling, from_):
    mantissas = torch.linspace(1, 2, 257)[:-1]
    largest = torch.zeros(256, 32)
    largest[:, 0] = mantissas * 8
    scales = decode_power(quantize_mxfp4(largest, scaling).scales)[:, 0]
    doubled = mantissas >= from_ if scaling == "even" else mantissas > from_
    assert torch.equal(scales, torch.where(doubled, 4.0, 2.0))
    if scaling in ("fit", "ceil"):
        assert (largest[:, 0] <= 6 * scales).all()


def test_mxfp4_at_the_ends():
    x = torch.zeros(5, 32)
    x[1, 0], x[2, 0], x[3, :2], x[4, 0] = 1e-40, NAN, torch.tensor([INF, 1.0]), -3e38
    coded = quantize_mxfp4(x)
    assert coded.scales.flatten().tolist() == [0, 0, 255, 253, 252]
    back = coded.dequantize()
    assert (back[0] == 0).all() and back[2].isnan().all() and back[3, 1] == 0
    assert (coded.codes[2] == 0).all()
    tiny = torch.full((1, 32), 2.0**-126)
    assert torch.equal(quantize_mxfp4(tiny).dequantize(), tiny)  # divided by the scale that is stored


def test_nvfp4_by_hand():
    x = torch.zeros(2, 16)
    x[0, :3] = torch.tensor([2688.0, 1000.0, -300.0])  # 6 * 448: the scale of the tensor is 1, that of the block 448
    x[1, :2] = torch.tensor([6.0, 1.3])
    coded = quantize_nvfp4(x)
    assert coded.tensor_scale == 1 and decode(coded.scales, E4M3).flatten().tolist() == [448.0, 1.0]
    assert coded.dequantize()[0, :3].tolist() == [2688.0, 896.0, -224.0]
    assert coded.dequantize()[1, :2].tolist() == [6.0, 1.5]
    assert coded.bits_per_value() == 4 + (2 * 8 + 32) / 32
    one = quantize_nvfp4(x, two_levels=False)
    assert one.tensor_scale is None and one.bits_per_value() == 4.5
    beyond = quantize_nvfp4(torch.full((1, 16), 1e6), two_levels=False)
    assert (beyond.dequantize() == 2688).all()  # cut off
    assert torch.isclose(quantize_nvfp4(torch.full((1, 16), 1e6)).dequantize(), torch.tensor(1e6)).all()


def test_a_small_block_beside_a_large_one():
    """The least scale of a block is 2^-6 of the tensor's, the range within a tensor ends there."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1] = 2688.0, 0.005
    coded = quantize_nvfp4(x)
    assert decode(coded.scales, E4M3)[1, 0] == 2.0**-6
    assert (coded.dequantize()[1] == 2.0**-7).all()  # half of the scale, the least step, is nearest
    x[1] = 0.003
    assert (quantize_nvfp4(x).dequantize()[1] == 0).all()


def test_nf4_by_hand():
    levels = torch.tensor(NF4_LEVELS)
    x = torch.zeros(1, 64)
    x[0, :16] = levels * 3
    coded = quantize_nf4(x)
    assert coded.scales.tolist() == [[3.0]] and coded.codes[0, :16].tolist() == list(range(16))
    assert torch.equal(coded.dequantize()[0, :16], levels * 3)
    between = (levels[:-1] + levels[1:]) / 2
    tie = torch.cat([between, torch.ones(1)])[None]
    assert quantize_nf4(tie).codes[0, :15].tolist() == list(range(15))  # of two equally near levels the lower
    assert coded.bits_per_value() == 4 + 32 / 64


def test_nf4_levels_split_a_normal_distribution():
    """Eight quantiles below zero, seven above, and the largest taken as 1 (QLoRA, section 3)."""
    outer = 1 - (1 / 32 + 1 / 30) / 2

    def quantiles(n):
        return torch.special.ndtri(torch.linspace(outer, 0.5, n, dtype=torch.float64))

    made = torch.cat([-quantiles(8), quantiles(9)[:-1]]).sort().values / quantiles(9)[0]
    torch.testing.assert_close(torch.tensor(NF4_LEVELS).double(), made, atol=2e-7, rtol=0)


@pytest.mark.parametrize("kind", MAKE)
def test_blocks_of_any_length_equal_the_blocks_alone(kind):
    torch.manual_seed(0)
    x = torch.randn(3, 77) * torch.tensor([1.0, 1e-3, 50.0])[:, None]
    x[0, 40:] = 0
    for block in (8, 32, 77, 1000):
        how = {"two_levels": False} if kind == "nvfp4" else {}
        coded = MAKE[kind](x, block=block, **how)
        size = min(block, 77)
        assert coded.scales.shape == (3, -(-77 // size)) and coded.codes.shape == x.shape
        alone = [MAKE[kind](part, block=block, **how).dequantize() for part in x.split(block, 1)]
        assert torch.equal(coded.dequantize(), torch.cat(alone, 1))
        assert int(coded.codes.max()) < 16 and coded.dequantize().isfinite().all()


@pytest.mark.parametrize("kind", MAKE)
def test_zeros_stay_zeros(kind):
    coded = MAKE[kind](torch.zeros(2, 64))
    assert (coded.dequantize() == 0).all() and coded.dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: quantize_mxfp4(torch.ones(4), "round"),
            "scaling is 'round', it must be one of floor, even, fit, ceil",
        ),
        (lambda: quantize_nf4(torch.ones(4), block=0), "block is 0, it must be at least 1"),
        (lambda: quantize_nf4(torch.ones(4, dtype=torch.long)), "x has dtype torch.int64"),
        (lambda: quantize_nvfp4(torch.ones(())), r"x has shape \(\), blocks need a last axis"),
        (lambda: quantize_nf4(torch.ones(2, 0)), r"x has shape \(2, 0\)"),
        (lambda: quantize_nf4(torch.tensor([INF])), "infinity or NaN, nf4 has no code"),
        (lambda: quantize_nvfp4(torch.tensor([NAN])), "infinity or NaN, nvfp4 has no code"),
        (lambda: round_trip(torch.ones(3), "int5"), "kind is 'int5', it must be one of fp32, bf16"),
        (lambda: round_trip(torch.ones(3), "int4", 0), "group_size is 0"),
        (lambda: round_trip(torch.tensor([NAN]), "fp16"), "infinity or NaN, fp16 takes finite values here"),
        (lambda: round_trip(torch.full((4,), 1e12), "int8"), "it is kept in fp16, which ends at 65,504"),
        (lambda: RoundedLinear(nn.Linear(4, 4), inputs="fp9"), "inputs is 'fp9'"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# -- values as a format keeps them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 16, 100])
def test_round_trips_are_near_and_twice_is_once(kind, group_size):
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    once = round_trip(x, kind, group_size)
    assert once.shape == x.shape and once.dtype == torch.float32 and (once[1] == 0).all()
    least = {"fp32": INF, "bf16": 50, "fp16": 68, "int8": 38, "fp8 e4m3": 29, "fp8 e5m2": 23}.get(kind, 14)
    assert signal_to_noise(x, once) >= least  # dB; a step more or less of one bit is 6
    if kind in ("fp32", "bf16", "fp16"):
        assert torch.equal(round_trip(once, kind, group_size), once)
    coded = to_codes(x, kind, group_size)
    assert torch.equal(coded.dequantize(), once) and coded.codes.shape == x.shape


def test_bits_count_the_scales():
    x = torch.randn(4, 128)
    found = {kind: to_codes(x, kind).bits_per_value() for kind in KINDS}
    assert found == {
        "fp32": 32, "bf16": 16, "fp16": 16, "fp8 e5m2": 8.125, "fp8 e4m3": 8.125, "int8": 8.125, "int4": 4.125,
        "nf4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5 + 32 / 512,
    }  # fmt: skip
    assert to_codes(x, "int4", 32).bits_per_value() == to_codes(x, "nf4", 64).bits_per_value() == 4.5


def test_fp8_uses_its_whole_range():
    x = torch.tensor([[1.0, 0.5, -0.25, 1e-3]])
    coded = to_codes(x, "fp8 e4m3")
    assert decode(coded.codes, E4M3)[0, 0] == 448
    torch.testing.assert_close(coded.dequantize(), x, rtol=2**-4, atol=0)  # half a step of 3 bits


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8 e4m3"])
def test_codes_are_those_of_the_scale_that_is_kept(kind):
    """What fp16 cannot keep of a small scale is no reason to come back larger, or further off than half a step."""
    tiny = torch.tensor([[1e-9, -5e-10, 0.0, 2e-10]])
    assert (round_trip(tiny, kind).abs() <= 2 * tiny.abs()).all()
    if kind.startswith("int"):
        assert (round_trip(tiny, kind) == 0).all()  # less than half of the least step, 2^-24
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-2
        coded = to_codes(x, kind)
        inside = x.abs() <= coded.scale * (2 ** (coded.bits - 1) - 1)
        assert ((coded.dequantize() - x).abs() <= coded.scale / 2 * (1 + 1e-5))[inside].all()
        assert torch.equal(coded.scale, coded.scale.half().float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (2, 0)])
def test_no_last_axis_is_named(kind, shape):
    with pytest.raises(ValueError, match="last axis with values"):
        to_codes(torch.ones(shape), kind)


def test_nf4_uses_its_outer_levels_less():
    """Quantiles of the values, scaled by the largest of a block: the ends are rarer than the middle."""
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    used = quantize_nf4(x).codes.flatten().bincount(minlength=16)
    assert used.argmax() in (6, 7) and set(used.argsort()[:2].tolist()) == {0, 15} and used.max() > 3 * used.min()


def test_on_heavy_tails_nf4_loses_by_its_block_and_not_by_its_levels():
    generator = torch.Generator().manual_seed(0)
    chi = torch.randn(3, 256, 256, generator=generator).square().sum(0)
    x = torch.randn(256, 256, generator=generator) / (chi / 3).sqrt()
    alike = [signal_to_noise(x, MAKE[kind](x, block=32).dequantize()) for kind in ("nf4", "nvfp4", "mxfp4")]
    assert alike[0] > alike[1] > alike[2]
    assert signal_to_noise(x, quantize_nf4(x, block=128).dequantize()) < alike[2]


def test_signal_to_noise():
    x = torch.tensor([3.0, 4.0])
    assert signal_to_noise(x, torch.tensor([3.0, 4.5])) == pytest.approx(20)  # 25 over 0.25
    assert signal_to_noise(x, x) == INF


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPTlite(GPTConfig(23, 16, n_layers=3, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)).eval()


def test_a_rounded_layer_computes_with_rounded_values(model):
    layer = model.blocks[0].ffwd.net[0]
    x = torch.randn(7, 20)
    rounded = RoundedLinear(layer, "int4", "fp8 e4m3", 8)
    right = round_trip(x, "fp8 e4m3") @ round_trip(layer.weight, "int4", 8).T + layer.bias
    torch.testing.assert_close(rounded(x), right)
    assert rounded.bits_per_weight == 4 + 16 * 3 / 20
    assert (rounded.out_features, rounded.in_features) == (80, 20)
    assert rounded(x.bfloat16()).dtype == torch.bfloat16
    no_bias = RoundedLinear(nn.Linear(20, 3, bias=False), "fp32")
    torch.testing.assert_close(no_bias(x), x @ no_bias.weight.T)


def test_a_rows_result_does_not_depend_on_the_others(model):
    x = torch.randn(5, 20)
    rounded = RoundedLinear(model.blocks[0].ffwd.net[0], "int8", "int8")
    torch.testing.assert_close(rounded(x)[2:3], rounded(x[2:3]))


def test_a_whole_model_in_fp32_is_the_model(model):
    tokens = torch.randint(23, (2, 9))
    other = replace_linear(copy.deepcopy(model), lambda name, layer: RoundedLinear(layer, "fp32", "fp32"))
    assert all(isinstance(layer, RoundedLinear) for layer in linear_layers(other).values())
    torch.testing.assert_close(other(tokens), model(tokens))
    worse = replace_linear(copy.deepcopy(model), lambda name, layer: RoundedLinear(layer, "int4"))
    assert not torch.allclose(worse(tokens), model(tokens), atol=1e-3)


def test_example_tensors(model):
    tokens = torch.randint(23, (2, 9))
    found = example_tensors(model, tokens, "blocks.1.ffwd.net.2", seed=3)
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "normal": (1024, 256), "heavy-tailed": (1024, 256), "weights": (20, 80), "activations": (18, 80),
    }  # fmt: skip
    assert float(found["normal"].std()) == pytest.approx(1, abs=0.01)
    assert found["heavy-tailed"].abs().max() > 3 * found["normal"].abs().max()
    assert torch.equal(found["normal"], example_tensors(model, tokens, seed=3)["normal"])
    assert (found["activations"] >= 0).all()  # after ReLU
    with pytest.raises(ValueError, match="the model has no such linear layer"):
        example_tensors(model, tokens, "blocks.9")


def test_scalings_are_those_that_are_listed():
    assert SCALINGS == ("floor", "even", "fit", "ceil") and E2M1.largest == 6
