"""An engine in a process of its own answers, and one that ends is told of."""

import functools
import importlib
import operator
import os
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # the other process imports it too
    return importlib.import_module("apart")


def test_the_function_is_made_once_in_another_process(apart: ModuleType) -> None:
    with closing(apart.Apart("a process", functools.partial, os.getpid)) as function:
        numbers = {function(), function()}
    assert numbers == {function.process.pid} and function.process.pid != os.getpid()
    assert function.process.exitcode == 0


def test_arguments_and_results_are_handed_over(apart: ModuleType) -> None:
    with closing(apart.Apart("a sum", functools.partial, operator.add, [1, 2])) as function:
        assert function([3]) == [1, 2, 3]


@pytest.mark.parametrize("make", [False, True])
def test_a_process_that_ends_is_told_of(apart: ModuleType, make: bool) -> None:
    with pytest.raises(SystemExit, match="an engine ended with status 3"):
        if make:
            apart.Apart("an engine", os._exit, 3)
        else:
            apart.Apart("an engine", functools.partial, os._exit)(3)
