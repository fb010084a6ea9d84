"""Breaks one technique at a time in a copy of the package, and sees that the unit tests and the chapter notice.

    python tests/notebooks/test_mutations.py [--only NN ...] [--part unit|nbval] [--fresh]

`mutations/CHAPTER/*.patch` are faults that real implementations have. The first lines of each say in words what is
wrong and which unit tests must fail. The long run, which is this file as a script, proves that all tests pass on a copy
of the package as it is, then that they fail on each broken copy, and writes `mutations/report.json` after every patch,
so that it can be stopped and begun again. With pytest only what is quick is tested: that patches apply, and that the
report is about them.

A cell that shows the package's source differs whenever the source does, right or wrong: those do not count.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "mutations"
REPORT = FOLDER / "report.json"
PACKAGE = Path("src/gptlite")
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
PATCHES = sorted(FOLDER.glob("*/*.patch"))
PARTS = {"unit": 1.0, "nbval": 0.8}  # the least share of the patches that each must notice
PER_CHAPTER = 3
TIMEOUT = 900  # seconds of one run; a fault that makes it endless is noticed too
IGNORED = "nbval-ignore-output"
WHERE = "import pathlib\n\nimport gptlite\n\npathlib.Path({!r}).write_text(gptlite.__file__)"


class Patch:
    """A planted fault: what it is called, in words, the unit tests that must fail, and the chapter."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.name = f"{path.parent.name}/{path.stem}"
        self.chapter = ROOT / "chapters" / f"{path.parent.name}.ipynb"
        head = dict(line.removeprefix("# ").split(": ", 1) for line in self.text.splitlines() if line.startswith("# "))
        self.trap, self.units = head["trap"], head["unit"].split()
        self.files = [line.removeprefix("+++ b/") for line in self.text.splitlines() if line.startswith("+++ b/")]

    def apply(self, folder: Path) -> None:
        """Applies it to the files below a folder. Raises: ValueError when they are not those that it was made for."""
        # a hook of git's sets variables that would lead it back into the repository
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = subprocess.run(command, cwd=folder, env=env, input=self.text, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{self.name} does not apply any more: {done.stderr.strip()}")


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def shows_source(cell: dict) -> bool:
    return "show_source(" in "".join(cell["source"])


def code_of(chapter: Path) -> str:
    """Hash of what a chapter runs and of the outputs that are compared."""
    parts = []
    for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            parts.append("".join(cell["source"]))
            if not shows_source(cell) and IGNORED not in cell["metadata"].get("tags", []):
                parts += [json.dumps(output, sort_keys=True) for output in cell["outputs"]]
    return digest(*parts)


def state_of(patch: Patch) -> dict[str, str]:
    """Hashes of what a result is about: when one of them changes, the result is old."""
    tests, source = (
        digest(*((ROOT / name).read_text(encoding="utf-8") for name in names)) for names in (patch.units, patch.files)
    )
    return {"patch": digest(patch.text), "chapter": code_of(patch.chapter), "tests": tests, "source": source}


def load_report() -> dict:
    return json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {"patches": {}, "bases": {}}


def shares(report: dict) -> dict[str, float]:
    """The share of the patches that each part notices, of those that it has tried."""
    tried = {part: [row[part] for row in report["patches"].values() if part in row] for part in PARTS}
    return {part: round(sum(found) / len(found), 4) for part, found in tried.items() if found}


# -- what is quick ----------------------------------------------------------------------------------------------------


def test_every_chapter_has_faults() -> None:
    counts = Counter(path.parent.name for path in PATCHES)
    assert set(counts) == {chapter.stem for chapter in CHAPTERS}
    assert {name: n for name, n in counts.items() if n < PER_CHAPTER} == {}


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: f"{path.parent.name[:2]}-{path.stem}")
def test_a_patch_breaks_the_present_source(path: Path, tmp_path: Path) -> None:
    patch = Patch(path)
    assert patch.trap and patch.units and patch.files
    assert all((ROOT / name).is_relative_to(ROOT / "tests/unit") and (ROOT / name).is_file() for name in patch.units)
    for name in patch.files:
        assert Path(name).is_relative_to(PACKAGE)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    patch.apply(tmp_path)
    for name in patch.files:
        before, after = ((folder / name).read_text(encoding="utf-8") for folder in (ROOT, tmp_path))
        assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after)), "only comments or blanks change"


def test_the_report_is_about_these_patches() -> None:
    report, patches = load_report(), [Patch(path) for path in PATCHES]
    found = {name: row["patch"] for name, row in report["patches"].items()}
    assert found == {patch.name: digest(patch.text) for patch in patches}, "make notebooks-mutation tries them"
    assert all(part in row for row in report["patches"].values() for part in PARTS)
    assert report["shares"] == shares(report)
    for part, least in PARTS.items():
        missed = sorted(name for name, row in report["patches"].items() if not row[part])
        assert report["shares"][part] >= least, f"{part} notices {report['shares'][part]:.0%}, and not {missed}"
    old = {
        patch.chapter.stem for patch in patches if report["patches"][patch.name]["chapter"] != code_of(patch.chapter)
    }
    if old:
        warnings.warn(f"changed since their faults were tried: {', '.join(sorted(old))}", stacklevel=1)


# -- the long run -----------------------------------------------------------------------------------------------------


