"""The explorers of the chapter on the KV cache: how large it is, where its tokens lie, and what a token then costs."""

import copy
from collections.abc import Sequence
from typing import Any

import altair as alt
import torch

from gptlite.arithmetic import kv_bytes, kv_bytes_per_token, largest_batch, n_params, shipped_models
from gptlite.cache.dense import DynamicCache, RingCache, StaticCache
from gptlite.generate import prefill
from gptlite.hardware import gpu, gpus
from gptlite.model import GPTlite
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, SKY, VERMILION, Explorer, menu, slider
from gptlite.notebook.explorers_prefill import DTYPES
from gptlite.notebook.explorers_roofline import KEYS, LONGEST, RESERVE
from gptlite.record import Recording

BYTES: dict[str, Any] = {
    "options": [4, 2, 1, 0.5],
    "labels": ["4 (fp32)", "2 (bf16, fp16)", "1 (fp8, int8)", "0.5 (int4)"],
}
SMALLEST, WIDEST = 0.5, 16_384  # KiB per token, ends of the axis
NAMES = {"none": "no cache", "dynamic": "dynamic cache", "static": "static cache"}


# -- how large it is ----------------------------------------------------------------------------------------------


def cache_size(model: str = "Llama 3.1 8B", card: str = "H100 SXM", n_context: int = 4096) -> Explorer:
    """The reader's own shape among the known models: bytes per token, bytes of a sequence, and the largest batch.

    Args:
        model: that the sliders begin at; card: the GPU at first; both by the book's names.
        n_context: tokens of each sequence at first.
    Raises: ValueError when the model's cache is not 2 L G D values (MLA), which the sliders cannot say.
    """
    models, cards = shipped_models(), list(gpus().values())
    shape = models[model]
    if shape.kind == "MLA":
        raise ValueError(f"model is {model!r}, whose latent the sliders cannot say")
    weights = round(2 * n_params(shape) / 1e9)
    controls = [
        slider("layers", "Layers", shape.n_layers, 1, 128, 1),
        slider("heads", "KV heads", shape.n_kv_heads, 1, 128, 1),
        slider("size", "Head size", shape.d_head, 16, 256, 16),
        alt.param(name="value_bytes", value=2, bind=alt.binding_select(**BYTES, name="Bytes per value ")),
        slider("context", "Context, tokens", n_context, 1024, LONGEST, 1024),
        slider("weights", "Weights, GB", weights, 0, 160, 1),
        menu("card", "GPU", list(gpus()), card),
        menu("known", "Known model", list(models), model),
        alt.param(name="memory", expr=f"{[c.memory_bytes for c in cards]}[card]"),
    ]
    x = alt.X(
        "token:Q",
        scale=alt.Scale(type="log", domain=[SMALLEST, WIDEST], nice=False, clamp=True),
        axis=alt.Axis(values=[1, 8, 64, 512, 4096], format=",", grid=False),
        title="Keys and values, KiB per token of context",
    )
    y_title, height, top = "Sequences that fit", 340, 62  # px; the lines of words stand above the top
    y_scale = alt.Scale(type="log", domain=[1, 10_000], nice=False, clamp=True, range=[height, top])
    y_axis = alt.Axis(values=[1, 10, 100, 1000, 10_000], format=",")
    y = alt.Y("sequences:Q", title=y_title, scale=y_scale, axis=y_axis)

    def fitting(base: alt.Chart, weight_bytes: str) -> alt.Chart:
        """With `token` in KiB per token of context, how many sequences fit beside the weights."""
        return base.transform_calculate(left=f"memory * {1 - RESERVE} - {weight_bytes}").transform_calculate(
            sequences="datum.left / (datum.token * 1024 * context)"
        )

    rows = [
        {
            "model": i,
            "name": name,
            "params": n_params(one),
            "values": kv_bytes_per_token(one, 1) / one.n_layers,
            "full": one.n_layers - one.n_sliding,
            "sliding": one.n_sliding,
            "window": one.window,
        }
        for i, (name, one) in enumerate(models.items())
    ]
    keys = KEYS.format(n="context")
    all_known = fitting(
        alt.Chart(alt.Data(values=rows)).transform_calculate(
            token=f"value_bytes * datum.values * {keys} / context / 1024"
        ),
        "datum.params * 2",
    ).transform_calculate(fit="max(0, floor(datum.sequences))")
    known = all_known.transform_filter("datum.fit >= 1")
    chosen = all_known.transform_filter("datum.model == known")
    steps = alt.Data(values=[{"token": SMALLEST * 2 ** (e / 4)} for e in range(61)])
    line = fitting(alt.Chart(steps), "weights * 1e9").transform_filter(
        "datum.sequences >= 1 && datum.sequences <= 10000"
    )
    own = fitting(
        alt.Chart(alt.Data(values=[{}])).transform_calculate(token="2 * layers * heads * size * value_bytes / 1024"),
        "weights * 1e9",
    ).transform_calculate(fit="max(0, floor(datum.sequences))")
    fits = alt.Y("fit:Q", title=y_title, scale=y_scale, axis=y_axis)
    point: dict[str, Any] = {"filled": True, "opacity": 1}
    lines = [
        (own, "'yours: ' + format(datum.token, ',.1f') + ' KiB per token, '"
         " + format(datum.token * 1024 * context / 1e9, ',.2f') + ' GB each'"),
        (own, "datum.left < 0 ? 'the weights do not fit' : format(datum.fit, ',d') +"
         " (datum.fit == 1 ? ' sequence' : ' sequences') + ' beside ' + weights + ' GB of weights'"),
        (chosen, "datum.name + ': ' + format(datum.token, ',.1f') + ' KiB, ' + (datum.left < 0 ? 'too large' :"
         " format(datum.fit, ',d') + (datum.fit == 1 ? ' sequence' : ' sequences'))"),
    ]  # fmt: skip
    texts = [
        base.transform_calculate(words=words)
        .mark_text(align="right", baseline="top", dx=-4)
        .encode(x=alt.value("width"), y=alt.value(2 + 18 * i), text="words:N")
        for i, (base, words) in enumerate(lines)
    ]
    chart = alt.layer(
        line.mark_line(color=BLUE, strokeWidth=2, strokeDash=[6, 4]).encode(x=x, y=y),
        known.mark_point(color=GREEN, size=50, shape="square", **point).encode(x=x, y=fits, tooltip="name:N"),
        chosen.transform_filter("datum.fit >= 1").mark_point(color=GREEN, size=220, shape="square", strokeWidth=2)
        .encode(x=x, y=fits),
        own.transform_filter("datum.fit >= 1").mark_point(color=VERMILION, size=130, **point).encode(x=x, y=fits),
        *texts,
    )  # fmt: skip
    memory = gpu(card).memory_bytes
    return Explorer(
        name="cache-size",
        chart=chart.add_params(*controls).properties(width="container", height=height),
        alt_text="Scatter plot on two logarithmic axes: the number of sequences that fit a GPU against the bytes of"
        " keys and values per token. Small squares are known models and an outlined square is the chosen one, a filled"
        " circle is the reader's own shape, and a dashed line is where it would lie with more or fewer bytes per token."
        " Sliders set layers, KV heads, head size, context and weights; menus bytes per value, GPU and known model.",
        caption="The cache of your own shape among known models, with their weights in 16 bits and a tenth of the"
        " memory kept free.",
        facts=tuple(
            f"{name}: {kv_bytes_per_token(one) / 1024:.1f} KiB per token, {kv_bytes(one, n_context) / 1e9:.2f} GB for"
            f" {n_context:,} tokens, {largest_batch(one, n_context, memory, RESERVE)} sequences on {card}"
            for name, one in models.items()
        ),
    )


