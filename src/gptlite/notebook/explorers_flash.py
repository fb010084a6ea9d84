"""The explorers of the chapter on FlashAttention that draw arithmetic: what attention moves, by context and by SRAM."""

from typing import Any

import altair as alt

from gptlite.hardware import gpu, gpus
from gptlite.notebook.chart import BLUE, GREEN, VERMILION, Explorer, menu, slider
from gptlite.variants.traffic import flash_tiles, flash_traffic, standard_traffic

# KiB of shared memory of one streaming multiprocessor
SRAM_KIB = {"RTX 3090": 100, "A100": 164, "H100": 228}
WIDTH = 2  # bytes of a number in fp16 and bf16
HEADS = (32, 64, 128, 256)
KINDS = ["standard", "tiled", "once"]
COLOURS = [VERMILION, BLUE, GREEN]
DASHES = [[6, 4], [1, 0], [2, 3]]

# `gptlite.variants.traffic` in the chart's language, of the parameters context, d, M (numbers) and heads
_TILE_K = "max(1, min(d, floor({M} / (8 * d))))"
_TILE_Q = "floor(({M} - 2 * d * {tile_k}) / (2 * d + {tile_k} + 2))"
_FLASH = "({n} * d + 2 * {n} * d * ceil({n} / {tile_q}) + {n} * (d + 1))"


def _bytes(kind: str, n: str, M: str) -> str:
    """Expression of the bytes that all heads move."""
    tile_k = _TILE_K.format(M=M)
    flash = _FLASH.format(n=n, tile_q=_TILE_Q.format(M=M, tile_k=tile_k))
    numbers = {
        "standard": f"({flash} + 4 * {n} * {n} - {n})",
        "tiled": flash,
        "once": f"(4 * {n} * d + {n})",
    }[kind]
    return f"{WIDTH} * heads * {numbers}"


def hbm_bytes(card: str = "H100 SXM", longest: int = 65_536) -> Explorer:
    """Bytes that attention moves by context, standard and tiled, and the least time that a GPU needs for them.

    Args:
        card: the GPU at first, by the book's name. longest: upper end of the context's slider, in tokens.
    """
    cards = list(gpus().values())
    heads, n, d, kib = 32, 8192, 128, SRAM_KIB["H100"]
    controls = [
        slider("context", "Context, tokens", n, 1024, longest, 1024),
        _head_size(d),
        slider("heads", "Heads", heads, 1, 128, 1),
        slider("sram", "SRAM, KiB", kib, 16, 256, 4),
        menu("card", "GPU", list(gpus()), card),
        alt.param(name="peak", expr=f"{[c.peak_flops for c in cards]}[card]"),
        alt.param(name="bandwidth", expr=f"{[c.bandwidth for c in cards]}[card]"),
        alt.param(name="M", expr=f"sram * 1024 / {WIDTH}"),
    ]
    grid = [2**e for e in range(9, 18)]
    points = alt.Chart(alt.Data(values=[{"n": value} for value in grid]))
    x = alt.X(
        "n:Q",
        scale=alt.Scale(type="log", domain=[grid[0], grid[-1]], nice=False),
        axis=alt.Axis(values=grid[::2], format=",d"),
        title="Context, tokens",
    )
    y = alt.Y(
        "gb:Q",
        scale=alt.Scale(type="log", domain=[1e-3, 1e4], nice=False, clamp=True),
        axis=alt.Axis(values=[1e-3, 1e-2, 0.1, 1, 10, 100, 1000, 1e4], format="~g"),
        title="Moved, GB",
    )
    lines = [
        points.transform_calculate(gb=f"{_bytes(kind, 'datum.n', 'M')} / 1e9", kind=f"'{kind}'")
        .mark_line(strokeWidth=3)
        .encode(x=x, y=y, color=_colour(), strokeDash=_dash())
        for kind in KINDS
    ]
    here = alt.Chart(alt.Data(values=[{}])).transform_calculate(
        n="context",
        flops="4 * heads * d * context * context",
        matrix=f"{WIDTH} * heads * context * context / 1e9",
        standard=_bytes("standard", "context", "M"),
        tiled=_bytes("tiled", "context", "M"),
    )
    rule = here.mark_rule(strokeDash=[2, 3], strokeWidth=2).encode(x=x)
    texts = []
    for i, kind in enumerate(("standard", "tiled")):
        words = (
            f"'{kind}: ' + format(datum.{kind} / 1e9, ',.3~g') + ' GB, ≥ '"
            f" + format(1e3 * max(datum.flops / peak, datum.{kind} / bandwidth), ',.3~g') + ' ms, '"
            f" + (datum.flops / peak > datum.{kind} / bandwidth ? 'compute' : 'memory')"
        )
        texts.append(_line(here, words, i))
    texts.append(_line(here, "'n × n matrices: ' + format(datum.matrix, ',.3~g') + ' GB'", 2))
    return Explorer(
        name="hbm-bytes",
        chart=alt.layer(*lines, rule, *texts).add_params(*controls).properties(width="container", height=330),
        alt_text="Line chart on two logarithmic axes: bytes that attention moves against the context. The dashed line"
        " of standard attention lies highest and rises with the square of the context; the solid line of tiled one"
        " lies below, and the dotted line of reading the inputs and writing the output once is lowest. Sliders set"
        " context, heads and SRAM, menus the head size and the GPU; words give both amounts of bytes, the least time"
        " of each on the GPU, and the size of the matrix of scores.",
        caption="What one layer's attention moves between memory and chip in 16 bits, without a causal mask, by"
        " arithmetic.",
        facts=tuple(
            f"{n:,} tokens, {heads} heads of {size}, {kib} KiB: standard"
            f" {_gigabytes(standard_traffic(n, size, kib * 1024 // WIDTH).total, heads):.4g} GB, tiled"
            f" {_gigabytes(flash_traffic(n, size, kib * 1024 // WIDTH).total, heads):.4g} GB"
            for n in (1024, 8192, longest)
            for size in (64, 128)
        ),
    )


