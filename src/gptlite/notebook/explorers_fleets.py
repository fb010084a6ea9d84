"""The explorers of fleets: goodput of the same machines used in several ways, and routing over kept prefixes."""

from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording
from gptlite.sweeps.fleets import POPULARITY, alone, fleet, policies, shared_jobs
from gptlite.sweeps.scheduling import fitted

LOADS = (50, 100, 150, 200, 250)  # % of what a fleet could serve one by one and without a cache
SYSTEMS = {"whole prompts": VERMILION, "chunked": BLUE, "apart, 1 + 3": GREEN, "apart, 2 + 2": PURPLE}
SYSTEMS |= {"apart, 3 + 1": ORANGE}
DASHES = [[1, 0], [1, 0], [8, 3], [5, 3], [2, 2]]

# -- goodput ------------------------------------------------------------------------------------------------------


def goodput_by_rate(recording: Recording) -> Explorer:
    """Requests per second that keep both limits, by arrival rate, for the same machines used in several ways.

    Args:
        recording: of the sweep `goodput`; the chart counts again as the reader moves the limits.
    """
    params, runs = recording.params, recording.data["runs"]
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    systems = [name for name in SYSTEMS if any(run["system"] == name for run in runs)]
    rows = [{**run, "workload": workloads.index(run["workload"])} for run in runs]
    controls = [
        menu("workload", "Requests", workloads, workloads[-1]),
        menu("pace", "Pace limit on", ["mean TPOT", "longest gap"], "mean TPOT"),
        slider("ttft", "TTFT at most, ms", 500, 50, 2000, 50),
        slider("tpot", "Pace at most, ms", 12, 6, 60, 1),
    ]
    lists = ("ttft", "tpot", "gap")  # as text: a stored notebook gives each number of a list a line of its own
    values = [{**row, **{name: " ".join(f"{value:g}" for value in row[name]) for name in lists}} for row in rows]
    data = alt.Chart(alt.Data(values=values))  # one for all layers, so that the page holds it once
    kept = (
        data.transform_filter("datum.workload == workload")
        .transform_calculate(**{name: f"split(datum.{name}, ' ')" for name in lists})
        .transform_flatten(["ttft", "tpot", "gap"])
        .transform_calculate(met="+datum.ttft <= ttft && +(pace == 0 ? datum.tpot : datum.gap) <= tpot ? 1 : 0")
        .transform_aggregate(share="mean(met)", groupby=["system", "rate"])
        .transform_calculate(good="datum.rate * datum.share", enough="datum.share >= 0.9")
    )
    x = alt.X(
        "rate:Q", title="Arrival rate, requests/s", scale=alt.Scale(zero=True, nice=False), axis=alt.Axis(format="~g")
    )
    y = alt.Y("good:Q", title="Goodput, requests/s", scale=alt.Scale(zero=True, nice=False))
    legend = alt.Legend(orient="top", title=None, columns=2, symbolType="stroke", symbolStrokeWidth=3)
    colour = alt.Color("system:N", scale=alt.Scale(domain=systems, range=[SYSTEMS[s] for s in systems]), legend=legend)
    dash = alt.StrokeDash("system:N", scale=alt.Scale(domain=systems, range=DASHES[: len(systems)]), legend=legend)
    lines = kept.mark_line(strokeWidth=2.5).encode(x=x, y=y, color=colour, strokeDash=dash)
    points = kept.mark_point(size=70, filled=True, opacity=1).encode(x=x, y=y, color=colour)
    rings = kept.transform_filter("!datum.enough").mark_point(
        size=70, filled=True, opacity=1, stroke="currentColor", shape="cross"
    )
    offered = (
        data.transform_filter("datum.workload == workload")
        .transform_aggregate(groupby=["rate"])
        .mark_line(strokeDash=[2, 3], color="currentColor", strokeWidth=1)
        .encode(x=x, y=alt.Y("rate:Q", title="Goodput, requests/s"))
    )
    facts = []
    for i, workload in enumerate(workloads):
        for name in systems:
            shares = [
                (
                    run["rate"],
                    sum(f <= 500 and p <= 12 for f, p in zip(run["ttft"], run["tpot"], strict=True)) / len(run["ttft"]),
                )
                for run in rows
                if run["workload"] == i and run["system"] == name
            ]
            best = max((rate for rate, share in shares if share >= 0.9), default=0)
            facts.append(f"{workload}, {name}: 90 % keep 500 ms and 12 ms up to {best:g} requests/s")
    machines = f"{params['machines']} {params['card']}"
    return Explorer(
        name="goodput",
        chart=alt.layer(offered, lines, points, rings.encode(x=x, y=y, color=colour))
        .add_params(*controls)
        .properties(width="container", height=320),
        alt_text="Line chart of goodput against arrival rate, a line for each way to use the same machines, below a"
        " dotted diagonal on which every request keeps its limits. A line leaves the diagonal at the rate that it can"
        " no longer serve in time. Menus choose the kind of requests and what the pace is measured by, sliders the"
        " limits of TTFT and of the pace.",
        caption=f"Simulated goodput of {params['model']} on {machines}, each reaching {100 * params['reached']:.0f} %"
        f" of its data sheet; crosses: fewer than 90 % of the requests keep both limits. Apart, a + b: a machines"
        " read, b write.",
        facts=tuple(facts),
    )


