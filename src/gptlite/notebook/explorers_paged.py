"""The explorers of the chapter on PagedAttention: the blocks of a pool step by step, and the waste by their size."""

import textwrap
from typing import Any

import altair as alt

from gptlite.notebook.chart import BLUE, GREEN, ORANGE, PURPLE, VERMILION, Explorer, menu, slider
from gptlite.record import Recording
from gptlite.serving.waste import length_for, waste_share

COLUMNS = 7  # blocks in a row of the grid
TOP, WRAP = 74, 44  # px above the grid for the words of a step, and their characters in a line
OPACITY = 0.4  # of a block's colour, and of its sample in the legend
KINDS = {
    "copied": VERMILION,
    "written": ORANGE,
    "shared": PURPLE,
    "held by one": BLUE,
    "idle": GREEN,
    "unused": "transparent",
}
VISIBLE = str.maketrans({"\n": "⏎", " ": "␣"})
SIZES = (1, 8, 16, 32, 64, 128, 256)  # of a block, to choose from
LONGEST = 4096  # tokens, end of the axis


def frame_rows(recording: Recording) -> list[dict[str, Any]]:
    """The recorded frames of the sweep `paged-trace`, a row per frame and block, in words.

    Returns: `frame` (from 1), `block`, `tokens` (as visible text), `holders`, `kind` (one of `KINDS`).
    """
    chars = recording.data["chars"]
    rows = []
    for i, frame in enumerate(recording.data["frames"], 1):
        copied = {new for _, new in frame["copies"]}
        for block, what in enumerate(frame["blocks"]):
            held = what["held"]
            kind = "idle" if what["idle"] else "unused" if not held else "shared" if len(held) > 1 else "held by one"
            kind = "copied" if block in copied else "written" if block in frame["written"] else kind
            text = "".join(chars[token] for token in what["tokens"]).translate(VISIBLE)
            rows.append({"frame": i, "block": block, "tokens": text, "holders": _two_lines(held), "kind": kind})
    return rows


def _two_lines(held: list[str]) -> str:
    """Up to four names, no more than two in a line, so that they fit a narrow block."""
    return "\n".join(" ".join(held[i : i + 2]) for i in range(0, len(held), 2))


def frame_tables(recording: Recording) -> list[dict[str, Any]]:
    """The block tables of every recorded frame: rows of `frame`, `line` and `words`, such as "A1: 0 1 2 7"."""
    rows = []
    for i, frame in enumerate(recording.data["frames"], 1):
        tables: dict[str, list[tuple[int, int]]] = {}
        for block, what in enumerate(frame["blocks"]):
            for key, page in zip(what["held"], what["pages"], strict=True):
                tables.setdefault(key, []).append((page, block))
        for line, (key, pages) in enumerate(sorted(tables.items())):
            rows.append({"frame": i, "line": line, "words": f"{key}: {' '.join(str(b) for _, b in sorted(pages))}"})
    return rows


def block_grid(recording: Recording) -> Explorer:
    """Plays a recording of the sweep `paged-trace`: who holds each block, what lies in it, and what a step changed.

    Args:
        recording: made by the package's own paged cache.
    """
    frames = recording.data["frames"]
    rows, n_blocks = frame_rows(recording), len(frames[0]["blocks"])
    n_rows = -(-n_blocks // COLUMNS)
    height = 90 * n_rows
    shown = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("datum.frame == frame")
        .transform_calculate(column=f"datum.block % {COLUMNS}", row=f"floor(datum.block / {COLUMNS})")
    )
    x = alt.X("column:O", axis=None, scale=alt.Scale(domain=list(range(COLUMNS)), paddingInner=0.06))
    y = alt.Y(
        "row:O", axis=None, scale=alt.Scale(domain=list(range(n_rows)), paddingInner=0.1, range=[TOP, TOP + height])
    )
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values())),
        legend=alt.Legend(
            orient="top", title=None, symbolType="square", symbolStrokeColor="gray", symbolOpacity=OPACITY, columns=3
        ),
    )
    cells = shown.mark_rect(fillOpacity=OPACITY, stroke="currentColor", strokeWidth=0.7).encode(x=x, y=y, color=colour)
    number = shown.mark_text(dy=-28, fontSize=10, opacity=0.75).encode(x=x, y=y, text="block:Q")
    tokens = shown.mark_text(fontSize=15, font="monospace").encode(x=x, y=y, text="tokens:N")
    holders = shown.mark_text(dy=20, fontSize=10, lineBreak="\n", lineHeight=11).encode(x=x, y=y, text="holders:N")
    words = []
    for i, frame in enumerate(frames, 1):
        lines = textwrap.wrap(f"{i}. {frame['what']}", WRAP)
        lines += ["copied: " + ", ".join(f"{old} to {new}" for old, new in frame["copies"])] if frame["copies"] else []
        words.append({"frame": i, "words": "\n".join(lines)})
    text = (
        alt.Chart(alt.Data(values=words))
        .transform_filter("datum.frame == frame")
        .mark_text(align="left", baseline="top", lineBreak="\n", lineHeight=17)
        .encode(x=alt.value(0), y=alt.value(0), text="words:N")
    )
    tables = (
        alt.Chart(alt.Data(values=frame_tables(recording)))
        .transform_filter("datum.frame == frame")
        .transform_calculate(place=f"{TOP + height + 10} + 17 * datum.line")
        .mark_text(align="left", baseline="top", font="monospace", fontSize=12)
        .encode(x=alt.value(0), y=alt.Y("place:Q", scale=None, axis=None), text="words:N")
    )
    grid = alt.layer(cells, number, tokens, holders)
    chart = alt.layer(grid, text, tables).resolve_scale(y="independent")
    counts = [
        f"frame {i}: {sum(bool(b['held']) for b in f['blocks'])} blocks held by"
        f" {sum(len(b['held']) for b in f['blocks'])} table entries,"
        f" {sum(b['idle'] for b in f['blocks'])} idle, {len(f['copies'])} copied"
        for i, f in enumerate(frames, 1)
    ]
    return Explorer(
        name="block-grid",
        chart=chart.add_params(slider("frame", "Step", 3, 1, len(frames), 1)).properties(
            width="container", height=TOP + height + 84
        ),
        alt_text="A grid of blocks, each with its number, the characters whose keys and values it holds and the"
        " sequences that hold it. The colour says whether the step copied it or wrote into it, whether it is shared,"
        " held by one, idle or unused. Below stand the block tables; a slider goes through the steps.",
        caption="The blocks of a small pool, as the package's own paged cache left them while GPTlite served three"
        " samples of one prompt and two more requests.",
        facts=tuple(counts),
    )


