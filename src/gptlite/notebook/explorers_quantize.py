"""The explorers of the chapter on quantised weights: bytes against loss, and the times that arithmetic predicts."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from gptlite.arithmetic import decode_costs, kv_bytes_per_token, n_params, shipped_models, total
from gptlite.hardware import gpus
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

METHODS = {"rtn": "round to nearest", "gptq": "GPTQ", "awq": "AWQ", "qat": "trained (QAT)"}
COLORS = {"rtn": VERMILION, "gptq": BLUE, "awq": ORANGE, "qat": PURPLE}
SHAPES = {"rtn": "circle", "gptq": "square", "awq": "triangle-up", "qat": "diamond"}
GRIDS = {"128": "groups of 128", "128 clip": "groups of 128, clipped", "32": "groups of 32", "rows": "whole rows"}
MODELS = ("GPT-2", "Qwen2.5 1.5B", "Llama 2 7B", "Llama 3.1 8B", "Llama 3.1 70B")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def loss_rows(losses: Sequence[Recording], trained: Sequence[Recording] = ()) -> list[dict[str, Any]]:
    """Every quantisation of the trained model that was recorded, the most bits first.

    Args:
        losses: of `gptlite record quantized-losses`. trained: of `gptlite record quantized-training`.
    Returns: method, bits, grid, bytes_per_weight, model_bytes, loss, standard_error and divergence as recorded, and
        added, the loss above that of the model.
    """
    rows = [dict(row) for recording in losses for row in recording.data["rows"]]
    for recording in trained:
        for row in recording.data["rows"]:
            each = round(row["bytes_of_them"] / row["weights_in_codes"], 4)
            at = {"method": "qat", "bits": row["bits"], "grid": recording.params["grid"]}
            keep = ("model_bytes", "loss", "standard_error", "divergence")
            rows.append({**at, "bytes_per_weight": each} | {key: row[key] for key in keep})
    base = losses[0].data["loss"]
    order = list(METHODS)
    rows.sort(key=lambda row: (-row["bits"], list(GRIDS).index(row["grid"]), order.index(row["method"])))
    return [{**row, "added": row["loss"] - base} for row in rows]


def bits_against_loss(losses: Sequence[Recording], trained: Sequence[Recording] = ()) -> Explorer:
    """Loss of the trained model against the bits that a weight takes; the arguments are those of `loss_rows`."""
    base, rows = losses[0].data["loss"], loss_rows(losses, trained)
    grids = [name for name in GRIDS if any(row["grid"] == name for row in rows)]
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    data = [
        {
            "method": METHODS[row["method"]],
            "which": methods.index(row["method"]),
            "grid": grids.index(row["grid"]),
            "words": GRIDS[row["grid"]],
            "bits": row["bits"],
            "stored": 8 * row["bytes_per_weight"],
            "mb": row["model_bytes"] / 1e6,
            "loss": row["loss"],
        }
        for row in rows
    ]
    controls = [
        menu("grid", "Scales", ["all", *(GRIDS[name] for name in grids)], "all"),
        menu("method", "Method", ["all", *(METHODS[name] for name in methods)], "all"),
        slider("top", "Top of the loss axis, nats", 2.0, 1.55, 3.5, 0.05),
        slider("least", "Fewest bits", 2, 2, 8, 1),
    ]
    shown = alt.Chart(alt.Data(values=data)).transform_filter(
        "(grid == 0 || datum.grid == grid - 1) && (method == 0 || datum.which == method - 1) && datum.bits >= least"
    )
    names = [METHODS[name] for name in methods]
    legend = alt.Legend(orient="top", title=None, columns=2)  # one for color and shape
    x = alt.X("stored:Q", title="Bits for each weight, with scales", scale=alt.Scale(domain=[2, 9], nice=False))
    y = alt.Y(
        "loss:Q",
        title="Loss, nats per character",
        scale=alt.Scale(domainMin=round(base - 0.02, 2), domainMax=alt.ExprRef("top"), nice=False, zero=False),
    )
    tooltip = [
        alt.Tooltip("method:N"),
        alt.Tooltip("words:N", title="scales"),
        alt.Tooltip("stored:Q", title="bits", format=".2f"),
        alt.Tooltip("mb:Q", title="model, MB", format=".2f"),
        alt.Tooltip("loss:Q", format=".4f"),
    ]
    points = (
        shown.transform_filter("datum.loss <= top")
        .mark_point(size=90, strokeWidth=2, filled=True, opacity=0.85)
        .encode(
            x=x,
            y=y,
            tooltip=tooltip,
            color=alt.Color(
                "method:N",
                scale=alt.Scale(domain=names, range=[COLORS[name] for name in methods]),
                legend=legend,
            ),
            shape=alt.Shape(
                "method:N", scale=alt.Scale(domain=names, range=[SHAPES[name] for name in methods]), legend=legend
            ),
        )
    )
    rule = (
        alt.Chart(alt.Data(values=[{"loss": base}]))
        .mark_rule(color=GREEN, strokeDash=[6, 4], strokeWidth=2)
        .encode(y=alt.Y("loss:Q", title="Loss, nats per character"))
    )
    best = (
        shown.transform_window(
            place="rank()", sort=[alt.SortField("loss"), alt.SortField("stored")], frame=[None, None]
        )
        .transform_filter("datum.place == 1")
        .transform_calculate(
            words2="'least: ' + format(datum.loss, '.3f') + ', ' + datum.method",
            words3="datum.words + ', ' + format(datum.stored, '.2f') + ' bits'",
        )
    )
    above = (
        shown.transform_filter("datum.loss > top")
        .transform_aggregate(n="count()")
        .transform_filter("datum.n > 0")
        .transform_calculate(words="datum.n + ' above the top of the axis'")
        .mark_text(align="right", baseline="top", dx=-4, opacity=0.75)
        .encode(x=alt.value("width"), y=alt.value(46), text="words:N")
    )
    texts = [
        best.mark_text(align="right", baseline="top", dx=-4).encode(
            x=alt.value("width"), y=alt.value(6 + 18 * i), text=f"{field}:N"
        )
        for i, field in enumerate(("words2", "words3"))
    ]
    return Explorer(
        name="bits-against-loss",
        chart=alt.layer(rule, points, *texts, above).add_params(*controls).properties(width="container", height=360),
        alt_text="Scatter plot of the loss against the bits that a stored weight takes, scales included: circles for"
        " round to nearest, squares for GPTQ, triangles for AWQ, diamonds for training with rounding. A dashed line is"
        " the model in 16 bits. Menus choose the scales and the method, sliders the top of the axis and fewest bits.",
        caption="Loss of GPTlite by the bits of a stored weight, for each way to choose the codes.",
        facts=(
            f"16 bits: loss {base:.2f}",
            *(
                f"{row['bits']} bits, {METHODS[row['method']]}, {GRIDS[row['grid']]}:"
                f" {8 * row['bytes_per_weight']:.2f} bits stored, loss {row['loss']:.2f}"
                for row in rows
            ),
        ),
    )


def predicted_steps(model: str = "Llama 3.1 8B", card: str = "H100 SXM") -> Explorer:
    """The least time of a decode step by batch, with weights in 16 bits and in fewer, by `gptlite.arithmetic`.

    A step takes as long as the slower of its bytes and its FLOPs. Weights in few bits are multiplied in 16 bits, unless
    the inputs are in INT8 too, which doubles the peak.

    Args:
        model, card: those that are chosen at first.
    """
    rows = []
    for i, name in enumerate(MODELS):
        shape = shipped_models()[name]
        for batch in BATCHES:
            short, long = (total(decode_costs(shape, batch, n)) for n in (1, 1001))
            rows.append(
                {
                    "m": i,
                    "name": name,
                    "batch": batch,
                    "params": n_params(shape),
                    "weights": short.weight_bytes,
                    "flops": short.flops,
                    "flopsPerToken": (long.flops - short.flops) / 1000,
                    "kvPerToken": batch * kv_bytes_per_token(shape),
                }
            )
    cards = [(name, one) for name, one in gpus().items()]
    peaks = ", ".join(f"{one.peak_flops:g}" for _, one in cards)
    bands = ", ".join(f"{one.bandwidth:g}" for _, one in cards)
    controls = [
        menu("model", "Model", list(MODELS), model),
        menu("card", "GPU", [name for name, _ in cards], card),
        slider("bits", "Bits of a weight, with scales", 4.2, 2.2, 8.2, 0.5),
        menu("inputs", "Inputs", ["16 bits", "INT8 too"], "16 bits"),
        slider("context", "Context, tokens", 1000, 100, 32_000, 100),
        slider("prompt", "Prompt of a prefill, tokens", 1000, 100, 8000, 100),
    ]
    chosen = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.m == model")
        .transform_calculate(
            peak=f"[{peaks}][card]",
            band=f"[{bands}][card]",
            work="datum.flops + datum.flopsPerToken * context",
            kept="datum.kvPerToken * context",
        )
        .transform_calculate(
            before="1e3 * max(datum.work / datum.peak, (datum.weights + datum.kept) / datum.band)",
            after="1e3 * max(datum.work / (datum.peak * (inputs + 1)),"
            " (datum.weights * bits / 16 + datum.kept) / datum.band)",
        )
    )
    lines = chosen.transform_fold(["before", "after"], as_=["which", "ms"]).transform_calculate(
        family="datum.which == 'before' ? 'in 16 bits' : 'in fewer bits'"
    )
    domain, legend = ["in 16 bits", "in fewer bits"], alt.Legend(orient="top", title="Weights")
    color = alt.Color(
        "family:N",
        scale=alt.Scale(domain=domain, range=[VERMILION, BLUE]),
        legend=legend,
    )
    encoded = lines.encode(
        x=alt.X(
            "batch:Q",
            title="Batch, sequences",
            scale=alt.Scale(type="log", base=2, domain=[1, 256], nice=False),
            axis=alt.Axis(values=list(BATCHES)),
        ),
        y=alt.Y(
            "ms:Q",
            title="Least time of a decode step, ms",
            scale=alt.Scale(zero=True),
            axis=alt.Axis(minExtent=40),  # room for the largest numbers, so that the title stays in sight
        ),
        color=color,
    )
    one = chosen.transform_filter("datum.batch == 1")
    says = [
        "datum.name + ': ' + format(datum.params * 2 / 1e9, ',.3~r') + ' GB, then '"
        " + format(datum.params * bits / 8e9, ',.3~r') + ' GB'",
        "'batch 1: ' + format(datum.before / datum.after, '.2f') + ' times as fast'",
        "'prefill of ' + format(prompt, ',') + ': '"
        " + format(1e3 * (datum.flops * prompt + datum.flopsPerToken * prompt * prompt / 2) / datum.peak, ',.3~r')"
        " + ' ms, then '"
        " + format(1e3 * (datum.flops * prompt + datum.flopsPerToken * prompt * prompt / 2)"
        " / (datum.peak * (inputs + 1)), ',.3~r') + ' ms'",
    ]
    texts = [
        one.transform_calculate(words=words)
        .mark_text(align="left", baseline="top", dx=6)
        .encode(x=alt.value(0), y=alt.value(6 + 18 * i), text="words:N")
        for i, words in enumerate(says)
    ]
    chart = alt.layer(
        encoded.mark_line(strokeWidth=2).encode(
            strokeDash=alt.StrokeDash("family:N", scale=alt.Scale(domain=domain, range=[[6, 4], [1, 0]]), legend=legend)
        ),
        encoded.mark_point(filled=True, size=60, opacity=1).encode(
            shape=alt.Shape("family:N", scale=alt.Scale(domain=domain, range=["circle", "square"]), legend=legend),
            tooltip=[alt.Tooltip("family:N"), alt.Tooltip("batch:Q"), alt.Tooltip("ms:Q", format=".3~r")],
        ),
        *texts,
    )
    shape = shipped_models()[model]
    return Explorer(
        name="quantized-steps",
        chart=chart.add_params(*controls).properties(width="container", height=340),
        alt_text="Two lines, the least time of a decode step against the batch, with weights in 16 bits and in fewer."
        " They are far apart at a small batch and meet where arithmetic sets the time. Menus choose the model, the GPU"
        " and the inputs, sliders the bits, the context and the prompt of a prefill.",
        caption="Least time of a decode step by batch, with weights in 16 bits and in fewer, by arithmetic.",
        facts=(f"{model}: {n_params(shape) * 2 / 1e9:.3g} GB in 16 bits",),
    )