# -- routing ------------------------------------------------------------------------------------------------------


def routing_policies(recording: Recording, n_replicas: int = 4, n_groups: int = 16, n_jobs: int = 240) -> Explorer:
    """Hit rate against TTFT by routing policy, in a simulated fleet whose steps take what was measured.

    Args:
        recording: of the sweep `step-costs`, to which the time of a step is fitted.
        n_replicas: of the fleet. n_groups: of prompts that share a prefix. n_jobs: requests of each simulation.
    """
    time, names = fitted(recording), list(policies(n_replicas))
    capacity = n_replicas / alone(time)  # requests per second
    rows: list[dict[str, Any]] = []
    facts = []
    for i, exponent in enumerate(POPULARITY.values()):
        for load in LOADS:
            jobs = shared_jobs(capacity * load / 100, n_jobs, n_groups, exponent)
            for name in names:
                found = fleet(time, jobs, n_replicas, name)
                rows.append(
                    {"popularity": i, "load": load, "policy": name, "hits": round(100 * found["hit_rate"], 1)}
                    | {"ttft": round(found["ttft"], 3), "busiest": round(100 * found["busiest"])}
                )
    for row in rows:
        if row["load"] == LOADS[0]:
            facts.append(f"{list(POPULARITY)[row['popularity']]}, {row['policy']}: hit rate {row['hits']:.0f} %")
    controls = [
        menu("popularity", "Prefixes", list(POPULARITY), next(iter(POPULARITY))),
        slider("load", "Load, %", LOADS[1], LOADS[0], LOADS[-1], LOADS[1] - LOADS[0]),
    ]
    shown = alt.Chart(alt.Data(values=rows)).transform_filter("datum.popularity == popularity && datum.load == load")
    top = max(row["ttft"] for row in rows)
    low = min(row["ttft"] for row in rows)
    x = alt.X("hits:Q", title="Prompt tokens found in a cache, %", scale=alt.Scale(domain=[0, 100], nice=False))
    y = alt.Y(
        "ttft:Q",
        title="TTFT, mean, s",
        scale=alt.Scale(type="log", domain=[0.7 * low, 1.5 * top], nice=False),
        axis=alt.Axis(format="~g"),
    )
    colours, shapes = [ORANGE, VERMILION, BLUE, GREEN], ["circle", "square", "triangle-up", "diamond"]
    legend = alt.Legend(orient="top", title=None, columns=2)
    colour = alt.Color("policy:N", scale=alt.Scale(domain=names, range=colours), legend=legend)
    shape = alt.Shape("policy:N", scale=alt.Scale(domain=names, range=shapes), legend=legend)
    points = shown.mark_point(size=160, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape)
    sides: list[tuple[str, Any, int]] = [("datum.hits <= 60", "left", 12), ("datum.hits > 60", "right", -12)]
    told = shown.transform_calculate(words="'busiest takes ' + datum.busiest + ' %'")
    words = [
        told.transform_filter(f"{side} && indexof({names[part::2]}, datum.policy) >= 0")
        .mark_text(baseline="middle", align=align, dx=dx, dy=dy)
        .encode(x=x, y=y, text="words:N")
        for side, align, dx in sides
        for part, dy in enumerate((-9, 9))  # points may lie close together: every second one has its words below
    ]
    return Explorer(
        name="routing",
        chart=alt.layer(points, *words).add_params(*controls).properties(width="container", height=320),
        alt_text="Scatter chart of TTFT, on a logarithmic axis, against the share of prompt tokens that were found in"
        " a cache, one point for each of four routing policies. Points further right and lower are better. A menu"
        " chooses how popular the shared prefixes are, a slider the load.",
        caption=f"A simulated fleet of {n_replicas} replicas whose steps take what {recording.params['preset']} took on"
        f" {recording.machine['name']}; {n_groups} groups of prompts, each with a prefix of its own. A load of 100 % is"
        " what the fleet could serve one by one and without a cache.",
        facts=tuple(facts),
    )
