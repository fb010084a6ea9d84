"""The losses of distillation against SciPy and scikit-learn, which know nothing of PyTorch."""

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime
from scipy.special import rel_entr, softmax
from sklearn.metrics.pairwise import cosine_similarity

from gptlite.compress.agreement import agreement
from gptlite.compress.distill import cosine_loss, distillation_loss, mean_teacher, reverse_loss
from gptlite.compress.offline import stored_loss


def rows(seed: int, size: float = 2.0) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal((6, 11))


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0, 20.0])
def test_soft_labels_against_relative_entropy(tau: float) -> None:
    student, teacher = rows(0), rows(1)
    p, q = softmax(teacher / tau, axis=-1), softmax(student / tau, axis=-1)
    right = tau**2 * rel_entr(p, q).sum(-1).mean()
    found = distillation_loss(torch.from_numpy(student), torch.from_numpy(teacher), tau)
    assert found.item() == pytest.approx(right, rel=1e-12)


def test_the_gradient_against_finite_differences() -> None:
    student, teacher, tau = rows(2), rows(3), 3.0

    def loss(flat: np.ndarray) -> float:
        p, q = softmax(teacher / tau, axis=-1), softmax(flat.reshape(6, 11) / tau, axis=-1)
        return tau**2 * rel_entr(p, q).sum(-1).mean()

    z = torch.from_numpy(student.copy()).requires_grad_()
    distillation_loss(z, torch.from_numpy(teacher), tau).backward()
    # forward differences of step 1e-6: their own error is about the step
    assert np.allclose(z.grad.numpy().ravel(), approx_fprime(student.ravel(), loss, 1e-6), atol=2e-6)


def test_the_reverse_divergence_and_the_mean_of_teachers() -> None:
    student, one, two = rows(4), rows(5), rows(6)
    q = softmax(student, axis=-1)
    assert reverse_loss(torch.from_numpy(student), torch.from_numpy(one)).item() == pytest.approx(
        rel_entr(q, softmax(one, axis=-1)).sum(-1).mean(), rel=1e-12
    )
    both = mean_teacher([torch.from_numpy(one), torch.from_numpy(two)], 2.0)
    mean = (softmax(one / 2, axis=-1) + softmax(two / 2, axis=-1)) / 2
    assert np.allclose(both.exp().numpy() ** 0.5, mean, atol=1e-12)


def test_directions_against_scikit_learn() -> None:
    student, teacher = rows(7), rows(8)
    right = 1 - np.diag(cosine_similarity(student, teacher)).mean()
    assert cosine_loss(torch.from_numpy(student), torch.from_numpy(teacher)).item() == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("k", [1, 4, 10, 11])
def test_a_store_of_the_top_k_against_relative_entropy(k: int) -> None:
    student, teacher = rows(9), rows(10)
    p, q = softmax(teacher, axis=-1), softmax(student, axis=-1)
    order = np.argsort(-p, axis=-1)[:, :k]
    top_p, top_q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
    joined = [np.concatenate([top, 1 - top.sum(-1, keepdims=True)], -1) if k < 11 else top for top in (top_p, top_q)]
    logs = torch.from_numpy(np.log(top_p))
    found = stored_loss(torch.from_numpy(student), logs, torch.from_numpy(order))
    assert found.item() == pytest.approx(rel_entr(*joined).sum(-1).mean(), abs=1e-5)  # it is computed in fp32
    without = stored_loss(torch.from_numpy(student), logs, torch.from_numpy(order), tail=False)
    forgotten = rel_entr(top_p / top_p.sum(-1, keepdims=True), top_q).sum(-1).mean()
    assert without.item() == pytest.approx(forgotten, abs=1e-5)


def test_agreement_against_numpy() -> None:
    student, teacher = rows(11), rows(12)
    p, q = softmax(teacher, axis=-1), softmax(student, axis=-1)
    found = agreement(torch.from_numpy(student), torch.from_numpy(teacher))
    assert found.same == (p.argmax(-1) == q.argmax(-1)).mean()
    assert found.divergence == pytest.approx(rel_entr(p, q).sum(-1).mean(), rel=1e-12)
    assert found.overlap == pytest.approx(1 - np.abs(p - q).sum(-1).mean() / 2, rel=1e-12)
