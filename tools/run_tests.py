"""Run the parts of the tests and print the minutes of each: `python tools/run_tests.py [PART ...]`.

A part that fails does not stop the next ones. The last line has the form of pytest's own.
A part runs in as many processes as there are cores, up to four; what measures time follows with the machine to itself.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-q"]
NBVAL = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=300"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the processes have a core each, PyTorch's threads would wait for one another
SIDE_BY_SIDE = ["-n", str(min(4, os.cpu_count() or 1)), "-m", "not alone"]
BY_TEST, BY_FILE = [*SIDE_BY_SIDE, "--dist=worksteal"], [*SIDE_BY_SIDE, "--dist=loadfile"]  # a notebook has one kernel
ALONE = ["-m", "alone"]
PARTS = {
    "lint": [[BIN / "ruff", "check", "."], [BIN / "ruff", "format", "--check", "."], [BIN / "mypy"]],
    "unit": [[*PYTEST, *BY_TEST, "tests/unit"], [*PYTEST, *ALONE, "tests/unit"]],
    "oracles": [[*PYTEST, *BY_TEST, "tests/oracles"]],
    "bad_input": [[*PYTEST, *BY_TEST, "tests/bad_input"]],
    "notebooks": [[*PYTEST, *BY_FILE, *NBVAL, "chapters", "tests/notebooks"]],
    "classroom": [[*PYTEST, "tests/classroom"]],  # grades two sets at once by itself
    "book": [["make", "book"]],
    "site": [[*PYTEST, *BY_TEST, "tests/site"], [*PYTEST, *ALONE, "tests/site"]],
}
WHOLE = list(PARTS)
PARTS["brief"] = [[*PYTEST, *BY_TEST, "--brief", "tests/unit", "tests/bad_input"]]  # of two of them, what is quick


def run(command: list, report: Path) -> tuple[bool, dict[str, int]]:
    """Run one command. Returns: whether it passed, and the counts of its tests by outcome."""
    is_pytest = command[: len(PYTEST)] == PYTEST
    settings = {**os.environ, **(ONE_THREAD if "-n" in command else {})}
    words = [*command, f"--junitxml={report}"] if is_pytest else command
    passed = subprocess.run(words, env=settings).returncode == 0
    if not is_pytest:
        return passed, {"failed": int(not passed)}
    if not report.exists():
        return False, {"error": 1}
    suite = ET.parse(report).getroot().find("testsuite")
    failed, errors, skipped = (int(suite.get(name)) for name in ("failures", "errors", "skipped"))
    report.unlink()
    return passed, {
        "failed": failed,
        "passed": int(suite.get("tests")) - failed - errors - skipped,
        "skipped": skipped,
        "error": errors,
    }


def main() -> int:
    """The command line. Returns: 0 when every part passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = f"one or more of {', '.join(PARTS)}; all but brief when none"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    chosen = parser.parse_args().parts or WHOLE
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}, there are {', '.join(PARTS)}")
    total, rows, began = {"failed": 0, "passed": 0, "skipped": 0, "error": 0}, [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            print(f"\n--- {part} ---", flush=True)
            start, good = time.perf_counter(), True
            for command in PARTS[part]:
                passed, counts = run(command, Path(folder) / "report.xml")
                good = good and passed
                for outcome, count in counts.items():
                    total[outcome] += count
            rows.append((part, (time.perf_counter() - start) / 60, good))
    print("\npart         minutes")
    for part, minutes, good in rows:
        print(f"{part:<12} {minutes:7.1f}  {'passed' if good else 'FAILED'}")
    seconds = time.perf_counter() - began
    counts = ", ".join(f"{count} {outcome}" for outcome, count in total.items() if count or outcome == "passed")
    print(f"{f' {counts} in {seconds:.2f}s ':=^80}")
    return int(not all(good for _, _, good in rows))


if __name__ == "__main__":
    sys.exit(main())
