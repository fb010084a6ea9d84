"""The charts of the chapter on distillation draw what the models and the recordings say, at every setting."""

import pytest
import torch
from drawn import draw, marks, words

from gptlite.compress.distill import distillation_loss
from gptlite.notebook.explorers_distill import Place, mean_student, recipes_compared, soft_labels, students
from gptlite.record import Recording

CHARS = "\n abcdefghijkl"
V = len(CHARS)


def place(name: str, seed: int, size: float = 4.0) -> Place:
    generator = torch.Generator().manual_seed(seed)
    return Place(name, *(size * torch.randn(V, generator=generator) for _ in range(2)))


PLACES = [place("first", 1), place("second", 2, 9.0)]


def gradient(which: Place, tau: float) -> torch.Tensor:
    student = which.student.double()[None].requires_grad_()
    (grad,) = torch.autograd.grad(distillation_loss(student, which.teacher.double()[None], tau), student)
    return grad[0]


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0, 64.0])
def test_the_lines_are_the_loss_and_the_gradient_of_the_package(i: int, tau: float) -> None:
    said = words(draw(soft_labels(PLACES, CHARS), place=i, tau=tau))
    assert len(said) == 4 and max(map(len, said)) <= 42
    which, numbers = PLACES[i], [float(line.replace(" nats", "").split()[-1]) for line in said]
    loss = distillation_loss(which.student.double()[None], which.teacher.double()[None], tau).item() / tau**2
    grad = gradient(which, tau)
    apart = which.student.double() - which.teacher.double()
    limit = ((apart - apart.mean()) / V).norm().item()
    # shown with two or three digits
    assert numbers[0] == pytest.approx(loss, rel=6e-3)
    assert numbers[1] == pytest.approx(grad.norm().item() / tau**2, rel=6e-2)
    assert numbers[2] == pytest.approx(grad.norm().item(), rel=6e-2)
    assert numbers[3] == pytest.approx(limit, rel=6e-2)
    assert said[0].startswith(f"temperature {tau:.1f}: KL ")


@pytest.mark.parametrize("tau", [0.5, 3.0])
def test_bars_are_the_softened_probabilities_of_the_teacher_s_ten_best(tau: float) -> None:
    scene = draw(soft_labels(PLACES, CHARS), place=1, tau=tau)
    heights = sorted(item["height"] for item in marks(scene, "rect", "layer_0"))
    best = PLACES[1].teacher.argsort(descending=True)[:10]
    right = torch.cat([(z.double() / tau).softmax(-1)[best] for z in (PLACES[1].teacher, PLACES[1].student)])
    # px; logits are stored with three decimals
    assert heights == pytest.approx(sorted((320 * right).tolist()), abs=0.3)


def test_a_space_and_a_line_have_names_and_the_text_names_the_choices() -> None:
    one = soft_labels([Place("here", torch.arange(V).float().flip(0), torch.arange(V).float())], CHARS)
    said = repr(one)
    assert r"here: the teacher's first choice is '\n', the student's 'l'" in said
    scene = str(draw(one))
    assert "space" in scene and "line" in scene


def row(recipe: str, seed: int, loss: float) -> dict:
    return {
        "recipe": recipe, "seed": seed, "steps": 3, "tokens_seen": 9, "loss": loss, "same": loss / 4,
        "divergence": loss / 10, "overlap": loss / 5,
    }  # fmt: skip


RECORDINGS = [
    Recording("distillation", {}, data={"students": [row("soft", 1, 2.0), row("text", 2, 2.6)]}),
    Recording("distillation", {}, data={"students": [row("soft", 3, 2.08), row("text", 1, 2.4), row("new one", 1, 3)]}),
]


def test_students_of_all_recordings_stand_in_one_order() -> None:
    rows = students(RECORDINGS)
    assert [(r["words"], r["seed"]) for r in rows] == [
        ("text alone", 1), ("text alone", 2), ("soft labels", 1), ("soft labels", 3), ("new one", 1)
    ]  # fmt: skip
    again = Recording("distillation", {}, data={"students": [row("soft", 1, 9.0)]})
    assert students([*RECORDINGS, again]) == rows  # a student that two recordings hold counts once, in a mean too
    assert mean_student(rows, "soft") == pytest.approx(2.04)
    assert mean_student(rows, "text", "same") == pytest.approx(2.5 / 4)
    with pytest.raises(ValueError, match="no student of recipe 'mutual'"):
        mean_student(rows, "mutual")


@pytest.mark.parametrize("measure", range(4))
@pytest.mark.parametrize(("seed", "n"), [(0, 5), (1, 3), (2, 1), (3, 1)])
def test_marks_and_means_are_those_of_the_choice(measure: int, seed: int, n: int) -> None:
    scene = draw(recipes_compared(RECORDINGS), measure=measure, seed=seed)
    assert len(marks(scene, "symbol", "layer_0")) == n
    factor = [1, 1 / 10, 100 / 4, 100 / 5][measure]
    losses = {0: [2.5, 2.04, 3], 1: [2.4, 2.0, 3], 2: [2.6], 3: [2.08]}[seed]
    digits = 3 if measure < 2 else 1
    assert sorted(words(scene)) == sorted(f"{factor * loss:.{digits}f}" for loss in losses)


def test_the_text_of_the_comparison_names_each_recipe() -> None:
    said = repr(recipes_compared(RECORDINGS))
    assert "soft labels: loss 2.04, same first choice 51 %" in said
    assert "Seed: one of all, 1, 2, 3; now all" in said
