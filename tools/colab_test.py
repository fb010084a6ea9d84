"""Run the chapters' editions for Colab in an environment like Colab's: `python tools/colab_test.py [CHAPTER ...]`.

The environment holds what tests/colab/runtime.json says that a Colab runtime ships, and nothing else. The set-up cell
of an edition runs as it stands: the kernel believes that it is in Colab, and git takes the repository's address for a
copy of the last commit, which is what gets installed. No package of Colab's may change.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import colab  # noqa: E402

RUNTIME = ROOT / "tests" / "colab" / "runtime.json"
FOLDER = ROOT / "_build" / "colab"
PRETEND = """import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

sys.modules["google.colab"] = ModuleType("google.colab")
sys.modules["google.colab"].__spec__ = ModuleSpec("google.colab", None)  # for who asks whether it is there
"""


def normal(name: str) -> str:
    """Returns: a package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(runtime: dict) -> list[str]:
    """Returns: the runtime's packages at its versions; the mark of the CUDA build is left out, which no index has."""
    return [f"{name}=={version.partition('+')[0]}" for name, version in runtime["packages"].items()]


def python_of(version: str) -> str:
    """Returns: the path of an interpreter of that version. Raises: RuntimeError that names it when there is none."""
    for name in (os.environ.get("COLAB_PYTHON", ""), f"python{version}"):
        path = shutil.which(name) if name else None
        command = [path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        if path and subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return path
    raise RuntimeError(
        f"Colab has Python {version}, which is not here; name one: COLAB_PYTHON=/path/to/python{version}"
    )


def environment(folder: Path, runtime: dict) -> Path:
    """Make the environment, unless it is there and for these very packages. Returns: its interpreter."""
    python, stamp = folder / "bin" / "python", folder / "runtime.json"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == RUNTIME.read_text(encoding="utf-8"):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python_of(runtime["python"]), "-m", "venv", folder], check=True)
    wanted = requirements(runtime)
    torch = next(each for each in wanted if each.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # a list that is whole needs no dependencies; torch brings the CUDA libraries of its own build
    own = ("torch==", "triton==")
    subprocess.run([*pip, "--no-deps", *(each for each in wanted if not each.startswith(own))], check=True)
    subprocess.run([*pip, torch, *(each for each in wanted if each.startswith("setuptools=="))], check=True)
    shutil.copyfile(RUNTIME, stamp)
    return python


def versions(python: Path) -> dict[str, str]:
    """Returns: what is installed, by name."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return {normal(name): version for name, version in json.loads(out).items()}


def last_commit(folder: Path) -> Path:
    """Write the files of the last commit as a repository of one commit; a clone may be too shallow to clone from.

    Returns: the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    git = ["git", "-C", folder, "-c", "user.name=colab-test", "-c", "user.email=colab-test@localhost"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch", "main"], check=True)
    subprocess.run([*git, "add", "--all", "--force"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "The last commit"], check=True)
    return folder


def kernel(folder: Path, python: Path, repository: str, clone: Path) -> None:
    """Write a kernel named `colab` below a folder of Jupyter's, and point Jupyter to it.

    Args:
        folder: Jupyter's. python: the kernel's interpreter.
        repository: the address that the set-up cell installs from. clone: what git takes in its place.
    """
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "00-colab.py").write_text(PRETEND, encoding="utf-8")
    spec = {
        "display_name": "Colab",
        "language": "python",
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "env": {
            "IPYTHONDIR": str(folder / "ipython"),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{clone.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": repository,
        },
    }
    (folder / "kernels" / "colab").mkdir(parents=True, exist_ok=True)
    (folder / "kernels" / "colab" / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    os.environ["JUPYTER_PATH"] = str(folder)


def run(path: Path, timeout: int = 900) -> list[str]:
    """Run one edition. Returns: what is wrong with it, a line each."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=timeout, kernel_name="colab", resources={"metadata": {"path": FOLDER}})
    try:
        client.execute()
    except CellExecutionError as error:
        return [str(error).strip().splitlines()[-1]]
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    kinds = {"an explorer": "gptlite-explorer", "a lab": "gptlite-lab", "a live lab": "widget-view+json"}
    return [f"no output has {kind}" for kind, word in kinds.items() if word not in shown]


def changed(runtime: dict, after: dict[str, str]) -> list[str]:
    """Returns: the packages that are no longer as Colab ships them, a line each."""
    shipped = dict(each.split("==") for each in requirements(runtime))
    return [
        f"{name} {version} became {after.get(normal(name), 'nothing')}: the set-up cell changes what Colab ships"
        for name, version in shipped.items()
        if after.get(normal(name)) != version
    ]


def main() -> int:
    """The command line. Returns: 0 when every edition ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", help="parts of names, such as 01 or kv_cache; all chapters when none")
    chosen = parser.parse_args().chapters
    pending = subprocess.run(
        ["git", "status", "--porcelain", "--", "src", "chapters", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if pending:
        print("Not committed, and so not seen by the set-up cell:", pending.rstrip(), sep="\n")
    runtime = json.loads(RUNTIME.read_text(encoding="utf-8"))
    try:
        python = environment(ROOT / "_build" / "colab-env", runtime)
        editions = colab.write(FOLDER)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    clone = last_commit(ROOT / "_build" / "colab-clone")
    kernel(ROOT / "_build" / "colab-jupyter", python, colab.load_book().repository, clone)
    wrong = False
    for path in editions:
        if chosen and not any(part in path.stem for part in chosen):
            continue
        start = time.perf_counter()
        faults = [*run(path), *changed(runtime, versions(python))]
        print(f"{path.stem}: {'; '.join(faults) or 'passed'} ({time.perf_counter() - start:.0f} s)", flush=True)
        wrong = wrong or bool(faults)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
