"""Matplotlib in the book's look: Okabe-Ito colours, dashes and markers, and text in the colour of the page."""

import html
import io
import re
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#6e7782"  # readable on white and on black where a figure is shown as a picture; in our SVG it becomes the page's
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    # lines differ by colour, dash and marker, so that none of the three has to be seen
    "axes.prop_cycle": cycler(color=OKABE_ITO)
    + cycler(linestyle=["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))])
    + cycler(marker=["o", "s", "^", "D", "v", "P"]),
    "figure.facecolor": "none",
    "figure.figsize": (7, 3.6),
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.color": INK,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.markersize": 5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gptlite",  # ids are the same in every run
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def new_figure() -> Figure:
    """Returns: an empty figure in the book's look that belongs to no window, so that any thread may draw it."""
    with matplotlib.rc_context(STYLE):
        return Figure()


def to_svg(figure: Figure, title: str, description: str, prefix: str) -> str:
    """A figure as SVG for the middle of a page.

    Args:
        title, description: what a reader who does not see it hears.
        prefix: begins each id, so that two figures on a page do not share one.
    """
    with matplotlib.rc_context(STYLE), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(
        r"\s*<metadata>.*?</metadata>|\s*<style.*?</style>", "", svg, flags=re.S
    )  # its rules would be the page's
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    words = (
        f'<title id="{prefix}-title">{html.escape(title)}</title>'
        f'<desc id="{prefix}-desc">{html.escape(description)}</desc>'
    )
    view = re.search(r'viewBox="[^"]*"', svg)
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view and view[0]}'
        f' role="img" aria-labelledby="{prefix}-title {prefix}-desc" stroke-linejoin="round" stroke-linecap="butt"'
        ' style="width: 100%; max-width: 44rem; height: auto">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: start + words, svg, count=1).strip()
