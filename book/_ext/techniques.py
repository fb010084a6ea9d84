"""Passports and the map, two directives that read `book/techniques.yml`.

`{passport}` with `:name: KEY` is the margin box of one technique, `{technique-map}` the table of all of them.
"""

from pathlib import Path

import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

STACKS = ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp")
REDUCES = ("bytes of weights", "bytes of KV", "bytes of scores", "FLOPs", "steps", "overhead", "nothing")
PHASES = ("prefill", "decode", "both")
FIELDS = {
    "key": str, "name": str, "chapter": str, "symbol": str, "test": str, "exact": str, "training": str, "reduces": list,
    "phase": str, "best_for": str, "loses_when": str, "stacks": dict, "papers": list,
}  # fmt: skip


def load(path: Path) -> dict[str, dict]:
    """The list of techniques.

    Returns: the entries by key, in their order.
    Raises: ValueError that names the entry and the field which is missing, unknown or not allowed.
    """
    techniques: dict[str, dict] = {}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        key = entry.get("key")
        if set(entry) != set(FIELDS):
            raise ValueError(f"technique {key!r}: missing or unknown fields {sorted(set(entry) ^ set(FIELDS))}")
        for field, kind in FIELDS.items():
            if not isinstance(entry[field], kind) or not entry[field]:
                raise ValueError(f"technique {key!r}: {field} is {entry[field]!r}, it must be a {kind.__name__}")
        if entry["phase"] not in PHASES:
            raise ValueError(f"technique {key!r}: phase is {entry['phase']!r}, it must be one of {', '.join(PHASES)}")
        if unknown := [each for each in entry["reduces"] if each not in REDUCES]:
            raise ValueError(f"technique {key!r}: reduces {unknown[0]!r}, it must be one of {', '.join(REDUCES)}")
        if tuple(entry["stacks"]) != STACKS:
            raise ValueError(f"technique {key!r}: stacks are {list(entry['stacks'])}, they must be {list(STACKS)}")
        if key in techniques:
            raise ValueError(f"technique {key!r} stands there twice")
        techniques[key] = entry
    return techniques


class FromTheList(SphinxDirective):
    """A directive whose content is Markdown made from the list of techniques."""

    def techniques(self) -> dict[str, dict]:
        """Returns: the list, on which this page now depends."""
        path = Path(self.env.srcdir) / "book" / "techniques.yml"
        self.env.note_dependency(str(path))
        return load(path)

    def parse(self, text: str) -> list[nodes.Node]:
        """Returns: the nodes of the Markdown."""
        parent = nodes.Element()
        lines = text.split("\n")
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, parent)
        return parent.children

    def code(self, entry: dict) -> str:
        """Returns: a link to the entry's symbol among the pages of the package."""
        return f"{{py:obj}}`{entry['symbol'].split('.')[-1]} <{entry['symbol']}>`"

    def test_url(self, entry: dict) -> str:
        """Returns: the address of the entry's test in the repository."""
        theme = self.config.html_theme_options
        return f"{theme['repository_url']}/blob/{theme['repository_branch']}/{entry['test'].split('::')[0]}"


class Passport(FromTheList):
    """The margin box of one technique, with the same fields in every chapter."""

    option_spec = {"name": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Returns: the box."""
        techniques, key = self.techniques(), self.options.get("name")
        if key not in techniques:
            raise self.error(f"no technique {key!r} in book/techniques.yml, there are {', '.join(techniques)}")
        entry = techniques[key]
        rows = {
            "Exact": entry["exact"],
            "Training": entry["training"],
            "Reduces": ", ".join(entry["reduces"]),
            "Phase": {"both": "prefill and decode"}.get(entry["phase"], entry["phase"]),
            "Best for": entry["best_for"],
            "Loses when": entry["loses_when"],
            **entry["stacks"],
            "First paper": "{cite:t}`" + entry["papers"][0] + "`",
            "Code": f"{self.code(entry)}, [test]({self.test_url(entry)})",
        }
        fields = "\n".join(f":{name}: {value}" for name, value in rows.items())
        box = self.parse(f"::::{{margin}} {entry['name']}\n\n{fields}\n::::")
        box[0]["classes"].append("passport")
        return box


class TechniqueMap(FromTheList):
    """The table of all techniques; `map.js` makes it sortable and filterable, and without it it is a plain table."""

    def run(self) -> list[nodes.Node]:
        """Returns: the table."""
        rows = [("Technique", "Reduces", "Phase", "Exact", "Training", "Best for", "Loses when", "Code and test")]
        for entry in self.techniques().values():
            rows.append(
                (
                    f"{{ref}}`{entry['name']} <{entry['chapter']}>`",
                    ", ".join(entry["reduces"]),
                    {"both": "prefill, decode"}.get(entry["phase"], entry["phase"]),
                    entry["exact"],
                    entry["training"],
                    entry["best_for"],
                    entry["loses_when"],
                    f"{self.code(entry)}, [test]({self.test_url(entry)})",
                )
            )
        lines = ["::::{list-table}", ":header-rows: 1", ":class: technique-map", ""]
        for row in rows:
            lines += [f"{'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(row)]
        return [nodes.container("", *self.parse("\n".join([*lines, "::::"])), classes=["technique-frame"])]


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_directive("passport", Passport)
    app.add_directive("technique-map", TechniqueMap)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
