"""Every problem set goes through nbgrader: solutions, wrong answers and what breaks get the points they deserve."""

import re
import sys
from pathlib import Path

import course
import pytest
import yaml
from course import ASSIGNMENTS, ROOT, Graded, ProblemSet, mark

sys.path.insert(0, str(ROOT / "tools"))

import private
import release

SETS = [path.stem for path in course.sources()]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
PARTS = [[entry["file"] for entry in part["chapters"]] for part in TOC["parts"] if part.get("numbered")]
VARIANT_LINE = "VARIANT = 0  # the variant of this set; numbers and some rules below follow from it"
HIDDEN_LINE = "HIDDEN = 0  # the hidden tests draw their inputs from this seed"
SET_UP = """import sys

if "google.colab" in sys.modules:
    %pip install --quiet "gptlite[lab] @ git+https://github.com/{repository}"

from gptlite.notebook.helpers import setup

device = setup()"""

each_set = pytest.mark.parametrize("name", SETS)


def problem_set(name: str) -> ProblemSet:
    return ProblemSet(ASSIGNMENTS / "source" / name / f"{name}.ipynb")


def grade(name: str, folder: Path) -> Graded:
    """Grade a set, and its solution once more in a private variant."""
    there = problem_set(name)
    graded = course.grade(there, there.wrong(), folder / name)
    variant = course.Course(private.make("a seed of the tests", [name], folder / f"{name}-private"))
    solutions = ProblemSet(variant.folder / "source" / name / f"{name}.ipynb").solutions
    variant.submit("solution", name, course.handed_in(variant.release(name), solutions))
    variant.nbgrader("autograde", name)
    graded.private = variant.scores(name)["solution"]
    return graded


def points_of(graded: Graded, student: str) -> dict[str, float | None]:
    """What a student got for the cells that nbgrader grades by itself."""
    return {test: graded.scores[student][test] for test in graded.problem_set.tests}


def full_marks(graded: Graded, but: list[str] = ()) -> dict[str, float]:
    """Full points for every test, and none for those in `but`."""
    points = graded.problem_set.points
    return {test: 0 if test in but else points[test] for test in graded.problem_set.tests}


def test_there_is_a_set_for_every_part() -> None:
    assert [f"ps{number}" for number in range(1, len(PARTS) + 1)] == SETS


# What the students get


@each_set
def test_the_solution_gets_full_marks(graded: Graded) -> None:
    assert points_of(graded, "solution") == full_marks(graded)


@each_set
def test_the_solution_gets_full_marks_in_a_private_variant(graded: Graded) -> None:
    assert {test: graded.private[test] for test in graded.problem_set.tests} == full_marks(graded)


@each_set
def test_the_untouched_release_gets_nothing(graded: Graded) -> None:
    assert set(points_of(graded, "untouched").values()) == {0}


@each_set
def test_a_wrong_answer_loses_its_points_and_no_others(graded: Graded) -> None:
    wrong, there = graded.wrong, graded.problem_set
    faults = {}
    for student in sorted(set(graded.student_of.values())):
        pack = [each for each, packed in graded.student_of.items() if packed == student]
        expected = full_marks(graded, [test for each in pack for test in wrong[each]["loses"]])
        got = points_of(graded, student)
        for each in pack:
            tests = there.tasks[wrong[each]["task"]]
            if odd := {test: got[test] for test in tests if got[test] != expected[test]}:
                faults[each] = odd
        own = {test for each in pack for test in there.tasks[wrong[each]["task"]]}
        if odd := {test: got[test] for test in got if test not in own and got[test] != expected[test]}:
            faults[f"the tasks beside {pack}"] = odd
    assert faults == {}


@each_set
def test_what_breaks_costs_the_tests_of_its_task_alone(graded: Graded) -> None:
    broken = graded.problem_set.broken()
    assert set(broken) == set(course.BREAKING), "a set needs three code tasks with tests"
    lost = [test for task in broken.values() for test in graded.problem_set.tasks[task]]
    assert points_of(graded, "broken") == full_marks(graded, lost)


@each_set
def test_everyone_gets_feedback(graded: Graded) -> None:
    assert (
        set(graded.feedback) == set(graded.scores) == {"solution", "untouched", "broken", *graded.student_of.values()}
    )
    for student, page in graded.feedback.items():
        assert "</html>" in page, student
        for test in graded.problem_set.tests:
            assert test in page, f"{student}: nothing about {test}"