def copy_of(patch: Patch | None, folder: Path) -> Path:
    """A copy of the package in a folder, broken by a patch or whole. Returns: what to import it from."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    if patch is not None:
        patch.apply(folder)
    return folder / "src"


def check_imported(marker: Path, source: Path, what: str) -> None:
    """Whoever tested another package than the copy proved nothing. Raises: SystemExit."""
    found = marker.read_text(encoding="utf-8") if marker.exists() else "nothing"
    if Path(found) != source / "gptlite" / "__init__.py":
        raise SystemExit(f"{what} imported {found}, not the copy in {source}")


def fails_unit(source: Path, files: list[str], run_tests: Callable[[str, list[str]], None]) -> bool:
    """Whether a unit test of these files fails on the copy."""
    marker = source.parent / "imported"

    def run() -> None:
        try:
            run_tests(str(source), [str(ROOT / name) for name in files])
        finally:
            marker.write_text(str(sys.modules["gptlite"].__file__), encoding="utf-8")

    # a fork of this process, which has imported torch and nothing of the package
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(TIMEOUT)
    if child.exitcode is None:
        child.kill()
        child.join()
        return True
    check_imported(marker, source, ", ".join(files))
    if child.exitcode not in (0, 1):
        raise SystemExit(f"{', '.join(files)}: pytest ended with {child.exitcode}, no test failed or passed")
    return child.exitcode == 1


def fails_nbval(source: Path, chapter: Path, options: list[str]) -> str | None:
    """The id of the first cell of a chapter that nbval complains about on the copy; None when it passes."""
    folder = source.parent
    marker, report, copy = folder / "imported", folder / "report.xml", folder / chapter.name
    content = json.loads(chapter.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "code" and shows_source(cell):
            cell["metadata"].setdefault("tags", []).append(IGNORED)
    first = {"cell_type": "code", "id": "where-from", "metadata": {}, "execution_count": None, "outputs": []}
    content["cells"].insert(0, first | {"source": WHERE.format(str(marker))})
    copy.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options]
    command += [f"--junitxml={report}", str(copy)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(source)}, timeout=TIMEOUT, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return "endless"
    check_imported(marker, source, chapter.name)
    if done.returncode == 0:
        return None
    bad = [case for case in ET.parse(report).iter("testcase") if case.find("failure") is not None]
    if done.returncode != 1 or not bad:
        raise SystemExit(f"{chapter.name}: {done.stdout.decode()[-2000:]}")
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    return code[int(bad[0].get("name", "").rpartition(" ")[2])]["id"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NN", help="chapters, by number")
    parser.add_argument("--part", choices=PARTS, help="one of the two alone")
    parser.add_argument("--fresh", action="store_true", help="try again what was tried before")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    runner = runpy.run_path(str(ROOT / "tests" / "mutation" / "run.py"))
    runner["torch"].set_num_threads(1)
    options = runpy.run_path(str(ROOT / "tools" / "run_tests.py"))["NBVAL"]
    package = digest(*(path.read_text(encoding="utf-8") for path in sorted((ROOT / PACKAGE).rglob("*.py"))))
    patches = [Patch(path) for path in PATCHES]
    names = {patch.name for patch in patches}
    report = load_report()
    report["patches"] = {name: row for name, row in sorted(report["patches"].items()) if name in names}
    if arguments.fresh:
        report["bases"] = {}

    def attempt(part: str, patch: Patch, planted: bool) -> str | bool | None:
        with tempfile.TemporaryDirectory() as folder:
            source = copy_of(patch if planted else None, Path(folder).resolve())
            if part == "unit":
                return fails_unit(source, patch.units, runner["run_tests"])
            return fails_nbval(source, patch.chapter, options)

    def save() -> None:
        report["patches"], report["shares"] = dict(sorted(report["patches"].items())), shares(report)
        REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    chosen = [patch for patch in patches if not arguments.only or patch.path.parent.name[:2] in arguments.only]
    for part in [arguments.part] if arguments.part else PARTS:
        for i, patch in enumerate(chosen, start=1):
            state, row = state_of(patch), report["patches"].get(patch.name, {})
            row = row if all(row.get(name) == value for name, value in state.items()) else dict(state)
            if part in row and not arguments.fresh:
                continue
            # what fails on the package as it is proves nothing
            what, base = (
                (" ".join(patch.units), digest(state["tests"], package))
                if part == "unit"
                else (patch.chapter.name, digest(state["chapter"], package))
            )
            if report["bases"].get(what) != base:
                if found := attempt(part, patch, planted=False):
                    raise SystemExit(f"{what} fails on the package as it is: {found}")
                report["bases"][what] = base
            found = attempt(part, patch, planted=True)
            report["patches"][patch.name] = row | {part: bool(found)} | ({"cell": found} if part == "nbval" else {})
            print(f"{part} {i}/{len(chosen)}  {'noticed' if found else 'MISSED '}  {patch.name}  {found}", flush=True)
            save()
    save()
    for part, share in report["shares"].items():
        tried = sum(part in row for row in report["patches"].values())
        print(f"{part}: {share:.1%} noticed, of {tried} of {len(patches)} faults")
    if any(share < PARTS[part] for part, share in report["shares"].items()):
        raise SystemExit("too many go unnoticed")


if __name__ == "__main__":
    main()
