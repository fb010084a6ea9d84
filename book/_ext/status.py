"""`{chapter-status}`: how each chapter ran when its outputs were stored, from book/status.json.

`make execute` writes that file with the outputs, so that the page is no newer and no older than they are.
"""

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FIELDS = {"seconds": float, "peak_bytes": int, "machine": dict, "versions": dict, "date": str}
MACHINE = {"name": str, "cores": int, "memory_bytes": int, "system": str}


def load(path: Path) -> dict[str, dict]:
    """What is known of the chapters.

    Returns: the entries by the name of the notebook, without `.ipynb`.
    Raises: ValueError that names the entry and the field which is missing, unknown or of another type.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    for name, entry in entries.items():
        for fields, values in ((FIELDS, entry), (MACHINE, entry.get("machine", {}))):
            if set(values) != set(fields):
                raise ValueError(f"status of {name}: missing or unknown fields {sorted(set(values) ^ set(fields))}")
            for field, kind in fields.items():
                if not isinstance(values[field], kind):
                    raise ValueError(f"status of {name}: {field} is {values[field]!r}, it must be a {kind.__name__}")
    return entries


def rows(entries: dict[str, dict], chapters: list[str]) -> list[list[str]]:
    """Returns: the cells of the table, in Markdown, a row for each chapter in the order of the book."""
    table = []
    for chapter in chapters:
        link = f"{{doc}}`/chapters/{chapter}`"
        entry = entries.get(chapter)
        if not entry:
            table.append([link, "not recorded", "", "", "", ""])
            continue
        machine, versions = entry["machine"], entry["versions"]
        table.append(
            [
                link,
                f"{entry['seconds']:.0f} s",
                f"{entry['peak_bytes'] / 1e9:.1f} GB",
                f"{machine['name']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, "
                f"{machine['system']}",
                ", ".join(f"{name} {version}" for name, version in versions.items()),
                entry["date"],
            ]
        )
    return table


class ChapterStatus(SphinxDirective):
    """The table of the chapters."""

    option_spec = {"name": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Returns: the table."""
        path = Path(self.env.srcdir) / "book" / "status.json"
        self.env.note_dependency(str(path))
        try:
            entries = load(path)
        except (OSError, ValueError) as error:
            raise self.error(str(error)) from None
        pages = sorted(name for name in self.env.found_docs if name.startswith("chapters/"))
        head = ["Chapter", "Run time", "Peak memory", "Machine", "Versions", "Day"]
        lines = ["::::{list-table} What each chapter took when its outputs were stored. GB is 10⁹ bytes."]
        lines += [f":name: {self.options['name']}", ":header-rows: 1", ""]
        for row in [head, *rows(entries, [page.removeprefix("chapters/") for page in pages])]:
            lines += [f"{'* -' if i == 0 else '  -'} {cell}".rstrip() for i, cell in enumerate(row)]
        parent = nodes.Element()
        self.state.nested_parse(StringList([*lines, "::::"], source=self.env.docname), self.content_offset, parent)
        return parent.children


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_directive("chapter-status", ChapterStatus)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
