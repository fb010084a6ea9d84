"""A table that a page, a notebook and a test can each read."""

import html
from collections.abc import Sequence
from typing import Any


class Table:
    """Rows under headers; as the last value of a cell it shows itself.

    Args:
        rows: one dictionary per row, all with the same keys: the headers, each with its unit.
        caption: one sentence, plain text.
    Raises: ValueError when there is no row, or a row has other headers than the first.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], caption: str | None = None) -> None:
        if not rows:
            raise ValueError("a table needs at least one row")
        self.headers, self.caption = list(rows[0]), caption
        for i, row in enumerate(rows):
            if list(row) != self.headers:
                raise ValueError(f"row {i} has headers {list(row)}, the first has {self.headers}")
        self.cells = [[_text(value) for value in row.values()] for row in rows]
        self.numeric = [all(_is_number(row[header]) for row in rows) for header in self.headers]

    def _repr_html_(self) -> str:
        align = ["right" if numeric else "left" for numeric in self.numeric]
        head = "".join(
            f'<th scope="col" style="text-align: {side}">{html.escape(header)}</th>'
            for side, header in zip(align, self.headers, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align: {side}">{html.escape(cell)}</td>'
                for side, cell in zip(align, row, strict=True)
            )
            + "</tr>"
            for row in self.cells
        )
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return (
            f'<table class="gptlite-table table">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        )

    def _repr_markdown_(self) -> str:
        rule = ["---:" if numeric else ":---" for numeric in self.numeric]
        lines = [self.headers, rule, *self.cells]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{text}\n\n{self.caption}" if self.caption else text

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.headers, *self.cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if numeric else cell.ljust(width)
                for cell, width, numeric in zip(line, widths, self.numeric, strict=True)
            ).rstrip()
            for line in [self.headers, *self.cells]
        ]
        return "\n".join([self.caption, *lines] if self.caption else lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A value as a cell: thousands separated, four digits of a fraction; text stays as it is."""
    if not _is_number(value):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
