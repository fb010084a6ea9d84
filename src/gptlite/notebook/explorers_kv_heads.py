"""The explorers of the chapter on fewer KV heads: bytes of the cache against loss, and against time."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from gptlite.arithmetic import ModelShape, kv_bytes_per_token, shipped_models
from gptlite.notebook.chart import BLUE, GREEN, SKY, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

FAMILIES = {"grouped": "fewer KV heads", "latent": "latent"}
STARTS = {
    "mean": "mean of the heads",
    "first": "first head",
    "random": "random",
    "weights": "factors of the weights",
    "data": "factors for the data",
}
WIDTH = 2 * 8 * 32  # values that a token of the trained model adds to a layer's cache: keys and values, heads, size


def runs(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """The conversions that `gptlite record kv-uptraining` wrote, each as flat values.

    Returns: kind, size, start, share of the multi-head cache, losses in nats per character (`after` is None without
        uptraining), recovered, tokens, recipe and curve.
    """
    rows = []
    for recording in recordings:
        for run, point in zip(recording.data["runs"], recording.points, strict=True):
            conversion, trained = run["conversion"], run["settings"] is not None
            width = conversion["size"] * 2 * 32 if conversion["kind"] == "grouped" else conversion["size"]
            rows.append(
                {
                    **conversion,
                    "share": width / WIDTH,
                    "original": run["losses"]["original"],
                    "before": run["losses"]["converted"],
                    "after": run["losses"]["after"] if trained else None,
                    "recovered": run["recovered"] if trained else None,
                    "tokens": run["tokens_seen"],
                    "recipe": point.at["recipe"],
                    "curve": run["loss_curve"],
                }
            )
    return rows


def best_runs(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Of each conversion (kind, size, start) the run with the least loss, the widest cache first."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in runs(recordings):
        key = (row["kind"], row["size"], row["start"])
        loss = row["before"] if row["after"] is None else row["after"]
        if key not in best or loss < (best[key]["after"] or best[key]["before"]):
            best[key] = row
    return sorted(best.values(), key=lambda row: (-row["share"], row["kind"], row["start"]))


def multi_head_values(shape: ModelShape) -> int:
    """Values that a token would add to a layer's cache if each query head had its own key and value."""
    return shape.n_heads * ((shape.d_nope + shape.d_value) if shape.d_latent else 2 * shape.d_head)


def cache_share(shape: ModelShape) -> float:
    """Share of the multi-head cache that a model keeps, in (0, 1]; windows are left out of it."""
    return kv_bytes_per_token(shape, 1) / shape.n_layers / multi_head_values(shape)


