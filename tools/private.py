"""Make a private nbgrader course from the public sets: `python tools/private.py SEED [SET ...]`.

Its sets ask for other numbers than the published ones, and its hidden tests draw their inputs from seeds that follow
from SEED, so keep SEED as you keep the exam. The course is written to assignments/private/SEED, which git ignores.
"""

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import release

VARIANT = re.compile(r"^VARIANT = \d+(?=  # the variant of this set;)", re.MULTILINE)
HIDDEN = re.compile(r"^HIDDEN = \d+(?=  # the hidden tests draw)", re.MULTILINE)
N_VARIANTS = 1_000_000


def number(seed: str, name: str, what: str, below: int) -> int:
    """Returns: a number from 1 to below - 1 that follows from the seed, the set and what it is for."""
    digest = hashlib.sha256("\n".join([seed, name, what]).encode()).hexdigest()
    return 1 + int(digest, 16) % (below - 1)


def rewrite(notebook: nbformat.NotebookNode, name: str, seed: str) -> None:
    """Give a source notebook the variant and the hidden tests that follow from the seed.

    Raises: ValueError when it has not one line with the variant, or no hidden test with a seed.
    """
    n_variants = n_hidden = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.source, found = VARIANT.subn(f"VARIANT = {number(seed, name, 'variant', N_VARIANTS)}", cell.source)
        n_variants += found
        what = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        cell.source, found = HIDDEN.subn(f"HIDDEN = {number(seed, name, what, 2**63)}", cell.source)
        n_hidden += found
    if n_variants != 1 or not n_hidden:
        raise ValueError(f"{name} has {n_variants} lines with VARIANT and {n_hidden} with HIDDEN")


def folder_name(seed: str) -> str:
    """Returns: a folder's name for a seed: the seed itself where it is a plain word, else a part of its digest.

    Raises: ValueError when the seed is empty.
    """
    if not seed.strip():
        raise ValueError(
            "SEED is empty, it must be a text that nobody guesses, as in make private SEED=$(openssl rand -hex 8)"
        )
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", seed, re.ASCII)
    return seed if plain else hashlib.sha256(seed.encode()).hexdigest()[:16]


def make(seed: str, names: list[str], parent: Path, assignments: Path = release.ASSIGNMENTS) -> Path:
    """Write a private course, whole or not at all.

    Args:
        seed: any text. names: its sets. parent: the folder that gets the course.
    Returns: the course's folder.
    Raises: ValueError when the seed is empty or the course is there already; RuntimeError when nbgrader fails.
    """
    there = parent / folder_name(seed)
    if there.exists():
        raise ValueError(
            f"private/{there.name} is there already; remove it, with the grades in it, or take another SEED"
        )
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=parent, prefix=".unfinished-"))
    try:
        release.copy_course(unfinished, names, assignments)
        for name in names:
            path = unfinished / "source" / name / f"{name}.ipynb"
            notebook = nbformat.read(path, as_version=4)
            rewrite(notebook, name, seed)
            nbformat.write(notebook, path)
        release.generate(unfinished, names)
        unfinished.chmod(0o755)
        unfinished.rename(there)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return there


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", metavar="SEED", help="any text; who knows it knows the variants and the hidden tests")
    parser.add_argument("sets", nargs="*", metavar="SET", help="such as ps3; all when none")
    given = parser.parse_args()
    try:
        folder = make(given.seed, release.sets(given.sets), release.ASSIGNMENTS / "private")
    except ValueError as error:
        print(error, file=sys.stderr)  # one line, without the usage: what was wrong is the seed or a name
        sys.exit(2)
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"{folder.relative_to(release.ROOT)}: copy it to a place that is yours alone")


if __name__ == "__main__":
    main()
