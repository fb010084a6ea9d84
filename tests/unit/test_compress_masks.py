"""Masks over single weights have the exact count, in the right direction; and the methods that choose them."""

import pytest
import torch

import gptlite
from gptlite.compress.importance import calibration_batches
from gptlite.compress.masks import mask_pattern, mask_smallest, wanda_scores
from gptlite.compress.sparsify import METHODS, sparsify, weight_gradients, zeros
from gptlite.config import GPTConfig
from gptlite.data import load_corpus
from gptlite.layers import calibrate, linear_layers
from gptlite.measure import validation_loss
from gptlite.model import GPTlite

BATCHES = list(torch.randint(23, (4, 2, 14), generator=torch.Generator().manual_seed(2)))


def make_model(d_ff: int = 30) -> GPTlite:
    """Two blocks with inputs of 18 and 30 to a layer, which 4 does not divide."""
    torch.manual_seed(1)
    model = GPTlite(GPTConfig(23, 16, n_layers=2, d_model=18, n_heads=3, d_head=6, d_ff=d_ff)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 1 / 3, 0.5, 0.87, 1.0])
@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (1, 3), (3, 1)])
def test_a_mask_has_the_exact_count_ties_or_not(shape: tuple[int, int], sparsity: float) -> None:
    for scores in (torch.rand(shape), torch.ones(shape), torch.zeros(shape)):
        whole, rows = mask_smallest(scores, sparsity), mask_smallest(scores, sparsity, per_row=True)
        assert int((~whole).sum()) == round(sparsity * scores.numel())
        assert (~rows).sum(1).tolist() == [round(sparsity * shape[1])] * shape[0]


def test_what_goes_scores_no_more_than_what_stays() -> None:
    scores = torch.rand(6, 11, generator=torch.Generator().manual_seed(0))
    keep = mask_smallest(scores, 0.4)
    assert scores[~keep].max() <= scores[keep].min()
    keep = mask_smallest(scores, 0.4, per_row=True)
    for row, kept in zip(scores, keep):
        assert row[~kept].max() <= row[kept].min()


def test_a_pattern_counts_along_the_inputs() -> None:
    scores = torch.tensor([[1.0, 2, 3, 4, 8, 7, 6, 5], [4, 1, 3, 2, 1, 1, 9, 9]])
    assert mask_pattern(scores).int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (4, 4), (1, 1)])
@pytest.mark.parametrize("d_in", [8, 9, 10, 11, 3])
def test_a_pattern_keeps_n_of_each_m_and_of_a_short_group_what_fits(n: int, m: int, d_in: int) -> None:
    for scores in (torch.randn(5, d_in), torch.zeros(5, d_in)):
        keep = mask_pattern(scores, n, m)
        for begin in range(0, d_in, m):
            group = keep[:, begin : begin + m]
            assert group.sum(1).tolist() == [min(n, group.shape[1])] * 5


