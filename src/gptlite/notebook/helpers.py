"""What the cells of a chapter call: set-up, source code, tables, figures, and differences."""

import html
import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from gptlite.hardware import device_name
from gptlite.notebook.style import STYLE, new_figure, to_svg
from gptlite.notebook.tables import Table

LONG = 40  # lines of code that a page shows without folding them

__all__ = ["new_figure", "setup", "show_difference", "show_figure", "show_source", "table"]


def setup(seed: int = 0) -> torch.device:
    """The set-up of a chapter: seeds, the look of figures, and a line that says where it runs.

    Args:
        seed: of Python, NumPy and torch.
    Returns: the fastest device here: CUDA, MPS or the CPU.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    matplotlib.rcParams.update(STYLE)
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    print(f"device {kind} ({device_name(kind)}), dtype {dtype}, torch {torch.__version__}")
    return torch.device(kind)


class _Shown:
    """Something to show, in the forms that a page, a notebook and a test read."""

    def __init__(self, text: str, **forms: str) -> None:
        self.text, self.forms = text, {f"text/{kind}": form for kind, form in forms.items()}

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {**self.forms, "text/plain": self.text}


def show_source(obj: Callable[..., Any] | type, lines: tuple[str, str] | None = None) -> _Shown:
    """The source of a function or a class of the package, so that a chapter never retypes it; long code is folded.

    Args:
        obj: the function or class.
        lines: show a part: from the first line that contains the first text, to the next that contains the second.
    Raises: ValueError when a text is not in the source.
    """
    source = textwrap.dedent(inspect.getsource(obj))
    name = f"{obj.__module__}.{obj.__qualname__}"
    if lines is not None:
        rows = source.splitlines()
        first = _find(lines[0], rows, 0, name)
        last = _find(lines[1], rows, first, name)
        source = textwrap.dedent("\n".join(rows[first : last + 1]))
    source = source.strip("\n")
    code = f"```python\n{source}\n```"
    n_lines = source.count("\n") + 1
    if n_lines > LONG:
        summary = f"<summary>{html.escape(name)}, {n_lines} lines</summary>"
        code = f'<details class="gptlite-source">{summary}\n\n{code}\n\n</details>'
    return _Shown(source, markdown=code)


def _find(text: str, rows: list[str], start: int, name: str) -> int:
    for i, row in enumerate(rows[start:], start):
        if text in row:
            return i
    raise ValueError(f"no line with {text!r} in the source of {name}")


def table(rows: Sequence[dict[str, Any]], caption: str | None = None) -> Table:
    """A table of rows whose keys are the headers, each with its unit; see `gptlite.notebook.tables.Table`."""
    return Table(rows, caption)


def show_figure(figure: Figure, alt: str, name: str, caption: str = "") -> _Shown:
    """A Matplotlib figure whose text takes the colour of the page, light or dark.

    Args:
        figure: by `new_figure`, or by pyplot, which should close it.
        alt: what it shows, for a reader who does not see it.
        name: unique in the chapter.
        caption: one sentence below it, plain text.
    """
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    svg = to_svg(figure, caption or alt, alt, f"figure-{name}")
    return _Shown(f"Figure {name}: {alt}", html=f'<figure class="gptlite-figure">{svg}{below}</figure>')


def show_difference(name: str, value: torch.Tensor | float, tolerance: float) -> None:
    """Prints that a difference is within its tolerance, in words that are the same on every machine.

    Args:
        name: of what is compared with what.
        value: the difference; of a tensor, the largest absolute value.
        tolerance: the largest that is allowed; 0 means exactly equal.
    Raises: AssertionError with the difference when it is larger, or not a number.
    """
    largest = float(torch.as_tensor(value).abs().max())
    if not largest <= tolerance:
        raise AssertionError(f"{name}: they differ by {largest:.3g}, {tolerance:g} is allowed")
    print(f"{name}: exactly equal" if tolerance == 0 else f"{name}: equal to within {tolerance:g}")
