"""The explorers of the chapter on speculative decoding: what it is worth by arithmetic, and its rounds step by step."""

from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording
from gptlite.speculative.theory import best_n_draft, expected_tokens, speedup

LONGEST = 16  # drafts per round, end of the axis
NONE = "none"
VISIBLE = str.maketrans({"\n": "⏎", " ": "␣"})
KINDS = {"kept": GREEN, "rejected": VERMILION, "not tried": "transparent", "the target's own": BLUE}
TAIL = 30  # characters of the text that are shown before a round's
OPACITY = 0.4  # of a cell's colour, and of its sample in the legend
TOP, CELL = 96, 76  # px above the cells, and their height
BARS = TOP + CELL + 64  # px above the bars


def measured_speedups(recording: Recording) -> list[dict[str, Any]]:
    """The speed-ups of a recording of `speculative-speed`, over the plain loop of the same batch and temperature.

    Returns: batch, temperature, n_draft, speedup (times), cost_ratio (a draft model's step over the target's).
    """
    times = {
        (point.at["kind"], point.at["batch"], point.at["temperature"], point.at["n_draft"]): point.median
        for point in recording.points
    }
    rows = []
    for (kind, batch, temperature, n_draft), seconds in times.items():
        plain, draft = times.get(("plain", batch, temperature, 0)), times.get(("draft", batch, temperature, 0))
        if kind == "speculative" and plain and draft:
            row = {"batch": batch, "temperature": temperature, "n_draft": n_draft}
            rows.append(row | {"speedup": plain / seconds, "cost_ratio": draft / plain})
    return rows


def speedup_chart(recording: Recording, acceptance: float = 0.7, n_draft: int = 4, cost_ratio: float = 0.2) -> Explorer:
    """Speed-up by the number of drafts, for any acceptance and cost, beside the shipped pair's measured points.

    Args:
        recording: of `gptlite record speculative-speed`.
        acceptance, n_draft, cost_ratio: where the sliders begin.
    """
    rows = measured_speedups(recording)
    sets = sorted({(row["batch"], row["temperature"]) for row in rows})
    names = [f"batch {batch}, temperature {temperature:g}" for batch, temperature in sets]
    points = [
        {"n": row["n_draft"], "speed": row["speedup"], "set": 1 + sets.index((row["batch"], row["temperature"]))}
        for row in rows
    ]
    controls = [
        slider("alpha", "Acceptance α", acceptance, 0, 1, 0.01),
        slider("gamma", "Drafts per round γ", n_draft, 0, LONGEST, 1),
        slider("c", "Draft step / target step c", cost_ratio, 0, 1, 0.01),
        slider("extra", "Pass longer per draft by", 0, 0, 0.5, 0.01),
        menu("measured", "Measured", [NONE, *names], names[0]),
    ]
    tokens = "(alpha == 1 ? {n} + 1 : (1 - pow(alpha, {n} + 1)) / (1 - alpha))"
    cost = "(1 + {n} * (c + extra))"
    x = alt.X(
        "n:Q",
        title="Drafts per round γ",
        scale=alt.Scale(domain=[0, LONGEST], nice=False),
        axis=alt.Axis(tickMinStep=1, grid=False),
    )
    y = alt.Y(
        "speed:Q",
        title="Speed-up, times",
        scale=alt.Scale(domain=[0, 6], nice=False, range=[340, 84], clamp=True),
        axis=alt.Axis(tickMinStep=1),
    )
    kinds = ["by the formula", "measured with the shipped pair"]
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[BLUE, ORANGE]),
        legend=alt.Legend(orient="top", title=None, symbolType="circle", symbolOpacity=1, columns=1, labelLimit=0),
    )
    every = (
        alt.Chart(alt.Data(values=[{"n": n} for n in range(LONGEST + 1)]))
        .transform_calculate(tokens=tokens.format(n="datum.n"), cost=cost.format(n="datum.n"), kind=f"'{kinds[0]}'")
        .transform_calculate(speed="datum.tokens / datum.cost")
    )
    line = every.mark_line(strokeWidth=2, point=True).encode(x=x, y=y, color=colour)
    level = alt.Chart(alt.Data(values=[{"speed": 1}])).mark_rule(strokeDash=[2, 3]).encode(y=y)
    seen = (
        alt.Chart(alt.Data(values=points))
        .transform_filter("datum.set == measured")
        .transform_calculate(kind=f"'{kinds[1]}'")
        .mark_point(filled=True, size=70, shape="square", opacity=1)
        .encode(x=x, y=y, color=colour)
    )
    here = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(n="gamma", tokens=tokens.format(n="gamma"), cost=cost.format(n="gamma"))
        .transform_calculate(speed="datum.tokens / datum.cost")
    )
    chosen = here.mark_point(filled=True, size=140, color=VERMILION, opacity=1).encode(x=x, y=y)
    best = (
        every.transform_joinaggregate(most="max(speed)")
        .transform_filter("datum.speed > datum.most - 1e-12")
        .transform_aggregate(first="min(n)", most="max(speed)", groupby=["kind"])
    )
    lines = [
        here.transform_calculate(words="format(datum.tokens, '.2f') + ' tokens per round of γ = ' + gamma"),
        here.transform_calculate(
            words="'costs ' + format(datum.cost, '.2f') + ' steps: ' + format(datum.speed, '.2f') + ' times as fast'"
        ),
        best.transform_calculate(
            words="datum.first == 0 ? 'drafting does not pay at any γ' : 'best: γ = ' + datum.first + ' with '"
            " + format(datum.most, '.2f') + ' times'"
        ),
    ]
    texts = [
        one.mark_text(align="left", baseline="top").encode(x=alt.value(-40), y=alt.value(18 * i), text="words:N")
        for i, one in enumerate(lines)
    ]
    facts = [
        f"acceptance {a:g}, c = {cost_ratio:g}: {expected_tokens(a, n_draft):.2f} tokens per round of γ = {n_draft},"
        f" {speedup(a, n_draft, cost_ratio):.2f} times; best γ = {best_n_draft(a, cost_ratio, LONGEST)}"
        for a in (0.3, 0.5, 0.7, 0.9)
    ]
    return Explorer(
        name="speculative-speedup",
        chart=alt.layer(line, level, seen, chosen, *texts)
        .add_params(*controls)
        .properties(width="container", height=340),
        alt_text="Line chart: the speed-up against the number of drafts per round. The curve of the formula rises from"
        " one, has a flat top and falls again; squares are measured points of the shipped pair, a dot marks the chosen"
        " number of drafts, a dotted line stands at one. Three lines of text give tokens per round, cost and the best"
        " number of drafts.",
        caption="What speculative decoding is worth: by the formula for any acceptance, number of drafts and cost, and"
        f" measured with the shipped pair on {recording.machine['name']}.",
        facts=tuple(facts),
    )