def test_wanda_weighs_by_the_norm_of_the_input_and_compares_within_a_row() -> None:
    weight = torch.tensor([[3.0, -2.0, 1.0, 0.5], [0.03, -0.02, 0.01, 0.005]])
    inputs = torch.tensor([[1.0, 0.0, 3.0, 8.0], [0.0, 1.0, 4.0, 6.0]])  # norms 1, 1, 5, 10
    scores = wanda_scores(weight, inputs)
    assert torch.allclose(scores, weight.abs() * torch.tensor([1.0, 1.0, 5.0, 10.0]))
    # the small row keeps as many as the large one, and the input with a large norm outweighs a larger weight
    assert mask_smallest(scores, 0.5, per_row=True).int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert mask_smallest(scores, 0.5).int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_each_layer_has_its_share_of_zeros(method: str, pattern: tuple[int, int] | None) -> None:
    model = make_model()
    sparse = sparsify(model, BATCHES, 0.6, method, pattern)
    for name, layer in linear_layers(sparse).items():
        gone = layer.weight == 0
        if pattern:
            d_in = layer.in_features
            expected = d_in - (2 * (d_in // 4) + min(2, d_in % 4))
            assert gone.sum(1).tolist() == [expected] * layer.out_features, name
        else:
            per_row = round(0.6 * layer.in_features) * layer.out_features
            assert int(gone.sum()) == (per_row if method == "wanda" else round(0.6 * gone.numel())), name
        if method == "wanda" and not pattern:
            assert gone.sum(1).tolist() == [round(0.6 * layer.in_features)] * layer.out_features
    count, total = zeros(sparse)
    assert zeros(model)[0] == 0 < count < total
    assert torch.equal(sparse.fc_out.weight, model.fc_out.weight)  # the head stays


@pytest.mark.parametrize("method", METHODS)
def test_no_sparsity_changes_no_bit(method: str) -> None:
    model = make_model()
    same = sparsify(model, BATCHES, 0.0, method)
    assert all(torch.equal(a, b) for a, b in zip(same.state_dict().values(), model.state_dict().values()))


def test_wanda_prunes_later_blocks_for_what_the_pruned_earlier_ones_give() -> None:
    model = make_model()
    sparse = sparsify(model, BATCHES, 0.5, "wanda")
    for at in calibrate(sparse, BATCHES):
        for name, inputs in at.inputs.items():
            if name.endswith(("query_proj", "key_proj", "value_proj")):  # what the block itself does not change
                weight = model.get_submodule(name).weight
                keep = mask_smallest(wanda_scores(weight, inputs), 0.5, per_row=True)
                assert torch.equal(sparse.get_submodule(name).weight != 0, keep), name


def test_gradients_are_root_mean_squares_over_windows() -> None:
    model, name = make_model(), "blocks.0.mha.query_proj"
    windows = torch.cat(BATCHES)
    squares = []
    for window in windows:
        loss = torch.nn.functional.cross_entropy(model(window[None, :-1])[0], window[1:])
        squares.append(torch.autograd.grad(loss, model.get_submodule(name).weight)[0] ** 2)
    expected = torch.stack(squares).mean(0).sqrt()
    assert torch.allclose(weight_gradients(model, BATCHES)[name], expected, rtol=1e-5, atol=1e-8)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_arguments_are_named() -> None:
    model = make_model()
    for sparsity in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="sparsity is"):
            mask_smallest(torch.ones(2, 2), sparsity)
    for n, m in ((0, 4), (5, 4), (1, 0)):
        with pytest.raises(ValueError, match=f"the pattern is {n}:{m}"):
            mask_pattern(torch.ones(2, 8), n, m)
    with pytest.raises(ValueError, match="method is 'luck', it must be one of magnitude"):
        sparsify(model, BATCHES, 0.5, "luck")
    for method in ("wanda", "sparsegpt", "taylor"):
        with pytest.raises(ValueError, match="at least 1"):
            sparsify(model, [], 0.5, method)
    assert zeros(sparsify(model, [], 0.5, "magnitude"))[0] > 0  # looks at none


@pytest.mark.slow
def test_wanda_and_sparsegpt_beat_magnitude_on_the_trained_model_at_half() -> None:
    model, tokenizer = gptlite.load("gptlite")
    corpus = load_corpus()
    batches = calibration_batches(tokenizer.encode(corpus.train[:200_000]), 256, 6)
    watch = tokenizer.encode(corpus.held_out)[: 8 * 256 + 1]
    loss = {
        method: validation_loss(sparsify(model, batches, 0.5, method), watch)
        for method in ("magnitude", "wanda", "sparsegpt")
    }
    assert loss["sparsegpt"] < loss["wanda"] < loss["magnitude"]
    assert loss["magnitude"] - loss["wanda"] > 0.005
    assert loss["wanda"] - loss["sparsegpt"] > 0.02