def bytes_against_loss(recordings: Sequence[Recording], model: str = "DeepSeek-V2") -> Explorer:
    """Validation loss of the trained model's conversions against what is left of its cache.

    Args:
        recordings: of `gptlite record kv-uptraining`. model: the known model that is marked at first.
    """
    models = shipped_models()
    chosen = best_runs(recordings)
    starts = [start for start in STARTS if any(row["start"] == start for row in chosen)]
    rows = [
        {
            "family": FAMILIES[row["kind"]],
            "name": ("G = " if row["kind"] == "grouped" else "r = ") + str(row["size"]),
            "start": starts.index(row["start"]),
            "words": STARTS[row["start"]],
            "share": row["share"],
            "before": row["before"],
            "after": row["after"],
        }
        for row in chosen
    ]
    original = runs(recordings)[0]["original"]
    known = [
        {"model": i, "name": name, "share": cache_share(shape), "token": kv_bytes_per_token(shape)}
        for i, (name, shape) in enumerate(models.items())
    ]
    controls = [
        menu("stage", "Loss", ["before and after uptraining", "before", "after"], "before and after uptraining"),
        menu("start", "New weights", ["all", *(STARTS[start] for start in starts)], "all"),
        slider("top", "Top of the loss axis, nats", 1.9, 1.5, 5.5, 0.1),
        menu("known", "Known model", list(models), model),
        slider("context", "Its context, tokens", 8192, 1024, 131_072, 1024),
        slider("batch", "Its sequences", 16, 1, 256, 1),
    ]
    x = alt.X(
        "share:Q",
        title="Share of the multi-head cache",
        scale=alt.Scale(type="log", domain=[1 / 64, 1.1], nice=False),
        axis=alt.Axis(
            values=[1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], labelExpr="'1/' + round(1 / datum.value)"
        ),
    )
    scale = alt.Scale(domainMin=1.4, domainMax=alt.ExprRef("top"), nice=False, zero=False)
    title = "Validation loss, nats per character"
    color = alt.Color(
        "family:N",
        scale=alt.Scale(domain=list(FAMILIES.values()), range=[BLUE, VERMILION]),
        legend=alt.Legend(orient="top", title=None),
    )
    shown = alt.Chart(alt.Data(values=rows)).transform_filter("start == 0 || datum.start == start - 1")
    tooltip = [
        alt.Tooltip("name:N", title="conversion"),
        alt.Tooltip("words:N", title="new weights"),
        alt.Tooltip("before:Q", title="before uptraining", format=".4f"),
        alt.Tooltip("after:Q", title="after", format=".4f"),
    ]
    before = shown.transform_filter("stage != 2 && datum.before <= top")
    after = shown.transform_filter("stage != 1 && isValid(datum.after) && datum.after <= top")
    both = shown.transform_filter("stage == 0 && isValid(datum.after)").transform_calculate(
        low="min(datum.after, top)", high="min(datum.before, top)"
    )
    base = alt.Chart(alt.Data(values=[{"loss": original, "share": 1}]))
    marked = alt.Chart(alt.Data(values=known)).transform_filter("datum.model == known")
    hidden = shown.transform_filter("stage != 2 ? datum.before > top : isValid(datum.after) && datum.after > top")
    lines = [  # short ones: a phone has no room for more
        "datum.name + ': ' + format(datum.token / 1024, ',.1f') + ' KiB per token'",
        "(datum.share == 1 ? 'all' : '1/' + format(1 / datum.share, '.3~r')) + ' of the multi-head cache'",
        "format(batch, ',') + (batch == 1 ? ' sequence' : ' sequences') + ' of ' + format(context, ',') + ' tokens:'",
        "format(datum.token * context * batch / 1e9, ',.1f') + ' GB in 16 bits'",
        "format(datum.token / datum.share * context * batch / 1e9, ',.1f') + ' GB with multi-head attention'",
    ]
    texts = [
        marked.transform_calculate(words=words)
        .mark_text(align="right", baseline="top", dx=-4)
        .encode(x=alt.value("width"), y=alt.value(6 + 18 * i), text="words:N")
        for i, words in enumerate(lines)
    ]
    above = (
        hidden.transform_aggregate(n="count()")
        .transform_filter("datum.n > 0")
        .transform_calculate(words="datum.n + ' above the top of the axis'")
        .mark_text(align="right", baseline="top", dx=-4, opacity=0.75)
        .encode(x=alt.value("width"), y=alt.value(96), text="words:N")
    )
    chart = alt.layer(
        base.mark_rule(color=GREEN, strokeDash=[6, 4], strokeWidth=2).encode(
            y=alt.Y("loss:Q", title=title, scale=scale)
        ),
        marked.mark_rule(color=SKY, strokeWidth=3, opacity=0.8).encode(x=x),
        both.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
            x=x, y=alt.Y("low:Q", title=title), y2="high:Q", color=color
        ),
        before.mark_point(size=90, strokeWidth=2, shape="diamond", fill="transparent").encode(
            x=x, y=alt.Y("before:Q", title=title), color=color, tooltip=tooltip
        ),
        after.mark_point(size=90, filled=True, opacity=1).encode(
            x=x, y=alt.Y("after:Q", title=title), color=color, tooltip=tooltip
        ),
        *texts,
        above,
    )
    return Explorer(
        name="bytes-against-loss",
        chart=chart.add_params(*controls).properties(width="container", height=360),
        alt_text="Scatter plot of the validation loss against the share of the multi-head cache that is left, on a"
        " logarithmic axis. Diamonds are conversions before uptraining, filled circles the same after it, joined by a"
        " line; blue for fewer KV heads, vermilion for latents. A dashed green line is the loss of the model before its"
        " conversion, and a light vertical line shows what a known model keeps. Menus choose the stage, where the new"
        " weights come from and the known model, sliders the top of the axis and the known model's context and batch.",
        caption="Validation loss of GPTlite against what is left of its cache, and what known models keep of theirs.",
        facts=(
            f"multi-head attention: loss {original:.2f}",
            *(
                f"{row['name']}, {row['words']}: 1/{1 / row['share']:.3g} of the cache, loss {row['before']:.2f}"
                + (f", after uptraining {row['after']:.2f}" if row["after"] else "")
                for row in rows
            ),
            *(f"{name}: 1/{1 / cache_share(shape):.3g} of the multi-head cache" for name, shape in models.items()),
        ),
    )


def step_times(recordings: Sequence[Recording]) -> Explorer:
    """Time of a decode step against the bytes that a token adds to the cache, as `gptlite record kv-heads` wrote it.

    Args:
        recordings: of the sweep, one or more machines.
    """
    rows: list[dict[str, Any]] = []
    cases: list[str] = []  # a machine, its model, a batch and a context: what one chart holds
    for recording in recordings:
        words = f"{recording.params['preset']} in {recording.params['dtype']} on {recording.machine['name']}"
        for point in recording.points:
            at = point.at
            case = f"batch {at['batch']:,}, context {at['context']:,}: {words}"
            cases += [] if case in cases else [case]
            rows.append(
                {
                    "case": cases.index(case),
                    "family": FAMILIES[at["attention"]],
                    "name": ("G = " if at["attention"] == "grouped" else "r = ") + str(at["size"]),
                    "kib": at["cache_bytes"] / 1024,
                    "ms": 1e3 * point.median,
                    "gb": at["cache_bytes"] * at["batch"] * at["context"] / 1e9,
                }
            )
    first = rows[len(recordings[0].points) - 1]["case"]  # the largest load of the first recording
    controls = [menu("load", "Load", cases, cases[first])]
    shown = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.case == load")
        .encode(
            x=alt.X("kib:Q", title="Cache, KiB per token", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "family:N",
                scale=alt.Scale(domain=list(FAMILIES.values()), range=[BLUE, VERMILION]),
                legend=alt.Legend(orient="top", title=None),
            ),
        )
    )
    y = alt.Y("ms:Q", title="Time per output token, ms", scale=alt.Scale(zero=True))
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip("ms:Q", format=".3~r"), alt.Tooltip("gb:Q", format=".3~r")]
    chart = alt.layer(
        shown.mark_line(strokeWidth=1.5, opacity=0.7).encode(
            y=y, strokeDash=alt.StrokeDash("family:N", scale=alt.Scale(range=[[1, 0], [6, 4]]), legend=None)
        ),
        shown.mark_point(filled=True, size=80, opacity=1).encode(y=y, tooltip=tooltip),
        shown.mark_text(dy=-12).encode(y=y, text="name:N"),
    )
    return Explorer(
        name="kv-heads-step-times",
        chart=chart.add_params(*controls).properties(width="container", height=320),
        alt_text="Two lines with markers, the time per output token against the bytes that a token adds to the cache:"
        " one for fewer KV heads, one for latents. A menu chooses batch, context, model and machine.",
        caption="Time of a decode step by what a token adds to the cache, as recorded.",
    )
