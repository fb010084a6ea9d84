"""Codes of a few bits: packed and back, rounded to the nearest on their grid, and held by a layer in few bytes."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from gptlite.config import GPTConfig
from gptlite.layers import linear_layers
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.linear_quant import quantize_linear
from gptlite.quantize.pack import pack, packed_length, unpack
from gptlite.quantize.rtn import Grid, round_to_nearest

CONFIG = GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)


@pytest.fixture
def model() -> GPTlite:
    torch.manual_seed(0)
    return GPTlite(CONFIG).eval()


# -- packing ------------------------------------------------------------------------------------------------------


def test_packing_by_hand() -> None:
    four = pack(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4)
    assert four.tolist() == [[0x21, 0x0F]]  # the first code in the lowest bits, the row filled up with zero
    three = pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8), 3)
    word = sum(code << (3 * i) for i, code in enumerate([1, 2, 3, 4, 5, 6, 7, 0]))
    assert three.tolist() == [word & 255, word >> 8 & 255, word >> 16]
    assert pack(torch.tensor([3, 0, 2, 1], dtype=torch.uint8), 2).tolist() == [0b01100011]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**31))
def test_packing_and_back_is_the_same(bits: int, n: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (rows, n), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_length(n, bits)) and packed.dtype == torch.uint8
    assert packed_length(n, bits) * 8 < (n + 8) * bits  # less than a word of 8 codes is wasted
    assert torch.equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(torch.zeros(2, dtype=torch.uint8), 9), "bits is 9, it must be 1 to 8"),
        (lambda: pack(torch.tensor([16], dtype=torch.uint8), 4), "a code is 16, 4 bits hold 0 to 15"),
        (lambda: pack(torch.zeros(2), 4), "they must be uint8"),
        (lambda: pack(torch.zeros(0, dtype=torch.uint8), 4), "not empty"),
        (lambda: packed_length(0, 4), "there must be at least 1 code"),
        (lambda: unpack(torch.zeros(3, dtype=torch.uint8), 4, 7), "7 codes of 4 bits take 4"),
    ],
)
def test_packing_refuses_what_makes_no_sense(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- the grid -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 8), (3, 6), (2, 128), (2, 1)])
def test_round_to_nearest_takes_the_nearest_value_of_the_grid(bits: int, group: int | None, symmetric: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 20)  # 8 and 6 do not divide 20
    coded = Grid(bits, group, symmetric).codes(weight)
    size = min(group or 20, 20)
    assert coded.scale.shape == (5, -(-20 // size))
    low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    values = coded.dequantize()
    for row in range(5):
        for column in range(20):
            g = column // size
            zero = 0.0 if coded.zero is None else float(coded.zero[row, g])
            grid = (torch.arange(low, high + 1) - zero) * coded.scale[row, g]
            best = (grid - weight[row, column]).abs().min()
            # two values equally near: fp32 decides, to a part in a million
            assert abs(values[row, column] - weight[row, column]) <= best + 1e-6


def test_scales_are_those_that_fp16_holds_and_zero_stays_zero() -> None:
    torch.manual_seed(2)
    weight = torch.randn(4, 30)
    weight[0] = 0
    weight[1, :3] = 0
    for grid in (Grid(4, 10), Grid(4, 10, symmetric=True), Grid(2, None)):
        coded = grid.codes(weight)
        assert torch.equal(coded.scale.half().float(), coded.scale)
        assert coded.dequantize().isfinite().all()
        assert (coded.dequantize()[weight == 0] == 0).all()


def test_symmetric_codes_stay_within_q() -> None:
    coded = Grid(8, None, symmetric=True).codes(torch.tensor([[-1.0, 0.5, 1.0], [1e-9, 0, -1e-9]]))
    assert coded.codes.tolist()[0] == [-127, 64, 127]
    assert int(coded.codes.min()) >= -127


@example(bits=8, group=1, symmetric=False, seed=6245)  # a scale below fp16's least normal number
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 9), st.booleans(), st.integers(0, 2**31))
def test_the_error_is_at_most_half_a_step(bits: int, group: int, symmetric: bool, seed: int) -> None:
    weight = torch.randn(3, 14, generator=torch.Generator().manual_seed(seed))
    coded = Grid(bits, group, symmetric).codes(weight)
    wide = coded.scale.repeat_interleave(min(group, 14), 1)[:, :14]
    # the scale was rounded to fp16 after the range was taken, by 1 part in 2,048 or, where it is subnormal, by half of
    # fp16's least step of 2^-24; and 2^bits steps add that up
    allowed = wide * (0.5 + 1e-5) + 2**bits * (wide / 2048).clamp(min=2.0**-25)
    assert ((coded.dequantize() - weight).abs() <= allowed).all()


def test_clipping_gives_up_the_ends_for_a_finer_step() -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 128)
    full, clipped = (Grid(2, 64, clip=clip).codes(weight) for clip in (False, True))
    assert (clipped.scale <= full.scale + 1e-6).all() and (clipped.scale < full.scale).float().mean() > 0.9
    errors = [(coded.dequantize() - weight).square().mean() for coded in (full, clipped)]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Grid(1), "bits is 1, it must be 2 to 8"),
        (lambda: Grid(9), "bits is 9"),
        (lambda: Grid(4, 0), "group_size is 0, it must be at least 1"),
        (lambda: Grid(4).codes(torch.full((2, 2), float("nan"))), "infinity or NaN"),
        (lambda: Grid(2, 2, symmetric=True).codes(torch.full((2, 2), 1e6)), "too large: its scale must fit fp16"),
    ],
)
def test_a_grid_refuses_what_makes_no_sense(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- the layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [Grid(8, None, True), Grid(4, 8), Grid(3, 7), Grid(2, 5, True), Grid(4, 128)])
def test_a_layer_holds_the_codes_and_gives_the_product_of_what_they_stand_for(grid: Grid) -> None:
    torch.manual_seed(4)
    linear = nn.Linear(20, 9)
    coded = grid.codes(linear.weight)
    layer = CodedLinear(coded, linear.bias)
    assert torch.equal(layer.dequantize(), coded.dequantize())
    assert torch.equal(layer.coded.codes, coded.codes) and torch.equal(layer.coded.scale, coded.scale)
    x = torch.randn(3, 2, 20)
    torch.testing.assert_close(layer(x), x @ coded.dequantize().T + linear.bias)
    torch.testing.assert_close(layer(x.double()).float(), layer(x))  # in the dtype of the input
    assert "in_features=20, out_features=9" in repr(layer)


def test_bytes_by_hand() -> None:
    layer = CodedLinear(Grid(4, 128).codes(torch.randn(8, 512)))
    # a row: 256 B of codes, 4 scales of 2 B, 4 zero points of half a byte
    assert layer.nbytes == 8 * (256 + 8 + 2)
    assert CodedLinear(Grid(8, None, True).codes(torch.randn(8, 512))).nbytes == 8 * (512 + 2)
    assert CodedLinear(Grid(2, 128, True).codes(torch.randn(8, 512))).nbytes == 8 * (128 + 8)


def test_a_stored_model_computes_with_the_rounded_weights(model: GPTlite) -> None:
    tokens = torch.randint(23, (2, 9))
    grid = Grid(4, 8)
    rounded = GPTlite(CONFIG).eval()
    rounded.load_state_dict(model.state_dict())
    for layer in linear_layers(rounded).values():
        layer.weight.data = grid.codes(layer.weight).dequantize()
    assert round_to_nearest(model, grid) is model
    assert all(isinstance(layer, CodedLinear) for layer in linear_layers(model).values())
    assert type(model.fc_out) is nn.Linear
    torch.testing.assert_close(model(tokens), rounded(tokens))
    round_to_nearest(GPTlite(CONFIG).eval(), grid, head=True)


def test_a_model_that_changes_its_dtype_keeps_its_codes_and_scales(model: GPTlite) -> None:
    round_to_nearest(model, Grid(4, 8))
    before = {name: t.clone() for name, t in model.state_dict().items() if name.endswith((".packed", ".scale"))}
    tokens = torch.randint(23, (1, 9))
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype)
        assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
        assert model.state_dict()["blocks.0.mha.query_proj.scale"].dtype == torch.float16
        assert model(tokens).dtype == dtype


def test_the_codes_must_be_those_of_a_matrix_by_rows() -> None:
    with pytest.raises(ValueError, match="they must be 2 and 1"):
        CodedLinear(quantize_linear(torch.randn(4, 6), 4, axis=0))
    with pytest.raises(ValueError, match="they must be 2 and 1"):
        CodedLinear(quantize_linear(torch.randn(6), 4))
