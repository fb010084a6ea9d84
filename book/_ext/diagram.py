"""`{diagram} NAME`: an SVG of book/_static/art as a numbered figure, inlined so that it follows the page's colours."""

from pathlib import Path
from xml.etree import ElementTree

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ART = Path(__file__).resolve().parent.parent / "_static" / "art"
SVG = "{http://www.w3.org/2000/svg}"


class Diagram(SphinxDirective):
    """An image element would draw `currentColor` in black in dark mode too; an inline SVG takes the text's colour."""

    required_arguments = 1
    has_content = True
    option_spec = {"name": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        path = ART / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        try:
            svg = path.read_text(encoding="utf-8")
            root = ElementTree.fromstring(svg)
        except (OSError, ElementTree.ParseError) as error:
            raise self.error(f"diagram {self.arguments[0]!r}: {error}") from None
        title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        if title is None or description is None:
            raise self.error(f"diagram {self.arguments[0]!r} needs a <title> and a <desc>: they are its alt text")

        figure = nodes.figure("", classes=["diagram"])
        self.set_source_info(figure)
        figure += nodes.raw("", svg, format="html")
        alt = f"{title.text}. {description.text}"
        figure += nodes.raw("", alt, format="text")  # what a builder without SVG gets
        text, messages = self.parse_inline(" ".join(self.content), lineno=self.content_offset)
        figure += nodes.caption("", "", *text)
        self.add_name(figure)
        return [figure, *messages]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("diagram", Diagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