def trace_cells(recording: Recording) -> list[dict[str, Any]]:
    """The recorded rounds of the sweep `speculative-trace`, a row per round and place.

    Returns: `trace` (from 0), `round` (from 1), `place`, `char`, `kind` (one of `KINDS`) and `chances` (p and q, or
        nothing at temperature 0).
    """
    chars, rows = recording.data["chars"], []
    for number, trace in enumerate(recording.data["traces"]):
        for i, one in enumerate(trace["rounds"], 1):
            cells = []
            for place, token in enumerate(one["drafts"]):
                kept = one["kept"]
                kind = "kept" if place < kept else "rejected" if place == kept else "not tried"
                chances = ""
                if one["p"]:
                    chances = "\n".join(f"{name} {_percent(one[name][place])}" for name in "qp")
                cells.append((chars[token], kind, chances))
            cells.append((chars[one["next"]], "the target's own", ""))
            for place, (char, kind, chances) in enumerate(cells):
                row = {"trace": number, "round": i, "place": place, "char": char.translate(VISIBLE)}
                rows.append(row | {"kind": kind, "chances": chances})
    return rows


def _percent(chance: float) -> str:
    """A probability in words; a small one, which may well be kept, does not become none."""
    return "< 1 %" if 0 < chance < 0.01 else f"{100 * chance:.0f} %"


def trace_words(recording: Recording) -> list[dict[str, Any]]:
    """What is said of every recorded round: `trace`, `round`, `rounds`, its `tokens`, `so_far`, `words`, `text`."""
    chars, rows = recording.data["chars"], []
    for number, trace in enumerate(recording.data["traces"]):
        first = trace["rounds"][0]["start"]
        text, done = recording.data["prompt"] + chars[trace["first"]], first
        for i, one in enumerate(trace["rounds"], 1):
            n, kept = len(one["drafts"]), one["kept"]
            before = text[-TAIL:]
            text += "".join(chars[token] for token in [*one["drafts"][:kept], one["next"]])
            done += kept + 1
            ends = "a bonus token" if kept == n else "the target's own"
            words = f"{kept} of {n} drafts stay, then {ends}" if n else "no draft, a token of the target's own"
            rows.append(
                {
                    "trace": number,
                    "round": i,
                    "rounds": len(trace["rounds"]),
                    "tokens": kept + 1,
                    "so_far": done - first,
                }
                | {"words": words, "text": before.translate(VISIBLE)}
            )
    return rows


