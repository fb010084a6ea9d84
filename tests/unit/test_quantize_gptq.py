"""GPTQ gives what the explicit inverse gives, its order is undone, and it never errs more than plain rounding."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptlite.config import GPTConfig
from gptlite.layers import linear_layers
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.gptq import better_rows, gptq, gptq_model, input_hessian, output_errors
from gptlite.quantize.rtn import Grid

CONFIG = GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3)


def layer(d_out: int = 6, d_in: int = 20, n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated inputs, some of them much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_out, d_in, generator=generator)
    mix = torch.randn(d_in, d_in, generator=generator) + 0.5
    inputs = torch.randn(n, d_in, generator=generator) @ mix * torch.linspace(0.2, 3, d_in)
    return weight, input_hessian(inputs)


def by_inverse(weight: Tensor, hessian: Tensor, grid: Grid, damping: float, order: list[int]) -> Tensor:
    """Optimal brain quantisation in a fixed order, with the inverse of what is left made anew in every step, in fp64.

    The scale of a group is made when the first of its columns comes up, as in the paper.
    """
    W = weight.double().clone()
    H = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian)).double()
    d_in = W.shape[1]
    group = min(grid.group_size or d_in, d_in)
    stored, left, grids = torch.zeros_like(W), list(order), {}
    one = Grid(grid.bits, None, grid.symmetric, grid.clip)
    for column in order:
        g = column // group
        if g not in grids:
            grids[g] = one.of(W[:, g * group : (g + 1) * group].float())
        scale, zero = grids[g][0][:, 0].double(), None if grids[g][1] is None else grids[g][1][:, 0].double()
        stored[:, column] = grid.values(grid.nearest(W[:, column], scale, zero), scale, zero)
        inverse = torch.linalg.inv(H[left][:, left])
        at = left.index(column)
        off = (W[:, column] - stored[:, column]) / inverse[at, at]
        W[:, left] -= off[:, None] * inverse[at]
        left.remove(column)
    return stored


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    "grid", [Grid(4, None), Grid(3, 7), Grid(2, 5, symmetric=True), Grid(3, 8, clip=True), Grid(2, 64)]
)
def test_it_is_optimal_brain_quantisation_in_a_fixed_order(grid: Grid, act_order: bool) -> None:
    weight, hessian = layer()
    order = hessian.diagonal().argsort(descending=True).tolist() if act_order else list(range(20))
    expected = by_inverse(weight, hessian, grid, 0.01, order)
    found = gptq(weight, hessian, grid, 0.01, act_order, block=6)
    torch.testing.assert_close(found.dequantize().double(), expected, rtol=0, atol=1e-6)  # scales pass through fp32


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("block", [1, 3, 20, 100])
def test_the_block_size_changes_nothing(block: int, act_order: bool) -> None:
    weight, hessian = layer(seed=1)
    grid = Grid(3, 7)
    reference = gptq(weight, hessian, grid, act_order=act_order, block=7)
    assert torch.equal(gptq(weight, hessian, grid, act_order=act_order, block=block).codes, reference.codes)


def test_groups_take_their_scale_from_the_updated_weights() -> None:
    weight, hessian = layer()
    coded = gptq(weight, hessian, Grid(3, 5))
    plain = Grid(3, 5).codes(weight)
    assert torch.equal(coded.scale[:, 0], plain.scale[:, 0])  # nothing was rounded before the first group
    assert not torch.isclose(coded.scale[:, 1:], plain.scale[:, 1:], rtol=1e-3).all(0).any()


def test_act_order_is_undone_in_the_stored_weight() -> None:
    """With inputs that do not go together no error is passed on: any order gives plain rounding, column by column."""
    torch.manual_seed(2)
    weight, hessian = torch.randn(4, 9), torch.diag(torch.tensor([1.0, 9, 3, 7, 2, 8, 5, 4, 6])).double()
    for act_order in (False, True):
        coded = gptq(weight, hessian, Grid(4, 3), act_order=act_order)
        assert torch.equal(coded.codes, Grid(4, 3).codes(weight).codes)


def test_a_column_that_is_always_zero_is_rounded_plainly() -> None:
    weight, hessian = layer()
    hessian[3], hessian[:, 3] = 0, 0
    coded = gptq(weight, hessian, Grid(8, None))
    assert coded.dequantize().isfinite().all()
    assert ((coded.dequantize() - weight).abs()[:, 3] <= 0.51 * coded.scale[:, 0]).all()
    nothing = gptq(weight, torch.zeros_like(hessian), Grid(8, None))
    torch.testing.assert_close(nothing.dequantize(), Grid(8, None).codes(weight).dequantize())


@pytest.mark.parametrize("seed", range(12))
def test_brute_force_on_tiny_layers(seed: int) -> None:
    """All codes of a row of five, 3 levels each: what is stored lies between the best of all and plain rounding."""
    weight, hessian = layer(3, 5, 40, seed)
    grid = Grid(2, None, symmetric=True)
    plain = grid.codes(weight)
    choices = torch.tensor(list(itertools.product([-1.0, 0.0, 1.0], repeat=5)))  # [243, 5]
    stored, _ = better_rows(weight, hessian, gptq(weight, hessian, grid), plain)
    for row in range(3):
        all_errors = output_errors(weight[row].expand(243, 5), choices * plain.scale[row], hessian)
        mine = output_errors(weight, stored.dequantize(), hessian)[row]
        nearest = output_errors(weight, plain.dequantize(), hessian)[row]
        if torch.equal(stored.scale[row], plain.scale[row]):
            assert all_errors.min() <= mine + 1e-12
        assert mine <= nearest
    assert (gptq(weight, hessian, grid).scale == plain.scale).all()  # one group: nothing is updated before its scale


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4), st.sampled_from([None, 3, 8]), st.booleans(), st.booleans(), st.integers(0, 1000)
)  # fmt: skip
def test_no_row_is_ever_worse_than_plain_rounding(bits, group, symmetric, act_order, seed) -> None:
    weight, hessian = layer(8, 13, 30, seed)
    grid = Grid(bits, group, symmetric)
    plain, coded = grid.codes(weight), gptq(weight, hessian, grid, act_order=act_order)
    stored, n = better_rows(weight, hessian, coded, plain)
    mine, nearest, alone = (
        output_errors(weight, one.dequantize(torch.float64), hessian) for one in (stored, plain, coded)
    )
    assert (mine <= nearest).all() and (mine <= alone).all()
    assert n == int((alone > nearest).sum())


def test_errors_are_those_of_the_outputs() -> None:
    torch.manual_seed(3)
    weight, inputs = torch.randn(4, 7).double(), torch.randn(50, 7).double()
    other = weight + 0.1 * torch.randn(4, 7)
    expected = (inputs @ (weight - other).T).square().mean(0)
    torch.testing.assert_close(output_errors(weight, other, input_hessian(inputs)), expected)


def test_a_model_is_stored_block_by_block_on_what_the_stored_ones_put_out() -> None:
    torch.manual_seed(0)
    model = GPTlite(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    batches = [torch.randint(23, (3, 16)), torch.randint(23, (1, 9))]
    weights = {name: one.weight.clone() for name, one in linear_layers(model).items()}
    report = gptq_model(model, batches, Grid(3, 8))
    assert [row["layer"] for row in report] == list(weights)
    assert all(isinstance(one, CodedLinear) for one in linear_layers(model).values())
    assert all(0 <= row["stored"] <= row["nearest"] for row in report)
    assert sum(row["stored"] for row in report) < 0.8 * sum(row["nearest"] for row in report)
    # block 1 was calibrated on what the stored block 0 puts out
    name, seen = "blocks.1.mha.query_proj", []
    hook = linear_layers(model)[name].register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for tokens in batches:
            model(tokens)
    hook.remove()
    grid, hessian = Grid(3, 8), input_hessian(torch.cat(seen))
    expected, _ = better_rows(
        weights[name], hessian, gptq(weights[name], hessian, grid, act_order=True), grid.codes(weights[name])
    )
    assert torch.equal(linear_layers(model)[name].coded.codes, expected.codes)


def test_inputs_in_16_bits_are_squared_in_32() -> None:
    hessian = input_hessian(torch.full((100, 3), 300.0, dtype=torch.float16))
    assert hessian.tolist() == [[90_000.0] * 3] * 3  # above the largest number of fp16


def test_a_layer_that_sees_only_zeros_has_no_error() -> None:
    torch.manual_seed(4)
    model = GPTlite(CONFIG).eval()
    model.blocks[0].ffwd.net[0].bias.data.fill_(-1e4)  # nothing passes the ReLU
    report = {row["layer"]: row for row in gptq_model(model, [torch.randint(23, (2, 16))], Grid(3, 7))}
    dead = report["blocks.0.ffwd.net.2"]
    assert dead["nearest"] == dead["stored"] == 0 and report["blocks.1.ffwd.net.2"]["stored"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hessian": torch.eye(3)}, "hessian has shape"),
        ({"hessian": torch.full((20, 20), float("nan"))}, "hessian holds an infinity or NaN"),
        ({"damping": 0.0}, "damping is 0.0, it must be above 0"),
        ({"block": 0}, "block is 0, it must be at least 1"),
    ],
)
def test_it_refuses_what_makes_no_sense(changes, message: str) -> None:
    weight, hessian = layer()
    with pytest.raises(ValueError, match=message):
        gptq(weight, **{"hessian": hessian, "grid": Grid(4), **changes})
