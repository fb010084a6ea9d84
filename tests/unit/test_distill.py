"""The losses of distillation: by hand, their gradients, and what they do not touch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite.compress.distill import (
    cosine_loss,
    distillation_loss,
    hidden_loss,
    logit_loss,
    mean_teacher,
    reverse_loss,
)
from gptlite.train import loss_of

LOSSES = (distillation_loss, reverse_loss, logit_loss, hidden_loss, cosine_loss)


def logits(seed: int, *shape: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: list[float], tau: float) -> list[float]:
    powers = [math.exp(z / tau) for z in row]
    return [power / sum(powers) for power in powers]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 7.0])
def test_the_loss_is_the_divergence_by_hand(tau: float) -> None:
    """KL(teacher || student), in this order, times the squared temperature, the mean per token; in fp64 to 1e-12."""
    student, teacher = logits(0, 2, 3, 5), logits(1, 2, 3, 5)
    places = [(b, s) for b in range(2) for s in range(3)]
    rows = [(softmax(teacher[b, s].tolist(), tau), softmax(student[b, s].tolist(), tau)) for b, s in places]
    right = tau**2 * sum(kl(p, q) for p, q in rows) / len(places)
    assert distillation_loss(student, teacher, tau).item() == pytest.approx(right, abs=1e-12)
    other = tau**2 * sum(kl(q, p) for p, q in rows) / len(places)
    assert abs(other - right) > 1e-3  # the other direction is another number


def test_the_reverse_loss_by_hand() -> None:
    student, teacher = logits(2, 4, 6), logits(3, 4, 6)
    rows = [(softmax(teacher[i].tolist(), 1), softmax(student[i].tolist(), 1)) for i in range(4)]
    assert reverse_loss(student, teacher).item() == pytest.approx(sum(kl(q, p) for p, q in rows) / 4, abs=1e-12)
    assert torch.autograd.gradcheck(lambda z: reverse_loss(z, teacher), student.requires_grad_())


@pytest.mark.parametrize("tau", [16, 32, 64])
def test_at_a_high_temperature_the_gradient_is_the_centred_difference_over_the_vocabulary(tau: int) -> None:
    """With logits of size 1, within 5 % of its length at temperature 16 and above, and nearer the higher."""
    teacher, student = logits(4, 50, 74), logits(5, 50, 74).requires_grad_()
    distillation_loss(student, teacher, tau).backward()
    centred = [z - z.mean(-1, keepdim=True) for z in (student.detach(), teacher)]
    limit = (centred[0] - centred[1]) / 74 / 50  # the mean over 50 tokens
    assert (student.grad - limit).norm() < min(0.05, 0.8 / tau) * limit.norm()


def test_high_means_high_against_the_logits() -> None:
    """Logits of size 6, as trained models have them, are far from the limit at 16, and need 6 times the temperature."""
    teacher, apart = logits(4, 50, 74, size=6), {}
    for tau in (16, 96):
        student = logits(5, 50, 74, size=6).requires_grad_()
        distillation_loss(student, teacher, tau).backward()
        centred = [z - z.mean(-1, keepdim=True) for z in (student.detach(), teacher)]
        limit = (centred[0] - centred[1]) / 74 / 50
        apart[tau] = ((student.grad - limit).norm() / limit.norm()).item()
    assert apart[16] > 0.2 and apart[96] < 0.05


def test_without_the_squared_temperature_the_gradient_would_fade() -> None:
    teacher, sizes = logits(6, 40, 20), []
    for tau in (8, 16, 32):
        student = logits(7, 40, 20).requires_grad_()
        distillation_loss(student, teacher, tau).backward()
        sizes.append(student.grad.norm().item())
    assert sizes == pytest.approx([sizes[0]] * 3, rel=0.05)
    assert [size / tau**2 for size, tau in zip(sizes, (8, 16, 32), strict=True)] == pytest.approx(
        [sizes[0] / 64, sizes[0] / 256, sizes[0] / 1024], rel=0.05
    )


def test_the_logit_loss_is_the_limit_and_ignores_a_constant() -> None:
    student, teacher = logits(8, 3, 4, 9), logits(9, 3, 4, 9)
    # the difference to the limit falls as 1 / temperature: 1e-4 is what 1e4 leaves, with room
    assert logit_loss(student, teacher).item() == pytest.approx(
        distillation_loss(student, teacher, 1e4).item(), rel=1e-3
    )
    moved = student + logits(10, 3, 4, 1, size=100)
    assert logit_loss(moved, teacher).item() == pytest.approx(logit_loss(student, teacher).item(), rel=1e-9)
    assert logit_loss(teacher, teacher).item() == 0
    by_hand = sum(((student - student.mean(-1, True)) - (teacher - teacher.mean(-1, True))).flatten() ** 2) / 2 / 108
    assert logit_loss(student, teacher).item() == pytest.approx(by_hand.item(), abs=1e-12)


def test_hidden_states_by_hand() -> None:
    teacher = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)
    student = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    # mean square 1/4; the teacher's mean is (2, 4), so its variance is (1 + 4 + 1 + 4) / 4
    assert hidden_loss(student, teacher).item() == pytest.approx(0.25 / 2.5)
    mean = teacher.mean(0).expand(2, 2)
    assert hidden_loss(mean, teacher).item() == pytest.approx(1)
    assert hidden_loss(1000 * student, 1000 * teacher).item() == pytest.approx(0.25 / 2.5)  # no unit
    cosines = (1 + (3 * 3 + 6 * 5) / math.sqrt(45 * 34)) / 2
    assert cosine_loss(student, teacher).item() == pytest.approx(1 - cosines)
    assert cosine_loss(7 * student, teacher).item() == pytest.approx(1 - cosines)  # lengths do not count
    assert cosine_loss(-teacher, teacher).item() == pytest.approx(2)
    assert torch.isfinite(hidden_loss(student, torch.ones(2, 2)))  # a teacher that never varies
    assert torch.isfinite(hidden_loss(100 * student.float(), torch.ones(2, 2)))  # in fp32 too, where 1e38 ends
    assert torch.isfinite(cosine_loss(torch.zeros(2, 2), teacher.float()))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_reaches_the_teacher(loss) -> None:
    student, teacher = (logits(i, 2, 3, 5).requires_grad_() for i in (11, 12))
    loss(student, teacher).backward()
    assert student.grad.abs().sum() > 0
    assert teacher.grad is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 2, 7)])
def test_a_loss_is_a_mean_per_token_whatever_the_shape(loss, shape) -> None:
    student, teacher = logits(13, 4, 7), logits(14, 4, 7)
    if shape == (7,):
        student, teacher = student[:1], teacher[:1]
    found = loss(student.reshape(shape), teacher.reshape(shape))
    assert found.dim() == 0
    assert found.item() == pytest.approx(loss(student, teacher).item(), abs=1e-12)
    if loss is not hidden_loss or shape != (7,):  # whose unit is the spread over tokens
        assert loss(student.repeat(3, 1), teacher.repeat(3, 1)).item() == pytest.approx(found.item(), abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_computed_in_fp32_from_bf16(loss) -> None:
    student, teacher = logits(15, 6, 40).bfloat16(), logits(16, 6, 40).bfloat16()
    found = loss(student, teacher)
    assert found.dtype == torch.float32
    # fp32 of a few hundred values of size 1
    assert found.item() == pytest.approx(loss(student.double(), teacher.double()).item(), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_shapes_that_differ_are_refused(loss) -> None:
    with pytest.raises(ValueError, match=r"the student has shape \(2, 5\), the teacher \(2, 6\)"):
        loss(torch.zeros(2, 5), torch.zeros(2, 6))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0)])
def test_no_token_is_refused(loss, shape) -> None:
    with pytest.raises(ValueError, match="a loss needs at least one token"):
        loss(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_no_positive_number_is_refused(tau: float) -> None:
    for call in (
        lambda: distillation_loss(torch.zeros(2, 5), torch.zeros(2, 5), tau),
        lambda: mean_teacher([torch.zeros(2, 5)], tau),
    ):
        with pytest.raises(ValueError, match=r"temperature is .*, it must be a positive number"):
            call()


def test_at_temperature_one_it_is_the_loss_that_training_with_a_teacher_uses() -> None:
    student, teacher = logits(17, 2, 3, 5).float(), logits(18, 2, 3, 5).float()
    targets = torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(distillation_loss(student, teacher), loss_of(student, targets, teacher))


@given(st.integers(0, 10_000), st.floats(0.3, 30), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_what_holds_for_all_logits(seed: int, tau: float, V: int) -> None:
    student, teacher = logits(seed, 3, V, size=3), logits(seed + 1, 3, V, size=3)
    found = distillation_loss(student, teacher, tau)
    assert found >= -1e-12
    assert distillation_loss(teacher, teacher, tau).item() == pytest.approx(0, abs=1e-12)
    constants = logits(seed + 2, 3, 1, size=50)
    assert distillation_loss(student + constants, teacher - constants, tau).item() == pytest.approx(
        found.item(), abs=1e-9
    )
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    assert distillation_loss(student[:, order], teacher[:, order], tau).item() == pytest.approx(found.item(), abs=1e-9)
    student.requires_grad_()
    (grad,) = torch.autograd.grad(distillation_loss(student, teacher, tau), student)
    q, p = (student / tau).softmax(-1), (teacher / tau).softmax(-1)
    assert torch.allclose(grad, tau * (q - p) / 3, atol=1e-9)  # tau^2 by hand, over 3 tokens


# -- ensembles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.7, 1.0, 3.0])
def test_an_ensemble_is_the_mean_of_the_softened_distributions(tau: float) -> None:
    several = [logits(seed, 2, 5, 8, size=3) for seed in (20, 21, 22)]
    found = mean_teacher(several, tau)
    mean = sum((z / tau).softmax(-1) for z in several) / 3
    assert torch.allclose((found / tau).softmax(-1), mean, atol=1e-12)
    assert torch.allclose((found / tau).exp(), mean, atol=1e-12)  # already normalised
    assert torch.allclose(mean_teacher(several[::-1], tau), found, atol=1e-12)


def test_an_ensemble_of_one_or_of_the_same_twice_is_that_teacher() -> None:
    one = logits(23, 4, 6)
    student = logits(24, 4, 6)
    for several in ([one], [one, one]):
        found = distillation_loss(student, mean_teacher(several, 2.0), 2.0)
        assert found.item() == pytest.approx(distillation_loss(student, one, 2.0).item(), abs=1e-12)


def test_learning_from_a_mean_is_learning_from_each_up_to_a_constant() -> None:
    """KL to the mean differs from the mean of the KLs by what the student cannot change, so gradients are the same."""
    several, student = [logits(seed, 3, 7) for seed in (25, 26)], logits(27, 3, 7).requires_grad_()
    (one,) = torch.autograd.grad(distillation_loss(student, mean_teacher(several)), student)
    (two,) = torch.autograd.grad(sum(distillation_loss(student, z) for z in several) / 2, student)
    assert torch.allclose(one, two, atol=1e-12)


def test_an_ensemble_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="an ensemble of 0 teachers"):
        mean_teacher([])
    with pytest.raises(ValueError, match=r"shapes \(2, 5\) and \(2, 6\)"):
        mean_teacher([torch.zeros(2, 5), torch.zeros(2, 6)])
