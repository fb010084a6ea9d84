"""The course's configuration grades what breaks, and the classroom's rules see a set that is at fault."""

from pathlib import Path

import course
import pytest
import toy

LOOP = """def double(x):
    while True:
        {body}"""
STUBBORN = """import time


def double(x):
    while True:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass"""
BREAKS = {  # answers to the task `double`
    "endless": LOOP.format(body="pass"),
    "endless-cell": "while True:\n    pass",
    "printing": LOOP.format(body="print('x' * 100_000)"),
    "stubborn": STUBBORN,
    "raises": "raise RuntimeError('no')",
    "exits": "def double(x):\n    raise SystemExit",
    "dies": "import os\n\n\ndef double(x):\n    os._exit(1)",
    "dies-cell": "import os\n\nos._exit(1)",
    "segfault": "import ctypes\n\n\ndef double(x):\n    ctypes.string_at(0)",
}
PACKS = course.packs(toy.WRONG)


def grade(name: str, folder: Path) -> course.Course:
    """A course in which each student breaks the same task in another way."""
    there = course.Course.new(folder / name, toy.write(folder / f"{name}-source"))
    there.nbgrader("generate_assignment", "ps0")
    release = there.release("ps0")
    for student, source in BREAKS.items():
        there.submit(student, "ps0", course.handed_in(release, toy.SOLUTIONS | {"double": source}))
    for number, pack in enumerate(PACKS):
        answers = {toy.WRONG[each]["task"]: toy.WRONG[each]["source"] for each in pack}
        there.submit(f"wrong{number}", "ps0", course.handed_in(release, toy.SOLUTIONS | answers))
    there.submit("deleted", "ps0", course.handed_in(release, toy.SOLUTIONS, drop=("last-public", "last-hidden")))
    eased = course.handed_in(release, toy.SOLUTIONS | {"double": "def double(x):\n    return None"})
    for cell in eased.cells:
        if course.is_test(cell):
            cell.source = "assert True"
    there.submit("eased", "ps0", eased)
    there.nbgrader("autograde", "ps0", "--Execute.timeout=2")
    there.nbgrader("generate_feedback", "ps0")
    return there


FULL = {name: points for name, (points, _) in toy.TESTS.items()}


@pytest.mark.parametrize("student", [*BREAKS, "eased"])
def test_what_breaks_costs_its_own_task_alone(graded: course.Course, student: str) -> None:
    expected = FULL | {"double-public": 0, "double-hidden": 0}
    scores = graded.scores("ps0")[student]
    assert {name: scores[name] for name in expected} == expected


def test_a_deleted_test_comes_back(graded: course.Course) -> None:
    scores = graded.scores("ps0")["deleted"]
    assert {name: scores[name] for name in FULL} == FULL


def test_the_written_answer_waits_for_a_grader(graded: course.Course) -> None:
    scores = graded.scores("ps0")
    assert {each["speed-explanation"] for each in scores.values()} == {0}, "the stub is graded 0, as it was not changed"


def test_the_feedback_says_what_happened(graded: course.Course) -> None:
    feedback = graded.feedback("ps0")
    assert set(feedback) == {*BREAKS, "deleted", "eased", *(f"wrong{number}" for number in range(len(PACKS)))}
    assert "the kernel died at this cell" in feedback["dies"]
    assert "this cell did not stop" in feedback["stubborn"]
    assert "CellTimeoutError" in feedback["endless"]
    assert max(map(len, feedback.values())) < 2e6, "a loop that prints does not fill the page"


@pytest.mark.parametrize("number", range(len(PACKS)))
def test_a_wrong_answer_is_seen_in_its_pack(graded: course.Course, number: int) -> None:
    lost = [test for each in PACKS[number] for test in toy.WRONG[each]["loses"]]
    scores = graded.scores("ps0")[f"wrong{number}"]
    assert {name: scores[name] for name in FULL} == FULL | dict.fromkeys(lost, 0)
