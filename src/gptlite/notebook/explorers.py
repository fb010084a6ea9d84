"""The explorers: one small function each, whose numbers come from `gptlite.arithmetic` or from a recording."""

from typing import Any

import altair as alt

from gptlite.arithmetic import ModelShape, decode_costs, total
from gptlite.config import preset
from gptlite.hardware import gpu
from gptlite.notebook.chart import BLUE, ORANGE, VERMILION, Explorer

FRONT_GPUS = ("RTX 2080 Ti", "A100 80GB SXM", "H100 SXM")  # from the lowest ridge point to the highest
SHOWN = 15  # characters drawn, the most probable first


def next_character(recorded: dict[str, Any]) -> Explorer:
    """How temperature, top-k and top-p turn the model's logits into the distribution that a character is drawn from.

    The chart computes what `gptlite.sampling.probabilities` computes, from the recorded logits, as the sliders move.

    Args:
        recorded: `chars`, the vocabulary, and `prompts`, each with its `prompt` and the `logits` [V] after it; the data
            of a recording by `gptlite record next-character`.
    Raises: ValueError when a prompt has not one logit per character.
    """
    chars, prompts = recorded["chars"], recorded["prompts"]
    for entry in prompts:
        if len(entry["logits"]) != len(chars):
            raise ValueError(f"{len(entry['logits'])} logits after {entry['prompt']!r}, {len(chars)} are needed")
    rows = [
        {"prompt": i, "token": token, "character": _shown(chars[token]), "logit": logit}
        for i, entry in enumerate(prompts)
        for token, logit in enumerate(entry["logits"])
    ]
    controls = [
        alt.param(
            name="prompt",
            value=0,
            bind=alt.binding_select(
                options=list(range(len(prompts))), labels=[_shown(entry["prompt"]) for entry in prompts], name="Prompt "
            ),
        ),
        alt.param(name="temperature", value=1, bind=alt.binding_range(min=0, max=2, step=0.05, name="Temperature ")),
        alt.param(name="top_k", value=len(chars), bind=alt.binding_range(min=1, max=len(chars), step=1, name="Top-k ")),
        alt.param(name="top_p", value=1, bind=alt.binding_range(min=0.01, max=1, step=0.01, name="Top-p ")),
    ]
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.prompt == prompt")
        .transform_window(
            rank="row_number()", sort=[alt.SortField("logit", order="descending"), alt.SortField("token")]
        )
        .transform_window(shared_rank="rank()", sort=[alt.SortField("logit", order="descending")])
        .transform_joinaggregate(highest="max(logit)")
        .transform_calculate(
            own="exp(datum.logit - datum.highest)",
            weight="temperature == 0 ? (datum.rank == 1 ? 1 : 0) : exp((datum.logit - datum.highest) / temperature)",
        )
        # equal logits at the border of top-k all stay
        .transform_calculate(in_k="datum.shared_rank <= top_k ? datum.weight : 0")
        .transform_joinaggregate(own_sum="sum(own)", k_sum="sum(in_k)")
        .transform_calculate(q="datum.in_k / datum.k_sum")
        # a character stays while those before it have not reached p, so that the one that crosses p is kept; short of p
        # by rounding alone counts as reached
        .transform_window(so_far="sum(q)", sort=[alt.SortField("rank")])
        .transform_calculate(in_p="top_p >= 1 || datum.so_far - datum.q < top_p * (1 - 1e-12) ? datum.q : 0")
        .transform_joinaggregate(p_sum="sum(in_p)")
        .transform_calculate(
            probability="datum.in_p / datum.p_sum",
            own_probability="datum.own / datum.own_sum",
            is_kept="datum.in_p > 0 ? 1 : 0",
            bits="datum.in_p > 0 ? -datum.in_p / datum.p_sum * log(datum.in_p / datum.p_sum) / LN2 : 0",
        )
    )
    shown = base.transform_filter(f"datum.rank <= {SHOWN}")
    y = alt.Y("character:N", sort=alt.EncodingSortField("rank", op="min"), title="Next character")
    x = alt.X(
        "probability:Q",
        scale=alt.Scale(domain=[0, 1.12], nice=False),  # room for the label of a bar near 100 %
        title="Probability (%)",
        axis=alt.Axis(labelExpr="round(datum.value * 100)", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
    )
    names = {"drawn": "drawn from", "own": "model's own"}
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=list(names.values()), range=[BLUE, ORANGE]),
        legend=alt.Legend(orient="top", title=None, symbolType="square", labelLimit=0),
    )
    bars = shown.transform_calculate(series=repr(names["drawn"])).mark_bar().encode(y=y, x=x, color=colour)
    ticks = (
        shown.transform_calculate(series=repr(names["own"]))
        .mark_tick(thickness=3, opacity=1)
        .encode(y=y, x="own_probability:Q", color=colour)
    )
    labels = (
        shown.transform_filter("datum.probability > 0")
        .transform_calculate(end="max(datum.probability, datum.own_probability)")
        .mark_text(align="left", dx=6)
        .encode(y=y, x="end:Q", text=alt.Text("probability:Q", format=".1%"))
    )
    summary = (
        base.transform_aggregate(kept="sum(is_kept)", entropy="sum(bits)")
        .transform_calculate(words="datum.kept + ' kept, entropy ' + format(datum.entropy, '.2f') + ' bits'")
        .mark_text(align="right", baseline="bottom", dx=-4, dy=-4)
        .encode(text="words:N", x=alt.value("width"), y=alt.value("height"))
    )
    chart = alt.layer(bars, ticks, labels, summary).add_params(*controls).properties(width="container", height=360)
    return Explorer(
        name="next-character",
        chart=chart,
        alt_text=f"Bar chart of the {SHOWN} most probable next characters after a prompt, with sliders for temperature,"
        " top-k and top-p; a mark on each bar shows the model's own probability, at temperature 1.",
        caption="The distribution that the next character is drawn from, as temperature, top-k and top-p move.",
        facts=tuple(_most_likely(chars, entry) for entry in prompts),
    )


