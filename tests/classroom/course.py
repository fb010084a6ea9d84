"""Help for the classroom tests: a set as its cells, students who hand it in, and nbgrader's own commands."""

import ast
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook

ROOT = Path(__file__).resolve().parents[2]
ASSIGNMENTS = ROOT / "assignments"
CONFIG = ("nbgrader_config.py", "isolation.py")
LOOP_LIMIT = 4  # seconds for the tests of the task that never ends; the other cells have the course's limit
ENDLESS, CRASH, KILL = "endless loop", "exception", "killed kernel"
BREAKING = {
    ENDLESS: "def {name}(*args, **kwargs):\n    while True:\n        pass\n",
    CRASH: "raise RuntimeError('this cell fails')\n\n\ndef {name}(*args, **kwargs):\n    return None\n",
    KILL: "import os\n\n\ndef {name}(*args, **kwargs):\n    os._exit(1)\n",
}


def load(path: Path) -> nbformat.NotebookNode:
    """A notebook."""
    return nbformat.read(path, as_version=4)


def mark(cell) -> dict:
    """What nbgrader has to know of a cell; empty for one that is not its business."""
    return cell.metadata.get("nbgrader", {})


class ProblemSet:
    """A set as its author keeps it.

    Args:
        path: of the source notebook, psN/psN.ipynb.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.notebook = path, path.stem, load(path)
        self.cells = self.notebook.cells

    @property
    def points(self) -> dict[str, float]:
        """The points of each graded cell, by its grade_id."""
        return {mark(cell)["grade_id"]: mark(cell)["points"] for cell in self.cells if mark(cell).get("grade")}

    @property
    def tests(self) -> list[str]:
        """The grade_ids of the cells that nbgrader grades by itself."""
        return [mark(cell)["grade_id"] for cell in self.cells if is_test(cell)]

    @property
    def solutions(self) -> dict[str, str]:
        """The code of each cell that a student fills in, by its grade_id."""
        return {mark(cell)["grade_id"]: cell.source for cell in self.cells if is_filled_in(cell)}

    @property
    def tasks(self) -> dict[str, list[str]]:
        """The tests of each task that has some; a test belongs to the task whose name its grade_id begins with."""
        found: dict[str, list[str]] = {}
        for test in self.tests:
            owners = [name for name in self.solutions if test.startswith(f"{name}-")]
            found.setdefault(max(owners, key=len, default=""), []).append(test)
        return found

    @property
    def measurements(self) -> list[str]:
        """The cells that a student fills in and no test reads; what is said of them is graded by hand."""
        return [name for name in self.solutions if name not in self.tasks]

    @property
    def variant_cell(self):
        """The cell that draws the set's numbers."""
        return next(cell for cell in self.cells if "variant" in cell.metadata.get("tags", []))

    @property
    def prose(self) -> str:
        """All Markdown of the set."""
        return "\n\n".join(cell.source for cell in self.cells if cell.cell_type == "markdown")

    def wrong(self, folder: Path | None = None) -> dict[str, dict]:
        """The bank of typical wrong answers to this set."""
        path = (folder or Path(__file__).parent / "wrong") / f"{self.name}.py"
        spec = importlib.util.spec_from_file_location(f"wrong_{self.name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.WRONG

    def broken(self) -> dict[str, str]:
        """Which task of a broken submission never ends, which fails, and which kills the kernel."""
        code = [name for name in self.tasks if re.search(r"^(def|class) ", self.solutions[name], re.M)]
        code.sort(key=lambda name: len(self.tasks[name]))  # each test of the endless one waits for its limit
        return dict(zip(BREAKING, code))


def is_test(cell) -> bool:
    """Whether nbgrader grades the cell by running it."""
    return cell.cell_type == "code" and mark(cell).get("grade", False) and not mark(cell).get("solution", False)


def is_filled_in(cell) -> bool:
    """Whether it is code that a student writes."""
    return cell.cell_type == "code" and mark(cell).get("solution", False) and not mark(cell).get("grade", False)


def name_of(source: str) -> str:
    """The last function or class that a solution defines at its top."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return nodes[-1].name


def handed_in(release, answers: dict[str, str], drop: tuple[str, ...] = ()):
    """A student's copy of a release: answers in the cells that their grade_ids name, the cells in `drop` deleted."""
    notebook = copy.deepcopy(release)
    for cell in notebook.cells:
        if mark(cell).get("solution") and mark(cell)["grade_id"] in answers:
            cell.source = answers[mark(cell)["grade_id"]]
    notebook.cells = [cell for cell in notebook.cells if mark(cell).get("grade_id") not in drop]
    return notebook


def packs(wrong: dict[str, dict]) -> list[list[str]]:
    """Wrong answers in as few submissions as possible: one of each task in each."""
    found: list[list[str]] = []
    for name, answer in wrong.items():
        for pack in found:
            if all(wrong[other]["task"] != answer["task"] for other in pack):
                pack.append(name)
                break
        else:
            found.append([name])
    return found


class Course:
    """A course folder, in which nbgrader's commands run.

    Args:
        folder: with nbgrader_config.py and source/.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def new(cls, folder: Path, *sources: Path) -> "Course":
        """A course with this project's configuration and copies of these notebooks as its sets."""
        folder.mkdir(parents=True)
        for name in CONFIG:
            (folder / name).write_text((ASSIGNMENTS / name).read_text(encoding="utf-8"), encoding="utf-8")
        for source in sources:
            there = folder / "source" / source.stem / source.name
            there.parent.mkdir(parents=True)
            there.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        return cls(folder)

    def nbgrader(self, *arguments: str) -> str:
        """Run one of nbgrader's commands. Returns: what it printed. Raises: AssertionError when it fails."""
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *arguments], cwd=self.folder, env=environment,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"nbgrader {' '.join(arguments)}\n{done.stdout}"
        return done.stdout

    def release(self, name: str):
        """The student's version of a set."""
        return load(self.folder / "release" / name / f"{name}.ipynb")

    def submit(self, student: str, name: str, notebook) -> None:
        """Put a submission where nbgrader collects it."""
        path = self.folder / "submitted" / student / name / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)

    def scores(self, name: str) -> dict[str, dict[str, float | None]]:
        """What the gradebook holds: by student and grade_id, the points that were given without a grader."""
        found: dict[str, dict[str, float | None]] = {}
        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as gradebook:
            for submission in gradebook.assignment_submissions(name):
                (notebook,) = submission.notebooks
                found[submission.student.id] = {grade.name: grade.auto_score for grade in notebook.grades}
        return found

    def feedback(self, name: str) -> dict[str, str]:
        """The feedback of each student, HTML."""
        found = (self.folder / "feedback").glob(f"*/{name}/{name}.html")
        return {path.parts[-3]: path.read_text(encoding="utf-8") for path in found}


