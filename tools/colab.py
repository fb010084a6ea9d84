"""Write the chapters' editions for Colab, in plain Markdown: `python tools/colab.py FOLDER`.

Colab knows no directives, no roles and no labels. In an edition, directives are block quotes, tables and `<details>`,
roles are links to the published page, citations are links to the papers, and pictures have whole addresses. Code and
outputs stay as they are. `python tools/colab.py --branch` prints the branch that holds the editions.
"""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from pybtex.database import Entry, parse_file
from pybtex.richtext import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import publishing  # noqa: E402
import techniques  # noqa: E402

OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})\{(?P<name>[\w:-]+)\} ?(?P<argument>.*)$")
CODE_FENCE = re.compile(r"^\s*(`{3,}|~{3,})(?!\{)[^`]*$")
OPTION = re.compile(r"^:([\w-]+): ?(.*)$")
LABEL = re.compile(r"^\(([\w-]+)\)=$")
INLINE = re.compile(
    r"\{(?P<role>[a-z:]+)\}`(?P<text>[^`]+)`"
    r"|(?P<link>!?\[[^\]\n]*\])\((?P<address>[^()\s]+)\)"
    r"|`[^`]+`|\$\$[^$]+\$\$|\$[^$]+\$"  # code and formulas, in which neither of these is one
)
WITH_TEXT = re.compile(r"(.+?)\s*<([^<>]+)>", re.DOTALL)
EQUATION_LABEL = re.compile(r"^\$\$ \(([\w-]+)\)$")
BADGES = re.compile(r"^\[Open in Colab\]\([^)]*\)", re.MULTILINE)
NOTES = {"note", "tip", "hint", "important", "warning", "caution", "attention", "danger", "seealso", "admonition"}
FIGURES = {"diagram": "Fig.", "figure": "Fig.", "explorer-file": "Fig.", "list-table": "Table", "table": "Table"}


@dataclass
class Target:
    """Where a label leads: an address within the book, the title of a page or section, and a number such as 4.2."""

    address: str
    title: str = ""
    number: str = ""


@dataclass
class Book:
    """What an edition has to know of the whole book."""

    url: str
    repository: str
    branch: str
    colab_branch: str
    targets: dict[str, Target]
    papers: dict[str, Entry]
    techniques: dict[str, dict]


def load_book(root: Path = ROOT) -> Book:
    """Returns: what the configuration, the table of contents, the chapters and the lists say."""
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    repository = config["repository"]["url"]
    chapters = [
        (part.get("numbered"), chapter["file"])
        for part in [{"chapters": [{"file": toc["root"]}]}, *toc["parts"]]
        for chapter in part["chapters"]
    ]
    numbered = [file for is_numbered, file in chapters if is_numbered]
    files = [file for _, file in chapters]
    targets: dict[str, Target] = {}
    around = Counter()  # pages without a number are counted as one
    for file in files:
        if file in numbered:
            targets |= targets_of(root, file, str(numbered.index(file) + 1), Counter())
        else:
            targets |= targets_of(root, file, "", around)
    return Book(
        url=publishing.book_url(repository),
        repository=repository,
        branch=config["repository"]["branch"],
        colab_branch=config["sphinx"]["config"]["colab_branch"],
        targets=targets,
        papers=dict(parse_file(str(root / "book" / "references.bib")).entries),
        techniques=techniques.load(root / "book" / "techniques.yml"),
    )


def cells_of(root: Path, file: str) -> list[dict]:
    """Returns: the cells of a notebook, or a Markdown page as a single one."""
    path = root / f"{file}.ipynb"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{"cell_type": "markdown", "source": (root / f"{file}.md").read_text(encoding="utf-8"), "metadata": {}}]


