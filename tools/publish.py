"""Copy the built book to where it is served: `python tools/publish.py FOLDER` or `HOST:FOLDER`, which rsync reaches.

What the last publication left there and the book no longer has is removed; a folder that holds anything else is
refused.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "_build" / "html"
NEEDED = ("index.html", "404.html", "sitemap.xml", "search.html", "searchindex.js", "_static/vega.bundle.js")
SOURCES = ("_config.yml", "_toc.yml", "book", "chapters", "CHANGELOG.md")
HOST = re.compile(r"(?:[\w.-]+@)?[\w.-]{2,}:.+")  # two letters at least: a single one is a drive's


def unfit(built: Path = BUILT, root: Path = ROOT) -> str:
    """Returns: why what is built cannot be published; empty when it can."""
    if missing := [name for name in NEEDED if not (built / name).exists()]:
        return f"the book is not built, {missing[0]} is missing: run `make book` first"
    files = [path for name in SOURCES for path in [root / name, *(root / name).rglob("*")] if path.is_file()]
    pages = [path for path in files if path.suffix in (".ipynb", ".md", ".yml") and "api" not in path.parts]
    newest = max(pages, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > (built / "sitemap.xml").stat().st_mtime:
        return f"the book is older than {newest.relative_to(root)}: run `make book` again"
    return ""


def to_folder(built: Path, folder: Path) -> int:
    """Copy the book into a folder of this machine.

    Returns: the number of files.
    Raises: ValueError when the folder holds something that no publication left there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, it must be a folder")
    if folder.resolve() == built.resolve() or built.resolve() in folder.resolve().parents:
        raise ValueError(f"{folder} is where the book is built, it must be another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "sitemap.xml").exists():
        raise ValueError(f"{folder} holds something else than an earlier publication: empty it, or name another folder")
    files = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built / name, folder / name)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(folder) not in set(files):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return len(files)


def to_host(built: Path, target: str) -> None:
    """Copy the book with rsync. Raises: ValueError when there is no rsync, or when it fails."""
    if not shutil.which("rsync"):
        raise ValueError(f"{target} needs rsync, which is not installed")
    done = subprocess.run(["rsync", "--archive", "--delete", "--compress", "--", f"{built}/", f"{target.rstrip('/')}/"])
    if done.returncode:
        raise ValueError(f"rsync to {target} ended with status {done.returncode}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", metavar="FOLDER or HOST:FOLDER")
    target = parser.parse_args().target
    if reason := unfit():
        sys.exit(reason)
    try:
        if HOST.fullmatch(target):
            to_host(BUILT, target)
            print(f"The book is in {target}")
        else:
            print(f"{to_folder(BUILT, Path(target))} files are in {target}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
