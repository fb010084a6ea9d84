"""A chapter's edition for Colab runs, from a clean kernel, as the chapter does."""

import json

import nbformat
from built_book import ROOT, load_script
from nbclient import NotebookClient

colab = load_script(ROOT / "tools" / "colab.py")


def test_an_edition_runs(tmp_path) -> None:
    quickest = "chapters/12_number_formats"
    edition = nbformat.reads(json.dumps(colab.edition(colab.load_book(), quickest)), as_version=4)
    for cell in edition.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.validate(edition)
    NotebookClient(edition, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = json.dumps([cell.outputs for cell in edition.cells if cell.cell_type == "code"])
    assert "gptlite-explorer" in shown
    assert "gptlite-lab" in shown
    assert not list(tmp_path.iterdir()), "a run leaves nothing behind"
