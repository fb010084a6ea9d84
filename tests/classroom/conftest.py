"""What nbgrader grades before the tests look at it, two sets at once: most of the time it waits for kernels."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

N_AT_ONCE = 2  # continuous integration has two cores


@pytest.fixture
def name() -> str:
    """The set that a test looks at, where its parameters name none."""
    return "toy"


@pytest.fixture(scope="session")
def grading(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Everything that the chosen tests look at, on its way; a test module's `grade(name, folder)` does the work."""
    items = [item for item in request.session.items if "graded" in item.fixturenames]
    parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in items]
    jobs = {given.get("name", "toy"): item.module.grade for item, given in zip(items, parameters)}
    folder = tmp_path_factory.mktemp("classroom")
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        yield {name: pool.submit(grade, name, folder) for name, grade in jobs.items()}


@pytest.fixture
def graded(name: str, grading: dict[str, Future]):
    """What `grade` of the test's module returned for its set."""
    return grading[name].result()
