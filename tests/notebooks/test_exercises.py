"""The checks of the exercises: the solutions in the dropdowns pass them, what the cells begin with does not."""

import importlib
import json
import pkgutil
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gptlite import notebook
from gptlite.notebook import checks

MODULES = [module.name for module in pkgutil.iter_modules(notebook.__path__) if module.name.startswith("checks")]
CHECKS = {
    name: check
    for module in MODULES
    for name, check in vars(importlib.import_module(f"gptlite.notebook.{module}")).items()
    if name.startswith("check_")
}
CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "chapters").glob("*.ipynb"))


def exercises() -> list[tuple[str, str, str]]:
    """Name of the check, code of the cell that calls it, and the code of the solution after it."""
    found = []
    for path in CHAPTERS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell, after in pairwise(cells):
            if calls := re.findall(r"^(check_\w+)\(", "".join(cell["source"]), re.M):
                solution = re.search(r"```python\n(.*?)^```", "".join(after["source"]), re.M | re.S)
                found.append((calls[0], "".join(cell["source"]), solution[1] if solution else ""))
    return found


@pytest.mark.parametrize(("check", "begun", "solution"), exercises(), ids=[check for check, *_ in exercises()])
def test_the_solution_is_right_and_the_beginning_is_not(capsys, check: str, begun: str, solution: str) -> None:
    name = check.removeprefix("check_")
    for code, expected in ((begun, "not yet: "), (solution, "right\n")):
        space: dict = {"torch": torch}
        exec(compile(code, check, "exec"), space)
        capsys.readouterr()
        CHECKS[check](space[name])
        assert capsys.readouterr().out.startswith(expected)


def test_every_check_is_used() -> None:
    assert {check for check, *_ in exercises()} == set(CHECKS)


def keeps_strictly_more(probs: torch.Tensor, p: float) -> torch.Tensor:
    kept = probs * (probs > p * probs.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)


def over_the_whole_batch(probs: torch.Tensor, p: float) -> torch.Tensor:
    kept = probs * (probs >= p * probs.max())
    return kept / kept.sum(-1, keepdim=True)


def not_normalised(probs: torch.Tensor, p: float) -> torch.Tensor:
    return probs * (probs >= p * probs.amax(-1, keepdim=True))


@pytest.mark.parametrize("wrong", [keeps_strictly_more, over_the_whole_batch, not_normalised])
def test_a_wrong_min_p_gets_a_counterexample(capsys, wrong) -> None:
    checks.check_min_p(wrong)
    said = r"not yet: \[\[.*\]\] with p = [\d.]+ gives \[\[.*\]\], right is \[\[.*\]\]\n"
    assert re.match(said, capsys.readouterr().out)


def test_a_count_for_one_shape_only_gets_a_counterexample(capsys) -> None:
    def formula(config) -> int:
        V, n, d, L = config.vocab_size, config.context_length, config.d_model, config.n_layers
        return (V + n) * d + L * (12 * d**2 + 13 * d) + 2 * d + (d + 1) * V

    checks.check_count_params(formula)
    assert "d_model 48 with 4 heads of 8 gives" in capsys.readouterr().out


def test_an_exception_is_a_counterexample(capsys) -> None:
    checks.check_min_p(lambda probs, p: probs[99])
    assert "raises IndexError" in capsys.readouterr().out


def test_another_type_is_a_counterexample(capsys) -> None:
    checks.check_min_p(lambda probs, p: "text")
    assert "gives a str, right is a tensor [1, 4]" in capsys.readouterr().out


def test_a_large_wrong_tensor_is_told_by_its_first_wrong_number(capsys: pytest.CaptureFixture[str]) -> None:
    right = torch.arange(60.0, dtype=torch.float64).view(6, 10)
    wrong = right.clone()
    wrong[2, 3:] = 0.5
    for answer, said in (
        (right, "right\n"),
        (wrong, "not yet: it gives 0.5 at [2, 3], right is 23.0\n"),
        (right[:5], "not yet: it gives a tensor [5, 10], right is one of [6, 10]\n"),
        (right.tolist(), "not yet: it gives a list, right is a tensor [6, 10]\n"),
    ):
        checks._report(lambda answer=answer: answer, [("it", (), right)])
        assert capsys.readouterr().out == said
