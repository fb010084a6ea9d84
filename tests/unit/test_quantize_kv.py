"""Formats of cached keys and values: the error of a code, the bytes that it takes, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.quantize.kv import RECIPES, KVFormat, Recipe, Rule, recipe

FORMATS = {
    "int8": KVFormat("even", 8, symmetric=True),
    "8 bits per channel": KVFormat("even", 8, "channel", 4),
    "4 bits per channel": KVFormat("even", 4, "channel", 4),
    "2 bits per channel": KVFormat("even", 2, "channel", 4),
    "4 bits per token": KVFormat("even", 4, "token", 8),
    "2 bits per token": KVFormat("even", 2, "token", 8),
    "2 bits, the whole token": KVFormat("even", 2, "token"),
}


@pytest.mark.parametrize("name", FORMATS)
@given(d=st.integers(1, 20), n=st.integers(1, 13), seed=st.integers(0, 1000), size=st.sampled_from([1e-2, 1.0, 100.0]))
@settings(max_examples=25, deadline=None)
def test_the_error_is_at_most_half_a_step_and_what_16_bit_scales_add(name, d, n, seed, size):
    """Lengths that the group does not divide too; fp16 keeps 11 bits of the step and of the least value."""
    form = FORMATS[name]
    x = size * torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codes, scale, *least = form.encode(x)
    found = form.decode((codes, scale, *least), d, torch.float64)
    axis, group = (-1, form.group or d) if form.per == "token" else (-2, form.group)
    step = scale.double().repeat_interleave(group, axis)[..., : n if axis == -2 else None, : d if axis == -1 else None]
    low = least[0].double().repeat_interleave(group, axis)[..., :n, :d].abs() if least else torch.zeros_like(x)
    top = 127 if form.symmetric else 2**form.bits - 1
    # 2^-11: rounding a number to fp16; 2^-24: where it is below the least normal one
    bound = step / 2 * (1 + 2**-10) + (top * step + low) * 2**-11 + (top + 1) * 2**-24
    assert bool(((found - x).abs() <= bound).all())
    # what lies on the grid stays there: quantising again changes nothing, unless fp16 has lost bits of a tiny step
    again = form.encode(found)
    assert bool((scale < 2**-14).any()) or all(
        torch.equal(a, b) for a, b in zip((codes, scale, *least), again, strict=True)
    )


def test_int8_codes_are_symmetric_and_a_row_of_zeros_stays_finite():
    x = torch.tensor([[-3.0, 3.0, 1.0], [0.0, 0.0, 0.0]])
    codes, scale = FORMATS["int8"].encode(x)
    assert codes.tolist()[0][:2] == [-127, 127] and scale.isfinite().all()
    assert FORMATS["int8"].rounded(x)[1].tolist() == [0, 0, 0]
    for name in ("2 bits per token", "4 bits per channel"):
        constant = torch.full((5, 4), 1.5)
        assert torch.equal(FORMATS[name].rounded(constant), constant)


def test_an_outlier_channel_costs_its_neighbours_their_bits_only_when_they_share_its_scale():
    """KIVI's reason: with 2 bits per token, a channel of 100 leaves one code for all the others."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    x[:, 3] += 100
    others = [c for c in range(8) if c != 3]
    per_token = (KVFormat("even", 2, "token").rounded(x) - x)[:, others].abs().mean()
    per_channel = (KVFormat("even", 2, "channel", 32).rounded(x) - x)[:, others].abs().mean()
    assert per_token > 2 * per_channel


def test_fp8_cuts_what_is_too_large_and_rounds_as_its_three_bits_say():
    x = torch.tensor([[1.0, 1.0625, 1.07, 1e6, -1e6, 0.0]])
    assert KVFormat("fp8").rounded(x).tolist() == [[1.0, 1.0, 1.125, 448.0, -448.0, 0.0]]


def test_plain_and_empty_pieces_come_back_as_they_are():
    x = torch.randn(2, 3, 4)
    assert torch.equal(KVFormat("plain").rounded(x), x)
    for form in FORMATS.values():
        assert form.rounded(x[..., :0]).shape == (2, 3, 0)  # the values beside a latent
        assert form.rounded(x[:, :0]).shape == (2, 0, 4)


def test_a_slice_of_codes_is_the_codes_of_the_slice():
    x = torch.randn(2, 12, 8)
    for form in FORMATS.values():
        parts = form.encode(x)
        for begin, end in ((0, 4), (4, 12), (8, 12)):
            cut = form.slice(parts, begin, end)
            assert all(torch.equal(a, b) for a, b in zip(cut, form.encode(x[:, begin:end]), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [7, 8, 32])
def test_bytes_of_a_token_are_those_of_its_codes(name, d):
    form = FORMATS[name]
    parts = form.encode(torch.randn(1, 8, d))
    assert form.token_bytes(d) * 8 == sum(part.nbytes for part in parts)


def test_bits_of_kivi_with_its_scales():
    """2 bits and two numbers of 16 for each 32 values make 3 bits; a fifth of 16 bits and a bit."""
    shapes = [(8, 128, 128)] * 32
    per_value = {name: 8 * recipe(name).token_bytes(shapes) / (32 * 8 * 256) for name in RECIPES}
    assert per_value == {"plain": 16, "int8": 8.125, "fp8": 8, "kivi4": 5, "kivi2": 3}


def test_rules_by_hand():
    assert [Rule(0, 4).n_quantized(n) for n in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    assert [Rule(3, 1).n_quantized(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert [Rule(3, 2).n_quantized(n) for n in (4, 5, 6, 7)] == [0, 2, 2, 4]
    assert (Rule(0, 4).bound(1), Rule(3, 1).bound(1), Rule(3, 2).bound(5)) == (4, 4, 9)


@given(recent=st.integers(0, 9), step=st.integers(1, 9), n=st.integers(0, 60))
def test_a_rule_keeps_its_bound_and_never_takes_back(recent, step, n):
    rule = Rule(recent, step)
    assert 0 <= rule.n_quantized(n) <= rule.n_quantized(n + 1) <= n + 1
    assert min(n, recent) <= n - rule.n_quantized(n) <= rule.bound(0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KVFormat("odd"), "kind is 'odd'"),
        (lambda: KVFormat("even", 3), "bits is 3"),
        (lambda: KVFormat("even", 4, "head"), "per is 'head'"),
        (lambda: KVFormat("even", 4, "channel"), "group is None"),
        (lambda: KVFormat("even", 4, "token", 0), "group is 0"),
        (lambda: KVFormat("even", 4, symmetric=True), "symmetric codes have 8 bits"),
        (lambda: Rule(-1), "recent is -1"),
        (lambda: Rule(0, 0), "step 0"),
        (lambda: recipe("int3"), "recipe is 'int3'"),
        (lambda: recipe("kivi2", residual=40, group=32), "40 tokens at a time, not a multiple of the 32"),
        (lambda: recipe("kivi2").in_blocks(16), "keys are quantised 16 tokens"),
        (lambda: FORMATS["int8"].encode(torch.tensor([[float("nan")]])), "infinity or NaN"),
        (lambda: FORMATS["2 bits per token"].encode(torch.tensor([[1e5, 2e5]])), "beyond 65,504"),
    ],
)
def test_what_makes_no_sense_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_recipes_that_mix_formats_are_whole():
    mixed = Recipe(KVFormat("fp8"), KVFormat("plain"), Rule(0, 2), Rule(1, 3))
    assert mixed.token_bytes([(2, 10, 6)]) == 2 * (10 + 12)
    assert mixed.in_blocks(8).key_rule == mixed.in_blocks(8).value_rule == Rule(1, 8)
