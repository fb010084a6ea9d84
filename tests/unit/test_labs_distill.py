"""The lab on distillation trains two students alike but for what they learn, and stops when it is told to."""

import pytest
import torch
from matplotlib.figure import Figure

from gptlite.data import Corpus
from gptlite.notebook import labs_distill
from gptlite.notebook.checks_distill import check_soft_gradient, check_store_bytes
from gptlite.notebook.labs_distill import CHOICES, DistillLab

TEXT = "ROMEO: but soft, what light through yonder window breaks?\n" * 60


@pytest.fixture(autouse=True)
def small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs_distill, "load_corpus", lambda: Corpus("small", TEXT, TEXT[:1700]))
    monkeypatch.setattr(labs_distill, "WATCHED", 2)


def lab(**settings) -> DistillLab:
    one = DistillLab("cpu")
    for name, value in {"preset": "nano", "steps": 10, "batch": 1, **settings}.items():
        one.inputs[name].value = value
    return one


@pytest.mark.parametrize("loss", CHOICES)
def test_both_students_are_trained_and_shown(loss: str) -> None:
    one = lab(loss=loss).run()
    assert one.state == "done", one.message
    curves = one.recording.data["curves"]
    assert list(curves) == ["text", loss]
    assert curves["text"][0] == curves[loss][0]  # the same weights before the first step
    assert [tokens for tokens, _ in curves["text"]] == [64 * step for step in range(11)]
    assert curves["text"][-1][1] < curves["text"][0][1]
    table = one.rows(one.recording)
    assert [row["Student learns"] for row in table] == ["text", loss]
    assert all(row["Time (s)"] > 0 for row in table)
    axes = Figure().subplots()
    one.draw(axes, one.recording)
    assert len(axes.lines) == 2 and axes.get_xlabel() and axes.get_ylabel()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_curves() -> None:
    one, two = (lab(loss="soft", seed=3).run().recording.data["curves"] for _ in range(2))
    assert one == two
    assert lab(loss="soft", seed=4).run().recording.data["curves"]["text"] != one["text"]


def test_stop_ends_within_a_student() -> None:
    one, steps = lab(steps=320), []
    uptrain = labs_distill.uptrain

    def stops(model, tokens, settings, teacher, parts, watch, on_step, objective):
        def seen(step: int, loss: float) -> None:
            steps.append(step)
            if step == 3:
                one.stop()
            on_step(step, loss)

        return uptrain(model, tokens, settings, teacher, parts, watch, seen, objective)

    labs_distill.uptrain, kept = stops, uptrain
    try:
        one.run()
    finally:
        labs_distill.uptrain = kept
    assert (one.state, steps) == ("stopped", [1, 2, 3])


def test_more_windows_need_more_memory() -> None:
    small, large = (lab().needed_bytes({"preset": "draft", "batch": batch}) for batch in (1, 32))
    assert small < large


def test_the_checks_know_right_from_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def soft_gradient(student: torch.Tensor, teacher: torch.Tensor, tau: float) -> torch.Tensor:
        return tau * ((student / tau).softmax(-1) - (teacher / tau).softmax(-1)) / len(student)

    check_soft_gradient(soft_gradient)
    check_soft_gradient(lambda student, teacher, tau: soft_gradient(student, teacher, tau) / tau**2)
    check_store_bytes(lambda n, k, V: n * k * (2 + (1 if V <= 256 else 2 if V <= 65_536 else 4)))
    check_store_bytes(lambda n, k, V: n * k * 4)
    said = capsys.readouterr().out.splitlines()
    assert [line == "right" for line in said] == [True, False, True, False]
