"""Training sees the rounded weights, gradients pass the rounding, and what is stored is what was trained."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptlite.config import GPTConfig
from gptlite.data import training_batch
from gptlite.layers import linear_layers, replace_linear
from gptlite.measure import validation_loss
from gptlite.model import GPTlite
from gptlite.quantize.coded import CodedLinear
from gptlite.quantize.qat import RoundingLinear, round_straight, train_rounded
from gptlite.quantize.rtn import Grid, round_to_nearest
from gptlite.train import TrainSettings, make_optimizers

CONFIG = GPTConfig(11, 16, n_layers=1, d_model=20, n_heads=3, d_head=8)
SETTINGS = TrainSettings(30, 8, 0.01, "adamw", "fp32", 3, 1.0, 0.0, 1, 10)


def periodic_text(n: int = 2000) -> torch.Tensor:
    return torch.arange(n) % 7 + (torch.arange(n) // 50) % 3


def test_rounding_goes_straight_through() -> None:
    x = torch.tensor([0.2, 0.5, 1.5, -0.7], requires_grad=True)
    y = round_straight(x)
    assert y.tolist() == [0.0, 0.0, 2.0, -1.0]
    (y * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("grid", [Grid(4, 8), Grid(2, 7, clip=True), Grid(3, None, symmetric=True)])
def test_it_begins_at_plain_rounding_and_is_stored_as_it_computes(grid: Grid) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(20, 9), torch.randn(4, 20)
    layer = RoundingLinear(linear, grid)
    expected = grid.codes(linear.weight)
    # scales come back through a logarithm, so that a weight halfway between two codes may fall the other way
    agree = (layer.coded().codes == expected.codes).float().mean()
    assert agree > 0.98
    torch.testing.assert_close(layer.coded().scale, expected.scale, rtol=1e-3, atol=0)
    with torch.no_grad():
        layer.log_scale += 0.3 * torch.randn_like(layer.log_scale)
        layer.weight += 0.1 * torch.randn_like(layer.weight)
    stored = CodedLinear(layer.coded(), layer.bias)
    # the stored scale is the trained one in fp16, so a step may move by a part in 2,048 and flip what lies halfway
    off = (stored.dequantize() - layer.rounded()).abs() / layer._wide(layer.log_scale.exp().squeeze(-1))
    assert (off > 0.1).float().mean() < 0.02 and off.median() < 0.01
    assert layer(x).shape == (4, 9)


def test_gradients_reach_weights_inside_the_range_and_scales_beyond_it() -> None:
    linear = nn.Linear(4, 1, bias=False)
    linear.weight.data = torch.tensor([[-1.0, 1.0, 0.4, 0.3]])
    layer = RoundingLinear(linear, Grid(2, None, symmetric=True))
    with torch.no_grad():
        layer.log_scale.fill_(torch.log(torch.tensor(0.5)).item())  # codes -1, 0, 1 reach to 0.5: two are outside
    layer(torch.tensor([[1.0, 10.0, 100.0, 1000.0]])).sum().backward()
    assert layer.weight.grad.tolist() == [[0.0, 0.0, 100.0, 1000.0]]
    # d (code s) / d log s = code s - w inside the range, and code s outside it
    expected = 1 * -0.5 + 10 * 0.5 + 100 * (0.5 - 0.4) + 1000 * (0.5 - 0.3)
    assert layer.log_scale.grad.item() == pytest.approx(expected, rel=1e-5)


def test_scales_are_no_matrices_to_the_optimiser() -> None:
    model = GPTlite(CONFIG)
    replace_linear(model, lambda name, layer: RoundingLinear(layer, Grid(2, 8)))
    muon, adamw = make_optimizers(model, TrainSettings(1))
    shapes = [p.shape for group in adamw.param_groups for p in group["params"]]
    assert torch.Size((24, 3, 1)) in shapes  # d_out, groups of 8 in 20, and the third axis
    assert all(p.dim() == 2 and p.shape[1] in (20, 24, 80) for group in muon.param_groups for p in group["params"])


def trained() -> GPTlite:
    """A small model that has learned the periodic text."""
    torch.manual_seed(0)
    model = GPTlite(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(80):
        x, y = training_batch(periodic_text(), step, 8, 16, 0)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_training_wins_back_what_rounding_lost_and_teachers_stay_as_they_are() -> None:
    model, grid, text = trained(), Grid(2, None, symmetric=True), periodic_text()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    plain = validation_loss(model, text)
    rounded = validation_loss(round_to_nearest(copy.deepcopy(model), grid), text)
    student = copy.deepcopy(model)
    curve = train_rounded(student, text, SETTINGS, grid, model, text)
    after = validation_loss(student, text)
    assert plain < after < rounded - 0.5 * (rounded - plain)
    assert all(isinstance(layer, CodedLinear) for layer in linear_layers(student).values())
    assert not student.training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert [row[0] for row in curve] == [0, 1280, 2560, 3840]
    assert curve[0][1] == pytest.approx(rounded, abs=0.05) and curve[-1][2] == pytest.approx(after, abs=0.05)
