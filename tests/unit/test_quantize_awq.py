"""AWQ computes the same before rounding, and never chooses a scale that is worse than none."""

import pytest
import torch
from torch import Tensor

from gptlite.config import GPTConfig
from gptlite.layers import linear_layers
from gptlite.model import GPTlite
from gptlite.quantize.awq import N_GRID, apply_scale, awq_model, clip_by_output, folds, scale_model, search_scale
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.gptq import input_hessian, output_errors
from gptlite.quantize.rtn import Grid

SHAPES = {
    "grouped": GPTConfig(23, 16, n_layers=2, d_model=20, n_heads=6, d_head=4, n_kv_heads=3),
    "all heads": GPTConfig(23, 16, n_layers=1, d_model=24, n_heads=4, d_head=5),
    "one": GPTConfig(23, 16, n_layers=1, d_model=12, n_heads=4, d_head=3, n_kv_heads=1),
}


def random_model(shape: str, dtype: torch.dtype = torch.float64) -> GPTlite:
    """A model none of whose biases, gains and weights is zero or one."""
    torch.manual_seed(0)
    model = GPTlite(SHAPES[shape]).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(23, (4, 16)), torch.randint(23, (2, 7))]


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_any_positive_scale_leaves_the_logits_alone(shape: str, batches: list[Tensor]) -> None:
    model = random_model(shape)
    before, weights = model(batches[0]), [layer.weight.clone() for layer in linear_layers(model).values()]
    for block in model.blocks:
        for fold in folds(block):
            n = fold.source.bias.shape[0]
            apply_scale(block, fold, torch.rand(n).double() * 3 + 0.1)
    torch.testing.assert_close(model(batches[0]), before, rtol=0, atol=1e-10)  # fp64, about 100 roundings
    assert not any(torch.equal(new.weight, old) for new, old in zip(linear_layers(model).values(), weights))


@pytest.mark.parametrize("shape", SHAPES)
def test_found_scales_leave_the_logits_alone(shape: str, batches: list[Tensor]) -> None:
    model = random_model(shape)
    with torch.no_grad():
        before = model(batches[0])
        report = scale_model(model, batches, Grid(3, 8))
        torch.testing.assert_close(model(batches[0]), before, rtol=0, atol=1e-10)
    assert any(row["alpha"] > 0 for row in report)


def test_the_search_holds_the_identity_and_is_never_worse(batches: list[Tensor]) -> None:
    model = random_model("grouped", torch.float32)
    report = awq_model(model, batches, Grid(3, 8))
    assert [(row["block"], row["place"]) for row in report] == [
        (b, place) for b in range(2) for place in ("ln1", "values", "ln2", "hidden")
    ]
    assert all(row["stored"] <= row["nearest"] and 0 <= row["alpha"] < 1 for row in report)
    assert all(isinstance(layer, CodedLinear) for layer in linear_layers(model).values())


def test_large_inputs_get_large_weights() -> None:
    """One input is a hundred times the others: the best scale enlarges its column, and the error falls."""
    torch.manual_seed(2)
    weight, inputs = torch.randn(16, 32), torch.randn(200, 32)
    inputs[:, 5] *= 100
    block = random_model("all heads", torch.float32).blocks[0]
    fold = folds(block)[2]
    hessian, grid = input_hessian(inputs), Grid(3, None)
    scale, alpha, errors = search_scale([weight], inputs.abs().mean(0), hessian, grid, fold)
    assert len(errors) == N_GRID and alpha > 0 and scale.argmax() == 5
    nearest = output_errors(weight, grid.codes(weight).dequantize(), hessian).sum()
    assert errors[0] == pytest.approx(float(nearest), rel=1e-4)  # alpha = 0 is plain rounding
    stored = grid.codes(weight * scale).dequantize() / scale
    assert min(errors) == pytest.approx(float(output_errors(weight, stored, hessian).sum()), rel=1e-4)
    assert min(errors) < 0.5 * errors[0]


@pytest.mark.parametrize("group", [None, 7, 16])
def test_clipping_minds_the_inputs_and_is_never_worse(group: int | None) -> None:
    torch.manual_seed(4)
    weight, inputs = torch.randn(8, 32), torch.randn(100, 32)
    inputs[:, :16] *= 0.01  # what is multiplied by next to nothing may be clipped
    weight[:, 3] = 4.0
    grid, hessian = Grid(3, group), input_hessian(inputs)
    clip = clip_by_output(weight, hessian, grid)
    assert clip.shape == grid.codes(weight).scale.shape and (clip <= 1).all() and (clip >= 0.5).all()
    size = group or 32
    for g in range(clip.shape[1]):  # a group's error alone, by the block of H that is its own
        own = slice(g * size, (g + 1) * size)
        errors = [
            output_errors(weight[:, own], coded.dequantize()[:, own], hessian[own, own])
            for coded in (grid.codes(weight), grid.codes(weight, clip))
        ]
        assert (errors[1] <= errors[0] * (1 + 1e-4)).all()
    assert group or (clip < 1).all()  # in a group of both kinds of inputs the large weight is given up


def test_inputs_of_one_size_keep_the_identity() -> None:
    torch.manual_seed(3)
    weight, hessian = torch.randn(8, 16), torch.eye(16).double()
    fold = folds(random_model("all heads", torch.float32).blocks[0])[2]
    scale, alpha, errors = search_scale([weight], torch.ones(16), hessian, Grid(4, None), fold)
    assert alpha == 0 and torch.equal(scale, torch.ones(16)) and len(set(errors)) == 1


def test_a_dead_input_is_no_reason_to_divide_by_zero() -> None:
    weight, magnitude = torch.randn(8, 16), torch.ones(16)
    magnitude[3] = 0
    fold = folds(random_model("all heads", torch.float32).blocks[0])[2]
    scale, _, errors = search_scale([weight], magnitude, torch.eye(16).double(), Grid(2, None), fold)
    assert scale.isfinite().all() and (scale > 0).all() and all(error < float("inf") for error in errors)


def test_a_layer_that_sees_only_zeros_has_no_error(batches: list[Tensor]) -> None:
    model = random_model("grouped", torch.float32)
    model.blocks[0].ffwd.net[0].bias.data.fill_(-1e4)  # nothing passes the ReLU
    report = {(row["block"], row["place"]): row for row in awq_model(model, batches, Grid(3, 8))}
    dead = report[0, "hidden"]
    assert dead["nearest"] == dead["stored"] == dead["alpha"] == 0 and report[1, "hidden"]["stored"] > 0
    assert model(batches[0]).isfinite().all()


def test_scales_of_grouped_values_are_shared_by_the_heads_that_read_them() -> None:
    fold = folds(random_model("grouped").blocks[0])[1]  # 6 heads of 4 over 3 KV heads
    scale = torch.arange(12.0)
    wide = fold.spread(scale)
    assert wide.tolist() == [*range(4), *range(4), *range(4, 8), *range(4, 8), *range(8, 12), *range(8, 12)]
    assert torch.equal(fold.shared(wide), scale)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    block = random_model("grouped").blocks[0]
    with pytest.raises(ValueError, match="the least scale is 0, all must be positive"):
        apply_scale(block, folds(block)[0], torch.zeros(20).double())
