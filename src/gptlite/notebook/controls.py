"""The inputs of a lab, declared as data: slider, menu, text."""

from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

_LOOK: dict[str, Any] = {"style": {"description_width": "11em"}, "layout": {"width": "min(100%, 34em)"}}


@dataclass(frozen=True)
class Slider:
    """A number to move.

    Args:
        name: of the setting in code. label: for the reader, with the unit.
        start, low, high, step: of the same type; whole numbers give a slider of whole numbers.
    """

    name: str
    label: str
    start: float
    low: float
    high: float
    step: float

    def widget(self) -> widgets.DOMWidget:
        """Returns: the input."""
        whole = isinstance(self.start, int) and isinstance(self.step, int)
        kind = widgets.IntSlider if whole else widgets.FloatSlider
        return kind(
            value=self.start, min=self.low, max=self.high, step=self.step, description=self.label,
            continuous_update=False, **_LOOK,
        )  # fmt: skip

    def values(self) -> list[float]:
        """Returns: every value that it can take, the lowest first."""
        return [self.low + i * self.step for i in range(int((self.high - self.low) / self.step + 1e-9) + 1)]


@dataclass(frozen=True)
class Menu:
    """A choice.

    Args:
        name: of the setting in code. label: for the reader.
        start: the first choice. options: all choices; numbers in rising order where the lab may name the largest.
    """

    name: str
    label: str
    start: Any
    options: tuple[Any, ...]

    def widget(self) -> widgets.DOMWidget:
        """Returns: the input."""
        return widgets.Dropdown(value=self.start, options=self.options, description=self.label, **_LOOK)

    def values(self) -> list[Any]:
        """Returns: the choices."""
        return list(self.options)


@dataclass(frozen=True)
class Text:
    """Some text, of one line or more.

    Args:
        name: of the setting in code. label: for the reader. start: the text at first.
    """

    name: str
    label: str
    start: str

    def widget(self) -> widgets.DOMWidget:
        """Returns: the input."""
        return widgets.Textarea(value=self.start, description=self.label, rows=2, **_LOOK)

    def values(self) -> list[str]:
        """Returns: the text at first, the only one that is known."""
        return [self.start]


Control = Slider | Menu | Text


def live_view(box: widgets.DOMWidget) -> dict[str, Any]:
    """The live form of a widget among the forms of an output. ipywidgets 7, which is Colab's, has no bundle to ask for.

    Args:
        box: the widget.
    Returns: the form by its MIME type.
    """
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}
