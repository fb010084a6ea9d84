"""The explorers of the chapter on pruning: what is removed where, and what comes back while the rest learns."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

CRITERIA = {
    "activation": "size of the output",
    "taylor": "Taylor, first order",
    "magnitude": "size of the weights",
    "random": "by lot",
}
PARTS = {"both": "heads and neurons", "heads": "heads", "neurons": "neurons"}
STARTS = {
    "one-shot": "half at once",
    "iterative": "a tenth at a time",
    "learned": "learned masks",
    "depth": "blocks instead",
    "random": "random weights",
}
COLORS = {"one-shot": BLUE, "iterative": ORANGE, "learned": GREEN, "depth": PURPLE, "random": VERMILION}
DASHES = {"one-shot": [1, 0], "iterative": [8, 3], "learned": [4, 2], "depth": [10, 3, 2, 3], "random": [2, 2]}
BAR = (0.6, 3.4)  # gap between heads and neurons, and length of the bar of neurons, in widths of a head's cell


def removed_parts(recording: Recording, gone: int = 50) -> Explorer:
    """Which heads of the trained model go first, how many neurons, and what that costs before any training.

    Args:
        recording: of `gptlite record prune-structures`. gone: percent that is removed at first.
    """
    data, shares = recording.data, [0, *recording.params["shares"]]
    criteria = [name for name in CRITERIA if name in data["heads"]]
    by = {(row["criterion"], row["gone"]): row for row in data["losses"]}
    n_blocks, n_heads = len(data["heads"][criteria[0]]), len(data["heads"][criteria[0]][0])
    step = shares[1]
    kept_heads = [n_heads, *(by[criteria[0], share]["heads"] for share in shares[1:])]
    kept_neurons = [by[criteria[0], share]["neurons"] for share in shares[1:]]
    whole, all_params = data["whole"]["neurons"], data["whole"]["n_params"]
    cells = []
    for c, name in enumerate(criteria):
        for b, block in enumerate(data["heads"][name]):
            order = [h for _, h in sorted((-score, h) for h, score in enumerate(block))]
            for h, score in enumerate(block):
                place = {"block": b + 1, "from": h, "to": h + 0.92, "rank": order.index(h)}
                cells.append({"by": c, "head": h + 1, "score": score, "size": score / max(block), **place})
    params_now = {
        part: [[by[name, share][f"n_params_{part}"] for share in shares[1:]] for name in criteria] for part in PARTS
    }
    losses = {part: [[by[name, share][f"loss_{part}"] for share in shares[1:]] for name in criteria] for part in PARTS}
    original = data["original"]
    at = f"min({len(shares) - 1}, round(gone / {step}))"
    named = list(PARTS)

    def pick(table: dict[str, list[list[float]]]) -> str:
        return f"{[table[part] for part in named]}[part][crit][place - 1]"

    controls = [
        menu("part", "Remove", list(PARTS.values()), PARTS["both"]),
        menu("crit", "Importance by", [CRITERIA[name] for name in criteria], CRITERIA[criteria[0]]),
        slider("gone", "Removed, %", gone, 0, shares[-1], step),
    ]
    computed = [
        alt.param(name="place", expr=at),
        alt.param(name="heads", expr=f"part == 2 ? {n_heads} : {kept_heads}[place]"),
        alt.param(name="neurons", expr=f"part == 1 ? {whole} : {[whole, *kept_neurons]}[place]"),
        alt.param(name="weights", expr=f"place == 0 ? {all_params} : {pick(params_now)}"),
        alt.param(name="loss", expr=f"place == 0 ? {original} : {pick(losses)}"),
    ]
    y = alt.Y("block:O", title="Block", axis=alt.Axis(labelAngle=0))
    end = n_heads + sum(BAR)

    def across(field: str) -> alt.X:
        return alt.X(f"{field}:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=None)

    shown = (
        alt.Chart(alt.Data(values=cells))
        .transform_filter("datum.by == crit")
        .transform_calculate(state="datum.rank < heads ? 'kept' : 'removed'")
    )
    color = alt.Color(
        "state:N",
        scale=alt.Scale(domain=["kept", "removed"], range=[BLUE, VERMILION]),
        legend=alt.Legend(orient="top", title=None),
    )
    tooltip = [alt.Tooltip("block:O"), alt.Tooltip("head:O"), alt.Tooltip("score:Q", format=".3~g")]
    bars = alt.Chart(alt.Data(values=[{"block": b + 1, "state": "kept"} for b in range(n_blocks)])).transform_calculate(
        begin=str(n_heads + BAR[0]), until=f"{n_heads + BAR[0]} + {BAR[1]} * neurons / {whole}"
    )
    rest = alt.Chart(
        alt.Data(values=[{"block": b + 1, "state": "removed"} for b in range(n_blocks)])
    ).transform_calculate(begin=f"{n_heads + BAR[0]} + {BAR[1]} * neurons / {whole}", until=str(end))
    lines = [
        f"heads + ' of {n_heads} heads and ' + format(neurons, ',') + ' of {whole:,} neurons'",
        "format(weights, ',') + ' parameters are left'",
        f"'loss ' + format(loss, '.2f') + ' untrained, whole {original:.2f}'",
    ]
    texts = [
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(words=words)
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(232 + 18 * i), text="words:N")
        for i, words in enumerate(lines)
    ]
    headings = [
        alt.Chart(alt.Data(values=[{"from": place, "words": words}]))
        .mark_text(align="left", baseline="bottom")
        .encode(x=across("from"), y=alt.value(-4), text="words:N")
        for place, words in ((0, "heads"), (n_heads + BAR[0], "neurons"))
    ]
    chart = alt.layer(
        shown.mark_rect(stroke="currentColor", strokeWidth=0.6).encode(
            x=across("from"),
            x2="to:Q",
            y=y,
            color=color,
            opacity=alt.Opacity("size:Q", legend=None, scale=alt.Scale(range=[0.45, 1])),
            tooltip=tooltip,
        ),
        shown.transform_filter("datum.state == 'removed'")
        .transform_calculate(middle="(datum.from + datum.to) / 2")
        .mark_text(text="×", fontSize=16)
        .encode(x=across("middle"), y=y),
        bars.mark_rect().encode(x=across("begin"), x2="until:Q", y=y, color=color),
        rest.mark_rect(opacity=0.35).encode(x=across("begin"), x2="until:Q", y=y, color=color),
        *headings,
        *texts,
    )
    return Explorer(
        name="removed-parts",
        chart=chart.add_params(*controls, *computed).properties(
            width="container", height=220, padding={"bottom": 70, "left": 5, "right": 5, "top": 5}
        ),
        alt_text="A grid with a row for each block: a cell for each attention head, the stronger the more important it"
        " is in its block, and a bar for the neurons of the feed-forward network. Blue parts are kept, vermilion ones"
        " removed. Menus choose what is removed and how importance is judged, a slider how much of it goes. Below stand"
        " the heads, neurons and parameters that are left, and the loss without any training.",
        caption="What is removed where: heads and neurons of the trained model, and the loss before any training.",
        facts=tuple(
            f"{row['gone']} % of both gone by {CRITERIA[row['criterion']]}: loss {row['loss_both']:.2f},"
            f" heads alone {row['loss_heads']:.2f}, neurons alone {row['loss_neurons']:.2f}"
            for row in data["losses"]
            if row["gone"] in (shares[1], 50)
        ),
    )


def runs(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """The runs that `gptlite record minitron` wrote, as flat values.

    Returns: start, lr, seed, steps, n_params, original and final loss over all held-out text, seconds, and the curve:
        rows of tokens seen, loss on a part of the text, parameters.
    """
    return [
        {
            "start": run["recipe"]["start"],
            "lr": run["settings"]["lr"],
            "seed": run["settings"]["seed"],
            "steps": run["settings"]["steps"],
            "n_params": run["n_params"],
            "tokens": run["tokens_seen"],
            "original": run["losses"]["original"],
            "after": run["losses"]["after"],
            "seconds": point.samples[0],
            "curve": run["loss_curve"],
        }
        for recording in recordings
        for run, point in zip(recording.data["runs"], recording.points, strict=True)
    ]


def recovery(recordings: Sequence[Recording]) -> Explorer:
    """Loss of the smaller models while they learn from the whole one, by where their weights come from.

    Args:
        recordings: of `gptlite record minitron`.
    """
    chosen = runs(recordings)
    starts = [start for start in STARTS if any(run["start"] == start for run in chosen)]
    points = [
        {"start": STARTS[run["start"]], "seed": run["seed"], "run": i, "tokens": row[0] / 1e3, "loss": row[1]}
        for i, run in enumerate(chosen)
        for row in run["curve"]
    ]
    top = max(point["tokens"] for point in points)
    step = min(row[0] for run in chosen for row in run["curve"] if row[0]) / 1e3
    finals = [
        (start, mean(run["after"] for run in chosen if run["start"] == start), sum(r["start"] == start for r in chosen))
        for start in starts
    ]
    controls = [
        menu("only", "Show", ["all", *(STARTS[start] for start in starts)], "all"),
        slider("seen", "Tokens seen, thousands", top, step, top, step),
        slider("roof", "Top of the loss axis, nats", 3.2, 1.6, 4.5, 0.1),
    ]
    names = [STARTS[start] for start in starts]
    legend = alt.Legend(orient="top", title=None, columns=2)  # one for both: a hidden and a shown one conflict
    color = alt.Color(
        "start:N",
        scale=alt.Scale(domain=names, range=[COLORS[start] for start in starts]),
        legend=legend,
    )
    dash = alt.StrokeDash("start:N", scale=alt.Scale(domain=names, range=[DASHES[s] for s in starts]), legend=legend)
    x = alt.X("tokens:Q", title="Tokens seen, thousands", scale=alt.Scale(domain=[0, top], nice=False))
    scale = alt.Scale(domain=[1.4, alt.ExprRef("roof")], nice=False, zero=False)
    y = alt.Y("loss:Q", title="Loss of a held-out part, nats", scale=scale, axis=alt.Axis(format=".2f"))
    shown = alt.Chart(alt.Data(values=points)).transform_filter(f"only == 0 || datum.start == {names}[only - 1]")
    lines = (
        shown.transform_filter("datum.loss <= roof")
        .mark_line(strokeWidth=1.6, opacity=0.85)
        .encode(x=x, y=y, color=color, strokeDash=dash, detail="run:N")
    )
    now = alt.Chart(alt.Data(values=[{}])).transform_calculate(where="seen").mark_rule(color=SKY, strokeWidth=2)
    at = shown.transform_filter(f"abs(datum.tokens - seen) < {step / 2}").transform_aggregate(
        least="mean(loss)", n="distinct(seed)", groupby=["start"]
    )
    words = (
        at.transform_window(place="row_number()", sort=[alt.SortField("least")])
        .transform_calculate(
            words="datum.start + ': ' + format(datum.least, '.3f') + (datum.n == 1 ? '' : ', mean of ' + datum.n)",
            at="6 + 18 * (datum.place - 1)",
        )
        .mark_text(align="right", baseline="top", dx=-4)
        .encode(x=alt.value("width"), y=alt.Y("at:Q", scale=None, axis=None), text="words:N")
    )
    chart = alt.layer(lines, now.encode(x=alt.X("where:Q")), words).resolve_scale(y="independent")
    return Explorer(
        name="recovery",
        chart=chart.add_params(*controls).properties(width="container", height=340),
        alt_text="Line chart of the loss of half-size models against the tokens that they have learned from, a line for"
        " each run, coloured and dashed by where the weights come from. The model that is cut in steps jumps up at each"
        " cut. A vertical line marks the chosen number of tokens, and the losses there stand at the top right, the"
        " lowest first. A menu shows one kind alone, sliders choose the tokens and the top of the axis.",
        caption="What comes back while a model of half the size learns from the whole one.",
        facts=tuple(
            f"{STARTS[start]}: loss {loss:.2f} over all held-out text, mean of {n}" for start, loss, n in finals
        ),
    )
