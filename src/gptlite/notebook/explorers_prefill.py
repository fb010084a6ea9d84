"""The explorers of the chapter on prefill and decode, by arithmetic and from recordings."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from gptlite.arithmetic import Cost, ModelShape, decode_costs, prefill_costs, step_bound, total
from gptlite.config import preset
from gptlite.hardware import gpu, gpus
from gptlite.notebook.chart import BLUE, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.notebook.recordings import roof_of
from gptlite.record import Point, Recording

BATCHES = tuple(2**e for e in range(10))  # of the machines that are drawn by arithmetic alone
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def request_timeline(presets: tuple[str, ...] = ("gpt2", "1b", "7b"), card: str = "H100 SXM") -> Explorer:
    """The least time of one request: its prefill, its decode steps, and what both would be without a cache.

    Each step takes at least what `gptlite.arithmetic.step_bound` says, with 2 bytes per weight and per cached value.

    Args:
        presets: models to choose from; the last is shown first. card: the GPU at first, by the book's name.
    """
    cards = list(gpus().values())
    rows = []
    for i, name in enumerate(presets):
        shape = ModelShape.of(preset(name))
        one, two = (total(decode_costs(shape, 1, n)) for n in (1, 2))
        pair, head = two.flops - one.flops, decode_costs(shape, 1, 1)["head"].flops
        rows.append(
            {"model": i, "token": one.flops - pair - head, "head": head, "pair": pair}
            | {"weights": one.weight_bytes, "key": one.kv_bytes}
        )
    controls = [
        menu("model", "Model", presets, presets[-1]),
        menu("card", "GPU", list(gpus()), card),
        slider("prompt", "Prompt, tokens", 1024, 64, 8192, 64),
        slider("answer", "New tokens", 256, 16, 1024, 16),
        alt.param(name="peak", expr=f"{[c.peak_flops for c in cards]}[card]"),
        alt.param(name="bandwidth", expr=f"{[c.bandwidth for c in cards]}[card]"),
    ]
    chosen = alt.Chart(alt.Data(values=rows)).transform_filter("datum.model == model")
    # a prompt of n tokens: each attends to itself and those before it, and only the last needs the head
    work = "({n} * datum.token + datum.head + {n} * ({n} + 1) / 2 * datum.pair) / peak"
    read = "(datum.weights + {n} * datum.key) / bandwidth"
    prefill = f"max({work}, {read})"
    # step j attends to n + j tokens, j from 1 to m - 1; one sequence is always limited by memory, so bytes add up
    step = "(datum.weights + (datum.n + datum.m / 2) * datum.key) / bandwidth"
    timed = (
        chosen.transform_calculate(which="['this request', 'prompt × 2', 'answer × 2']")
        .transform_flatten(["which"])
        .transform_calculate(
            n="prompt * (datum.which == 'prompt × 2' ? 2 : 1)", m="answer * (datum.which == 'answer × 2' ? 2 : 1)"
        )
        .transform_calculate(prefill=prefill.format(n="datum.n"), step=step)
        .transform_calculate(decode="(datum.m - 1) * datum.step")
    )
    phases = ["prefill", "decode"]
    y = alt.Y(
        "which:N",
        title=None,
        sort=["this request", "prompt × 2", "answer × 2"],
        scale=alt.Scale(range=[92, 240], paddingInner=0.35),
    )
    bars = (
        timed.transform_fold(["prefill", "decode"], as_=["phase", "seconds"])
        .transform_calculate(order="datum.phase == 'decode'")
        .mark_bar()
        .encode(
            y=y,
            x=alt.X("seconds:Q", title="Time, s", stack=True, axis=alt.Axis(format=",~f", tickCount=5, grid=False)),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=phases, range=[BLUE, ORANGE]),
                legend=alt.Legend(orient="top", title=None, symbolType="square"),
            ),
            order="order:Q",
        )
    )
    here = timed.transform_filter("datum.which == 'this request'").transform_calculate(
        limit=f"{work} > {read} ? 'compute' : 'memory'".format(n="datum.n")
    )
    uncached = (
        here.transform_calculate(i="sequence(0, answer)")
        .transform_flatten(["i"])
        .transform_calculate(seconds=prefill.format(n="(prompt + datum.i)"))
        .transform_joinaggregate(uncached="sum(seconds)")
        .transform_filter("datum.i == 0")
        .transform_calculate(times="datum.uncached / (datum.prefill + datum.decode)")
    )
    slower = "', ' + format(datum.times, ',.1f') + ' times as long'"
    lines = [
        (here, "'TTFT ' + {0} + ', limited by ' + datum.limit", "datum.prefill"),
        (here, "'TPOT ' + {0} + ', limited by memory'", "datum.step"),
        (here, "'the whole answer after ' + {0}", "datum.prefill + datum.decode"),
        (uncached, f"'without a cache after ' + {{0}} + {slower}", "datum.uncached"),
    ]
    texts = [
        base.transform_calculate(words=words.format(_time(seconds)))
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(19 * i), text="words:N")
        for i, (base, words, seconds) in enumerate(lines)
    ]
    return Explorer(
        name="request-timeline",
        chart=alt.layer(bars, *texts).add_params(*controls).properties(width="container", height=240),
        alt_text="Stacked bars of the least time of a request: prefill, then decode, for the chosen request, for a"
        " prompt twice as long and for an answer twice as long. Above them TTFT, TPOT, and the time of the whole answer"
        " with and without a cache. Menus choose the model and the GPU, sliders the tokens of prompt and answer.",
        caption="The least time of one request by arithmetic, in 16 bits: all of the prompt in one pass, then a pass"
        " for each new token.",
        facts=tuple(_request_in_words(name, card, 1024, 256) for name in presets),
    )


def request_bound(shape: ModelShape, n_prompt: int, n_new: int, card: str) -> tuple[float, float, float]:
    """The least times of one request in 16 bits: (TTFT, sum of the decode steps, the same answer without a cache).

    Args:
        shape: the model's. n_prompt, n_new: tokens read and written. card: a GPU by the book's name.
    Returns: seconds.
    """
    peak, bandwidth = gpu(card).peak_flops, gpu(card).bandwidth

    def least(cost: Cost) -> float:
        return step_bound(cost, peak, bandwidth)[0]

    reads = [least(total(prefill_costs(shape, 1, n_prompt + i))) for i in range(n_new)]
    steps = [least(total(decode_costs(shape, 1, n_prompt + j))) for j in range(1, n_new)]
    return reads[0], sum(steps), sum(reads)


def batch_tradeoff(
    recordings: Sequence[Recording],
    roofs: Sequence[Recording] = (),
    by_arithmetic: Sequence[tuple[str, str]] = (("H100 SXM", "7b"), ("RTX 4090", "1b")),
) -> Explorer:
    """Throughput against TPOT, batch by batch: as recorded on machines, beside the bound, and by arithmetic alone.

    Args:
        recordings: of the sweep `decode`; a reader chooses among their machines.
        roofs: of the sweep `roof`, for the bound of those machines.
        by_arithmetic: further machines to choose, as (GPU, preset), of which the bound alone is drawn, in 16 bits.
    Raises: ValueError when there is no recording.
    """
    if not recordings:
        raise ValueError("recordings is empty, one of the sweep 'decode' is needed")
    contexts = sorted({point.at["context"] for recording in recordings for point in recording.points})
    machines, rows, facts = [], [], []
    for recording in recordings:
        params = recording.params
        name = f"{recording.machine['name']}, {params['preset']} in {DTYPES[params['dtype']]}"
        machines.append(f"{name}, measured")
        roof = roof_of(recording, roofs)
        for context in contexts:
            points = [point for point in recording.points if point.at["context"] == context]
            measured = [(point.at["batch"], point.median) for point in points]
            rows += _curve(len(machines) - 1, context, "measured", measured)
            if roof:
                bound = [(point.at["batch"], step_bound(_cost(point), *roof)[0]) for point in points]
                rows += _curve(len(machines) - 1, context, "bound", bound, other=measured)
            facts += _ends(machines[-1], context, measured)
    for card, model in by_arithmetic:
        machines.append(f"{card}, {model} in 16 bits, bound only")
        shape, machine = ModelShape.of(preset(model)), gpu(card)
        for context in contexts:
            bound = [
                (B, step_bound(total(decode_costs(shape, B, context)), machine.peak_flops, machine.bandwidth)[0])
                for B in BATCHES
            ]
            rows += _curve(len(machines) - 1, context, "bound", bound)
            facts += _ends(machines[-1], context, bound)
    controls = [
        menu("machine", "Machine", machines, machines[0]),
        alt.param(
            name="context",
            value=contexts[len(contexts) // 2],
            bind=alt.binding_select(
                options=contexts, labels=[f"{context:,}" for context in contexts], name="Context, tokens "
            ),
        ),
        alt.param(
            name="times",
            value=2.5,
            bind=alt.binding_range(min=1, max=6, step=0.1, name="TPOT at most, × batch 1 "),
        ),
    ]
    shown = alt.Chart(alt.Data(values=rows)).transform_filter("datum.machine == machine && datum.context == context")
    x_title = "TPOT, ms"  # of two fields, and one axis
    x = alt.X("tpot:Q", title=x_title, axis=alt.Axis(format=",~f", tickCount=5))
    y = alt.Y(
        "throughput:Q",
        title="Throughput, token/s",
        scale=alt.Scale(type="log", nice=False, padding=32),
        axis=alt.Axis(format="~s", tickCount=5),
    )
    kinds = ["measured", "bound"]
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    colour = alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=[BLUE, ORANGE]), legend=legend)
    dash = alt.StrokeDash("kind:N", scale=alt.Scale(domain=kinds, range=[[1, 0], [6, 4]]), legend=legend)
    curves = shown.mark_line(strokeWidth=3).encode(x=x, y=y, color=colour, strokeDash=dash, order="batch:Q")
    points = shown.mark_point(filled=True, size=60, opacity=1).encode(x=x, y=y, color=colour)
    labels = (
        shown.transform_filter("datum.own")
        .mark_text(align="left", baseline="top", dx=6, dy=2)
        .encode(x=x, y=y, text="batch:Q")
    )
    limit = (
        shown.transform_filter("datum.own && datum.batch == datum.first")
        .transform_calculate(limit="times * datum.tpot")
        .mark_rule(strokeDash=[2, 3], strokeWidth=2)
        .encode(x=alt.X("limit:Q", title=x_title))
    )
    best = (
        shown.transform_filter("datum.own && datum.tpot <= times * datum.tpot_first")
        .transform_window(rank="row_number()", sort=[alt.SortField("throughput", order="descending")])
        .transform_filter("datum.rank == 1")
        .transform_calculate(
            words="'batch ' + datum.batch + ': ' + format(datum.tpot, ',.3~g') + ' ms, '"
            " + format(datum.throughput, ',.3~r') + ' token/s, '"
            " + format(datum.throughput / datum.throughput_first, ',.3~g') + ' × batch ' + datum.first"
        )
    )
    ring = best.mark_point(color=VERMILION, size=190, strokeWidth=3, opacity=1).encode(x=x, y=y)
    words = best.mark_text(align="left", baseline="bottom", dx=6, dy=-4).encode(
        x=alt.value(0), y=alt.value("height"), text="words:N"
    )
    return Explorer(
        name="batch-tradeoff",
        chart=alt.layer(limit, curves, points, labels, ring, words)
        .add_params(*controls)
        .properties(width="container", height=320),
        alt_text="Line chart of throughput on a logarithmic axis against TPOT, one point for each batch size, rising"
        " steeply at first and flattening. A solid line is measured, a dashed one the bound. A dotted vertical line is"
        " the largest TPOT that the reader allows, and a ring marks the batch with the highest throughput to its left."
        " Menus choose the machine and the context, a slider the largest TPOT.",
        caption="Throughput against TPOT as the batch grows; the numbers at the points are batch sizes.",
        facts=tuple(facts),
    )


def _curve(
    machine: int,
    context: int,
    kind: str,
    times: Sequence[tuple[int, float]],
    other: Sequence[tuple[int, float]] = (),
) -> list[dict[str, Any]]:
    """Rows of one curve from its (batch, seconds); a bound beside a measured curve is not the one that is read off."""
    if not times:
        return []
    first, seconds = times[0]
    return [
        {"machine": machine, "context": context, "kind": kind, "own": not other, "batch": B, "first": first}
        | {"tpot": 1e3 * t, "throughput": B / t, "tpot_first": 1e3 * seconds, "throughput_first": first / seconds}
        for B, t in times
    ]


def _ends(machine: str, context: int, times: Sequence[tuple[int, float]]) -> list[str]:
    """The smallest and the largest batch in words."""
    if not times:
        return []
    ends = "; ".join(
        f"batch {B}: {1e3 * t:.4g} ms, {format(B / t, ',.0f' if B / t >= 1000 else '.3g')} token/s"
        for B, t in (times[0], times[-1])
    )
    return [f"{machine}, context {context:,}: {ends}"]


def _cost(point: Point) -> Cost:
    return Cost(point.flops or 0, point.bytes or 0)


def _time(seconds: str) -> str:
    """An expression that writes seconds with three digits, as s or ms."""
    return f"(({seconds}) < 1 ? format(1000 * ({seconds}), '.3r') + ' ms' : format({seconds}, ',.3r') + ' s')"


def _request_in_words(name: str, card: str, n_prompt: int, n_new: int) -> str:
    ttft, decode, uncached = request_bound(ModelShape.of(preset(name)), n_prompt, n_new, card)
    return (
        f"{name} on {card}, {n_prompt:,} tokens in, {n_new} out: TTFT {1e3 * ttft:.3g} ms, TPOT"
        f" {1e3 * decode / (n_new - 1):.3g} ms, the whole answer {1e3 * (ttft + decode):.4g} ms, without a cache"
        f" {1e3 * uncached:.4g} ms"
    )
