"""A problem set so small that nbgrader is done with it in seconds, and wrong answers to it."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

TEXT = """# Problem set 0: toys

| task | points |
|---|---|
| `double` | 30 |
| `last` | 30 |
| `size` | 20 |
| `speed` | 20 |
"""
VARIANT = """VARIANT = 0  # the variant of this set; numbers and some rules below follow from it
factor = 2 + VARIANT % 3
print(f"factor {factor}")"""
SOLUTIONS = {
    "double": "def double(x):\n    ### BEGIN SOLUTION\n    return factor * x\n    ### END SOLUTION",
    "last": "def last(items):\n    ### BEGIN SOLUTION\n    return items[-1]\n    ### END SOLUTION",
    "size": "answer_bytes = 4 * factor",
    "speed": "seconds = 1.0",
}
TESTS = {
    "double-public": (5, "assert double(1) == factor, f'double(1) is {double(1)}, expected {factor}'"),
    "double-hidden": (
        25,
        "from random import Random\n\nx = Random(HIDDEN).randint(2, 9)\nassert double(x) == factor * x",
    ),
    "last-public": (5, "assert last([1, 2]) == 2"),
    "last-hidden": (25, "items = [3, 1, 2]\nassert last(items) == 2\nassert items == [3, 1, 2]"),
    "size-hidden": (20, "assert answer_bytes == 4 * factor"),
}
WRONG = {
    "another factor": {
        "task": "double",
        "source": "def double(x):\n    return x",
        "loses": ["double-public", "double-hidden"],
    },
    "hard-coded": {"task": "double", "source": "def double(x):\n    return factor", "loses": ["double-hidden"]},
    "the list is changed": {
        "task": "last",
        "source": "def last(items):\n    return items.pop()",
        "loses": ["last-hidden"],
    },
    "bits for bytes": {"task": "size", "source": "answer_bytes = 32 * factor", "loses": ["size-hidden"]},
}


def metadata(grade_id: str, points: float | None = None, solution: bool = False, locked: bool = False) -> dict:
    """What nbgrader reads of a cell."""
    found = {"schema_version": 3, "grade_id": grade_id, "grade": points is not None, "solution": solution}
    found |= {"task": False, "locked": locked or (points is not None and not solution)}
    return {"nbgrader": found if points is None else {**found, "points": points}}


def cell(make, source: str, name: str, **kinds):
    """A cell with its identifier; kinds: what `metadata` takes."""
    return make(source, id=name, metadata=metadata(name, **kinds))


def write(folder: Path) -> Path:
    """Write the set below a folder. Returns: its path."""
    cells = [
        cell(new_markdown_cell, TEXT, "title", locked=True),
        cell(new_code_cell, VARIANT, "variant", locked=True),
    ]
    cells[1].metadata["tags"] = ["variant"]
    for task, solution in SOLUTIONS.items():
        cells.append(cell(new_code_cell, solution, task, solution=True))
        for name, (points, test) in TESTS.items():
            if name.startswith(f"{task}-"):
                if name.endswith("-hidden"):
                    head = "# other numbers\n### BEGIN HIDDEN TESTS\n"
                    seed = "HIDDEN = 0  # the hidden tests draw their inputs from this seed\n"
                    test = f"{head}{seed}{test}\n### END HIDDEN TESTS"
                cells.append(cell(new_code_cell, test, name, points=points))
    cells.append(cell(new_markdown_cell, "It took a second.", "speed-explanation", points=20, solution=True))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = folder / "ps0" / "ps0.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path