def targets_of(root: Path, file: str, chapter: str, counts: Counter) -> dict[str, Target]:
    """The labels of one page.

    Args:
        file: the page, without its ending. chapter: its number, empty for a page without one.
        counts: how many figures, tables and equations came before; counted on.
    Returns: a target for each label; figures, tables and equations are counted as Sphinx counts them.
    """
    found: dict[str, Target] = {}
    page = f"{file}.html"

    def numbered(kind: str) -> str:
        counts[kind] += 1
        return f"{chapter}.{counts[kind]}" if chapter else str(counts[kind])

    for cell in cells_of(root, file):
        if figure := cell["metadata"].get("mystnb", {}).get("figure"):
            found[figure["name"]] = Target(f"{page}#{anchor(figure['name'])}", number=f"Fig. {numbered('Fig.')}")
        if cell["cell_type"] != "markdown":
            continue
        lines, label, fence = "".join(cell["source"]).split("\n"), "", ""
        for i, line in enumerate(lines):
            if fence:
                fence = "" if line.strip() == fence else fence
            elif opened := CODE_FENCE.match(line):
                fence = opened[1]
            elif opened := OPENING.match(line):
                fence = opened["fence"] if opened["fence"][0] == "`" else ""
                options = [OPTION.match(option.strip()) for option in lines[i + 1 :]]
                name = next((option[2] for option in options[: until_none(options)] if option[1] == "name"), "")
                if (kind := FIGURES.get(opened["name"])) and (name or opened["name"] != "list-table"):
                    found[name] = Target(f"{page}#{anchor(name)}", number=f"{kind} {numbered(kind)}")
            elif equation := EQUATION_LABEL.match(line):
                number = numbered("equation")
                found[equation[1]] = Target(f"{page}#equation-{anchor(equation[1])}", number=f"({number})")
            elif labelled := LABEL.match(line):
                label = labelled[1]
            elif label and line.strip():
                found[label] = Target(f"{page}#{anchor(label)}", title=plain(line.lstrip("# ").strip()))
                label = ""
    found.pop("", None)
    return found


def until_none(found: list) -> int:
    """Returns: how many of the first ones are something."""
    return next((i for i, each in enumerate(found) if not each), len(found))


