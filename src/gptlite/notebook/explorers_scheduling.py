"""The explorers of a long prompt that arrives among running users: as recorded, and by arithmetic."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import altair as alt

from gptlite.arithmetic import shipped_models
from gptlite.hardware import gpu, gpus
from gptlite.notebook.chart import ORANGE, SKY, Explorer, menu, slider
from gptlite.record import Recording
from gptlite.serving.step_time import ArithmeticTime

KINDS = ["decodes alone", "with a part of the prompt"]
STEPS = 24  # decode steps that a lane by arithmetic shows after its prompt, at most


def _lanes(base: alt.Chart, lanes: list[str], x_title: str) -> list[alt.Chart]:
    """Steps as blocks on a lane each: `begin` to `end`, coloured by `kind`; a line where running users get tokens."""
    x = alt.X(
        "begin:Q",
        title=x_title,
        scale=alt.Scale(nice=False, zero=True),
        axis=alt.Axis(format=",~f", tickCount=5, labelOverlap=True),
    )
    y = alt.Y("lane:N", title=None, sort=lanes, scale=alt.Scale(domain=lanes, range=[96, 220], paddingInner=0.4))
    legend = alt.Legend(orient="top", title=None, columns=1, symbolType="square", labelLimit=260)
    colour = alt.Color("kind:N", scale=alt.Scale(domain=KINDS, range=[SKY, ORANGE]), legend=legend)
    return [
        base.mark_bar(height={"band": 1}).encode(x=x, x2="end:Q", y=y, color=colour),
        base.mark_tick(thickness=1.5, bandSize=30, color="currentColor").encode(x=alt.X("end:Q", title=x_title), y=y),
    ]


def _texts(lines: Sequence[alt.Chart]) -> list[alt.Chart]:
    """Lines of text above the lanes, short enough for a phone; each has its `words`."""
    return [
        line.mark_text(align="left", baseline="top").encode(x=alt.value(-80), y=alt.value(19 * i), text="words:N")
        for i, line in enumerate(lines)
    ]


# -- a long prompt comes ------------------------------------------------------------------------------------------


def stall_recorded(recording: Recording) -> Explorer:
    """The steps of the real engine from the arrival of a long prompt on: read whole, and under a budget.

    Args:
        recording: of the sweep `chunked-prefill`.
    Raises: ValueError when it has fewer than two budgets.
    """
    params, budgets = recording.params, sorted(recording.params["budgets"])
    if len(budgets) < 2:
        raise ValueError(f"the recording has budgets {budgets}, it takes two at least")
    names = [f"budget of {budget}" for budget in budgets]
    names[-1] = "whole prompt"
    rows, facts = [], []
    medians = {
        (point.at["what"], point.at["budget"]): 1e3 * point.median for point in recording.points
    }  # by what and budget, ms
    for i, budget in enumerate(budgets):
        steps = recording.data["steps"][str(budget)]
        ends = list(accumulate(1e3 * seconds for *_, seconds in steps))
        rows += [
            {"at": i, "begin": round(end - 1e3 * seconds, 3), "end": round(end, 3), "kind": KINDS[read > 0]}
            | {"tokens": decoding + read}
            for end, (decoding, read, seconds) in zip(ends, steps, strict=True)
        ]
        n_reading = sum(read > 0 for _, read, _ in steps)
        facts.append(
            f"{names[i]}: {n_reading} steps read the prompt, the largest has {max(r for _, r, _ in steps)} of it"
        )
    data = alt.Chart(alt.Data(values=rows))
    shown = data.transform_filter(f"datum.at == budget || datum.at == {len(budgets) - 1}").transform_calculate(
        lane=f"datum.at == {len(budgets) - 1} ? 'whole prompt' : 'chosen budget'"
    )
    lines = [
        alt.Chart(alt.Data(values=[{}])).transform_calculate(
            words=f"{what!r} + ' ' + format({[round(medians[key, b], 3) for b in budgets]}[{at}], ',.3r') + ' ms, '"
            f" + {other!r} + ' ' + format({[round(medians[second, b], 3) for b in budgets]}[{at}], ',.3r') + ' ms'"
        )
        for what, key, other, second, at in (
            ("whole prompt: gap", "longest gap", "TTFT", "TTFT", len(budgets) - 1),
            ("chosen budget: gap", "longest gap", "TTFT", "TTFT", "budget"),
        )
    ]
    labels = alt.Chart(alt.Data(values=[{}])).transform_calculate(
        words=f"'chosen: ' + {names}[budget] + ' tokens a step'"
    )
    chart = alt.layer(*_lanes(shown, ["whole prompt", "chosen budget"], "Time since the prompt came, ms"),
                      *_texts([*lines, labels]))  # fmt: skip
    return Explorer(
        name="stall-recorded",
        chart=chart.add_params(
            menu(
                "budget",
                "Token budget",
                [str(budget) for budget in budgets[:-1]],
                str(budgets[1 if len(budgets) > 2 else 0]),
            )
        ).properties(width="container", height=230),
        alt_text="Two lanes of blocks on an axis of time, a block for each step of the engine and a line at its end,"
        " where every running user gets a token. On the upper lane one long block reads the whole prompt. On the lower"
        " lane many short blocks read it in parts. A menu chooses the budget of the lower lane.",
        caption=f"Steps of GPTlite's engine as {params['running']} users decode and a prompt of {params['prompt']}"
        f" tokens arrives, recorded on {recording.machine['name']}; gap: the longest between two tokens of a running"
        " user.",
        facts=tuple(facts),
    )


def stall_by_arithmetic(model: str = "Llama 3.1 8B", card: str = "H100 SXM") -> Explorer:
    """The same by arithmetic, for a model and a GPU of the reader's choice: `ArithmeticTime` of each step.

    Args:
        model, card: at first, by the book's names.
    """
    cards = list(gpus().values())
    shapes = {
        name: shape
        for name, shape in shipped_models().items()
        if not (shape.n_sliding or shape.d_latent or shape.n_experts)
    }
    rows = []
    for i, shape in enumerate(shapes.values()):
        time = ArithmeticTime(shape, gpu(card))
        rows.append({"m": i, "token": time.token, "row": time.row, "pair": time.pair, "key": time.key})
        rows[-1]["weights"] = time.weights
    controls = [
        menu("model", "Model", list(shapes), model),
        menu("card", "GPU", list(gpus()), card),
        slider("users", "Running users", 32, 1, 128, 1),
        slider("context", "Their context, tokens", 1024, 128, 8192, 128),
        slider("prompt", "Prompt, tokens", 8192, 1024, 32_768, 1024),
        slider("budget", "Token budget", 512, 256, 8192, 128),
        alt.param(name="peak", expr=f"{[c.peak_flops for c in cards]}[card]"),
        alt.param(name="bandwidth", expr=f"{[c.bandwidth for c in cards]}[card]"),
        alt.param(name="chunk", expr="budget - users"),
        alt.param(name="parts", expr="ceil(prompt / chunk)"),
    ]

    def seconds(n: str, past: str) -> str:
        """Of a step that adds n tokens of the prompt on `past`; n of 0 is a step of the users alone."""
        rows = f"(users + ({n} > 0 ? 1 : 0))"
        linear = f"max((datum.token * (users + {n}) + datum.row * {rows}) / peak, datum.weights / bandwidth)"
        pairs = f"(users * (context + 1) + {n} * {past} + {n} * ({n} + 1) / 2)"
        keys = f"(users * (context + 1) + ({n} > 0 ? {past} + {n} : 0))"
        return f"({linear} + max(datum.pair * {pairs} / peak, datum.key * {keys} / bandwidth))"

    chosen = alt.Chart(alt.Data(values=rows)).transform_filter("datum.m == model")
    timed = (
        chosen.transform_calculate(lane="['whole prompt', 'chunked']")
        .transform_flatten(["lane"])
        .transform_calculate(
            reads="datum.lane == 'chunked' ? parts : 1", size="datum.lane == 'chunked' ? chunk : prompt"
        )
        .transform_calculate(i=f"sequence(0, datum.reads + {STEPS})")
        .transform_flatten(["i"])
        .transform_calculate(past="min(prompt, datum.i * datum.size)")
        .transform_calculate(n="min(datum.size, prompt - datum.past)")
        .transform_calculate(ms=f"1000 * {seconds('datum.n', 'datum.past')}")
        .transform_window(end="sum(ms)", groupby=["lane"], frame=[None, 0], sort=[alt.SortField("i")])
        .transform_calculate(begin="datum.end - datum.ms", kind=f"{KINDS}[datum.n > 0 ? 1 : 0]")
    )
    read = timed.transform_filter("datum.n > 0").transform_joinaggregate(
        ttft="sum(ms)", gap="max(ms)", groupby=["lane"]
    )
    lines = [
        read.transform_filter(f"datum.lane == '{lane}' && datum.i == 0").transform_calculate(
            words=f"'{lane}: gap ' + format(datum.gap, ',.3r') + ' ms, TTFT '"
            " + format(datum.ttft, ',.4r') + ' ms'" + (" + ', ' + parts + ' parts'" if lane == "chunked" else "")
        )
        for lane in ("whole prompt", "chunked")
    ]
    unhindered = chosen.transform_calculate(
        words=f"'users alone: a token every ' + format(1000 * {seconds('0', '0')}, ',.3r') + ' ms'"
    )
    facts = tuple(_stall_in_words(shapes[model], card, budget) for budget in (256, 512, 2048, 8192))
    return Explorer(
        name="stall-arithmetic",
        chart=alt.layer(
            *_lanes(timed, ["whole prompt", "chunked"], "Time since the prompt came, ms"),
            *_texts([*lines, unhindered]),
        )
        .add_params(*controls)
        .properties(width="container", height=230),
        alt_text="Two lanes of blocks on an axis of time, a block for each step. The upper lane begins with one long"
        " block that reads the whole prompt, the lower one with many short blocks that read it in parts. Above them"
        " the longest gap between two tokens of a running user, and the time to the prompt's first token. Menus choose"
        " model and GPU, sliders the users, their context, the prompt and the token budget.",
        caption="The least time of each step in 16 bits, linear layers and attention one after the other; gap: the"
        " longest between two tokens of a running user.",
        facts=facts,
    )


def stall_bound(time: ArithmeticTime, users: int, context: int, prompt: int, budget: int | None) -> tuple[float, float]:
    """(longest gap of a running user, TTFT of the prompt) in seconds; what the explorer draws.

    Args:
        users: that decode at a context of so many tokens, each with a new one. prompt: tokens that arrive.
        budget: tokens of a step at most; None reads the prompt whole.
    """
    chunk = prompt if budget is None else budget - users
    steps = [time([(context, 1)] * users + [(past, min(chunk, prompt - past))]) for past in range(0, prompt, chunk)]
    return max(steps), sum(steps)


def _stall_in_words(shape: Any, card: str, budget: int) -> str:
    gap, ttft = stall_bound(ArithmeticTime(shape, gpu(card)), 32, 1024, 8192, budget)
    return f"budget {budget:,}: longest gap {1e3 * gap:.3g} ms, TTFT {1e3 * ttft:.4g} ms"
