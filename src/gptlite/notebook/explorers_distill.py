"""The explorers of the chapter on distillation: one position at any temperature, and students by recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from torch import Tensor

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, Explorer, menu, slider
from gptlite.record import Recording

N_SHOWN = 10  # characters with bars


@dataclass(frozen=True)
class Place:
    """A position of a text and what two models say there.

    Args:
        name: of the position, for the menu. teacher, student: logits [V].
    """

    name: str
    teacher: Tensor
    student: Tensor


def soft_labels(places: Sequence[Place], chars: str, temperature: float = 2.0) -> Explorer:
    """Teacher's and student's distribution at one position as the temperature moves, and the size of the gradient.

    Args:
        places: one or more, for the menu. chars: the characters of the vocabulary, in the order of the logits.
        temperature: at first.
    """
    rows = []
    for i, place in enumerate(places):
        teacher, student = (z.double() - z.double().max() for z in (place.teacher, place.student))
        rank = teacher.argsort(descending=True, stable=True).argsort()
        centre = float(teacher.mean()), float(student.mean())
        for j, char in enumerate(chars):
            rows.append(
                {
                    "place": i,
                    "char": {" ": "space", "\n": "line"}.get(char, char),
                    "rank": int(rank[j]),
                    "t": round(float(teacher[j]), 3),
                    "s": round(float(student[j]), 3),
                    "d": round(float(student[j]) - centre[1] - float(teacher[j]) + centre[0], 3),
                }
            )
    controls = [
        menu("place", "Position", [place.name for place in places], places[0].name),
        slider("tau", "Temperature", temperature, 0.5, 64, 0.5),
    ]
    power = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.place == place")
        .transform_calculate(et="exp(datum.t / tau)", es="exp(datum.s / tau)")
        .transform_joinaggregate(zt="sum(et)", zs="sum(es)", V="count()")
        .transform_calculate(p="datum.et / datum.zt", q="datum.es / datum.zs")
        .transform_calculate(
            gap="datum.q - datum.p",
            part="datum.p * ((datum.t - datum.s) / tau - log(datum.zt) + log(datum.zs))",
        )
        .transform_calculate(square="datum.gap * datum.gap", limit="datum.d * datum.d / datum.V / datum.V")
    )
    total = power.transform_aggregate(kl="sum(part)", squares="sum(square)", limits="sum(limit)").transform_calculate(
        size="sqrt(datum.squares) / tau", full="sqrt(datum.squares) * tau", far="sqrt(datum.limits)"
    )
    shown = power.transform_filter(f"datum.rank < {N_SHOWN}").transform_fold(["p", "q"], ["who", "share"])
    shown = shown.transform_calculate(model="datum.who == 'p' ? 'teacher' : 'student'")
    lines = [
        "'temperature ' + format(tau, '.1f') + ': KL ' + format(max(datum.kl, 0), '.3~g') + ' nats'",
        "'gradient of KL alone: ' + format(datum.size, '.2~g')",
        "'times temperature squared: ' + format(datum.full, '.2~g')",
        "'its limit, difference over V: ' + format(datum.far, '.2~g')",
    ]
    texts = [
        total.transform_calculate(words=words)
        .mark_text(align="right", baseline="top", dx=-4)
        .encode(x=alt.value("width"), y=alt.value(4 + 18 * i), text="words:N")
        for i, words in enumerate(lines)
    ]
    bars = shown.mark_bar().encode(
        x=alt.X("char:N", title="Next character", sort=alt.EncodingSortField("rank"), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("model:N", sort=["teacher", "student"]),
        y=alt.Y("share:Q", title="Probability", scale=alt.Scale(domain=[0, 1], nice=False)),
        color=alt.Color(
            "model:N",
            scale=alt.Scale(domain=["teacher", "student"], range=[BLUE, ORANGE]),
            legend=alt.Legend(orient="top", title=None),
        ),
        tooltip=[alt.Tooltip("char:N"), alt.Tooltip("model:N"), alt.Tooltip("share:Q", format=".4f")],
    )
    return Explorer(
        name="soft-labels",
        chart=alt.layer(bars, *texts).add_params(*controls).properties(width="container", height=320),
        alt_text="Pairs of bars, the teacher's probability in blue and the student's in orange, for the ten characters"
        " that the teacher finds most probable at one position. A menu chooses the position, a slider the temperature"
        " that divides both models' logits. Lines of text give the divergence, the length of its gradient with respect"
        " to the student's logits, the same times the squared temperature, and the limit that it tends to.",
        caption="One position at the teacher and at the student, softened by a temperature.",
        facts=tuple(
            f"{place.name}: the teacher's first choice is {chars[int(place.teacher.argmax())]!r}, the student's"
            f" {chars[int(place.student.argmax())]!r}"
            for place in places
        ),
    )


RECIPES = {
    "text": "text alone",
    "soft": "soft labels",
    "soft temperature=2": "soft, temperature 2",
    "soft hard=0.5": "half soft, half text",
    "logits": "logits, squared",
    "hidden": "soft + hidden, squared",
    "hidden squares=0 cosine=1": "soft + hidden, cosine",
    "hidden squares=0 cosine=1 hard=1": "text + hidden, cosine",
    "mutual": "mutual, no teacher",
    "offline": "offline, top 8 + tail",
    "offline tail=no": "offline, top 8 alone",
    "on-policy": "on-policy, last half",
    "responses": "teacher's text",
    "soft teachers=gptlite+gptlite-gqa2+gptlite-mla128": "three teachers",
    "text steps=900": "text alone, 4.5 x the steps",
    "offline steps=900": "offline, 4.5 x the steps",
}
MEASURES = {
    "loss": ("validation loss, nats", "Validation loss, nats per character", ".3f"),
    "divergence": ("divergence, nats", "KL(teacher || student), nats", ".3f"),
    "same": ("same first choice, %", "Same most probable character, %", ".1f"),
    "overlap": ("overlap, %", "Overlap of the distributions, %", ".1f"),
}


def students(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """The students that `gptlite record distillation` wrote, in the order of RECIPES and by seed, each once.

    Returns: recipe, its words, seed, steps, tokens_seen, loss, same, divergence, overlap.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for recording in recordings:
        for row in recording.data["students"]:
            found.setdefault((row["recipe"], row["seed"]), row)  # the first recording that has it counts
    rows = list(found.values())
    order = list(RECIPES)
    rows.sort(key=lambda row: (order.index(row["recipe"]) if row["recipe"] in order else len(order), row["seed"]))
    return [{**row, "words": RECIPES.get(row["recipe"], row["recipe"])} for row in rows]


