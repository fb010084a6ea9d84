"""The numbers that attention moves: counted on a chip that refuses too much, by formula, and within the theorem."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.variants.traffic import (
    Chip,
    Traffic,
    flash_tiles,
    flash_traffic,
    largest_tensor,
    run_flash,
    run_standard,
    standard_traffic,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(q, k, v, causal=False):
    scores = q @ k.mT / q.shape[1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 12), st.integers(0, 400), st.booleans())
def test_the_counted_run_is_the_formula_and_is_attention(n, D, extra, causal):
    sram = 4 * D + 3 + extra
    q, k, v = (randn(n, D, seed=i) for i in range(3))
    chip = Chip(sram)
    out, lse = run_flash(chip, q, k, v, causal)
    expected, expected_lse = attention(q, k, v, causal)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-10)
    assert chip.traffic == flash_traffic(n, D, sram, causal)
    assert chip.most <= sram and chip.held == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 400))
def test_three_kernels_move_the_matrix_four_times(n, D, extra):
    sram = max(4 * D + 3, n) + extra  # a row of the scores fits
    q, k, v = (randn(n, D, seed=i) for i in range(3))
    chip = Chip(sram)
    torch.testing.assert_close(run_standard(chip, q, k, v), attention(q, k, v)[0], atol=1e-12, rtol=1e-10)
    assert chip.traffic == standard_traffic(n, D, sram)
    assert chip.held == 0
    flash = flash_traffic(n, D, sram)
    assert chip.traffic.total - flash.total == 4 * n * n - n  # the n are the log-sum-exps, which only flash writes


def test_by_hand():
    """n = 4, D = 2, M = 19: tiles of 2 queries and 1 key; each of 2 tiles of queries reads all keys and values."""
    assert flash_tiles(2, 19) == (2, 1)
    assert flash_traffic(4, 2, 19) == Traffic(loads=4 * 2 + 2 * (4 * 2 * 2), stores=4 * 2 + 4)
    assert flash_traffic(4, 2, 19, causal=True) == Traffic(loads=4 * 2 + 2 * 2 * (2 + 4), stores=12)
    assert standard_traffic(4, 2, 19) == Traffic(loads=40 + 2 * 16, stores=8 + 2 * 16)
    assert Traffic(3, 4).total == 7


@pytest.mark.parametrize("D", [16, 64, 128])
def test_the_theorem(D):
    """n^2 D^2 / M within constant factors for all M from D^2 to n D: and so halved when M doubles."""
    n, ratios = 16_384, []
    M = 8 * D * D
    while n * D >= M:
        ratios.append(flash_traffic(n, D, M).total / (n * n * D * D / M))
        M *= 2
    assert len(ratios) > 3 and min(ratios) > 4 and max(ratios) < 12
    assert all(4 * n * n < standard_traffic(n, D, M).total < 10 * n * n for M in (8 * D * D, n * D))


def test_a_chip_that_holds_everything_reads_and_writes_once():
    """The least that anyone must move: three inputs, one output, and here the log-sum-exp."""
    n, D = 64, 8
    assert flash_traffic(n, D, 10**6) == Traffic(3 * n * D, n * D + n)


def test_a_chip_refuses_what_it_cannot_hold():
    chip = Chip(10)
    held = chip.load(torch.zeros(6))
    with pytest.raises(MemoryError, match="holds 10 numbers, 11 are needed"):
        chip.load(torch.zeros(5))
    chip = Chip(10)
    held = chip.load(torch.zeros(6))
    chip.drop(held)
    chip.load(torch.zeros(10))
    assert (chip.loads, chip.stores, chip.held) == (16, 0, 10)


def test_tiles_that_do_not_fit_are_refused():
    assert flash_tiles(8, 35) == (1, 1)
    with pytest.raises(ValueError, match="sram is 34 numbers, a tile of heads of 8 needs at least 35"):
        flash_tiles(8, 34)
    with pytest.raises(ValueError, match="d_head is 0"):
        flash_tiles(0, 34)
    with pytest.raises(ValueError, match="n_tokens is -1"):
        flash_traffic(-1, 8, 100)


@pytest.mark.parametrize("run", [run_flash, run_standard])
def test_a_chip_runs_as_many_queries_as_keys(run):
    with pytest.raises(ValueError, match=r"q, k and v are \[5, 2\], \[9, 2\] and \[9, 2\]"):
        run(Chip(100), randn(5, 2), randn(9, 2), randn(9, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_largest_tensor_is_seen_in_every_mode(mode):
    a = torch.ones(5, 7)
    with mode():
        assert (
            largest_tensor(lambda: torch.nn.functional.linear(a, torch.ones(11, 7)).sum()) == 77
        )  # the weight, turned
        assert largest_tensor(lambda: (a @ a.mT, a.sum())) == 35