# -- where its tokens lie -----------------------------------------------------------------------------------------


@torch.inference_mode()
def slot_trace(
    model: GPTlite, chunks: Sequence[int] = (4, 4, 1, 1, 1, 1, 1, 1), max_tokens: int = 16, window: int = 5
) -> list[dict[str, Any]]:
    """What lies in each slot of three caches after each step, read out of the caches themselves.

    Args:
        model: runs once over each cache; with the ring, a copy whose attention has a window.
        chunks: new tokens of each step. max_tokens: of the static cache. window: of the ring's model.
    Returns: a row per cache, step and slot: `position` of its token (-1 when it is empty), and `what` happened to it in
        the step: new, copied, kept or empty.
    Raises: ValueError when the chunks don't fit the static cache or the model's context.
    """
    if sum(chunks) > max_tokens:
        raise ValueError(f"chunks have {sum(chunks)} tokens, the static cache holds {max_tokens}")
    short = copy.deepcopy(model)
    for block in short.blocks:
        block.mha.window = window
    text = torch.arange(sum(chunks))[None] % model.token_embedding.num_embeddings  # [1, n]
    caches: dict[str, tuple[GPTlite, DynamicCache | StaticCache]] = {
        "dynamic": (model, DynamicCache(model)),
        "static": (model, StaticCache(model, 1, max_tokens, bucket=1)),
        f"ring (window {window})": (short, RingCache(short, 1, chunk=max(chunks))),
    }
    rows = []
    for name, (owner, cache) in caches.items():
        before, where = torch.full((max_tokens,), -1), None
        for step, part in enumerate(text.split(list(chunks), dim=1), 1):
            prefill(owner, part, cache)
            if isinstance(cache, StaticCache):
                now, store = cache.k_pos[0, : cache.max_tokens], cache.k[0]  # [slots], the first layer's keys
            else:
                now, store = torch.tensor(cache.positions[0]), cache.k[0][0]
            moved = where is not None and store.data_ptr() != where.data_ptr()
            where = store  # kept alive, so that its address is not given out again
            for slot, position in enumerate(now.tolist()):
                fresh = slot >= len(before) or before[slot] != position
                what = "empty" if position < 0 else "new" if fresh else "copied" if moved else "kept"
                rows.append({"cache": name, "step": step, "slot": slot, "position": position, "what": what})
            before = now.clone()
    return rows