def front_page(
    presets: tuple[str, ...] = ("gpt2", "1b", "7b"), gpus: tuple[str, ...] = FRONT_GPUS, most_context: int = 32_768
) -> Explorer:
    """How much work each byte does that a decode step reads from memory, against what GPUs could do meanwhile.

    A decode step's FLOPs and bytes grow linearly with batch and context; the chart gets both lines' coefficients from
    `gptlite.arithmetic.decode_costs`.

    Args:
        presets: models to choose from.
        gpus: names in the book's table of GPUs, whose ridge points are drawn.
        most_context: upper end of the context's slider, in tokens.
    """
    rows = []
    for i, name in enumerate(presets):
        shape = ModelShape.of(preset(name))
        one, two = (total(decode_costs(shape, 1, n, bytes_per_weight=1, bytes_per_value=1)) for n in (1, 2))
        rows.append(
            {"model": i, "flops": one.flops, "flops_per_token": two.flops - one.flops}
            | {"weights": one.weight_bytes, "values_per_token": two.kv_bytes - one.kv_bytes}
        )
    formats: dict[str, Any] = {
        "labels": ["4 (fp32)", "2 (bf16)", "1 (int8, fp8)", "0.5 (int4)"],
        "options": [4, 2, 1, 0.5],
    }
    controls = [
        alt.param(
            name="model",
            value=len(presets) - 1,
            bind=alt.binding_select(options=list(range(len(presets))), labels=list(presets), name="Model "),
        ),
        alt.param(
            name="context",
            value=1024,
            bind=alt.binding_range(min=128, max=most_context, step=128, name="Context, tokens "),
        ),
        alt.param(name="batch", value=8, bind=alt.binding_range(min=1, max=256, step=1, name="Batch, sequences ")),
        alt.param(name="weight_bytes", value=2, bind=alt.binding_select(**formats, name="Bytes per weight ")),
        alt.param(name="value_bytes", value=2, bind=alt.binding_select(**formats, name="Bytes per cached value ")),
    ]
    intensity = (
        "datum.B * (datum.flops + (context - 1) * datum.flops_per_token)"
        " / (weight_bytes * datum.weights + value_bytes * datum.B * context * datum.values_per_token)"
    )
    models = alt.Chart(alt.Data(values=rows)).transform_filter("datum.model == model")
    x = alt.X(
        "B:Q",
        scale=alt.Scale(type="log", base=2, domain=[1, 256]),
        axis=alt.Axis(values=[2**e for e in range(9)], format="d"),
        title="Batch, sequences",
    )
    work = "Work per byte, FLOP per byte"
    y = alt.Y(
        "intensity:Q",
        scale=alt.Scale(type="log", domain=[0.2, 1000], nice=False),
        axis=alt.Axis(values=[1, 10, 100, 1000], format="d"),
        title=work,
    )
    line = (
        models.transform_calculate(e="sequence(0, 8.25, 0.25)")
        .transform_flatten(["e"])
        .transform_calculate(B="pow(2, datum.e)")
        .transform_calculate(intensity=intensity)
        .mark_line(color=BLUE, strokeWidth=3)
        .encode(x=x, y=y)
    )
    here = models.transform_calculate(B="batch").transform_calculate(
        intensity=intensity,
        words="format(datum.intensity, '.1f') + ' FLOP per byte, ' + "
        f"format(min(1, datum.intensity / {gpu(gpus[-1]).ridge_point}), '.1%') + ' of {gpus[-1]} peak'",
    )
    point = here.mark_point(color=VERMILION, filled=True, size=120, opacity=1).encode(x=x, y=y)
    words = here.mark_text(align="right", baseline="bottom", dx=-4, dy=-4).encode(
        x=alt.value("width"), y=alt.value("height"), text="words:N"
    )
    ridges = alt.Chart(alt.Data(values=[{"gpu": name, "ridge": gpu(name).ridge_point} for name in gpus]))
    rules = ridges.mark_rule(color=ORANGE, strokeDash=[6, 4], strokeWidth=2).encode(y=alt.Y("ridge:Q", title=work))
    names = (
        ridges.transform_calculate(words="datum.gpu + ', ' + format(datum.ridge, '.0f')")
        .mark_text(align="left", baseline="bottom", dx=4, dy=-2)
        .encode(y=alt.Y("ridge:Q", title=work), x=alt.value(0), text="words:N")
    )
    chart = alt.layer(rules, names, line, point, words).add_params(*controls)
    return Explorer(
        name="front-page",
        chart=chart.properties(width="container", height=320),
        alt_text="Line chart of the FLOPs that a decode step does per byte read from memory, against batch size from 1"
        " to 256; dashed lines show how many FLOPs per byte each GPU could do. Sliders move the context and the batch,"
        " menus choose the model and the bytes per number.",
        caption="Work per byte of one decode step, and ridge points of GPUs in 16-bit matrix products: below a dashed"
        " line, that GPU waits for its memory.",
        facts=tuple(
            f"{name}, batch 8, context 1,024 tokens, 2 bytes: {_intensity(name, 8, 1024):.2f} FLOP per byte"
            for name in presets
        )
        + tuple(f"{name}: ridge point {gpu(name).ridge_point:.0f} FLOP per byte" for name in gpus),
    )


def _intensity(name: str, batch: int, n_context: int) -> float:
    return total(decode_costs(ModelShape.of(preset(name)), batch, n_context)).intensity


def _shown(text: str) -> str:
    """Text in which line breaks and spaces at the ends can be seen."""
    if text in (" ", "\n"):
        return {" ": "space", "\n": "newline"}[text]
    return text.replace("\n", "⏎") if text.strip(" ") == text else f"“{text}”".replace("\n", "⏎")


def _most_likely(chars: str, entry: dict[str, Any]) -> str:
    token = max(range(len(chars)), key=entry["logits"].__getitem__)
    return f"after {_shown(entry['prompt'])}: most likely {_shown(chars[token])}, logit {entry['logits'][token]:.3f}"