@each_set
def test_what_waits_for_a_grader_is_what_the_student_wrote(graded: Graded) -> None:
    by_hand = set(graded.problem_set.points) - set(graded.problem_set.tests)
    assert by_hand
    assert {graded.scores["untouched"][name] for name in by_hand} == {0}
    assert {graded.scores["solution"][name] for name in by_hand} <= {None, 0}


# The bank of wrong answers


@each_set
def test_the_wrong_answers_are_worth_their_place(name: str) -> None:
    there, wrong = problem_set(name), problem_set(name).wrong()
    assert len(wrong) >= 6
    assert len({answer["task"] for answer in wrong.values()}) >= 3
    for mistake, answer in wrong.items():
        assert set(answer) == {"task", "source", "loses"}, mistake
        assert answer["loses"], mistake
        assert set(answer["loses"]) <= set(there.tasks[answer["task"]]), mistake
    hidden_only = [
        mistake
        for mistake, answer in wrong.items()
        if all(test.endswith("-public") is False for test in answer["loses"])
    ]
    assert hidden_only, "no wrong answer passes the public tests of its task"


# What is released


@each_set
def test_the_release_holds_no_solution_and_no_hidden_test(name: str) -> None:
    there = problem_set(name)
    stored = course.load(ASSIGNMENTS / "release" / name / f"{name}.ipynb")
    text = course.text_of(stored)
    for word in ("BEGIN SOLUTION", "END SOLUTION", "HIDDEN TESTS", "HIDDEN ="):
        assert word not in text, word
    released = {cell.id: cell.source for cell in stored.cells}
    for cell in there.cells:
        hidden = "HIDDEN TESTS" in cell.source
        inside = re.findall(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)\n\s*### END", cell.source, re.S)
        if mark(cell).get("solution") and not inside:
            inside = [cell.source]
        lines = [line.strip() for block in inside for line in block.splitlines() if len(line.strip()) > 20]
        assert lines or not (hidden or mark(cell).get("solution")), f"{cell.id}: nothing was looked for"
        for line in lines:
            assert line not in released[cell.id], f"{cell.id}: {line}"


def test_the_releases_are_those_of_the_sources(tmp_path: Path) -> None:
    written = release.write(SETS, tmp_path)
    stored = sorted((ASSIGNMENTS / "release").glob("*/*.ipynb"))
    assert [path.stem for path in stored] == [path.stem for path in written] == SETS
    for path, kept in zip(written, stored):
        assert path.read_bytes() == kept.read_bytes(), f"{path.stem} changed: make release"


# What a set is made of


@each_set
def test_the_points_are_a_hundred_and_those_of_the_table(name: str) -> None:
    there = problem_set(name)
    assert sum(there.points.values()) == 100
    rows = re.findall(r"^\|(.+)\|\s*\**(\d+)\**\s*\|$", there.cells[0].source, re.M)
    total = [int(points) for task, points in rows if "total" in task.lower()]
    assert total in ([], [100])
    shown = [int(points) for task, points in rows if "total" not in task.lower()]
    assert sum(shown) == 100
    owners = [*there.solutions]
    by_task = dict.fromkeys(owners, 0.0)
    for test, points in there.points.items():
        by_task[max((task for task in owners if test.startswith(f"{task}-")), key=len)] += points
    assert shown == list(by_task.values()), "the rows follow the order of the tasks"


@each_set
def test_a_set_names_its_chapters(name: str) -> None:
    text = problem_set(name).cells[0].source
    for file in PARTS[int(name.removeprefix("ps")) - 1]:
        chapter = course.load(ROOT / f"{file}.ipynb")
        title = re.search(r"^# (.+)$", chapter.cells[0].source, re.M)[1]
        number = int(Path(file).name[:2])
        assert re.search(rf"\b{number}\b", text), f"chapter {number} has no number"
        assert title.lower() in text.lower(), f"chapter {number}, {title}, is not named"


@each_set
def test_every_set_begins_alike(name: str) -> None:
    there = problem_set(name)
    repository = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    repository = repository.removeprefix("https://github.com/")
    code = [cell for cell in there.cells if cell.cell_type == "code"]
    number = name.removeprefix("ps")
    assert there.cells[0].source.startswith(f"# Problem set {number}: ")
    assert mark(there.cells[0]).get("locked")
    assert code[0].source == SET_UP.format(repository=repository)
    assert not mark(code[0]), "`make repository` changes this cell, so it must not have a checksum"
    assert code[1] is there.variant_cell
    assert code[1].source.splitlines()[0] == VARIANT_LINE
    assert mark(code[1]).get("locked")
    assert sum("VARIANT = " in cell.source for cell in there.cells) == 1