def cache_slots(model: GPTlite) -> Explorer:
    """Plays `slot_trace` step by step: a cache that grows, one that is preallocated, and a ring.

    Args:
        model: the one whose caches are traced.
    """
    rows = slot_trace(model)
    names = list(dict.fromkeys(row["cache"] for row in rows))
    n_steps, n_slots = max(row["step"] for row in rows), max(row["slot"] for row in rows) + 1
    for row in rows:
        row["cache"] = names.index(row["cache"])
    controls = [menu("cache", "Cache", names, names[0]), slider("step", "Step", 4, 1, n_steps, 1)]
    kinds = ["new", "copied", "kept", "empty"]
    shown = alt.Chart(alt.Data(values=rows)).transform_filter("datum.cache == cache && datum.step <= step")
    x = alt.X(
        "slot:O",
        scale=alt.Scale(domain=list(range(n_slots)), paddingInner=0.1),
        axis=alt.Axis(labelAngle=0, grid=False),
        title="Slot",
    )
    height = 26 * n_steps + 30
    y = alt.Y(
        "step:O",  # the line of words stands above the first
        scale=alt.Scale(domain=list(range(1, n_steps + 1)), paddingInner=0.15, range=[24, height]),
        title="Step",
    )
    colour = alt.Color(
        "what:N",
        scale=alt.Scale(domain=kinds, range=[VERMILION, ORANGE, SKY, "transparent"]),
        legend=alt.Legend(orient="top", title=None, symbolType="square", symbolStrokeColor="gray"),
    )
    cells = shown.mark_rect(fillOpacity=0.45, stroke="currentColor", strokeWidth=0.5).encode(x=x, y=y, color=colour)
    numbers = (
        shown.transform_filter("datum.position >= 0")
        .mark_text(baseline="middle", fontSize=11)
        .encode(x=x, y=y, text="position:Q")
    )
    counts = (
        shown.transform_calculate(
            fresh="datum.what == 'new' && datum.step == step",
            copied="datum.what == 'copied' && datum.step == step",
            all="datum.what == 'new' || datum.what == 'copied'",
        )
        .transform_aggregate(fresh="sum(fresh)", copied="sum(copied)", all="sum(all)")
        .transform_calculate(
            words="'step ' + step + ': ' + datum.fresh + ' new, ' + datum.copied + ' copied; '"
            " + datum.all + ' written so far'"
        )
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(2), text="words:N")
    )
    facts = []
    for i, name in enumerate(names):
        written = [
            sum(row["cache"] == i and row["step"] == step and row["what"] in ("new", "copied") for row in rows)
            for step in range(1, n_steps + 1)
        ]
        facts.append(f"{name}: tokens written per step {', '.join(map(str, written))}, {sum(written)} in all")
    return Explorer(
        name="cache-slots",
        chart=alt.layer(cells, numbers, counts).add_params(*controls).properties(width="container", height=height),
        alt_text="A grid with a row for each step and a column for each slot of a cache. A number is the position of"
        " the token that lies in the slot; the colour says whether the step wrote it anew, copied it, or left it where"
        " it was. A menu chooses the cache, a slider the last step that is shown.",
        caption="What each step does to the slots of a cache, as the package's own caches did it while GPTlite read 14"
        " tokens; the numbers are positions.",
        facts=tuple(facts),
    )