@dataclass
class Graded:
    """A set that went through nbgrader, with all its students."""

    problem_set: ProblemSet
    release: nbformat.NotebookNode
    wrong: dict[str, dict]
    scores: dict[str, dict[str, float | None]]
    feedback: dict[str, str]
    student_of: dict[str, str] = field(default_factory=dict)  # by the name of a wrong answer
    private: dict[str, float | None] = field(default_factory=dict)  # the solution's scores in a private variant


def grade(problem_set: ProblemSet, wrong: dict[str, dict], folder: Path) -> Graded:
    """Send a set through nbgrader: the solution, the untouched release, wrong answers, and a submission that breaks."""
    name, solutions = problem_set.name, problem_set.solutions
    course = Course.new(folder, problem_set.path)
    course.nbgrader("generate_assignment", name)
    release = course.release(name)
    course.submit("solution", name, handed_in(release, solutions))
    course.submit("untouched", name, release)
    tested = {task: code for task, code in solutions.items() if task not in problem_set.measurements}
    student_of = {}
    for number, pack in enumerate(packs(wrong), start=1):
        answers = tested | {wrong[each]["task"]: wrong[each]["source"] for each in pack}
        course.submit(f"wrong{number}", name, handed_in(release, answers))
        student_of |= dict.fromkeys(pack, f"wrong{number}")
    course.nbgrader("autograde", name)

    broken = problem_set.broken()
    answers = {task: BREAKING[how].format(name=name_of(solutions[task])) for how, task in broken.items()}
    course.submit("broken", name, handed_in(release, tested | answers))
    endless = problem_set.tasks[broken[ENDLESS]] if ENDLESS in broken else []
    config = course.folder / CONFIG[0]
    limits = f"lambda cell: {LOOP_LIMIT} if cell.metadata.get('nbgrader', {{}}).get('grade_id') in {endless} else 60"
    config.write_text(f"{config.read_text(encoding='utf-8')}\nc.Execute.timeout_func = {limits}\n", encoding="utf-8")
    course.nbgrader("autograde", name, "--student=broken")

    course.nbgrader("generate_feedback", name)
    return Graded(problem_set, release, wrong, course.scores(name), course.feedback(name), student_of)


def sources() -> list[Path]:
    """The source notebooks of all sets."""
    return sorted((ASSIGNMENTS / "source").glob("ps*/ps*.ipynb"))


def text_of(notebook) -> str:
    """A notebook as it is stored."""
    return json.dumps(notebook, ensure_ascii=False)