@each_set
def test_the_hidden_tests_have_a_seed(name: str) -> None:
    hidden = [cell for cell in problem_set(name).cells if "### BEGIN HIDDEN TESTS" in cell.source]
    assert len(hidden) >= 3
    for cell in hidden:
        assert mark(cell)["grade_id"].partition("-hidden")[1], mark(cell)["grade_id"]
        head, _, inside = cell.source.partition("### BEGIN HIDDEN TESTS\n")
        assert re.fullmatch(r"(# .+\n){1,2}", head), f"{mark(cell)['grade_id']}: {head!r}"
        assert inside.splitlines()[0] == HIDDEN_LINE
        assert inside.endswith("### END HIDDEN TESTS")


@each_set
def test_a_set_is_stored_without_traces(name: str) -> None:
    there = problem_set(name)
    assert set(there.notebook.metadata) <= {"kernelspec", "language_info"}
    assert there.notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in there.cells]
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", each) for each in ids)
    for cell in there.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell.id
        assert set(cell.metadata) <= {"nbgrader", "tags"}, cell.id
        if found := mark(cell):
            assert found["schema_version"] == 3, cell.id
    grade_ids = [mark(cell)["grade_id"] for cell in there.cells if mark(cell)]
    assert len(set(grade_ids)) == len(grade_ids)


@each_set
def test_a_set_has_what_a_set_needs(name: str) -> None:
    there = problem_set(name)
    assert "" not in there.tasks, f"tests of no task: {there.tasks.get('')}"
    assert 5 <= len(there.solutions) <= 7
    assert len(there.measurements) == 1
    by_hand = set(there.points) - set(there.tests)
    assert by_hand == {f"{there.measurements[0]}-explanation"}
    rubric = next(cell for cell in there.cells if cell.id == f"{there.measurements[0]}-rubric")
    assert mark(rubric).get("locked")
    criteria = re.findall(r"^\|[^|]+\|(?:[^|\d][^|]*\|)*?\s*(\d+)\s*\|", rubric.source, re.M)
    assert sum(map(int, criteria)) == there.points[f"{there.measurements[0]}-explanation"]
    for task, tests in there.tasks.items():
        assert any("-public" in test for test in tests), task
        assert any("-hidden" in test for test in tests), task


# What the tools refuse


def test_a_seed_makes_one_course_of_its_own(tmp_path: Path) -> None:
    source = problem_set(SETS[0])
    one, other = source.notebook, course.load(source.path)
    private.rewrite(one, SETS[0], "one")
    private.rewrite(other, SETS[0], "other")

    def numbers(notebook) -> list[str]:
        return [
            found
            for cell in notebook.cells
            if cell.cell_type == "code"
            for found in re.findall(r"^(?:VARIANT|HIDDEN) = (\d+)", cell.source, re.M)
        ]

    assert not set(numbers(one)) & {*numbers(other), "0"}
    assert len(set(numbers(one))) == len(numbers(one)), "every hidden test has a seed of its own"
    again = course.load(source.path)
    private.rewrite(again, SETS[0], "one")
    assert again == one


@pytest.mark.parametrize("seed", ["", "  \n"])
def test_no_seed_is_one_clear_line(seed: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["private.py", seed])
    with pytest.raises(SystemExit) as stopped:
        private.main()
    assert stopped.value.code == 2
    assert re.fullmatch(r"SEED is empty[^\n]*\n", capsys.readouterr().err)


def test_a_set_that_does_not_exist_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["private.py", "a seed", "ps99"])
    with pytest.raises(SystemExit) as stopped:
        private.main()
    assert stopped.value.code == 2
    assert re.fullmatch(r"there is no problem set 'ps99'[^\n]*\n", capsys.readouterr().err)


def test_a_private_course_is_whole_or_not_there(tmp_path: Path, monkeypatch) -> None:
    def fails(*_) -> None:
        raise RuntimeError("nbgrader stops here")

    with monkeypatch.context() as patch:
        patch.setattr(release, "generate", fails)
        with pytest.raises(RuntimeError, match="stops here"):
            private.make("a/strange seed", SETS[:1], tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(release, "generate", lambda *_: None)
    folder = private.make("a/strange seed", SETS[:1], tmp_path)
    assert {path.name for path in folder.iterdir()} == {*course.CONFIG, "source"}
    assert re.fullmatch(r"[0-9a-f]{16}", folder.name)
    with pytest.raises(ValueError, match="there already"):
        private.make("a/strange seed", SETS[:1], tmp_path)
    assert private.make("spring.2027", SETS[:1], tmp_path).name == "spring.2027"
