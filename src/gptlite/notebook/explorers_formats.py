"""The explorers of the chapter on number formats: groups and steps of integer codes, and the values of each format."""

from typing import Any

import altair as alt
import torch
from torch import Tensor

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.quantize.blocks import NF4_LEVELS
from gptlite.quantize.formats import E2M1, E4M3, E5M2
from gptlite.quantize.linear_quant import quantize_linear
from gptlite.quantize.rounded import signal_to_noise

N_VALUES, OUTLIER_AT = 32, 13
GROUPS = (4, 8, 16, 32)
GRIDS = ("symmetric", "zero point")
FORMATS_SHOWN = ("int4", "nf4", "fp4 e2m1", "int8", "fp8 e4m3", "fp8 e5m2")


def shown_values(seed: int = 5) -> Tensor:
    """The values that `integer_codes` starts from [32] in fp64, drawn from a normal distribution, to two decimals."""
    return torch.randn(N_VALUES, generator=torch.Generator().manual_seed(seed)).double().mul(100).round().div(100)


def with_outlier(outlier: float) -> Tensor:
    """The shown values [32] with one of them replaced."""
    values = shown_values()
    values[OUTLIER_AT] = outlier
    return values


def others_ratio(bits: int, group_size: int, outlier: float, symmetric: bool = True) -> float:
    """Power of all values but the outlier over that of their error, in dB, as `integer_codes` shows it."""
    values, others = with_outlier(outlier), torch.arange(N_VALUES) != OUTLIER_AT
    kept = quantize_linear(values, bits, -1, group_size, symmetric).dequantize()
    return signal_to_noise(values[others], kept[others])


