"""`{figure-list}`: a table of every diagram, explorer, lab and figure of the chapters, made from the notebooks."""

import json
import re
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

KINDS = {"gptlite-explorer": "explorer", "gptlite-lab": "lab", "gptlite-figure": "figure"}
DIAGRAM = re.compile(r"^(`{3,}|:{3,})\{diagram\} \S+\n:name: (\S+)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def figures(notebook: dict) -> list[tuple[str, str, str]]:
    """The figures of a chapter, in order.

    Args:
        notebook: as JSON.
    Returns: kind, label and caption of each.
    """
    found = []
    for cell in notebook["cells"]:
        if figure := cell["metadata"].get("mystnb", {}).get("figure"):
            shown = json.dumps(cell["outputs"])
            kind = next((kind for word, kind in KINDS.items() if word in shown), "figure")
            found.append((kind, figure["name"], figure["caption"]))
        elif cell["cell_type"] == "markdown":
            for drawing in DIAGRAM.finditer("".join(cell["source"])):
                found.append(("diagram", drawing[2], drawing[3]))
    return found


def table(chapters: list[tuple[str, dict]]) -> list[str]:
    """The lines of the table, in Markdown.

    Args:
        chapters: the page of each, as in `/chapters/04_kv_cache.ipynb`, and its notebook.
    """
    lines = ["| figure | kind | what it shows |", "|---|---|---|"]
    for page, notebook in chapters:
        title = re.search(r"^# (.+)$", "".join(notebook["cells"][0]["source"]), re.MULTILINE)[1]
        lines.append(f"| **[{int(Path(page).name[:2])}]({page})** | | **{title}** |")
        for kind, label, caption in figures(notebook):
            words = " ".join(caption.split()).replace("|", "\\|")
            lines.append(f"| {{numref}}`{label}` | {kind} | {words} |")
    return lines


class FigureList(SphinxDirective):
    """The table, with a row for each chapter and one for each of its figures."""

    def run(self) -> list[nodes.Node]:
        """Returns: the table."""
        pages = sorted(page for page in self.env.found_docs if page.startswith("chapters/"))
        chapters = []
        for page in pages:
            path = Path(self.env.doc2path(page))
            self.env.note_dependency(str(path))
            chapters.append((f"/{page}.ipynb", json.loads(path.read_text(encoding="utf-8"))))
        node = nodes.container()
        self.state.nested_parse(StringList(table(chapters), source=self.env.docname), self.content_offset, node)
        return node.children


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_directive("figure-list", FigureList)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
