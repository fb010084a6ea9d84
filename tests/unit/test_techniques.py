"""Each entry of the list of techniques resolves: symbol, test, chapter and papers are there."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TECHNIQUES = yaml.safe_load((ROOT / "book" / "techniques.yml").read_text(encoding="utf-8"))
IDS = [entry["key"] for entry in TECHNIQUES]


def prose(file: str) -> str:
    """Returns: the Markdown of a chapter."""
    notebook = json.loads((ROOT / f"{file}.ipynb").read_text(encoding="utf-8"))
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def chapters() -> dict[str, str]:
    """Returns: the file of each chapter in _toc.yml by its label."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    labels = {}
    for file in files:
        if file.startswith("chapters/"):
            labels |= dict.fromkeys(re.findall(r"^\((ch-[\w-]+)\)=$", prose(file), re.MULTILINE), file)
    return labels


def names_in(path: Path) -> set[str]:
    """Returns: the names of the test functions and classes of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_there_is_a_list() -> None:
    assert len(set(IDS)) == len(IDS) >= 2


@pytest.mark.parametrize("entry", TECHNIQUES, ids=IDS)
def test_entry_resolves(entry: dict) -> None:
    module, name = entry["symbol"].rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))

    file, *test = entry["test"].split("::")
    assert (ROOT / file).is_file(), file
    assert set(test) <= names_in(ROOT / file)

    assert entry["chapter"] in chapters()

    bibliography = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    for paper in entry["papers"]:
        assert re.search(rf"^@\w+\{{{paper},", bibliography, re.MULTILINE), paper


@pytest.mark.parametrize("entry", TECHNIQUES, ids=IDS)
def test_the_chapter_shows_the_passport(entry: dict) -> None:
    file = ROOT / f"{chapters()[entry['chapter']]}.ipynb"
    assert f'```{{passport}}\\n",\n    ":name: {entry["key"]}' in file.read_text(encoding="utf-8")