def anchor(label: str) -> str:
    """Returns: the identifier that docutils makes of a label."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def plain(text: str) -> str:
    """Returns: a heading without its markup."""
    return re.sub(r"[`*]", "", text)


class Edition:
    """Turns the Markdown of one chapter into what Colab shows.

    Args:
        book: what is known of the whole book. file: the page, as in `chapters/04_kv_cache`.
    """

    def __init__(self, book: Book, file: str) -> None:
        self.book, self.file = book, file

    def cell(self, text: str) -> str:
        """Returns: the text of a cell. Raises: ValueError that names a directive, role or label that is unknown."""
        here = f"[Read this chapter in the book]({self.book.url}{self.file}.html)"
        return self.blocks(BADGES.sub(here, text))

    def blocks(self, text: str) -> str:
        """Returns: the text with its directives turned; what is code stays."""
        lines, out, i = text.split("\n"), [], 0
        paragraph: list[str] = []

        def flush() -> None:
            if paragraph:
                out.append(self.inline("\n".join(paragraph)))
                paragraph.clear()

        while i < len(lines):
            line = lines[i]
            if opened := OPENING.match(line):
                flush()
                end = closing(lines, i, opened["fence"])
                inside = [each.removeprefix(opened["indent"]) for each in lines[i + 1 : end]]
                turned = self.directive(opened["name"], opened["argument"], inside)
                out += [f"{opened['indent']}{each}".rstrip() for each in turned.split("\n")]
                i = end + 1
            elif fence := CODE_FENCE.match(line):
                flush()
                end = closing(lines, i, fence[1])
                out += lines[i : end + 1]
                i = end + 1
            elif equation := EQUATION_LABEL.match(line):
                paragraph += [f"\\tag{{{self.target(equation[1]).number.strip('()')}}}", "$$"]
                i += 1
            elif LABEL.match(line):
                i += 1
            else:
                paragraph.append(line)
                i += 1
        flush()
        return "\n".join(out)

    def directive(self, name: str, argument: str, lines: list[str]) -> str:
        """Returns: one directive in plain Markdown."""
        n_options = until_none([OPTION.match(line) for line in lines])
        options = dict(OPTION.match(line).groups() for line in lines[:n_options])
        body = "\n".join(lines[n_options:]).strip("\n")
        if name == "dropdown":
            return f"<details><summary>{self.inline(argument)}</summary>\n\n{self.blocks(body)}\n\n</details>"
        if name == "passport":
            return self.passport(options["name"])
        if name == "diagram":
            address, alt = f"_static/diagrams/{argument}.svg", self.alt(argument)
            return self.picture(self.book.url + address, alt, options.get("name", ""), body)
        if name in ("figure", "image"):
            return self.picture(self.address(argument), options.get("alt", ""), options.get("name", ""), body)
        if name in ("list-table", "table"):
            rows = self.blocks(body) if name == "table" else self.list_table(body)
            return f"{self.caption(options.get('name', ''), argument)}\n\n{rows}"
        if name == "math":
            return f"$$\n{body}\n$$"
        if name in ("code-block", "code"):
            return f"```{argument}\n{body}\n```"
        if name in NOTES or name == "margin":
            title = argument if name in ("admonition", "margin") else name.capitalize()
            head = f"**{self.inline(title)}**\n\n" if title else ""
            return quoted(head + self.blocks(body))
        raise ValueError(f"{self.file}: there is no form of the directive {{{name}}} for Colab")

    def alt(self, diagram: str) -> str:
        """Returns: the title and the description of a drawing."""
        svg = (ROOT / "book" / "_static" / "art" / f"{diagram}.svg").read_text(encoding="utf-8")
        title, description = (re.search(rf"<{tag}[^>]*>([^<]+)<", svg)[1] for tag in ("title", "desc"))
        return f"{title}. {description}".replace("[", "(").replace("]", ")").replace("\n", " ")

    def caption(self, label: str, text: str) -> str:
        """Returns: the line of a figure or table."""
        number = f"**{self.target(label).number}.** " if label else ""
        return f"{number}{self.inline(text)}".strip()

    def picture(self, address: str, alt: str, label: str, caption: str) -> str:
        """Returns: a picture with its caption below."""
        return f"![{alt}]({address})\n\n{self.caption(label, ' '.join(caption.split()))}".rstrip()

    def passport(self, key: str) -> str:
        """Returns: the passport of a technique as a small table."""
        if key not in self.book.techniques:
            raise ValueError(f"{self.file}: no technique {key!r} in book/techniques.yml")
        entry = self.book.techniques[key]
        module, name = entry["symbol"], entry["symbol"].split(".")[-1]
        test = f"{self.book.repository}/blob/{self.book.branch}/{entry['test'].split('::')[0]}"
        rows = {
            "Exact": entry["exact"],
            "Training": entry["training"],
            "Reduces": ", ".join(entry["reduces"]),
            "Phase": {"both": "prefill and decode"}.get(entry["phase"], entry["phase"]),
            "Best for": entry["best_for"],
            "Loses when": entry["loses_when"],
            **entry["stacks"],
            "First paper": "{cite:t}`" + entry["papers"][0] + "`",
            "Code": f"[`{name}`]({self.api(module)}), [test]({test})",
        }
        table = [[f"**{entry['name']}**", ""], *([name, str(value)] for name, value in rows.items())]
        return pipe_table([[self.inline(" ".join(cell.split())) for cell in row] for row in table])

    def api(self, symbol: str) -> str:
        """Returns: the address of a module's, class's or function's page among those of the package."""
        parts = symbol.split(".")
        for length in range(len(parts), 0, -1):
            path = ROOT / "src" / Path(*parts[:length])
            if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
                inside = symbol if length < len(parts) else f"module-{symbol}"
                return f"{self.book.url}book/api/{'/'.join(parts[:length])}/index.html#{inside}"
        raise ValueError(f"{self.file}: {symbol} is not in the package")

    def list_table(self, body: str) -> str:
        """Returns: a list of lists as a table with pipes."""
        rows: list[list[str]] = []
        for line in body.split("\n"):
            if begun := re.match(r"^\* - ?(.*)", line):
                rows.append([begun[1]])
            elif begun := re.match(r"^  - ?(.*)", line):
                rows[-1].append(begun[1])
            elif line.strip():
                rows[-1][-1] += " " + line.strip()
        return pipe_table([[self.inline(cell).replace("|", "\\|") for cell in row] for row in rows])

    def inline(self, text: str) -> str:
        """Returns: the text with its roles and its links to other pages turned; code and formulas stay."""

        def turned(found: re.Match) -> str:
            if found["role"]:
                return self.role(found["role"], found["text"])
            return f"{found['link']}({self.address(found['address'])})" if found["link"] else found[0]

        return INLINE.sub(turned, text)

    def role(self, name: str, text: str) -> str:
        """Returns: one role in plain Markdown."""
        if name in ("cite", "cite:p"):
            return f"({', '.join(self.paper(key.strip()) for key in text.split(','))})"
        if name == "cite:t":
            return ", ".join(self.paper(key.strip(), in_text=True) for key in text.split(","))
        words = WITH_TEXT.fullmatch(text)
        shown, label = (words[1], words[2]) if words else ("", text)
        if name in ("numref", "eq"):
            target = self.target(label)
            return f"[{target.number}]({self.book.url}{target.address})"
        if name == "ref":
            target = self.target(label)
            return f"[{shown or target.title or target.number}]({self.book.url}{target.address})"
        if name == "term":
            return f"[{shown or label}]({self.book.url}book/glossary.html)"
        if name == "doc":
            return f"[{shown or label.split('/')[-1]}]({self.address(label + '.md')})"
        if name.startswith("py:"):
            return f"[`{shown or label.split('.')[-1]}`]({self.api(label)})"
        raise ValueError(f"{self.file}: there is no form of the role {{{name}}} for Colab")

    def target(self, label: str) -> Target:
        """Returns: where a label leads."""
        if label not in self.book.targets:
            raise ValueError(f"{self.file}: no page has the label {label!r}")
        return self.book.targets[label]

    def paper(self, key: str, in_text: bool = False) -> str:
        """Returns: a paper's authors and year, with a link to it where its address is known."""
        if key not in self.book.papers:
            raise ValueError(f"{self.file}: {key!r} is not in references.bib")
        entry = self.book.papers[key]
        authors = [" ".join(author.prelast_names + author.last_names) for author in entry.persons.get("author", [])]
        names = [str(Text.from_latex(author)) for author in authors]
        names = names or [str(Text.from_latex(entry.fields.get("organization", entry.fields["title"])))]
        who = names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{names[0]} et al."
        year = entry.fields.get("year", "no year")
        address = entry.fields.get("url") or f"{self.book.url}book/references.html"
        return f"[{who} ({year})]({address})" if in_text else f"[{who}, {year}]({address})"

    def address(self, link: str) -> str:
        """Returns: the whole address of a link, which may be relative to the chapter."""
        if re.match(r"[a-z]+:", link):
            return link
        name, _, label = link.partition("#")
        if not name:
            known = self.book.targets.get(label)
            return self.book.url + (known.address if known else f"{self.file}.html#{label}")
        path = (ROOT / self.file).parent / name if not name.startswith("/") else ROOT / name[1:]
        inside = path.resolve().relative_to(ROOT).as_posix()
        page = re.fullmatch(r"(.+)\.(?:md|ipynb)", inside)
        if page:
            return f"{self.book.url}{page[1]}.html" + (f"#{label}" if label else "")
        if inside.startswith("book/_static/"):
            return f"{self.book.url}{inside.removeprefix('book/')}"
        return f"{self.book.repository}/blob/{self.book.branch}/{inside}"


