"""Sampling against transformers' logits warpers, and draws against their distribution by a chi-square test."""

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import gptlite
from gptlite.config import GPTConfig
from gptlite.model import GPTlite
from gptlite.sampling import SamplingParams, probabilities, sample

# 99.9 % points of the chi-square distribution, by degrees of freedom (a printed table)
CRITICAL = {2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322, 8: 26.124, 9: 27.877, 11: 31.264}


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution [B, V] that transformers samples from: temperature, then top-k, then top-p."""
    if params.temperature != 1:
        logits = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k is not None:
        logits = TopKLogitsWarper(params.top_k)(None, logits)
    if params.top_p < 1:
        logits = TopPLogitsWarper(params.top_p)(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("temperature", [0.05, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 20, 66, 1000])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_equals_the_warpers(temperature: float, top_k: int | None, top_p: float) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    logits = torch.randn(64, 67, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    ours, theirs = probabilities(logits, params), warped(logits, params)
    assert torch.equal(ours > 0, theirs > 0), "the same tokens can come"
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def test_a_row_of_a_mixed_batch_equals_the_row_alone() -> None:
    logits = torch.randn(5, 67, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    rows = [
        SamplingParams(0.0),
        SamplingParams(0.5, top_k=3),
        SamplingParams(2.0, top_p=0.6),
        SamplingParams(1.5, top_k=10, top_p=0.6),
        SamplingParams(0.0, top_k=4, top_p=0.2),
    ]
    ours = probabilities(logits, rows)
    for i, params in enumerate(rows):
        if params.temperature == 0:
            want = torch.nn.functional.one_hot(logits[i].argmax(), 67).double()
        else:
            want = warped(logits[i : i + 1], params)[0]
        torch.testing.assert_close(ours[i], want, atol=1e-12, rtol=1e-9)


def test_ties_at_the_border_of_top_k_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 6])
    params = SamplingParams(top_k=2)
    ours, theirs = probabilities(logits, params), warped(logits, params)
    torch.testing.assert_close(ours, theirs)
    assert (ours > 0).tolist() == [[False, True, True, True, True, False], [True] * 6]


def test_ties_at_the_border_of_top_p() -> None:
    """As many tokens stay as in transformers; which of them is a choice, and here the lower numbers stay."""
    logits = torch.zeros(1, 8)
    for top_p, n in ((0.25, 2), (0.26, 3), (0.5, 4), (0.875, 7)):
        params = SamplingParams(top_p=top_p)
        ours, theirs = probabilities(logits, params), warped(logits, params)
        assert (ours > 0).sum() == (theirs > 0).sum() == n
        assert (ours > 0)[0].tolist() == [True] * n + [False] * (8 - n)


@pytest.mark.parametrize(
    ("top_p", "n_kept"),
    [(0.4, 1), (0.5, 1), (0.50001, 2), (0.75, 2), (0.8, 3), (0.875, 3), (0.9, 4), (0.9375, 4), (0.95, 5), (1.0, 6)],
)
def test_top_p_keeps_the_token_that_crosses_and_no_other(top_p: float, n_kept: int) -> None:
    halves = torch.tensor([[0.25, 0.5, 0.0625, 0.125, 0.03125, 0.03125]])  # sums of these are exact
    params = SamplingParams(top_p=top_p)
    ours, theirs = probabilities(halves.log(), params), warped(halves.log(), params)
    assert (ours > 0).sum() == (theirs > 0).sum() == n_kept
    kept = halves.sort(descending=True).values[0, :n_kept]
    torch.testing.assert_close(ours.sort(descending=True).values[0, :n_kept], kept / kept.sum())


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # of all four, 0.5 needs two tokens; of the first two, renormalised to 4/7 and 3/7, it needs one
    assert (probabilities(logits, SamplingParams(top_p=0.5)) > 0).sum() == 2
    params = SamplingParams(top_k=2, top_p=0.5)
    assert (probabilities(logits, params) > 0).sum() == 1
    torch.testing.assert_close(probabilities(logits, params), warped(logits, params))


def chi_square(draws: Tensor, probs: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, of draws [n] from probs [V]."""
    counts = torch.bincount(draws, minlength=len(probs)).double()
    can = probs > 0
    assert counts[~can].sum() == 0, "a token of probability zero was drawn"
    expected = probs[can].double() * len(draws)
    assert expected.min() > 5, "too few draws for the test"
    return ((counts[can] - expected) ** 2 / expected).sum().item(), int(can.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.5),
        SamplingParams(2.5),
        SamplingParams(1.0, top_k=4),
        SamplingParams(1.0, top_p=0.8),
        SamplingParams(1.7, top_k=10, top_p=0.7),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    n = 200_000
    generator = torch.Generator().manual_seed(3)
    logits = torch.linspace(-1, 1, 12)[None, torch.randperm(12, generator=generator)]
    probs = probabilities(logits, params)
    draws = sample(probs.expand(n, -1), torch.rand(n, generator=generator, dtype=torch.float64))
    statistic, freedom = chi_square(draws, probs[0])
    assert statistic < CRITICAL[freedom]


def test_the_chi_square_test_can_fail() -> None:
    """Draws at temperature 1 are told from the distribution at temperature 1.05."""
    logits = torch.linspace(-1, 1, 12)[None]
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    draws = sample(probabilities(logits, SamplingParams(1.0)).expand(200_000, -1), u)
    statistic, freedom = chi_square(draws, probabilities(logits, SamplingParams(1.05))[0])
    assert statistic > CRITICAL[freedom]


def test_first_tokens_of_many_seeds_follow_the_distribution() -> None:
    """`generate` gives row b the seed `seed + b`: neighbouring seeds must not be alike."""
    torch.manual_seed(0)
    model = GPTlite(GPTConfig(12, context_length=4, n_layers=1, d_model=8, n_heads=2, d_head=4)).eval()
    torch.nn.init.normal_(model.fc_out.weight, std=0.5)
    prompt, n = torch.tensor([[1, 2]]), 20_000
    probs = model(prompt)[0, -1].softmax(-1)
    draws = gptlite.generate(model, prompt.expand(n, -1), 1, seed=0)[:, -1]
    statistic, freedom = chi_square(draws, probs.detach())
    assert statistic < CRITICAL[freedom]


def test_sample_inverts_the_distribution_function() -> None:
    """Against a walk over the probabilities with exact fractions, at and around every border."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    tiny = 2**-40
    for u, token in [(0.0, 1), (0.25 - tiny, 1), (0.25, 3), (0.75 - tiny, 3), (0.75, 4), (1 - 2**-53, 4)]:
        assert sample(probs[None], torch.tensor([u], dtype=torch.float64)).item() == token
