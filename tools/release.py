"""Write the students' versions of the problem sets into assignments/release: `python tools/release.py [SET ...]`.

nbgrader makes them from assignments/source, in a temporary copy of the course, so that no gradebook is touched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSIGNMENTS = ROOT / "assignments"
CONFIG = ("nbgrader_config.py", "isolation.py")


def sets(chosen: list[str] | None = None, assignments: Path = ASSIGNMENTS) -> list[str]:
    """The names of the problem sets.

    Args:
        chosen: some of them; all when empty.
    Returns: their names, in order.
    Raises: ValueError when one does not exist.
    """
    there = sorted(path.stem for path in (assignments / "source").glob("*/*.ipynb") if path.stem == path.parent.name)
    if unknown := sorted(set(chosen or []) - set(there)):
        raise ValueError(f"there is no problem set {unknown[0]!r}, there are {', '.join(there) or 'none'}")
    return [name for name in there if not chosen or name in chosen]


def copy_course(folder: Path, names: list[str], assignments: Path = ASSIGNMENTS) -> None:
    """Copy the configuration and some sets' sources into a folder that has no course yet."""
    for name in CONFIG:
        shutil.copyfile(assignments / name, folder / name)
    for name in names:
        (folder / "source" / name).mkdir(parents=True)
        shutil.copyfile(assignments / "source" / name / f"{name}.ipynb", folder / "source" / name / f"{name}.ipynb")


def generate(folder: Path, names: list[str]) -> None:
    """Let nbgrader write release/ in a course folder. Raises: RuntimeError with what nbgrader says when it fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for name in names:
        command = [sys.executable, "-m", "nbgrader", "generate_assignment", name, "--force"]
        done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"nbgrader cannot make the release of {name}:\n{done.stderr.rstrip()}")


def write(names: list[str], folder: Path, assignments: Path = ASSIGNMENTS) -> list[Path]:
    """Write the releases of some sets below a folder. Returns: their paths."""
    written = []
    with tempfile.TemporaryDirectory() as course:
        copy_course(Path(course), names, assignments)
        generate(Path(course), names)
        for name in names:
            path = folder / name / f"{name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(course) / "release" / name / f"{name}.ipynb", path)
            written.append(path)
    return written


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help="such as ps3; all when none")
    try:
        for path in write(sets(parser.parse_args().sets), ASSIGNMENTS / "release"):
            print(path.relative_to(ROOT))
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
