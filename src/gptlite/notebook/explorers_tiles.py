"""The explorers of the chapter on FlashAttention from recordings: tiles one after the other, and back ends measured."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Explorer, menu, slider
from gptlite.notebook.explorers_prefill import DTYPES
from gptlite.record import Recording
from gptlite.variants.tiles import causal_tiles

COLOURS = [VERMILION, BLUE, GREEN, ORANGE, PURPLE]
DASHES = [[6, 4], [1, 0], [2, 3], [8, 3, 2, 3], [4, 2]]


def tile_steps(recording: Recording) -> Explorer:
    """Plays the tiles of one head one by one: which is computed, and m, l and the output of each query after it.

    Args:
        recording: of the sweep `flash-tiles`.
    """
    data, params = recording.data, recording.params
    n, tile, steps = data["n"], data["tile"], data["steps"]
    shown, n_tiles = len(data["out"][0]), -(-n // tile)
    names = ["␣" if character == " " else "⏎" if character == "\n" else character for character in params["prompt"]]
    order = {(step["i"], step["j"]): number for number, step in enumerate(steps, 1)}
    tiles = [{"i": i, "j": j, "at": order.get((i, j), 0)} for i in range(n_tiles) for j in range(n_tiles)]
    states: list[dict[str, Any]] = []
    for number, step in enumerate(steps, 1):
        following = [at for (i, _), at in order.items() if i == step["i"] and at > number]
        until = min(following, default=len(steps) + 1)
        for row, (m, l, shrink, out) in enumerate(zip(step["m"], step["l"], step["shrink"], step["out"], strict=True)):
            about = {"row": step["i"] * tile + row, "from": number, "until": until}
            states.append({**about, "m": m, "l": l, "shrink": shrink, "out": out})
    wide = 0.8  # a key's column; the numbers beside the grid need room on a phone too
    left_m, left_l, left_s, left_out = (wide * n + away for away in (2.1, 5.6, 8.7, 10.6))
    right = left_out + shown * wide
    controls = [slider("step", "Step", 3, 1, len(steps), 1)]
    x_scale, y_scale = (
        alt.Scale(domain=[-1.2, right], nice=False),
        alt.Scale(domain=[-2.6, n], nice=False, reverse=True),
    )

    def x(field: str) -> alt.X:
        return alt.X(field, scale=x_scale, axis=None)

    def y(field: str) -> alt.Y:
        return alt.Y(field, scale=y_scale, axis=None)

    grid = alt.Chart(alt.Data(values=tiles)).transform_calculate(
        x=f"datum.j * {tile * wide}", x2=f"min((datum.j + 1) * {tile}, {n}) * {wide}",
        y=f"datum.i * {tile}", y2=f"min((datum.i + 1) * {tile}, {n})",
        what="datum.at == 0 ? 'skipped' : datum.at == step ? 'now' : datum.at < step ? 'done' : 'to come'",
    )  # fmt: skip
    kinds = ["now", "done", "to come", "skipped"]
    colour = alt.Color(
        "what:N",
        scale=alt.Scale(domain=kinds, range=[VERMILION, SKY, "transparent", "#999999"]),
        legend=alt.Legend(orient="top", title=None, symbolType="square", symbolStrokeColor="gray"),
    )
    cells = grid.mark_rect(fillOpacity=0.55, stroke="currentColor", strokeWidth=0.6).encode(
        x=x("x:Q"), x2="x2:Q", y=y("y:Q"), y2="y2:Q", color=colour
    )
    letters = [{"at": i + 0.5, "across": (i + 0.5) * wide, "name": name} for i, name in enumerate(names)]
    small: dict[str, Any] = {"fontSize": alt.ExprRef("width < 400 ? 8 : 11"), "baseline": "middle"}
    keys = alt.Chart(alt.Data(values=letters)).mark_text(**small).encode(x=x("across:Q"), y=y("top:Q"), text="name:N")
    queries = alt.Chart(alt.Data(values=letters)).mark_text(**small).encode(x=x("left:Q"), y=y("at:Q"), text="name:N")
    heads = alt.Chart(
        alt.Data(
            values=[
                {"at": left_m, "name": "m"}, {"at": left_l, "name": "ℓ"}, {"at": left_s, "name": "×"},
                {"at": (left_out + right) / 2, "name": "O / ℓ"},
            ]
        )
    ).mark_text(fontStyle="italic", **small).encode(x=x("at:Q"), y=y("top:Q"), text="name:N")  # fmt: skip
    edge = {"top": "-0.55", "left": "-0.6"}
    keys, queries, heads = (chart.transform_calculate(**edge) for chart in (keys, queries, heads))
    now = (
        alt.Chart(alt.Data(values=states))
        .transform_filter("datum.from <= step && step < datum.until")
        .transform_calculate(y="datum.row + 0.5", fresh="datum.from == step")
        .transform_calculate(at_m=f"{left_m}", at_l=f"{left_l}", at_s=f"{left_s}")
    )
    numbers = [
        now.transform_calculate(words=f"format(datum.{field}, '.2f')")
        .mark_text(**small)
        .encode(x=x(f"at_{name}:Q"), y=y("y:Q"), text="words:N", opacity=_fresh())
        for name, field in (("m", "m"), ("l", "l"))
    ]
    shrunk = (
        now.transform_filter("datum.fresh && datum.shrink < 1")
        .transform_calculate(words="format(datum.shrink, '.2f')")
        .mark_text(color=VERMILION, **small)
        .encode(x=x("at_s:Q"), y=y("y:Q"), text="words:N")
    )
    largest = max(abs(value) for step in steps for row in step["out"] for value in row)
    strip = (
        now.transform_calculate(k=f"sequence({shown})")
        .transform_flatten(["out", "k"])
        .transform_calculate(
            x=f"{left_out} + datum.k * {wide}", x2=f"{left_out} + (datum.k + 1) * {wide}",
            top="datum.row + 0.06", bottom="datum.row + 0.94",
        )
        .mark_rect(stroke="currentColor", strokeWidth=0.3)
        .encode(
            x=x("x:Q"), x2="x2:Q", y=y("top:Q"), y2="bottom:Q",
            fill=alt.Fill(
                "out:Q",
                scale=alt.Scale(domain=[-largest, 0, largest], range=[ORANGE, "#f7f7f7", PURPLE], nice=False),
                legend=None,
            ),
        )
    )  # fmt: skip
    words = (
        grid.transform_filter("datum.at == step")
        .transform_calculate(
            words=f"'step ' + step + ' of {len(steps)}: queries ' + (datum.i * {tile} + 1) + ' to ' + datum.y2"
            f" + ', keys ' + (datum.j * {tile} + 1) + ' to ' + min((datum.j + 1) * {tile}, {n})"
            " + (datum.i == datum.j ? ', masked by the diagonal' : ', no mask')"
        )
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(0), text="words:N")
    )
    return Explorer(
        name="tile-steps",
        chart=alt.layer(cells, keys, queries, heads, *numbers, shrunk, strip, words)
        .add_params(*controls)
        .properties(width="container", height=22 * n + 60),
        alt_text=f"A grid of {n} queries (rows) by {n} keys (columns) in tiles of {tile}; tiles are marked as computed"
        " now, done, to come, or skipped above the diagonal. Beside each row stand its running maximum m, its running"
        " sum ℓ, the factor by which the sums so far were just multiplied where the maximum rose, and as coloured cells"
        f" the first {shown} components of O / ℓ, the output as it would be if the text of keys ended here. A slider"
        " chooses the step.",
        caption=f"The tiles of one head of GPTlite (layer {params['layer']}, head {params['head']}) one after the"
        f" other, as the package's own attention computed them for “{params['prompt']}”.",
        facts=(
            f"{len(steps)} tiles computed, {n_tiles**2 - len(steps)} skipped; by the closed form"
            f" {causal_tiles(n_tiles)[0]} are above the diagonal",
            *(
                f"step {number}: queries {step['i'] * tile + 1} to {step['i'] * tile + len(step['m'])}, keys from"
                f" {step['j'] * tile + 1}: rows where m rises: {sum(value < 1 for value in step['shrink'])}"
                for number, step in enumerate(steps, 1)
            ),
        ),
    )


def attention_measured(recordings: Sequence[Recording]) -> Explorer:
    """Time or peak memory of causal attention against the context, by back end, as recorded.

    Args:
        recordings: of the sweep `attention`; a reader chooses among their machines.
    Raises: ValueError when there is none.
    """
    if not recordings:
        raise ValueError("recordings is empty, one of the sweep 'attention' is needed")
    machines: list[str] = []
    rows: list[dict[str, Any]] = []
    facts: list[str] = []
    for recording in recordings:
        params = recording.params
        about = (
            f"{recording.machine['name']}, {params['n_heads']} heads of {params['d_head']} in {DTYPES[params['dtype']]}"
        )
        for point in recording.points:
            row = {"machine": len(machines), "backend": point.at["backend"], "n": point.at["context"]}
            rows.append(row | {"ms": 1e3 * point.median, "mb": (point.peak_bytes or 0) / 1e6})
        machines.append(about)
        longest = max((point.at["context"] for point in recording.points), default=0)
        for point in recording.points:
            if point.at["context"] == longest:
                facts.append(
                    f"{about}, {point.at['backend']}, {longest:,} tokens: {1e3 * point.median:.4g} ms,"
                    f" {(point.peak_bytes or 0) / 1e6:.4g} MB"
                )
        facts += [f"{about}, {left['at']['backend']}: {left['why']}" for left in recording.left_out]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    quantities = ["time, ms", "peak memory, MB"]
    controls = [menu("machine", "Machine", machines, machines[0]), menu("what", "Shown", quantities, quantities[0])]
    shown = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.machine == machine")
        .transform_calculate(value="what == 0 ? datum.ms : datum.mb")
    )
    contexts = sorted({row["n"] for row in rows})
    x = alt.X(
        "n:Q",
        scale=alt.Scale(type="log", nice=False, padding=20),
        axis=alt.Axis(values=contexts, format=",d", labelOverlap=True),
        title="Context, tokens",
    )
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(type="log", nice=False, padding=20),
        axis=alt.Axis(format=",~g", tickCount=6),
        title="Time, ms, or peak memory, MB",
    )
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    colour = alt.Color("backend:N", scale=alt.Scale(domain=backends, range=COLOURS[: len(backends)]), legend=legend)
    dash = alt.StrokeDash("backend:N", scale=alt.Scale(domain=backends, range=DASHES[: len(backends)]), legend=legend)
    return Explorer(
        name="attention-measured",
        chart=alt.layer(
            shown.mark_line(strokeWidth=3).encode(x=x, y=y, color=colour, strokeDash=dash),
            shown.mark_point(filled=True, size=60, opacity=1).encode(
                x=x, y=y, color=colour, tooltip=["backend:N", "n:Q", "ms:Q", "mb:Q"]
            ),
        )
        .add_params(*controls)
        .properties(width="container", height=320),
        alt_text="Line chart on two logarithmic axes: time or peak memory of causal attention against the context, a"
        " line for each back end. Menus choose the machine and what is shown. The memory of math rises with the square"
        " of the context, that of the others in proportion to it.",
        caption="Causal attention by back end, measured with `gptlite record attention`; tiled is the package's own.",
        facts=tuple(facts),
    )


def _fresh() -> Any:
    """Numbers that the step did not touch are paler."""
    return alt.condition("datum.fresh", alt.value(1), alt.value(0.45))
