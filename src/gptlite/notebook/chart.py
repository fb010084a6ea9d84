"""The mount of an explorer: one chart as Vega-Lite, as HTML that draws itself anywhere, and as text."""

import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import vl_convert

MIME = f"application/vnd.vegalite.v{alt.VEGALITE_VERSION.split('.')[0]}+json"
CDN = "https://cdn.jsdelivr.net/npm"
STILL_WIDTH = 640  # px, of the picture for print and for readers without scripts

# Okabe and Ito's colours: told apart with any kind of colour vision, readable on white and on black.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"

# `currentColor` makes the text of the chart follow the page, light or dark, with nothing drawn again.
_INK = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12, "titleFontSize": 12}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": "transparent"},
    "axis": {
        **_INK,
        "titleFontWeight": "normal",
        "domainColor": "currentColor",
        "tickColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.15,
    },
    "legend": {**_INK, "titleFontWeight": "normal"},
    "title": {"color": "currentColor", "fontSize": 13, "fontWeight": "normal", "anchor": "start"},
    "text": {"fill": "currentColor", "fontSize": 12},
    "rule": {"stroke": "currentColor"},
}

# `:where` weighs nothing, so that the book's own style sheet wins over this one.
STYLE = (
    ":where(.gptlite-explorer){margin:1em 0}:where(.gptlite-chart){width:100%;min-width:300px}"
    ":where(.gptlite-controls label){display:flex;gap:.6em;align-items:center;min-height:2em}"
    ":where(.gptlite-controls .vega-bind-name){flex:0 0 9em}"
    ":where(.gptlite-controls label>:nth-child(2)){flex:0 1 16em;min-width:0}"
    ":where(.gptlite-still svg){width:100%;height:auto}:where(.is-live .gptlite-still){display:none}"
)

# Outside the book nothing has mounted the figure, so it fetches the libraries that Altair's own renderer fetches.
_DRAW_OUTSIDE = """(() => {
  if (document.querySelector('script[src*="mount.js"]')) return;
  const figure = document.getElementById("%(id)s");
  const chart = figure.querySelector(".gptlite-chart");
  const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  const urls = %(urls)s;
  const load = (url) => new Promise((done, fail) => {
    const script = document.createElement("script");
    Object.assign(script, {src: url, async: false, onload: done, onerror: fail});
    document.head.append(script);
  });
  const amd = typeof define === "function" && define.amd;
  const ready = window.vegaEmbed ? Promise.resolve(window.vegaEmbed)
    : amd ? new Promise((done, fail) => {
        const paths = Object.fromEntries(Object.entries(urls).map(([name, url]) => [name, url + "?noext"]));
        requirejs.config({paths});
        require(["vega-embed"], done, fail);
      })
    : (window.gptliteVega ??= Promise.all(Object.values(urls).map(load))).then(() => window.vegaEmbed);
  const options = {actions: false, renderer: "svg", bind: figure.querySelector(".gptlite-controls")};
  ready.then((embed) => embed(chart, spec, options))
    .then((result) => { figure.view = result.view; figure.classList.add("is-live"); })
    .catch(() => chart.append("The chart's libraries could not be loaded, so this is a still picture of it."));
})();"""