def sram_bytes(n_tokens: int = 8192) -> Explorer:
    """Bytes that attention moves by the size of the SRAM, with that of real GPUs marked.

    Args:
        n_tokens: the context at first.
    """
    controls = [slider("context", "Context, tokens", n_tokens, 1024, 65_536, 1024), _head_size(128)]
    controls.append(alt.param(name="heads", value=1))
    low, high = 8, 512
    grid = [low * 2 ** (e / 4) for e in range(25)]
    points = alt.Chart(alt.Data(values=[{"kib": value} for value in grid]))
    x = alt.X(
        "kib:Q",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(values=[2**e for e in range(3, 10)], format="d"),
        title="SRAM, KiB",
    )
    y = alt.Y(
        "mb:Q",
        scale=alt.Scale(type="log", domain=[0.05, 1e5], nice=False, clamp=True),
        axis=alt.Axis(values=[1, 10, 100, 1000, 1e4, 1e5], format=",d"),
        title="Moved by one head, MB",
    )
    sram = f"floor(datum.kib * 1024 / {WIDTH})"
    lines = [
        points.transform_calculate(mb=f"{_bytes(kind, 'context', sram)} / 1e6", kind=f"'{kind}'")
        .mark_line(strokeWidth=3)
        .encode(x=x, y=y, color=_colour(), strokeDash=_dash())
        for kind in KINDS
    ]
    cards = alt.Chart(
        alt.Data(values=[{"name": name, "kib": kib, "row": i} for i, (name, kib) in enumerate(SRAM_KIB.items())])
    ).transform_calculate(
        mb=f"{_bytes('tiled', 'context', sram)} / 1e6",
        words="datum.name + ': ' + format(datum.mb, ',.3~r') + ' MB'",
    )
    marks = [
        cards.mark_rule(strokeDash=[2, 3], strokeWidth=1.5).encode(x=x),
        cards.mark_point(color=BLUE, filled=True, size=90, opacity=1).encode(x=x, y=y),
    ]
    for i, align in enumerate(("right", "center", "left")):  # three names side by side, on a phone too
        card = cards.transform_filter(f"datum.row == {i}")
        name = card.mark_text(align=align, baseline="bottom", y=-3)  # type: ignore[arg-type]
        amount = card.mark_text(align="left", baseline="top", dx=6, y=alt.ExprRef(f"height - {60 - 18 * i}"))
        marks += [name.encode(x=x, text="name:N"), amount.encode(x=alt.value(0), text="words:N")]
    facts = []
    for name, kib in SRAM_KIB.items():
        for size in (64, 128):
            tile_q, tile_k = flash_tiles(size, kib * 1024 // WIDTH)
            moved = _gigabytes(flash_traffic(n_tokens, size, kib * 1024 // WIDTH).total, 1000)
            facts.append(
                f"{name}, {kib} KiB, heads of {size}: tiles of {tile_q} queries and {tile_k} keys, {moved:.4g} MB at"
                f" {n_tokens:,} tokens"
            )
    return Explorer(
        name="sram-bytes",
        chart=alt.layer(*lines, *marks).add_params(*controls).properties(width="container", height=300),
        alt_text="Line chart on two logarithmic axes: bytes that one head moves against the size of the on-chip memory."
        " The dashed line of standard attention is nearly level where the matrix outweighs all else, the solid line of"
        " tiled attention falls as the memory grows, down to the dotted line of the inputs and the output once."
        " Vertical lines mark the RTX 3090, the A100 and the H100. A slider sets the context, a menu the head size.",
        caption="What one head moves in 16 bits by the size of the SRAM; the marks are the shared memory of one"
        " multiprocessor.",
        facts=tuple(facts),
    )


def least_times(n_tokens: int, d_head: int, n_heads: int, sram_kib: float, card: str) -> dict[str, float]:
    """The bound of one layer's attention in seconds, as `hbm_bytes` draws it: {"standard": ..., "tiled": ...}."""
    sram, one = int(sram_kib * 1024 / WIDTH), gpu(card)
    flops = 4 * n_heads * d_head * n_tokens**2
    moved = {"standard": standard_traffic(n_tokens, d_head, sram), "tiled": flash_traffic(n_tokens, d_head, sram)}
    return {
        kind: max(flops / one.peak_flops, WIDTH * n_heads * traffic.total / one.bandwidth)
        for kind, traffic in moved.items()
    }


def _gigabytes(numbers: float, n_heads: float) -> float:
    return WIDTH * n_heads * numbers / 1e9


def _head_size(start: int) -> alt.Parameter:
    bind = alt.binding_select(options=list(HEADS), labels=[str(size) for size in HEADS], name="Head size ")
    return alt.param(name="d", value=start, bind=bind)


def _colour() -> alt.Color:
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    return alt.Color("kind:N", scale=alt.Scale(domain=KINDS, range=COLOURS), legend=legend)


def _dash() -> alt.StrokeDash:
    legend = alt.Legend(orient="top", title=None, symbolType="stroke", symbolStrokeWidth=3)
    return alt.StrokeDash("kind:N", scale=alt.Scale(domain=KINDS, range=DASHES), legend=legend)


def _line(base: Any, words: str, i: int) -> Any:
    """A line of words at the top left."""
    return (
        base.transform_calculate(words=words)
        .mark_text(align="left", baseline="top", dx=6, y=6 + 18 * i)
        .encode(x=alt.value(0), text="words:N")
    )