def mean_student(rows: Sequence[dict[str, Any]], recipe: str, measure: str = "loss") -> float:
    """Mean of a measure over the seeds of a recipe. Raises: ValueError when the recipe was not recorded."""
    found = [row[measure] for row in rows if row["recipe"] == recipe]
    if not found:
        raise ValueError(f"no student of recipe {recipe!r} was recorded")
    return sum(found) / len(found)


def recipes_compared(recordings: Sequence[Recording]) -> Explorer:
    """Students by recipe at equal steps, one mark per seed.

    Args:
        recordings: of `gptlite record distillation`.
    """
    rows = students(recordings)
    names = list(dict.fromkeys(row["words"] for row in rows))
    data = [
        {
            "words": row["words"],
            "seed": row["seed"],
            "measure": i,
            "value": row[name] * (100 if name in ("same", "overlap") else 1),
            "kind": "text" if row["recipe"].startswith("text") else "distilled",
        }
        for row in rows
        for i, name in enumerate(MEASURES)
    ]
    seeds = sorted({row["seed"] for row in rows})
    controls = [
        menu("measure", "Measure", [words for words, _, _ in MEASURES.values()], MEASURES["loss"][0]),
        menu("seed", "Seed", ["all", *map(str, seeds)], "all"),
    ]
    shown = (
        alt.Chart(alt.Data(values=data))
        .transform_filter("datum.measure == measure")
        .transform_filter("seed == 0 || datum.seed == " + repr(seeds) + "[seed - 1]")
    )
    y = alt.Y("words:N", title=None, sort=names, axis=alt.Axis(labelLimit=170))
    x = alt.X("value:Q", title="Value of the measure", scale=alt.Scale(zero=False, padding=24))  # px, for the numbers
    mean = shown.transform_aggregate(mean="mean(value)", groupby=["words"]).transform_calculate(
        label="format(datum.mean, measure < 2 ? '.3f' : '.1f')"
    )
    color = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=["text", "distilled"], range=[ORANGE, BLUE]),
        legend=alt.Legend(orient="top", title=None),
    )
    chart = alt.layer(
        shown.mark_point(size=70, strokeWidth=2).encode(
            x=x,
            y=y,
            color=color,
            shape=alt.Shape("kind:N", scale=alt.Scale(domain=["text", "distilled"], range=["diamond", "circle"])),
            tooltip=[alt.Tooltip("words:N"), alt.Tooltip("seed:N"), alt.Tooltip("value:Q", format=".4~f")],
        ),
        mean.mark_tick(color=GREEN, thickness=3, size=16).encode(x=alt.X("mean:Q", title="Value of the measure"), y=y),
        mean.mark_text(dy=-12, fontSize=11).encode(x="mean:Q", y=y, text="label:N"),
    )
    return Explorer(
        name="recipes-compared",
        chart=chart.add_params(*controls).properties(width="container", height=36 * len(names) + 20),
        alt_text="One row per recipe with a mark for each seed, diamonds for students that learned the text alone and"
        " circles for distilled ones, and a green tick with a number at their mean. Menus choose the measure"
        " (validation loss, divergence from the teacher, share of positions with the same first choice, overlap of the"
        " distributions) and the seed.",
        caption="Students of one shape by recipe, as recorded.",
        facts=tuple(
            f"{words}: loss {mean_student(rows, recipe):.2f}, same first choice "
            f"{100 * mean_student(rows, recipe, 'same'):.0f} %"
            for recipe, words in {row["recipe"]: row["words"] for row in rows}.items()
        ),
    )