@dataclass(frozen=True)
class Explorer:
    """A chart whose sliders and menus are bound inside it; as the last value of a cell it shows itself.

    In the book, `mount.js` draws it with the book's own Vega. Elsewhere (JupyterLab, VS Code, Colab, nbviewer) the same
    HTML draws itself with the libraries of Altair's renderer. Without scripts, and in print, it is a picture.

    Args:
        name: short and unique in the book, as in `next-character`.
        chart: Altair chart, its sliders and menus named parameters, its width "container".
        alt_text: what the chart shows, for a reader who does not see it.
        caption: one sentence below the chart, plain text.
        facts: lines that the plain-text form adds to the list of controls: numbers that a test can compare.
    Raises: ValueError when a control has no label.
    """

    name: str
    chart: alt.TopLevelMixin
    alt_text: str
    caption: str
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for control in self.controls:
            if not control["bind"].get("name"):
                raise ValueError(f"control {control['name']!r} of explorer {self.name!r} has no label")

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The chart as Vega-Lite."""
        spec = self.chart.to_dict(format="vega-lite")
        spec["config"] = CONFIG
        spec["description"] = self.alt_text
        spec["usermeta"] = {"embedOptions": {"actions": False, "renderer": "svg"}}
        return spec

    @property
    def controls(self) -> list[dict[str, Any]]:
        """The bound parameters, in their order: `name`, `value`, and `bind` with the input's kind, range or options."""
        return [param for param in self.spec.get("params", []) if "bind" in param]

    @property
    def element_id(self) -> str:
        """Id of the figure, the same for the same chart in every run."""
        digest = hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()
        return f"explorer-{self.name}-{digest[:8]}"

    def still(self) -> str:
        """The chart at its starting values, as SVG with a title and a description."""
        spec = {**self.spec, "width": STILL_WIDTH}
        svg = vl_convert.vegalite_to_svg(spec, vl_version=".".join(alt.VEGALITE_VERSION.split(".")[:2]))
        prefix = self.element_id
        svg = re.sub(r'(id="|url\(#)', rf"\g<1>{prefix}-", svg)  # ids are the page's, and two charts share theirs
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
        named = f'role="img" aria-labelledby="{prefix}-title {prefix}-desc"'
        words = (
            f'<title id="{prefix}-title">{html.escape(self.caption)}</title>'
            f'<desc id="{prefix}-desc">{html.escape(self.alt_text)}</desc>'
        )
        return re.sub(r"<svg([^>]*)>", lambda found: f"<svg{found[1]} {named}>{words}", svg, count=1)

    def _repr_html_(self) -> str:
        data = json.dumps(self.spec, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        versions = {"vega": alt.VEGA_VERSION, "vega-lite": alt.VEGALITE_VERSION, "vega-embed": alt.VEGAEMBED_VERSION}
        urls = {name: f"{CDN}/{name}@{version.removeprefix('v')}" for name, version in versions.items()}
        draw = _DRAW_OUTSIDE % {"id": self.element_id, "urls": json.dumps(urls)}
        return (
            f'<figure class="gptlite-explorer" id="{self.element_id}" role="group"'
            f' aria-label="{html.escape(self.alt_text)}">'
            f"<style>{STYLE}</style>"
            '<div class="gptlite-controls"></div><div class="gptlite-chart"></div>'
            f'<div class="gptlite-still">{self.still()}</div>'
            f"<figcaption>{html.escape(self.caption)}</figcaption>"
            f'<script type="application/json">{data}</script>'
            f"<script>{draw}</script></figure>"
        )

    def __repr__(self) -> str:
        lines = [f"Explorer {self.name}: {self.caption}"]
        for control in self.controls:
            bind, start = control["bind"], control["value"]
            label = bind["name"].strip()
            if bind["input"] == "range":
                lines.append(
                    f"  {label}: {bind['min']:g} to {bind['max']:g} in steps of {bind['step']:g}, now {start:g}"
                )
            else:
                choices = ", ".join(bind.get("labels") or map(str, bind["options"]))
                now = dict(zip(bind["options"], bind.get("labels") or bind["options"], strict=True))[start]
                lines.append(f"  {label}: one of {choices}; now {now}")
        return "\n".join([*lines, *(f"  {fact}" for fact in self.facts)])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {MIME: self.spec, "text/html": self._repr_html_(), "text/plain": repr(self)}


def menu(name: str, label: str, options: Sequence[str], start: str) -> alt.Parameter:
    """A menu whose value is the place of the choice among the options. Raises: ValueError when `start` is not one."""
    if start not in options:
        raise ValueError(f"{label} is {start!r}, it must be one of {', '.join(options)}")
    bind = alt.binding_select(options=list(range(len(options))), labels=list(options), name=f"{label} ")
    return alt.param(name=name, value=list(options).index(start), bind=bind)


def slider(name: str, label: str, start: float, low: float, high: float, step: float) -> alt.Parameter:
    """A slider from `low` to `high`."""
    return alt.param(name=name, value=start, bind=alt.binding_range(min=low, max=high, step=step, name=f"{label} "))
