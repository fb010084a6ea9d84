"""The explorers of the chapter on semantic caching: recorded pairs and rates by threshold, and when a cache pays."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from gptlite.arithmetic import ModelShape
from gptlite.config import preset
from gptlite.notebook.chart import BLUE, GREEN, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.notebook.explorers_prefill import request_bound
from gptlite.record import Recording
from gptlite.semantic.cache import THRESHOLD
from gptlite.semantic.evaluate import KINDS, THRESHOLDS, Pair, Rates, load_pairs, rates

HALVES = ("judge", "choose")
HALF_NAMES = ("the judging half", "the choosing half")
CHECKS = ("off", "on")


def recorded_pairs(recording: Recording) -> tuple[list[Pair], list[float], Callable[[str, str], str | None]]:
    """The labelled pairs, their recorded similarities, and a check that repeats the recorded verdicts.

    Raises: ValueError when the recording was made of other pairs.
    """
    pairs, rows = load_pairs(), recording.data["pairs"]
    if [(pair.cached, pair.asked) for pair in pairs] != [(row["cached"], row["asked"]) for row in rows]:
        raise ValueError("the recording is of other pairs: make it again with `gptlite record semantic-pairs`")
    verdicts = {(row["asked"], row["cached"]): row["objection"] for row in rows}
    return pairs, [row["similarity"] for row in rows], lambda asked, cached: verdicts[asked, cached]


def pairs_by_kind(recording: Recording) -> Explorer:
    """Each labelled pair at its similarity, a row for each kind: served or not, rightly or wrongly, by threshold.

    Args:
        recording: of the sweep `semantic-pairs`.
    """
    pairs, similarity, check = recorded_pairs(recording)
    rows = [
        {"kind": pair.kind, "same": pair.same, "half": HALVES.index(pair.half), "similarity": value}
        | {"refused": check(pair.asked, pair.cached) is not None, "cached": pair.cached, "asked": pair.asked}
        for pair, value in zip(pairs, similarity, strict=True)
    ]
    controls = [
        slider("threshold", "Threshold", THRESHOLD, THRESHOLDS[0], THRESHOLDS[-1], 0.01),
        menu("check", "Cross-check", CHECKS, "off"),
        menu("half", "Pairs", HALF_NAMES, HALF_NAMES[1]),  # the half to try things on
    ]
    served = "datum.similarity >= threshold - 1e-9 && (check == 0 || !datum.refused)"
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.half == half")
        .transform_calculate(served=served)
        .transform_calculate(verdict="!datum.served ? 'not served' : datum.same ? 'served, right' : 'served, wrong'")
    )
    verdicts, colours = ["served, right", "served, wrong", "not served"], [BLUE, VERMILION, "#8a939c"]
    y = alt.Y("kind:N", title=None, sort=list(KINDS), axis=alt.Axis(labelLimit=150, grid=True))
    x = alt.X(
        "similarity:Q",
        title="Cosine similarity",
        scale=alt.Scale(domain=[-0.1, 1.3], nice=False),
        axis=alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1], format=".1f", grid=False),
    )
    legend = alt.Legend(orient="top", title=None, symbolStrokeWidth=2, columns=1)  # a phone has no room for three
    points = base.mark_point(size=55, opacity=0.8, strokeWidth=2).encode(
        x=x,
        y=y,
        color=alt.Color("verdict:N", scale=alt.Scale(domain=verdicts, range=colours), legend=legend),
        shape=alt.Shape(
            "verdict:N", scale=alt.Scale(domain=verdicts, range=["circle", "cross", "stroke"]), legend=legend
        ),
        tooltip=[alt.Tooltip("cached:N"), alt.Tooltip("asked:N"), alt.Tooltip("similarity:Q", format=".2f")],
    )
    counts = (
        base.transform_calculate(one="datum.served ? 1 : 0")
        .transform_aggregate(served="sum(one)", pairs="count()", groupby=["kind"])
        .transform_calculate(words="datum.served + ' of ' + datum.pairs", place="1.28")
        .mark_text(align="right", dy=-12)  # above its row, since on a phone the marks reach as far
        .encode(x=alt.X("place:Q"), y=y, text="words:N")
    )
    rule = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(threshold="threshold")
        .mark_rule(strokeDash=[4, 3], strokeWidth=2)
        .encode(x=alt.X("threshold:Q"))
    )
    at = {
        (half, on): rates(*_half(pairs, similarity, half), THRESHOLD, check if on == "on" else None)
        for half in HALVES
        for on in CHECKS
    }
    return Explorer(
        name="pairs-by-kind",
        chart=alt.layer(rule, points, counts).add_params(*controls).properties(width="container", height=280),
        alt_text="Strip chart with a row for each kind of pair and a mark for each pair at its cosine similarity. A"
        " dashed vertical line is the threshold. Marks to its right are served: circles rightly, crosses wrongly; the"
        " others are short strokes. At the right the number of served pairs of each kind. A slider moves the threshold,"
        " menus switch the cross-check on and choose the half of the pairs.",
        caption="The labelled pairs of questions by kind and similarity under MiniLM, and what a threshold serves.",
        facts=tuple(
            f"{HALF_NAMES[HALVES.index(half)]} at {THRESHOLD}, check {on}: "
            + ", ".join(f"{kind} {one.served[kind]} of {one.pairs[kind]}" for kind in KINDS)
            for (half, on), one in at.items()
        ),
    )


def precision_recall(recording: Recording) -> Explorer:
    """Precision against recall as the threshold moves, without and with the check.

    Args:
        recording: of the sweep `semantic-pairs`.
    """
    pairs, similarity, check = recorded_pairs(recording)
    rows: list[dict[str, Any]] = []
    for half in HALVES:
        own = _half(pairs, similarity, half)
        for on in CHECKS:
            for threshold in THRESHOLDS:
                one = rates(*own, threshold, check if on == "on" else None)
                rows.append(
                    {"half": HALVES.index(half), "check": f"check {on}", "threshold": threshold}
                    | {"recall": 100 * one.recall, "precision": 100 * one.precision}
                    | {"right": one.right, "wrong": one.wrong, "same": one.same}
                )
    controls = [
        slider("threshold", "Threshold", THRESHOLD, THRESHOLDS[0], THRESHOLDS[-1], 0.01),
        menu("half", "Pairs", HALF_NAMES, HALF_NAMES[1]),
    ]
    kinds = [f"check {on}" for on in CHECKS]
    base = alt.Chart(alt.Data(values=rows)).transform_filter("datum.half == half")
    here = base.transform_filter("abs(datum.threshold - threshold) < 0.001")
    axis = alt.Axis(values=[0, 20, 40, 60, 80, 100])
    titles = ["Recall: same questions that are served, %", "Precision: served that are right, %"]
    x = alt.X("recall:Q", title=titles[0], axis=axis, scale=alt.Scale(domain=[0, 100], nice=False))
    y = alt.Y("precision:Q", title=titles[1], axis=axis, scale=alt.Scale(domain=[0, 118], nice=False))
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    colour = alt.Color("check:N", scale=alt.Scale(domain=kinds, range=[ORANGE, BLUE]), legend=legend)
    dash = alt.StrokeDash("check:N", scale=alt.Scale(domain=kinds, range=[[6, 4], [1, 0]]), legend=legend)
    curves = base.mark_line(strokeWidth=3).encode(x=x, y=y, color=colour, strokeDash=dash, order="threshold:Q")
    ring = here.mark_point(size=190, strokeWidth=3, opacity=1).encode(x=x, y=y, color=colour)
    texts = [
        here.transform_filter(f"datum.check == '{kind}'")
        .transform_calculate(
            words="datum.check + ': right ' + datum.right + ' of ' + datum.same + ', wrong ' + datum.wrong"
        )
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(6), y=alt.value(4 + 17 * i), text="words:N")
        for i, kind in enumerate(kinds)
    ]
    return Explorer(
        name="precision-recall",
        chart=alt.layer(curves, ring, *texts).add_params(*controls).properties(width="container", height=320),
        alt_text="Two curves of precision against recall as the threshold moves: dashed without the cross-check, low"
        " and falling; solid with it, close to the top. A ring on each is the threshold that the slider sets, with the"
        " number of right and wrong answers in words. A menu chooses the half of the pairs.",
        caption="Precision and recall on the labelled pairs as the threshold moves, without and with the cross-check.",
        facts=tuple(
            f"{HALF_NAMES[row['half']]} at {row['threshold']}, {row['check']}: {row['right']} of {row['same']} same"
            f" questions served, and {row['wrong']} wrong answer{'' if row['wrong'] == 1 else 's'}"
            for row in rows
            if row["threshold"] in (0.7, THRESHOLD, 0.95)
        ),
    )


def when_it_pays(presets: Sequence[str] = ("1b", "7b"), card: str = "H100 SXM", n_prompt: int = 32) -> Explorer:
    """The mean time of a request by hit rate, with a semantic cache in front and without, by arithmetic.

    A miss pays for the lookup and for the model; the model's time is its least, by `gptlite.arithmetic`, at batch 1.

    Args:
        presets: models to choose from; the last is shown first. card: the GPU. n_prompt: tokens of the question.
    """
    rows = []
    for i, name in enumerate(presets):
        shape = ModelShape.of(preset(name))
        first, second, third = (sum(request_bound(shape, n_prompt, n, card)[:2]) for n in (1, 2, 3))
        # the time is a quadratic in the number of new tokens: each step reads one key and value more
        growth = third - 2 * second + first
        rows.append({"model": i, "first": 1e3 * first, "step": 1e3 * (second - first), "growth": 1e3 * growth})
    controls = [
        menu("model", f"Model on {card}", presets, presets[-1]),
        slider("answer", "Answer, tokens", 256, 1, 1024, 1),
        slider("lookup", "Lookup, ms", 10, 1, 200, 1),
        slider("rate", "Hit rate, %", 30, 0, 100, 1),
    ]
    chosen = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.model == model")
        .transform_calculate(
            generate="datum.first + (answer - 1) * datum.step + (answer - 1) * (answer - 2) / 2 * datum.growth"
        )
    )
    kinds = ["without a cache", "with a cache"]
    lines = (
        chosen.transform_calculate(hits="[0, 100]", which=f"{kinds}")
        .transform_flatten(["hits"])
        .transform_flatten(["which"])
        .transform_calculate(
            ms=f"datum.which == '{kinds[0]}' ? datum.generate : lookup + (1 - datum.hits / 100) * datum.generate"
        )
    )
    scale = alt.Scale(domain=[0, 100], nice=False)
    x = alt.X("hits:Q", title="Hit rate, %", scale=scale, axis=alt.Axis(tickCount=5))
    y = alt.Y("ms:Q", title="Mean time of a request, ms", axis=alt.Axis(tickCount=6))
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    colour = alt.Color("which:N", scale=alt.Scale(domain=kinds, range=[ORANGE, BLUE]), legend=legend)
    dash = alt.StrokeDash("which:N", scale=alt.Scale(domain=kinds, range=[[6, 4], [1, 0]]), legend=legend)
    drawn = lines.mark_line(strokeWidth=3).encode(x=x, y=y, color=colour, strokeDash=dash)
    here = chosen.transform_calculate(
        hits="rate", ms="lookup + (1 - rate / 100) * datum.generate", even="100 * lookup / datum.generate"
    )
    ring = here.mark_point(color=GREEN, size=190, strokeWidth=3, opacity=1).encode(x=x, y=y)
    room = here.transform_calculate(ms="1.3 * datum.generate").mark_point(opacity=0).encode(x=x, y=y)  # for the words
    words = [
        "'mean ' + format(datum.ms, ',.3~r') + ' ms, uncached ' + format(datum.generate, ',.3~r') + ' ms'",
        "datum.even > 100 ? 'it never pays: slower than the model'"
        " : 'it pays from a hit rate of ' + format(datum.even, '.2~r') + ' % on'",
    ]
    texts = [
        here.transform_calculate(words=text)
        .mark_text(align="right", baseline="top")
        .encode(x=alt.value("width"), y=alt.value(2 + 17 * i), text="words:N")
        for i, text in enumerate(words)
    ]
    return Explorer(
        name="when-it-pays",
        chart=alt.layer(drawn, room, ring, *texts).add_params(*controls).properties(width="container", height=280),
        alt_text="Two lines of the mean time of a request against the hit rate: level without a cache, falling with"
        " one, and a little above the other at a hit rate of zero. A ring marks the hit rate that the slider sets, with"
        " the times and the break-even in words. A menu chooses the model, sliders the length of the answer and the"
        " time of a lookup.",
        caption=f"The mean time of a request by arithmetic: a question of {n_prompt} tokens to a model in 16 bits, one"
        " request at a time, with a semantic cache in front of it and without.",
        facts=tuple(
            f"{name}, 256 tokens: {1e3 * ms:.4g} ms without a cache, a lookup of 10 ms pays from"
            f" {100 * 0.01 / ms:.2g} % hits on"
            for name in presets
            for ms in [sum(request_bound(ModelShape.of(preset(name)), n_prompt, 256, card)[:2])]
        ),
    )


def _half(pairs: Sequence[Pair], similarity: Sequence[float], half: str) -> tuple[list[Pair], list[float]]:
    own = [(pair, value) for pair, value in zip(pairs, similarity, strict=True) if pair.half == half]
    return [pair for pair, _ in own], [value for _, value in own]


def rates_table(recording: Recording, half: str, thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """Rows for a table: what each threshold serves of a half's pairs, kind by kind, without and with the check.

    Args:
        recording: of the sweep `semantic-pairs`. half: "choose" or "judge".
    """
    pairs, similarity, check = recorded_pairs(recording)
    own = _half(pairs, similarity, half)
    rows = []
    for on in CHECKS:
        for threshold in thresholds:
            one: Rates = rates(*own, threshold, check if on == "on" else None)
            rows.append(
                {"threshold": threshold, "check": on}
                | {kind: f"{one.served[kind]}/{one.pairs[kind]}" for kind in KINDS}
            )
    return rows