def integer_codes() -> Explorer:
    """Integer codes of 32 values: bits, group size, an outlier and a zero point to move; the codes and the error."""
    bits, group, outlier = 4, 8, 8.0
    sizes = alt.binding_select(options=list(GROUPS), labels=[str(size) for size in GROUPS], name="Group size ")
    controls = [
        slider("bits", "Bits", bits, 2, 8, 1),
        alt.param(name="group", value=group, bind=sizes),
        slider("outlier", "Outlier", outlier, 0, 40, 0.5),
        menu("grid", "Grid", GRIDS, GRIDS[0]),
        alt.param(name="most", expr="grid == 1 ? pow(2, bits) - 1 : pow(2, bits - 1) - 1"),
        alt.param(name="least", expr="grid == 1 ? 0 : -most"),
    ]
    rows = [{"i": i, "drawn": round(float(v), 2)} for i, v in enumerate(shown_values())]
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_calculate(value=f"datum.i == {OUTLIER_AT} ? outlier : datum.drawn", place="floor(datum.i / group)")
        .transform_joinaggregate(lowest="min(value)", highest="max(value)", groupby=["place"])
        .transform_calculate(
            low="grid == 1 ? min(0, datum.lowest) : -max(-datum.lowest, datum.highest)",
            high="grid == 1 ? max(0, datum.highest) : max(-datum.lowest, datum.highest)",
        )
        .transform_calculate(step="(datum.high - datum.low) / (most - least)")
        .transform_calculate(zero=f"grid == 1 ? {_nearest('-datum.low / datum.step')} : 0")
        .transform_calculate(code=f"clamp({_nearest('datum.value / datum.step')} + datum.zero, least, most)")
        .transform_calculate(kept="(datum.code - datum.zero) * datum.step")
        .transform_calculate(
            error="datum.value - datum.kept",
            other=f"datum.i == {OUTLIER_AT} ? 0 : 1",
            lost="datum.kept == 0 && datum.value != 0 ? 1 : 0",
        )
        .transform_calculate(
            power="datum.other * datum.value * datum.value",
            noise="datum.other * datum.error * datum.error",
            size="abs(datum.error)",
        )
    )
    x = alt.X(
        "i:Q",
        scale=alt.Scale(domain=[-0.5, N_VALUES - 0.5], nice=False),
        axis=alt.Axis(values=list(range(0, N_VALUES, 4)), format="d"),
        title="Value, and its code below",
    )
    y_scale = alt.Scale(
        domainMin=alt.ExprRef("-3 - 0.15 * max(4, outlier)"),  # room for the codes, and for the words at the top
        domainMax=alt.ExprRef("1 + 1.4 * max(4, outlier)"),
        nice=False,
    )
    y = alt.Y("value:Q", scale=y_scale, title="Value", axis=alt.Axis(tickCount=6))
    band = (
        base.transform_aggregate(first="min(i)", last="max(i)", groupby=["place"])
        .transform_filter("datum.place % 2 == 1")
        .transform_calculate(left="datum.first - 0.5", right="datum.last + 0.5")
        .mark_rect(opacity=0.12, color=ORANGE)
        .encode(x=alt.X("left:Q", scale=alt.Scale(domain=[-0.5, N_VALUES - 0.5], nice=False)), x2="right:Q")
    )
    tooltip = [
        alt.Tooltip("value:Q", format=".2f"),
        alt.Tooltip("kept:Q", format=".3f", title="kept as"),
        alt.Tooltip("code:Q", format="d"),
        alt.Tooltip("step:Q", format=".4f"),
    ]
    error = base.mark_rule(color=VERMILION, strokeWidth=2).encode(x=x, y=y, y2="kept:Q")
    kept = base.mark_tick(orient="horizontal", color=VERMILION, thickness=2, size=9).encode(
        x=x, y=alt.Y("kept:Q", scale=y_scale)
    )
    dots = base.mark_point(filled=True, color=BLUE, size=45, opacity=1).encode(x=x, y=y, tooltip=tooltip)
    codes = (
        base.transform_calculate(words="replace(format(datum.code, 'd'), '-', '−')")
        .mark_text(
            angle=270,
            align="left",
            baseline="middle",
            y=alt.ExprRef("height - 3"),
            fontSize=alt.ExprRef("clamp(width / 32, 7, 11)"),
        )
        .encode(x=x, text="words:N")
    )
    summary = base.transform_aggregate(
        all_power="sum(power)", all_noise="sum(noise)", worst="max(size)", widest="max(step)", finest="min(step)",
        zeros="sum(lost)",
    )  # fmt: skip
    extra = "(grid == 1 ? 16 + bits : 16) / group"
    lines = [
        f"format(bits + {extra}, '.3~f') + ' bits per value with 16-bit scales'",
        "'steps from ' + format(datum.finest, '.3~r') + ' to ' + format(datum.widest, '.3~r')",
        "'largest error ' + format(datum.worst, '.3~r') + ', lost as 0: ' + format(datum.zeros, 'd')",
        "'the others: '"
        " + format(10 * log(datum.all_power / datum.all_noise) / log(10), '.1f') + ' dB over their error'",
    ]
    texts = [_line(summary, words, i) for i, words in enumerate(lines)]
    facts = []
    for n_bits, size, peak in ((4, 8, 8.0), (4, 32, 8.0), (8, 32, 8.0), (4, 8, 40.0), (4, 32, 40.0)):
        ratio = others_ratio(n_bits, size, peak)
        facts.append(f"{n_bits} bits, groups of {size}, outlier {peak:g}: the others {ratio:.1f} dB over their error")
    return Explorer(
        name="integer-codes",
        chart=alt.layer(band, error, kept, dots, codes, *texts)
        .add_params(*controls)
        .properties(width="container", height=340),
        alt_text="Thirty-two values as dots, and beside each the value that its integer code stands for, as a tick; a"
        " line between them is the error. Shaded bands show which values share a scale; the codes stand below."
        " Sliders set the bits and the size of one outlier, menus the group size and whether the grid has a zero"
        " point. Words give the bits per value, the steps, the largest error, and the signal-to-noise ratio"
        " of the other values.",
        caption="Values (dots), what is kept of them (ticks), and their codes: an outlier widens the step of its own"
        " group and of no other.",
        facts=tuple(facts),
    )


def positive_levels() -> dict[str, list[float]]:
    """The values from 0 on of each shown format, divided by its largest, by name."""
    found = {"int4": [i / 7 for i in range(8)], "int8": [i / 127 for i in range(128)]}
    found["nf4"] = [level for level in NF4_LEVELS if level >= 0]
    for fmt in (E2M1, E4M3, E5M2):
        values = fmt.values()
        found[fmt.name] = (values[values >= 0] / fmt.largest).tolist()
    return {name: found[name] for name in FORMATS_SHOWN}


