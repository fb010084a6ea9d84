"""Does a page of the book take the same time to build when there are more chapters?

    python benchmarks/build.py --out benchmarks/results/build.json

The book is built with its first 3, 9 and 18 chapters, each in a copy of what git has, interleaved. Pages of the book
that are no chapters, and those of the package, are built each time. Links to a chapter that was left out are warnings.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from gptlite.hardware import machine

ROOT = Path(__file__).resolve().parents[1]


def copy_with(n_chapters: int, folder: Path) -> None:
    """Write the book with its first chapters into `folder`."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)  # one of them is a link to a folder
    toc = yaml.safe_load((folder / "_toc.yml").read_text(encoding="utf-8"))
    left = n_chapters
    for part in toc["parts"]:
        chapters = [page for page in part["chapters"] if page["file"].startswith("chapters/")]
        for page in chapters[left:]:
            part["chapters"].remove(page)
            (folder / f"{page['file']}.ipynb").unlink()
        left = max(left - len(chapters), 0)
    if left:
        raise SystemExit(f"the book has {n_chapters - left} chapters, {n_chapters} were asked for")
    toc["parts"] = [part for part in toc["parts"] if part["chapters"]]
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False), encoding="utf-8")


def build_seconds(folder: Path) -> tuple[float, int]:
    """Build the book in `folder` from nothing. Returns: seconds, and the number of its HTML files."""
    shutil.rmtree(folder / "_build", ignore_errors=True)
    start = time.perf_counter()
    command = [Path(sys.executable).parent / "jupyter-book", "build", ".", "--quiet"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"the build ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds, len(list((folder / "_build" / "html").rglob("*.html")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chapters", type=int, nargs="+", default=[3, 9, 18])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; a table in Markdown goes to the standard output anyway")
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {n: [] for n in args.chapters}
    pages = {}
    with tempfile.TemporaryDirectory() as folder:
        for n in args.chapters:
            copy_with(n, Path(folder) / str(n))
        for _ in range(args.rounds):
            for n in args.chapters:
                took, pages[n] = build_seconds(Path(folder) / str(n))
                seconds[n].append(took)
    points: list[dict[str, Any]] = [
        {"chapters": n, "pages": pages[n], "samples": seconds[n], "seconds": median(seconds[n])} for n in args.chapters
    ]
    result = {"benchmark": "build", "machine": machine("cpu"), "points": points}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| chapters | pages | seconds | seconds per page |\n|---|---|---|---|")
    for p in points:
        print(f"| {p['chapters']} | {p['pages']} | {p['seconds']:.1f} | {p['seconds'] / p['pages']:.2f} |")


if __name__ == "__main__":
    main()
