"""`{explorer-file} NAME`: an explorer from book/explorers/NAME.html as a numbered figure, outside notebooks.

`tools/explorers.py` writes these files with the package, so that building the book needs no package.
"""

import html
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class ExplorerFile(SphinxDirective):
    """The directive's content is the caption; `:alt:` says what a reader who does not see the chart should know."""

    required_arguments = 1
    has_content = True
    option_spec = {"name": directives.unchanged_required, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Returns: the figure."""
        path = Path(self.env.srcdir) / "book" / "explorers" / f"{self.arguments[0]}.html"
        self.env.note_dependency(str(path))
        if not path.exists():
            raise self.error(f"there is no explorer {path.name} in book/explorers; `make explorers` writes them")
        text = re.sub(r"<figcaption>.*?</figcaption>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        if alt := self.options.get("alt"):
            text = re.sub(r'aria-label="[^"]*"', lambda _: f'aria-label="{html.escape(alt)}"', text, count=1)
        figure = nodes.figure("", nodes.raw("", text, format="html"), classes=["explorer"])
        self.set_source_info(figure)
        caption, messages = self.parse_inline(" ".join(self.content), lineno=self.content_offset)
        figure += nodes.caption("", "", *caption)
        self.add_name(figure)
        return [figure, *messages]


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_directive("explorer-file", ExplorerFile)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
