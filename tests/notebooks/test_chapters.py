"""Every chapter keeps the rules of a chapter; and every rule complains about a chapter that breaks it."""

import ast
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
SECTIONS = [
    "The question",
    "You will learn",
    "Set-up",
    "The idea",
    "The code",
    "It is right",
    "Explorer",
    "Lab",
    "When it does not help",
    "In practice",
    "Exercises",
    "Summary",
    "Further reading",
]
SET_UP = """import sys

if "google.colab" in sys.modules:
    %pip install --quiet "gptlite[{extras}] @ git+https://github.com/{repository}"

from gptlite.notebook.helpers import setup

device = setup()"""
IGNORED = "nbval-ignore-output"
MACHINE_PATH = r"(?<![\w./])/(?:home|root|Users|work|tmp|usr|opt|content|private|var)/|site-packages|\b[A-Z]:\\\\"
TIME = r"\d\s*(?:ms|µs|ns|s|min|seconds?|minutes?|hours?|(?:tokens?|characters?|k?B|[MGT]i?B|[MGT]?FLOP)/s)(?!\w)"


class Chapter:
    """A chapter as its cells."""

    def __init__(self, path: Path, content: dict) -> None:
        self.path, self.content, self.cells = path, content, content["cells"]
        for cell in self.cells:
            cell["text"] = "".join(cell["source"])

    @property
    def prose(self) -> str:
        return "\n\n".join(cell["text"] for cell in self.cells if cell["cell_type"] == "markdown")

    @property
    def code(self) -> list[dict]:
        return [cell for cell in self.cells if cell["cell_type"] == "code"]

    @property
    def head(self) -> str:
        return self.cells[0]["text"]

    def section(self, title: str) -> str:
        """The prose below a heading of the second level."""
        found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", self.prose, re.M | re.S)
        return found[1] if found else ""

    def outputs(self) -> list[tuple[dict, dict]]:
        return [(cell, output) for cell in self.code for output in cell["outputs"]]


def load(path: Path) -> Chapter:
    return Chapter(path, json.loads(path.read_text(encoding="utf-8")))


def text_of(output: dict) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    return "\n".join(
        value if isinstance(value, str) else "".join(value) for kind, value in data.items() if "text/" in kind
    )


def repository() -> str:
    url = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    return url.removeprefix("https://github.com/")


