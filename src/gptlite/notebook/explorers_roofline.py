"""The explorers of the chapter on the roofline; their numbers come from `gptlite.arithmetic` and `gptlite.hardware`."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from gptlite.arithmetic import (
    ModelShape,
    attention_share,
    crossover_6d,
    crossover_last_token,
    crossover_prefill,
    decode_costs,
    kaplan_flops,
    kv_bytes,
    kv_bytes_per_token,
    largest_batch,
    n_params,
    prefill_costs,
    shipped_models,
    step_bound,
    total,
)
from gptlite.hardware import gpu, gpus
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

LONGEST = 131_072  # tokens, upper end of the sliders that ask for a long context
RESERVE = 0.1  # share of a GPU's memory kept for activations and buffers, as in `gptlite.arithmetic.kv_budget`

# Over all layers: keys that a context of n keeps, and (query, key) pairs of a prompt of n. A window ends both.
_IN_WINDOW = "min({n}, datum.window)"
KEYS = f"(datum.full * {{n}} + datum.sliding * {_IN_WINDOW})"
PAIRS = (
    "(datum.full * {n} * ({n} + 1) / 2 + datum.sliding * "
    f"({_IN_WINDOW} * ({_IN_WINDOW} + 1) / 2 + ({{n}} - {_IN_WINDOW}) * datum.window))"
)


def roofline(model: str = "Llama 3.1 8B", card: str = "H100 SXM", longest: int = 32_768) -> Explorer:
    """The roof of a GPU, and below it a decode step and a prefill of any shipped model.

    A step's FLOPs and bytes are sums over tokens, keys and pairs; the chart gets their coefficients from
    `gptlite.arithmetic.decode_costs` and `prefill_costs`, with 2 bytes per weight and per cached value.

    Args:
        model, card: the choices at first, by the book's names.
        longest: upper end of the context's slider, in tokens.
    """
    models, cards = shipped_models(), list(gpus().values())
    controls = [
        menu("card", "GPU", list(gpus()), card),
        menu("model", "Model", list(models), model),
        slider("batch", "Batch, sequences", 1, 1, 512, 1),
        slider("context", "Context, tokens", 1024, 128, longest, 128),
        alt.param(name="peak", expr=f"{[c.peak_flops for c in cards]}[card]"),
        alt.param(name="bandwidth", expr=f"{[c.bandwidth for c in cards]}[card]"),
        alt.param(name="memory", expr=f"{[c.memory_bytes for c in cards]}[card]"),
    ]
    x = alt.X(
        "intensity:Q",
        scale=alt.Scale(type="log", domain=[0.5, 50_000], nice=False),
        axis=alt.Axis(values=[1, 10, 100, 1000, 10_000], format="~s"),
        title="Work per byte, FLOP per byte",
    )
    y = alt.Y(
        "tflops:Q",
        scale=alt.Scale(type="log", domain=[0.1, 4000], nice=False),
        axis=alt.Axis(values=[0.1, 1, 10, 100, 1000], format="~g"),
        title="At most, TFLOP/s",
    )
    at_most = "min(peak, bandwidth * datum.intensity) / 1e12"
    machine = alt.Chart(alt.Data(values=[{}]))
    roof = (
        machine.transform_calculate(intensity="[0.5, peak / bandwidth, 50000]")
        .transform_flatten(["intensity"])
        .transform_calculate(tflops=at_most)
        .mark_line(color=ORANGE, strokeWidth=3)
        .encode(x=x, y=y)
    )
    ridge = machine.transform_calculate(
        intensity="peak / bandwidth", words="'ridge point ' + format(peak / bandwidth, '.0f')"
    )
    rule = ridge.mark_rule(strokeDash=[4, 4], opacity=0.6).encode(x=x)
    name = ridge.mark_text(align="right", baseline="top", dx=-6).encode(x=x, y=alt.value(2), text="words:N")
    chosen = alt.Chart(
        alt.Data(values=[_coefficients(i, shape) for i, shape in enumerate(models.values())])
    ).transform_filter("datum.model == model")
    linear = "batch * ({tokens} * datum.linear + datum.head"
    weights = "datum.weights + datum.experts * (1 - pow(1 - datum.chosen, batch * {tokens}))"
    steps = {  # FLOPs and bytes, by phase
        "decode": (f"{linear} + datum.decode_pair * {KEYS})", f"{weights} + batch * datum.decode_key * {KEYS}", "1"),
        "prefill": (
            f"{linear} + datum.prefill_pair * {PAIRS})",
            f"{weights} + batch * context * datum.prefill_key",
            "context",
        ),
    }
    layers = []
    looks: tuple[tuple[str, str, Any, int], ...] = ((BLUE, "circle", "left", 24), (VERMILION, "square", "right", 6))
    for (phase, (flops, read, tokens)), (colour, mark, side, away) in zip(steps.items(), looks, strict=True):
        here = (
            chosen.transform_calculate(flops=flops.format(n="context", tokens=tokens))
            .transform_calculate(bytes=read.format(n="context", tokens=tokens))
            .transform_calculate(intensity="datum.flops / datum.bytes")
            .transform_calculate(
                tflops=at_most,
                share=f"'{phase}, ' + format(min(1, datum.intensity * bandwidth / peak), '.1%') + ' of peak'",
                words=f"'{phase}: ' + format(datum.intensity, ',.1f') + ' FLOP/B, ' + "
                "format(1e3 * max(datum.flops / peak, datum.bytes / bandwidth), ',.1f') + ' ms'",
            )
        )
        layers += [
            here.mark_point(color=colour, shape=mark, filled=True, size=130, opacity=1).encode(x=x, y=y),
            here.mark_text(align=side, baseline="top", dx=8 if side == "left" else -4, dy=8).encode(
                x=x, y=y, text="share:N"
            ),
            _line(here, away),
        ]
    held = f"2 * datum.params + 2 * batch * datum.values * {KEYS}".format(n="context")
    full = chosen.transform_calculate(words=f"{held} > memory ? 'more than its memory holds' : ''")
    chart = (
        alt.layer(rule, name, roof, *layers, _line(full, 42))
        .add_params(*controls)
        .properties(width="container", height=340)
    )
    facts = []
    for phase, costs in (("decode", decode_costs), ("prefill", prefill_costs)):
        cost = total(costs(models[model], 1, 1024))
        seconds, limit = step_bound(cost, gpu(card).peak_flops, gpu(card).bandwidth)
        facts.append(
            f"{model} on {card}, {phase} of 1 sequence at 1,024 tokens: {cost.intensity:.1f} FLOP per byte,"
            f" at least {1e3 * seconds:.1f} ms, limited by {limit}"
        )
    return Explorer(
        name="roofline",
        chart=chart,
        alt_text="Line chart on two logarithmic axes: the rate that a GPU allows against work per byte, first rising,"
        " then flat beyond the ridge point. A circle marks a decode step and a square a prefill. Menus choose the GPU"
        " and the model, sliders move batch and context; a line for each says its work per byte and its least time.",
        caption="The roofline of a GPU, with a decode step and a prefill, in 16 bits.",
        facts=tuple(facts),
    )


def memory_budget(model: str = "Llama 3.1 8B", card: str = "H100 SXM") -> Explorer:
    """How many sequences fit beside the weights: bytes per token, bytes per sequence and the largest batch.

    Args:
        model, card: the choices at first, by the book's names.
    """
    models, cards = shipped_models(), list(gpus().values())
    formats: dict[str, Any] = {"options": [2, 1, 0.5], "labels": ["2 (bf16, fp16)", "1 (fp8, int8)", "0.5 (int4)"]}
    controls = [
        menu("model", "Model", list(models), model),
        menu("card", "GPU", list(gpus()), card),
        slider("context", "Context, tokens", 4096, 1024, LONGEST, 1024),
        alt.param(name="value_bytes", value=2, bind=alt.binding_select(**formats, name="Bytes per cached value ")),
        alt.param(name="memory", expr=f"{[c.memory_bytes for c in cards]}[card]"),
    ]
    x = alt.X(
        "n:Q",
        scale=alt.Scale(type="log", base=2, domain=[1024, LONGEST], nice=False),
        axis=alt.Axis(values=[2**e for e in range(10, 18)], labelExpr="format(datum.value / 1024, 'd') + 'k'"),
        title="Context, tokens (1k = 1,024)",
    )
    y = alt.Y(
        "sequences:Q",
        scale=alt.Scale(type="log", domain=[1, 10_000], nice=False, clamp=True),
        axis=alt.Axis(values=[1, 10, 100, 1000, 10_000], format=","),
        title="Sequences that fit",
    )
    rows = [_coefficients(i, shape) for i, shape in enumerate(models.values())]
    base = alt.Chart(alt.Data(values=rows)).transform_calculate(
        left=f"memory * {1 - RESERVE} - datum.params * 2",
        token=f"value_bytes * datum.values * {KEYS}".format(n="1"),
    )

    def fitting(chart: alt.Chart) -> alt.Chart:
        """The chart with the largest batch at each context n, where there is one."""
        return chart.transform_calculate(
            sequences=f"datum.left / (value_bytes * datum.values * {KEYS})".format(n="datum.n")
        )

    curve = fitting(
        base.transform_calculate(n="sequence(10, 17.1, 0.25)")
        .transform_flatten(["n"])
        .transform_calculate(n="pow(2, datum.n)")
    ).transform_filter("datum.sequences >= 1")
    others = curve.mark_line(strokeWidth=1, opacity=0.25, color=GREEN).encode(x=x, y=y, detail="model:N")
    chosen = curve.transform_filter("datum.model == model").mark_line(strokeWidth=3, color=BLUE).encode(x=x, y=y)
    here = (
        fitting(base.transform_filter("datum.model == model").transform_calculate(n="context"))
        .transform_calculate(fit="max(0, floor(datum.sequences))")
        .transform_calculate(
            room="'weights ' + format(datum.params * 2 / 1e9, ',.1f') + ' GB, ' + "
            "(datum.left < 0 ? 'they do not fit' : format(datum.left / 1e9, ',.1f') + ' GB left')",
            cache="format(datum.token / 1024, ',.1f') + ' KiB per token, ' + "
            "format(datum.left / datum.sequences / 1e9, ',.2f') + ' GB each'",
            batch="format(datum.fit, ',d') + (datum.fit == 1 ? ' sequence' : ' sequences')",
        )
    )
    point = here.transform_filter("datum.fit >= 1").mark_point(color=VERMILION, filled=True, size=120, opacity=1)
    chart = alt.layer(
        others, chosen, point.encode(x=x, y=alt.Y("fit:Q", title="Sequences that fit")),
        *(_line(here, away, words, top=True) for away, words in ((6, "room"), (24, "cache"), (42, "batch"))),
    )  # fmt: skip
    return Explorer(
        name="kv-budget",
        chart=chart.add_params(*controls).properties(width="container", height=320),
        alt_text="Line chart on two logarithmic axes: how many sequences fit into a GPU's memory beside the weights,"
        " falling with the context. The chosen model is a thick line with a point at the chosen context, all shipped"
        " models are thin lines. Menus choose model, GPU and bytes per cached value, a slider the context.",
        caption="Keys and values per token, and the largest batch, with weights in 16 bits and a tenth of the memory"
        " kept free.",
        facts=tuple(
            f"{name}: {kv_bytes_per_token(shape) / 1024:.1f} KiB per token,"
            f" {kv_bytes(shape, LONGEST) / 2**30:.2f} GiB at {LONGEST:,} tokens,"
            f" {largest_batch(shape, 4096, gpu(card).memory_bytes, RESERVE)} sequences of 4,096 tokens on {card}"
            for name, shape in models.items()
        ),
    )


def share_of_attention(model: str = "Llama 3.1 8B") -> Explorer:
    """Attention's share of the FLOPs, of a whole prompt and of its last token, and where each reaches one half.

    Models with a mixture of experts, a latent (MLA) or sliding layers are left out: the formulas that the two
    crossovers come from count none of these.

    Args:
        model: the choice at first, by the book's name.
    """
    models = {
        name: shape
        for name, shape in shipped_models().items()
        if not (shape.n_experts or shape.d_latent or shape.n_sliding)
    }
    rows = []
    for i, shape in enumerate(models.values()):
        matrices, attention = kaplan_flops(shape, 1)
        rows.append(
            {"model": i, "matrices": matrices, "attention": attention, "six_d": crossover_6d(shape)}
            | {"prompt": crossover_prefill(shape), "last": crossover_last_token(shape)}
        )
    controls = [
        menu("model", "Model", list(models), model),
        slider("context", "Context, tokens", 32_768, 1024, LONGEST, 1024),
    ]
    axis_title = "Context, tokens (1k = 1,024)"
    x = alt.X(
        "n:Q",
        scale=alt.Scale(type="log", base=2, domain=[512, 2**19], nice=False),
        axis=alt.Axis(values=[2**e for e in range(10, 20, 2)], labelExpr="format(datum.value / 1024, 'd') + 'k'"),
        title=axis_title,
    )
    y = alt.Y(
        "share:Q",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(labelExpr="round(datum.value * 100)", tickCount=5),
        title="Attention's share of the FLOPs (%)",
    )
    names = ["whole prompt", "its last token"]
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=names, range=[BLUE, VERMILION]),
        legend=alt.Legend(orient="top", title=None, labelLimit=0, symbolType="stroke", symbolStrokeWidth=3),
    )
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=[[1, 0], [6, 4]]))
    base = alt.Chart(alt.Data(values=rows)).transform_filter("datum.model == model")

    def shares(chart: alt.Chart) -> alt.Chart:
        """The chart with both shares at context n: the last token sees all n, the average one half of them."""
        return (
            chart.transform_calculate(series=repr(names))
            .transform_flatten(["series"])
            .transform_calculate(pairs=f"datum.attention * datum.n * (datum.series == {names[1]!r} ? 2 : 1)")
            .transform_calculate(share="datum.pairs / (datum.pairs + datum.matrices)")
        )

    curves = (
        shares(
            base.transform_calculate(n="sequence(9, 19.1, 0.25)")
            .transform_flatten(["n"])
            .transform_calculate(n="pow(2, datum.n)")
        )
        .mark_line(strokeWidth=3)
        .encode(x=x, y=y, color=colour, strokeDash=dash)
    )
    here = shares(base.transform_calculate(n="context"))
    points = here.mark_point(filled=True, size=110, opacity=1).encode(x=x, y=y, color=colour)
    percent = here.transform_calculate(words="format(datum.share, '.1%')").mark_text(
        align="right", baseline="bottom", dx=-8, dy=-2
    )
    half = alt.Chart(alt.Data(values=[{"share": 0.5}])).mark_rule(opacity=0.6).encode(y=y)
    crossings = (
        base.transform_fold(["prompt", "last"], as_=["which", "n"])
        .transform_calculate(share="0.5")
        .mark_point(shape="diamond", filled=True, size=90, opacity=1, color=ORANGE)
        .encode(x=x, y=y)
    )
    rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=2, color=GREEN).encode(x=alt.X("six_d:Q", title=axis_title))
    lines = base.transform_calculate(
        prompt_words="'whole prompt: half at ' + format(datum.prompt, ',.0f') + ' tokens'",
        last_words="'last token: half at ' + format(datum.last, ',.0f') + ' tokens'",
        rule_words="'6 d (dotted): ' + format(datum.six_d, ',d') + ' tokens'",
    )
    chart = alt.layer(
        half, rule, curves, crossings, points, percent.encode(x=x, y=y, text="words:N"),
        *(
            lines.mark_text(align="left", baseline="top").encode(x=alt.value(6), y=alt.value(top), text=f"{words}:N")
            for top, words in ((4, "prompt_words"), (21, "last_words"), (38, "rule_words"))
        ),
    )  # fmt: skip
    facts = []
    for name, shape in models.items():
        two = " and ".join(f"{attention_share(shape, n):.0%} of a prompt of {n:,} tokens" for n in (4096, LONGEST))
        facts.append(
            f"{name}: {two}; half at {crossover_prefill(shape):,.0f} tokens, of the last token at"
            f" {crossover_last_token(shape):,.0f}; 6 d is {crossover_6d(shape):,}"
        )
    return Explorer(
        name="attention-share",
        chart=chart.add_params(*controls).properties(width="container", height=340),
        alt_text="Line chart of attention's share of the FLOPs, in percent, against the context on a logarithmic axis:"
        " a solid line for a whole prompt and a dashed one for its last token, which crosses one half at half the"
        " context. Diamonds mark the two crossovers, a dotted line the rule of thumb 6 d. A menu chooses the model, a"
        " slider the context.",
        caption="Attention's share of a prefill's FLOPs and of its last token's, with both crossovers.",
        facts=tuple(facts),
    )


def measured_steps(recordings: Sequence[Recording]) -> Explorer:
    """What decode steps and prefills reached on real machines, below the roof that was measured beside them.

    Args:
        recordings: of the sweep `roofline`; a reader chooses among their machines.
    Raises: ValueError when there is none, or one has no roof.
    """
    rows, roofs, names, facts = [], [], [], []
    for i, recording in enumerate(recordings):
        peak, bandwidth = measured_roof(recording)
        if not (peak and bandwidth):
            raise ValueError(f"the recording on {recording.machine.get('name')} has no roof")
        names.append(f"{recording.machine['name']}, {recording.params['preset']} in {recording.params['dtype']}")
        roofs += [
            {"machine": i, "intensity": x, "gflops": min(peak, bandwidth * x) / 1e9}
            for x in sorted({0.1, peak / bandwidth, 10_000.0})
        ]
        facts.append(f"{names[-1]}: ridge point {peak / bandwidth:.1f} FLOP per byte")
        for point in recording.points:
            if point.flops and point.bytes:
                intensity, rate = point.flops / point.bytes, point.flops / point.median
                share = rate / min(peak, bandwidth * intensity)
                phase = "prefill" if "length" in point.at else "decode"
                reached = f"{intensity:,.1f} FLOP/B, {rate / 1e9:,.1f} GFLOP/s, {share:.0%} of the roof"
                words = f"{step_in_words(point.at)}: {reached}"
                facts.append(f"  {words}")
                rows.append(
                    {"machine": i, "phase": phase, "intensity": intensity, "gflops": rate / 1e9, "words": words}
                    | {"label": str(point.at.get("length") or point.at["batch"])}
                )
    controls = [menu("machine", "Machine", names, names[0] if names else "")]
    x = alt.X(
        "intensity:Q",
        scale=alt.Scale(type="log", nice=False, domain=[0.1, 10_000]),
        axis=alt.Axis(values=[0.1, 1, 10, 100, 1000, 10_000], format=",~g"),
        title="Work per byte, FLOP per byte",
    )
    y = alt.Y("gflops:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format=",~g"), title="Rate, GFLOP/s")
    phases = alt.Scale(domain=["decode", "prefill"], range=[BLUE, VERMILION])
    steps = alt.Chart(alt.Data(values=rows)).transform_filter("datum.machine == machine")
    chart = alt.layer(
        alt.Chart(alt.Data(values=roofs))
        .transform_filter("datum.machine == machine")
        .mark_line(color=ORANGE, strokeWidth=3)
        .encode(x=x, y=y),
        steps.mark_point(filled=True, size=90, opacity=1).encode(
            x=x, y=y,
            color=alt.Color("phase:N", scale=phases, legend=alt.Legend(orient="top", title=None)),
            shape=alt.Shape("phase:N", scale=alt.Scale(domain=["decode", "prefill"], range=["circle", "square"])),
            tooltip="words:N",
        ),
        steps.mark_text(align="left", baseline="top", dx=7, dy=2).encode(x=x, y=y, text="label:N"),
    )  # fmt: skip
    return Explorer(
        name="measured-steps",
        chart=chart.add_params(*controls).properties(width="container", height=320),
        alt_text="The measured roofline of a machine on two logarithmic axes, with a circle for each decode step,"
        " labelled with its batch, and a square for each prefill, labelled with its tokens, at the rate they reached."
        " A menu chooses the machine.",
        caption="Steps as recorded, below the roof of the same machine; labels are batch sizes and tokens of prompts.",
        facts=tuple(facts),
    )


def measured_roof(recording: Recording) -> tuple[float, float]:
    """The roof inside a recording of the sweep `roofline`: the best sample of the product and of the copy.

    Returns: (FLOP/s, bytes/s); 0 for what is not measured yet.
    """
    best = {point.at["what"]: point for point in recording.points if "what" in point.at}
    product, copy = best.get("matrix product"), best.get("copy")
    peak = product.flops / min(product.samples) if product and product.flops else 0.0
    bandwidth = copy.bytes / min(copy.samples) if copy and copy.bytes else 0.0
    return peak, bandwidth


def step_in_words(at: Mapping[str, Any]) -> str:
    """What a point of the sweep `roofline` measured."""
    if "what" in at:
        return str(at["what"])
    if "length" in at:
        return f"prefill of {at['length']} tokens"
    return f"decode, batch {at['batch']}, context {at['context']}"


def _coefficients(i: int, shape: ModelShape) -> dict[str, Any]:
    """What the charts need to add up the cost of any step of a model, read off `gptlite.arithmetic`.

    The expected bytes of a mixture of experts are weights + experts (1 - (1 - chosen)^tokens); two steps give both.
    """
    L = shape.n_layers
    one, two = (decode_costs(shape, batch, 1) for batch in (1, 2))
    pair = prefill_costs(shape, 1, 2)  # a prompt of two tokens has three pairs; one alone would run as a decode step
    chosen = shape.n_active / shape.n_experts if shape.n_experts else 0.0
    weights = total(one).weight_bytes
    experts = (total(two).weight_bytes - weights) / (chosen * (1 - chosen)) if chosen else 0.0
    decode, prefill = (costs["scores"].flops + costs["mix"].flops for costs in (one, pair))
    return {
        "model": i,
        "params": n_params(shape),
        "full": L - shape.n_sliding,
        "sliding": shape.n_sliding,
        "window": shape.window,
        "linear": one["projections"].flops + one["feed-forward"].flops,
        "head": one["head"].flops,
        "decode_pair": decode / L,
        "prefill_pair": prefill / (3 * L),
        "decode_key": total(one).kv_bytes / L,
        "prefill_key": total(pair).kv_bytes / 2,
        "values": kv_bytes_per_token(shape, 1) / L,
        "weights": weights - chosen * experts,
        "experts": experts,
        "chosen": chosen,
    }


def _line(base: alt.Chart, away: int, words: str = "words", top: bool = False) -> alt.Chart:
    """A line of text at the right edge, so many pixels from the bottom or from the top."""
    y = alt.value(away) if top else alt.ExprRef(f"height - {away}")
    mark: dict[str, Any] = {"align": "right", "baseline": "top" if top else "bottom", "dx": -4}
    if top:
        return base.mark_text(**mark).encode(x=alt.value("width"), y=y, text=f"{words}:N")
    return base.mark_text(**mark, y=y).encode(x=alt.value("width"), text=f"{words}:N")
