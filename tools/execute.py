"""Run notebooks from a clean kernel, top to bottom, and store their outputs: `python tools/execute.py FILES`.

What would differ between two runs of the same code is left out: times of cells, the state of widgets, the version
of Python.
"""

import argparse
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TRACES = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted")  # what editors and runs leave in a cell


def execute(path: Path, timeout: int = 600) -> None:
    """Run one notebook and write it back. Raises: CellExecutionError when a cell fails; then nothing is written."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for key in TRACES:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
    }
    nbformat.validate(notebook)
    written = path.with_suffix(".tmp")
    nbformat.write(notebook, written)
    os.replace(written, path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path)
    for path in parser.parse_args().notebooks:
        start = time.perf_counter()
        execute(path)
        print(f"{path}: {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
