"""The explorers of the chapter on quantised keys and values: what they look like, what they take, and what is lost."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import torch
from torch import Tensor

from gptlite.arithmetic import ModelShape, n_params, shipped_models
from gptlite.cache.dense import DynamicCache
from gptlite.generate import prefill
from gptlite.hardware import gpus
from gptlite.model import GPTlite
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, SKY, VERMILION, Explorer, menu, slider
from gptlite.quantize.kv import RECIPES, KVFormat, recipe
from gptlite.record import Recording

NAMES = {"plain": "16 bits", "fp8": "fp8", "int8": "int8", "kivi4": "KIVI, 4 bits", "kivi2": "KIVI, 2 bits"}
COLOURS = (BLUE, SKY, GREEN, ORANGE, VERMILION)
CONTEXTS = [2**e for e in range(9, 18)]  # tokens
RESERVE = 0.1  # of a GPU's memory, for activations and buffers


# -- real keys and values -------------------------------------------------------------------------------------------


def keys_and_values(model: GPTlite, tokens: Tensor) -> dict[str, list[Tensor]]:
    """What each layer caches of a text.

    Args:
        tokens: [1, n].
    Returns: "keys" and "values", each a list of [G, n, D] over the layers.
    """
    cache = DynamicCache(model)
    prefill(model, tokens, cache)
    return {"keys": cache.k[0], "values": cache.v[0]}


def relative_error(x: Tensor, kv_format: KVFormat) -> float:
    """Root mean square of what rounding changes, over that of the keys or values x [G, n, D] themselves."""
    return float(((kv_format.rounded(x) - x).square().mean() / x.square().mean()).sqrt())


def outlier_channels(x: Tensor) -> float:
    """How much the channels of keys or values x [G, n, D] differ: the largest mean magnitude of one over the median."""
    sizes = x.abs().mean(1)  # [G, D]
    return float((sizes.amax(-1) / sizes.median(-1).values).mean())


def channel_map(model: GPTlite, tokens: Tensor, n_shown: int = 32, head: int = 0) -> Explorer:
    """Keys and values of one head of every layer, token by token and channel by channel.

    Args:
        tokens: [1, n], a text. n_shown: how many of its last tokens are drawn. head: KV head.
    """
    found = keys_and_values(model, tokens)
    maps, captions, facts = [], [], []
    for layer in range(len(model.blocks)):
        for what, name in enumerate(("keys", "values")):
            maps.append(found[name][layer][head, -n_shown:])  # [tokens, D]
            per = {
                axis: relative_error(found[name][layer], KVFormat("even", 2, axis, 32)) for axis in ("channel", "token")
            }
            words = f"error {100 * per['channel']:.0f} % per channel, {100 * per['token']:.0f} % per token"
            facts.append(f"layer {layer + 1}, {name}: {words}")
            captions.append({"layer": layer, "what": what, "words": words})
    by_token = torch.stack(maps, dim=1)  # [tokens, 2 * layers, D]
    rows = [
        {"token": token, "maps": [[round(v, 1) for v in line] for line in lines]}
        for token, lines in enumerate(by_token.tolist())
    ]
    D = by_token.shape[-1]
    cells = (
        # the same cells for every map, which only change their colour: to make a thousand anew takes far longer
        alt.Chart(alt.Data(values=rows))
        .transform_calculate(channel=f"sequence({D})")
        .transform_flatten(["channel"])
        .transform_calculate(x="datum.maps[2 * layer + what][datum.channel]")
        .mark_rect(aria=False)
        .encode(
            x=alt.X(
                "token:O", title="Token", axis=alt.Axis(labels=False, ticks=False), scale=alt.Scale(paddingInner=0)
            ),
            y=alt.Y("channel:O", title="Channel of the head", axis=alt.Axis(values=list(range(0, D, 4)))),
            color=alt.Color(
                "x:Q",
                title="value",
                scale=alt.Scale(domain=[-6, 0, 6], range=[BLUE, "#f7f7f7", VERMILION], clamp=True),
            ),
            tooltip=[alt.Tooltip("token:Q"), alt.Tooltip("channel:Q"), alt.Tooltip("x:Q", title="value")],
        )
    )
    text = (
        alt.Chart(alt.Data(values=captions))
        .transform_filter("datum.layer == layer && datum.what == what")
        .mark_text(align="left", baseline="bottom", dy=-6)
        .encode(x=alt.value(0), y=alt.value(0), text="words:N")
    )
    controls = [
        menu("what", "Shown", ["keys", "values"], "keys"),
        slider("layerNumber", "Layer", 3, 1, len(model.blocks), 1),
        alt.param(name="layer", expr="layerNumber - 1"),
    ]
    return Explorer(
        name="channel-map",
        chart=alt.layer(cells, text).add_params(*controls).properties(width="container", height=360),
        alt_text="Heat map of the keys or values of one head: tokens from left to right, channels from top to bottom,"
        " blue for negative and vermilion for positive numbers. In the keys some channels keep one colour across all"
        " tokens, in the values hardly any does. A menu chooses keys or values, a slider the layer.",
        caption="Keys and values of one head of GPTlite while it reads Shakespeare, and the error of rounding all heads"
        " of the layer to 2 bits.",
        facts=tuple(facts),
    )


# -- bytes and loss -------------------------------------------------------------------------------------------------


def added_loss(recordings: Sequence[Recording], residual: int = 32) -> dict[str, dict[str, Any]]:
    """What each recipe adds to the trained model's loss, of `gptlite record kv-rounding`.

    Args:
        residual: of KIVI's rows.
    Returns: by recipe "mean", "error" and "by_part", in nats per character; "plain" adds nothing.
    """
    rows = {row["case"]: row for recording in recordings for row in recording.data["losses"]}
    parts = len(next(iter(rows.values()))["by_part"])
    found: dict[str, dict[str, Any]] = {"plain": {"case": "plain", "mean": 0.0, "error": 0.0, "by_part": [0.0] * parts}}
    for name in RECIPES:
        for case in (name, f"{name} {residual}"):
            if case in rows:
                found[name] = rows[case]
    return found


def sequence_bytes(name: str, shape: ModelShape, context: int, residual: int = 128, group: int = 32) -> float:
    """Bytes of one sequence's cache while it decodes token number `context`, with 16 bits where nothing is rounded.

    Args:
        name: of a recipe. shape: of a model with plain keys and values in every layer.
        residual, group: of KIVI.
    """
    rules = recipe(name, residual, group)
    n_k, n_v = rules.key_rule.n_quantized(context - 1), rules.value_rule.n_quantized(context - 1)
    keys, values = rules.keys.token_bytes(shape.d_head), rules.values.token_bytes(shape.d_head)
    plain = 2 * shape.d_head * (2 * context - n_k - n_v)
    return shape.n_layers * shape.n_kv_heads * (n_k * keys + n_v * values + plain)


def sized_models() -> dict[str, ModelShape]:
    """The known models whose layers all cache keys and values of the whole text."""
    return {name: s for name, s in shipped_models().items() if not s.d_latent and not s.n_sliding}


def bytes_and_batch(recordings: Sequence[Recording], model: str = "Llama 3.1 8B", card: str = "H100 SXM") -> Explorer:
    """Bytes of a sequence by recipe, how many sequences fit a GPU, and what GPTlite loses by the same recipe.

    Args:
        recordings: of `gptlite record kv-rounding`. model, card: chosen at first.
    """
    models, cards, loss = sized_models(), gpus(), added_loss(recordings)
    rows = []
    for i, name in enumerate(NAMES):
        kivi = name.startswith("kivi")
        rows.append(
            {
                "name": NAMES[name],
                "order": i,
                "kivi": kivi,
                "bits": {"plain": 16, "kivi4": 4, "kivi2": 2}.get(name, 8),
                "numbers": {"int8": 1}.get(name, 2 if kivi else 0),  # of 16 bits beside each group
                "step": 1 if name == "plain" else 16,
                "loss": loss[name]["mean"] if name in loss else None,
            }
        )
    sizes = [
        {"kv": s.n_layers * s.n_kv_heads, "d": s.d_head, "weights": 2 * n_params(s) / 1e9} for s in models.values()
    ]
    controls = [
        menu("model", "Model", list(models), model),
        menu("card", "GPU", list(cards), card),
        menu("contextPower", "Context, tokens", [f"{n:,}" for n in CONTEXTS], "8,192"),
        slider("residual", "KIVI's residual R", 128, 32, 512, 32),
        menu("groupPower", "KIVI's group", ["16", "32"], "32"),
        alt.param(name="context", expr=f"{CONTEXTS[0]} * pow(2, contextPower)"),
        alt.param(name="group", expr="16 * pow(2, groupPower)"),
        alt.param(name="sizes", value=sizes),
        alt.param(name="memory", value=[c.memory_bytes / 1e9 for c in cards.values()]),
    ]
    final = "(context - 1)"
    shown = (
        alt.Chart(alt.Data(values=rows))
        .transform_calculate(
            d="sizes[model].d",
            nk=f"datum.kivi ? floor({final} / residual) * residual : floor({final} / datum.step) * datum.step",
            nv=f"datum.kivi ? max(0, {final} - residual) : floor({final} / datum.step) * datum.step",
        )
        .transform_calculate(
            each="datum.d * datum.bits / 8 + 2 * datum.numbers * (datum.kivi ? datum.d / group : 1)",
        )
        .transform_calculate(
            gb="sizes[model].kv * (datum.each * (datum.nk + datum.nv)"
            " + 2 * datum.d * (2 * context - datum.nk - datum.nv)) / 1e9",
        )
        .transform_calculate(
            batch=f"max(0, floor(({1 - RESERVE} * memory[card] - sizes[model].weights) / datum.gb))",
        )
        .transform_calculate(
            words="format(datum.gb, '.3~r') + ' GB, ' + format(datum.batch, ',d') + ' fit'",
            lost="isValid(datum.loss) ? 'loss ' + (abs(datum.loss) < 0.0005 ? '+0.000'"
            " : format(datum.loss, '+.3f')) : 'not recorded'",
        )
    )
    y = alt.Y(
        "name:N", sort=list(NAMES.values()), title=None, scale=alt.Scale(paddingInner=0.35), axis=alt.Axis(ticks=False)
    )
    x = alt.X("gb:Q", title="Cache of one sequence, GB", scale=alt.Scale(zero=True))
    colour = alt.Color("name:N", scale=alt.Scale(domain=list(NAMES.values()), range=list(COLOURS)), legend=None)
    bars = shown.mark_bar(opacity=0.75).encode(x=x, y=y, color=colour)
    text = shown.mark_text(align="left", dx=6, dy=-7).encode(x=alt.value(0), y=y, text="words:N")
    lost = shown.mark_text(align="left", dx=6, dy=9).encode(x=alt.value(0), y=y, text="lost:N")
    head = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(
            words=f"'weights ' + format(sizes[model].weights, '.3~r') + ' GB, {100 * RESERVE:.0f} % of '"
            " + format(memory[card], ',d') + ' GB kept free'"
        )
        .mark_text(align="left", baseline="bottom", dy=-6)
        .encode(x=alt.value(-60), y=alt.value(0), text="words:N")  # above the names too, or a phone cuts it
    )
    shape, context = models[model], 8192
    return Explorer(
        name="kv-bytes-and-batch",
        chart=alt.layer(bars, text, lost, head).add_params(*controls).properties(width="container", height=300),
        alt_text="Bars: the gigabytes of one sequence's cache in 16 bits, fp8, int8, and KIVI with 4 and 2 bits, each"
        " with the number of sequences that fit the GPU beside the weights, and what the recipe adds to the loss of"
        " GPTlite. Menus choose the model, the GPU, the context and KIVI's group, a slider its residual.",
        caption="Bytes of a sequence and how many fit, by arithmetic with the scales and the residual; the loss is that"
        " of GPTlite, recorded with a residual of 32.",
        facts=tuple(
            f"{NAMES[name]}: {sequence_bytes(name, shape, context) / 1e9:.3f} GB for {context:,} tokens of {model}"
            for name in NAMES
        ),
    )


def step_times(recordings: Sequence[Recording]) -> Explorer:
    """Time of a decode step and bytes of the cache by recipe and context, as `gptlite record kv-quant` wrote them.

    Args:
        recordings: of the sweep, one or more machines.
    """
    rows, cases = [], []
    for recording in recordings:
        words = f"{recording.params['preset']} in {recording.params['dtype']} on {recording.machine['name']}"
        for point in recording.points:
            case = f"batch {point.at['batch']:,}: {words}"
            cases += [] if case in cases else [case]
            rows.append(
                {
                    "load": cases.index(case),
                    "name": NAMES[point.at["recipe"]] if point.at["recipe"] != "plain" else "not rounded",
                    "context": point.at["context"],
                    "ms": 1e3 * point.median,
                    "mb": point.at["cache_bytes"] / 1e6,
                }
            )
    names = ["not rounded", *(name for key, name in NAMES.items() if key != "plain")]
    controls = [
        menu("load", "Recorded", cases, cases[0]),
        menu("what", "Shown", ["time of a step", "bytes of the cache"], "time of a step"),
    ]
    legend = alt.Legend(orient="top", title=None, columns=3)
    shown = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.load == load")
        .transform_calculate(shown="what == 0 ? datum.ms : datum.mb")
        .encode(
            x=alt.X("context:Q", title="Context, tokens", scale=alt.Scale(zero=True)),
            y=alt.Y("shown:Q", title=None, scale=alt.Scale(zero=True)),
            color=alt.Color(
                "name:N",
                scale=alt.Scale(domain=names, range=list(COLOURS)),
                legend=legend,
            ),
        )
    )
    dashes = alt.StrokeDash(
        "name:N", scale=alt.Scale(domain=names, range=[[1, 0], [6, 4], [2, 2], [8, 3, 2, 3], [4, 2]]), legend=legend
    )
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip("ms:Q", format=".3~r"), alt.Tooltip("mb:Q", format=".3~r")]
    title = (  # of the axis, which changes with the menu
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(words="what == 0 ? 'Time per output token, ms' : 'Cache of the batch, MB'")
        .mark_text(align="left", baseline="bottom", dy=-4)
        .encode(x=alt.value(0), y=alt.value(0), text="words:N")
    )
    return Explorer(
        name="kv-quant-step-times",
        chart=alt.layer(
            shown.mark_line(strokeWidth=2).encode(strokeDash=dashes),
            shown.mark_point(filled=True, size=70, opacity=1).encode(tooltip=tooltip),
            title,
        )
        .add_params(*controls)
        .properties(width="container", height=320),
        alt_text="Lines with markers by context: the time per output token, or by a menu the bytes of the cache, for"
        " keys and values that are not rounded, in fp8, in int8, and by KIVI in 4 and 2 bits. A second menu chooses the"
        " recording.",
        caption="Time of a decode step and bytes of the cache by recipe and context, as recorded.",
    )
