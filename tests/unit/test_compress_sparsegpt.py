"""SparseGPT against the exact least squares of its mask, against one removal by hand, and at its ends."""

import pytest
import torch

from gptlite.compress.masks import mask_pattern, mask_smallest
from gptlite.compress.sparsegpt import best_weights, damped, second_moment, sparsegpt, squared_error


def layer(d_out: int = 6, d_in: int = 14, n: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs that go together, so that one can stand in for another."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d_in, d_in, generator=generator, dtype=torch.float64)
    inputs = torch.randn(n, d_in, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(d_out, d_in, generator=generator, dtype=torch.float64), inputs


def masked_error(weight: torch.Tensor, keep: torch.Tensor, moment: torch.Tensor) -> float:
    return squared_error(weight, weight * keep, moment)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_the_update_is_close_to_the_exact_least_squares_and_never_below_it(
    seed: int, pattern: tuple[int, int] | None
) -> None:
    weight, inputs = layer(seed=seed)
    moment = second_moment(inputs)
    new, keep = sparsegpt(weight, moment, 0.5, pattern)
    metric = damped(moment)  # what both of them minimise
    ours, best = squared_error(weight, new, metric), squared_error(weight, best_weights(weight, keep, moment), metric)
    plain = masked_error(weight, keep, metric)
    assert best * (1 - 1e-9) <= ours < plain
    assert ours < 3 * best  # weights to the left no longer move: it cannot be equal


def test_the_error_on_the_inputs_is_below_that_of_magnitude_and_of_its_own_mask_alone() -> None:
    weight, inputs = layer(12, 40, 400)
    moment = second_moment(inputs)
    new, keep = sparsegpt(weight, moment, 0.5, width=8)

    def error(other: torch.Tensor) -> float:
        return float((inputs @ (weight - other).mT).square().sum() / len(inputs))

    assert error(new) == pytest.approx(squared_error(weight, new, moment), rel=1e-9)
    assert error(new) < error(weight * keep)
    assert error(new) < 0.7 * error(weight * mask_smallest(weight.abs(), 0.5))


def test_one_removal_is_the_optimal_brain_surgeon() -> None:
    """With one weight to remove in all, the best is w^2 / [H^-1]_cc, and the update is exact least squares."""
    weight, inputs = layer(1, 5)
    moment = second_moment(inputs)
    inverse = torch.linalg.inv(damped(moment))
    cost = weight[0].square() / inverse.diagonal()
    # the first column sees all the others move: force it to be the cheapest
    scaled = weight.clone()
    scaled[0, 0] *= 0.01 * (cost.min() / cost[0]).sqrt()
    new, keep = sparsegpt(scaled, moment, 1 / 5)
    assert keep[0].tolist() == [False, True, True, True, True]
    by_hand = scaled[0] - scaled[0, 0] / inverse[0, 0] * inverse[0]
    assert torch.allclose(new[0], by_hand, atol=1e-12)
    assert torch.allclose(new, best_weights(scaled, keep, moment), atol=1e-9)
    added = squared_error(scaled, new, damped(moment))
    assert added == pytest.approx(float(scaled[0, 0] ** 2 / inverse[0, 0]), rel=1e-6)


@pytest.mark.parametrize("width", [1, 5, 128])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.37, 0.5, 0.93, 1.0])
def test_the_count_is_exact_whatever_the_width(width: int, sparsity: float) -> None:
    weight, inputs = layer(7, 13)
    new, keep = sparsegpt(weight, second_moment(inputs), sparsity, width=width)
    assert int((~keep).sum()) == round(sparsity * 7 * 13)
    assert torch.equal(new != 0, keep)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_sparsity_returns_the_weights_unchanged(dtype: torch.dtype) -> None:
    weight, inputs = layer()
    weight = weight.to(dtype)
    before = weight.clone()
    new, keep = sparsegpt(weight, second_moment(inputs), 0.0)
    assert torch.equal(new, before)
    assert new.dtype == dtype
    assert keep.all()
    sparsegpt(weight, second_moment(inputs), 0.9)
    assert torch.equal(weight, before)  # what is given stays


@pytest.mark.parametrize("d_in", [8, 13, 3])
@pytest.mark.parametrize("width", [4, 6, 128])
def test_a_pattern_holds_in_every_group(d_in: int, width: int) -> None:
    weight, inputs = layer(5, d_in)
    new, keep = sparsegpt(weight, second_moment(inputs), pattern=(2, 4), width=width)
    for begin in range(0, d_in, 4):
        group = keep[:, begin : begin + 4]
        assert group.sum(1).tolist() == [min(2, group.shape[1])] * 5
    assert torch.equal(new != 0, keep)
    assert squared_error(weight, new, second_moment(inputs)) < masked_error(
        weight, mask_pattern(weight.abs()), second_moment(inputs)
    )


def test_inputs_that_are_always_zero_or_always_equal_stay_finite() -> None:
    weight, inputs = layer()
    inputs[:, 3] = 0
    inputs[:, 5] = inputs[:, 4]
    for given in (inputs, torch.zeros_like(inputs)):
        new, keep = sparsegpt(weight, second_moment(given), 0.5)
        assert new.isfinite().all()
        assert int(keep.sum()) == 42
    assert torch.equal(new[keep], weight[keep])  # nothing is known: nothing moves


def test_bad_arguments_are_named() -> None:
    weight, inputs = layer()
    with pytest.raises(ValueError, match=r"moment has shape \(3, 3\), a layer of 14 inputs needs \(14, 14\)"):
        sparsegpt(weight, torch.eye(3), 0.5)
    for sparsity in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"sparsity is {sparsity}"):
            sparsegpt(weight, second_moment(inputs), sparsity)
    for given in (inputs[:0], inputs * torch.nan):
        with pytest.raises(ValueError, match="moment holds an infinity or NaN"):
            sparsegpt(weight, second_moment(given), 0.5)
    for width in (0, -1):
        with pytest.raises(ValueError, match=f"width is {width}, it must be at least 1"):
            sparsegpt(weight, second_moment(inputs), 0.5, width=width)
    for n, m in ((0, 0), (5, 4)):
        with pytest.raises(ValueError, match=f"the pattern is {n}:{m}"):
            sparsegpt(weight, second_moment(inputs), pattern=(n, m))
