"""`make execute` stores a run's outputs, and says what the run took."""

import json

import nbformat
import pytest
from built_book import ROOT, load_script
from nbclient.exceptions import CellExecutionError

execute = load_script(ROOT / "tools" / "execute.py")
status = load_script(ROOT / "book" / "_ext" / "status.py")


def written(path, *sources: str):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[0].metadata["collapsed"] = True
    nbformat.write(notebook, path)
    return path


def test_a_run_is_stored_and_described(tmp_path) -> None:
    path = written(tmp_path / "01_a.ipynb", "x = bytearray(b'1') * 400_000_000", "print(len(x))")
    entry = execute.execute(path)
    stored = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2], "the probe is taken out again"
    assert [output.text for output in stored.cells[1].outputs] == ["400000000\n"]
    assert not stored.cells[0].metadata
    (tmp_path / "status.json").write_text(json.dumps({"01_a": entry}), encoding="utf-8")
    assert status.load(tmp_path / "status.json") == {"01_a": entry}
    assert 0.4e9 < entry["peak_bytes"] < 4e9
    assert entry["seconds"] > 0
    assert list(entry["versions"]) == ["gptlite", "torch", "Python"]


def test_what_is_printed_is_stored_in_one_piece(tmp_path) -> None:
    slowly = "import sys, time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.3)\n"
    path = written(tmp_path / "01_a.ipynb", slowly + "print('!', file=sys.stderr)")
    execute.execute(path)
    outputs = nbformat.read(path, as_version=4).cells[0].outputs
    assert [(output.name, output.text) for output in outputs] == [("stdout", "0\n1\n2\n"), ("stderr", "!\n")]


def test_a_run_that_fails_leaves_the_file_alone(tmp_path) -> None:
    path = written(tmp_path / "01_a.ipynb", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute.execute(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["01_a.ipynb"]