def closing(lines: list[str], start: int, fence: str) -> int:
    """Returns: the line that closes the fence opened at `start`. Raises: ValueError when none does."""
    mark, inner = fence[0], ""
    for i in range(start + 1, len(lines)):
        text = lines[i].strip()
        if inner:
            inner = "" if text == inner else inner
        elif text and set(text) == {mark} and len(text) >= len(fence):
            return i
        elif mark == ":" and (opened := CODE_FENCE.match(lines[i])):
            inner = opened[1]
    raise ValueError(f"a fence is not closed: {lines[start]!r}")


def pipe_table(rows: list[list[str]]) -> str:
    """Returns: a table in Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def quoted(text: str) -> str:
    """Returns: the text as a block quote."""
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


def edition(book: Book, file: str, root: Path = ROOT) -> dict:
    """The edition of one chapter.

    Args:
        file: the page, as in `chapters/04_kv_cache`.
    Returns: the notebook. Its code cells are the chapter's; below a figure's cell a new one holds the caption.
    """
    notebook = json.loads((root / f"{file}.ipynb").read_text(encoding="utf-8"))
    turn = Edition(book, file)
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = turn.cell("".join(cell["source"])).splitlines(keepends=True)
        cells.append(cell)
        if figure := cell["metadata"].get("mystnb", {}).get("figure"):
            caption = turn.caption(figure["name"], figure["caption"]).splitlines(keepends=True)
            new = {"cell_type": "markdown", "metadata": {}, "source": caption}
            cells.append({**new, "id": f"{cell['id'][:55]}-caption"} if "id" in cell else new)
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key != "mystnb"}
    notebook["cells"] = cells
    return notebook


README = """# Work per Byte: the chapters for Colab

`make colab` on the branch `{branch}` writes these files: change the chapters there, not here. The book is at {url}.
"""


def write(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write every chapter's edition below a folder. Returns: the files."""
    book = load_book(root)
    written = []
    (folder / "chapters").mkdir(parents=True, exist_ok=True)
    for path in sorted((root / "chapters").glob("*.ipynb")):
        new = folder / "chapters" / path.name
        text = json.dumps(edition(book, f"chapters/{path.stem}", root), indent=1, ensure_ascii=False, sort_keys=True)
        new.write_text(text + "\n", encoding="utf-8")
        written.append(new)
    (folder / "README.md").write_text(README.format(branch=book.branch, url=book.url), encoding="utf-8")
    return written


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where the editions go")
    parser.add_argument("--branch", action="store_true", help="print the branch that holds the editions")
    chosen = parser.parse_args()
    if chosen.branch:
        print(load_book().colab_branch)
    elif chosen.folder:
        try:
            for path in write(chosen.folder):
                print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
        except ValueError as error:
            sys.exit(str(error))
    else:
        parser.error("name the folder, for example _build/colab")


if __name__ == "__main__":
    main()
