"""From logits to the next token, against rules written out one token at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.sampling import GREEDY, SamplingParams, probabilities, sample


def by_hand(logits, params, allowed=None):
    """The distribution of one row, over python floats: mask, temperature, top-k, top-p, in that order."""
    left = {i: x for i, x in enumerate(logits) if allowed is None or allowed[i]}
    if params.temperature == 0:
        best = max(left, key=lambda i: (left[i], -i))
        return [float(i == best) for i in range(len(logits))]
    top = max(left.values())
    left = {i: (x - top) / params.temperature for i, x in left.items()}
    if params.top_k is not None:
        least = sorted(left.values(), reverse=True)[min(params.top_k, len(left)) - 1]
        left = {i: x for i, x in left.items() if x >= least}
    total = math.fsum(math.exp(x) for x in left.values())
    probs = {i: math.exp(x) / total for i, x in left.items()}
    kept, mass = {}, 0.0
    for i in sorted(probs, key=lambda i: (-probs[i], i)):
        if mass >= params.top_p and params.top_p < 1:
            break
        kept[i] = probs[i]
        mass += probs[i]
    total = math.fsum(kept.values())
    return [kept.get(i, 0.0) / total for i in range(len(logits))]


# a grid of logits, so that ties come often, and of top_p, so that no sum of probabilities is near it by accident
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 2, 3, 5, 6, 50]),
    top_p=st.sampled_from([1e-9, 0.1357, 0.5123, 0.8642, 0.99991, 1.0]),
)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-6, 6), min_size=6, max_size=6), some_params, st.integers(1, 63)),
        min_size=1,
        max_size=4,
    )
)
def test_a_batch_of_mixed_parameters_is_the_rule_row_by_row(rows):
    logits = torch.tensor([row for row, _, _ in rows], dtype=torch.float64) / 2
    params = [p for _, p, _ in rows]
    allowed = torch.tensor([[bool(bits >> i & 1) for i in range(6)] for _, _, bits in rows])
    for mask in (None, allowed):
        found = probabilities(logits, params, mask)
        assert found.dtype == torch.float64
        for b, row in enumerate(logits.tolist()):
            expected = by_hand(row, params[b], None if mask is None else mask[b].tolist())
            assert found[b].tolist() == pytest.approx(expected, abs=1e-12)
            alone = probabilities(logits[b : b + 1], params[b], None if mask is None else mask[b : b + 1])
            assert torch.equal(found[b], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_its_rows_alone_to_the_last_bit(dtype):
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    choices = [GREEDY, SamplingParams(0.7), SamplingParams(1.0, top_k=40), SamplingParams(1.3, 50, 0.9)]
    params = [choices[b % 4] for b in range(12)]
    batch = probabilities(logits, params)
    for b in range(12):
        assert torch.equal(batch[b], probabilities(logits[[b]], params[b])[0])


def test_temperature_zero_is_argmax_also_beside_others():
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [5.0, 5.0, -1.0]])
    params = [GREEDY, SamplingParams(0.5), SamplingParams(0.0, top_k=2, top_p=0.1)]
    probs = probabilities(logits, params)
    assert probs[0].tolist() == [0, 1, 0]
    assert probs[2].tolist() == [1, 0, 0]  # of equal ones the first
    assert 0 < probs[1, 0] < 1


def test_one_set_of_parameters_serves_all_rows():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(0.9, top_k=4, top_p=0.8)
    assert torch.equal(probabilities(logits, params), probabilities(logits, [params] * 3))


def test_top_p_keeps_the_token_that_crosses_p_and_none_more_on_an_exact_hit():
    logits = torch.zeros(1, 4, dtype=torch.float64)  # each has probability 1/4, exactly
    for p, n in ((0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        kept = probabilities(logits, SamplingParams(top_p=p))[0]
        assert (kept > 0).tolist() == [i < n for i in range(4)]  # of equal ones the lower numbers
        assert kept[:n].tolist() == [1 / n] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_hit_keeps_no_token_more_whatever_the_rounding(dtype):
    tenths = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=dtype).log()
    for p, n in ((0.4, 1), (0.7, 2), (0.9, 3)):
        assert (probabilities(tenths, SamplingParams(top_p=p)) > 0).sum() == n
    for V in range(2, 75):
        for n in range(1, V):
            kept = probabilities(torch.zeros(1, V, dtype=dtype), SamplingParams(top_p=n / V)) > 0
            assert kept.sum() == n, f"{n} of {V} equal tokens"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(value):
    for logits in (torch.tensor([[0.0, value]]), torch.full((1, 2), float("-inf"))):
        with pytest.raises(ValueError, match="no allowed token, or holds NaN"):
            probabilities(logits, SamplingParams())


def test_a_mask_of_another_kind_is_named():
    for allowed in (torch.ones(3, dtype=torch.bool), torch.ones(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="allowed is"):
            probabilities(torch.zeros(1, 2), SamplingParams(), allowed)


def test_top_p_of_one_keeps_every_token_however_rare():
    logits = torch.tensor([[0.0, -40.0, -80.0]])  # in fp32 the running sum is 1 after the first token
    assert (probabilities(logits, SamplingParams(top_p=1.0)) > 0).all()
    mixed = probabilities(logits.repeat(2, 1), [SamplingParams(top_p=1.0), SamplingParams(top_p=0.5)])
    assert (mixed[0] > 0).all()
    assert mixed[1].tolist() == [1, 0, 0]


def test_top_k_comes_before_top_p_and_renormalises():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    # of 0.4 and 0.3, renormalised to 4/7 and 3/7, the first alone reaches 0.55; of the four it would not
    assert probabilities(logits, SamplingParams(top_k=2, top_p=0.55))[0].tolist() == [1, 0, 0, 0]
    assert (probabilities(logits, SamplingParams(top_p=0.55)) > 0).sum() == 2
    halves = probabilities(logits, SamplingParams(top_k=2))
    torch.testing.assert_close(halves, torch.tensor([[4 / 7, 3 / 7, 0, 0]], dtype=torch.float64))


def test_ties_at_the_border_of_top_k_all_stay():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert (probabilities(logits, SamplingParams(top_k=2)) > 0)[0].tolist() == [True, True, True, True, False]


def test_temperature_comes_before_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert (probabilities(logits, SamplingParams(temperature=0.2, top_p=0.6)) > 0).sum() == 1
    assert (probabilities(logits, SamplingParams(temperature=5.0, top_p=0.6)) > 0).sum() == 2


def test_extreme_temperatures_and_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 9.9e3], [3e38, 0.0, -3e38]])
    for temperature in (1e-30, 1e-6, 1.0, 1e30):
        probs = probabilities(logits, SamplingParams(temperature=temperature))
        assert torch.isfinite(probs).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert probabilities(logits, SamplingParams(temperature=1e-30))[0].tolist() == [1, 0, 0]


def test_half_precision_is_computed_in_fp32():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    probs = probabilities(logits, SamplingParams(0.8, top_k=10))
    assert probs.dtype == torch.float32
    assert torch.equal(probs, probabilities(logits.float(), SamplingParams(0.8, top_k=10)))


def test_the_logits_are_not_written_over():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    probabilities(logits, SamplingParams(0.5, top_k=3, top_p=0.5), torch.arange(9) > 2)
    assert torch.equal(logits, before)


def test_a_mask_for_all_rows_and_one_that_allows_nothing():
    logits = torch.tensor([[5.0, 1.0, 2.0], [0.0, 9.0, 1.0]])
    allowed = torch.tensor([False, True, True])
    assert probabilities(logits, GREEDY, allowed).argmax(-1).tolist() == [2, 1]
    assert probabilities(logits, SamplingParams(), allowed)[:, 0].tolist() == [0, 0]
    with pytest.raises(ValueError, match="a row of logits has no allowed token"):
        probabilities(logits, SamplingParams(), torch.tensor([[True] * 3, [False] * 3]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0, it must be a whole number of at least 1"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_p": 0.0}, r"top_p is 0.0, it must be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_bad_parameters_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_shapes_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"logits has shape \(3,\)"):
        probabilities(torch.zeros(3), GREEDY)
    with pytest.raises(ValueError, match="3 sampling parameters for 2 rows"):
        probabilities(torch.zeros(2, 5), [GREEDY] * 3)


def drawn_by_hand(probs, u):
    """The first token whose cumulated probability exceeds u."""
    mass = 0.0
    for i, p in enumerate(probs):
        mass += p
        if u < mass:
            return i
    return max(i for i, p in enumerate(probs) if p > 0)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(0, 8), min_size=5, max_size=5).filter(any),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53, 5e-324])),
)
def test_sampling_inverts_the_distribution(weights, u):
    probs = torch.tensor([weights], dtype=torch.float64) / 64  # exact sums, so that the border is exact too
    probs = probs / probs.sum()
    token = int(sample(probs, torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0
    exact = [w / sum(weights) for w in weights]
    border = min(abs(u - math.fsum(exact[: i + 1])) for i in range(5))
    if border > 1e-12:
        assert token == drawn_by_hand(exact, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("u", [0.0, 2**-60, 0.5, 1 - 2**-24, 1 - 2**-53, 1.0])  # 1: rounded up in a lower precision
def test_a_token_of_probability_zero_is_never_drawn(dtype, u):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(500, 40, generator=generator, dtype=dtype)
    probs[torch.rand(500, 40, generator=generator) < 0.7] = 0
    probs[:, 0], probs[:, -1] = 0, 0  # the ends, where rounding would fall to
    probs[:, 17] += 1e-3
    probs = probs / probs.sum(-1, keepdim=True)
    drawn = sample(probs, torch.full((500,), u, dtype=torch.float64))
    assert drawn.dtype == torch.int64
    assert (probs.gather(-1, drawn[:, None]) > 0).all()
    if u == 0:
        assert torch.equal(drawn, (probs > 0).int().argmax(-1))


def test_a_token_of_one_in_a_million_has_its_own_place():
    probs = torch.tensor([[0.5 - 1e-6, 2e-6, 0.5 - 1e-6]])
    for u, token in ((0.499998, 0), (0.5, 1), (0.500002, 2)):
        assert sample(probs, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_a_batch_draws_what_its_rows_draw_alone():
    generator = torch.Generator().manual_seed(0)
    probs, u = torch.rand(20, 30, generator=generator).softmax(-1), torch.rand(20, generator=generator)
    assert sample(probs, u).tolist() == [int(sample(probs[[b]], u[[b]])) for b in range(20)]


def test_one_hots_are_drawn_whatever_the_number():
    probs = torch.eye(6)
    for u in (0.0, 0.3, 1 - 2**-24):
        assert sample(probs, torch.full((6,), u)).tolist() == list(range(6))


def test_draws_follow_the_distribution():
    """Chi-square with 7 degrees of freedom: the seed is fixed, and 24.3 is passed by chance once in a thousand."""
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 0.2, 1.5])
    params = SamplingParams(temperature=1.3)
    probs = probabilities(logits[None], params)
    n = 20_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    counts = sample(probs.expand(n, -1), u).bincount(minlength=8)
    expected = torch.tensor(by_hand(logits.tolist(), params)) * n
    assert ((counts - expected) ** 2 / expected).sum() < 24.3