def round_player(recording: Recording) -> Explorer:
    """Plays a recording of the sweep `speculative-trace`: what was drafted, what stayed, and what the target added.

    Args:
        recording: made by the package's own loop.
    """
    cells, words = trace_cells(recording), trace_words(recording)
    temperatures = [f"{trace['temperature']:g}" for trace in recording.data["traces"]]
    longest = max(len(trace["rounds"]) for trace in recording.data["traces"])
    n_places = 1 + max(cell["place"] for cell in cells)
    rounds = {(word["trace"], word["round"]): word["rounds"] for word in words}
    for cell in cells:
        cell["rounds"] = rounds[cell["trace"], cell["round"]]
    shown = "datum.trace == trace && datum.round == min(round, datum.rounds)"
    x = alt.X("place:O", axis=None, scale=alt.Scale(domain=list(range(n_places)), paddingInner=0.08))
    here = alt.Chart(alt.Data(values=cells)).transform_filter(shown)
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values())),
        legend=alt.Legend(
            orient="top", title=None, symbolType="square", symbolStrokeColor="gray", symbolOpacity=OPACITY, columns=2
        ),
    )
    boxes = here.mark_rect(fillOpacity=OPACITY, stroke="currentColor", strokeWidth=0.7, height=CELL).encode(
        x=x, y=alt.value(TOP + CELL / 2), color=colour
    )
    letters = here.mark_text(fontSize=20, font="monospace", dy=-18).encode(
        x=x, y=alt.value(TOP + CELL / 2), text="char:N"
    )
    chances = here.mark_text(fontSize=11, lineBreak="\n", lineHeight=14, dy=8).encode(
        x=x, y=alt.value(TOP + CELL / 2), text="chances:N"
    )
    said = alt.Chart(alt.Data(values=words))
    now = said.transform_filter(shown)
    lines = [
        "datum.words",
        "datum.so_far + ' tokens in ' + datum.round + ' of ' + datum.rounds + ' passes of the target'",
        "'…' + datum.text",
    ]
    texts = [
        now.transform_calculate(line=line)
        .mark_text(align="left", baseline="top", font="monospace" if i == 2 else "system-ui, sans-serif")
        .encode(x=alt.value(0), y=alt.value(22 * i), text="line:N")
        for i, line in enumerate(lines)
    ]
    bars = (
        said.transform_filter("datum.trace == trace")
        .transform_calculate(now="datum.round == min(round, datum.rounds)")
        .mark_bar()
        .encode(
            x=alt.X(
                "round:Q",
                title="Round",
                scale=alt.Scale(domain=[0, longest + 1], nice=False),
                axis=alt.Axis(grid=False, tickMinStep=1),
            ),
            y=alt.Y(
                "tokens:Q",
                title="Tokens",
                scale=alt.Scale(domain=[0, n_places], nice=False, range=[BARS + 90, BARS]),
                axis=alt.Axis(tickMinStep=1),
            ),
            opacity=alt.condition("datum.now", alt.value(1), alt.value(0.35)),
            color=alt.value(BLUE),
        )
    )
    grid = alt.layer(boxes, letters, chances, *texts)
    facts = [
        f"temperature {temperature}: {rows[-1]['so_far']} tokens in {len(rows)} rounds"
        for i, temperature in enumerate(temperatures)
        for rows in [[word for word in words if word["trace"] == i]]
    ]
    return Explorer(
        name="speculative-rounds",
        chart=alt.layer(grid, bars)
        .resolve_scale(x="independent", y="independent")
        .add_params(
            menu("trace", "Temperature", temperatures, temperatures[1 if len(temperatures) > 1 else 0]),
            slider("round", "Round", 1, 1, longest, 1),
        )
        .properties(width="container", height=BARS + 90),
        alt_text="A row of cells, one for each drafted character and one for the character that the target adds."
        " Colours say which drafts were kept, which was rejected and which were not tried; below a character stand"
        " its probabilities for the draft model (q) and for the target (p). Bars show the tokens of each round.",
        caption="Rounds of the shipped pair, as the package's own loop drafted and verified them.",
        facts=tuple(facts),
    )
