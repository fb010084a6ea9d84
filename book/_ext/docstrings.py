"""The package's docstrings, written as in its style guide, turned into reStructuredText for the API pages.

`code`, {cite}`key`, and the sections Args, Returns and Raises, each of which may begin on its own line.
"""

import re

from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes):\s*(.*)")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")
CODE = re.compile(r"(\{[a-z:]+\}`[^`]+`|``[^`]+``|`[^`]+`|\$[^$]+\$)")
SENTENCE = re.compile(r"(?<=[.;]) (Returns|Raises): ")


def inline(text: str) -> str:
    """Returns: one line of Markdown as reStructuredText, with what reStructuredText would read as markup escaped."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", part)
            continue
        if role := re.fullmatch(r"\{([a-z:]+)\}`([^`]+)`", part):
            parts[i] = f":{role[1]}:`{role[2]}`"
        elif part.startswith("$"):
            parts[i] = f":math:`{part[1:-1]}`"
        else:
            parts[i] = f"``{part.strip('`')}``"
        if re.match(r"\w", parts[i + 1]):
            parts[i] += "\\ "  # markup must end where a word does
    return "".join(parts)


def convert(lines: list[str]) -> list[str]:
    """Returns: the lines of a docstring in reStructuredText."""
    out: list[str] = []
    section = ""
    for line in "\n".join(SENTENCE.sub(r"\n\1: ", line) for line in lines).split("\n"):
        text = line.strip()
        begun = SECTION.fullmatch(text)
        if begun and not line.startswith(" "):
            section = begun[1]
            if section in ("Returns", "Yields", "Raises"):
                out += ["", f":{section.lower()}: {inline(begun[2])}".rstrip()]
            else:
                out.append("")
        elif not text or (section and not line.startswith(" ")):
            section = "" if text else section
            out += ["", inline(text)] if text else [""]
        elif section in ("Args", "Attributes") and (entry := ENTRY.fullmatch(text)) and indent(line) <= 4:
            out += [f":param {inline(name)}: {inline(entry[2])}" for name in entry[1].split(", ")]
        elif section:
            out.append("    " + inline(text))
        else:
            out.append(" " * indent(line) + inline(text))
    return out


def indent(line: str) -> int:
    """Returns: the spaces that the line begins with."""
    return len(line) - len(line.lstrip())


def resolve_alias(app: Sphinx, env, node, content):
    """Find a name of a type that is an alias (data to Sphinx) where an annotation asks for a class."""
    if node.get("refdomain") != "py" or node.get("reftype") != "class":
        return None
    domain, page = env.get_domain("py"), node.get("refdoc")
    return domain.resolve_xref(env, page, app.builder, "data", node["reftarget"], node, content)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""

    def process(app, kind, name, obj, options, lines) -> None:
        lines[:] = convert(lines)

    app.connect("autodoc-process-docstring", process)
    app.connect("missing-reference", resolve_alias)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
