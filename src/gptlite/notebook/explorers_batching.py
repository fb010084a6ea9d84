"""The explorers of the chapter on batching: who sits on which seat, and throughput against latency."""

import json
from collections.abc import Sequence
from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording

KINDS = {"prefill": "reads its prompt", "decode": "writes", "idle": "has ended, seat kept"}


def seat_timeline(recording: Recording) -> Explorer:
    """The seats of a batch over the steps, by policy and load, up to the step that a slider says.

    Args:
        recording: of the sweep `seat-trace`.
    Raises: ValueError when it has no trace.
    """
    traces = recording.data.get("traces")
    if not traces:
        raise ValueError("the recording has no traces, it must be one of the sweep 'seat-trace'")
    policies = list(dict.fromkeys(trace["policy"] for trace in traces))
    loads = list(dict.fromkeys(trace["load"] for trace in traces))
    spans: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []  # of each trace, what its steps have ended with
    facts = []
    for trace in traces:
        chosen = {"policy": policies.index(trace["policy"]), "load": loads.index(trace["load"])}
        spans += [
            chosen | {"seat": seat, "request": request + 1, "begin": begin, "end": end, "kind": kind}
            for seat, request, begin, end, kind in trace["spans"]
        ]
        ends.append(chosen | {name: trace[name] for name in ("given", "waiting", "finished")})
        share = trace["given"][-1] / (trace["seats"] * len(trace["given"]))
        facts.append(
            f"{trace['policy']}, {trace['load']}: {trace['given'][-1]} tokens by step {len(trace['given'])}, "
            f"{100 * share:.0f} % of the seats"
        )
    n_seats, longest = traces[0]["seats"], max(len(trace["given"]) for trace in traces)
    n_requests = traces[0]["requests"]
    controls = [
        menu("policy", "Policy", policies, policies[0]),
        menu("load", "Arrivals", loads, loads[0]),
        slider("step", "Up to step", 40, 1, longest, 1),
        slider("view", "Steps in view", 60, 20, longest, 1),
    ]
    # the view ends at the step once that is past its right edge
    left = alt.param(name="left", expr="max(0, step - view)")
    right = alt.param(name="right", expr="max(view, step)")
    here = "datum.policy == policy && datum.load == load"
    x = alt.X(
        "from:Q",
        title="Step",
        scale=alt.Scale(domainMin=alt.ExprRef("left"), domainMax=alt.ExprRef("right"), nice=False, zero=False),
        axis=alt.Axis(tickMinStep=1, format="d", grid=False),
    )
    seats = [f"seat {i + 1}" for i in range(n_seats)]
    y = alt.Y("row:N", title=None, scale=alt.Scale(domain=seats, range=[48, 48 + 44 * n_seats], paddingInner=0.2))
    shown = (
        alt.Chart(alt.NamedData("spans"))
        .transform_filter(f"{here} && datum.begin < step && datum.end > left")
        .transform_calculate(
            **{"from": "max(datum.begin, left)", "to": "min(datum.end, step)"},
            row="'seat ' + (datum.seat + 1)",
            words=f"{json.dumps(KINDS)}[datum.kind]",
        )
    )
    colour = alt.Color(
        "words:N",
        scale=alt.Scale(domain=list(KINDS.values()), range=[ORANGE, BLUE, "#999999"]),
        legend=alt.Legend(orient="top", title=None, symbolType="square", columns=2),  # two: a telephone is narrow
    )
    opacity = alt.condition("datum.kind == 'idle'", alt.value(0.45), alt.value(1))
    bars = shown.mark_bar(stroke="white", strokeWidth=0.6).encode(x=x, x2="to:Q", y=y, color=colour, opacity=opacity)
    numbers = (
        shown.transform_filter("datum.to - datum.from >= (right - left) / 30 && datum.kind == 'decode'")
        .transform_calculate(middle="(datum.from + datum.to) / 2", word="'' + datum.request")
        .mark_text(fill="white", fontSize=12)
        .encode(x=alt.X("middle:Q", title="Step"), y=y, text="word:N")
    )
    # an idle engine has no steps between two arrivals: the counts stay what they were
    now = (
        alt.Chart(alt.NamedData("ends"))
        .transform_filter(here)
        .transform_calculate(at="min(step, length(datum.given))")
        # under names of their own: a moved slider computes them again from the lists
        .transform_calculate(
            **{f"{name}_now": f"datum.{name}[datum.at - 1]" for name in ("given", "waiting", "finished")}
        )
    )
    lines = (
        "datum.given_now + ' tokens given out, on '"
        f" + format(datum.given_now / datum.at / {n_seats}, '.0%') + ' of the seats'",
        f"datum.finished_now + ' of {n_requests} requests finished, ' + datum.waiting_now + ' waiting'",
    )
    texts = [
        now.transform_calculate(words=line)
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(19 * i), text="words:N")
        for i, line in enumerate(lines)
    ]
    return Explorer(
        name="seat-timeline",
        # each table stands in the page once, whatever number of layers reads it
        chart=alt.layer(bars, numbers, *texts, datasets={"spans": spans, "ends": ends})
        .add_params(*controls, left, right)
        .properties(width="container", height=48 + 44 * n_seats),
        alt_text=f"A row for each of {n_seats} seats, over the steps of the engine. Bars show which request holds the"
        " seat: orange while its prompt is read, blue while it writes, grey while it has ended and the seat is kept."
        " Under static batching grey bars fill the rows until the longest request of a group ends; under continuous"
        " batching another request follows at once. Text above counts tokens, requests finished and waiting.",
        caption=f"{n_requests} requests on {n_seats} seats of the shipped model, each with its number.",
        facts=tuple(facts),
    )


