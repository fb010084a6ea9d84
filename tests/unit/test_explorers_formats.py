"""The charts of the chapter on number formats draw what the package computes, at every end of their controls."""

import re

import pytest
import torch
from drawn import draw, marks, words

from gptlite.notebook.explorers_formats import (
    GRIDS,
    GROUPS,
    N_VALUES,
    format_grids,
    integer_codes,
    others_ratio,
    positive_levels,
    with_outlier,
)
from gptlite.quantize.formats import E4M3, decode
from gptlite.quantize.linear_quant import quantize_linear


def numbers(text):
    return [float(number.replace("−", "-")) for number in re.findall(r"[-−]?\d+(?:\.\d+)?(?:e[-−]?\d+)?", text)]


@pytest.mark.parametrize(
    ("bits", "group", "outlier", "grid"),
    [(4, 8, 8.0, 0), (2, 32, 40.0, 0), (8, 4, 0.5, 0), (4, 8, 8.0, 1), (3, 16, 20.0, 1), (8, 32, 3.0, 1)]
    + [(2, 32, 3.5, 0), (3, 32, 10.5, 0), (4, 32, 24.5, 0), (5, 8, 13.5, 0), (4, 8, 0.0, 1)],  # values between codes
)
def test_codes_and_errors_are_those_of_linear_quantisation(bits, group, outlier, grid):
    scene = draw(integer_codes(), bits=bits, group=group, outlier=outlier, grid=grid)
    coded = quantize_linear(with_outlier(outlier), bits, -1, group, symmetric=grid == 0)
    shown = words(scene)
    assert [int(text.replace("−", "-")) for text in shown[:N_VALUES]] == coded.codes.tolist()
    per_value, steps, worst, ratio = shown[N_VALUES:]
    kept, values = coded.dequantize(), with_outlier(outlier)
    assert numbers(per_value)[0] == pytest.approx(coded.bits_per_value(), abs=6e-4)
    assert numbers(steps) == pytest.approx([float(coded.scale.min()), float(coded.scale.max())], rel=6e-3)
    lost = int(((kept == 0) & (values != 0)).sum())
    assert numbers(worst)[0] == pytest.approx(float((kept - values).abs().max()), rel=6e-3)
    assert numbers(worst.partition(":")[2]) == [lost]
    assert numbers(ratio) == [pytest.approx(others_ratio(bits, group, outlier, grid == 0), abs=0.051)]


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("outlier", [0, 40])
@pytest.mark.parametrize("grid", range(len(GRIDS)))
def test_every_end_draws_finite_words(bits, outlier, grid):
    for group in (GROUPS[0], GROUPS[-1]):
        text = words(draw(integer_codes(), bits=bits, group=group, outlier=outlier, grid=grid))
        assert len(text) == N_VALUES + 4
        assert not any(re.search(r"NaN|undefined|Infinity|null", line) for line in text)
        assert all(len(line) <= 42 for line in text)


def test_an_outlier_harms_its_own_group_alone():
    codes = [words(draw(integer_codes(), group=8, outlier=outlier))[:N_VALUES] for outlier in (2, 40)]
    changed = {i // 8 for i in range(N_VALUES) if codes[0][i] != codes[1][i]}
    assert changed == {1}
    bands = marks(draw(integer_codes(), group=8), "rect")
    assert len([band for band in bands if band.get("opacity") == 0.12]) == 2


def test_facts_are_those_of_the_package():
    facts = integer_codes().facts
    assert facts[0].startswith("4 bits, groups of 8, outlier 8: ")
    for fact in facts:
        bits, group, outlier, ratio = numbers(fact)
        assert ratio == pytest.approx(others_ratio(int(bits), int(group), outlier), abs=0.051)


# -- the values of each format --------------------------------------------------------------------------------------


def test_levels_are_all_positive_values_over_the_largest():
    levels = positive_levels()
    assert {name: len(values) for name, values in levels.items()} == {
        "int4": 8, "nf4": 9, "fp4 e2m1": 8, "int8": 128, "fp8 e4m3": 127, "fp8 e5m2": 124,
    }  # fmt: skip
    assert all(values[0] == 0 and values[-1] == 1 for values in levels.values())
    codes = torch.arange(127, dtype=torch.uint8)
    assert levels["fp8 e4m3"] == pytest.approx((decode(codes, E4M3) / 448).tolist())


@pytest.mark.parametrize(("value", "zoom"), [(0.3, 1), (0.02, 16), (0.002, 64), (1, 1), (0.5, 4), (0.914, 1)])
def test_the_nearest_value_and_its_error(value, zoom):
    text = words(draw(format_grids(), value=value, zoom=zoom))
    assert len(text) == 6 and not any("NaN" in line for line in text)
    for line, values in zip(text, positive_levels().values(), strict=True):
        nearest = min(abs(level - value) for level in values)
        level, percent = numbers(line)
        assert percent == pytest.approx(100 * nearest / value, abs=0.06)
        assert min(abs(level - one) for one in values) < 1e-4
        assert len(line) <= 42


def test_zooming_shows_the_ticks_next_to_zero():
    for zoom in (1, 8, 64):
        shown = sum(level <= 1 / zoom for values in positive_levels().values() for level in values)
        rects = [item for item in marks(draw(format_grids(), zoom=zoom), "rect") if item.get("height") == 22]
        assert len(rects) == shown


def test_every_chart_stays_small():
    for explorer in (integer_codes(), format_grids()):
        assert (
            len(explorer._repr_html_()) < 170_000
        )  # bytes before compression; 500 ticks, as data and as a still picture
        assert explorer.spec["width"] == "container"
