"""Run notebooks from a clean kernel, top to bottom, and store their outputs: `python tools/execute.py FILES`.

What would differ between two runs of the same code is left out: times of cells, the state of widgets, the version
of Python. What a chapter took goes to book/status.json, from which the status page is made.
"""

import argparse
import datetime
import json
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
STATUS = ROOT / "book" / "status.json"
TRACES = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted")  # what editors and runs leave in a cell
# A last cell that is taken out again: what the kernel's process held at its peak (in kB, on macOS in bytes), and where.
PROBE = """
import json, resource, sys
import gptlite, gptlite.hardware
about = gptlite.hardware.machine()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
machine = {key: about[key] for key in ("name", "cores", "memory_bytes", "system")}
versions = {"gptlite": gptlite.__version__, "torch": about["torch"], "Python": about["python"]}
print(json.dumps({"peak_bytes": peak, "machine": machine, "versions": versions}))
"""


def execute(path: Path, timeout: int = 600) -> dict:
    """Run one notebook and write it back.

    Returns: what the run took, an entry of book/status.json.
    Raises: CellExecutionError when a cell fails; then nothing is written.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for key in TRACES:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    about = json.loads(notebook.cells.pop().outputs[0].text)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
    }
    nbformat.validate(notebook)
    written = path.with_suffix(".tmp")
    nbformat.write(notebook, written)
    os.replace(written, path)
    return {"seconds": round(seconds, 1), **about, "date": datetime.date.today().isoformat()}


def joined(outputs: list) -> list:
    """The same outputs, with what was printed in one go in one piece: where a kernel cuts it depends on the time."""
    found: list = []
    for output in outputs:
        before = found[-1] if found else {}
        if output["output_type"] == before.get("output_type") == "stream" and output["name"] == before["name"]:
            before["text"] += output["text"]
        else:
            found.append(output)
    return found


def keep(name: str, entry: dict, status: Path = STATUS) -> None:
    """Write what a chapter took into the file of all chapters, and forget the chapters that are no more."""
    entries = json.loads(status.read_text(encoding="utf-8")) if status.exists() else {}
    there = {path.stem for path in (status.parent.parent / "chapters").glob("*.ipynb")}
    entries = {key: value for key, value in sorted({**entries, name: entry}.items()) if key in there}
    written = status.with_suffix(".tmp")
    written.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(written, status)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path)
    for path in parser.parse_args().notebooks:
        entry = execute(path)
        if path.resolve().parent == ROOT / "chapters":
            keep(path.stem, entry)
        print(f"{path}: {entry['seconds']:.1f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