# -- what a token then costs --------------------------------------------------------------------------------------


def tpot_by_position(recordings: Sequence[Recording]) -> Explorer:
    """The time of the next token by its position: without a cache, with a dynamic and with a static one, as recorded.

    Args:
        recordings: of the sweep `kv-cache`; a reader chooses among their machines.
    Raises: ValueError when there is none.
    """
    if not recordings:
        raise ValueError("recordings is empty, one of the sweep 'kv-cache' is needed")
    machines: list[str] = []
    rows: list[dict[str, Any]] = []
    facts: list[str] = []
    for recording in recordings:
        params = recording.params
        about = f"{recording.machine['name']}, {params['preset']} in {DTYPES[params['dtype']]}, batch {params['batch']}"
        for point in recording.points:
            kind, n = point.at["cache"], point.at["position"]
            rows.append({"machine": len(machines), "kind": NAMES[kind], "position": n, "ms": 1e3 * point.median})
        at = {(point.at["cache"], point.at["position"]): 1e3 * point.median for point in recording.points}
        for n in (min(params["positions"]), max(params["positions"])):
            found = [f"{NAMES[kind]} {at[kind, n]:.4g} ms" for kind in NAMES if (kind, n) in at]
            facts.append(f"{about}, position {n:,}: {', '.join(found)}")
        machines.append(about)
    positions = sorted({row["position"] for row in rows})
    controls = [
        menu("machine", "Machine", machines, machines[0]),
        alt.param(
            name="position",
            value=positions[len(positions) // 2],
            bind=alt.binding_select(options=positions, labels=[f"{n:,}" for n in positions], name="Position "),
        ),
    ]
    shown = alt.Chart(alt.Data(values=rows)).transform_filter("datum.machine == machine")
    x = alt.X("position:Q", title="Position of the token", axis=alt.Axis(format=",d", tickCount=6))
    y = alt.Y(
        "ms:Q",
        title="Time of the token, ms",
        scale=alt.Scale(type="log", nice=False, padding=62),
        axis=alt.Axis(format=",~g", tickCount=5),
    )
    kinds = list(NAMES.values())
    legend = alt.Legend(
        orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3, columns=alt.ExprRef("width < 340 ? 2 : 3")
    )
    colour = alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=[VERMILION, ORANGE, BLUE]), legend=legend)
    dash = alt.StrokeDash("kind:N", scale=alt.Scale(domain=kinds, range=[[1, 0], [6, 4], [2, 3]]), legend=legend)
    here = shown.transform_filter("datum.position == position")
    pivot = here.transform_pivot("kind", value="ms", groupby=["position"])
    lines = [
        "format(datum['no cache'], ',.3~r') + ' ms without a cache'",  # short lines, for a phone
        "format(datum['dynamic cache'], ',.3~r') + ' ms dynamic, '"
        " + format(datum['static cache'], ',.3~r') + ' static'",
        "format(datum['no cache'] / datum['static cache'], ',.3~r') + ' times as long without as static'",
    ]
    texts = [
        pivot.transform_calculate(words=words)
        .mark_text(align="left", baseline="bottom", dx=4, y=alt.ExprRef(f"height - {40 - 18 * i}"))
        .encode(x=alt.value(0), text="words:N")
        for i, words in enumerate(lines)
    ]
    chart = alt.layer(
        shown.mark_line(strokeWidth=3).encode(x=x, y=y, color=colour, strokeDash=dash),
        shown.mark_point(filled=True, size=50, opacity=1).encode(x=x, y=y, color=colour),
        here.mark_point(color=VERMILION, size=180, strokeWidth=2).encode(x=x, y=y),
        *texts,
    )
    return Explorer(
        name="tpot-by-position",
        chart=chart.add_params(*controls).properties(width="container", height=320),
        alt_text="Line chart with a logarithmic time axis: the time of one token against its position. Without a cache"
        " it rises all the way; with a dynamic and with a static cache the lines are low and nearly level. A menu"
        " chooses the machine, another a measured position, whose three times and their ratio are written below.",
        caption="Time of the next token by its position, measured with the command gptlite record kv-cache.",
        facts=tuple(facts),
    )