def format_grids() -> Explorer:
    """The values of each format on a line from 0 to its largest; a value to move, and its relative error in each."""
    controls = [
        slider("value", "Value over largest", 0.3, 0.002, 1, 0.002),
        slider("zoom", "Shown up to 1 /", 1, 1, 64, 1),
    ]
    rows = [
        {"format": name, "level": float(f"{level:.5g}")}
        for name, levels in positive_levels().items()
        for level in levels
    ]
    base = alt.Chart(alt.Data(values=rows))
    x_scale = alt.Scale(domain=[0, alt.ExprRef("1 / zoom")], nice=False)
    x = alt.X(
        "level:Q",
        scale=x_scale,
        axis=alt.Axis(tickCount=5, format=".3~g", labelBound=True),
        title="Value over the largest",
    )
    y = alt.Y("format:N", sort=list(FORMATS_SHOWN), title=None, axis=alt.Axis(labelFontSize=12))
    ticks = (
        base.transform_filter("datum.level <= 1 / zoom")
        .mark_tick(thickness=1.5, height=22)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "format:N",
                legend=None,
                scale=alt.Scale(domain=list(FORMATS_SHOWN), range=[VERMILION, ORANGE, GREEN, VERMILION, BLUE, GREEN]),
            ),
        )
    )
    near = (
        base.transform_calculate(distance="abs(datum.level - value)")
        .transform_joinaggregate(nearest="min(distance)", groupby=["format"])
        .transform_filter("datum.distance == datum.nearest")
        .transform_aggregate(level="min(level)", distance="min(distance)", groupby=["format"])
        .transform_calculate(
            words="'→ ' + format(datum.level, '.4~r') + ', off by '"
            " + format(100 * datum.distance / value, '.1f') + ' %'",
        )
    )
    mark = near.transform_filter("datum.level <= 1 / zoom").mark_point(
        shape="triangle-down", filled=True, size=70, color=VERMILION, opacity=1, yOffset=-17
    )
    words = [  # on the side where the value's line is not
        near.transform_filter(f"value * zoom {side} 0.5")
        .mark_text(align=align, baseline="middle", dx=dx, dy=19)  # type: ignore[arg-type]
        .encode(x=x_end, y=y, text="words:N")
        for side, align, dx, x_end in (("<", "right", -4, alt.value("width")), (">=", "left", 6, alt.value(0)))
    ]
    here = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(level="value")
        .transform_filter("value <= 1 / zoom")
        .mark_rule(strokeDash=[3, 3], strokeWidth=1.5)
        .encode(x=x)
    )
    facts = []
    for value in (0.3, 0.02):
        parts = []
        for name, levels in positive_levels().items():
            distance = min(abs(level - value) for level in levels)
            parts.append(f"{name} {100 * distance / value:.1f} %")
        facts.append(f"{value:g} of the largest is off by: {', '.join(parts)}")
    return Explorer(
        name="format-grids",
        chart=alt.layer(ticks, here, mark.encode(x=x, y=y), *words)
        .add_params(*controls)
        .properties(width="container", height=330),
        alt_text="Six number lines, one below the other, from 0 to the largest value of int4, nf4, fp4 e2m1, int8, fp8"
        " e4m3 and fp8 e5m2, with a tick for each value that the format has. Integers are evenly spaced, the others"
        " lie closer together towards 0. A slider moves a value: a triangle marks the nearest tick on each line, and"
        " words give it and the relative error. A second slider magnifies the part next to 0.",
        caption="The positive values of six formats, each over its own largest: integers spread their steps evenly,"
        " floating-point formats keep the relative error even.",
        facts=tuple(facts),
    )


def _nearest(x: str) -> str:
    """The nearest whole number as a Vega expression, of two the even one; Vega's own `round` takes the upper."""
    return f"(round({x}) - (abs(({x}) % 1) == 0.5 ? abs(round({x}) % 2) : 0))"


def _line(base: Any, words: str, i: int) -> Any:
    """A line of words at the top left."""
    return (
        base.transform_calculate(words=words)
        .mark_text(align="left", baseline="top", dx=6, y=4 + 17 * i)
        .encode(x=alt.value(0), text="words:N")
    )