def colab_branch() -> str:
    """The branch with the chapters in plain Markdown, which Colab can show."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]["colab_branch"]


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,})[^`\n]*\n.*?^\1$|`[^`\n]*`|\$\$.*?\$\$", "", text, flags=re.M | re.S)


# Each rule yields what is wrong with a chapter.


def label_title_and_badges(chapter: Chapter):
    name, where = chapter.path.name, f"{repository()}/blob/{colab_branch()}/chapters/{chapter.path.name}"
    if not re.match(r"\(ch-[\w-]+\)=\n# \S.*\n", chapter.head):
        yield "the first cell does not begin with a label and a title"
    if f"https://colab.research.google.com/github/{where}" not in chapter.head:
        yield "no link to this chapter in Colab"
    if f"https://mybinder.org/v2/gh/{repository()}/main?labpath=chapters%2F{name}" not in chapter.head:
        yield "no link to this chapter in Binder"
    for need in ("**Needs:**", "**Runs in:**", "**Peak memory:**"):
        if need not in chapter.head:
            yield f"the first cell does not say {need}"


def passport_of_its_techniques(chapter: Chapter):
    label = chapter.head[1:].partition(")")[0]
    techniques = yaml.safe_load((ROOT / "book" / "techniques.yml").read_text(encoding="utf-8"))
    own = [entry["key"] for entry in techniques if entry["chapter"] == label]
    shown = re.findall(r"\{passport\}\n:name: ([\w-]+)", chapter.prose)
    if sorted(shown) != sorted(own) or not own:
        yield f"passports {shown}, its techniques are {own}"
    if "{passport}" not in chapter.head:
        yield "no passport in the first cell"


def sections_in_order(chapter: Chapter):
    found = re.findall(r"^## (.+)$", chapter.prose, re.M)
    if found != SECTIONS:
        yield f"sections {found}"


def question_with_a_number(chapter: Chapter):
    bold = re.findall(r"\*\*(.+?\?)\*\*", chapter.section("The question"), re.S)
    if not any(re.search(r"\d", question) for question in bold):
        yield "the question, in bold, has no number in it"


def outcomes(chapter: Chapter):
    found = re.findall(r"^\d\. (.*)", chapter.section("You will learn"), re.M)
    if not 3 <= len(found) <= 5:
        yield f"{len(found)} outcomes"
    for outcome in found:
        if not re.match(r"\*\*\w+\*\*", outcome):
            yield f"an outcome does not begin with a verb in bold: {outcome!r}"


def same_set_up(chapter: Chapter):
    semantic = any("from gptlite.semantic" in cell["text"] for cell in chapter.code)
    extras = "lab,semantic" if semantic else "lab"  # those of what the chapter imports, and no others
    if chapter.code[0]["text"] != SET_UP.format(repository=repository(), extras=extras):
        yield f"the first code cell is not the set-up cell of every chapter, with the extras {extras}"


def source_is_shown(chapter: Chapter):
    if not any("show_source(" in cell["text"] for cell in chapter.code):
        yield "no source is shown from the package"
    package = {
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for cell in chapter.code[1:]:  # the set-up cell has a magic line
        for node in ast.walk(ast.parse(cell["text"])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in package:
                yield f"{node.name} is retyped, the package has it"


def explorer_and_lab(chapter: Chapter):
    shown = [text_of(output) for _, output in chapter.outputs()]
    if not any('class="gptlite-explorer"' in text for text in shown):
        yield "no explorer among the outputs"
    if not any('class="gptlite-lab' in text for text in shown):
        yield "no lab among the outputs"


def exercises_with_solutions(chapter: Chapter):
    parts = re.split(r"^### Exercise \d+", chapter.section("Exercises"), flags=re.M)[1:]
    if not 4 <= len(parts) <= 6:
        yield f"{len(parts)} exercises"
    for number, part in enumerate(parts, start=1):
        if len(re.findall(r"^:::\{dropdown\} Solution$", part, re.M)) != 1:
            yield f"exercise {number} has no solution in a dropdown"
    if not any(re.search(r"\bcheck_\w+\(", cell["text"]) for cell in chapter.code):
        yield "no exercise has a check that the reader can run"


def short_summary(chapter: Chapter):
    sentences = re.findall(r"[.!?](?=\s|$)", without_code(chapter.section("Summary")))
    if not 1 <= len(sentences) <= 6:
        yield f"the summary has {len(sentences)} sentences"
    if "{cite" not in chapter.section("Further reading"):
        yield "no citation under further reading"
    if "{cite" not in chapter.section("In practice"):
        yield "no citation in practice"


def citations_exist(chapter: Chapter):
    bib = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", bib, re.M))
    for found in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", chapter.prose):
        for key in found.split(","):
            if key.strip() not in keys:
                yield f"{key} is not in references.bib"


def alt_texts(chapter: Chapter):
    for cell, output in chapter.outputs():
        is_image = "image/png" in output.get("data", {}) and "text/html" not in output["data"]
        if is_image and not cell["metadata"].get("mystnb", {}).get("image", {}).get("alt"):
            yield "an image has no alt text"
        for svg in re.findall(r"<svg\b.*?</svg>", text_of(output), re.S):
            if not re.search(r'role="img"', svg) or not re.search(r"<title[^>]*>[^<]+<.*<desc[^>]*>[^<]+<", svg, re.S):
                yield f"a drawing has no title or no description: {svg[:80]}"
    for name in re.findall(r"\{diagram\} (\S+)", chapter.prose):
        svg = (ROOT / "book" / "_static" / "art" / f"{name}.svg").read_text(encoding="utf-8")
        if not re.search(r"<title[^>]*>[^<]+<.*<desc[^>]*>[^<]+<", svg, re.S):
            yield f"diagram {name} has no title or no description"
    if re.search(r"!\[\s*\]\(", chapter.prose):
        yield "a picture has no alt text"


def figures_are_numbered_and_referred_to(chapter: Chapter):
    names = re.findall(r"\{(?:diagram|figure|list-table|table)\}[^\n]*\n:name: (\S+)", chapter.prose)
    for cell in chapter.code:
        figure = cell["metadata"].get("mystnb", {}).get("figure", {})
        if figure and not (figure.get("name") and figure.get("caption")):
            yield "a figure of a cell has no name or no caption"
        names += [figure["name"]] if figure.get("name") else []
    drawn = [
        cell
        for cell, output in chapter.outputs()
        if re.search(r'class="gptlite-(?:figure|explorer|lab)"', text_of(output))
        or "image/png" in output.get("data", {})
    ]
    for cell in drawn:
        if "figure" not in cell["metadata"].get("mystnb", {}):
            yield f"a figure has no number: {cell['text'][:60]!r}"
    for name in names:
        if f"{{numref}}`{name}`" not in chapter.prose:
            yield f"{name} is not referred to"


def half_is_compared(chapter: Chapter):
    compared = [cell for cell in chapter.code if IGNORED not in cell["metadata"].get("tags", [])]
    if 2 * len(compared) < len(chapter.code):
        yield f"{len(compared)} of {len(chapter.code)} code cells are compared"
    for cell, output in chapter.outputs():
        if "image/png" in output.get("data", {}) and IGNORED not in cell["metadata"].get("tags", []):
            yield "a cell that shows an image is compared"


def clean_outputs(chapter: Chapter):
    for cell, output in chapter.outputs():
        text, start = text_of(output), cell["text"][:60]
        if output["output_type"] == "error" or output.get("name") == "stderr":
            yield f"an error or a line on stderr: {start!r}"
        if re.search(r"\w*Warning:", text):
            yield f"a warning: {start!r}"
        if found := re.search(MACHINE_PATH, text):
            yield f"a path of a machine, {found[0]!r}: {start!r}"
        if re.search(r"\b0x[0-9a-f]{6,}", text):
            yield f"an address: {start!r}"
        if "\r" in text or re.search(r"\d+%\|", text):
            yield f"frames of a progress bar: {start!r}"


def executed_once_in_order(chapter: Chapter):
    counts = [cell["execution_count"] for cell in chapter.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts {counts}"


def no_traces_of_an_editor(chapter: Chapter):
    if "widgets" in chapter.content["metadata"]:
        yield "the state of widgets is stored"
    if set(chapter.content["metadata"]) != {"kernelspec", "language_info"}:
        yield f"metadata {sorted(chapter.content['metadata'])}"
    if "version" in chapter.content["metadata"].get("language_info", {}):
        yield "the version of Python is stored"
    for cell in chapter.cells:
        if odd := set(cell["metadata"]) - {"tags", "mystnb"}:
            yield f"a cell has metadata {sorted(odd)}"


def under_a_megabyte(chapter: Chapter):
    size = len(json.dumps(chapter.content))
    if size >= 1e6:
        yield f"{size / 1e6:.2f} MB"


def no_measured_number_in_prose(chapter: Chapter):
    """What can be detected: a time or a rate where nothing is cited. The first cell says how long it runs."""
    prose = without_code(chapter.prose.removeprefix(chapter.head))
    for paragraph in re.split(r"\n\s*\n|^[*-] ", prose, flags=re.M):
        if (found := re.search(TIME, paragraph)) and "{cite" not in paragraph:
            yield f"a measured number: {paragraph[max(0, found.start() - 30) : found.end()]!r}"


RULES: list[Callable] = [
    label_title_and_badges,
    passport_of_its_techniques,
    sections_in_order,
    question_with_a_number,
    outcomes,
    same_set_up,
    source_is_shown,
    explorer_and_lab,
    exercises_with_solutions,
    short_summary,
    citations_exist,
    alt_texts,
    figures_are_numbered_and_referred_to,
    half_is_compared,
    clean_outputs,
    executed_once_in_order,
    no_traces_of_an_editor,
    under_a_megabyte,
    no_measured_number_in_prose,
]


def test_there_are_chapters() -> None:
    named = set(re.findall(r"file: (chapters/\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8")))
    assert named == {f"chapters/{path.stem}" for path in CHAPTERS} != set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_keeps_the_rule(path: Path, rule: Callable) -> None:
    assert list(rule(load(path))) == []


# What breaks each rule: the text of a cell before and after, or a change of the notebook.
BROKEN_TEXT = [
    (label_title_and_badges, "(ch-", "(chapter-"),
    (label_title_and_badges, "colab.research", "other.research"),
    (label_title_and_badges, "/blob/colab/", "/blob/main/"),
    (label_title_and_badges, "?labpath=", "?path="),
    (label_title_and_badges, "**Needs:**", "Needs"),
    (passport_of_its_techniques, "{passport}\n:name: ", "{passport}\n:name: no-"),
    (sections_in_order, "## Explorer", "## Explore"),
    (question_with_a_number, "**How many", "How many"),
    (outcomes, "1. **", "1. "),
    (same_set_up, "setup()", "setup(1)"),
    (same_set_up, "gptlite[lab]", "gptlite[lab,semantic]"),
    (same_set_up, "from gptlite.sampling", "from gptlite.semantic"),
    (source_is_shown, "show_source(", "print("),
    (source_is_shown, "def plain_forward", "def generate"),
    (exercises_with_solutions, ":::{dropdown} Solution", ":::{note} Solution"),
    (exercises_with_solutions, "check_", "test_"),
    (short_summary, "## Summary", "## Summary\n\nOne. Two. Three. Four. Five. Six. "),
    (short_summary, "{cite", "{ref"),
    (citations_exist, "vaswani2017attention", "vaswani2071attention"),
    (figures_are_numbered_and_referred_to, "{numref}", "{ref}"),
    (no_measured_number_in_prose, "## Lab", "## Lab\n\nA token takes 3.2 ms here."),
    (no_measured_number_in_prose, "## Lab", "## Lab\n\nIt writes 1,200 characters/s."),
]


@pytest.mark.parametrize(("rule", "good", "bad"), BROKEN_TEXT)
def test_a_rule_sees_the_broken_text(rule: Callable, good: str, bad: str) -> None:
    chapter = load(CHAPTERS[0])
    assert any(good in cell["text"] for cell in chapter.cells)
    for cell in chapter.cells:
        cell["text"] = cell["text"].replace(good, bad)
    assert list(rule(chapter))


def stored(**output) -> Callable[[dict], None]:
    """A change that puts an output into the second code cell."""

    def change(content: dict) -> None:
        [cell for cell in content["cells"] if cell["cell_type"] == "code"][1]["outputs"].append(output)

    return change


def shown(**data: str) -> Callable[[dict], None]:
    kinds = {name.replace("_", "/"): value for name, value in data.items()}
    return stored(output_type="display_data", metadata={}, data=kinds)


def without_counts(content: dict) -> None:
    content["cells"][-1]["metadata"]["collapsed"] = True
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = 1


def all_ignored(content: dict) -> None:
    for cell in content["cells"]:
        cell["metadata"]["tags"] = [IGNORED]


BROKEN_CONTENT = [
    (alt_texts, shown(image_png="aGk=")),
    (alt_texts, shown(text_html="<svg><path/></svg>")),
    (figures_are_numbered_and_referred_to, shown(text_html='<figure class="gptlite-figure"></figure>')),
    (half_is_compared, all_ignored),
    (half_is_compared, shown(image_png="aGk=")),
    (clean_outputs, stored(output_type="stream", name="stderr", text="late")),
    (clean_outputs, stored(output_type="stream", name="stdout", text="UserWarning: odd")),
    (clean_outputs, stored(output_type="stream", name="stdout", text="saved to /home/ada/book")),
    (clean_outputs, stored(output_type="stream", name="stdout", text="<object at 0x7f3a2b1c>")),
    (clean_outputs, stored(output_type="stream", name="stdout", text="1/3\r2/3\r3/3")),
    (executed_once_in_order, without_counts),
    (no_traces_of_an_editor, without_counts),
    (no_traces_of_an_editor, lambda content: content["metadata"].update(widgets={})),
    (no_traces_of_an_editor, lambda content: content["metadata"]["language_info"].update(version="3.12")),
    (under_a_megabyte, shown(text_plain="x" * 1_000_000)),
    (explorer_and_lab, lambda content: [cell.update(outputs=[]) for cell in content["cells"]]),
]


@pytest.mark.parametrize(("rule", "change"), BROKEN_CONTENT)
def test_a_rule_sees_the_broken_notebook(rule: Callable, change: Callable[[dict], None]) -> None:
    content = copy.deepcopy(load(CHAPTERS[0]).content)
    change(content)
    assert list(rule(Chapter(CHAPTERS[0], content)))


def test_every_rule_has_a_case_that_breaks_it() -> None:
    assert {rule for rule, *_ in BROKEN_TEXT + BROKEN_CONTENT} == set(RULES)
