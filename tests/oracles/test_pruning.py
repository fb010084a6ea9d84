"""Pruning against torch.nn.utils.prune, numpy's least squares over all masks, and the 2:4 storage by hand."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch.nn.utils import prune as theirs

from gptlite.compress.masks import mask_pattern, mask_smallest
from gptlite.compress.sparsegpt import DAMPING, best_weights, second_moment, sparsegpt
from gptlite.compress.sparsify import sparsify
from gptlite.layers import linear_layers


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.9])
def test_magnitude_masks_are_torchs(sparsity: float, random_model) -> None:
    model = random_model()
    ours = linear_layers(sparsify(model, [], sparsity, "magnitude"))
    for name, layer in linear_layers(model).items():
        theirs.l1_unstructured(layer, "weight", round(sparsity * layer.weight.numel()))
        assert torch.equal(ours[name].weight, layer.weight), name


@pytest.mark.parametrize("sparsity", [0.3, 0.5])
def test_masks_by_any_score_are_torchs(sparsity: float) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(13, 9)
    scores = torch.rand(9, 13)
    theirs.l1_unstructured(layer, "weight", round(sparsity * 9 * 13), importance_scores=scores)
    assert torch.equal(mask_smallest(scores, sparsity), layer.weight_mask.bool())


def layer(d_out: int, d_in: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(d_out)
    inputs = generator.normal(size=(60, d_in)) @ generator.normal(size=(d_in, d_in))
    return generator.normal(size=(d_out, d_in)), inputs


def least_squares(row: np.ndarray, kept: list[int], inputs: np.ndarray) -> tuple[np.ndarray, float]:
    """By numpy's solver on the inputs themselves, with the damping as further rows."""
    damping = DAMPING * np.square(inputs).mean(0).mean()
    rows = np.vstack([inputs, np.sqrt(damping * len(inputs)) * np.eye(len(row))])
    found, *_ = np.linalg.lstsq(rows[:, kept], rows @ row, rcond=None)
    new = np.zeros_like(row)
    new[kept] = found
    return new, float(np.square(rows @ (row - new)).sum() / len(inputs))


def test_the_exact_update_is_least_squares_on_the_inputs() -> None:
    weight, inputs = layer(4, 7)
    keep = np.random.default_rng(0).random((4, 7)) < 0.6
    keep[:, 0] = True
    ours = best_weights(*(torch.from_numpy(x) for x in (weight, keep)), second_moment(torch.from_numpy(inputs)))
    for row, kept, mine in zip(weight, keep, ours):
        expected, _ = least_squares(row, list(np.flatnonzero(kept)), inputs)
        assert np.allclose(mine.numpy(), expected, atol=1e-9)


def test_sparsegpt_among_all_masks_with_their_exact_updates() -> None:
    """One row of 8 inputs has 70 masks of 4. None beats the best of them; ours is in the better half, near its own."""
    near = []
    for d_out in range(1, 9):
        weight, inputs = layer(d_out, 8)
        row = weight[-1:]
        new, keep = sparsegpt(torch.from_numpy(row), second_moment(torch.from_numpy(inputs)), 0.5)
        errors = {kept: least_squares(row[0], list(kept), inputs)[1] for kept in combinations(range(8), 4)}
        change = (row - new.numpy())[0]
        damping = DAMPING * np.square(inputs).mean(0).mean()
        ours = float(np.square(inputs @ change).mean() + damping * np.square(change).sum())
        own = errors[tuple(np.flatnonzero(keep[0].numpy()))]
        assert min(errors.values()) <= own <= ours * (1 + 1e-9)
        assert ours < np.median(list(errors.values()))
        near.append(ours / own)
    assert np.median(near) < 1.5


@pytest.mark.parametrize("d_in", [8, 64])
def test_a_2_4_pattern_is_what_semi_structured_storage_takes(d_in: int) -> None:
    """Along the inputs, each four hold at most two, so that half the values and two bits for each place hold all."""
    torch.manual_seed(0)
    weight = torch.randn(6, d_in)
    sparse = weight * mask_pattern(weight.abs())
    groups = sparse.view(6, d_in // 4, 4)
    places = groups.abs().topk(2, dim=-1).indices  # two numbers from 0 to 3 for each group
    values = groups.gather(-1, places)
    rebuilt = torch.zeros_like(groups).scatter(-1, places, values).view(6, d_in)
    assert torch.equal(rebuilt, sparse)
    assert values.numel() == weight.numel() // 2
    dropped = (weight - sparse).view(6, -1, 4).abs().amax(-1)
    kept_least = values.abs().amin(-1)
    assert (dropped <= kept_least).all()