LATENCIES = {
    "TPOT, median": ("tpot_p50", 1e3, "ms"),
    "TPOT, 90th percentile": ("tpot_p90", 1e3, "ms"),
    "TTFT, median": ("ttft_p50", 1e3, "ms"),
    "TTFT, 90th percentile": ("ttft_p90", 1e3, "ms"),
}
AT_ONCE = 1000.0  # requests per second, from where on all come at once


def rate_in_words(rate: float) -> str:
    """Arrivals per second, as a reader says it."""
    return "all at once" if rate >= AT_ONCE else f"{rate:g} requests per s"


def serving_tradeoff(recordings: Sequence[Recording]) -> Explorer:
    """Throughput against latency as the largest batch grows, one curve at a time.

    Args:
        recordings: of the sweep `batching`; a reader chooses among their machines and rates of arrivals.
    Raises: ValueError when there is none.
    """
    if not recordings:
        raise ValueError("recordings is empty, one of the sweep 'batching' is needed")
    machines, rates, rows, facts = [], dict[float, str](), [], []
    for recording in recordings:
        machines.append(f"{recording.machine['name']}, {recording.params['model']}")
        for served in recording.data["served"]:
            rates[served["rate"]] = rate_in_words(served["rate"])
            values = [factor * served[name] for name, factor, _ in LATENCIES.values()]
            rows += [
                {"machine": len(machines) - 1, "rate": served["rate"], "batch": served["batch"], "what": what}
                | {"latency": value, "throughput": served["throughput"]}
                for what, value in enumerate(values)
            ]
            facts.append(
                f"{machines[-1]}, {rates[served['rate']]}, at most {served['batch']}: "
                f"{served['throughput']:,.0f} token/s, TPOT {1e3 * served['tpot_p50']:.3g} ms, "
                f"TTFT {1e3 * served['ttft_p50']:.3g} ms"
            )
    order = sorted(rates)
    for row in rows:
        row["rate"] = order.index(row["rate"])
    labels = [rates[rate] for rate in order]
    controls = [
        menu("machine", "Machine", machines, machines[0]),
        menu("rate", "Arrivals", labels, labels[-1]),
        menu("what", "Latency", list(LATENCIES), "TPOT, median"),
        slider("times", "At most, × the lowest", 3, 1, 20, 0.5),
    ]
    here = "datum.machine == machine && datum.rate == rate && datum.what == what"
    shown = alt.Chart(alt.Data(values=rows)).transform_filter(here).transform_joinaggregate(lowest="min(latency)")
    title = "Latency, ms"  # of two fields, and one axis
    x = alt.X("latency:Q", title=title, axis=alt.Axis(format=",~s", tickCount=5))
    y = alt.Y("throughput:Q", title="Throughput, token/s", axis=alt.Axis(format=",~s", tickCount=5))
    curve = shown.mark_line(color=BLUE, strokeWidth=3).encode(x=x, y=y, order="batch:Q")
    points = shown.mark_point(filled=True, size=60, opacity=1, color=BLUE).encode(x=x, y=y)
    names = shown.mark_text(align="left", baseline="top", dx=6, dy=2).encode(x=x, y=y, text="batch:Q")
    limit = (
        shown.transform_aggregate(lowest="min(latency)")
        .transform_calculate(limit="times * datum.lowest")
        .mark_rule(strokeDash=[2, 3], strokeWidth=2)
        .encode(x=alt.X("limit:Q", title=title))
    )
    best = (
        shown.transform_filter("datum.latency <= times * datum.lowest")
        .transform_window(rank="row_number()", sort=[alt.SortField("throughput", order="descending")])
        .transform_filter("datum.rank == 1")
        .transform_calculate(
            words="'at most ' + datum.batch + ': ' + format(datum.throughput, ',.3~r') + ' token/s, '"
            " + format(datum.latency, ',.3~r') + ' ms'"
        )
    )
    ring = best.mark_point(color=VERMILION, size=190, strokeWidth=3, opacity=1).encode(x=x, y=y)
    words = best.mark_text(align="left", baseline="bottom", dx=6, dy=-6).encode(
        x=alt.value(0), y=alt.value(0), text="words:N"
    )
    return Explorer(
        name="serving-tradeoff",
        chart=alt.layer(limit, curve, points, names, ring, words)
        .add_params(*controls)
        .properties(width="container", height=300),
        alt_text="Line chart of throughput against latency, one point for each largest batch. With TPOT the line rises"
        " to the right: a larger batch gives more tokens per second and makes each of them wait longer. With TTFT and"
        " all requests at once it falls: a larger batch lets everybody in sooner. A dotted line is the largest latency"
        " that the reader allows, and a ring marks the highest throughput to its left.",
        caption="Mixed requests served by the engine as the largest batch grows; the numbers are largest batches.",
        facts=tuple(facts),
    )
