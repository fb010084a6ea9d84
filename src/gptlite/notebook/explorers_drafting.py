"""The explorers of the chapter on drafting without a draft model: trees and their verdicts, and what drafters cost."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, VERMILION, Explorer, menu, slider
from gptlite.notebook.explorers_speculative import _percent
from gptlite.record import Recording

KINDS = {"kept": GREEN, "tried and rejected": VERMILION, "never reached": "gray", "the text so far": PURPLE}
VISIBLE = str.maketrans({"\n": "⏎", " ": "␣"})
TOP, ROW = 84, 22  # px above a tree, and between its rows
PLOT = 300  # px, height of the chart of costs
MOST = 1.5  # times the measured cost, end of the sliders


def tree_rows(nodes: dict[str, Any]) -> list[float]:
    """Where each node of a recorded tree is drawn, from the top: leaves below each other, a parent by its first child.

    Args:
        nodes: a round of the sweep `drafting-trace`.
    """
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(nodes["parents"]):
        children.setdefault(parent, []).append(i)
    place = [0.0] * len(nodes["parents"])
    bottom = 0

    def walk(node: int) -> None:
        nonlocal bottom
        for number, child in enumerate(children.get(node, [])):
            bottom += number > 0
            place[child] = float(bottom)
            walk(child)

    walk(-1)
    return place


def node_rows(recording: Recording) -> list[dict[str, Any]]:
    """The recorded trees, a row per node and one for the text before: `trace`, `round`, places, `char`, `kind`, `p`.

    Places are `depth` and `row`, and those of the parent, `from_depth` and `from_row`.
    """
    chars, rows = recording.data["chars"], []
    for number, trace in enumerate(recording.data["traces"]):
        for i, one in enumerate(trace["rounds"], 1):
            place, depth = tree_rows(one), list[int]()
            at = {"trace": number, "round": i}
            root = at | {"depth": 0, "row": 0.0, "from_depth": 0, "from_row": 0.0}
            rows.append(root | {"char": "…", "kind": "the text so far", "p": ""})
            for node, parent in enumerate(one["parents"]):
                depth.append(1 + (depth[parent] if parent >= 0 else 0))
                tried = parent == -1 or parent in one["kept"]
                # siblings after the kept one are not looked at any more
                done = any(one["parents"][k] == parent and k < node for k in one["kept"])
                kind = "tried and rejected" if tried and not done else "never reached"
                kind = "kept" if node in one["kept"] else kind
                rows.append(
                    at
                    | {"depth": depth[node], "row": place[node], "char": chars[one["tokens"][node]].translate(VISIBLE)}
                    | {"from_depth": depth[node] - 1, "from_row": place[parent] if parent >= 0 else 0.0}
                    | {"kind": kind, "p": _percent(one["p"][node])}
                )
    return rows


def round_words(recording: Recording) -> list[dict[str, Any]]:
    """What is said of each recorded round: `trace`, `round`, `line` and `words`."""
    chars, rows = recording.data["chars"], []
    for number, trace in enumerate(recording.data["traces"]):
        for i, one in enumerate(trace["rounds"], 1):
            kept = "".join(chars[one["tokens"][node]] for node in one["kept"]).translate(VISIBLE)
            text = one["before"].translate(VISIBLE)
            follows = chars[one["next"]].translate(VISIBLE)
            lines = (
                f"round {i} of {len(trace['rounds'])}, after …{text[-16:]}",
                f"{len(one['tokens'])} nodes, kept: {kept or 'none'}, then: {follows}",
            )
            rows += [{"trace": number, "round": i, "line": line, "words": words} for line, words in enumerate(lines)]
    return rows


def tree_player(recording: Recording) -> Explorer:
    """Plays a recording of the sweep `drafting-trace`: the nodes of each round's tree, and what became of them.

    Args:
        recording: made by the package's own loop.
    """
    nodes, said = node_rows(recording), round_words(recording)
    names = [trace["drafter"] for trace in recording.data["traces"]]
    longest = max(len(trace["rounds"]) for trace in recording.data["traces"])
    ends = {number: len(trace["rounds"]) for number, trace in enumerate(recording.data["traces"])}
    for row in (*nodes, *said):
        row["rounds"] = ends[row["trace"]]
    deepest, n_rows = max(row["depth"] for row in nodes), max(row["row"] for row in nodes)
    bottom = TOP + ROW * n_rows
    shown = "datum.trace == trace && datum.round == min(round, datum.rounds)"
    x = alt.X("depth:Q", axis=None, scale=alt.Scale(domain=[-0.3, deepest + 0.6], nice=False))
    y = alt.Y("row:Q", axis=None, scale=alt.Scale(domain=[0, max(1, n_rows)], nice=False, range=[TOP, bottom]))
    here = alt.Chart(alt.Data(values=nodes)).transform_filter(shown)
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values())),
        legend=alt.Legend(orient="top", title=None, symbolType="circle", columns=2),
    )
    branches = here.mark_rule(opacity=0.4).encode(
        x=alt.X("from_depth:Q", axis=None), x2="depth:Q", y=alt.Y("from_row:Q", axis=None), y2="row:Q"
    )
    dots = here.mark_circle(size=330, opacity=0.35).encode(x=x, y=y, color=colour)
    letters = here.mark_text(font="monospace", fontSize=14).encode(x=x, y=y, text="char:N")
    chances = here.mark_text(align="left", dx=11, dy=-7, fontSize=10).encode(x=x, y=y, text="p:N")
    texts = (
        alt.Chart(alt.Data(values=said))
        .transform_filter(shown)
        .transform_calculate(place="22 * datum.line")
        .mark_text(align="left", baseline="top", font="monospace", fontSize=12)
        .encode(x=alt.value(0), y=alt.Y("place:Q", scale=None, axis=None), text="words:N")
    )
    facts = []
    for number, trace in enumerate(recording.data["traces"]):
        kept = sum(len(one["kept"]) for one in trace["rounds"])
        n_nodes = sum(len(one["tokens"]) for one in trace["rounds"])
        facts.append(f"{names[number]}: {len(trace['rounds'])} rounds, {n_nodes} nodes, {kept} kept")
    return Explorer(
        name="draft-trees",
        chart=alt.layer(alt.layer(branches, dots, letters, chances), texts)
        .resolve_scale(y="independent")
        .add_params(menu("trace", "Drafter", names, names[0]), slider("round", "Round", 1, 1, longest, 1))
        .properties(width="container", height=bottom + 20),
        alt_text="A tree that grows from the text on the left to the right. Each node is a drafted character with the"
        " target's probability beside it; colours say which were kept, which were tried and rejected, and which were"
        " never reached. A slider goes through the rounds.",
        caption="Trees of drafts, as the package's own loop verified them while GPTlite wrote at temperature"
        f" {recording.params['temperature']:g}. A percentage is the target's probability of the node.",
        facts=tuple(facts),
    )


def drafter_rows(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """What recordings of the sweep `drafting` say of each drafter.

    Returns: rows of drafter, batch, temperature, `tokens` (per round and text), `acceptance` (of a chain's tried
        drafts; None for a tree), `overhead` and `verify` (of a round, over a step of the plain loop), `speedup`,
        `equal` (whether the tokens were the plain loop's), in the recordings' order.
    """
    rows = []
    for recording in recordings:
        n_new, repeats = recording.params["n_new"], recording.params["repeats"]
        times = {(p.at["drafter"], p.at["batch"], p.at["temperature"]): p.median for p in recording.points}
        for run in recording.data["runs"]:
            where = (run["batch"], run["temperature"])
            plain, own = times.get(("plain", *where)), times.get((run["drafter"], *where))
            if plain is None or own is None:
                continue
            passes, proposing = run["passes"] / repeats, median(run["proposing"])
            step = plain / n_new
            rows.append(
                {key: run[key] for key in ("drafter", "batch", "temperature", "equal")}
                | {
                    "tokens": (run["kept"] + run["rounds"]) / run["rounds"],
                    "acceptance": run["kept"] / run["tried"] if run["tried"] else None,
                    "drafted": run["drafted"] / run["rounds"],
                    "overhead": proposing / passes / step,
                    "verify": (own - proposing) / passes / step,
                    "speedup": plain / own,
                }
            )
    return rows


def cost_chart(recording: Recording) -> Explorer:
    """Tokens per round against what a round costs, for every drafter, and the line above which drafting pays.

    Args:
        recording: of `gptlite record drafting`.
    """
    rows = [row for row in drafter_rows([recording]) if row["batch"] == min(recording.params["batches"])]
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    temperatures = sorted({row["temperature"] for row in rows})
    points = [
        {
            "number": 1 + names.index(row["drafter"]),
            "drafter": row["drafter"],
            "at": temperatures.index(row["temperature"]),
            "tokens": row["tokens"],
            "overhead": row["overhead"],
            "longer": row["verify"] - 1,
        }
        for row in rows
    ]
    widest = 1.05 * max(1 + MOST * (row["overhead"] + max(0, row["verify"] - 1)) for row in rows)
    highest = 1.15 * max(row["tokens"] for row in rows)
    x_scale = alt.Scale(domain=[0, widest], nice=False)
    y_scale = alt.Scale(domain=[0, highest], nice=False, range=[PLOT, 0])
    # the axis stands on top, since the list of names stands below
    axis = alt.Axis(orient="top", grid=False)
    x = alt.X("cost:Q", scale=x_scale, axis=axis, title="Cost of a round, plain steps")
    y = alt.Y("tokens:Q", scale=y_scale, title="Tokens a round")
    here = (
        alt.Chart(alt.Data(values=points))
        .transform_filter("datum.at == temperature")
        .transform_calculate(cost="1 + drafting * datum.overhead + pass * datum.longer")
        .transform_calculate(pays="datum.tokens > datum.cost ? 'faster' : 'slower'")
    )
    colour = alt.Color(
        "pays:N",
        scale=alt.Scale(domain=["faster", "slower"], range=[GREEN, ORANGE]),
        legend=alt.Legend(orient="top", title="Than the plain loop", symbolType="circle"),
    )
    dots = here.mark_circle(size=380, opacity=0.4).encode(x=x, y=y, color=colour)
    numbers = here.mark_text(fontSize=12).encode(x=x, y=y, text="number:Q")
    line = (
        alt.Chart(alt.Data(values=[{"end": 0.0}, {"end": min(widest, highest)}]))
        .mark_line(strokeDash=[5, 4], color=BLUE)
        .encode(x=alt.X("end:Q", scale=x_scale, axis=axis), y=alt.Y("end:Q", scale=y_scale))
    )
    listed = (
        here.transform_calculate(
            place=f"{PLOT} + 18 * datum.number",
            words="datum.number + ' ' + datum.drafter + ': ' + format(datum.tokens, '.2f') + ' tokens, '"
            " + format(datum.tokens / datum.cost, '.2f') + ' times'",
        )
        .mark_text(align="left", baseline="top", fontSize=12)
        .encode(x=alt.value(0), y=alt.Y("place:Q", scale=None, axis=None), text="words:N")
    )
    facts = [
        f"temperature {temperatures[point['at']]:g}, {point['drafter']}: {point['tokens']:.2f} tokens a round"
        for point in points
    ]
    plot = alt.layer(line, dots, numbers)
    return Explorer(
        name="drafter-costs",
        chart=alt.layer(plot, listed)
        .resolve_scale(y="independent")
        .add_params(
            menu("temperature", "Temperature", [f"{t:g}" for t in temperatures], f"{temperatures[0]:g}"),
            slider("drafting", "Drafting costs, times", 1, 0, MOST, 0.1),
            slider("pass", "Longer pass costs, times", 1, 0, MOST, 0.1),
        )
        .properties(width="container", height=PLOT + 30 + 18 * len(names)),
        alt_text="Points for the drafters, by what a round costs and by the tokens that it gives. On a dashed diagonal"
        " a round gives as many tokens as it costs plain steps; drafters above it are faster than the plain loop, those"
        " below it slower. Below stand their names, tokens and speed-ups.",
        caption="What each drafter gives and costs, with the shipped model at batch"
        f" {min(recording.params['batches'])}, measured on {recording.machine['name']}. The dashed line is the"
        " break-even.",
        facts=tuple(facts),
    )
