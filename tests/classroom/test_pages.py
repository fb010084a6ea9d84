"""What the book says of the problem sets is what the sets are, and its list of figures has all of them."""

import json
import re
from pathlib import Path

import course
import pytest
import yaml
from built_book import load_script
from course import ASSIGNMENTS, ROOT, ProblemSet

SETS = course.sources()
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
PAGE = (ROOT / "book" / "problem_sets.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "book" / "instructors.md").read_text(encoding="utf-8")
ROWS = [row for row in re.findall(r"^\|(.+)\|$", PAGE, re.M) if "{download}" in row]
figures = load_script(ROOT / "book" / "_ext" / "figures.py")


def minutes(text: str) -> int:
    """The minutes of a set's tasks, from its first cell: a column, words in each row, or a sentence."""
    rows = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\|(.+)\|$", text, re.M)]
    column = next((i for i, name in enumerate(rows[0]) if "minutes" in name), None)
    tasks = [row for row in rows[2:] if "total" not in row[0]]
    if column is not None:
        return sum(int(row[column]) for row in tasks)
    if found := re.findall(r"(\d+) minutes\)? \|", text):
        return sum(map(int, found))
    return sum(map(int, re.findall(r"\d+", re.search(r"Expected time: ([^.;]*) minutes", text)[1])))


def label_of(file: str) -> str:
    """The label of a chapter."""
    return course.load(ROOT / f"{file}.ipynb").cells[0].source[1:].partition(")")[0]


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_the_page_says_what_a_set_is(path: Path) -> None:
    number = SETS.index(path) + 1
    there, row = ProblemSet(path), ROWS[number - 1]
    head = there.cells[0].source
    name, chapters, time, notebook = (cell.strip() for cell in row.split("|"))
    assert f"# Problem set {name}" == head.splitlines()[0]
    part = [part for part in yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"] if part.get("numbered")]
    files = [entry["file"] for entry in part[number - 1]["chapters"]]
    assert chapters == ", ".join(f"{{ref}}`{int(Path(file).name[:2])} <{label_of(file)}>`" for file in files)
    assert 60 <= int(time) == minutes(head) <= 120
    kept = f"assignments/release/{path.stem}/{path.name}"
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]
    address = config["url"].replace("https://github.com", "https://colab.research.google.com/github")
    expected = f"{{download}}`{path.name} <../{kept}>`, [Open in Colab]({address}/blob/{config['branch']}/{kept})"
    assert notebook == expected
    assert (ROOT / kept).exists()


def test_the_page_has_all_sets() -> None:
    assert len(ROWS) == len(SETS)


@pytest.mark.parametrize("heading", ["Twelve weeks", "Six weeks"])
def test_a_syllabus_names_what_there_is(heading: str) -> None:
    weeks = re.search(rf"^## {heading}$(.*?)^## ", GUIDE, re.M | re.S)[1]
    assigned = {int(number) for number in re.findall(r"\bset (\d)", weeks)}
    assert assigned <= set(range(1, len(SETS) + 1))
    linked = set(re.findall(r"\.\./(chapters/\w+\.ipynb)", weeks))
    chapters = {f"chapters/{path.name}" for path in CHAPTERS}
    assert linked <= chapters
    if heading == "Twelve weeks":
        assert linked == chapters
        assert len(assigned) == len(SETS)


def test_the_commands_of_the_guide_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"private", "setup", "nbgrader"} <= set(re.findall(r"(?:^|`)make ([a-z-]+)", GUIDE, re.M)) <= targets
    for name in course.CONFIG:
        assert (ASSIGNMENTS / name).exists()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_list_has_every_figure_of_a_chapter(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    found = figures.figures(notebook)
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    drawn = re.findall(r"\{diagram\} .*\n:name: (\S+)", prose)
    named = [cell["metadata"]["mystnb"]["figure"]["name"] for cell in notebook["cells"] if "mystnb" in cell["metadata"]
             and "figure" in cell["metadata"]["mystnb"]]  # fmt: skip
    assert sorted(label for _, label, _ in found) == sorted([*drawn, *named])
    assert {"explorer", "lab"} <= {kind for kind, _, _ in found}
    lines = figures.table([(f"/chapters/{path.name}", notebook)])
    assert len(lines) == 3 + len(found)
    assert all("\n" not in line for line in lines)


def test_every_chapter_has_a_mistake_that_it_refutes() -> None:
    mistakes = re.search(r"^## Mistakes that.*?$(.*?)^## ", GUIDE, re.M | re.S)[1]
    assert {f"chapters/{path.name}" for path in CHAPTERS} == set(re.findall(r"\.\./(chapters/\w+\.ipynb)", mistakes))