def waste_by_block(mean: int = 256, longest: int = 2048) -> Explorer:
    """The part of its slots that a sequence wastes, by mean length and size of a block, beside reservation.

    Args:
        mean: length in tokens that the slider begins at. longest: the length that is reserved, at first.
    """
    lengths = sorted({round(2 ** (e / 4)) for e in range(12, 49)})
    rows = [
        {"length": n, "size": size, "share": 100 * waste_share(n, size)} for size in SIZES if size > 1 for n in lengths
    ]
    controls = [
        menu("size", "Block, tokens", [str(size) for size in SIZES], "16"),
        slider("mean", "Mean length, tokens", mean, 8, LONGEST, 8),
        alt.param(
            name="longest",
            value=longest,
            bind=alt.binding_select(
                options=[512, 1024, 2048, 4096], labels=["512", "1,024", "2,048", "4,096"], name="Longest, tokens "
            ),
        ),
        slider("slots", "Memory, thousand tokens", 64, 8, 512, 8),
        alt.param(name="block", expr=f"{list(SIZES)}[size]"),
    ]
    x = alt.X(
        "length:Q",
        scale=alt.Scale(type="log", domain=[8, LONGEST], nice=False),
        axis=alt.Axis(values=[8, 32, 128, 512, 2048], format=",", grid=False),
        title="Mean length of a sequence, tokens",
    )
    y = alt.Y(
        "share:Q", scale=alt.Scale(domain=[0, 100], nice=False, range=[320, 64]), title="Slots without a token, %"
    )
    kinds = ["blocks, by arithmetic", "reservation by the longest"]
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[BLUE, VERMILION]),
        legend=alt.Legend(orient="top", title=None, symbolType="stroke", symbolOpacity=1, columns=1),
    )
    blocks = alt.Chart(alt.Data(values=rows)).transform_calculate(kind=f"'{kinds[0]}'")
    others = blocks.mark_line(strokeWidth=1, opacity=0.6).encode(x=x, y=y, color=colour, detail="size:N")
    chosen = blocks.transform_filter("datum.size == block").mark_line(strokeWidth=3).encode(x=x, y=y, color=colour)
    reserved = (
        alt.Chart(alt.Data(values=[{"length": n} for n in lengths]))
        .transform_filter("datum.length <= longest")
        .transform_calculate(share="100 * (1 - datum.length / longest)", kind=f"'{kinds[1]}'")
        .mark_line(strokeWidth=2, strokeDash=[6, 4])
        .encode(x=x, y=y, color=colour)
    )
    limit = alt.Chart(alt.Data(values=[{"share": 5}])).mark_rule(strokeDash=[2, 3], color=GREEN).encode(y=y)
    here = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(
            length="mean",
            waste="(block - 1) / 2",
        )
        .transform_calculate(
            share="100 * datum.waste / (mean + datum.waste)", spare="max(0, 100 * (1 - mean / longest))"
        )
    )
    point = here.mark_point(filled=True, size=120, color=VERMILION, opacity=1).encode(x=x, y=y)
    texts = [
        here.transform_calculate(words=words)
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(-40), y=alt.value(18 * i), text="words:N")
        for i, words in enumerate(
            (
                "'blocks of ' + block + ': ' + format(datum.share, '.1f') + ' %, '"
                " + format(floor(slots * 1000 / (mean + datum.waste)), ',d') + ' sequences fit'",
                "mean > longest ? 'the longest is shorter than the mean' : 'reservation: ' + format(datum.spare, '.1f')"
                " + ' %, ' + format(floor(slots * 1000 / longest), ',d') + ' sequences fit'",
                "'under 5 % from a mean of ' + format(ceil(19 * datum.waste), ',d') + ' tokens on'",
            )
        )
    ]
    return Explorer(
        name="waste-by-block",
        chart=alt.layer(others, chosen, reserved, limit, point, *texts)
        .add_params(*controls)
        .properties(width="container", height=320),
        alt_text="Line chart: the part of a cache's slots that hold no token, against the mean length of a sequence."
        " Thin lines for blocks of 8 to 256 tokens fall with the length, the chosen size is drawn thick; a dashed line"
        " for reservation of the longest length falls only near that length. A dotted line stands at 5 percent.",
        caption="Waste by the mean length of a sequence and the size of a block: half a block on average, beside"
        " reserving the longest length for each.",
        facts=tuple(
            f"blocks of {size}: {100 * waste_share(mean, size):.1f} % at a mean of {mean} tokens, under 5 % from"
            f" {length_for(0.05, size):,} tokens"
            for size in SIZES
        ),
    )
